"""Operators at zeros, ties, infinities, nan, subnormals and overflow give what eager gives: a part of the sweep.

All of it: ``python -m tests.sweep --suite special --out special.csv``.
"""

import pytest
import torch

from tests.sweep.special.justified import excuse
from tests.sweep.special.operators import Case, cases
from tests.sweep.special.run import run

OPERATORS = """
    addcdiv amax aminmax atan2 bce_with_logits clamp cosine_similarity cross_entropy exp2 fmod glu hardswish huber
    layer_norm lerp_tensor logit logit_eps logsumexp maximum multi_margin multi_margin_weighted nan_to_num nansum
    nn.functional.elu nn.functional.logsigmoid nn.functional.mish nn.functional.relu nn.functional.silu
    nn.functional.softshrink norm pow remainder sinc softmax std_mean var
""".split()


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_at_special_points(name):
    found = run(cases()[name], torch.float32, excuse(name, torch.float32))
    assert not found.differing, "\n".join(map(str, found.differing[:10]))
    assert found.equal > 0.5 * found.points


def test_the_sweep_sees_a_kink_that_goes_the_other_way():
    case = Case(lambda x: torch.where(x > 0, x, 0.0), cases()["abs"].inputs)
    found = run(case, torch.float32, lambda difference: None, reference=lambda x: torch.where(x >= 0, x, 0.0))
    assert {difference.inputs for difference in found.differing} == {((0.0,),)}
