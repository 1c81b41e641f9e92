"""Free (lifted) tensors: what forward reads and the module does not own, in a list, a dict, a global, a closure.

``torch.export`` lifts them into the graph as if they were numbers written in the code. Those really are
(``torch.tensor([1.0, 2.0])`` inside forward), and become constants; a tensor from elsewhere may change between calls
and may want a gradient, and no registry says where to find it again. Such a module is refused.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.export.graph_signature import InputKind

from bridge.base.errors import Unsupported, user_line

__all__ = ["free_tensors"]


def free_tensors(exported: torch.export.ExportedProgram, owned: Collection[str]) -> list[Unsupported]:
    """One problem for each free tensor.

    Args:
        exported: the training-IR program, not decomposed yet: there, literals are still told apart.
        owned: dotted names of the tensors that the module owns.
    """
    lifted = {
        spec.arg.name
        for spec in exported.graph_signature.input_specs
        if spec.kind == InputKind.CONSTANT_TENSOR and spec.target not in owned
    }
    problems = []
    for node in exported.graph.nodes:
        if node.op != "placeholder" or node.name not in lifted:
            continue
        readers = [user for user in node.users if user.target is not torch.ops.aten.lift_fresh_copy.default]
        if readers:
            where = user_line(readers[0].meta.get("stack_trace")) or "a line that torch.export did not keep"
            shape = list(node.meta["val"].shape)
            problems.append(
                Unsupported(
                    f"free tensor of shape {shape}",
                    where,
                    "a tensor that is no parameter, buffer or attribute of a module: in a list, a dict or a global",
                    "register it: self.register_buffer(...), nn.ParameterList, nn.ModuleList",
                )
            )
    return problems
