"""Kept function: a Relax function by the digest of its canonical text, read when something asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autodiff.ir import Function
from bridge.artifact import key_of
from bridge.compile.runtime.plain import canonical_text

__all__ = ["KeptFunction", "digest_of"]


@dataclass(frozen=True)
class KeptFunction:
    """A function of the disk cache.

    Attributes:
        digest: of it, see :func:`digest_of`.
        read: the function in flat form.
    """

    digest: str
    read: Callable[[], Function]


def digest_of(function: Function) -> str:
    """Equal for functions of equal text, in every process. ``ValueError``: see
    :func:`~bridge.compile.runtime.plain.canonical_text`."""
    return key_of(canonical_text([function]))
