"""Cases of the sweeps: tiny models, torch's samples of modules and operators, special points."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bridge import add_tvm_dispatch
from tests.bridge.compare import Call, Function, clone_tree, run
from tests.corpus.case import Case, Seen
from tests.corpus.numbers import pack
from tests.device import generators
from tests.sweep import moduleinfo as modules
from tests.sweep import opinfo as operators
from tests.sweep.models import MODELS
from tests.sweep.special.operators import cases as special_cases
from tests.sweep.special.points import UPSTREAM
from tests.sweep.special.run import _answer, _each


def numbered(names: Sequence[str], samples: int) -> list[str]:
    """``name#0``, ``name#1``, … for each name; missing samples are absent."""
    return [f"{name}#{index}" for name in names for index in range(samples)]


def zoo(name: str) -> Case:
    """A tiny model with its batch, in train mode."""
    found = MODELS[name]
    module = found.model().to(found.dtype).train()
    return _case(module, Call(kwargs=clone_tree(found.batch(), found.dtype)))


def moduleinfo(name: str) -> Case | None:
    """A sample of torch's ModuleInfo, in train mode."""
    name, _, index = name.partition("#")
    info = modules._modules()[name]
    make = partial(info.module_inputs_func, info, device="cpu", dtype=torch.float64, requires_grad=True, training=True)
    samples = [sample for sample in make() if sample.forward_input is not None]
    sample = _spread(samples, int(index))
    if sample is None:
        return None
    given = sample.constructor_input
    torch.manual_seed(0)
    module = info.module_cls(*given.args, **given.kwargs).to(torch.float64).train()
    return _case(module, Call(tuple(sample.forward_input.args), dict(sample.forward_input.kwargs)))


def opinfo(name: str) -> Case | None:
    """A sample of torch's OpInfo as a module of its tensors."""
    name, _, index = name.rpartition("#")
    sample = _spread(operators.samples(name, 10_000), int(index))
    if sample is None:
        return None
    arguments = ((sample.input, *sample.args), sample.kwargs)
    module = operators.OperatorModule(operators._operators()[name].op, arguments)
    tensors = tuple(leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor))
    unseeded = partial(mock.patch.object, operators._opinfos(), "wrapper_set_seed", operators._without_seed)
    about = f"{name} {module.constants}"
    return _case(module, Call(tensors), process=sample.output_process_fn_grad, about=about, context=unseeded)


SPREAD = 4
"""Parts of a list of samples, whose ends are numbers 0 to 3: the first, the last, those between."""


def _spread(samples: Sequence[Any], index: int) -> Any | None:
    """Sample number ``index`` of a few evenly spread ones; ``None`` if there are fewer."""
    order = (0, SPREAD - 1, 1, 2)
    places = list(dict.fromkeys(round(i * (len(samples) - 1) / (SPREAD - 1)) for i in order)) if samples else []
    return samples[places[index]] if index < len(places) else None


def _case(
    module: nn.Module,
    call: Call,
    *,
    process: Callable[[Any], Any] | None = None,
    about: str | None = None,
    **others: Any,
) -> Case:
    def arguments() -> Call:
        args, kwargs = clone_tree((call.args, call.kwargs))
        return Call(args, kwargs)

    lazy = any(map(nn.parameter.is_lazy, (*module.parameters(), *module.buffers())))

    def add(dispatched: nn.Module) -> None:
        sample = arguments()
        if lazy:  # its first call sets its shapes
            add_tvm_dispatch(dispatched)
            return
        add_tvm_dispatch(dispatched, sample.args, sample_kwargs=sample.kwargs or None)

    def played(seed: int, dispatched: nn.Module) -> Seen:
        found = run(dispatched, arguments(), seed=seed, process=process)
        values = {f"output {i}": each for i, each in enumerate(found.outputs)}
        values |= {f"gradient of {name}": each for name, each in found.gradients.items()}
        values |= {f"buffer {name}": each for name, each in found.buffers.items()}
        values |= {"generator": found.generator, "generator at the end": generators()}
        return Seen(values, f"{found.spec} {found.differentiable}")

    leaves = [leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
    held = [] if lazy else module.state_dict().values()
    numbers = [pack(each).get("sha") for each in (*held, *leaves)]
    text = f"{repr(module) if about is None else about}\n{numbers}"
    return Case(
        partial(copy.deepcopy, module), add, [partial(played, seed) for seed in range(3 if lazy else 1)], text, **others
    )


@functools.cache
def _special() -> dict[str, Any]:
    return special_cases()


def special(name: str) -> Case:
    """An operator at all of its special points, with all special gradients of the result, in float32."""
    found = _special()[name]
    columns = found.inputs(torch.float32)
    count = len(columns[0])
    columns = [column.repeat(len(UPSTREAM), *[1] * (column.dim() - 1)) for column in columns]
    upstream = torch.tensor(UPSTREAM, dtype=torch.float64).repeat_interleave(count)
    floats = [column.is_floating_point() and index not in found.constant for index, column in enumerate(columns)]
    ask = _each if found.alone else _answer
    try:
        ask(Function(found.function), columns, floats, upstream)
    except (RuntimeError, NotImplementedError):  # no derivative in eager: values only
        floats = [False] * len(columns)
    sample = [column[0] if found.alone else column for column in columns]

    def add(module: nn.Module) -> None:
        pairs = zip(sample, floats, strict=True)
        add_tvm_dispatch(module, tuple(each.detach().clone().requires_grad_(grad) for each, grad in pairs))

    def played(module: nn.Module) -> Seen:
        values = ask(module, columns, floats, upstream)
        return Seen(values, " ".join(values))

    about = f"{name} {floats} {[pack(each)['sha'] for each in columns]}"
    return Case(partial(Function, found.function), add, [played], about)
