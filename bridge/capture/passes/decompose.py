"""Decomposition: training-IR operators → core ATen, except those of :mod:`bridge.capture.passes.preserved_ops`.

``ExportedProgram.run_decompositions`` with a table does this too. But it overrides each of torch's several hundred
composite operators (``CompositeImplicitAutograd``), nearly all with what they do anyway, and takes the overrides out
again: that costs several times what tracing a layer does. Here an operator is overridden only if it is in the graph or
is to be left whole. The graph that comes out is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.export import ExportedProgram

from bridge.base.torch_internals import (
    OpOverload,
    aten,
    autograd_key,
    decompose_exported_program,
    decomposition_of,
    is_preservable,
    preserve_composite,
    schema,
    unset_fake_temporarily,
)
from bridge.capture.loops.operators import MARKS
from bridge.capture.passes.decompositions import tables
from bridge.capture.passes.kinds import Functional, functional_by_kind
from bridge.capture.passes.preserved_ops import PRESERVED, PRESERVED_ABOVE_AUTOGRAD

__all__ = ["decompose"]


def decompose(exported: ExportedProgram) -> Functional:
    """What ``exported.run_decompositions`` gives for the default table without ``PRESERVED``: a functional graph."""
    functional = functional_by_kind(exported, _decomposed, _is_left_whole)
    if functional is None:
        whole = _decomposed(exported)
        functional = Functional(whole.graph, whole.graph_signature, whole.constants)
    return functional


def _decomposed(exported: ExportedProgram) -> ExportedProgram:
    composite, others = tables()
    targets = {node.target for node in exported.graph.nodes if isinstance(node.target, OpOverload)}
    met = {op: decomposition_of(op) for op in targets - composite.keys() if is_preservable(op)}
    with unset_fake_temporarily(), _without_python_kernels():
        return decompose_exported_program(
            exported,
            cia_to_decomp={**composite, **met},
            python_decomp_table=others,
            joint_loss_index=None,
            decompose_custom_triton_ops=False,
        )


@functools.cache
def _is_left_whole(op: OpOverload) -> bool:
    """Whether decomposing leaves each call of an operator as it is, and its result is no view, or one that a functional
    graph has as well.

    So it is of preserved operators, of marks of loops, and of torch's core ones that no table has a formula for.
    """
    if op in MARKS or op is aten.permute.default:
        return True
    composite, others = tables()
    if op in others or any(returned.alias_info is not None for returned in schema(op).returns):
        return False
    if op in composite or is_preservable(op):
        return composite.get(op) is preserve_composite
    return op in PRESERVED or torch.Tag.core in op.tags


@contextmanager
def _without_python_kernels() -> Iterator[None]:
    """While active, Python kernels that take a preserved operator apart above autograd are set aside."""
    present = [op for op in PRESERVED_ABOVE_AUTOGRAD if isinstance(op, OpOverload) and autograd_key in op.py_kernels]
    aside = {op: op.py_kernels.pop(autograd_key) for op in present}
    for op in aside:
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernel in aside.items():
            op.py_kernels[autograd_key] = kernel
            op._dispatch_cache.clear()
