"""Compiles libmuse_ffi.so: `python -m ffi.build`. `ffi.library` does it too, when it first needs the library.

A finished build is a folder of the cache, named by a hash of everything that made it:

    libmuse_ffi.so          the library
    kernels.json            registers, spills, shared memory and code size of its kernels
    compile_commands.json   for editors
    build.log               all that CMake and compilers said

MUSE_FFI_CACHE names the cache; without it it is muse_ffi below XDG_CACHE_HOME or ~/.cache.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

SOURCE = Path(__file__).resolve().parent
LIBRARY = "libmuse_ffi.so"
ARCHITECTURES = ("90a", "103a")  # as in CMakeLists.txt
OLDEST_NVCC = (12, 9)  # that knows sm_103a
OLDEST_CMAKE = (3, 24)  # as CMakeLists.txt asks for
_FILES = (LIBRARY, "kernels.json", "compile_commands.json", "build.log")
_FLAG_VARIABLES = ("CXXFLAGS", "CUDAFLAGS", "LDFLAGS", "NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS")  # compilers read them
_LAST_LINES = 25

Progress = Callable[[str], None]


class BuildError(RuntimeError):
    """There is no library, and why."""


# ---- Tools and sources --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tools:
    """What builds the library. nvcc: None for a library without CUDA handlers."""

    cmake: str
    compiler: str
    generator: str
    nvcc: str | None

    @classmethod
    def find(cls, cuda: bool) -> Tools:
        if missing := missing_tools(cuda):
            raise BuildError("; ".join(missing))
        return cls(_find_cmake(), _find_compiler(), _find_generator(), find_nvcc() if cuda else None)


def missing_tools(cuda: bool) -> list[str]:
    """Why these tools cannot build here, one reason an entry."""
    missing = []
    cmake = _find_cmake()
    if cmake is None:
        missing.append("cmake was not found")
    elif cmake_version(cmake) < OLDEST_CMAKE:
        version, oldest = (".".join(map(str, v)) for v in (cmake_version(cmake), OLDEST_CMAKE))
        missing.append(f"{cmake} has version {version}: {oldest} or newer is needed")
    if not _find_compiler():
        missing.append("no C++ compiler was found (CXX, g++, c++)")
    if not _find_generator():
        missing.append("neither ninja nor make was found")
    if cuda:
        nvcc = find_nvcc()
        if nvcc is None:
            missing.append("nvcc was not found (CUDACXX, PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda)")
        elif nvcc_version(nvcc) < OLDEST_NVCC:
            version, oldest = (".".join(map(str, v)) for v in (nvcc_version(nvcc), OLDEST_NVCC))
            missing.append(f"{nvcc} has version {version}: sm_103a needs {oldest} or newer")
    return missing


def _find_cmake() -> str | None:
    return shutil.which("cmake")


def _find_compiler() -> str | None:
    if named := os.environ.get("CXX"):
        return shutil.which(named)
    return shutil.which("g++") or shutil.which("c++")


def _find_generator() -> str | None:
    if shutil.which("ninja"):
        return "Ninja"
    return "Unix Makefiles" if shutil.which("make") else None


def find_nvcc() -> str | None:
    if named := os.environ.get("CUDACXX"):
        return shutil.which(named)
    folders = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    found = [shutil.which("nvcc"), *(shutil.which("nvcc", path=f"{folder}/bin") for folder in folders if folder)]
    return next(filter(None, found), None)


def cmake_version(cmake: str) -> tuple[int, int]:
    version = re.search(r"version (\d+)\.(\d+)", _version_text(cmake))
    if not version:
        raise BuildError(f"{cmake} --version names no version")
    return int(version[1]), int(version[2])


def nvcc_version(nvcc: str) -> tuple[int, int]:
    release = re.search(r"release (\d+)\.(\d+)", _version_text(nvcc))
    if not release:
        raise BuildError(f"{nvcc} --version names no release")
    return int(release[1]), int(release[2])


@functools.cache
def _version_text(tool: str) -> str:
    return subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout


def source_files(source: Path) -> list[Path]:
    return [source / "CMakeLists.txt", *sorted(path for path in (source / "src").rglob("*") if path.is_file())]


def has_cuda_sources(source: Path) -> bool:
    return any((source / "src").glob("*.cu"))


def source_hash(source: Path) -> str:
    """Of names and contents."""
    digest = hashlib.sha256()
    for path in source_files(source):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(source).as_posix()} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()[:16]


def header_api() -> str:
    """The version of XLA's FFI in the headers of this jaxlib, such as 0.3."""
    text = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()
    found = dict(re.findall(r"^#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text, re.MULTILINE))
    return f"{found['MAJOR']}.{found['MINOR']}"


def build_key(source: Path, tools: Tools) -> str:
    """Names a build: sources, which hold the flags, and whatever else the machine code depends on."""
    headers = sorted(Path(jax.ffi.include_dir()).rglob("*.h"))
    parts = [source_hash(source), platform.machine(), *(os.environ.get(name, "") for name in _FLAG_VARIABLES)]
    parts += [hashlib.sha256(header.read_bytes()).hexdigest() for header in headers]
    parts += [_version_text(tools.compiler), _version_text(tools.nvcc) if tools.nvcc else ""]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


# ---- Building -----------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    if named := os.environ.get("MUSE_FFI_CACHE"):
        return Path(named).expanduser().resolve()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "muse_ffi"


def find_or_build(cuda: bool, *, force: bool = False, source: Path | None = None, progress: Progress = lambda _: None) -> Path:
    """The folder of the finished build, which this call makes if the cache lacks it or `force` asks for it.

    Processes that need the same build at a time wait for the first of them.

    Raises:   BuildError if a tool is missing or a compiler fails; it has the last lines and the place of the log.
    """
    source = source or SOURCE
    tools = Tools.find(cuda)
    cache, key = cache_folder(), build_key(source, tools)
    cache.mkdir(parents=True, exist_ok=True)
    entry, failed_log = cache / key, cache / f"{key}.log"
    with _locked(cache / f"{key}.lock", progress):
        if entry.is_dir() and not force:
            return entry
        # The lock is ours, so these are of processes that were killed.
        for stale in cache.glob(f".{key}-*"):
            shutil.rmtree(stale)
        folder = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=cache))
        try:
            try:
                made = _build(source, tools, folder, progress)
            except BuildError:
                os.replace(folder / "build.log", failed_log)
                raise BuildError(
                    f"compiling {LIBRARY} failed; its log is {failed_log} and ends so:\n{_tail(failed_log)}"
                ) from None
            if entry.is_dir():
                os.rename(entry, folder / "replaced")
            os.rename(made, entry)
            failed_log.unlink(missing_ok=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return entry


def _build(source: Path, tools: Tools, folder: Path, progress: Progress) -> Path:
    """Builds in `folder` and gives the folder of what is kept."""
    binary, made = folder / "binary", folder / "made"
    made.mkdir()
    configure = [
        *(tools.cmake, "-S", source, "-B", binary, "-G", tools.generator),
        f"-DCMAKE_CXX_COMPILER={tools.compiler}",
        f"-DMUSE_JAX_INCLUDE={jax.ffi.include_dir()}",
        f"-DMUSE_SOURCES_HASH={source_hash(source)}",
        f"-DMUSE_CUDA={'ON' if tools.nvcc else 'OFF'}",
        *([f"-DCMAKE_CUDA_COMPILER={tools.nvcc}"] if tools.nvcc else []),
    ]
    build = [tools.cmake, "--build", binary, "--parallel", str(len(os.sched_getaffinity(0)))]
    if tools.generator == "Unix Makefiles":
        build += ["--", "--output-sync=target"]  # what ptxas says of a file stays together
    log_path = folder / "build.log"
    with log_path.open("w") as log:
        for command in (configure, build):
            if _run([str(word) for word in command], log, progress):
                raise BuildError
    shutil.copy2(binary / LIBRARY, made)
    shutil.copy2(binary / "compile_commands.json", made)
    os.replace(log_path, made / "build.log")
    kernels = read_kernels(made / LIBRARY, (made / "build.log").read_text())
    (made / "kernels.json").write_text(json.dumps({"kernels": kernels}, indent=2) + "\n")
    return made


def _run(command: list[str], log: Any, progress: Progress) -> int:
    """The exit status. A process group of its own, so that an interruption ends the compilers too."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        for line in process.stdout:
            log.write(line)
            if line.startswith("["):
                progress(line.rstrip())
        return process.wait()
    except BaseException:
        # Not SIGKILL: ninja has compilers in process groups of their own and ends them when it is told to end.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.stdout.read()  # until the last of them is gone
        process.wait()
        raise
    finally:
        process.stdout.close()


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"another process holds {path}: waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])


# ---- Kernels ------------------------------------------------------------------------------------------------------------

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for 'sm_(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_EM_CUDA = 190
_ELF, _ELF_HEADER, _ELF_SECTION = b"\x7fELF\x02\x01", struct.Struct("<16sHHIQQQIHHHHHH"), struct.Struct("<IIQQQQIIQQ")


def read_kernels(library: Path, log: str) -> list[dict[str, Any]]:
    """What is to be known of each kernel of each architecture, in the compiler's order.

    Returns:  arch: such as 90a.  kernel: its symbol.  registers: of a thread.  spill_bytes: of spill stores and loads together.
              smem_bytes: of static shared memory.  code_bytes: of machine code, with functions that were not inlined.
    """
    code = _code_bytes(library.read_bytes())
    kernels: list[dict[str, Any]] = []
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            kernel, arch = entry.groups()
            size = code[int(arch.rstrip("af")), kernel]
            values = {"registers": 0, "spill_bytes": 0, "smem_bytes": 0, "code_bytes": size}
            kernels.append({"arch": arch, "kernel": kernel, **values})
        elif spills := _SPILLS.search(line):
            # ptxas lists functions that it did not inline after all kernels of a file: theirs count for the last of these.
            kernels[-1]["spill_bytes"] += int(spills[1]) + int(spills[2])
        elif registers := _REGISTERS.search(line):
            kernels[-1]["registers"] = int(registers[1])
            kernels[-1]["smem_bytes"] = sum(map(int, _SHARED.findall(line)))
    return kernels


def _code_bytes(data: bytes) -> dict[tuple[int, str], int]:
    """Bytes of the machine code by architecture and function, from the uncompressed cubins inside a library."""
    sizes = {}
    at = 0
    while (at := data.find(_ELF, at + 1)) > 0:
        header = _ELF_HEADER.unpack_from(data, at)
        machine, sections_at, flags, section_size, count, names_at = (header[i] for i in (2, 6, 7, 11, 12, 13))
        if machine != _EM_CUDA:
            continue
        arch = flags >> 8 & 0xFF if data[at + 8] >= 8 else flags & 0xFF  # byte 8: version of the ABI, 8 since CUDA 13
        sections = [_ELF_SECTION.unpack_from(data, at + sections_at + i * section_size) for i in range(count)]
        names = at + sections[names_at][4]
        for name_at, *_, size in (section[:6] for section in sections):
            start = names + name_at
            name = data[start : data.index(b"\0", start)].decode()
            if name.startswith(".text."):
                sizes[arch, name.removeprefix(".text.")] = size
    return sizes


def _table(kernels: list[dict[str, Any]]) -> Iterator[str]:
    names = subprocess.run(["c++filt", *(kernel["kernel"] for kernel in kernels)], capture_output=True, text=True, check=True)
    for kernel, name in zip(kernels, names.stdout.splitlines(), strict=True):
        yield (
            f"sm_{kernel['arch']:<5} {kernel['registers']:>3} registers  {kernel['spill_bytes']:>6} B spilled  "
            f"{kernel['smem_bytes']:>6} B static shared  {kernel['code_bytes'] / 1024:>7.1f} KiB code  {name}"
        )


# ---- Command line -------------------------------------------------------------------------------------------------------


def _use_cuda(asked: str, source: Path) -> tuple[bool, str]:
    """Whether, and why."""
    if asked == "off":
        return False, "not asked for"
    if not has_cuda_sources(source):
        return False, "there are no CUDA sources"
    missing = missing_tools(True)
    if asked == "auto" and missing:
        return False, "; ".join(missing)
    return True, f"{find_nvcc()}, for {', '.join(f'sm_{arch}' for arch in ARCHITECTURES)}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ffi.build", description="Compiles the FFI library of muse_jax.")
    parser.add_argument("--cuda", choices=("auto", "on", "off"), default="auto", help="auto: where nvcc is found")
    parser.add_argument("--force", action="store_true", help="also if the cache has it")
    parser.add_argument("--output", type=Path, metavar="DIR", help="copy the library and what belongs to it there")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON: kernels, library")
    options = parser.parse_args(arguments)
    say = functools.partial(print, flush=True)
    try:
        cuda, why = _use_cuda(options.cuda, SOURCE)
        say(f"{len(source_files(SOURCE))} files of {SOURCE}, XLA FFI {header_api()} of {jax.ffi.include_dir()}")
        say(f"CUDA handlers: {'yes' if cuda else 'no'} ({why})")
        folder = find_or_build(cuda, force=options.force, progress=say)
        if options.output:
            folder = _copy(folder, options.output)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was kept", file=sys.stderr)
        return 130
    kernels = json.loads((folder / "kernels.json").read_text())["kernels"]
    for line in _table(kernels) if kernels else ():
        say(line)
    say(f"library: {folder / LIBRARY}")
    if options.json:
        say(json.dumps({"kernels": kernels, "library": str(folder / LIBRARY)}))
    return 0


def _copy(folder: Path, output: Path) -> Path:
    """Each file appears whole; the library last."""
    output = output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    for name in reversed(_FILES):
        partial = output / f".{name}.{os.getpid()}"
        try:
            shutil.copy2(folder / name, partial)
            os.replace(partial, output / name)
        finally:
            partial.unlink(missing_ok=True)
    return output


if __name__ == "__main__":
    sys.exit(main())
