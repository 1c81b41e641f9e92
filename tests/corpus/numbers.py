"""Tensors ↔ plain data for a line of JSON, and the distance between two of them.

Every bit of a tensor is in its digest. A small tensor keeps all its numbers beside it, a large one a sample.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Plain = dict[str, Any]

MOST_KEPT = 512
"""The most elements that are kept completely."""
SAMPLED = 128
"""The approximate number of kept elements of larger tensors, evenly spread."""

TOLERANCES = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 5e-2, "float16": 1e-2}
"""Differences of another order of sums, relative to the largest element, by dtype; complex: of the parts."""

_ROOT = str(Path(__file__).parents[2])
_VARYING = (
    (re.compile(r"0x[0-9a-f]{6,}"), "0x"),
    (re.compile(r"(fuzz/\d+)-[0-9a-f]{1,6}"), r"\1"),  # a hash of text, different in each process
)


def digest(data: bytes) -> str:
    """A short SHA-256 that tells records apart."""
    return hashlib.sha256(data).hexdigest()[:24]


def scrubbed(text: str) -> str:
    """Text without parts that differ between two runs: addresses, hashes, the checkout's path."""
    for pattern, replacement in _VARYING:
        text = pattern.sub(replacement, text)
    return text.replace(_ROOT + "/", "")


def pack_text(text: str) -> Plain:
    """Text with its digest, compressed."""
    data = text.encode()
    return {"sha": digest(data), "text": base64.b85encode(zlib.compress(data, 6)).decode()}


def unpack_text(packed: Plain) -> str:
    return zlib.decompress(base64.b85decode(packed["text"])).decode()


def pack(value: Any) -> Plain:
    """A result of a call: a tensor as its digest and numbers; any other object as text."""
    if not isinstance(value, Tensor):
        return {"is": scrubbed(repr(value))[:500]}
    tensor = value.detach()
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device).copy_(tensor.reshape(-1))
    made: Plain = {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "sha": digest(_bytes(flat)),
    }
    step = 1 if flat.numel() <= MOST_KEPT else math.ceil(flat.numel() / SAMPLED)
    if step > 1:
        made |= {"step": step, "norm": float(flat.double().norm())}
    made["kept"] = base64.b85encode(zlib.compress(_bytes(flat if step == 1 else flat[::step].contiguous()), 1)).decode()
    return made


def _bytes(flat: Tensor) -> bytes:
    return flat.cpu().view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _kept(packed: Plain) -> Tensor:
    dtype = getattr(torch, packed["dtype"])
    dtype = dtype.to_real() if dtype.is_complex else dtype
    data = zlib.decompress(base64.b85decode(packed["kept"]))
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def apart(one: Plain, other: Plain) -> tuple[str, bool] | None:
    """The difference of two packed values, in words, and whether it exceeds another order of sums.

    ``None`` if they are equal in every bit. The measure is the largest difference relative to the largest element of
    ``other``; nan and infinite elements must coincide.
    """
    if one == other or ("sha" in one and one.get("sha") == other.get("sha") and _form(one) == _form(other)):
        return None
    if "sha" not in one or "sha" not in other:
        return f"{_words(one)}, was {_words(other)}", True
    if _form(one) != _form(other):
        return f"{_form(one)}, was {_form(other)}", True
    mine, its = _kept(one), _kept(other)
    if not its.is_floating_point():
        return f"{int((mine != its).sum())} of {its.numel()} {one['dtype']} elements differ", True
    mine, its = mine.double(), its.double()
    if not torch.equal(_kind(mine), _kind(its)):
        return "other elements are nan or infinite", True
    finite = its.isfinite()
    relative = _ratio(_largest((mine - its)[finite]), max(_largest(its[finite]), _root_mean_square(other)))
    if "norm" in other:
        relative = max(relative, _ratio(_finite(one["norm"] - other["norm"]), _finite(other["norm"])))
    limit = TOLERANCES.get(_real_type(other), 0.0)
    return f"{relative:.1e} in {one['dtype']}", not relative <= limit


def _real_type(packed: Plain) -> str:
    """The name of the dtype; of a complex one, the dtype of its parts."""
    dtype = getattr(torch, packed["dtype"])
    return str(dtype.to_real() if dtype.is_complex else dtype).removeprefix("torch.")


def _form(packed: Plain) -> str:
    return f"{packed['dtype']}{packed['shape']}"


def _words(packed: Plain) -> str:
    return packed.get("is") or _form(packed)


def _finite(value: float) -> float:
    return abs(value) if math.isfinite(value) else 0.0


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _ratio(difference: float, scale: float) -> float:
    return difference / scale if scale else (math.inf if difference else 0.0)


def _root_mean_square(packed: Plain) -> float:
    """Root mean square of a tensor with only some elements kept, a lower bound of its largest element."""
    return _finite(packed["norm"]) / math.sqrt(math.prod(packed["shape"])) if "norm" in packed else 0.0


def _kind(values: Tensor) -> Tensor:
    """1 and -1 for infinities, 2 for nan, 0 for the rest."""
    return values.isinf() * values.sign().nan_to_num() + 2 * values.isnan()
