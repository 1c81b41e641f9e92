"""Which modules a callback dispatches: the repeated blocks, classes, a predicate, the whole model."""

import pytest
from torch import nn

from bridge.callbacks import chosen_layers


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.tail = nn.Sequential(Block(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
        self.nested = nn.ModuleList([nn.ModuleList([Block()])])


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (None, ["blocks.0", "blocks.1", "nested.0.0"]),
        ("whole", [""]),
        ("Block", ["blocks.0", "blocks.1", "tail.0", "nested.0.0"]),
        (Block, ["blocks.0", "blocks.1", "tail.0", "nested.0.0"]),
        (["Embedding", nn.Tanh], ["embed", "tail.1.1"]),
        (
            ["Sequential", "Linear"],
            ["blocks.0.linear", "blocks.1.linear", "tail", "heads.0", "heads.1", "nested.0.0.linear"],
        ),
        (lambda name, module: name.endswith(".1"), ["blocks.1", "tail.1", "heads.1"]),
    ],
)
def test_chosen_layers(layers, names):
    model = Model()
    found = chosen_layers(model, layers)
    assert list(found) == names and all(module is model.get_submodule(name) for name, module in found.items())


def test_a_model_without_repeated_blocks_is_dispatched_whole():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    assert chosen_layers(model) == {"": model}


def test_what_names_nothing_is_an_error():
    with pytest.raises(ValueError, match=r"layers='Bloc' names nothing in Model; its classes are Block, Model"):
        chosen_layers(Model(), "Bloc")
    for odd in (3, [3]):
        with pytest.raises(TypeError, match="wanted"):
            chosen_layers(Model(), odd)
