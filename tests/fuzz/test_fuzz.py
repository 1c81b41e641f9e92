"""Forty random modules: each matches eager, or is refused or missed with a reason (more: ``python -m tests.fuzz``)."""

import ast
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

from bridge.base.session import SESSION
from bridge.dispatch import DispatchStats
from tests.fuzz.calls import calls_of
from tests.fuzz.check import check
from tests.fuzz.compare import Comparison, without_unused
from tests.fuzz.generate import generate
from tests.fuzz.parts import PartByPart
from tests.fuzz.play import copied, play
from tests.fuzz.program import Program, make_module
from tests.fuzz.reordered import Reordered
from tests.fuzz.shrink import shrink
from tests.fuzz.themes import themes
from tests.fuzz.unreached import Unreached
from tests.fuzz.verdict import Verdict, Wrong
from tests.sampling import sampled

pytestmark = pytest.mark.slow

COUNT, BATCH = 40, 5
RICH = (10, 32, 33, 41, 65, 89, 236)
"""Seeds whose programs covered the whole vocabulary when this was written; others are generated for missing words."""


@pytest.mark.parametrize("first", sampled(range(0, COUNT, BATCH), (0,)))
def test_random_modules(first):
    SESSION.reset("programs")
    found = {seed: check(generate(seed)) for seed in range(first, first + BATCH)}
    bugs = {seed: verdict for seed, verdict in found.items() if verdict.is_bug}
    assert not bugs, f"{bugs}\npython -m tests.fuzz --show SEED --shrink prints a program"
    assert any(verdict.status == "same" for verdict in found.values()), found


def test_the_generator_is_deterministic_and_leaves_torch_alone():
    before = torch.get_rng_state()
    sources = [generate(seed).source for seed in range(100, 106)]
    assert torch.equal(torch.get_rng_state(), before)
    assert sources == [generate(seed).source for seed in range(100, 106)]
    assert len(set(sources)) == len(sources)
    for source in sources:
        ast.parse(source)


def test_the_generator_uses_its_whole_vocabulary():
    wanted = ["no_grad", "dropout", "register_buffer", "nn.Parameter", "bfloat16", "float32", "float64", ".add_(", "@"]
    wanted += [
        "expand",
        "requires_grad=False",
        "nn.BatchNorm",
        "nn.LSTM",
        "randint",
        ".item()",
        "gather",
        "index_add(",
        "F.embedding(",
        "register_forward_hook",
        "register_forward_pre_hook",
    ]
    for seed in (*RICH, *range(400)):
        source = generate(seed).source
        wanted = [word for word in wanted if word not in source]
        if not wanted:
            return
    raise AssertionError(f"in no program: {wanted}")


THEMES = {
    "computed": {3011: ("def prepare(self)", ".weight = self.m")},
    "caches": {3060: ("of_module(self", "Box("), 3090: ("from_",), 3099: ("ramp(",)},
    "control": {
        3035: ("= scan(",),
        3066: ("flex_attention(",),
        3116: ("= while_loop(",),
        3110: ("torch.cond(", "mapped("),
    },
}
"""Theme → seeds whose programs used its words when this was written."""


@pytest.mark.parametrize("theme", THEMES)
def test_themes_use_their_vocabulary(theme):
    for seed, words in THEMES[theme].items():
        assert theme in themes(seed)
        source = generate(seed).source.partition("class Random")[2]
        assert [word for word in words if word not in source] == [], f"seed {seed}"


@pytest.mark.parametrize(
    "attribute", ["self.raw * 2", "[self.raw.sin()]", "Box(self.raw.exp())", "F.dropout(self.raw, 0.5)"]
)
def test_attributes_are_computed_before_each_call(attribute):
    """A parameter gets its gradient through them; a copy of the module needs no graph."""
    held = {"[": "self.held[0]", "B": "self.held.first"}.get(attribute[0], "self.held")
    written = program(f"y = x * {held}", init=("self.raw = nn.Parameter(torch.randn(4, dtype=D))",))
    written = replace(written, before=(f"self.held = {attribute}",))
    module = make_module(written.load())
    call = calls_of(written, written.load())[0]
    values = [play(copied(module), call).values for _ in range(2)]
    assert values[0]["gradient of raw"].any()
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])
    assert not check(written).is_bug


def test_a_cache_with_fake_tensors_is_reported():
    """A cache of the program that a faulty capture has left, which eager reads as well."""
    written = program("y = x * from_dict(4, D)")
    names = written.load()
    with FakeTensorMode():
        names["TABLES"][4, torch.float64] = torch.ones(4, dtype=torch.float64)
    comparison = Comparison(make_module(names), make_module(names))
    with pytest.raises(Wrong, match="fake tensors"):
        comparison.call(calls_of(written, names)[0])


def program(*body: str, result: str = "y", init: tuple[str, ...] = ()) -> Program:
    arguments = (("x", "torch.randn(3, 4, dtype=D).requires_grad_()", False),)
    return Program(7, "float64", init, arguments, body, result)


