"""The safetensors format: named tensors ↔ a file; nothing in it is executed when it is read.

Eight bytes with the header's length, the header as JSON (element type, shape and place of each tensor), then the
elements. Other tools read these files, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bridge.compile import bytes_of, form_of, tensor_of

__all__ = ["read_safetensors", "write_safetensors"]


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes tensors, of any strides and devices, densely. ``KeyError`` for an element type that the format lacks."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = form_of(tensor) | {"data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(bytes_of(tensor))


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, dense, on the host.

    Raises:
        ValueError: it is no such file.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        try:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            first = file.tell()
            found = {}
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                file.seek(first + begin)
                found[name] = tensor_of(entry, file.read(end - begin))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no file of tensors: {error!r}") from error
    return found
