"""Constants in panels: products read a frozen weight that is packed once, with the bits of generated products."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from tvm.relax import op as R

from bridge import add_tvm_dispatch, stats
from bridge.base.session import SESSION
from bridge.compile import CompileOptions, compile_function, host_backend, with_constants
from bridge.compile.cpu.gemm_tile import register_tile
from bridge.compile.cpu.products import CpuProducts
from bridge.compile.runtime.instructions import Launch
from bridge.compile.schedule.products import GENERATED, IN_PANELS, LayoutClass, ProductShape
from tests.bridge.compile_helpers import function
from tests.sampling import sampled

CONSTANT = LayoutClass("column", constant=True)

pytestmark = pytest.mark.skipif(
    register_tile(host_backend().target) is None, reason="no products are generated for this processor"
)


@pytest.fixture
def way(monkeypatch):
    """Sets the way of all products of constants."""

    def clear():
        SESSION.reset("programs", "choices", "lowerings")

    def force(name: str) -> None:
        def choose(policy, product):
            return name if product.b.constant else "mm" if product.batch == 1 else "bmm"

        clear()
        monkeypatch.setattr(CpuProducts, "choose", choose)

    yield force
    clear()


def bound(shapes, body, weights):
    """The program whose last parameters are these weights."""
    options = replace(CompileOptions.current(host_backend()), constants=len(weights))
    made = function([(shape, str(weights[0].dtype)[6:]) for shape in shapes], body)
    return with_constants(compile_function(made, name="test", options=options), weights)


def launched(program) -> list[str]:
    return [step.name for step in program.steps if isinstance(step, Launch)]


def turned(emit, x, w):
    return emit(R.matmul(x, emit(R.permute_dims(w))))


BODIES = {
    "transposed": ((300, 70), lambda emit, x, w: [turned(emit, x, w)]),
    "one row": ((1, 70), lambda emit, x, w: [turned(emit, x, w)]),
    "in the readers' order": (
        (3, 7, 70),
        lambda emit, x, w: [emit(R.exp(emit(R.permute_dims(turned(emit, x, w), [1, 0, 2]))))],
    ),
    "columns first": (
        (3, 7, 70),
        lambda emit, x, w: [emit(R.exp(emit(R.permute_dims(turned(emit, x, w), [0, 2, 1]))))],
    ),
    "read by others, too": ((20, 70), lambda emit, x, w: [turned(emit, x, w), emit(R.negative(w))]),
}


@pytest.mark.parametrize("name", sampled(BODIES, lambda name: name != "transposed"))
def test_it_is_packed_once_and_no_bit_changes(way, name):
    torch.manual_seed(0)
    shape, body = BODIES[name]
    x, w, found = torch.randn(shape), torch.randn(35, 70), {}
    for each in (GENERATED, IN_PANELS):
        way(each)
        program = bound([shape, (35, 70)], body, [w])
        found[each] = program([x]), launched(program), [tensor for _, tensor in program.constants]
    (plain, *_), (panels, steps, constants) = found[GENERATED], found[IN_PANELS]
    assert all(map(torch.equal, panels, plain))
    exact = x.double() @ w.double().T
    assert torch.allclose(panels[0].double().sum(), body_sum(name, exact), rtol=1e-4)
    assert not any(step.startswith("pack_") for step in steps)
    assert ("packed_product_float32" in steps) is (name != "columns first")
    is_read = name in ("columns first", "read by others, too")
    assert any(tensor.data_ptr() == w.data_ptr() for tensor in constants) is is_read


def body_sum(name: str, exact: torch.Tensor) -> torch.Tensor:
    return (exact.exp() if name in ("in the readers' order", "columns first") else exact).sum()


def test_products_of_one_weight_share_its_panels(way):
    way(IN_PANELS)
    x, y, w = torch.randn(20, 70), torch.randn(9, 70), torch.randn(35, 70)
    program = bound([(20, 70), (9, 70), (35, 70)], lambda emit, x, y, w: [turned(emit, x, w), turned(emit, y, w)], [w])
    assert launched(program) == ["packed_product_float32"] * 2
    assert len(program.constants) == 1
    for ours, each in zip(program([x, y]), (x, y), strict=True):
        torch.testing.assert_close(ours, each @ w.T)


def test_a_frozen_module_is_packed_anew_when_its_weight_changes(way):
    way(IN_PANELS)
    module = nn.Sequential(nn.Linear(70, 40), nn.Tanh(), nn.Linear(40, 33)).double().eval()
    x = torch.randn(4, 5, 70, dtype=torch.float64)
    with torch.no_grad():
        wanted = module(x)
        add_tvm_dispatch(module, x, freeze=True, on_miss="compile")
        torch.testing.assert_close(module(x), wanted, rtol=1e-10, atol=1e-12)
        module[2].weight.mul_(2)
        bias = module[2].bias
        torch.testing.assert_close(module(x), 2 * (wanted - bias) + bias, rtol=1e-10, atol=1e-12)
    assert stats(module).hits == 2


@pytest.mark.parametrize(
    ("times", "wanted"),
    [({IN_PANELS: 0.9}, IN_PANELS), ({IN_PANELS: 1.02}, IN_PANELS), ({IN_PANELS: 1.2}, "mm")],
    ids=str,
)
def test_it_is_measured_beside_the_libraries_products(monkeypatch, times, wanted):
    SESSION.reset("choices")
    asked = []

    def measure(product, ways):
        asked.append(ways)
        return {"mm": 1.0} | times

    policy = replace(host_backend().products(2, False), measure=measure)
    assert policy.choose(ProductShape("float32", 1, 256, 48, 32, LayoutClass("row"), CONSTANT)) == wanted
    assert {"mm", IN_PANELS} <= {*asked[0]}
    SESSION.reset("choices")
