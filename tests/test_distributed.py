"""Several processes: meeting, agreeing and ending in this process, with sockets for the others; decoding in processes of
their own, of four virtual devices each."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

import muse_jax
from muse_jax import distributed, sharding
from muse_jax.distributed import ProcessError

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))  # as where the script is started

import generate

pytestmark = pytest.mark.usefixtures("interrupts_arrive")

ROOT = Path(__file__).resolve().parent.parent
AT_ONCE = 2.0  # a death shows at once; seconds, as the machine may be busy
PROMPT = "Ann has 3 pens. She buys"
VERSIONS = {"jax": jax.__version__, "muse_jax": muse_jax.__version__}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


# --------------------------------------------------------------------------------------------- processes of their own


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Starts two processes, whose command gets the number of each; ends those that still run at the end of the test."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    env |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    env |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # XLA's; it compiles in half the time
    started: list[subprocess.Popen] = []

    def launch(command) -> list[subprocess.Popen]:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        new = [subprocess.Popen([sys.executable, *command(i)], env=env, cwd=ROOT, **pipes) for i in range(2)]
        started.extend(new)
        return new

    yield launch
    kill(started)


def kill(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finish(processes: list[subprocess.Popen], timeout: float = 120) -> list[tuple[str, str, int]]:
    """What they wrote to stdout and stderr, and their exit codes."""
    deadline, results = time.monotonic() + timeout, []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            results.append((out.decode(errors="replace"), errors.decode(), process.returncode))
    finally:
        kill(processes)
    return results


@pytest.fixture(scope="module")
def generate_in_two(launch):
    def start(*arguments: str) -> list[subprocess.Popen]:
        several = ("--devices", "8", "--coordinator", f"localhost:{free_port()}", "--num-processes", "2", "--process-id")
        return launch(lambda i: [str(ROOT / "scripts" / "generate.py"), *several, str(i), *arguments])

    return start


def of_one_process(checkpoint: Path, num_tokens: int) -> tuple[str, list[int]]:
    """The text and the tokens that one process with eight devices writes, without a draft."""
    muse = muse_jax.load(checkpoint, mesh=sharding.make_mesh(8), speculation="off")
    generation = muse.generate(PROMPT, max_new_tokens=num_tokens)
    return "".join(generation), generation.tokens


def test_two_processes_write_what_one_writes(generate_in_two, checkpoint):
    arguments = ("--checkpoint", str(checkpoint), "--prompt", PROMPT, "--max-new-tokens", "6", "--json")
    (out, notes, code), other = finish(generate_in_two(*arguments))
    assert code == 0, notes
    assert other == ("", "", 0)
    text, tokens = of_one_process(checkpoint, 6)
    answer = json.loads(out.splitlines()[-1])
    assert (answer["text"], answer["tokens"], answer["devices"]) == (text, tokens, 8)
    assert out.startswith(text)
    assert "virtual devices" in notes and "6 new tokens" in notes
    assert "Gloo" not in out + notes


def test_two_processes_verify_trees(generate_in_two):
    """Several tokens a step, and the same text."""
    (out, notes, code), other = finish(generate_in_two("--prompt", PROMPT, "--max-new-tokens", "16"))
    assert code == 0, notes
    assert other == ("", "", 0)
    assert out.removesuffix("\n") == of_one_process(generate.BUNDLED, 16)[0].removesuffix("\n")
    steps = re.search(r"tree of 16: \S+ tokens per step over (\d+) steps", notes)
    assert steps and int(steps[1]) < 8


@pytest.mark.parametrize("who, sent", [(0, signal.SIGKILL), (1, signal.SIGINT)], ids=["coordinator killed", "Ctrl-C"])
def test_generate_ends_with_the_other_process(generate_in_two, checkpoint, who, sent):
    processes = generate_in_two("--checkpoint", str(checkpoint), "--prompt", "a", "--max-new-tokens", "500")
    try:
        assert processes[0].stdout.read1(1)  # in the middle of the text
        processes[who].send_signal(sent)
        began = time.monotonic()
        processes[1 - who].wait(timeout=30)
        seconds = time.monotonic() - began
    except BaseException:
        kill(processes)
        raise
    results = finish(processes)
    lines = {
        signal.SIGKILL: "generate.py: lost process 0: it died, or cannot be reached; so process 1 ends",
        signal.SIGINT: "generate.py: process 1 has ended: it was interrupted; so process 0 ends",
    }
    errors, code = results[1 - who][1:]
    assert (code, errors.splitlines()[-1]) == (1, lines[sent])
    assert len(errors.splitlines()) == (1 if who == 0 else 2)  # process 0 also notes that its devices are virtual
    assert results[who][2] == (-signal.SIGKILL if sent == signal.SIGKILL else generate.INTERRUPTED)
    assert seconds < AT_ONCE + (0 if sent == signal.SIGKILL else distributed.GRACE_SECONDS)


WORKER = """
import os, sys
sys.stdout = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # gloo greets on stdout
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from muse_jax import distributed, sharding

