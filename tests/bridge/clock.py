"""A fake clock for tests."""

from __future__ import annotations


class Clock:
    """Seconds that pass only in steps."""

    def __init__(self):
        self.now, self.runs = 0.0, 0

    def __call__(self):
        return self.now

    def step(self, *seconds):
        left = list(seconds)

        def run():
            self.runs += 1
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run
