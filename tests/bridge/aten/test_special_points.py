"""Operators at zeros, ties, infinities, nan, subnormals and overflow equal eager's: a part of the sweep.

All of it: ``python -m tests.sweep --suite special --out special.csv``.
"""

import pytest
import torch

from tests.sampling import sampled
from tests.sweep.special.justified import excuse
from tests.sweep.special.operators import Case, cases
from tests.sweep.special.run import run

OPERATORS = """
    addcdiv amax aminmax atan2 bce_with_logits clamp cosine_similarity cross_entropy exp2 fmod glu hardswish huber
    layer_norm lerp_tensor logit logit_eps logsumexp maximum multi_margin multi_margin_weighted nan_to_num nansum
    nn.functional.elu nn.functional.logsigmoid nn.functional.mish nn.functional.relu nn.functional.silu
    nn.functional.softshrink norm pow remainder sinc softmax std_mean var
""".split()

ALIKE = """
    aminmax bce_with_logits cosine_similarity exp2 hardswish lerp_tensor logit multi_margin nan_to_num
    nn.functional.elu nn.functional.mish nn.functional.silu norm remainder softmax var
""".split()
"""Operators whose rule at a kink, for ties, infinities or sums another case covers."""

ROUNDED_OTHERWISE = {
    "addcdiv": "a GPU's eager kernel divides before it multiplies: subnormal numbers",
    "glu": "a GPU's eager derivative multiplies in another order: infinite upstream gradients",
    "maximum": "of 0 and -0 a GPU's eager kernel takes 0",
    "nn.functional.relu": "of -0 a GPU's eager kernel makes 0",
    "nn.functional.softshrink": "of negative numbers a GPU's eager kernel makes 0, not -0",
    "std_mean": "a GPU's eager kernel squares in float32: beyond 1e19 it is infinite",
}


@pytest.mark.parametrize(
    "name",
    sampled(
        [pytest.param(n, marks=pytest.mark.cpu(why)) if (why := ROUNDED_OTHERWISE.get(n)) else n for n in OPERATORS],
        lambda name: name not in ALIKE,
    ),
)
def test_operators_at_special_points(name):
    found = run(cases()[name], torch.float32, excuse(name, torch.float32))
    assert not found.differing, "\n".join(map(str, found.differing[:10]))
    assert found.equal > 0.5 * found.points


def test_the_sweep_sees_a_kink_that_goes_the_other_way():
    case = Case(lambda x: torch.where(x > 0, x, 0.0), cases()["abs"].inputs)
    found = run(case, torch.float32, lambda difference: None, reference=lambda x: torch.where(x >= 0, x, 0.0))
    assert {difference.inputs for difference in found.differing} == {((0.0,),)}