process, coordinator, task = int(sys.argv[1]), sys.argv[2], sys.argv[3]
distributed.LOST_SECONDS = 5
group = distributed.initialize(coordinator, 2, process, timeout=30)
jax.config.update("jax_num_cpu_devices", 5)
mesh = distributed.make_mesh(8)
assert [device.process_index for device in mesh.devices] == [0] * 4 + [1] * 4
whole, cut = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("tp",)))
values = np.arange(64, dtype=np.float32).reshape(8, 8)
x = jax.make_array_from_callback((8, 8), cut, lambda index: values[index])
step = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, whole).sum(0)[None, :] * 1e-2 + x, out_shardings=cut)

if task == "work":
    first, second = distributed.put_replicated((np.int32(3), jnp.full((2,), 2.0, jnp.bfloat16)), mesh)
    print(first.dtype, int(first), second.dtype, np.asarray(second).tolist(), second.sharding == whole)
    step = distributed.one_at_a_time(step, mesh)
    for _ in range(100):  # none is waited for here
        x = step(x)
    print(group.exchange({"process": process}))
    group.agree(seed=1, prompt="same")
    try:
        group.agree(seed=1, prompt="mine" if process else "yours")
    except ValueError as error:
        print(type(error).__name__, error)
    group.finish("result")
    group.exit(0)
print("ready", flush=True)
while True:
    x = jax.block_until_ready(step(x))
