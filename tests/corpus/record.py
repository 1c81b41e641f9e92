"""One case → its record: a line of JSON with the outcome, the numbers, the programs' text and the counts."""

from __future__ import annotations

import contextlib
import io
import time
import traceback
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import tvm
from torch import nn
from tvm.tirx import PrimFunc

from bridge import UnsupportedModule, stats
from bridge.compile import Program
from bridge.dispatch.entry import Entry
from tests.corpus.case import Case, Seen
from tests.corpus.forwards import Forwards, counted
from tests.corpus.numbers import digest, pack, pack_text, scrubbed
from tests.corpus.pinned import fresh, pinned, seeded
from tests.corpus.suites import make_case

OK, REFUSED, EAGER_ERROR, CRASH, ABSENT = "ok", "refused", "eager-error", "crash", "absent"
"""Dispatched; refused by name; eager raises as well; an error that eager does not raise; a missing sample."""

SEED = 11

Record = dict[str, Any]


def record_of(name: str, forwards: str = "all") -> Record:
    """This tree's results of a case, from a clean state; does not raise, and restores the process's state."""
    started, worked = time.perf_counter(), time.process_time()
    with pinned(), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        fresh(SEED)
        try:
            case = make_case(name)
            found = {"status": ABSENT} if case is None else _found(case, is_counted(name, forwards))
        except Exception as error:  # noqa: BLE001 - every error is listed
            found = {"status": CRASH, "reason": _words(error)}
    spent = time.perf_counter() - started, time.process_time() - worked
    return {"case": name, **found, "seconds": round(spent[0], 2), "worked": round(spent[1], 2)}


def is_counted(name: str, forwards: str) -> bool:
    """Whether a case counts runs of ``forward``: with ``"some"``, always the same quarter of the cases does."""
    return forwards == "all" or (forwards == "some" and zlib.crc32(name.encode()) % 4 == 0)


def failed_record(name: str, reason: str, seconds: float) -> Record:
    """The record of a case whose process died or took too long."""
    return {"case": name, "status": CRASH, "reason": reason, "seconds": round(seconds, 2)}


def _found(case: Case, count_forwards: bool) -> Record:
    made: Record = {"about": digest(scrubbed(case.about).encode())}
    with case.context():
        seeded(SEED)
        try:
            case.calls[0](case.make())
        except Exception as error:  # noqa: BLE001 - eager refuses some of its own samples
            return {**made, "status": EAGER_ERROR, "reason": _first_line(error)}
        module = case.make()
        seeded(SEED)
        forwards = Forwards()
        try:
            with counted(module) if count_forwards else contextlib.nullcontext(forwards) as forwards:
                case.add(module)
        except UnsupportedModule as refusal:
            made |= {"status": REFUSED, "reason": scrubbed(str(refusal))}
        except Exception as error:  # noqa: BLE001 - recorded
            return {**made, "status": CRASH, "reason": _words(error)}
        else:
            made["status"] = OK
        made["forwards"] = forwards.count if count_forwards else None
        made |= _called(case, module)
        return made | _counts(module) if made["status"] == OK else made


def _called(case: Case, module: nn.Module) -> Record:
    """The values of all calls: dispatched ones, or eager's of a refused module."""
    values: Record = {}
    forms: dict[str, str] = {}
    for index, call in enumerate(case.calls):
        name = f"call {index}"
        try:
            seen: Seen = call(module)
        except Exception as error:  # noqa: BLE001 - eager may raise here as well; the error has to stay the same
            values[name] = {"is": f"raises {_first_line(error)}"}
            continue
        values |= {f"{name}, {key}": pack(value) for key, value in seen.values.items()}
        forms[name] = seen.form
    text = "\n".join(f"{name}: {form}" for name, form in forms.items())
    return {"values": values, "form": pack_text(scrubbed(text))}


def _counts(module: nn.Module) -> Record:
    counted_calls = stats(module)
    entries = counted_calls.entries
    programs = [program for entry in entries for _, program in _programs(entry)]
    texts: dict[str, str] = {}
    for index, entry in enumerate(entries):
        texts |= {f"entry {index} {name}": program_text(program) for name, program in _programs(entry)}
        texts[f"entry {index} captured"] = entry.lowered.stages[0].script().partition("\n")[2]  # without the seconds
    return {
        "hits": counted_calls.hits,
        "misses": {scrubbed(reason): count for reason, count in counted_calls.misses.items()},
        "entries": len(entries),
        "kernels": sum(len(program.kernels) for program in programs),
        "steps": sum(len(program.steps) for program in programs),
        "saved": sum(int(entry.plan.bytes) for entry in entries if entry.plan is not None),
        "texts": {name: pack_text(scrubbed(text)) for name, text in texts.items()},
    }


def _programs(entry: Entry) -> Iterator[tuple[str, Program]]:
    yield "forward", entry.forward
    if entry.backward is not None:
        yield "backward", entry.backward


def program_text(program: Program) -> str:
    """Instructions, constants and kernels of a program, without compile times."""
    head, _, steps = str(program).partition("\n")
    constants = [f"constant {slot}: {_constant(tensor)}" for slot, tensor in program.constants]
    kernels = [f"{name}:\n{_script(function)}" for name, function in program.kernels.items()]
    return "\n".join([head.partition(", seconds:")[0], steps, f"results {program.results}", *constants, *kernels])


def _script(function: PrimFunc) -> str:
    try:
        return function.script()
    except tvm.error.InternalError:  # TVM's printer evaluates, and cannot divide by zero
        return tvm.ir.save_json(function)


def _constant(tensor: Any) -> str:
    packed = pack(tensor)
    return f"{packed['dtype']}{packed['shape']} {packed['sha']}"


def _first_line(error: BaseException) -> str:
    text = scrubbed(str(error)).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]


def _words(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" @ {'/'.join(frames[-1].filename.split('/')[-2:])}" if frames else ""
    return _first_line(error) + place
