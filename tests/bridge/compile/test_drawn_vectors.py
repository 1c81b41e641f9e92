"""Recomputed dropout masks in a GPU's kernels: CUDA's code, run as OpenCL, and its part that four lanes share."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tvm.relax import op

from bridge.compile import CompileOptions, DrawnMask, backend_for, compile_function
from bridge.compile.cuda.backend import generate
from bridge.compile.passes.choose_layouts import choose_layouts
from bridge.compile.pipeline import optimize
from bridge.compile.schedule.fuse import fuse
from bridge.compile.schedule.plan_rows import plan_rows
from bridge.compile.translate import translate
from tests import philox
from tests.bridge.compile_helpers import function
from tests.cuda_plans import BACKEND, FOR_LITTLE
from tests.nvrtc import ARCHES, needs_nvrtc
from tests.opencl import OpenClKernels

RATE, SEED, OFFSET = 0.1, -(2**62) + 5, 2**34 - 8

FUNCTIONS = {
    "elements": lambda e, x, m: op.where(m, x, e(op.negative(x))),
    "a bias": lambda e, x, m: op.multiply(e(op.add(x, first_rows(e, x))), e(op.astype(m, "float32"))),
    "a softmax": lambda e, x, m: op.multiply(e(op.nn.softmax(x)), e(op.astype(m, "float32"))),
    "a row's sum": lambda e, x, m: op.nn.softmax(e(op.multiply(x, e(op.astype(m, "float32"))))),
}
SHAPES = [*philox.SHAPES, ((40, 30, 16), 4)]


def first_rows(e, x):
    return e(op.strided_slice(x, [0, 1], [0, 0], [1, 1]))


def made(name, shape):
    return function([(shape, "float32"), (shape, "bool")], lambda e, *args: [e(FUNCTIONS[name](e, *args))])


def kernel(name, shape, drawn=None, gpu=BACKEND):
    """Plan and code of the one kernel."""
    graph = translate(made(name, shape), gpu, {1: drawn} if drawn else None)
    graph = optimize(choose_layouts(graph, gpu, gpu.products(1, True)), gpu)
    (group,), stored = fuse(graph, gpu), {operand.value for operand in graph.results}
    planned = plan_rows(group, stored, gpu)
    return planned, generate(planned.plan, plain=True)


@pytest.mark.parametrize("place, name", list(enumerate(FUNCTIONS)))
@pytest.mark.parametrize("gpu", [BACKEND, FOR_LITTLE], ids=["large", "little"])
def test_bits_are_those_of_stored_masks(place, name, gpu):
    cases = SHAPES if name == "elements" else SHAPES[place::3]
    made_of = [
        kernel(name, shape, drawn, gpu) for shape, width in cases for drawn in (DrawnMask(RATE, width, 256), None)
    ]
    kernels = OpenClKernels([function for _, function in made_of])
    for index, (shape, width) in enumerate(cases):
        x = torch.randn(shape).numpy().ravel()
        masks = (
            np.array([SEED % 2**64, OFFSET], np.uint64),
            philox.mask(x.size, RATE, width, 256, SEED, OFFSET).astype(np.uint8),
        )
        results = []
        for each, mask in enumerate(masks):
            planned, _ = made_of[2 * index + each]
            memory, out = {"p0": x.copy(), "p1": mask}, np.zeros_like(x)
            kernels(2 * index + each, [*(memory[value.name] for value in planned.inputs), out], planned.scalars)
            results.append(out)
        assert np.array_equal(*results) and np.count_nonzero(results[0] == x) < x.size, (shape, width)


@pytest.mark.parametrize("shape, width, calls", [((3, 8, 36), 4, 1), ((3, 8, 32), 8, 1), ((3, 8, 36), 2, 4)])
def test_four_lanes_share_a_call(shape, width, calls):
    """Outside of the loop over the lanes, where a thread of eager's takes four elements at once."""
    planned, code = kernel("elements", shape, DrawnMask(RATE, width, 256))
    before, _, loop = str(code.script()).partition("unroll")
    fours = planned.plan.lanes // 4
    assert (before if calls == 1 else loop).count("3528531795") == 10 * (fours if calls == 1 else 1)


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHES)
def test_cuda_compiles_them(arch):
    backend = backend_for({"kind": "cuda", "arch": arch})
    for (shape, width), name in zip(SHAPES, FUNCTIONS, strict=False):
        drawn, options = {1: DrawnMask(RATE, width, 512)}, CompileOptions.current(backend)
        program = compile_function(made(name, shape), name="drawn", options=options, drawn=drawn)
        assert all(built.function is not None for built in program.code.values())
