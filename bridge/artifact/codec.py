"""Serialization: Python values and tensors ↔ JSON and raw bytes ↔ files with a checksum.

Values: JSON's own, and instances of registered classes ("forms"). A tuple is a JSON list, a dict with string keys an
object; everything else is an object whose ``"is"`` names the form. A value is read back equal and of its type, a float
with its bits, a tensor contiguous and on the host. Only registered classes (:func:`written`, :func:`written_as`) can be
read: nothing in a file is executed or unpickled.

Container, a kind, a key and named parts ↔ bytes:

    16 bytes   magic, with the number of the format
    32 bytes   SHA-256 of everything that follows
     8 bytes   length of the header, little endian
     header    JSON: kind, key, a note for humans, offsets of each part
     data      the parts, one after another

Bytes that are truncated, changed, or of another format, kind or key raise :class:`DamagedError` before any part is
read.

The safetensors format, for other tools: eight bytes with the header's length, the header as JSON (element type, shape
and offsets of each tensor), then the data.

Keys: plain data → SHA-256 of its text. A key covers everything that an artifact depends on, so equal keys mean equal
artifacts.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bridge.base.devices import HOST, device_named, name_of

__all__ = ["DamagedError", "NoFormError", "from_parts", "from_text", "key_of", "read_artifact"]
__all__ += ["read_safetensors", "to_parts", "to_text", "write_artifact", "write_file", "write_safetensors", "written"]
__all__ += ["written_as", "written_like"]


class NoFormError(TypeError):
    """A value that cannot be serialized, or only without its class."""


class DamagedError(ValueError):
    """Bytes that are no artifact, an incomplete one, or not the requested one."""


class _Form(NamedTuple):
    """Serialization of one class: a value ↔ the fields of a JSON object."""

    fields: tuple[str, ...]
    write: Callable[[Any], tuple]
    read: Callable[..., Any] | None


_FORMS: dict[str, _Form] = {}
_NAMES: dict[type, str] = {}

Given = Mapping[str, Callable[..., Any]]
"""Name of a form → constructor from its fields, which overrides the registered one."""


def written_as(
    kind: type, name: str, names: tuple[str, ...], write: Callable[[Any], tuple], read: Callable[..., Any] | None = None
) -> None:
    """Registers the serialization of exactly this class.

    Args:
        names: the fields' names.
        write: a value → its fields.
        read: constructs the value from fields, given by name; ``None``: readers pass a constructor.

    Raises:
        ValueError: another class has the name.
    """
    if name in _FORMS:
        raise ValueError(f"there is a form {name!r} already")
    _FORMS[name] = _Form(names, write, read)
    _NAMES[kind] = name


def written(*classes: type) -> None:
    """Registers dataclasses under their names, with their fields."""
    for kind in classes:
        names = tuple(each.name for each in fields(kind))
        written_as(kind, kind.__name__, names, _getter(names), kind)


def written_like(kind: type, other: type) -> None:
    """Registers that values of exactly this class are written, and read back, as values of class ``other``."""
    _NAMES[kind] = _NAMES[other]


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def to_text(value: Any) -> str:
    """A value → JSON text; equal values have equal texts. ``NoFormError``: a part has no form, or is a tensor."""
    return json.dumps(_plain(value, None), allow_nan=False)


def from_text(text: str | bytes, given: Given | None = None) -> Any:
    """The value of a text from :func:`to_text`; ``ValueError`` for another text."""
    return _value(json.loads(text), given or {}, b"")


_VALUE, _NUMBERS = "value", "numbers"


def to_parts(value: Any) -> dict[str, bytes]:
    """A value, maybe with tensors → parts of an artifact. ``NoFormError``: a part of the value has no form."""
    numbers = bytearray()
    text = json.dumps(_plain(value, numbers), allow_nan=False)
    return {_VALUE: text.encode()} | ({_NUMBERS: bytes(numbers)} if numbers else {})


def from_parts(parts: Mapping[str, bytes]) -> Any:
    """The value of parts from :func:`to_parts`; further parts are ignored. ``ValueError``: there is no value."""
    if _VALUE not in parts:
        raise ValueError(f"wanted the part {_VALUE!r}, got {', '.join(parts)}")
    return _value(json.loads(parts[_VALUE]), {}, parts.get(_NUMBERS, b""))


_PLAIN = frozenset([type(None), bool, int, str])
_NESTED = (list, dict)


def _plain(value: Any, numbers: bytearray | None) -> Any:
    """A value → JSON-compatible data; tensors' elements are appended to ``numbers`` (``None``: tensors are refused)."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple or kind is torch.Size:
        return [_plain(each, numbers) for each in value]
    if kind is float and math.isfinite(value):
        return value
    if kind is dict and "is" not in value and all(type(key) is str for key in value):
        return {key: _plain(each, numbers) for key, each in value.items()}
    name = _NAMES.get(kind)
    if name is not None:
        known = _FORMS[name]
        pairs = zip(known.fields, known.write(value), strict=True)
        return {"is": name, **{key: _plain(each, numbers) for key, each in pairs}}
    if isinstance(value, torch.Tensor) and numbers is not None:
        described = _described(value)
        begin = len(numbers)
        numbers += _numbers(value)
        return {"is": "tensor", **described, "begin": begin}
    if isinstance(value, str):
        return str(value)
    raise NoFormError(f"a value of class {kind.__name__}")


