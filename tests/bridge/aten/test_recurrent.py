"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``: library calls for whole layers, eager's numbers and draws."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from autodiff.extents import Extent
from autodiff.ir import TensorType, Var
from bridge import UnsupportedModule, add_tvm_dispatch, explain, lower, stats
from bridge.aten.conv import cudnn_is_quicker
from bridge.base.session import SESSION
from bridge.compile import RunLoop
from tests.bridge.compare import Call, assert_same, check_module, run
from tests.sampling import sampled

LAYERS = {
    "lstm_deep": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, dropout=0.3, batch_first=True),
    "lstm_three": lambda: nn.LSTM(3, 4, num_layers=3, bias=False),
    "lstm_projected": lambda: nn.LSTM(3, 5, proj_size=2, num_layers=2, bidirectional=True),
    "lstm_projected_no_bias": lambda: nn.LSTM(3, 5, proj_size=2, bias=False),
    "gru_deep": lambda: nn.GRU(3, 4, num_layers=2, dropout=0.3, bias=False),
    "gru_both_ways": lambda: nn.GRU(3, 4, bidirectional=True, batch_first=True),
    "rnn_relu": lambda: nn.RNN(3, 4, nonlinearity="relu", batch_first=True),
    "rnn_tanh": lambda: nn.RNN(3, 4, num_layers=2, dropout=0.5, bidirectional=True),
}

DROPS = pytest.mark.cpu("cuDNN drops inside of its kernel, which is refused")


def marked(names):
    return [pytest.param(name, marks=DROPS) if LAYERS[name]().dropout else name for name in names]


class WithStates(nn.Module):
    """Initial states that require gradients; only one of the results is used."""

    def __init__(self, layer: nn.Module, result: int):
        super().__init__()
        self.layer, self.result = layer, result

    def forward(self, x, *states):
        y, last = self.layer(x, states if len(states) > 1 else states[0])
        last = last if isinstance(last, tuple) else (last,)
        return (y, *last)[self.result] * 2


def leaf(*extents):
    return torch.randn(*extents, requires_grad=True)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", sampled(marked(LAYERS), ("lstm_deep", "gru_both_ways", "rnn_tanh")))
def test_layers(name):
    module = check_module(LAYERS[name], lambda: leaf(4, 3, 3), calls=2)
    assert all(a is b for a, b in zip(module._flat_weights, module.parameters(), strict=True))


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Recurrent layers are lowered as on a GPU; the processor's lowerings are neither found nor kept."""
    SESSION.reset("lowerings")
    for module in ("aten.recurrent", "capture.opened"):
        monkeypatch.setattr(f"bridge.{module}.HOST", torch.device("meta"))
    monkeypatch.setattr("bridge.aten.recurrent.cudnn_is_quicker", lambda *_: False)
    yield
    SESSION.reset("lowerings")


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", ["lstm_projected_no_bias", "gru_both_ways"])
@pytest.mark.cpu("another device stands in for the GPU")
@pytest.mark.usefixtures("on_a_gpu")
def test_layers_are_loops_on_a_gpu(name):
    module = check_module(LAYERS[name], lambda: leaf(4, 3, 3), calls=1)
    (entry,) = stats(module).entries
    loops = [
        step.length for part in (entry.forward, entry.backward) for step in part.steps if isinstance(step, RunLoop)
    ]
    assert loops == [3 if module.batch_first else 4] * (2 * len(module._all_weights))


@pytest.mark.parametrize("name", ["lstm_three", "gru_both_ways", "rnn_relu"])
@pytest.mark.cpu("another device stands in for the GPU, torch's layers for cuDNN's")
@pytest.mark.usefixtures("on_a_gpu")
def test_layers_are_one_call_where_cudnn_is_quicker(monkeypatch, name):
    monkeypatch.setattr("bridge.aten.recurrent.cudnn_is_quicker", lambda *_: True)
    module = check_module(LAYERS[name], lambda: leaf(4, 3, 3), calls=2)
    (entry,) = stats(module).entries
    called = [step.name for part in (entry.forward, entry.backward) for step in part.steps]
    assert [name for name in called if "recurrent" in name] == ["recurrent_layers", "recurrent_layers_backward"]
    assert not entry.has_loops
    assert "1 call of recurrent layers: cuDNN's" in str(explain(module).full)


