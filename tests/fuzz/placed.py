"""A program's text → the text with tensors made on a device, and arguments with the CPU's random numbers."""

from __future__ import annotations

import ast

import torch

FACTORIES = frozenset(
    "arange empty eye full linspace logspace ones rand randint randn randperm tensor tril_indices triu_indices"
    " zeros".split()
)
"""Functions of torch that make a tensor on a given device."""
ARGUMENTS = "make_arguments"
"""The function whose tensors are drawn on the CPU: equal indices, in range or not, on every device."""


def placed(source: str, device: torch.device) -> str:
    """The text itself for the CPU; for another device, with ``device=`` in every call of a factory."""
    if device.type == "cpu":
        return source
    tree = _Placing(str(device)).visit(ast.parse(source))
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


class _Placing(ast.NodeTransformer):
    def __init__(self, device: str):
        self._device = device
        self._moves = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        before, self._moves = self._moves, node.name == ARGUMENTS
        self.generic_visit(node)
        self._moves = before
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not _is_factory(node) or any(keyword.arg in ("device", "generator") for keyword in node.keywords):
            return node
        where = "cpu" if self._moves else self._device
        node.keywords.append(ast.keyword("device", ast.Constant(where)))
        if not self._moves:
            return node
        return ast.Call(ast.Attribute(node, "to", ast.Load()), [ast.Constant(self._device)], [])


def _is_factory(node: ast.Call) -> bool:
    function = node.func
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "torch"
        and function.attr in FACTORIES
    )
