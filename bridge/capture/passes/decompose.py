"""A training IR's operators taken apart to core ATen, except those of :mod:`bridge.capture.passes.preserved_ops`.

``ExportedProgram.run_decompositions`` with a table does this too. But it overrides each of torch's several hundred
composite operators (``CompositeImplicitAutograd``), nearly all with what they do anyway, and takes the overrides out
again: that costs several times what tracing a layer does. Here an operator is overridden only if it is in the graph or
is to be left whole. The graph that comes out is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import _core_aten_decompositions_post_autograd
from torch._export.utils import _get_decomp_for_cia, _is_preservable_cia_op, _special_op_to_preserve_cia
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.export import ExportedProgram
from torch.export.decomp_utils import PRESERVED_ATEN_CIA_OPS
from torch.export.exported_program import _decompose_exported_program

from bridge.capture.passes.preserved_ops import KEPT

__all__ = ["decompose"]

Table = dict[Any, Callable]


def decompose(exported: ExportedProgram) -> ExportedProgram:
    """What ``exported.run_decompositions`` gives for the default table without ``KEPT``: a functional graph."""
    composite, others = _tables()
    targets = {node.target for node in exported.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    met = {op: _get_decomp_for_cia(op) for op in targets - composite.keys() if _is_preservable_cia_op(op)}
    with unset_fake_temporarily():
        return _decompose_exported_program(
            exported,
            cia_to_decomp={**composite, **met},
            python_decomp_table=others,
            joint_loss_index=None,
            decompose_custom_triton_ops=False,
        )


@functools.cache
def _tables() -> tuple[Table, Table]:
    """What composite operators do instead of their own kernel, and the decompositions of all other operators."""
    others = {op: formula for op, formula in _core_aten_decompositions_post_autograd().items() if op not in KEPT}
    composite = {op: others.pop(op) for op in list(others) if _is_preservable_cia_op(op)}
    whole = {*PRESERVED_ATEN_CIA_OPS, *KEPT} - composite.keys()
    composite.update((op, _special_op_to_preserve_cia) for op in whole if _is_preservable_cia_op(op))
    return composite, others