@pytest.mark.parametrize(
    ("cell", "element_type", "is_tf32", "state", "is_quicker"),
    [  # each was measured to be quicker so by a tenth or more
        ("lstm", "float32", True, (1, 8, 128), True),
        ("lstm", "float32", True, (1, 64, 256), False),
        ("lstm", "float32", True, (2, 64, 256), True),
        ("lstm", "float32", True, (1, 64, 1024), True),
        ("lstm", "float32", True, (1, 128, 512), True),
        ("lstm", "float32", False, (1, 128, 512), False),
        ("lstm", "float32", False, (1, 64, 1024), False),
        ("rnn_tanh", "float32", False, (1, 16, 256), True),
        ("rnn_tanh", "float32", True, (1, 64, 384), False),
        ("lstm", "float16", True, (1, 16, 512), True),
        ("lstm", "float16", True, (1, 128, 512), False),
        ("lstm", "float64", True, (1, 64, 256), False),
    ],
)
def test_which_layers_stay_cudnns(monkeypatch, cell, element_type, is_tf32, state, is_quicker):
    monkeypatch.setattr("bridge.aten.conv.recurrent_layers_are_tf32", lambda: is_tf32)
    x, h = (Var(name, TensorType(extents, element_type)) for name, extents in (("x", (5, *state[1:])), ("h", state)))
    assert cudnn_is_quicker(cell, x, [h]) == is_quicker


@pytest.mark.parametrize(
    ("name", "dtype"),
    sampled(
        itertools.product(("lstm_three", "gru_both_ways", "rnn_relu"), (torch.float16, torch.bfloat16)),
        [("gru_both_ways", torch.float16)],
    ),
    ids=str,
)
@pytest.mark.cpu("another device stands in for the GPU")
@pytest.mark.usefixtures("on_a_gpu")
def test_loops_of_half_types_are_as_close_as_eager(name, dtype):
    module = check_module(LAYERS[name], lambda: leaf(4, 3, 3), calls=1, dtype=dtype)
    (entry,) = stats(module).entries
    assert entry.has_loops


@pytest.mark.cpu("on a GPU each length has loops of its own")
@pytest.mark.parametrize("name", sampled(["gru_deep", "lstm_projected"], ["lstm_projected"]))
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_one_entry_serves_all_lengths(name):
    module = LAYERS[name]().double()
    eager = copy.deepcopy(module)
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    add_tvm_dispatch(module, leaf(4, 3, 3).double().detach().requires_grad_(), dynamic_shapes=(sizes,), on_miss="error")
    for steps, batch in ((4, 3), (2, 2), (9, 5)):
        call = Call((leaf(steps, batch, 3).double().detach().requires_grad_(),))
        assert_same(run(module, call), run(eager, call), rtol=1e-10, atol=1e-12)


LOOPED = {**LAYERS, "lstm_with_many_columns": lambda: nn.LSTM(3, 256)}


@pytest.mark.cpu("on a GPU each length has loops of its own")
@pytest.mark.parametrize(
    ("name", "dtype"),
    sampled(
        [
            *((name, torch.float64) for name in ("lstm_deep", "lstm_projected_no_bias", "gru_both_ways", "rnn_relu")),
            ("lstm_with_many_columns", torch.float32),  # oneDNN's kernel in eager, and a loop here
        ],
        lambda case: case[0] not in ("gru_both_ways", "rnn_relu"),
    ),
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_loops_of_all_lengths_are_one_entry(name, dtype):
    module = LOOPED[name]().to(dtype)
    eager, lengths = copy.deepcopy(module), (4, 2, 9, 64, 3)
    calls = [
        Call((torch.randn((3, steps, 3) if module.batch_first else (steps, 3, 3), dtype=dtype).requires_grad_(),))
        for steps in lengths
    ]
    sizes = {1 if module.batch_first else 0: torch.export.Dim.DYNAMIC}
    add_tvm_dispatch(module, calls[0].args, dynamic_shapes=(sizes,), on_miss="error")
    (entry,) = stats(module).entries
    loops = [step for part in (entry.forward, entry.backward) for step in part.steps if isinstance(step, RunLoop)]
    assert len(loops) == 2 * len(module._all_weights) and all(isinstance(loop.length, Extent) for loop in loops)

    rounding = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {}
    for call in (*calls, calls[0]):
        assert_same(run(module, call), run(eager, call), **rounding)
    assert stats(module).hits == len(calls) + 1


@pytest.mark.cpu("on a GPU each length has loops of its own")
def test_the_second_length_of_a_layer_is_the_last_that_is_compiled():
    module = nn.GRU(3, 4).double()
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module)
    for steps in (9, 5, 64, 2, 9, 1):
        call = Call((torch.randn(steps, 3, 3, dtype=torch.float64).requires_grad_(),))
        assert_same(run(module, call), run(eager, call), rtol=1e-10, atol=1e-12)
    varying, of_one = stats(module).entries  # the entry of nine served once, and left
    assert (varying.hits, of_one.hits) == (4, 1) and varying.has_loops


