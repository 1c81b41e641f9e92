"""HuggingFace's ``Trainer`` with dispatched encoder layers: the log is eager's, from the start and resumed."""

import pytest

from examples.trainer_bert import EVERY, STEPS, fine_tune, largest_difference, losses

pytestmark = pytest.mark.slow

pytest.importorskip("accelerate")

SIZE = {"layers": 1, "hidden": 16}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By name, and by whether it resumed from the checkpoint of the run before it."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("eager", "dispatched")}
    return {
        (name, resume): fine_tune(folder, dispatch=name == "dispatched", resume=resume, size=SIZE, length=8)
        for name, folder in folders.items()
        for resume in (False, True)
    }


@pytest.mark.composes(
    "`Trainer`: accumulation, clipping, evaluation, save, resume",
    'works (`on_miss="compile"`)',
    section="HuggingFace",
)
@pytest.mark.parametrize("resume", [False, True])
def test_the_log_is_eagers(runs, resume):
    """Losses, gradient norms before clipping, evaluations: accumulation over two batches, 30 steps."""
    eager, dispatched = runs["eager", resume], runs["dispatched", resume]
    assert largest_difference(dispatched, eager) < 1e-5
    logged = [(step, name) for step, name, _ in losses(dispatched)]
    assert [step for step, name in logged if name == "loss"] == list(range(1, STEPS + 1))
    assert [step for step, name in logged if name == "eval_loss"] == list(range(EVERY, STEPS + 1, EVERY))


@pytest.mark.composes("`Trainer`: accumulation, clipping, evaluation, save, resume")
@pytest.mark.parametrize(("resume", "steps"), [(False, STEPS), (True, EVERY)])
def test_every_call_is_dispatched(runs, resume, steps):
    evaluations = steps // EVERY
    run = runs["dispatched", resume]
    assert run.misses == {} and run.hits == [2 * steps + 2 * evaluations]


@pytest.mark.composes("`Trainer`: accumulation, clipping, evaluation, save, resume")
def test_resuming_goes_on_as_if_never_stopped(runs):
    straight, resumed = (losses(runs["dispatched", resume])[-10:] for resume in (False, True))
    assert [a[:2] for a in straight] == [b[:2] for b in resumed]
    assert [a[2] for a in straight] == pytest.approx([b[2] for b in resumed], abs=1e-5)
