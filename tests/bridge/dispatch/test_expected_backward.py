"""A model that returns a loss and logits: the backward of the loss is compiled when dispatch is added, no other one."""

import copy

import pytest
import torch
from torch import nn

from bridge import add_tvm_dispatch, explain, stats
from bridge.dispatch import executable


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x, labels=None):
        logits = self.head(torch.tanh(self.body(x)))
        return (logits, x.sum(1)) if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """Names of the programs compiled, in order."""
    names, compilation = [], executable.Compilation

    def noted(function, name, *options):
        names.append(name)
        return compilation(function, name, *options)

    monkeypatch.setattr(executable, "Compilation", noted)
    return names


def gradients(module: nn.Module, call: tuple, chosen: tuple[int, ...]) -> list[torch.Tensor]:
    module.zero_grad()
    results = module(*call)
    sum(results[place].square().sum() for place in chosen).backward()
    return [param.grad.clone() for param in module.parameters()]


@pytest.mark.parametrize(
    ("with_loss", "first", "later"),
    [(True, (0,), (0, 1)), (True, (0,), (1,)), (False, (0, 1), (0,))],
    ids=["loss, then both", "loss, then logits", "no loss: both"],
)
def test_only_the_expected_backward_is_compiled_ahead(compiled, with_loss, first, later):
    torch.manual_seed(0)
    eager = Classifier().double()
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=not with_loss)
    call = (x, torch.randint(4, (5,))) if with_loss else (x,)
    module = add_tvm_dispatch(copy.deepcopy(eager), call)
    names = ["Classifier_forward", "Classifier_backward"]
    assert compiled == names
    for chosen, expected in ((first, names), (later, [*names, "Classifier_backward"])):
        ours, theirs = gradients(module, call, chosen), gradients(eager, call, chosen)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        assert compiled == expected
    assert stats(module).hits == 2 and not stats(module).misses
    steps = explain(module).entries[0].programs[1].steps
    assert steps and any(step.origins for step in steps)
