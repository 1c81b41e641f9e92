"""Pictures: their content, and that graphviz draws them."""

import re
import shutil

import pytest
import torch
from torch import nn

from autodiff.ir import bindings, op_name
from bridge import lower, visualize
from bridge.compile import Launch, compile_function
from bridge.show.picture import KINDS
from tests.bridge.models import bert_layer

pytest.importorskip("graphviz")
needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz itself (dot) is not installed")


@pytest.fixture(scope="module")
def lowered():
    torch.manual_seed(0)
    return lower(bert_layer(attention="eager", dropout=0.1), torch.randn(2, 5, 24, requires_grad=True))


@pytest.fixture(scope="module")
def program(lowered):
    return compile_function(lowered.forward, name="layer_forward")


def boxes(source, kind):
    return source.count(f'fillcolor="{KINDS[kind].fill}"')


@pytest.mark.cpu("a GPU's plan keeps rows that only the split makes: no box of the joint graph")
def test_a_joint_graph_shows_forward_backward_and_what_is_saved(lowered):
    source = visualize(lowered).source
    assert boxes(source, "captured") == len(lowered.plan.saved_tensors)
    ops = [op_name(value) for _, value in bindings(lowered["cleaned"].function)]
    assert source.count("<B>matmul</B>") == ops.count("relax.matmul")
    assert source.count("<B>reshape</B>") == 0 and source.count("<B>permute_dims</B>") == 0
    assert "0.353553" in source and "axis=3" in source  # small constants and attributes stand in the boxes
    assert "gradient of" in source and "attention.self.query.weight" in source
    assert "dir=back" in source  # the backward's arrows point up
    assert "2x5x24" in source


def test_views_can_be_boxes(lowered):
    source = visualize(lowered, "forward", views=True).source
    ops = [op_name(value) for _, value in bindings(lowered["forward"].function)]
    assert source.count("<B>permute_dims</B>") == ops.count("relax.permute_dims") > 0


def test_every_arrow_has_both_ends(lowered):
    """An arrow to a box that is not there would make graphviz invent one."""
    for stage in ("forward", "joint", "cleaned", "split", "split backward"):
        source = visualize(lowered, stage, legend=False).source
        declared = set(re.findall(r'^\t+"?([^"\[\n]+?)"? \[label=<', source, flags=re.MULTILINE))
        ends = re.findall(r'^\t+"?([^"\[\n]+?)"? -> "?([^"\[\n]+?)"?(?: \[|$)', source, flags=re.MULTILINE)
        assert ends and {end for pair in ends for end in pair} <= declared


def test_the_split_shows_what_is_computed_again(lowered):
    source = visualize(lowered, "split").source
    drawn = boxes(source, "recomputed")
    views = {"relax.reshape", "relax.permute_dims"}
    again = [
        v
        for v, value in bindings(lowered.backward)
        if v.name in lowered.plan.recomputed and op_name(value) not in views
    ]
    assert drawn == len(again) > 0
    assert boxes(source, "captured") == len(lowered.plan.saved_tensors)


def test_operators_that_share_a_kernel_are_framed(lowered, program):
    source = visualize(lowered, "split forward", kernels=True).source
    fused = [s for s in program.steps if isinstance(s, Launch) and len(s.contents.bindings) > 1]
    assert 0 < source.count("subgraph") <= len(fused)


def test_a_program_shows_its_steps_and_a_kernel_its_operations(program):
    source = visualize(program).source
    steps = [step for step in program.steps if hasattr(step, "contents")]
    assert boxes(source, "kernel") + boxes(source, "library") == len(steps)
    assert "·" in source
    largest = max((s for s in steps if isinstance(s, Launch)), key=lambda s: len(s.contents.operations))
    inside = visualize(program, kernel=largest.name).source
    assert boxes(inside, "node") == len(largest.contents.operations)
    with pytest.raises(KeyError, match="no kernel 'nothing' in layer_forward; there are"):
        visualize(program, kernel="nothing")


def test_plain_functions_and_stages(lowered):
    assert visualize(lowered["forward"]).source.count("<B>softmax</B>") == 1
    assert visualize(lowered["joint"].function).source.count("dir=back") > 10


def test_wrong_arguments(lowered):
    with pytest.raises(TypeError, match="wanted a Lowered, a Stage, a Relax function or a Program, got Linear"):
        visualize(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="ATen graph"):
        visualize(lowered["captured"])
    with pytest.raises(KeyError, match="no stage"):
        visualize(lowered, "nothing")
    with torch.no_grad():
        forward = lower(nn.Linear(2, 2), torch.randn(1, 2))
    assert "matmul" in visualize(forward).source
    with pytest.raises(KeyError, match="there is no split"):
        visualize(forward, "split")


def test_without_graphviz_itself_a_notebook_shows_what_to_install(lowered, monkeypatch):
    monkeypatch.setenv("PATH", "")
    shown = visualize(lowered, "forward")._repr_mimebundle_()
    assert list(shown) == ["text/plain"]
    assert "apt-get install graphviz" in shown["text/plain"] and "digraph {" in shown["text/plain"]


@needs_dot
@pytest.mark.parametrize("stage", ["cleaned", "split"])
def test_boxes_do_not_overlap(lowered, stage):
    """The layout itself, from graphviz's plain output: one line per node with its centre and size, in inches."""
    plain = visualize(lowered, stage).pipe(format="plain").decode()
    placed = []
    for line in plain.splitlines():
        if line.startswith("node "):
            x, y, width, height = map(float, re.search(r'^node (?:"[^"]*"|\S+) (\S+) (\S+) (\S+) (\S+)', line).groups())
            placed.append((x, y, width, height))
    assert len(placed) > 60
    for index, (x, y, width, height) in enumerate(placed):
        for x2, y2, width2, height2 in placed[:index]:
            apart = max(abs(x - x2) - (width + width2) / 2, abs(y - y2) - (height + height2) / 2)
            assert apart > -0.01
    width = max(x + w / 2 for x, _, w, _ in placed)
    assert width < 30  # inches at full size


@needs_dot
def test_svg_for_a_notebook_and_a_file_from_a_script(lowered, program, tmp_path):
    assert "<svg" in visualize(program)._repr_image_svg_xml()
    path = visualize(lowered, "forward").render(tmp_path / "forward", format="svg", cleanup=True)
    assert "attention.self.query.weight" in open(path, encoding="utf-8").read()


def test_a_slice_is_no_permutation():
    class Gate(nn.Module):
        def forward(self, x):
            left, right = x.chunk(2, dim=-1)
            return torch.sigmoid(left) * right

    with torch.no_grad():
        program = compile_function(lower(Gate(), torch.randn(4, 6)).forward, name="gate")
    (step,) = [step for step in program.steps if isinstance(step, Launch)]
    source = visualize(program, kernel=step.name).source
    assert source.count("4x6 in part") == 2 and "ᵀ" not in source