@pytest.mark.cpu("on a GPU each length has loops of its own")
def test_all_lengths_without_gradients():
    module = nn.GRU(3, 4, batch_first=True).double().eval()
    eager, sizes = copy.deepcopy(module), {1: torch.export.Dim.DYNAMIC}
    with torch.no_grad():
        add_tvm_dispatch(module, torch.randn(3, 5, 3, dtype=torch.float64), dynamic_shapes=(sizes,), on_miss="error")
        assert stats(module).entries[0].has_loops
        for steps in (7, 2):
            x = torch.randn(3, steps, 3, dtype=torch.float64)
            torch.testing.assert_close(module(x), eager(x), rtol=1e-10, atol=1e-12)


def test_a_length_that_varies_is_refused_where_steps_one_by_one_would_be_slower():
    with pytest.raises(UnsupportedModule, match="a length that varies"):
        add_tvm_dispatch(nn.LSTM(3, 4), leaf(4, 3, 3), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("result", sampled([0, 1, 2], [2]))
def test_one_step_of_a_projected_lstm(result):
    """The cells do not depend on the projection, which gets no gradient from them."""
    make = lambda: WithStates(nn.LSTM(3, 5, proj_size=2, num_layers=2, bidirectional=True), result)  # noqa: E731
    check_module(make, lambda: (leaf(1, 2, 3), leaf(4, 2, 2), leaf(4, 2, 5)), calls=1)


@pytest.mark.parametrize("result", sampled([0, 1, 2], [2]))
def test_lstm_with_given_states(result):
    make = lambda: WithStates(nn.LSTM(3, 4, bidirectional=True), result)  # noqa: E731
    check_module(make, lambda: (leaf(5, 2, 3), leaf(2, 2, 4), leaf(2, 2, 4)))


@pytest.mark.parametrize(("kind", "result"), sampled(itertools.product((nn.GRU, nn.RNN), (0, 1)), [(nn.RNN, 1)]))
def test_given_state(kind, result):
    make = lambda: WithStates(kind(3, 4, num_layers=2, batch_first=True), result)  # noqa: E731
    check_module(make, lambda: (leaf(2, 5, 3), leaf(2, 2, 4)))


@pytest.mark.parametrize("kind", sampled([nn.LSTM, nn.GRU], [nn.GRU]))
def test_without_a_batch(kind):
    check_module(lambda: kind(3, 4), lambda: leaf(5, 3))


@DROPS
@pytest.mark.parametrize("bias", sampled([True, False], [True]))
def test_an_lstm_in_float32_is_eagers_kernel(bias):
    def make():
        torch.manual_seed(0)
        return nn.LSTM(3, 4, num_layers=2, dropout=0.4, bidirectional=True, bias=bias)

    ours, eager, x = make(), make(), leaf(6, 3, 3)
    add_tvm_dispatch(ours, x)
    assert_same(run(ours, Call((x,))), run(eager, Call((x,))), rtol=0, atol=0)
    assert stats(ours).hits == 1


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.cpu("cuDNN computes in TF32")), torch.float64]
)
def test_without_gradients(dtype):
    module, x = nn.LSTM(3, 4, 2, dropout=0.5, dtype=dtype).eval(), torch.randn(5, 2, 3, dtype=dtype)
    with torch.no_grad():
        wanted = module(x)[0]
        torch.testing.assert_close(add_tvm_dispatch(module, x)(x)[0], wanted)


@pytest.mark.parametrize("name", sampled(marked(["lstm_deep", "gru_both_ways"]), ["gru_both_ways"]))
def test_steps_are_not_unrolled(name):
    """Neither in the program nor in the captured graph: unrolled, 200 steps would take minutes to add."""
    lowered = [lower(LAYERS[name](), leaf(3, steps, 3)) for steps in (4, 200)]
    few, many = (len(each.forward.body.blocks[0].bindings) for each in lowered)
    assert many <= few
    few, many = (len(each.captured.graph.nodes) for each in lowered)
    assert few == many


@pytest.mark.parametrize("name", sampled(["lstm_three", "gru_both_ways"], ["gru_both_ways"]))
def test_the_stages_agree_with_each_other(name):
    found = lower(LAYERS[name](), leaf(4, 3, 3)).check()
    assert found.ok, found


def test_cells_by_hand_beside_whole_layers():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.cell = nn.GRU(3, 4), nn.LSTMCell(4, 4)

        def forward(self, x):
            y, h = self.layer(x)
            h = (h[0], h[0] * 2)
            for step in y:
                h = self.cell(step, h)
            return nn.functional.dropout(h[0], 0.5)

    check_module(Both, lambda: leaf(3, 2, 3), calls=2)
