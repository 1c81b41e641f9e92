"""Watch over random generators: forward runs → complaints where it seeds one, or draws from one that is not torch's."""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.distributions import Distribution

from bridge.base.errors import TORCH_DIR, user_line
from bridge.capture.inplace_rules import InPlaceRules
from bridge.capture.tracing import note_change_of_generator
from bridge.guards import Reads, profiled
from bridge.state import moved_generators

__all__ = ["generator_watch"]

# Without setstate: Dynamo puts the generator back whenever it looks at a frame. A state that moves is seen anyway.
_PYTHONS_DRAWS = ("random", "getrandbits", "seed")
_DISTRIBUTIONS = os.path.join(TORCH_DIR, "distributions")
"""Whose code may ask whether arguments are to be checked, a mode of the process."""
_RESEEDING = ("manual_seed", "seed", "set_state", "graphsafe_set_state", "set_offset")


@contextmanager
def generator_watch(rules: InPlaceRules, reads: Reads) -> Iterator[None]:
    """Complains when forward seeds a generator or sets its state, or draws from one that is not torch's.

    Replayed draws would not follow it.

    Nothing of this passes torch's dispatcher, so this listens to the interpreter's calls of C functions: those of
    the user's Python code, not those that a function of torch's makes on tensors (see :mod:`bridge.capture.unwatched`).
    ``reads`` hears the same.
    """

    def listen(frame: FrameType, event: str, called: Any) -> None:
        reads.hear(frame, event, called)
        if event != "c_call":
            if event == "return" and frame.f_code.co_filename.startswith(_DISTRIBUTIONS):
                reads.validates |= _may_validate(frame)
            return
        owner = getattr(called, "__self__", None)
        if isinstance(owner, torch.Generator):
            if called.__name__ in _RESEEDING:
                note_change_of_generator()
                rules.complain(f"torch.Generator.{called.__name__}", "changes a random generator inside forward")
        elif isinstance(owner, random.Random) and called.__name__ in _PYTHONS_DRAWS and not _is_of_no_numbers(frame):
            rules.foreign_draw("random", user_line(traceback.extract_stack()))

    with profiled(listen), moved_generators() as moved:
        yield
    for name in moved:
        rules.foreign_draw(name)
    reads.finish()
    if reads.refused is not None:  # forward has caught it
        raise reads.refused


def _may_validate(frame: FrameType) -> bool:
    """Whether a function of ``torch.distributions`` may have asked if arguments are to be checked, or said so: a method
    of a distribution without a setting of its own."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    is_one = issubclass(type(first), Distribution)
    return code.co_name == "set_default_validate_args" or (is_one and "_validate_args" not in vars(first))


def _is_of_no_numbers(frame: FrameType | None) -> bool:
    """Whether a draw is of a library's own generator, and decides no numbers: the order in which sympy computes, or
    the name of a temporary file."""
    for _ in range(5):
        name = "" if frame is None else frame.f_globals.get("__name__", "")
        if name == "tempfile" or name.startswith("sympy."):
            return True
        frame = frame and frame.f_back
    return False
