"""Several processes, each with a part of the devices: how they meet, agree, and end together.

`jax.distributed` joins the devices. It does not notice processes that were started with different arguments, which then wait
for each other for ever; and where one process dies, the others wait inside a collective, or abort with a page of stack trace.
So every process also keeps a connection to process 0, at the coordinator's address, of one JSON object a line:

    process i                                  process 0
    {"muse_jax": 1, "process": i, "of": n}     answers {"welcome": true}, or {"refused": why}
    {"value": mine}                            waits for all of them, then sends everybody {"value": [...]}
    {"left": i, "reason": why}                 sends it on to the others

The kernel closes the connections of a process that dies, whatever killed it. In each of the others a thread waits for that;
it writes one line and ends its process, whose main thread may be waiting for the dead one inside XLA.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from muse_jax import sharding

CONNECT_SECONDS = 60.0
LOST_SECONDS = 30  # until a machine that has gone, or a process that is stopped, counts as lost; a death shows at once
GRACE_SECONDS = 2.0  # for a process to end by itself after another one did, as both may have met the same error
FINISH_SECONDS = 60.0  # between the first process that has finished and the last
_LOST = 1  # exit code
_PROTOCOL = 1
_REPLY_SECONDS = 10.0  # for what a process answers at once
_MAX_LINE = 1 << 20


class ProcessError(RuntimeError):
    """Another process did not come, or did not come to the end."""


class _Link:
    """A connection to another process."""

    def __init__(self, sock: socket.socket, process: int) -> None:
        self.sock, self.process = sock, process
        self.values: queue.SimpleQueue = queue.SimpleQueue()
        self.broken = threading.Event()
        self._lines = sock.makefile("rb")
        self._sending = threading.Lock()
        # Where the other machine has gone there is nobody to close the connection.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPALIVE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, option):  # the second is macOS's name of the first
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_SECONDS)

    def send(self, **message: Any) -> None:
        """Whether the connection still works is for the thread that reads from it to say."""
        with self._sending, contextlib.suppress(OSError):
            self.sock.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._lines.close()
            self.sock.close()

    def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """The next message; an empty one if the connection broke or something else came. It may be used again after a
        timeout only to send."""
        try:
            self.sock.settimeout(timeout)
            line = self._lines.readline(_MAX_LINE)
            message = json.loads(line)
        except (OSError, ValueError):
            return {}
        return message if isinstance(message, dict) else {}


class Group:
    """The processes of a run as one of them sees them, made by `initialize`. Its methods are for the main thread."""

    def __init__(self, num_processes: int, process_id: int, report: Callable[[str], None]) -> None:
        self.num_processes, self.process_id = num_processes, process_id
        self._report = report
        self._links: dict[int, _Link] = {}  # process 0 has one to every other process, these have one to process 0
        self._changed = threading.Condition()  # of the links and the next two
        self._misfit: str | None = None  # what is wrong with a process that arrived
        self._complete = False
        self._end = threading.Lock()  # whoever gets it ends this process, and nobody else says why
        self._ending = False  # the main thread has it

    def exchange(self, value: Any, timeout: float | None = None) -> list[Any]:
        """The values of all processes, in their order. All must call it.

        Args:     value: what JSON can express.  timeout: in seconds; None: as long as the others live.
        Raises:   ProcessError after `timeout`.
        """
        values = self._gather(value, timeout)
        if self.process_id == 0:
            self._tell_all(value=values)
        return values

    def agree(self, **facts: Any) -> None:
        """Raises a ValueError, the same in all processes, if a fact differs between them. All must call it."""
        _compare(self.exchange(facts))

    def finish(self, result: Any) -> None:
        """Ends the common work: after this the others may be gone. All must call it.

        Raises:   ProcessError if the processes have different results, or one does not come to the end.
        """
        results = self._gather(result, FINISH_SECONDS)
        self._begin_end()  # before the others know, who then close their connections
        if self.process_id == 0:
            self._tell_all(value=results)
        if any(other != result for other in results):
            raise ProcessError("the processes came to different results: do they have the same weights and the same devices?")

    def leave(self, reason: str, patience: float = 0.0) -> None:
        """Tells the others that this process is about to end, unless the common work has ended.

        Args:     patience: seconds to wait first: a lost process may be the cause, of which this one should tell.
        """
        if self._ending:
            return
        time.sleep(patience)
        self._begin_end()
        self._tell_all(left=self.process_id, reason=reason)

    def exit(self, exit_code: int) -> NoReturn:
        """Ends this process after `finish` or `leave`, without JAX's own clean-up, which waits for the other processes."""
        if self.process_id == 0 and exit_code == 0:  # the others' runtimes abort without the coordinator
            deadline = time.monotonic() + _REPLY_SECONDS
            for link in self._links.values():
                link.broken.wait(max(0.0, deadline - time.monotonic()))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(exit_code)

    # ------------------------------------------------------------------------------------------------------- arrival

    def listen(self, listener: socket.socket, timeout: float) -> None:
        """Process 0: waits until all others have arrived; from then on refuses whoever comes."""
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._misfit or len(self._links) == self.num_processes - 1, timeout)
            self._complete = True
        if self._misfit:
            raise ValueError(self._misfit)
        missing = [str(i) for i in range(1, self.num_processes) if i not in self._links]
        if missing:
            raise ProcessError(f"process {', '.join(missing)} of {self.num_processes} did not arrive within {timeout:g} s")

    def connect(self, host: str, port: int, timeout: float) -> str:
        """Other processes: connects to process 0. Returns its numeric address."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                left = max(0.1, min(_REPLY_SECONDS, deadline - time.monotonic()))
                link = _Link(socket.create_connection((host, port), timeout=left), 0)
                link.send(muse_jax=_PROTOCOL, process=self.process_id, of=self.num_processes)
                answer = link.receive(left)
                if answer.get("welcome"):
                    break
                link.close()
                if "refused" in answer:
                    raise ValueError(str(answer["refused"]))
                problem = "what listens there is not it"  # or not yet: Linux connects a port that is free to itself
            except (socket.gaierror, UnicodeError):
                raise ValueError(f"{host}: no such host") from None
            except OSError as error:
                problem = error.strerror or str(error)
            if time.monotonic() > deadline:
                raise ProcessError(f"no process 0 at {host}:{port} within {timeout:g} s: {problem}")
            time.sleep(0.1)
        self._links[0] = link
        threading.Thread(target=self._watch, args=(link,), daemon=True).start()
        return link.sock.getpeername()[0]

    def _accept(self, listener: socket.socket) -> None:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=self._welcome, args=(sock,), daemon=True).start()

    def _welcome(self, sock: socket.socket) -> None:
        """A thread of its own: whoever connects and says nothing must not delay the others."""
        link = _Link(sock, -1)
        hello = link.receive(_REPLY_SECONDS)
        process, num_processes = hello.get("process"), hello.get("of")
        if hello.get("muse_jax") != _PROTOCOL or type(process) is not int or type(num_processes) is not int:
            link.close()  # a stranger
            return
        with self._changed:
            misfit = None
            if num_processes != self.num_processes:
                misfit = f"process {process} was told of {num_processes} processes, process 0 of {self.num_processes}"
            elif process in self._links or not 0 < process < num_processes:
                misfit = f"there are two processes of id {process}"
            elif self._complete:
                misfit = f"process {process} came too late"
            else:
                link.process = process
                link.send(welcome=True)
                self._links[process] = link
            if misfit and not self._complete:
                self._misfit = misfit
            self._changed.notify()
        if misfit:
            link.send(refused=misfit)
            link.close()
        else:
            self._watch(link)

    # --------------------------------------------------------------------------------------------------- after arrival

    def _gather(self, value: Any, timeout: float | None) -> list[Any]:
        """The values of all processes; the others have them once process 0 has told them."""
        deadline = None if timeout is None else time.monotonic() + timeout
        received = []
        if self.process_id != 0:
            self._links[0].send(value=value)
        for _, link in sorted(self._links.items()):
            try:
                received.append(link.values.get(timeout=deadline and max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                raise ProcessError(f"a process is more than {timeout:g} s behind process {self.process_id}") from None
        return [value, *received] if self.process_id == 0 else received[0]

    def _tell_all(self, *, but: int | None = None, **message: Any) -> None:
        for link in list(self._links.values()):
            if link.process != but:
                link.send(**message)

    def _watch(self, link: _Link) -> None:
        """Receives as long as the connection lives, and ends this process with it."""
        while message := link.receive():
            if "value" in message:
                link.values.put(message["value"])
            elif "left" in message:
                process, reason = message["left"], message.get("reason")
                if self.process_id == 0:
                    self._tell_all(but=link.process, **message)
                self._lost(f"process {process} has ended: {reason}", GRACE_SECONDS)
        link.broken.set()
        link.close()
        if self.process_id == 0:
            self._tell_all(but=link.process, left=link.process, reason="its connection broke")
        self._lost(f"lost process {link.process}: it died, or cannot be reached")

    def _lost(self, line: str, patience: float = 0.0) -> None:
        time.sleep(patience)
        if self._end.acquire(blocking=False):
            self._report(f"{line}; so process {self.process_id} ends")
            os._exit(_LOST)

    def _begin_end(self) -> None:
        if not self._ending:
            self._end.acquire()  # for ever, if another thread is ending this process
            self._ending = True

    def _aborted(self, signum: int) -> None:
        """In place of SIGABRT, in the thread of JAX's runtime that raised it, most likely because another process is gone."""
        time.sleep(GRACE_SECONDS + 1)  # whoever watches that process knows more
        self._lost(f"JAX's runtime aborted: a process has not answered for {LOST_SECONDS} s, or there is an error in it")
        while True:
            time.sleep(1)  # the main thread is ending the process


