"""A saved native form, run by the C++ example."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
import tvm
import tvm_ffi

EXAMPLE = Path(__file__).parents[3] / "examples" / "run_compiled.cc"
COMPILER = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


def printed_by_the_example(library: Path, inputs: Iterable[torch.Tensor], on_a_gpu: bool = False) -> torch.Tensor:
    """The numbers that the example prints for a library and its argument tensors: all results in a row, float32.

    Raises:
        subprocess.CalledProcessError: the example cannot be compiled, or fails.
    """
    packages = [Path(package.__file__).parent for package in (tvm, tvm_ffi)]
    folders = [root / "lib" for root in packages] + (_cuda_runtime() if on_a_gpu else [])
    with tempfile.TemporaryDirectory() as scratch:
        binary = Path(scratch) / "run"
        command = [COMPILER, "-std=c++17", EXAMPLE, "-o", binary, f"-I{packages[1] / 'include'}"]
        command += [f"-L{folder}" for folder in folders] + ["-ltvm_runtime", "-ltvm_ffi"]
        command += ["-Wl,--no-as-needed", "-ltvm_runtime_cuda", "-Wl,--allow-shlib-undefined"] if on_a_gpu else []
        command += [f"-Wl,-rpath,{':'.join(map(str, folders))}", "-Wl,--disable-new-dtags"]
        subprocess.run(list(map(str, command)), check=True)
        given = b"".join(tensor.cpu().numpy().tobytes() for tensor in inputs)
        device = ["cuda"] if on_a_gpu else []
        ran = subprocess.run([binary, library, *device], input=given, stdout=subprocess.PIPE, check=True)
    return torch.tensor([float(line) for line in ran.stdout.split()])


def _cuda_runtime() -> list[Path]:
    """Folders of torch's CUDA wheels that have the CUDA run time."""
    found = importlib.util.find_spec("nvidia")
    roots = [] if found is None else [Path(place) for place in found.submodule_search_locations]
    return sorted({path.parent for root in roots for path in root.glob("**/libcudart.so*")})
