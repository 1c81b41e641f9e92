"""Vocabulary: indices in arguments. Valid in the sample; in some calls negative or too large (``inputs.py``)."""

from __future__ import annotations

from tests.fuzz.scope import Scope, is_int

EXPRESSIONS = """
{x}[{i}]
{x}[..., {i}]
{x}[{i}, {i}]
{x}[{i}.flatten()[0]] * 2
{x}[..., {i}.sum() % 2].sin()
({x} * 1)[{i}.flatten()[-1], None]
{x}.flatten()[{x}.flatten().argmax()] * 2
{x}[:, {i}]
{x}[{i}[:1]] * 2
{x}.index_select({d}, {i}.flatten())
{x}.gather({d}, {i})
{x}.gather({d}, {i}[:1])
{x}.take({i})
torch.take_along_dim({x}, {i}, {d})
{x}.scatter({d}, {i}, 0.5)
{x}.scatter({d}, {i}, {x})
{x}.scatter_add({d}, {i}, {x}.sin())
{x}.scatter_reduce({d}, {i}, {x} * 2, "{r}")
{x}.scatter_reduce({d}, {i}, {x} * 2, "{r}", include_self=False)
{x}.index_add({d}, {i}.flatten(), {x}.narrow({d}, 0, {i}.numel()))
{x}.index_add({d}, {i}.flatten(), {x}.narrow({d}, 0, {i}.numel()), alpha=0.5)
{x}.index_copy({d}, {i}.flatten()[:1], {x}.narrow({d}, 0, 1) * 2)
{x}.index_fill({d}, {i}.flatten(), 0.3)
{x}.index_reduce({d}, {i}.flatten(), {x}.narrow({d}, 0, {i}.numel()), "amax")
{x}.index_put(({i},), {x}[0] * 0.5, accumulate=True)
{x}.index_put(({i}.flatten()[:1],), {x}[:1] * 0.5)
{x}.put({i}, {i}.to({x}.dtype), accumulate=True)
torch.zeros(4, {x}.shape[-1], dtype={x}.dtype).index_add(0, {i}.flatten(), {x}[: {i}.numel()])
torch.zeros(6, dtype={x}.dtype).scatter_add(0, {i}.flatten(), {x}.flatten()[: {i}.numel()])
F.embedding({i}, {x})
F.embedding({i}, {x}, padding_idx=0)
F.embedding_bag({i}, {x}, mode="{m}")
F.embedding_bag({i}.flatten(), {x}, torch.arange(0, {i}.numel(), 2), mode="{m}")
F.one_hot({i}, 4).to({x}.dtype) + {x}.sum()
F.one_hot({i}, 8).to({x}.dtype) * {x}.mean()
F.cross_entropy({x}, {i}.flatten()[: len({x})].long())
F.cross_entropy({x}, {i}.flatten()[: len({x})], reduction="none", ignore_index=1)
F.cross_entropy({x}, {i}.flatten()[: len({x})], label_smoothing=0.1)
F.nll_loss({x}.log_softmax(-1), {i}.flatten()[: len({x})])
F.multi_margin_loss({x}, {i}.flatten()[: len({x})])
{x}.select({d}, 0)[{i}]
{x}.unfold(0, 1, 1)[{i}]
{x}.flatten()[{i}].view({i}.shape)
torch.arange(8, dtype={x}.dtype)[{i}] * {x}.mean()
torch.where({i} > 0, {x}.sum(), {i}.to({x}.dtype))
""".strip().splitlines()

WRITES = r"""
{v} = {x}.clone()\n{v}[{i}] = 0.5
{v} = {x}.clone()\n{v}[{i}] += {x}[{i}]
{v} = {x}.clone()\n{v}[{i}.flatten()[:1]] = {x}[:1] * 2
{v} = {x}.clone()\n{v}[..., {i}] *= 2
{v} = {x}.clone()\n{v}[{i}.flatten()[0]] = {x}[0] * 2
{v} = {x} * 1\n{v}[..., {i}.sum() % 2] = 0.5
{v} = {x}.clone()\n{v}[{i}.flatten()[-1]] = {v}[{i}.flatten()[0]].tanh()
{v} = {x} * 1\n{v}.index_add_(0, {i}.flatten(), {x}[: {i}.numel()])
{v} = {x} * 1\n{v}.index_fill_({d}, {i}.flatten(), 2.0)
{v} = {x} * 1\n{v}.index_copy_(0, {i}.flatten()[:1], {x}[:1].sin())
{v} = {x} * 1\n{v}.scatter_({d}, {i}, 0.25)
{v} = {x} * 1\n{v}.scatter_add_({d}, {i}, {x})
{v} = {x}.new_zeros(5, {x}.shape[-1])\n{v}[{i}.flatten()] = {x}[: {i}.numel()]
{v} = {x} * 1\n{v}.put_({i}.flatten()[:1], {x}.flatten()[:1])
{v} = {x} * 1\n{v}.masked_fill_({i}.bool(), 0.1)
""".strip().splitlines()


def _propose(templates: list[str]):
    def propose(scope: Scope) -> str | None:
        # without elements, eager's margin losses return uninitialized memory
        x = scope.pick(lambda t: t.is_floating_point() and t.dim() >= 1 and t.numel() > 0)
        index = scope.pick(is_int) or _given(scope)
        if x is None:
            return None
        rank = scope[x].dim()
        index = scope.choice([index, index, f"{index}.long()", f"{index}.int()"])
        slots = {"d": scope.integer(-rank, rank - 1), "m": scope.choice(["sum", "mean", "max"]), "v": scope.fresh("v")}
        reduce = scope.choice(["sum", "mean", "amax", "amin", "prod"])
        return scope.choice(templates).format(x=x, i=index, r=reduce, **slots).replace("\\n", "\n")

    return propose


def _given(scope: Scope) -> str:
    """A new index argument, valid in most tensors."""
    shape = scope.choice(["(2,)", "(3,)", "(1,)", "(2, 2)", "(3, 4)", "()"])
    high = scope.choice([2, 2, 3, 4])
    return scope.argument(f"torch.randint(0, {high}, {shape}, dtype={scope.choice(KINDS)})")


KINDS = ("torch.long", "torch.long", "torch.long", "torch.int32", "torch.int16", "torch.uint8")

PROPOSALS = {_propose(EXPRESSIONS): 12.0}
"""Functions that propose an expression, with their weights."""

STATEMENTS = {_propose(WRITES): 3.0}
"""Functions that propose a statement, with their weights."""
