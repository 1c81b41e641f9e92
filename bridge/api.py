"""The public functions: what each takes, returns and raises.

Each imports the room that does its work when it is first called: TVM, sympy and the capture take longer than torch to
import, and a script that only asks for a name, or refuses its arguments, should not wait for them.
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

from bridge.base.collector import collection_paused
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
    from bridge.tune import TuningResult
    from partition import Strategy

__all__ = ["add_tvm_dispatch", "examine", "explain", "load_compiled", "lower", "remove_tvm_dispatch", "save_compiled"]
__all__ += ["stats", "tune", "visualize"]

Module = TypeVar("Module", bound=nn.Module)
Stated = TypeVar("Stated", bound=Callable[..., Any])


@contextmanager
def _importing() -> Iterator[None]:
    """Around the import of a room: whatever is active where the function is called, the room is imported as ever.

    A SIGINT waits for its end: TVM that is half imported cannot be imported again. The caller's function modes see none
    of it. Nothing is collected, since the objects stay. Once TVM is there, this does nothing.
    """
    if "bridge.dispatch" in sys.modules:
        yield
        return
    with interrupts_deferred(), function_modes_aside(), collection_paused():
        yield


def _done_by(room: str) -> Callable[[Stated], Stated]:
    """The function of the same name and signature in a room, which is imported at the first call."""

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

    Without a sample, the first call is the sample: it is compiled when it is made.

    A call matches if everything that was compiled still holds: values, shapes, dtypes and strides of forward's
    parameters (given by position, by name or by default: that makes no difference), training flags, grad mode,
    autocast, which tensors require grad, the module tree, its plain attributes and what its code reads. It is compiled
    under the grad mode and the autocast state around this call. Any other call runs as PyTorch would and is counted
    with a reason in :func:`stats`. Called again with another sample or in another mode, it adds an entry; with a call
    that an entry serves already, it changes ``on_miss``, and compiles anew only for another ``partition`` or
    ``target``. An entry added under ``torch.no_grad()`` also serves ``torch.inference_mode()``; where nothing requires
    a gradient, one entry serves with and without gradients.

    Inside a model that ``torch.compile`` compiles, a dispatched module runs its own code, with a graph break on either
    side (an error under ``fullgraph=True``). Code that was compiled before does not know that: dispatch the module
    first, or call ``torch.compiler.reset()``.

    Threads may call dispatched modules, also one and the same, and add entries, by this function or by calls that miss
    under ``on_miss="compile"``, beside anything that others do (:mod:`bridge.capture.thread_isolation`). One entry is
    added at a time, and none while Dynamo compiles. Other threads' calls of the very module that is captured wait for
    the end of the capture (a second or so). Not safe beside it: traces that others start themselves
    (``torch.export``, ``torch.fx``, ``torch.jit``), and changes of the module's hooks, submodules, attributes, and
    globals that it reads.

    Args:
        module: any module; it is changed in place only by one attribute that copies and pickles drop.
        sample_input: a tensor or a dataclass (one positional argument), a tuple or a list (positional arguments: a
            DataLoader's batch) or a mapping (keyword arguments: a dict, ``BatchEncoding``) of dense tensors, numbers,
            strings, flags and ``None``; of tensors only shape, strides, dtype and requires_grad count, and the
            numbers where forward reads them (``if x.any()``): the entry serves calls that read the same. A
            list or a mapping that fits forward's signature as its one argument only is that argument; to say so:
            ``(batch,)``.
        sample_kwargs: further keyword arguments.
        partition: what is saved for the backward: ``"min_cut"``, ``"save_all"``, ``"recompute_all"`` or a strategy.
        on_miss: for calls that match no entry: ``"eager"`` (the default where there is a sample), ``"compile"`` (the
            default without one; the second size of a dimension is compiled for all sizes from 2 on, if that is exact;
            at most ``MAX_ENTRIES`` entries are kept, and what differs in the same thing at every call is compiled for a
            few times only, then runs eager) or ``"error"``.
        target: a TVM target of kind ``llvm`` or ``cuda``, or a GPU by name (``"cuda:1"``); by default the device of the
            module's and the sample's tensors.
        dynamic_shapes: which dimensions of the sample vary, as torch.export takes it: the entry serves all sizes from 2
            on, or those of the ``Dim``'s range. What forward asks about sizes is a condition of the entry.
        freeze: for inference: the module's parameters and buffers become constants of calls without gradients
            (``torch.no_grad()``, ``torch.inference_mode()``), for which the sample is compiled. What depends on them
            alone is computed once, BatchNorm folded into the convolution before it, products of one input merged;
            results are eager's to rounding. A call after a tensor was changed or replaced is a miss, which
            ``on_miss="compile"`` answers by computing the constants again. Changes that torch does not count (through
            ``.data`` or NumPy) are not seen: call this again after them.
        cuda_graphs: whether forward and backward on a GPU are recorded as one CUDA graph each, after a few calls:
            ``"auto"``, the default: where launching the kernels one by one takes the host about as long as the GPU, or
            longer, which the first calls are timed for, and where there is memory to spare; ``True``: wherever that is
            exact; ``False``: never. Results and gradients are tensors like any others, and ``stats(module).graphs``
            counts the calls without a graph by their reasons.
        whole: whether a module that cannot be captured whole is refused; the default is that, but for one that decides
            by random draws what it runs (layer drop, stochastic depth): it is dispatched in parts. ``True``: such a
            module is compiled for the sample's decision. ``False``: the largest modules inside it that
            can be are dispatched then, each with what it is called with in a run of the sample; the code between them
            runs as before. ``stats(module)`` and ``explain(module)`` say what stays eager and why, and which share of
            an eager forward's time is spent in what is dispatched. Wants a sample, and no ``dynamic_shapes``.

    Returns:
        ``module``.

    Raises:
        TypeError: ``module`` is no module, ``freeze`` or ``whole`` no flag, or the sample does not fit the module, or
            fits it in two ways.
        ValueError: an unknown ``partition``, ``on_miss``, ``target`` or ``cuda_graphs``, or a module that
            ``module.compile()`` compiled.
        UnsupportedModule: the module holds something that cannot be done exactly; it is left as it was.
        CompilationError: a bug in this package; the module is left as it was.
        KeyboardInterrupt: Ctrl-C, at the next stage of compiling; the module is left as it was.

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
    """Takes the dispatch off ``module`` and frees what was compiled; a module without one is returned as it is.

    Graphs of earlier calls hold what they need and can still run backward.

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
    """Hits, misses with their reasons, and entries of a dispatched module: a live object, counted up by every call.

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
    """Reports on a dispatched module: guards, what a call does, programs, saved tensors with reasons, compile time.

    Args:
        module: one that :func:`add_tvm_dispatch` was called on.
        full: whether printing shows everything, or what fits a screen; ``report.full`` is the complete one.

    Returns:
        plain data that prints; bytes, flops and milliseconds are told with their units.

    Raises:
        ValueError: the module is not dispatched, or was loaded, which brings no stages.

    Example:
        >>> add_tvm_dispatch(module, sample)
        >>> report = explain(module)
        >>> print(report.full)
        >>> print(report.entries[0].programs[0].source("k0"))
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
    """Tells whether ``add_tvm_dispatch(module, sample_input)`` would succeed, without compiling or changing anything.

    Args:
        module: in the mode (train, eval) that is meant.
        sample_input: a tensor (one positional argument), a tuple or list (positional) or a mapping (keyword arguments).
        sample_kwargs: further keyword arguments.
        dynamic_shapes: as for ``add_tvm_dispatch``.
        compare: where the module is refused, copies of it are compiled in parts (``whole=False``) and by
            ``torch.compile(model, backend="tvm_dispatch")``, and a step of each is timed beside eager's. This takes as
            long as compiling does, and empties Dynamo's caches (``torch.compiler.reset()``).

    Returns:
        the operations and what is unsupported among them; ``print`` it.

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
    """Lowers ``module(sample)`` without compiling or changing anything; see the module's docstring for the stages.

    Args:
        module: in the mode (train, eval) that is meant.
        sample_input: a tensor (one positional argument), a tuple or list (positional) or a mapping (keyword
            arguments) of CPU tensors of any shape; the stages are for these shapes and dtypes.
        sample_kwargs: further keyword arguments.
        partition: ``"min_cut"``, ``"save_all"``, ``"recompute_all"`` or a strategy object.
        dynamic_shapes: dimensions that are extents in the stages, see
            :func:`bridge.capture.sample.dynamic_dims`; ``None``: all are the sample's.

    Returns:
        every stage; with a backward where grad mode is on and a result requires grad.

    Raises:
        TypeError: the sample does not fit the module.
        UnsupportedModule: something in the module is not handled exactly.
        CompilationError: a pass failed, a bug of this package; it names the stage and holds its input.

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
    """Draws what it is given; shown as SVG in a notebook, ``visualize(...).render("name", format="svg")`` in a script.

    Operators are boxes with their attributes and the small constants and parameters that they read; arrows carry
    shapes. In training graphs the forward runs down and the backward up; red is forward, blue is saved for the
    backward, amber is computed again there, a double line means a product or a library call.

    Args:
        what: a :class:`bridge.Lowered` (with ``stage``), a stage, a Relax function in flat form, or a :class:`Program`.
        stage: for a ``Lowered``: a stage's name, ``"split"`` for forward and backward in one picture; by default the
            joint graph after cleaning, or the forward where nothing requires grad.
        kernel: for a ``Program``: the inside of this kernel instead of the steps.
        kernels: for a ``Lowered``: compile the functions, and frame the operators that share a kernel.
        views: whether reshapes and permutations are boxes of their own.
        legend: whether the picture explains its colours.

    Raises:
        TypeError: for anything else, and for the stage ``captured``, an ATen graph.
        KeyError: there is no stage or kernel of that name.
        ImportError: the Python package ``graphviz`` is missing. (Rendering also needs graphviz itself, ``dot``.)

    Example:
        >>> visualize(lower(module, sample), "joint").render("joint", format="svg")
        >>> visualize(stats(module).entries[0].forward, kernel="k0")
    """


