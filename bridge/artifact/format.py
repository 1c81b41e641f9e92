"""Artifact file: a kind, a key and named parts ↔ bytes that say whether they are whole.

    16 bytes   magic, with the number of the format
    32 bytes   SHA-256 of everything that follows
     8 bytes   length of the header, little endian
     header    JSON: kind, key, a note for people, where each part lies
     data      the parts, one after another

Parts are texts (JSON) or raw bytes. Nothing in a file is executed or unpickled when it is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["DamagedError", "read_artifact", "write_artifact"]

_MAGIC = b"bridge artifact1"
_HEAD = len(_MAGIC) + 32


class DamagedError(ValueError):
    """Bytes that are no artifact, or not a whole one, or another one than asked for."""


def write_artifact(kind: str, key: str, parts: Mapping[str, bytes], note: str = "") -> bytes:
    """The bytes of an artifact; ``note``: what it is, for people who list artifacts."""
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
    """``(header, parts)`` of an artifact's bytes; ``kind``, ``key``: those that it has to have.

    Raises:
        DamagedError: what is wrong with it.
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