def initialize(
    coordinator: str,
    num_processes: int,
    process_id: int,
    *,
    timeout: float = CONNECT_SECONDS,
    facts: dict[str, Any] | None = None,
    report: Callable[[str], None] | None = None,
) -> Group:
    """Joins the devices of several processes; `jax.devices()` then has all of them. Before anything that uses a device.

    Each process must run the same JAX programs in the same order, and end by `Group.finish` or `leave`, and `exit`. If one ends
    otherwise, or is lost, the others write a line with `report` and exit with code 1: at once when it dies, GRACE_SECONDS after
    `leave`, LOST_SECONDS after its machine or network failed.

    Args:
      coordinator: HOST:PORT of process 0, which listens there; the others try for `timeout` seconds to reach it, and it waits
        as long for them. Further ports are chosen by process 0, JAX and its collectives.
      num_processes, process_id: how many there are, and which of them this is, from 0.
      facts: what must be the same in all processes (versions of JAX and of this package are compared in any case).
      report: writes a line; None: to stderr.
    Raises:   ValueError or OSError with one line for bad arguments, a port in use, or facts that differ; ProcessError if a
              process does not arrive. The others then end, too.
    """
    from muse_jax import __version__

    host, port = parse_address(coordinator)
    if num_processes < 1 or not 0 <= process_id < num_processes:
        raise ValueError(f"process_id = {process_id}: expected 0 to num_processes - 1 = {num_processes - 1}")
    group = Group(num_processes, process_id, report or (lambda line: print(line, file=sys.stderr, flush=True)))
    try:
        if process_id == 0:
            listener = _listener(host, port)
            group.listen(listener, timeout)
            address = listener.getsockname()[0]
        else:
            address = group.connect(host, port, timeout)
        versions = {"jax": jax.__version__, "muse_jax": __version__}
        mine = {"facts": versions | (facts or {}), "port": _free_port(address) if process_id == 0 else None}
        # Process 0 waits for the last one at most as long as this one would have waited for process 0.
        every = group.exchange(mine, timeout + _REPLY_SECONDS)
        _compare([one["facts"] for one in every])
        _join(group, address, every[0]["port"])
    except BaseException as error:
        group.leave(" ".join(str(error).split()) or "it was interrupted")
        raise
    return group


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, an IPv6 address in brackets. Raises ValueError."""
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not (host and port.isascii() and port.isdecimal() and 0 < int(port) < 65536 and (bracketed or ":" not in host)):
        raise ValueError(f"coordinator = {text!r}: expected HOST:PORT, for example 10.0.0.1:1234")
    return host[1:-1] if bracketed else host, int(port)


def make_mesh(num_devices: int) -> Mesh:
    """`sharding.make_mesh`, whose devices then are connected. All processes must call it.

    That is, a collective is run: gloo gives the first one 30 s, and later one process may take longer to load, or to compile.

    Raises:   ValueError as `sharding.make_mesh`; ProcessError if the devices cannot be connected.
    """
    try:
        mesh = sharding.make_mesh(num_devices)
        value = jax.make_array_from_callback((mesh.size,), NamedSharding(mesh, PartitionSpec(sharding.AXIS)), _ones)
        jax.block_until_ready(jax.jit(jnp.sum, out_shardings=sharding.replicated(mesh))(value))
    except RuntimeError as error:
        raise ProcessError(f"the devices cannot be connected: {_unknown_name() or str(error).splitlines()[0][:300]}") from None
    return mesh


def one_at_a_time(function: Callable, mesh: Mesh | None) -> Callable:
    """`function`, which returns when its result is there if `mesh` has CPUs of several processes.

    There, several programs in flight hang: 200 that each gather do on jax 0.10.2, with and without
    jax_cpu_enable_async_dispatch; not on 0.12.
    """
    if mesh is None or not mesh.is_multi_process or mesh.devices.flat[0].platform != "cpu":
        return function
    return lambda *args: jax.block_until_ready(function(*args))


def put_replicated(tree: Any, mesh: Mesh) -> Any:
    """Host values, the same in every process, on all devices; `jax.device_put` would compare them by a collective."""
    where = sharding.replicated(mesh)

    def put(leaf: Any) -> jax.Array:
        value = np.asarray(leaf)
        return jax.make_array_from_callback(value.shape, where, lambda index: value[index], dtype=value.dtype)

    return jax.tree.map(put, tree)


def _unknown_name() -> str | None:
    """Why gloo, which looks up the address of its machine's name, cannot have worked."""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except (socket.gaierror, UnicodeError):
        return f"the name of this machine, {socket.gethostname()}, has no address (see /etc/hosts)"
    return None