@_done_by("bridge.tune")
def tune(
    module: nn.Module,
    sample_input: Any,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    minutes: float = 2.0,
    log: str | os.PathLike | None = None,
    partition: Any = "min_cut",
    target: Any = None,
    freeze: bool = False,
    memory: float = 1.0,
    progress: bool = True,
) -> TuningResult:
    """Tries how ``module(sample)`` is compiled fastest on this machine, and keeps that in the disk cache.

    Every later ``add_tvm_dispatch`` of an equal call (operators, sizes, element types, number of threads, machine,
    versions) is compiled with it, in this process and in others. The module is left as it is, dispatched or not; so are
    its parameters, buffers, gradients and torch's generators.

    Candidates are ways of matrix products and their tiles, rows of a task, vectors, what is cached or computed again,
    limits of fusion, the partition's budget. Each is raced against the best so far, by turns in one process, and taken
    if it is faster by more than the noise. In the end the whole step is raced once more, what is in use against what
    was found: if that does not confirm it, nothing is kept.

    Args:
        module: in the mode (train, eval) that is meant. Call this in the modes of the call: under ``no_grad`` for
            inference, under autocast.
        sample_input, sample_kwargs: as of :func:`bridge.add_tvm_dispatch`, of the sizes that are meant.
        minutes: that trials may take, those of interrupted runs that the log has included. The first compilation and
            the last race come on top.
        log: a file that each trial is appended to, as a line of JSON. A tuning that is interrupted, by whatever, goes
            on where it was when it is called again with the same log. One file may serve many calls.
        partition, target, freeze: as of :func:`bridge.add_tvm_dispatch`; choices belong to them.
        memory: how many bytes may be saved for the backward, as a multiple of what is saved without tuning.
        progress: whether a bar shows the time and the best so far, where ``tqdm`` is installed.

    Returns:
        what was found; ``print`` it.

    Raises:
        TypeError: ``module`` is no module, the sample does not fit it, or an argument is of another type.
        ValueError: an argument out of its range, or the disk cache is off, which choices are kept in.
        UnsupportedModule: as of :func:`bridge.add_tvm_dispatch`; also for a call that choices cannot be kept for.

    Example:
        >>> tune(model, batch, minutes=5, log="bert.jsonl")
        >>> add_tvm_dispatch(model, batch)
    """


