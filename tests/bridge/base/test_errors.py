"""Handlers that go on after an error: in the test mode they raise bugs of this package."""

from collections.abc import Callable

import pytest
import torch

from bridge.base.errors import UnsupportedModule, swallowed
from bridge.base.pytrees import picker


def _raised(call: Callable[[], object]) -> Exception:
    """The error of a call, as seen by a handler in the caller."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - as a handler does
        return error.with_traceback(error.__traceback__.tb_next.tb_next)  # this function and the lambda
    raise AssertionError


class _Odd(list):
    def __len__(self) -> int:
        raise ValueError


def _refuse() -> None:
    raise UnsupportedModule("Net", [])


CASES: dict[str, tuple[Callable[[], object], bool]] = {
    "a bug": (lambda: picker(3), True),
    "a user's error": (lambda: picker(_Odd()), False),
    "torch's": (lambda: torch.nn.functional.linear(torch.ones(2), torch.ones(3)), False),
    "a refusal": (_refuse, False),
}


@pytest.mark.parametrize("mode", ["1", "0"])
@pytest.mark.parametrize("name", list(CASES))
def test_the_test_mode_raises_bugs_alone(name, mode, monkeypatch):
    monkeypatch.setenv("BRIDGE_RAISE", mode)
    call, is_bug = CASES[name]
    error = _raised(call)
    if is_bug and mode == "1":
        with pytest.raises(type(error)):
            swallowed(error)
    else:
        swallowed(error)