"""


@pytest.fixture(scope="module")
def work(launch):
    """Runs WORKER's task in two processes; `then` gets them once process 1 has begun. Returns what they wrote, and the seconds
    until both had ended, from when `then` was called."""

    def work(task: str, then=None) -> tuple[list[tuple[str, str, int]], float]:
        coordinator = f"localhost:{free_port()}"
        processes = launch(lambda i: ["-c", WORKER, str(i), coordinator, task])
        began = time.monotonic()
        try:
            if then is not None:
                assert processes[1].stdout.readline() == b"ready\n"
                began = time.monotonic()
                then(processes)
            results = finish(processes, timeout=60)
        finally:
            kill(processes)
        return results, time.monotonic() - began

    return work


def test_values_steps_and_results_of_two_processes(work):
    for out, errors, code in work("work")[0]:
        assert code == 0, errors
        assert out.splitlines() == [
            "int32 3 bfloat16 [2.0, 2.0] True",
            "[{'process': 0}, {'process': 1}]",
            'ValueError the processes disagree about prompt: "yours" in process 0, "mine" in process 1',
        ]


def test_process_that_is_terminated(work):
    """JAX would catch SIGTERM, and go on."""
    ((_, errors, code), other), seconds = work("steps", lambda processes: processes[1].terminate())
    assert (code, other[2]) == (1, -signal.SIGTERM)
    assert "lost process 1: it died, or cannot be reached; so process 0 ends" in errors
    assert seconds < AT_ONCE


def test_process_that_is_stopped(work):
    """Its connection lives, but the runtime misses its heartbeats, and aborts; the process resumes later and finds out."""

    def stop(processes: list[subprocess.Popen]) -> None:
        processes[1].send_signal(signal.SIGSTOP)
        processes[0].wait(timeout=30)
        processes[1].send_signal(signal.SIGCONT)

    ((_, errors, code), (_, other_errors, other_code)), seconds = work("steps", stop)
    assert (code, other_code) == (1, 1)
    assert "JAX's runtime aborted: a process has not answered for 5 s" in errors
    assert "lost process 0" in other_errors
    assert seconds < 5 + 2 * distributed.GRACE_SECONDS + AT_ONCE + 4  # the runtime counts heartbeats every few seconds


# --------------------------------------------------------------------------------------------------- in this process


@pytest.fixture(autouse=True)
def losses(monkeypatch) -> list[str]:
    """The lines with which this process would have ended."""
    lines: list[str] = []

    def lost(group: distributed.Group, line: str, patience: float = 0.0) -> None:
        if not group._ending:
            lines.append(line)

    monkeypatch.setattr(distributed.Group, "_lost", lost)
    return lines


@pytest.fixture
def joined(monkeypatch) -> list:
    """What would be given to JAX."""
    calls: list = []
    monkeypatch.setattr(distributed, "_join", lambda group, address, port: calls.append((address, port)))
    return calls


def start(port: int, process: int, num_processes: int = 2, timeout: float = 0.5, **facts) -> distributed.Group:
    return distributed.initialize(f"localhost:{port}", num_processes, process, timeout=timeout, facts=facts)


class Peer:
    """Another process, as far as the connection goes."""

    def __init__(self, sock: socket.socket):
        self.sock, self.lines = sock, sock.makefile("rb")

    @classmethod
    def connect(cls, port: int) -> "Peer":
        while True:
            try:
                return cls(socket.create_connection(("127.0.0.1", port), timeout=5))
            except ConnectionRefusedError:
                time.sleep(0.01)

    def send(self, **message) -> None:
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict:
        return json.loads(self.lines.readline())

    def close(self) -> None:
        self.lines.close()
        self.sock.close()


def in_thread(function) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_process_0_meets_another(joined):
    port, answers = free_port(), []

    def other() -> None:
        stranger = Peer.connect(port)
        stranger.send(get="/")
        silent = Peer.connect(port)  # says nothing, and delays nobody
        peer = Peer.connect(port)
        peer.send(muse_jax=1, process=1, of=2)
        answers.append(peer.receive())
        peer.send(value={"facts": VERSIONS | {"seed": 3}, "port": None})
        answers.append(peer.receive())
        late = Peer.connect(port)
        late.send(muse_jax=1, process=1, of=2)
        answers.append(late.receive())
        answers.append(peer.receive())
        for each in (stranger, silent, peer, late):
            each.close()

    thread = in_thread(other)
    group = start(port, 0, timeout=5, seed=3)
    while len(answers) < 3:
        time.sleep(0.01)
    group.leave("enough")
    thread.join()
    (address, jax_port), values = joined[0], answers[1]["value"]
    assert address in ("127.0.0.1", "::1")
    assert [value["port"] for value in values] == [jax_port, None]
    assert answers[0] == {"welcome": True}
    assert answers[2:] == [{"refused": "there are two processes of id 1"}, {"left": 0, "reason": "enough"}]


def test_facts_that_differ(joined):
    port = free_port()

    def other() -> None:
        peer = Peer.connect(port)
        peer.send(muse_jax=1, process=1, of=2)
        peer.receive()
        peer.send(value={"facts": VERSIONS | {"seed": 4}, "port": None})
        peer.receive()
        assert "disagree" in peer.receive()["reason"]
        peer.close()

    thread = in_thread(other)
    with pytest.raises(ValueError, match="the processes disagree about seed: 3 in process 0, 4 in process 1"):
        start(port, 0, timeout=5, seed=3)
    thread.join()
    assert not joined


def test_losses_and_departures_are_passed_on(joined, losses):
    port, answers = free_port(), []
    peers: dict[int, Peer] = {}

    def others() -> None:
        for process in (1, 2, 3):
            peers[process] = Peer.connect(port)
            peers[process].send(muse_jax=1, process=process, of=4)
            peers[process].receive()
            peers[process].send(value={"facts": VERSIONS, "port": None})
        for peer in peers.values():
            peer.receive()
        peers[1].send(left=1, reason="it was interrupted")
        answers.extend([peers[2].receive(), peers[3].receive()])
        peers[2].close()
        answers.extend([peers[1].receive(), peers[3].receive()])

    thread = in_thread(others)
    group = start(port, 0, num_processes=4, timeout=5)
    thread.join()
    assert answers[:2] == [{"left": 1, "reason": "it was interrupted"}] * 2
    assert answers[2:] == [{"left": 2, "reason": "its connection broke"}] * 2
    while len(losses) < 2:  # the others are told first
        time.sleep(0.01)
    group.leave("enough")
    peers[1].close()
    peers[3].close()
    assert losses == ["process 1 has ended: it was interrupted", "lost process 2: it died, or cannot be reached"]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("other", "the processes came to different results"),
        (None, "a process is more than 0.5 s behind process 0"),
    ],
)
def test_end_that_is_not_the_same(joined, monkeypatch, result, message):
    monkeypatch.setattr(distributed, "FINISH_SECONDS", 0.5)
    port = free_port()

    def other() -> None:
        peer = Peer.connect(port)
        peer.send(muse_jax=1, process=1, of=2)
        peer.receive()
        peer.send(value={"facts": VERSIONS, "port": None})
        peer.receive()
        if result is not None:
            peer.send(value=result)
        assert peer.receive() == ({"left": 0, "reason": "gone"} if result is None else {"value": ["mine", result]})
        peer.close()

    thread = in_thread(other)
    group = start(port, 0, timeout=5)
    with pytest.raises(ProcessError, match=message):
        group.finish("mine")
    group.leave("gone")  # says nothing where the other process has finished, too
    thread.join()


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        ({"process": 1, "of": 4}, "process 1 was told of 4 processes, process 0 of 3"),
        ({"process": 0, "of": 3}, "there are two processes of id 0"),
        ({"process": 2, "of": 3}, "there are two processes of id 2"),
    ],
)
def test_process_that_does_not_fit(hello, message):
    port, answers = free_port(), []

    def others() -> None:
        peers = [Peer.connect(port), Peer.connect(port)]
        for peer, words in zip(peers, ({"process": 2, "of": 3}, hello), strict=True):
            peer.send(muse_jax=1, **words)
            answers.append(peer.receive())
        answers.append(peers[0].receive())
        for peer in peers:
            peer.close()

    thread = in_thread(others)
    with pytest.raises(ValueError, match=message):
        start(port, 0, num_processes=3, timeout=5)
    thread.join()
    assert answers == [{"welcome": True}, {"refused": message}, {"left": 0, "reason": message}]


def test_refused_by_process_0():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def refuse() -> None:
            peer = Peer(server.accept()[0])
            peer.send(refused="there are two processes of id 1")
            peer.close()

        thread = in_thread(refuse)
        with pytest.raises(ValueError, match="there are two processes of id 1"):
            start(server.getsockname()[1], 1)
        thread.join()


def test_processes_that_do_not_arrive():
    with pytest.raises(ProcessError, match=r"process 1, 2 of 3 did not arrive within 0.5 s"):
        start(free_port(), 0, num_processes=3)
    with pytest.raises(ProcessError, match=r"no process 0 at localhost:\d+ within 0.5 s: Connection refused"):
        start(free_port(), 1)


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-OpenSSH_9.9\r\n"])
def test_something_else_at_the_port(greeting):
    with socket.create_server(("127.0.0.1", 0)) as server:
        sockets: list[socket.socket] = []

        def serve() -> None:
            while len(sockets) < 2:
                sockets.append(server.accept()[0])
                sockets[-1].sendall(greeting)

        thread = in_thread(serve)
        with pytest.raises(ProcessError, match=r"no process 0 at localhost:\d+ within 0.5 s: what listens there is not it"):
            start(server.getsockname()[1], 1)
        while len(sockets) < 2:
            socket.create_connection(server.getsockname()).close()
        thread.join()
        for sock in sockets:
            sock.close()


def test_port_in_use():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(OSError, match=r"^port \d+ cannot be used: Address already in use$"),
    ):
        start(server.getsockname()[1], 0)


@pytest.mark.parametrize("process", [0, 1])
def test_host_that_is_unknown(process):
    with pytest.raises(ValueError, match=r"no\.such\.host\.invalid: no such host"):
        distributed.initialize("no.such.host.invalid:1234", 2, process)


@pytest.mark.parametrize("text", ["", "host", "host:", ":1234", "host:0", "host:65536", "host:12x", "::1:1234", "[::1]"])
def test_addresses_that_are_none(text):
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        distributed.parse_address(text)


def test_addresses():
    assert distributed.parse_address("host.example:1234") == ("host.example", 1234)
    assert distributed.parse_address("[::1]:80") == ("::1", 80)


def test_devices_are_shared_evenly(monkeypatch):
    devices = jax.devices()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "local_devices", lambda process_index: [devices[:3], devices[4:]][process_index])
    assert sharding.make_mesh(4).devices.tolist() == [*devices[:2], *devices[4:6]]
    with pytest.raises(ValueError, match="devices = 8: 4 in each process, but process 0 has 3"):
        sharding.make_mesh(8)
    with pytest.raises(ValueError, match="devices = 1: 2 processes cannot have the same number of them"):
        sharding.make_mesh(1)


def test_everything_that_runs_on_a_mesh_takes_its_turn(checkpoint, monkeypatch):
    """Were it not so, two processes would hang in some runs, not in all."""
    ran, wrapped = [], distributed.one_at_a_time

    def one_at_a_time(function, mesh):
        assert mesh.size == 2 and wrapped(function, mesh) is function  # one process may have several programs in flight
        return lambda *args: ran.append(function.__name__) or function(*args)

    put, shardings = distributed.put_replicated, set()

    def put_replicated(tree, mesh):
        placed = put(tree, mesh)
        shardings.update(leaf.sharding for leaf in jax.tree.leaves(placed))
        return placed

    monkeypatch.setattr(distributed, "one_at_a_time", one_at_a_time)
    monkeypatch.setattr(distributed, "put_replicated", put_replicated)
    muse = muse_jax.load(checkpoint, mesh=sharding.make_mesh(2))
    list(muse.generate("a", max_new_tokens=2))
    muse.logits([[1, 2]])
    assert ran == ["prefill_chunk", "first_token", "decode", "decode", "full_logits"]
    assert shardings == {sharding.replicated(muse.mesh)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--coordinator a:1", "--num-processes, --process-id missing"),
        ("--num-processes 2", "--coordinator, --process-id missing"),
        ("--process-id 0", "--coordinator, --num-processes missing"),
        ("--coordinator a:1 --num-processes 2 --process-id 0", "--num-processes 2: needs --devices, a multiple of it"),
        ("--coordinator a:1 --num-processes 3 --process-id 0 --devices 8", "--num-processes 3: needs --devices, a multiple"),
        ("--coordinator a:1 --num-processes 2 --process-id 2 --devices 8", "--process-id 2: expected 0 to 1"),
        ("--coordinator a:1 --num-processes 2 --process-id -1 --devices 8", "'-1': expected an integer of at least 0"),
        ("--coordinator a:1 --num-processes 0 --process-id 0 --devices 8", "'0': expected an integer above 0"),
        ("--connect-timeout 0", "'0': expected seconds above 0"),
        ("--connect-timeout nan", "'nan': expected seconds above 0"),
    ],
)
def test_arguments_that_do_not_parse(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        generate.main(arguments.split())
    captured = capsys.readouterr()
    assert (error.value.code, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert captured.err.startswith("generate.py: ") and message in captured.err


def test_fingerprints_tell_checkpoints_apart(tmp_path):
    def fingerprint(**files: bytes) -> str:
        for name, content in files.items():
            (tmp_path / name.replace("__", ".")).write_bytes(content)
        return generate.fingerprint(tmp_path)

    first = fingerprint(config__json=b"{}", a__safetensors=b"1234", notes__txt=b"a")
    assert fingerprint(notes__txt=b"b") == first
    assert len({first, fingerprint(config__json=b"{ }"), fingerprint(a__safetensors=b"12345"), fingerprint(b__bin=b"")}) == 4
    assert generate.fingerprint(tmp_path / "nothing") != first
