"""Reads of the validation of distributions: forward runs → whether it asks if ``torch.distributions`` check arguments.

That is a mode of the process, which Dynamo switches off for good. A forward that does not read it is the same function
whatever it is; one whose class names distributions in a method that the call does not run does not depend on it.
"""

from __future__ import annotations

import threading
from typing import Any

from torch.distributions import Distribution

__all__ = ["ValidationReads"]

_NAME = "_validate_args"


class ValidationReads:
    """While active, notes whether this thread reads the mode, from the class or from a distribution without its own.

    Attributes:
        found: whether it was read, or set.
    """

    def __init__(self) -> None:
        self.found = False
        self._thread = threading.get_ident()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """The mode. As an attribute of the class without ``__set__``, it yields to that of an instance."""
        self.found |= threading.get_ident() == self._thread
        return self._value

    def __enter__(self) -> ValidationReads:
        self._value = vars(Distribution).get(_NAME)
        if self._value is not None:
            setattr(Distribution, _NAME, self)
        return self

    def __exit__(self, *_: object) -> None:
        if vars(Distribution).get(_NAME) is self:
            setattr(Distribution, _NAME, self._value)
        elif self._value is not None:  # set meanwhile: by forward, or by another thread, which cannot be told
            self.found = True
