"""Recorded call: a module's sample call → its real and fake run, a key that equal calls share, its captured graph."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from autodiff.lazy import cached_property
from bridge.base.devices import HOST, current_device, working_for
from bridge.base.torch_cuda import settle_attention_order
from bridge.base.torch_shapes import SYMBOLIC, conclusions, fixed
from bridge.capture.captured import Captured, CapturedArguments, CapturedLoop, CapturedNumbers
from bridge.capture.loops.lengths import LoopedCall, comparable
from bridge.capture.observation import Draw, Observation, Output
from bridge.capture.recorded import captured_of, captured_of_any_length
from bridge.capture.refusals import check_call, device_of_call
from bridge.capture.rows import Record, ValueRef, key_of
from bridge.capture.sample import refuse_numbers
from bridge.capture.steady_call import SteadyCall, steady_call
from bridge.capture.symbolic_sizes import each_mapped
from bridge.capture.thread_isolation import recording
from bridge.state import SampleCall, constant_key

__all__ = ["RecordedCall", "capture", "record_call"]


def record_call(call: SampleCall) -> RecordedCall:
    """Runs a call in the module's current mode, on real numbers and on fake tensors.

    Python attributes that forward sets once stay set; all other state is restored.

    Raises:
        UnsupportedModule: a compiled call cannot do exactly the same.
        Exception: eager's own, if PyTorch itself refuses the sample.
    """
    check_call(call)
    refuse_numbers(call.name, call.dims)
    device = device_of_call(call)
    settle_attention_order(device)
    with working_for(device), recording():
        return RecordedCall(call, steady_call(call.module, call.args, call.kwargs, call.dims))


def capture(call: SampleCall, looped: LoopedCall | None = None) -> Captured:
    """Records and captures a call (:func:`record_call`, then :meth:`RecordedCall.captured`).

    ``looped``: an existing run of it, with loops of any length.
    """
    if looped is not None:
        with working_for(device_of_call(call)), recording():
            return captured_of_any_length(call.module, call.args, call.kwargs, call.dims, looped)
    return record_call(call).captured()


@dataclass
class RecordedCall:
    """A call and its runs (``steady``)."""

    call: SampleCall
    steady: SteadyCall

    @cached_property
    def key(self) -> tuple | None:
        """A key that is equal only for calls that compute the same; ``None`` if the record cannot tell that, or if the
        call has effects beyond its graph (counters, kept places, tensors outside of the module).

        With dynamic sizes, equal keys hold for all sizes that satisfy the conditions. Call it before :meth:`captured`.
        """
        real, fake = self.steady.real, self.steady.fake
        if (
            self.steady.counters
            or self.steady.problems
            or real.kept
            or len(real.given.tensors) > len(real.given.real_tensors)
        ):
            return None
        reads = tuple(each.reading.key for each in real.record.reads)
        key = observed_key(real.record, real.results, real.final, real.observation, reads)
        if key is None or fake.symbols is None:
            return key
        sizes = key_of_sizes(fake.record, fake.results, fake.out_spec, fake.symbols.draws, fake.mode.shape_env)
        return None if sizes is None else (*key, sizes)

    @property
    def given(self) -> dict[str, Any]:
        """The fields of :class:`Captured` in which this call differs from an equal call that was lowered before."""
        real, fake = self.steady.real, self.steady.fake
        return {
            "module_name": self.call.name,
            "module_tensors": tuple(real.given.tensors),
            "given": CapturedArguments(
                tuple(fake.arguments),
                tuple(real.given.constants),
                tuple(isinstance(leaf, torch.Tensor) for leaf in self.call.leaves),
                real.given.in_spec,
            ),
            "observation": real.observation,
            "numbers": CapturedNumbers(tuple(each.reading for each in real.record.reads)),
            "loop": CapturedLoop(recording=comparable(real) if real.loops is not None else None),
            "device": current_device(),
        }

    def captured(self) -> Captured:
        """The call as a functional graph.

        ``problems`` lists inexact parts of the graph; the import refuses them, and operators without conversion.
        """
        call = self.call
        with working_for(device_of_call(call)), recording():
            captured = captured_of(call.module, call.args, call.kwargs, call.dims, self.steady)
        return replace(captured, state=captured.state._replace(counters=self.steady.counters))


# Record key: the record of a call → a digest by which calls are compared; equal keys are the same function.
#
# It covers the operators in order, their constants, the values that they read and make with their metadata, grad modes,
# draws and numbers written in the code. It leaves out lines and module paths: equal layers have equal keys.


def observed_key(
    record: Record, results: Any, final: dict[int, ValueRef], observation: Observation, reads: tuple
) -> tuple | None:
    """The key of a call's record and result; ``None`` if it cannot be compared with another call's.

    Args:
        results: the leaves of its result, values for tensors.
        final: input that is a buffer which forward sets to another tensor → the value of that tensor.
        reads: keys of the scalar guards.
    """
    if observation.unsupported or observation.objects:
        return None
    outputs = tuple(map(_output_key, observation.outputs))
    digest = record_key(record, (*results, *sorted(final.items())))
    if digest is None or None in outputs:
        return None
    drawn = hashlib.sha256(repr(observation.draws).encode()).hexdigest()  # rows do not name the kernels that drew
    # only a capture refuses inputs that the backward reads again: equal keys must agree on them
    again = tuple(sorted(observation.checkpointed)), tuple(sorted(observation.overwritten))
    return digest, outputs, observation.out_spec, (reads, observation.reads_validation), again, drawn


def record_key(record: Record, results: Any) -> str | None:
    """The digest of a record; ``None`` if an operand is no plain constant."""
    made = hashlib.sha256()
    try:
        for row in record.rows:
            told = str(row.op), _plain((row.args, row.kwargs)), _plain(row.results), row.grad, row.draws
            made.update(repr(told).encode())
        made.update(repr(record.forms).encode())
        made.update(repr(_plain(results)).encode())
        for number, literal in record.literals.items():
            made.update(repr((number, literal.dtype, tuple(literal.shape), literal.device)).encode())
            made.update(_bytes(literal))
    except TypeError:
        return None
    return None if record.free else made.hexdigest()


def key_of_sizes(record: Record, results: Any, out_spec: Any, draws: list[Draw], env: Any) -> str | None:
    """The digest of a run on symbolic sizes: its rows, layouts, results and draws with expressions, and its conditions.

    Symbols are named by the arguments' positions, so equal calls have equal expressions. Two calls with one digest run
    the same operators for all sizes that satisfy the conditions, and both have the conditions as guards. Call it before
    other queries add conditions to the environment. ``None`` if an operand is no plain constant.

    Args:
        results: the leaves of its result, values for tensors.
        env: torch's environment of the sizes.
    """
    told: list[Any] = [_draw_key(each) for each in draws]
    try:
        told += [(str(row.op), _plain((row.args, row.kwargs, row.results))) for row in record.rows]
        told += [_plain(results), str(out_spec), sorted(record.same.items())]
    except TypeError:
        return None
    for number, fake in sorted(record.fakes.items()):
        layout = (*fake.shape, *fake.stride(), fake.storage_offset()) if fake.layout is torch.strided else fake.shape
        told.append((number, fake.dim(), [str(fixed(each)) for each in layout]))
    told += [str(condition) for condition, _ in conclusions(env)]
    return hashlib.sha256(repr(told).encode()).hexdigest()


def _draw_key(draw: Draw) -> str:
    """A draw as text with expressions for sizes, including the fields that its comparison leaves out."""
    return repr(each_mapped(draw, fixed))


def _plain(tree: Any) -> Any:
    return key_of(
        tree, (ValueRef, *SYMBOLIC), lambda each: each if type(each) is ValueRef else ("size", str(fixed(each)))
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).to(HOST).numpy().tobytes()


def _output_key(output: Output) -> tuple | None:
    value = constant_key(output.value)
    rest = tuple(_fixed(getattr(output, each.name)) for each in fields(output) if each.name != "value")
    return None if value is None else (value, rest)


def _fixed(value: Any) -> Any:
    """Sizes as expressions, which hash and compare without adding a condition."""
    return tuple(map(fixed, value)) if type(value) is tuple else fixed(value)
