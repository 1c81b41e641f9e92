"""Step driver: the launches of a loop's steps, as addresses in memory → run one after the other, without Python.

A launch of a small kernel costs Python as long as the kernel runs. What differs from step to step is where tensors lie,
and that follows a rule: a few lines of LLVM put each step's addresses into place and call the kernels.
"""

from __future__ import annotations

import ctypes
import functools

import tvm_ffi
from tvm_ffi import libinfo

from bridge.base.log import channel
from bridge.compile.cpu.threads import module_of
from bridge.compile.runtime.loop_frame import Drive

__all__ = ["step_driver"]

_LOG = channel("compile")

_DRIVER = """
%value = type { i32, i32, i64 }  ; TVMFFIAny
%call = type { ptr, ptr, i64 }  ; function, its arguments, their number
%place = type { ptr, i64, i64, i64, i64 }  ; where an address stands, of this step, the next two, what two steps add

define i32 @__tvm_ffi_drive(ptr %self, ptr %arguments, i32 %count, ptr %result) {
entry:
  %steps.at = getelementptr %value, ptr %arguments, i64 0, i32 2
  %steps = load i64, ptr %steps.at
  %calls.at = getelementptr %value, ptr %arguments, i64 1, i32 2
  %calls = load ptr, ptr %calls.at
  %number.at = getelementptr %value, ptr %arguments, i64 2, i32 2
  %number = load i64, ptr %number.at
  %places.at = getelementptr %value, ptr %arguments, i64 3, i32 2
  %places = load ptr, ptr %places.at
  %moving.at = getelementptr %value, ptr %arguments, i64 4, i32 2
  %moving = load i64, ptr %moving.at
  %invoke.at = getelementptr %value, ptr %arguments, i64 5, i32 2
  %invoke = load ptr, ptr %invoke.at
  %returned = alloca %value
  br label %step
step:
  %t = phi i64 [ 0, %entry ], [ %t.next, %launched ]
  %more = icmp slt i64 %t, %steps
  br i1 %more, label %place, label %done
place:
  %p = phi i64 [ 0, %step ], [ %p.next, %put ]
  %unplaced = icmp slt i64 %p, %moving
  br i1 %unplaced, label %put, label %launch
put:
  %where.at = getelementptr %place, ptr %places, i64 %p, i32 0
  %where = load ptr, ptr %where.at
  %now.at = getelementptr %place, ptr %places, i64 %p, i32 1
  %now = load i64, ptr %now.at
  store i64 %now, ptr %where
  %next.at = getelementptr %place, ptr %places, i64 %p, i32 2
  %next = load i64, ptr %next.at
  store i64 %next, ptr %now.at
  %later.at = getelementptr %place, ptr %places, i64 %p, i32 3
  %later = load i64, ptr %later.at
  store i64 %later, ptr %next.at
  %added.at = getelementptr %place, ptr %places, i64 %p, i32 4
  %added = load i64, ptr %added.at
  %latest = add i64 %next, %added
  store i64 %latest, ptr %later.at
  %p.next = add i64 %p, 1
  br label %place
launch:
  %c = phi i64 [ 0, %place ], [ %c.next, %good ]
  %unlaunched = icmp slt i64 %c, %number
  br i1 %unlaunched, label %one, label %launched
one:
  %function.at = getelementptr %call, ptr %calls, i64 %c, i32 0
  %function = load ptr, ptr %function.at
  %given.at = getelementptr %call, ptr %calls, i64 %c, i32 1
  %given = load ptr, ptr %given.at
  %length.at = getelementptr %call, ptr %calls, i64 %c, i32 2
  %length = load i64, ptr %length.at
  %short = trunc i64 %length to i32
  store %value zeroinitializer, ptr %returned
  %status = call i32 %invoke(ptr %function, ptr %given, i32 %short, ptr %returned)
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %bad, label %good
good:
  %c.next = add i64 %c, 1
  br label %launch
launched:
  %t.next = add i64 %t, 1
  br label %step
bad:
  ret i32 %status
done:
  store %value zeroinitializer, ptr %result
  ret i32 0
}
"""


@functools.cache
def step_driver() -> Drive | None:
    """``None`` where TVM's functions cannot be called by address."""
    if not hasattr(tvm_ffi.Function, "__chandle__"):
        _LOG.info("this TVM does not tell the addresses of functions: steps of loops are launched by Python")
        return None
    module = module_of(_DRIVER, "steps")
    if module is None:
        return None
    drive = module["drive"]
    invoke = ctypes.cast(ctypes.CDLL(libinfo.find_libtvm_ffi()).TVMFFIFunctionCall, ctypes.c_void_p).value

    def run(steps: int, calls: int, launches: int, places: int, moving: int) -> None:
        drive(steps, calls, launches, places, moving, invoke)

    return run