@_done_by("bridge.export")
def save_compiled(module: nn.Module, path: str | os.PathLike, *, native: bool = False) -> None:
    """Saves a dispatched module as it is now: parameters, buffers, and its compiled calls, forward and backward.

    The folder is complete or not there. Nothing in it is pickled; but kernels are code: load it only from where you
    would take a library. It is for this kind of processor or GPU, these versions of torch, TVM and this package.

    Args:
        module: one that :func:`add_tvm_dispatch` was called on; all its entries are saved. Backwards are saved for
            gradients of the losses alone, of all outputs, and of what has run backward so far.
        path: a folder, new or saved by this function before.
        native: also write ``forward.so``, which TVM's runtime runs on the module's device without Python
            (``examples/run_compiled.cc``): the newest entry that neither draws random numbers nor changes buffers,
            with the parameters inside, argument tensors in, results out. Wants a C++ compiler.

    Raises:
        TypeError: ``module`` is no module.
        ValueError: it is not dispatched, or has no entry.
        UnsupportedModule: an entry holds something that cannot be saved, or has no native form; nothing is written.
        FileExistsError: there is something else at ``path``.

    Example:
        >>> add_tvm_dispatch(model, batch)
        >>> save_compiled(model, "model.tvm")
        >>> model = load_compiled("model.tvm")  # in another process, without the model's source
    """


@_done_by("bridge.export")
def load_compiled(path: str | os.PathLike) -> nn.Module:
    """The module that :func:`save_compiled` wrote: its parameters under their names, its compiled calls.

    It runs what was compiled, with the same bits, forward and backward, and trains as the saved one did; classes of
    the user's code are not needed. A call that was not compiled is an error with its reason. Parameters are ordinary
    ones: optimizers, ``state_dict``, ``load_state_dict``, hooks, ``train()`` and ``eval()`` work. A result whose class
    is not one of Python's is a record: values by attribute, name and position. It lies on the device that it was saved
    on; a copy of it (``deepcopy``, ``pickle``) has parameters but cannot be called.

    Args:
        path: the folder. Its kernels are code: take it only from where you would take a library.

    Raises:
        ValueError: it is no such folder, damaged, or of another kind of processor or GPU, of other versions of torch,
            TVM or this package, or of other settings of torch.
        OSError: it cannot be read.

    Example:
        >>> model = load_compiled("model.tvm")
        >>> model(**batch).loss.backward()
    """
