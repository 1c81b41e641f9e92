"""The public functions, with their arguments, results and errors.

Each function imports its implementation at the first call: TVM, sympy and the capture take longer to import than torch,
and a script that only imports a name, or passes a wrong argument, should not wait for them.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch import nn

from bridge.base.collector import collection_paused, only_new_objects_collected
from bridge.base.devices import function_modes_aside
from bridge.base.threads import interrupts_deferred

if TYPE_CHECKING:
    import graphviz
    import tvm

    from autodiff.ir import Function
    from bridge.compile import Program
    from bridge.dispatch import DispatchStats
    from bridge.examine import Coverage
    from bridge.lower import Lowered
    from bridge.lowering import LoweredCall, Stage
    from bridge.show import Report
    from partition import Strategy

__all__ = ["add_tvm_dispatch", "examine", "explain", "load_compiled", "lower", "remove_tvm_dispatch", "save_compiled"]
__all__ += ["stats", "visualize"]

Module = TypeVar("Module", bound=nn.Module)
Stated = TypeVar("Stated", bound=Callable[..., Any])


@contextmanager
def _importing() -> Iterator[None]:
    """Context of an import that shields it from the caller's state; does nothing once TVM is imported.

    SIGINT is deferred, since a half-imported TVM cannot be imported again. The caller's function modes are off. The
    garbage collector pauses, and counts the imported objects, which stay alive, as old ones.
    """
    if "bridge.dispatch" in sys.modules:
        yield
        return
    with interrupts_deferred(), function_modes_aside(), only_new_objects_collected():
        with collection_paused(objects_stay=True):
            yield


def _done_by(room: str) -> Callable[[Stated], Stated]:
    """Decorator: a signature → a function that imports the package ``room`` and calls its function of that name."""

    def decorated(stated: Stated) -> Stated:
        @functools.wraps(stated)
        def call(*args: Any, **kwargs: Any) -> Any:
            stated(*args, **kwargs)  # raises for arguments that it does not take, before the import
            with _importing():
                function = getattr(importlib.import_module(room), stated.__name__)
            return function(*args, **kwargs)

        return call

    return decorated


@_done_by("bridge.dispatch")
def add_tvm_dispatch(
    module: Module,
    sample_input: Any = None,
    *others: Any,
    sample_kwargs: Mapping[str, Any] | None = None,
    partition: str | Strategy = "min_cut",
    on_miss: Literal["eager", "compile", "error"] | None = None,
    target: tvm.target.Target | str | dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
    freeze: bool = False,
    cuda_graphs: Literal["auto"] | bool = "auto",
    whole: bool | None = None,
) -> Module:
    """Compiles a call of ``module``, forward and backward, and dispatches matching calls to it from now on.

    Without a sample, the first call is the sample, and is compiled then.

    A call matches an entry if the entry's guards hold: values, shapes, dtypes and strides of forward's parameters
    (passed by position, by name or by default alike), training flags, grad mode, autocast, which tensors require grad,
    the module tree, its plain attributes, and the globals and other state that its code reads. The entry is compiled
    under the grad mode and the autocast state of this call. Any other call runs in eager PyTorch and is counted with a
    reason in :func:`stats`. A second ``add_tvm_dispatch`` with another sample or in another mode adds an entry; with a
    call that an entry already serves, it changes ``on_miss``, and recompiles only for another ``partition`` or
    ``target``. An entry added under ``torch.no_grad()`` also serves ``torch.inference_mode()``; where nothing requires
    a gradient, one entry serves both grad modes.

    Inside a model that ``torch.compile`` compiles, a dispatched module runs its own code, with a graph break on either
    side (an error under ``fullgraph=True``). Code that Dynamo compiled earlier ignores the dispatch: dispatch the
    module first, or call ``torch.compiler.reset()``.

    Several threads may call dispatched modules, even the same one, and may add entries, by this function or by misses
    under ``on_miss="compile"`` (:mod:`bridge.capture.thread_isolation`). One entry is added at a time, and none while
    Dynamo compiles. Other threads' calls of the module under capture wait until the capture ends (about a second). Not
    safe during a capture: traces in other threads (``torch.export``, ``torch.fx``, ``torch.jit``), and changes of the
    module's hooks, submodules, attributes and globals.

    Args:
        module: any module; it is changed in place only by one attribute that copies and pickles drop.
        sample_input: a tensor or a dataclass (one positional argument), a tuple or a list (positional arguments: a
            DataLoader's batch) or a mapping (keyword arguments: a dict, ``BatchEncoding``) of dense tensors, numbers,
            strings, flags and ``None``. Only shape, strides, dtype and requires_grad of its tensors matter, and values
            that forward reads in Python (``if x.any()``), which become guards. A list or a mapping that fits forward's
            signature only as a single argument is that argument; ``(batch,)`` states this explicitly.
        sample_kwargs: further keyword arguments.
        partition: the strategy that selects the saved tensors: ``"min_cut"``, ``"save_all"``, ``"recompute_all"`` or a
            strategy object.
        on_miss: for calls that match no entry: ``"eager"`` (the default with a sample), ``"compile"`` (the default
            without one, and for parts that random draws select; the second size of a dimension is compiled for all
            sizes from 2 on, if that is exact; at most ``MAX_ENTRIES`` entries are kept, and calls that keep missing the
            same guard are compiled a few times, then run eager) or ``"error"``.
        target: a TVM target of kind ``llvm`` or ``cuda``, or a GPU by name (``"cuda:1"``); by default the device of the
            module's and the sample's tensors.
        dynamic_shapes: the sample's dynamic dimensions, in torch.export's format: the entry serves all sizes from 2 on,
            or the ``Dim``'s range. Conditions on sizes that forward evaluates become guards.
        freeze: for inference: the module's parameters and buffers become constants of calls without gradients
            (``torch.no_grad()``, ``torch.inference_mode()``), for which the sample is compiled. Values that depend on
            constants alone are computed once, BatchNorm is folded into the convolution before it, products of one
            input are merged; results equal eager's up to rounding. A call after a tensor was changed or replaced is a
            miss, for which ``on_miss="compile"`` recomputes the constants. Changes without a version count (through
            ``.data`` or NumPy) are not detected: call this function again after them.
        cuda_graphs: whether forward and backward on a GPU are recorded as one CUDA graph each, after a few calls.
            ``"auto"``: if launching the kernels takes the host about as long as the GPU needs to run them, or longer
            (the first calls are timed), and if enough memory is free; ``True``: wherever that is exact; ``False``:
            never. ``stats(module).graphs`` counts the calls without a graph by reason.
        whole: whether a module that cannot be captured whole is refused. By default it is, except a module whose random
            draws select the code to run (layer drop, stochastic depth), which is dispatched in parts. ``True``: compile
            that module for the sample's selection. ``False``: dispatch the largest submodules that can be captured,
            each for its arguments in a run of the sample; the code between them runs eager. ``stats(module)`` and
            ``explain(module)`` list the eager code with reasons, and the parts' share of an eager forward's time.
            Requires a sample, excludes ``dynamic_shapes``.

    Returns:
        ``module``.

    Raises:
        TypeError: ``module`` is no module, ``freeze`` or ``whole`` no flag, the sample does not fit forward's
            signature, or it fits in two ways.
        ValueError: an unknown ``partition``, ``on_miss``, ``target`` or ``cuda_graphs``, or a module that
            ``module.compile()`` compiled.
        UnsupportedModule: part of the module cannot be compiled exactly; the module is unchanged.
        CompilationError: a bug in this package; the module is unchanged.
        KeyboardInterrupt: Ctrl-C, at the next stage of compiling; the module is unchanged.

    Example:
        >>> module = nn.Linear(3, 2)
        >>> x = torch.ones(5, 3)
        >>> module = add_tvm_dispatch(module, x)
        >>> module(x).sum().backward()
        >>> stats(module).hits
        1
    """


@_done_by("bridge.dispatch")
def remove_tvm_dispatch(module: Module) -> Module:
    """Removes the dispatch from ``module`` and frees its entries; does nothing to a module without dispatch.

    Autograd graphs of earlier calls keep their compiled backward and saved tensors, and can still run backward.

    Returns:
        ``module``.

    Raises:
        TypeError: ``module`` is no module.

    Example:
        >>> add_tvm_dispatch(module, x)
        >>> remove_tvm_dispatch(module)(x)  # PyTorch's own again
    """


@_done_by("bridge.dispatch")
def stats(module: nn.Module) -> DispatchStats:
    """Returns hits, misses with reasons, and entries of a dispatched module: a live object, updated by every call.

    Raises:
        TypeError: ``module`` is no module.
        ValueError: ``module`` is not dispatched; the message names the modules inside it that are.

    Example:
        >>> add_tvm_dispatch(module, torch.ones(5, 3))
        >>> module(torch.ones(4, 3))
        >>> dict(stats(module).misses)
        {'shape of args[0]: compiled for (5, 3), called with (4, 3)': 1}
    """


@_done_by("bridge.show")
def explain(module: nn.Module, *, full: bool = False) -> Report:
    """Reports on a dispatched module: guards, steps of a call, programs, saved tensors with reasons, compile time.

    Args:
        module: a dispatched module.
        full: whether ``print(report)`` shows the whole report or one screen of it; ``report.full`` is the whole one.

    Returns:
        plain data that prints, with units (bytes, flops, milliseconds).

    Raises:
        ValueError: the module is not dispatched, or comes from :func:`load_compiled` (without stages).

    Example:
        >>> add_tvm_dispatch(module, sample)
        >>> report = explain(module)
        >>> print(report.full)
        >>> print(report.entries[0].programs[0].source("k1"))
    """


@_done_by("bridge.examine")
def examine(
    module: nn.Module,
    sample_input: Any,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    compare: bool = False,
) -> Coverage:
    """Checks whether ``add_tvm_dispatch(module, sample_input)`` would succeed, without compiling or changing anything.

    Args:
        module: in the mode (train, eval) to examine.
        sample_input: a tensor (one positional argument), a tuple or list (positional) or a mapping (keyword arguments).
        sample_kwargs: further keyword arguments.
        dynamic_shapes: as for ``add_tvm_dispatch``.
        compare: if the module is refused, compile copies of it in parts (``whole=False``) and by
            ``torch.compile(model, backend="tvm_dispatch")``, and time a step of each against eager. This takes as long
            as compiling does, and empties Dynamo's caches (``torch.compiler.reset()``).

    Returns:
        the operations, supported and unsupported; ``print`` it.

    Raises:
        TypeError: ``module`` is no module, or the sample does not fit it.

    Example:
        >>> examine(nn.Linear(3, 2), torch.ones(5, 3)).percentage
        100.0
    """


@_done_by("bridge.lower")
def lower(
    module: nn.Module,
    sample_input: Any,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    partition: str | Strategy = "min_cut",
    dynamic_shapes: Any = None,
) -> Lowered:
    """Lowers ``module(sample)`` without compiling or changing anything; :mod:`bridge.lower` lists the stages.

    Args:
        module: in the mode (train, eval) to lower.
        sample_input: a tensor (one positional argument), a tuple or list (positional) or a mapping (keyword
            arguments) of tensors of any shape; the stages are for these shapes and dtypes.
        sample_kwargs: further keyword arguments.
        partition: ``"min_cut"``, ``"save_all"``, ``"recompute_all"`` or a strategy object.
        dynamic_shapes: dimensions that are symbolic in the stages, see :func:`bridge.capture.sample.dynamic_dims`;
            ``None``: every dimension has the sample's size.

    Returns:
        every stage; with a backward if grad mode is on and a result requires grad.

    Raises:
        TypeError: the sample does not fit the module.
        UnsupportedModule: part of the module is not handled exactly.
        CompilationError: a pass failed, a bug of this package; the error names the stage and holds its input.

    Example:
        >>> lowered = lower(nn.Linear(3, 2), torch.ones(5, 3))
        >>> [stage.name for stage in lowered][:3]
        ['captured', 'imported', 'masked']
    """


@_done_by("bridge.show")
def visualize(
    what: LoweredCall | Stage | Function | Program,
    stage: str | None = None,
    *,
    kernel: str | None = None,
    kernels: bool = False,
    views: bool = False,
    legend: bool = True,
) -> graphviz.Digraph:
    """Draws a stage or a compiled program: SVG in a notebook; in a script, call ``.render("name", format="svg")``.

    Operators are boxes with their attributes, small constants and parameters; arrows carry shapes. In training graphs
    the forward runs down and the backward up; red is forward, blue is saved for the backward, amber is recomputed
    there, a double line means a product or a library call.

    Args:
        what: a :class:`bridge.Lowered` (with ``stage``), a stage, a Relax function in flat form, or a :class:`Program`.
        stage: for a ``Lowered``: a stage's name, ``"split"`` for forward and backward in one picture; by default the
            joint graph after cleaning, or the forward where nothing requires grad.
        kernel: for a ``Program``: draws the inside of this kernel instead of the steps.
        kernels: for a ``Lowered``: compiles the functions, and frames the operators that share a kernel.
        views: whether reshapes and permutations are boxes of their own.
        legend: whether the picture explains its colours.

    Raises:
        TypeError: ``what`` is of another type, or the stage ``captured``, an ATen graph.
        KeyError: there is no stage or kernel of that name.
        ImportError: the Python package ``graphviz`` is missing. (Rendering also needs graphviz itself, ``dot``.)

    Example:
        >>> visualize(lower(module, sample), "joint").render("joint", format="svg")
        >>> visualize(stats(module).entries[0].forward, kernel="k0")
    """


@_done_by("bridge.export")
def save_compiled(module: nn.Module, path: str | os.PathLike, *, native: bool = False) -> None:
    """Saves a dispatched module's current parameters, buffers and compiled calls, forward and backward, to a folder.

    The folder appears complete or not at all. Nothing in it is pickled, but kernels are code: load it only from a
    trusted source. It is valid for this kind of processor or GPU and these versions of torch, TVM and this package.

    Args:
        module: a dispatched module; all its entries are saved. Backwards are saved for gradients of the losses alone,
            of all outputs, and of every set of outputs that has run backward so far.
        path: a folder, new or written by this function before.
        native: also write ``forward.so``, which TVM's runtime runs on the module's device without Python
            (``examples/run_compiled.cc``): the newest entry that neither draws random numbers nor changes buffers,
            with the parameters inside, argument tensors in, results out. Requires a C++ compiler.

    Raises:
        TypeError: ``module`` is no module.
        ValueError: the module is not dispatched, or has no entry.
        UnsupportedModule: an entry cannot be saved, or not natively; nothing is written.
        FileExistsError: ``path`` holds other files.

    Example:
        >>> add_tvm_dispatch(model, batch)
        >>> save_compiled(model, "model.tvm")
        >>> model = load_compiled("model.tvm")  # in another process, without the model's source
    """


@_done_by("bridge.export")
def load_compiled(path: str | os.PathLike) -> nn.Module:
    """Loads a folder of :func:`save_compiled` as a module with the saved parameters and compiled calls.

    The module computes the same bits as the saved one, forward and backward, and trains alike, without the classes of
    the user's code. A call that was not compiled raises an error with the reason. Parameters are ordinary: optimizers,
    ``state_dict``, ``load_state_dict``, hooks, ``train()`` and ``eval()`` work. A result of a class from outside
    Python's library is a record: values by attribute, name and position. The module is on the device it was saved on;
    a copy (``deepcopy``, ``pickle``) has parameters but cannot be called.

    Args:
        path: the folder. Its kernels are code: load it only from a trusted source.

    Raises:
        ValueError: the folder is not from ``save_compiled``, is damaged, or belongs to another kind of processor or
            GPU, to other versions of torch, TVM or this package, or to other settings of torch.
        OSError: the folder cannot be read.

    Example:
        >>> model = load_compiled("model.tvm")
        >>> model(**batch).loss.backward()
    """
