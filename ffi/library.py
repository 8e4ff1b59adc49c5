"""Finds, builds, loads and registers the FFI library.

MUSE_FFI_LIBRARY names a library that was built ahead, by `python -m ffi.build --output DIR`. Without it the library is built on
first use, into the cache of `ffi.build`.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import jax
import jaxlib

# FFI targets, with the library's function for each platform.
HANDLERS = {
    "muse_verify": {"cpu": "MuseVerifyHost", "CUDA": "MuseVerifyCuda"},
    "muse_verify_emulated": {"cpu": "MuseVerifyEmulated"},
}
PLATFORMS = ("cpu", "CUDA")
OLDEST_JAXLIB = (0, 10, 2)

_lock = threading.Lock()
_loaded: dict[str, ctypes.CDLL] = {}


def load(platform: str = "cpu") -> ctypes.CDLL:
    """The library with handlers for a platform, "cpu" or "CUDA", which are registered then.

    Raises:   RuntimeError with every reason why they cannot serve here, or with the end of the compiler's output.
    """
    with _lock:
        if platform not in _loaded:
            if reasons := unavailable(platform):
                raise RuntimeError(f"the {platform} handlers of muse_ffi cannot serve: {'; '.join(reasons)}")
            _loaded[platform] = _load(platform)
        return _loaded[platform]


def prepare(shape: Sequence[int], quantized: bool, devices: Sequence[int]) -> None:
    """Makes what calls on GPUs need besides their operands: memory for exchange, access between GPUs. Once is enough.

    Args:     shape: `VerifyConfig.numbers`.  devices: CUDA's number of the GPU of each rank, all the same where one GPU
              emulates them; in loopback one.
    Raises:   RuntimeError if a GPU refuses.
    """
    numbers, gpus = (ctypes.c_int32 * len(shape))(*shape), (ctypes.c_int32 * len(devices))(*devices)
    message = ctypes.create_string_buffer(512)
    if load("CUDA").muse_ffi_prepare(numbers, int(quantized), gpus, len(devices), message, len(message)):
        raise RuntimeError(f"muse_ffi: {message.value.decode()}")


def unavailable(platform: str) -> list[str]:
    """Every reason why the handlers of a platform cannot serve here; none: they can, unless compiling fails.

    Raises:   ValueError if there is no such platform.
    """
    if platform not in PLATFORMS:
        raise ValueError(f"platform = {platform!r}: allowed are {', '.join(map(repr, PLATFORMS))}")
    cuda = platform == "CUDA"
    reasons = _old_jaxlib()
    if path := _named():
        more, architectures, toolkit = _given(path, cuda)
    else:
        more, architectures, toolkit = _buildable(cuda)
    reasons += more
    return reasons + _gpus(architectures, toolkit) if cuda else reasons


# What is missing of each part: reasons, and of a CUDA library the architectures and the version of the toolkit.
_Findings = tuple[list[str], tuple[str, ...], tuple[int, ...]]


def _old_jaxlib() -> list[str]:
    version = tuple(map(int, re.findall(r"\d+", jaxlib.__version__)[:3]))
    oldest = ".".join(map(str, OLDEST_JAXLIB))
    return [f"jaxlib {jaxlib.__version__} is too old: {oldest} or newer is needed"] if version < OLDEST_JAXLIB else []


def _buildable(cuda: bool) -> _Findings:
    """Of a library that is to be built."""
    from ffi import build  # not above: it is a program too, which must not be imported before it runs

    reasons = build.missing_tools(cuda)
    if cuda and not build.has_cuda_sources(build.SOURCE):
        reasons.append("this package has no CUDA sources")
    nvcc = build.find_nvcc() if cuda else None
    return reasons, build.ARCHITECTURES, build.nvcc_version(nvcc) if nvcc else ()


def _named() -> Path | None:
    """A library of one's own, absolute: the loader would look for a bare name in its own places."""
    named = os.environ.get("MUSE_FFI_LIBRARY")
    return Path(named).expanduser().absolute() if named else None


def _given(path: Path, cuda: bool) -> _Findings:
    """Of the library that MUSE_FFI_LIBRARY names."""
    from ffi import build

    name = f"MUSE_FFI_LIBRARY = {path}"
    if not path.is_file():
        return [f"{name}: there is no such file"], (), ()
    try:
        version = library_version(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        return [f"{name} cannot be loaded: {error}"], (), ()
    reasons = []
    if version["sources"] != (expected := build.source_hash(build.SOURCE)):
        reasons.append(f"{name} was built from other sources ({version['sources']}) than this package has ({expected})")
    if _numbers(version["api"]) > _numbers(api := build.header_api()):
        reasons.append(f"{name} was built for XLA FFI {version['api']}, this jaxlib has {api}")
    if cuda and "cuda" not in version:
        reasons.append(f"{name} holds no CUDA handlers")
    architectures = version.get("architectures", "")
    return reasons, tuple(architectures.split(",")) if architectures else (), _numbers(version.get("cuda", ""))


def _gpus(architectures: tuple[str, ...], toolkit: tuple[int, ...]) -> list[str]:
    """Of this process's GPUs and their driver."""
    driver = _driver_version()
    if driver is None:
        return ["there is no NVIDIA driver (libcuda.so.1)"]
    reasons = []
    if toolkit and driver[0] < toolkit[0]:
        built, has = (".".join(map(str, version[:2])) for version in (toolkit, driver))
        reasons.append(f"the NVIDIA driver is too old: it knows CUDA {has}, the library is built with {built}")
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return [*reasons, "jax finds no NVIDIA GPU"]
    allowed = {f"{arch[:-2]}.{arch[-2]}" for arch in architectures}  # 103a: 10.3
    for found in sorted({device.compute_capability for device in devices} - allowed) if allowed else ():
        names = ", ".join(sorted(allowed, key=_numbers))
        reasons.append(f"a GPU has compute capability {found}: the library has code for {names}")
    return reasons


def _driver_version() -> tuple[int, int] | None:
    """The version of CUDA that the driver knows; None: there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return version.value // 1000, version.value % 1000 // 10


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")) if version else ()


def library_version(library: ctypes.CDLL) -> dict[str, str]:
    """The words of muse_ffi_version: sources and api; architectures and cuda if it has CUDA handlers."""
    function = library.muse_ffi_version
    function.restype = ctypes.c_char_p
    return dict(word.split("=", 1) for word in function().decode().split())


def _load(platform: str) -> ctypes.CDLL:
    from ffi import build

    # A Host library of its own: a test on a CPU need not wait for nvcc.
    path = _named() or build.find_or_build(platform == "CUDA", progress=_say) / build.LIBRARY
    library = ctypes.CDLL(str(path))
    handlers = {target: symbols[platform] for target, symbols in HANDLERS.items() if platform in symbols}
    missing = [symbol for symbol in handlers.values() if not hasattr(library, symbol)]
    if missing:
        raise RuntimeError(f"{path} lacks {', '.join(missing)}")
    for target, symbol in handlers.items():
        handler = jax.ffi.pycapsule(getattr(library, symbol))
        jax.ffi.register_ffi_target(target, handler, platform=platform, api_version=1)
    return library


def _say(line: str) -> None:
    print(f"muse_ffi: {line}", file=sys.stderr, flush=True)