def _value(plain: Any, given: Given, numbers: bytes) -> Any:
    """The inverse of :func:`_plain`; ``ValueError`` for data of an unknown form."""
    if isinstance(plain, list):
        return tuple([_value(each, given, numbers) if type(each) in _NESTED else each for each in plain])
    if not isinstance(plain, dict):
        return plain
    inside = {key: _value(each, given, numbers) for key, each in plain.items()}
    if "is" not in inside:
        return inside
    name = inside.pop("is")
    known = _FORMS.get(name) if type(name) is str else None
    read = given.get(name, known.read) if known is not None else None
    if name == "tensor":
        read = partial(_tensor, numbers)
    elif read is None or inside.keys() != set(known.fields):
        raise ValueError(f"wanted a form that was written, got {name!r} with {', '.join(inside)}")
    try:
        return read(**inside)
    except (TypeError, KeyError) as error:
        raise ValueError(f"wanted a {name} that was written: {error!r}") from error


def _tensor(numbers: bytes, dtype: str, shape: tuple[int, ...], begin: int) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=_DTYPES[dtype], device=HOST)
    return _filled(tensor, numbers[begin : begin + tensor.nbytes])


def _named(kind: type) -> Callable[[str], Any]:
    """A function: name → constant of torch of this class; ``ValueError`` if there is none."""

    def read(value: str) -> Any:
        found = getattr(torch, value, None)
        if not isinstance(found, kind):
            raise ValueError(f"torch has no {kind.__name__} {value!r}")
        return found

    return read


def _items(value: Any) -> tuple:
    return (tuple(value),)


written_as(float, "float", ("value",), lambda value: (repr(value),), lambda value: float(value))
written_as(complex, "complex", ("real", "imag"), attrgetter("real", "imag"), lambda real, imag: complex(real, imag))
written_as(list, "list", ("items",), _items, lambda items: list(items))
written_as(frozenset, "frozenset", ("items",), _items, lambda items: frozenset(items))
written_as(dict, "dict", ("items",), lambda value: (tuple(value.items()),), lambda items: dict(items))
written_as(torch.device, "device", ("value",), lambda value: (name_of(value),), lambda value: device_named(value))
for _kind in (torch.dtype, torch.layout, torch.memory_format):
    written_as(_kind, _kind.__name__, ("value",), lambda value: (str(value).removeprefix("torch."),), _named(_kind))


