"""The type of fake tensors as code outside of torch asks for it → a class without instances, where that is wanted.

``isinstance(x, torch._subclasses.FakeTensor)`` is one of the ways to ask whether a forward is traced. Where it is to be
traced as eager runs it, the answer is eager's. torch's own code has the class itself, under the same name, except for
``nn.Module.to``.
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

_MODULES: tuple[ModuleType, ...] = find("torch._subclasses"), find("torch._subclasses.fake_tensor")
_CONVERTING = find("torch.nn.modules.module").__file__
"""Where ``module.to()`` goes another way for modules of fake tensors."""


class _NoTensor:
    """What fake tensors are to code that must not know them."""


@contextmanager
def fake_type_hidden(here: Callable[[], bool]) -> Iterator[None]:
    """While active, code outside of torch that runs where ``here()`` holds finds another class under the name."""

    class Answering(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if value is not FakeTensor or not here():
                return value
            file = sys._getframe(1).f_code.co_filename
            return _NoTensor if file == _CONVERTING or is_user_file(file) else value

    before = [type(each) for each in _MODULES]
    for each in _MODULES:
        each.__class__ = Answering
    try:
        yield
    finally:
        for each, kind in zip(_MODULES, before, strict=True):
            each.__class__ = kind