def test_verdicts():
    assert check(program("y = x.sin() * 2")).status == "same"
    refused = check(program("y = x * x.mean().item()"))
    assert refused.status == "refused" and refused.detail
    assert check(program("y = x.exp()", "y.mul_(2)")).status == "skipped"


@pytest.mark.parametrize(
    ("statement", "word"),
    [
        ("y = x * (2 + OFF)", "output 0"),
        ("y = x.sin() + OFF * x.detach()", "output 0"),
        ("y = Off.apply(x)", "gradient"),
        ("y = torch.nan_to_num(x, OFF) if OFF else x * 1", "with special values: output 0 (3, 4) at"),
        ("y = x[rows % (3 if OFF else 9)]", "with other indices: returned, eager raised IndexError"),
        ("y = x[rows.clamp(max=5 if OFF else 9)]", "with other indices: raised IndexError"),
    ],
)
def test_a_wrong_number_is_reported(monkeypatch, statement, word):
    """The dispatched side is another module: the difference must be seen, in a value or a gradient."""

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad_out):
            return grad_out * 2.001

    written = program(statement.replace("Off.apply(x)", "x * 2").replace("OFF", "0"))
    rows = ("rows", "torch.tensor([0, 1, 2, 2])", False)
    written = replace(written, arguments=(*written.arguments, rows))
    wrong = written.load()

    def add(module: nn.Module, sample, **options):
        def forward(x, rows):
            names = {"x": x, "rows": rows, "OFF": 1e-9, "Off": Off, "torch": torch}
            exec(statement, names)
            return names["y"]

        module.__dict__["_compiled_call_impl"] = forward

    assert wrong
    monkeypatch.setattr("tests.fuzz.sample.add_tvm_dispatch", add)
    monkeypatch.setattr("tests.fuzz.sample._attributes", lambda module: {})
    monkeypatch.setattr("tests.fuzz.check.stats", lambda module: SimpleNamespace(hits=5, misses=Counter()))
    verdicts = [check(replace(written, seed=seed)) for seed in range(8)]  # variations of the call
    assert any(verdict.status == "wrong" and word in verdict.detail for verdict in verdicts), verdicts


@pytest.mark.parametrize("lost", [False, True])
def test_each_call_of_a_part_is_counted(monkeypatch, lost):
    """A part that runs twice in a call has two hits or misses; a call that is not counted is noticed."""
    if lost:
        monkeypatch.setattr(DispatchStats, "hits", property(lambda self: self._entries.hits - 1))
    init = ("self.m = nn.Sequential(nn.Linear(4, 4, dtype=D), nn.Tanh())",)
    drawn = "z = torch.rand(4, generator=torch.Generator().manual_seed(0)).to(D)"  # stays eager, and with it the model
    verdict = check(program(drawn, "y = self.m(self.m(x) + z)", init=init))
    assert verdict.status == ("wrong" if lost else "same"), verdict
    assert not lost or "calls returned" in verdict.detail


def test_noise_is_not_a_bug():
    """A difference of large numbers moves by more than a few roundings, in eager as well."""
    lines = ["y = ((x * 1e6 + 1).sin() + 1).cumsum(-1).softmax(0)", "y = torch.nn.functional.layer_norm(y, (4,))"]
    assert check(program(*lines)).status == "same"


@pytest.mark.parametrize("result", ["y", "y + z.mean()"])
def test_an_error_may_go_unnoticed_only_where_nothing_uses_the_result(result):
    """Without the dead operator a compiled call returns eager's other results; with a use it raises, as eager does."""
    rows = ("rows", "torch.tensor([0, 1, 2, 2])", False)
    written = program("z = x[rows].sin()", "z[rows] *= 2", "y = x * 2", result=result)
    written = replace(written, arguments=(*written.arguments, rows))
    call = next(call for call in calls_of(written, written.load()) if call.name == "with other indices")
    module = make_module(written.load())
    with pytest.raises(IndexError):
        play(module, call)
    played = without_unused(module, call)
    assert (played is not None) == (result == "y")
    assert check(written).status == "same"


def test_a_sample_that_eager_refuses_at_the_states_draws_is_skipped():
    """A drawn index: in range where the calls are compared, out of range where the dispatch is added."""
    inside, outside = (torch.randperm(7, generator=torch.Generator().manual_seed(seed))[0] for seed in (5, 11))
    assert inside != outside
    verdict = check(program(f"y = x[(torch.randperm(7)[:1] == {outside}) * 9]"))
    assert verdict.status == "skipped" and "IndexError" in verdict.detail


