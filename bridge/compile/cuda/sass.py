"""SASS: a cubin → the GPU's own instructions as text, by NVIDIA's disassembler where there is one."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["disassembled", "disassembler"]

_TOOLS = {"nvdisasm": ("-c",), "cuobjdump": ("-sass",)}
"""Programs of CUDA's toolkit, with what is said before the file's name."""


def disassembler() -> list[str]:
    """The command that disassembles a file; empty where there is none."""
    for tool, options in _TOOLS.items():
        path = shutil.which(tool) or shutil.which(tool, path="/usr/local/cuda/bin")
        if path is not None:
            return [path, *options]
    return []


def disassembled(cubin: bytes) -> str:
    """``RuntimeError`` where there is no disassembler, or it fails."""
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
