"""Algorithm variants of convolutions: torch's numbers, refused for unsupported arguments, compiled where chosen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, stats
from bridge.artifact import from_text, to_text
from bridge.compile import CALLS, NO_CHOICES, CompileOptions, backend_for, products_and_calls
from bridge.dispatch import TimedStep, with_choices
from bridge.library import FORMS, FUNCTIONS
from bridge.state import SampleCall

BACKWARD_INPUT, BACKWARD_WEIGHT = "convolution_backward_input", "convolution_backward_weight"

CASES = {  # x, weight, stride, padding, dilation, groups
    "plain": ((2, 6, 9, 8), (4, 6, 3, 3), [1, 1], [1, 1], [1, 1], 1),
    "one pixel": ((2, 6, 5, 7), (4, 6, 1, 1), [1, 1], [0, 0], [1, 1], 1),
    "stride, dilation": ((2, 3, 11, 10), (4, 3, 3, 2), [2, 3], [2, 1], [2, 1], 1),
    "depthwise": ((2, 6, 9, 8), (6, 1, 3, 3), [1, 1], [1, 1], [1, 1], 6),
    "groups": ((2, 6, 9, 8), (4, 3, 3, 3), [1, 1], [0, 1], [1, 2], 2),
    "a series": ((2, 6, 19), (4, 6, 3), [1], [1], [1], 1),
}
REFUSED = {
    "stride, dilation": ["by_convolution"],
    "depthwise": ["by_product"],
    "groups": ["by_product"],
    "a series": ["by_product", "in_channels_last"],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FORMS)
def test_torchs_numbers_or_refused(name, case):
    torch.manual_seed(0)
    on, by, *geometry, groups = CASES[case]
    x, weight = torch.randn(on, dtype=torch.float64), torch.randn(by, dtype=torch.float64)
    geometry = [*geometry, [0] * len(geometry[0]), 0, groups]
    grad = torch.randn_like(FUNCTIONS["convolution"](x, weight, *geometry))
    given = {BACKWARD_INPUT: (grad, weight, on), BACKWARD_WEIGHT: (grad, x, by)}.get(name, (x, weight))
    wanted = FUNCTIONS[name](*given, *geometry)
    for form in FORMS[name]:
        if any(form.endswith(way) for way in REFUSED.get(case, ())):
            with pytest.raises(ValueError, match="wanted"):
                FUNCTIONS[form](*given, *geometry)
        else:
            torch.testing.assert_close(FUNCTIONS[form](*given, *geometry), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.cpu("calls of a GPU have one form")
def test_a_step_in_the_forms_that_are_chosen():
    """All calls of a step are found, variants are compiled for their classes, and choices survive a file."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, groups=4, bias=False))
    x = torch.randn(2, 3, 7, 6, requires_grad=True)
    (entry,) = stats(add_tvm_dispatch(module, x)).entries
    options, choices = CompileOptions.current(backend_for(None)), NO_CHOICES
    functions = entry.programs.forward.function, entry.lowered.expected_backward
    calls = [call for function in functions for call in products_and_calls(function, options)[1]]
    assert [call.name for call in calls].count(BACKWARD_INPUT) == 2 and len(calls) == 6
    for call in calls:
        seconds = entry.options.backend.seconds_of_forms(call)
        assert next(iter(seconds)) == call.name and len(seconds) > 1
        choices = choices.having(CALLS, call, list(seconds)[-1])
    assert from_text(to_text(choices)) == choices
    chosen = with_choices(entry, choices)
    names = {step.name for program in (chosen.forward, chosen.backward) for step in program.steps}
    assert {form for _, form in choices.calls} <= names and not {call.name for call in calls} & names
    steps = [TimedStep(each, SampleCall(module, (x,))).results() for each in (chosen, entry)]
    for mine, its in zip(*steps, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)