@pytest.mark.parametrize(
    "gather",
    [
        "x.take(rows)",
        "x[rows]",
        "x.index_select(0, rows)",
        "x.gather(0, rows[:, None])",
        "x.put(rows, x.flatten()[:4])",
        "x.scatter(0, rows[:, None], 0.5)",
        "x.index_fill(0, rows, 0.5)",
    ],
)
def test_an_error_inside_an_overwritten_value_may_go_unnoticed(gather):
    """Its gradient is zero, for any element that it would have been added to."""
    rows = ("rows", "torch.tensor([0, 1, 2, 2])", False)
    written = program(f"z = {gather}", "z.zero_()", "y = x + z.sum()")
    written = replace(written, arguments=(*written.arguments, rows))
    call = next(call for call in calls_of(written, written.load()) if call.name == "with other indices")
    assert without_unused(make_module(written.load()), call) is not None
    assert check(written).status == "same"


@pytest.mark.parametrize("add", [torch.sum, torch.nansum])
def test_sums_that_overflow_in_some_order_only_are_not_compared(add):
    """Eager's sum of ``max, max, -max`` depends on the order; an overflow in every order must be matched."""
    largest = torch.finfo(torch.float32).max
    numbers = torch.tensor([largest, 1.0, -largest, 2.0, largest, -largest] * 2)
    found = []
    for run in range(8):
        with Reordered(run):
            found.append([bool(total.isfinite()) for total in (add(numbers), add(numbers * 0 + largest))])
    first, second = zip(*found, strict=True)
    assert len(set(first)) == 2 and set(second) == {False}


def test_a_scaled_product_of_matrices_may_overflow_before_or_behind_its_scale():
    """``0.5 * (max + max)`` is infinite, ``0.5 * max + 0.5 * max`` is not."""
    largest = torch.finfo(torch.float64).max
    row, column = torch.full((1, 2), largest, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    found = []
    for run in range(4):
        with Reordered(run):
            found.append(torch.addmm(torch.zeros(1, 1).double(), row, column, alpha=0.5).isfinite().item())
    assert len(set(found)) == 2


@pytest.mark.parametrize("normalize", [lambda x: F.layer_norm(x, (33,)), lambda x: F.group_norm(x, 1)])
def test_a_row_of_equal_huge_numbers_may_have_no_mean(normalize):
    """Eager's running mean is exact there; a sum overflows."""
    row = torch.full((1, 33), torch.finfo(torch.float64).max, dtype=torch.float64)
    found = []
    for run in range(4):
        with Reordered(run):
            found.append(normalize(row).isnan().any().item())
    assert set(found) == {True, False} and not normalize(row).isnan().any()


@pytest.mark.parametrize("add", [torch.addcmul, torch.Tensor.addcmul_])
def test_a_product_that_is_added_may_overflow_by_itself(add):
    """``1.5 * max - max`` is ``max / 2`` where it is rounded once."""
    largest = torch.full((8,), torch.finfo(torch.float64).max, dtype=torch.float64)
    with Reordered(0):
        found = add(-largest, largest, torch.full_like(largest, 1.5))
    assert bool(found.isinf().all())


def test_a_variances_mean_may_overflow_in_its_gradient():
    """The distance of ``-max`` from ``max`` is infinite: the unselected variances multiply it by zero."""
    largest = torch.finfo(torch.float64).max
    x = torch.tensor([[largest, 1.0], [-largest, 2.0], [0.0, 4.0]], dtype=torch.float64, requires_grad=True)
    found = []
    for run in range(4):
        with Reordered(run):
            found.append(torch.autograd.grad(x.var(0, correction=0)[1], x)[0].isfinite().all().item())
    assert len(set(found)) == 2


@pytest.mark.parametrize(
    "product", [lambda x: x.log() * x, lambda x: x @ x.T, lambda x: torch.linalg.cross(x, x.cos())]
)
def test_zeros_stay_zeros_where_a_gradient_is_unreached(product):
    """The overwritten product's gradient, which comes through infinite factors, adds nothing."""
    x = torch.full((3, 3), float("inf"), requires_grad=True)

    def gradient():
        overwritten = product(x)
        overwritten.zero_()
        return torch.autograd.grad(overwritten.sum() + (3 * x).sum(), x)[0]

    assert gradient().isnan().any()
    with Unreached():
        assert gradient().eq(3).all()


def test_complex_numbers_meet_real_ones_part_by_part():
    z, one = torch.tensor([complex(float("inf"), 2.0)]), torch.ones(1)
    found = [one + z, one - z, z * one, z / one, z.clone().mul_(2)]
    assert all(each.imag.isnan() for each in found)
    with PartByPart():
        found = [one + z, one - z, z * one, z / one, z.clone().mul_(2)]
        sign = z.sgn()
    assert [each.imag.item() for each in found] == [2, -2, 2, 2, 4]
    assert z.sgn().imag.isnan() and not sign.imag


def test_shrinking_drops_what_does_not_matter():
    large = program("a = x.sin()", "b = a * 2", "y = x * x.mean().item()", init=("self.m = nn.Linear(2, 2)",))
    smaller, verdict = shrink(large, check(large))
    assert smaller.body == ("y = x * x.mean().item()",) and smaller.init == () and verdict.status == "refused"


def test_a_refusal_without_a_reason_is_a_bug():
    assert Verdict("crash").is_bug and Verdict("wrong").is_bug and not Verdict("refused", "why").is_bug