_DTYPES = {
    "BOOL": torch.bool,
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    "BF16": torch.bfloat16,
}
"""Name in the safetensors format → dtype."""
_TYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def _described(tensor: torch.Tensor) -> dict[str, Any]:
    if tensor.dtype not in _TYPE_NAMES:
        raise NoFormError(f"a tensor of {tensor.dtype}")
    return {"dtype": _TYPE_NAMES[tensor.dtype], "shape": list(tensor.shape)}


def _numbers(tensor: torch.Tensor) -> bytes:
    """A tensor's elements in row-major order, from any device."""
    tensor = tensor.detach().to(HOST).contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""


def _filled(tensor: torch.Tensor, numbers: bytes) -> torch.Tensor:
    """Copies bytes into a contiguous tensor; returns it. ``ValueError`` if the size differs."""
    if len(numbers) != tensor.nbytes:
        raise ValueError(f"wanted {tensor.nbytes} bytes of a tensor, got {len(numbers)}")
    if numbers:
        ctypes.memmove(tensor.data_ptr(), bytes(numbers), tensor.nbytes)
    return tensor


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes tensors of any strides and devices, row-major. ``NoFormError``: the format lacks the dtype."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = _described(tensor) | {"data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(_numbers(tensor))


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, contiguous, on the host.

    Raises:
        ValueError: the file has another format.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        try:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            first = file.tell()
            found = {}
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                file.seek(first + begin)
                tensor = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]], device=HOST)
                found[name] = _filled(tensor, file.read(end - begin))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no file of tensors: {error!r}") from error
    return found


_MAGIC = b"bridge artifact1"
_HEAD = len(_MAGIC) + 32


def write_artifact(kind: str, key: str, parts: Mapping[str, bytes], note: str = "") -> bytes:
    """A kind, a key and parts → the bytes of an artifact; ``note``: a description for listings."""
    places, at = {}, 0
    for name, part in parts.items():
        places[name] = [at, at + len(part)]
        at += len(part)
    header = json.dumps({"kind": kind, "key": key, "note": note, "parts": places}).encode()
    body = b"".join((len(header).to_bytes(8, "little"), header, *parts.values()))
    return _MAGIC + hashlib.sha256(body).digest() + body


def read_artifact(
    content: bytes, kind: str | None = None, key: str | None = None
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """``(header, parts)`` of an artifact's bytes; ``kind``, ``key``: the required ones.

    Raises:
        DamagedError: the bytes are no artifact, are damaged, or have another kind or key.
    """
    if content[: len(_MAGIC)] != _MAGIC:
        raise DamagedError("is no artifact of this format")
    body = memoryview(content)[_HEAD:]
    if hashlib.sha256(body).digest() != content[len(_MAGIC) : _HEAD]:
        raise DamagedError("is damaged: its checksum does not fit")
    begin = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(bytes(body[8:begin]))
    if kind not in (None, header["kind"]) or key not in (None, header["key"]):
        raise DamagedError(f"is another artifact: {header['kind']} {header['key']}")
    return header, {name: bytes(body[begin + first : begin + last]) for name, (first, last) in header["parts"].items()}


def write_file(path: str | os.PathLike, content: bytes) -> None:
    """Writes a file that appears complete or not at all. ``OSError`` if it cannot be written."""
    unfinished = Path(f"{os.fspath(path)}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def key_of(*parts: Any) -> str:
    """Plain data (strings, bytes, numbers, booleans, ``None``, tuples, lists) → its key, 64 hexadecimal digits.

    Values of different types have different keys. ``TypeError`` for another object. Do not pass dicts: JSON converts
    their keys to strings.
    """
    return hashlib.sha256(json.dumps(parts, default=_bytes).encode()).hexdigest()


def _bytes(value: Any) -> dict[str, str]:
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    raise TypeError(f"a key is made of plain data, got {value!r} of {type(value)}")
