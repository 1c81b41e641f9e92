"""Generator watch: a run of forward → refusals of seeding and of draws that are not torch's; functions with a cache."""

from __future__ import annotations

import functools
import os
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.distributions import Distribution

from bridge.base.errors import TORCH_DIR, Unsupported, UnsupportedModule, is_own_file, line_of_forward, user_line
from bridge.base.pytrees import tensor_leaves
from bridge.capture.draws import IsolatedRNG
from bridge.capture.inplace_rules import InPlaceRules
from bridge.guards import ABSENT, Reads, audited, in_its_place, profiled
from bridge.state import moved_generators

# Without setstate: Dynamo restores the generator for every frame. A state that moves is found otherwise.
_PYTHONS_DRAWS = ("random", "getrandbits", "seed")
_DISTRIBUTIONS = os.path.join(TORCH_DIR, "distributions")
"""The folder of code that may read whether arguments are to be checked, a mode of the process."""
_RESEEDING = ("manual_seed", "seed", "set_state", "graphsafe_set_state", "set_offset")
_WATCHED = frozenset((*_PYTHONS_DRAWS, *_RESEEDING))
"""Asked first: torch checks a generator's type in Python, which for every call of C took longer than all else here."""


@contextmanager
def generator_watch(rules: InPlaceRules, reads: Reads) -> Iterator[None]:
    """While active, refuses seeding a generator, setting its state, and draws from a generator that is not torch's:
    a compiled call's draws would not follow them.

    None of these calls passes torch's dispatcher. So a profiler listens to the user's calls of C functions; inside of
    torch's functions it pauses (:class:`bridge.capture.draws.unwatched`). ``reads`` gets the same events. At the end,
    torch's generators that were seeded have their state from before.
    """
    seeded: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def listen(frame: FrameType, event: str, called: Any) -> None:
        reads.hear(frame, event, called)
        if event != "c_call":
            if event == "return" and frame.f_code.co_filename.startswith(_DISTRIBUTIONS):
                reads.validates |= _may_validate(frame)
            return
        if (name := called.__name__) not in _WATCHED:
            return
        owner = getattr(called, "__self__", None)
        if isinstance(owner, torch.Generator):
            if name in _RESEEDING and not is_own_file(frame.f_code.co_filename):
                seeded.setdefault(id(owner), (owner, owner.get_state()))  # it is called only after this
                rules.complain(f"torch.Generator.{name}", "changes a random generator inside forward")
        elif isinstance(owner, random.Random) and name in _PYTHONS_DRAWS and not _is_of_no_numbers(frame):
            rules.foreign_draw("random", user_line(traceback.extract_stack()))

    with reads.strangers.lifetimes():
        try:
            with audited(reads.audit), moved_generators() as moved, profiled(listen):
                yield
        finally:
            for generator, state in seeded.values():
                generator.set_state(state)
        for name in moved:
            rules.foreign_draw(name)
        reads.finish()
    if reads.refused is not None:  # forward has caught it
        raise reads.refused


def _may_validate(frame: FrameType) -> bool:
    """Whether a function of ``torch.distributions`` may have read or set the default for checking arguments: a method
    of a distribution without its own setting, or ``set_default_validate_args``."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    is_one = issubclass(type(first), Distribution)
    return code.co_name == "set_default_validate_args" or (is_one and "_validate_args" not in vars(first))


def _is_of_no_numbers(frame: FrameType | None) -> bool:
    """Whether a library draws for its own purpose: sympy's order of computation, the name of a temporary file."""
    for _ in range(5):
        name = "" if frame is None else frame.f_globals.get("__name__", "")
        if name == "tempfile" or name.startswith("sympy."):
            return True
        frame = frame and frame.f_back
    return False


# Cached functions: a function with ``functools.lru_cache`` that forward calls → the function itself, during the runs.
#
# The compiled call computes a result that eager would find in the cache. For a function of plain values the two are
# equal, and the user's cache never holds a run's tensors. Other contents of a cache are refused by name: numbers that
# were drawn once, a tensor that forward writes afterwards, results for a tensor.


_HINT = "keep it in a buffer, or pass it to forward"


class CachedFunctions:
    """Replacements for functions with a cache: during the runs, forward calls the functions themselves."""

    def __init__(self) -> None:
        self._made: list[tuple[str, Callable[[], Any], list[tuple[torch.Tensor, int]]]] = []

    def instead(self, value: Any, kept: Callable[..., Any]) -> Any:
        """The replacement of a function with a cache; ``None`` for other values.

        Args:
            kept: the function and its arguments → the result it keeps (:class:`bridge.guards.watched.CachedResult`).
        """
        if type(value) is not functools._lru_cache_wrapper:
            return None
        name = getattr(value, "__name__", "a function")

        @functools.wraps(value)
        @in_its_place
        def run(*args: Any, **kwargs: Any) -> Any:
            if tensor_leaves((args, kwargs)):
                raise _refused(name, "keeps results by tensors, whose numbers may change")
            found = kept(value, args, kwargs)
            if (result := found.read()) is not ABSENT:
                return result
            result = value.__wrapped__(*args, **kwargs)
            again = functools.partial(value.__wrapped__, *args, **kwargs)
            self._made.append((name, again, [(each, each._version) for each in tensor_leaves(result)]))
            found.made, found.free = result, bool(tensor_leaves(result))
            kept(value, args, kwargs)
            return result

        for each in ("cache_info", "cache_clear", "cache_parameters"):
            setattr(run, each, getattr(value, each))
        return run

    def check(self) -> None:
        """Raises :class:`UnsupportedModule` if a cache would keep drawn numbers or a tensor that forward writes."""
        for name, again, found in self._made:
            if any(tensor._version != version for tensor, version in found):
                raise _refused(name, "keeps a tensor that forward writes")
            with IsolatedRNG() as isolated:
                before = isolated.states()
                again()
                if not all(map(torch.equal, before, isolated.states())):
                    raise _refused(name, "keeps numbers that were drawn at its first call")
        self._made.clear()


def _refused(name: str, reason: str) -> UnsupportedModule:
    where = line_of_forward()
    return UnsupportedModule("", [Unsupported(f"the cache of {name}", where, reason, _HINT)])
