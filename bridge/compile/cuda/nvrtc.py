"""NVRTC: CUDA C → machine code (a cubin) or PTX for an architecture; a cubin's instructions as text.

By the library of torch's CUDA wheels: no compiler has to be installed, and no GPU or driver is needed. The library is
called by ctypes. Kernels include no CUDA file: the headers that TVM's source includes are given in memory.

Arithmetic is IEEE: products are not contracted, division and square root rounded correctly, denormals kept.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from bridge.artifact import current_store, key_of, made_once
from bridge.base.errors import TORCH_DIR
from bridge.base.lru import LeastRecentlyUsed
from bridge.base.session import SESSION

__all__ = ["OPTIONS", "absent", "compiled", "disassembled", "disassembler", "version", "warm_up"]

_TOOLS = {"nvdisasm": ("-c",), "cuobjdump": ("-sass",)}
"""Programs of CUDA's toolkit, with the options before the file's name."""


def disassembler() -> list[str]:
    """The command that disassembles a file; empty if there is none."""
    for tool, options in _TOOLS.items():
        path = shutil.which(tool) or shutil.which(tool, path="/usr/local/cuda/bin")
        if path is not None:
            return [path, *options]
    return []


def disassembled(cubin: bytes) -> str:
    """A cubin's instructions as text. ``RuntimeError`` without a disassembler, or if it fails."""
    command = disassembler()
    if not command:
        raise RuntimeError(f"SASS wants one of {' and '.join(_TOOLS)} of CUDA's toolkit: none is on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.cubin"
        path.write_bytes(cubin)
        ran = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{command[0]} failed: {ran.stderr.strip()}")
    return ran.stdout


OPTIONS = ("--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false", "--std=c++17", "--disable-warnings")
"""Options of every compilation, besides the architecture."""

_HEADERS = {
    "cuda/std/cstdint": """
namespace cuda { namespace std {
using int8_t = signed char; using uint8_t = unsigned char;
using int16_t = short; using uint16_t = unsigned short;
using int32_t = int; using uint32_t = unsigned int;
using int64_t = long long; using uint64_t = unsigned long long;
} }
""",
    "cuda/std/type_traits": """
namespace cuda { namespace std {
template <class A, class B> struct is_same { static constexpr bool value = false; };
template <class A> struct is_same<A, A> { static constexpr bool value = true; };
template <class A, class B> inline constexpr bool is_same_v = is_same<A, B>::value;
template <class A> struct is_integral;
template <class A> struct is_signed;
template <class A> struct is_unsigned;
template <class A> struct is_floating_point;
template <bool C, class A = void> struct enable_if {};
template <class A> struct enable_if<true, A> { using type = A; };
template <bool C, class A, class B> struct conditional { using type = A; };
template <class A, class B> struct conditional<false, A, B> { using type = B; };
} }
""",
    "math_constants.h": """
#define CUDART_INF_F __int_as_float(0x7f800000)
#define CUDART_NAN_F __int_as_float(0x7fc00000)
#define CUDART_INF __longlong_as_double(0x7ff0000000000000ll)
#define CUDART_NAN __longlong_as_double(0x7ff8000000000000ll)
""",
    "sm_61_intrinsics.h": "",  # for a product of bytes that no kernel of ours has
}
"""In-memory replacements of the headers that TVM's CUDA source includes under NVRTC."""

_LIBRARY = re.compile(r"libnvrtc\.so\.(\d+)")
_KERNEL = re.compile(r"__global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(")
_KEPT, _KEPT_BYTES = 256, 64 * 2**20

_COMPILED: LeastRecentlyUsed[tuple[str, str, str, str], bytes] = SESSION.cache(
    "programs", LeastRecentlyUsed(_KEPT, _KEPT_BYTES)
)


def absent() -> str:
    """Why nothing can be compiled here; empty if NVRTC is there."""
    return "" if _library() is not None else "no NVRTC library: torch's CUDA wheels bring it, so does nvidia-cuda-nvrtc"


@functools.cache
def version() -> str:
    """NVRTC's version, as in ``"13.0"``; ``"none"`` without NVRTC."""
    library = _library()
    if library is None:
        return "none"
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def made_for() -> tuple[str, ...]:
    """The dependencies of machine code besides source and architecture: NVRTC, its options and in-memory headers; the
    paths of CUDA's own headers, which some sources include."""
    return *OPTIONS, *_include_paths(), *_HEADERS.values(), version()


def compiled(source: str, arch: str, form: str = "cubin") -> bytes:
    """CUDA C → ``"cubin"`` or ``"ptx"`` for an architecture such as ``"sm_90"``; cached.

    Raises:
        RuntimeError: no NVRTC, or it rejects the source, with its message and line.
    """
    key = (hashlib.sha256(source.encode()).hexdigest(), arch, form, version())
    found = _COMPILED.get(key)
    if found is None:
        made = _stored_or_compiled(source, arch, form)
        found = _COMPILED.put(key, made, len(made))
    return found


def warm_up(arch: str) -> None:
    """Compiles an empty kernel: NVRTC's first compilation takes several times as long, to load its parts."""
    _compile("__global__ void nothing() {}", arch, "cubin")


def _stored_or_compiled(source: str, arch: str, form: str) -> bytes:
    """The disk cache's result, or a new one."""
    store = current_store()
    key = key_of("nvrtc", source, arch, form, made_for())

    def look() -> bytes | None:
        found = store.get("cuda", key)
        return None if found is None else found.parts[form]

    def make() -> bytes:
        made = _compile(source, arch, form)
        names = ", ".join(_KERNEL.findall(source))
        store.put("cuda", key, {form: made}, f"{form} for {arch}: {names}")
        return made

    return made_once(store, key, look, make)


def _compile(source: str, arch: str, form: str) -> bytes:
    library = _library()
    if library is None:
        raise RuntimeError(absent())
    program = ctypes.c_void_p()
    names = (ctypes.c_char_p * len(_HEADERS))(*(name.encode() for name in _HEADERS))
    texts = (ctypes.c_char_p * len(_HEADERS))(*(text.encode() for text in _HEADERS.values()))
    made = library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernels.cu", len(_HEADERS), texts, names
    )
    _check(library, made)
    try:
        options = [f"--gpu-architecture={arch}", *OPTIONS, *_include_paths()]
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), given):
            log = _text(library, "ProgramLog", program).decode(errors="replace").rstrip("\0\n")
            raise RuntimeError(f"NVRTC {version()} refuses the kernels for {arch}:\n{log}")
        return _text(library, {"cubin": "CUBIN", "ptx": "PTX"}[form], program).rstrip(b"\0" if form == "ptx" else b"")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        raise RuntimeError(f"NVRTC {version()}: {library.nvrtcGetErrorString(status).decode()}")


def _text(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    content = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, content))
    return content.raw


@functools.cache
def _library() -> ctypes.CDLL | None:
    for name in _names():
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    return None


def _names() -> Iterator[str]:
    """Paths and names to try: torch's own CUDA version first, then the newest first."""
    found: dict[str, int] = {}
    for folder in _folders():
        for path in sorted(folder.glob("libnvrtc.so.*")):
            if match := _LIBRARY.fullmatch(path.name):
                found[str(path)] = int(match[1])
    ours = int((torch.version.cuda or "0").split(".")[0])
    yield from sorted(found, key=lambda path: (found[path] != ours, -found[path]))
    yield from (f"libnvrtc.so.{major}" for major in dict.fromkeys((ours, 13, 12)) if major)


@functools.cache
def _include_paths() -> tuple[str, ...]:
    """Include options for an exported forward: for half types, the source that TVM makes includes CUDA's headers."""
    folders = [folder.parent / "include" for folder in _folders()]
    return tuple(f"--include-path={folder}" for folder in folders if (folder / "cuda_fp16.h").exists())


def _folders() -> Iterator[Path]:
    """Folders of NVIDIA's libraries in wheels."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield from sorted(Path(root).glob("*/lib"))
    yield Path(TORCH_DIR) / "lib"
