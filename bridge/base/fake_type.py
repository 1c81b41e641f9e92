"""The type of fake tensors as code outside of torch asks for it → a class without instances, where that is wanted.

``isinstance(x, torch._subclasses.FakeTensor)`` is one of the ways to ask whether a forward is traced. Where it is to be
traced as eager runs it, the answer is eager's. torch's own code has the class itself, under the same name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from bridge.base.errors import is_user_file
from bridge.base.torch_internals import FakeTensor, find

__all__ = ["fake_type_hidden"]

_MODULE: ModuleType = find("torch._subclasses")


class _NoTensor:
    """What fake tensors are to code that must not know them."""


@contextmanager
def fake_type_hidden(here: Callable[[], bool]) -> Iterator[None]:
    """While active, code outside of torch that runs where ``here()`` holds finds another class under the name."""

    class Answering(type(_MODULE)):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            asked = value is FakeTensor and here() and is_user_file(sys._getframe(1).f_code.co_filename)
            return _NoTensor if asked else value

    before = type(_MODULE)
    _MODULE.__class__ = Answering
    try:
        yield
    finally:
        _MODULE.__class__ = before
