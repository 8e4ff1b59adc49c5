"""The library is compiled once, found again, and what goes wrong is said. Sources are small ones of the tests' own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from ffi import build, library

ROOT = Path(__file__).resolve().parents[2]
needs_tools = pytest.mark.skipif(bool(build.missing_tools(False)), reason="; ".join(build.missing_tools(False)))
needs_nvcc = pytest.mark.skipif(bool(build.missing_tools(True)), reason="; ".join(build.missing_tools(True)))

HOST_HANDLER = """
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error twice(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  for (size_t i = 0; i < x.element_count(); ++i) y->typed_data()[i] = 2 * x.typed_data()[i];
  return ffi::Error::Success();
}

int helper() { return 0; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(MuseVerifyHost, twice,
                              ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(MuseVerifyEmulated, twice,
                              ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
"""

# 64 values of each thread live across a barrier and have 32 registers.
KERNELS = """
#include <cuda_runtime.h>

__global__ void __maxnreg__(32) spilling(float* x) {
  float values[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) values[i] = x[threadIdx.x + 128 * i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) x[threadIdx.x + 64 * i] = values[i] * values[(i + 7) % 64];
}

__device__ __noinline__ float called(float x) { return x * x; }

__global__ void reversing(float* x) {
  __shared__ float values[256];
  values[threadIdx.x] = called(x[threadIdx.x]);
  __syncthreads();
  x[threadIdx.x] = values[255 - threadIdx.x];
}

extern "C" int muse_ffi_launch(float* x) {
  spilling<<<1, 128>>>(x);
  reversing<<<1, 256>>>(x);
  return static_cast<int>(cudaGetLastError());
}
"""


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    """Sources with a Host handler that doubles numbers; the cache is empty."""
    source = tmp_path / "ffi"
    (source / "src").mkdir(parents=True)
    shutil.copy(build.SOURCE / "CMakeLists.txt", source)
    shutil.copy(build.SOURCE / "src" / "version.cc", source / "src")
    (source / "src" / "handlers.cc").write_text(HOST_HANDLER)
    monkeypatch.setenv("MUSE_FFI_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MUSE_FFI_LIBRARY", raising=False)
    monkeypatch.setattr(build, "SOURCE", source)
    return source


def entries(tmp_path: Path) -> list[str]:
    """What the cache holds besides locks."""
    return sorted(path.name for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock")


def python(code: str, **kwargs) -> subprocess.Popen:
    """Runs code after an import of what it needs; the environment says where sources and cache are."""
    head = "import sys; from pathlib import Path; from ffi import build, library; build.SOURCE = Path(sys.argv[1]);"
    words = [sys.executable, "-W", "error", "-c", head + code, str(build.SOURCE)]
    return subprocess.Popen(
        words, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, text=True, stdout=-1, stderr=subprocess.PIPE, **kwargs
    )


# ---- The Host library ---------------------------------------------------------------------------------------------------

LOAD_AND_CALL = """
import jax, jax.numpy as jnp
assert library.load() is library.load()
x = jnp.arange(4, dtype=jnp.float32)
print(jax.jit(lambda x: jax.ffi.ffi_call("muse_verify", jax.ShapeDtypeStruct(x.shape, x.dtype))(x))(x).tolist())
"""


@needs_tools
def test_processes_build_once_and_load(source, tmp_path):
    running = [python(LOAD_AND_CALL) for _ in range(3)]
    results = [process.communicate(timeout=120) for process in running]
    assert [out for out, _ in results] == ["[0.0, 2.0, 4.0, 6.0]\n"] * 3, results
    assert sum("Linking" in err for _, err in results) == 1, results
    key = build.build_key(source, build.Tools.find(False))
    assert entries(tmp_path) == [key]
    assert sorted(path.name for path in (tmp_path / "cache" / key).iterdir()) == sorted(build._FILES)
    assert "Linking" not in python(LOAD_AND_CALL).communicate(timeout=60)[1]


@needs_tools
def test_the_cache_is_used_until_something_changes(source, tmp_path):
    lines: list[str] = []
    folder = build.find_or_build(False, progress=lines.append)
    assert lines
    made = (folder / build.LIBRARY).stat().st_mtime_ns
    lines.clear()
    assert build.find_or_build(False, progress=lines.append) == folder and not lines
    assert build.find_or_build(False, force=True, progress=lines.append) == folder and lines
    assert (folder / build.LIBRARY).stat().st_mtime_ns > made
    (source / "src" / "handlers.cc").write_text(HOST_HANDLER + "// changed\n")
    other = build.find_or_build(False)
    assert other != folder and len(entries(tmp_path)) == 2
    words = {
        name: library.library_version(library.ctypes.CDLL(str(x / build.LIBRARY))) for name, x in (("a", folder), ("b", other))
    }
    assert words["b"] == {"sources": build.source_hash(source), "api": build.header_api()}
    assert words["a"]["sources"] != words["b"]["sources"]


def test_what_a_key_depends_on(source, monkeypatch):
    tools = build.Tools("cmake", "g++", "Ninja", None)
    monkeypatch.setattr(build, "_version_text", lambda tool: f"{tool} 1")
    keys = [build.build_key(source, tools)]
    assert build.build_key(source, tools) == keys[0]
    keys.append(build.build_key(source, build.Tools("cmake", "g++", "Ninja", "nvcc")))
    monkeypatch.setattr(build, "_version_text", lambda tool: f"{tool} 2")
    keys.append(build.build_key(source, build.Tools("cmake", "g++", "Ninja", "nvcc")))
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    keys.append(build.build_key(source, build.Tools("cmake", "g++", "Ninja", "nvcc")))
    (source / "src" / "phases").mkdir()
    (source / "src" / "phases" / "new.cuh").write_text("")
    keys.append(build.build_key(source, tools))
    (source / "src" / "phases" / "new.cuh").rename(source / "src" / "new.cuh")
    keys.append(build.build_key(source, tools))
    headers = source / "include"
    shutil.copytree(jax.ffi.include_dir(), headers)
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(headers))
    assert build.build_key(source, tools) == keys[-1]
    (headers / "xla" / "ffi" / "api" / "c_api.h").write_text("")
    keys.append(build.build_key(source, tools))
    assert len(set(keys)) == len(keys)


@needs_tools
def test_only_handlers_are_exported(source):
    path = build.find_or_build(False) / build.LIBRARY
    symbols = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    assert {line.split()[-1] for line in symbols.splitlines()} == {"MuseVerifyHost", "MuseVerifyEmulated", "muse_ffi_version"}


@needs_tools
def test_broken_sources(source, tmp_path):
    (source / "src" / "handlers.cc").write_text(HOST_HANDLER + "\nint broken = no_such_name;\n")
    with pytest.raises(build.BuildError, match="no_such_name") as error:
        build.find_or_build(False)
    (log,) = entries(tmp_path)
    assert str(tmp_path / "cache" / log) in str(error.value) and log.endswith(".log")
    assert "no_such_name" in (tmp_path / "cache" / log).read_text()
    (source / "src" / "handlers.cc").write_text(HOST_HANDLER)
    build.find_or_build(False)
    (source / "CMakeLists.txt").write_text("message(FATAL_ERROR [[no such project]])\n")
    with pytest.raises(build.BuildError, match="no such project"):
        build.find_or_build(False)


@needs_tools
def test_an_interrupted_build_leaves_nothing(source, tmp_path, interrupts_arrive):
    started, ended = tmp_path / "started", tmp_path / "ended"
    text = (source / "CMakeLists.txt").read_text()
    slow = f"add_custom_target(slow ALL COMMAND touch {started} COMMAND sleep 3 COMMAND touch {ended})\n"
    (source / "CMakeLists.txt").write_text(text + slow)
    process = python("build.find_or_build(False)")
    deadline = time.monotonic() + 60
    while not started.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    key = build.build_key(source, build.Tools.find(False))
    (partial,) = entries(tmp_path)
    assert partial.startswith(f".{key}-")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in err and process.returncode
    assert entries(tmp_path) == []
    # What a killed process leaves goes when the next one builds.
    (tmp_path / "cache" / partial).mkdir()
    time.sleep(3)
    assert not ended.exists()  # what CMake had started is gone too
    build.find_or_build(False)
    assert entries(tmp_path) == [key]


# ---- Command line -------------------------------------------------------------------------------------------------------


@needs_tools
def test_command_line(source, tmp_path, capsys):
    output = tmp_path / "out"
    assert build.main(["--json", "--cuda", "off", "--output", str(output)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert any("Building" in line for line in lines)
    assert json.loads(last) == {"kernels": [], "library": str(output / build.LIBRARY)}
    assert sorted(path.name for path in output.iterdir()) == sorted(build._FILES)
    commands = json.loads((output / "compile_commands.json").read_text())
    assert {Path(command["file"]).name for command in commands} == {"handlers.cc", "version.cc"}
    # There are no CUDA sources.
    assert build.main(["--cuda", "auto"]) == 0
    assert "CUDA handlers: no (there are no CUDA sources)" in capsys.readouterr().out


def test_missing_tools(source, tmp_path, monkeypatch, capsys):
    for name in ("CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name, path=None: None)
    assert build.main(["--cuda", "off"]) == 1
    error = capsys.readouterr().err
    for tool in ("cmake was not found", "no C++ compiler was found", "neither ninja nor make was found"):
        assert tool in error
    assert "nvcc" not in error
    (source / "src" / "kernels.cu").write_text(KERNELS)
    assert build._use_cuda("auto", source) == (False, "; ".join(build.missing_tools(True)))
    assert build.main(["--cuda", "on"]) == 1
    assert "nvcc was not found" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_old_nvcc(source, monkeypatch):
    monkeypatch.setattr(build, "find_nvcc", lambda: "/opt/nvcc")
    real = build._version_text
    text = "Cuda compilation tools, release 12.8, V12.8.93\n"
    monkeypatch.setattr(build, "_version_text", lambda tool: text if tool == "/opt/nvcc" else real(tool))
    assert "/opt/nvcc has version 12.8: sm_103a needs 12.9 or newer" in build.missing_tools(True)


def test_the_module_is_a_program():
    """Nothing imports it before it runs, which Python would warn of."""
    command = [sys.executable, "-W", "error", "-m", "ffi.build", "--help"]
    assert "--json" in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


# ---- CUDA ---------------------------------------------------------------------------------------------------------------


@needs_nvcc
def test_cuda_kernels(source, capsys):
    (source / "src" / "kernels.cu").write_text(KERNELS)
    assert build.main(["--json", "--cuda", "on"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    kernels = {(kernel["arch"], kernel["kernel"]): kernel for kernel in result["kernels"]}
    assert set(kernels) == {(arch, name) for arch in ("90a", "103a") for name in ("_Z8spillingPf", "_Z9reversingPf")}
    for arch in ("90a", "103a"):
        spilling, reversing = kernels[arch, "_Z8spillingPf"], kernels[arch, "_Z9reversingPf"]
        assert spilling["registers"] == 32 and spilling["spill_bytes"] > 64 and spilling["smem_bytes"] == 0
        assert 0 < reversing["registers"] < 32 and reversing["spill_bytes"] == 0 and reversing["smem_bytes"] == 1024
        assert 128 <= reversing["code_bytes"] < spilling["code_bytes"] < 1 << 16
    assert any("spilling(float*)" in line for line in lines)
    path = Path(result["library"])
    version = library.library_version(loaded := library.ctypes.CDLL(str(path)))
    assert version["architectures"] == "90a,103a" and version["cuda"].startswith(
        ".".join(map(str, build.nvcc_version(build.find_nvcc())))
    )
    # The library needs neither driver nor CUDA runtime to load; a launch without a GPU is an error, not a crash.
    needed = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    assert "libcuda" not in needed
    if library._driver_version() is None:
        assert loaded.muse_ffi_launch(None) != 0
    assert build.find_or_build(True) == path.parent != build.find_or_build(False)


@needs_nvcc
@pytest.mark.parametrize("arch", build.ARCHITECTURES)
def test_the_megakernel_fits_an_instruction_cache(arch):
    """All phases go by within a layer: code beyond 128 KiB, or a spill in a loop over weights, would be paid for in each."""
    kernels = json.loads((build.find_or_build(True) / "kernels.json").read_text())["kernels"]
    (kernel,) = (kernel for kernel in kernels if kernel["arch"] == arch and "17decode_megakernelE" in kernel["kernel"])
    assert kernel["spill_bytes"] == 0
    assert 0 < kernel["code_bytes"] <= 131072


@needs_nvcc
def test_broken_kernels(source, tmp_path):
    (source / "src" / "kernels.cu").write_text(KERNELS + "__global__ void broken() { no_such_name(); }\n")
    with pytest.raises(build.BuildError, match="no_such_name"):
        build.find_or_build(True)
    assert [Path(name).suffix for name in entries(tmp_path)] == [".log"]


# ---- Reasons ------------------------------------------------------------------------------------------------------------


def test_unknown_platform():
    with pytest.raises(ValueError, match="platform = 'gpu': allowed are 'cpu', 'CUDA'"):
        library.unavailable("gpu")


def test_every_reason_is_listed(source, monkeypatch):
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    monkeypatch.setattr(build, "_find_cmake", lambda: None)
    monkeypatch.setattr(library, "_driver_version", lambda: None)
    monkeypatch.setattr(library.jaxlib, "__version__", "0.10.1")
    parts = (
        "jaxlib 0.10.1 is too old: 0.10.2",
        "cmake was not found",
        "nvcc was not found",
        "no CUDA sources",
        "no NVIDIA driver",
    )
    reasons = library.unavailable("CUDA")
    assert len(reasons) == len(parts) and all(part in reason for part, reason in zip(parts, reasons, strict=True))
    with pytest.raises(RuntimeError, match=".*".join(parts)):
        library.load("CUDA")
    reasons = library.unavailable("cpu")
    assert len(reasons) == 2


def test_an_old_cmake(source, tmp_path, monkeypatch):
    cmake = tmp_path / "cmake"
    cmake.write_text("#!/bin/sh\necho cmake version 3.22.1\n")
    cmake.chmod(0o755)
    monkeypatch.setattr(build, "_find_cmake", lambda: str(cmake))
    assert f"{cmake} has version 3.22: 3.24 or newer is needed" in library.unavailable("cpu")
    listed = (build.SOURCE / "CMakeLists.txt").read_text()
    assert "cmake_minimum_required(VERSION {}.{})".format(*build.OLDEST_CMAKE) in listed


def test_unfit_gpus_and_drivers(monkeypatch):
    def gpus(driver, toolkit, *capabilities):
        monkeypatch.setattr(library, "_driver_version", lambda: driver)
        devices = [SimpleNamespace(compute_capability=capability) for capability in capabilities]
        monkeypatch.setattr(library.jax, "local_devices", lambda backend: devices)
        return library._gpus(("90a", "103a"), toolkit)

    assert gpus((13, 0), (13, 0), "9.0", "9.0") == gpus((13, 2), (13, 0), "10.3") == gpus((13, 0), (12, 9), "9.0") == []
    assert gpus((13, 0), (13, 0), "8.0", "9.0", "8.0") == [
        "a GPU has compute capability 8.0: the library has code for 9.0, 10.3"
    ]
    old = "the NVIDIA driver is too old: it knows CUDA 12.8, the library is built with 13.0"
    assert gpus((12, 8), (13, 0, 88), "9.0") == [old]


@needs_tools
def test_a_library_built_ahead(source, tmp_path, monkeypatch):
    def reasons(path: Path, platform: str = "cpu") -> list[str]:
        monkeypatch.setenv("MUSE_FFI_LIBRARY", str(path))
        return library.unavailable(platform)

    assert reasons(tmp_path / "none.so") == [f"MUSE_FFI_LIBRARY = {tmp_path / 'none.so'}: there is no such file"]
    (tmp_path / "text.so").write_text("no library")
    assert "text.so cannot be loaded" in reasons(tmp_path / "text.so")[0]
    assert build.main(["--cuda", "off", "--output", str(tmp_path / "out")]) == 0
    path = tmp_path / "out" / build.LIBRARY
    assert reasons(path) == []
    monkeypatch.chdir(path.parent)
    assert reasons(Path(build.LIBRARY)) == []
    monkeypatch.setenv("HOME", str(path.parent))
    assert reasons(Path("~") / build.LIBRARY) == []
    assert any("holds no CUDA handlers" in reason for reason in reasons(path, "CUDA"))
    monkeypatch.setattr(build, "header_api", lambda: "0.2")
    assert "was built for XLA FFI" in reasons(path)[0]
    monkeypatch.undo()
    monkeypatch.setattr(build, "SOURCE", source)
    (source / "src" / "version.cc").write_text("")
    assert "was built from other sources" in reasons(path)[0]
    # It is loaded, whatever the cache could have.
    out, err = python("library._given = lambda *_: ([], (), ()); print(library.load()._name)").communicate(timeout=60)
    assert out.strip() == str(path), err