def _ones(index: tuple[slice, ...]) -> np.ndarray:
    return np.ones(1, np.float32)


def _compare(every: Sequence[dict[str, Any]]) -> None:
    """Raises ValueError if a fact differs."""
    first = every[0]
    for process, other in enumerate(every):
        for name in first.keys() | other.keys():
            mine, yours = json.dumps(first.get(name)), json.dumps(other.get(name))
            if mine != yours:
                raise ValueError(
                    f"the processes disagree about {name}: {mine[:80]} in process 0, {yours[:80]} in process {process}"
                )


def _listener(host: str, port: int) -> socket.socket:
    """Listens on this machine alone if that is what the host's name says, else on all of its addresses, as JAX does: names
    often stand for addresses that the machine itself does not have."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError):
        raise ValueError(f"{host}: no such host") from None
    local = host == "localhost" or address[0] in ("127.0.0.1", "::1")
    dual = not local and socket.has_dualstack_ipv6()
    where = address[0] if local else "::" if dual else "0.0.0.0"
    family = family if local else socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server((where, port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise OSError(f"port {port} cannot be used: {os.strerror(error.errno)}") from None


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        return server.getsockname()[1]


def _join(group: Group, address: str, port: int) -> None:
    """Joins JAX's runtimes, process 0's at an address and port."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, and the process go on
    _replace_abort(group)
    bind = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    try:
        jax.distributed.initialize(
            bind.replace("[::]", "[::1]").replace("0.0.0.0", "127.0.0.1"),  # what process 0 listens on is no address to reach
            group.num_processes,
            group.process_id,
            cluster_detection_method="deactivate",  # it would choose devices where it finds a scheduler
            initialization_timeout=LOST_SECONDS,
            heartbeat_timeout_seconds=LOST_SECONDS,
            coordinator_bind_address=bind,
        )
    except RuntimeError as error:
        raise ProcessError(f"JAX could not join the processes: {str(error).splitlines()[0][:300]}") from None


def _replace_abort(group: Group) -> None:
    """JAX's runtime aborts when it misses process 0. Python's own handlers would not run in the runtime's threads."""
    global _abort_handler  # C keeps no reference
    _abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(group._aborted)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(_abort_handler, ctypes.c_void_p))


_abort_handler: Any = None
