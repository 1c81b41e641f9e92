"""Clocks of a GPU: peers by turns → the milliseconds of each, by CUDA events or by the host; kernels of one step."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

WARM_UP = 5
AHEAD_CYCLES = 16_000_000
"""GPU clock cycles of sleep during which the host launches a step: some 8 ms."""

Step = Callable[[], object]


def by_turns(
    runs: Mapping[str, Step],
    rounds: int,
    ahead: bool,
    before: Mapping[str, Step] | None = None,
    cycles: int = AHEAD_CYCLES,
    warm_up: int = WARM_UP,
) -> dict[str, float]:
    """Median milliseconds of each run: on the GPU with the host ahead of it, or on the host from idle to idle.

    Args:
        ahead: whether the GPU sleeps while the host launches; without a GPU it is always the host's clock.
        before: untimed work before each run.
        cycles: of the GPU's sleep.
        warm_up: uncounted turns before.
    """
    has_gpu = torch.cuda.is_available()
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + warm_up):
        for name, run in runs.items():
            if before is not None:
                before[name]()
            if has_gpu:
                milliseconds = _on_gpu(run, cycles if ahead else 0)
            else:
                started = time.perf_counter()
                run()
                milliseconds = (time.perf_counter() - started) * 1e3
            if turn >= warm_up:
                spent[name].append(milliseconds)
    return {name: statistics.median(values) for name, values in spent.items()}


def _on_gpu(run: Step, cycles: int) -> float:
    """Milliseconds of one run; by the host's clock where the GPU does not sleep before it."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if cycles:
        torch.cuda._sleep(cycles)
    started = time.perf_counter()
    first.record()
    run()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) if cycles else (time.perf_counter() - started) * 1e3


def in_a_row(run: Step, steps: int) -> Step:
    """A run of several steps, one after another, as in a training loop."""

    def runs() -> None:
        for _ in range(steps):
            run()

    return runs


@contextmanager
def interrupted_after(seconds: float, stopped: Callable[[], float] = lambda: 0.0) -> Iterator[None]:
    """Raises ``TimeoutError`` in longer work, as soon as Python code runs; 0: never.

    Args:
        seconds: of this process's running time.
        stopped: the seconds for which this process has been stopped so far; they do not count.
    """
    begun, stopped_before = time.monotonic(), stopped()

    def stop(*_: object) -> None:
        left = seconds - (time.monotonic() - begun - (stopped() - stopped_before))
        if left > 0:
            signal.setitimer(signal.ITIMER_REAL, left)
        else:
            raise TimeoutError(f"took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a large ``copy_``."""
    source = torch.empty(2**27, device=device)
    target = torch.empty_like(source)
    spent = by_turns({"copy": lambda: target.copy_(source)}, 20, ahead=True)["copy"]
    return 2 * source.nbytes / (spent * 1e-3)


def show_kernels(head: str, run: Step, most: int) -> None:
    """Prints the longest kernels of a run, by torch's profiler."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    found = [event for event in recorded.key_averages() if event.device_type == DeviceType.CUDA]
    found.sort(key=lambda event: event.self_device_time_total, reverse=True)
    spent, calls = sum(event.self_device_time_total for event in found), sum(event.count for event in found)
    print(f"{head}: {spent:.0f} us in {calls} kernels")
    for event in found[:most]:
        print(f"  {event.self_device_time_total:8.1f} us {event.count:3} x  {event.key[:110]}", flush=True)
