"""A random module with a loop over time from a seed: cells, carries, parts, results, in common forms."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from bridge.capture.loops import rolled
from tests.fuzz.check import check
from tests.fuzz.program import Program
from tests.fuzz.verdict import Verdict

BATCH, WIDTH = 2, 4

WAYS = {
    "for t in range(n):": "",
    "for t in reversed(range(n)):": "",
    "for t in range(n - 1, -1, -1):": "",
    "for t in range(1, n):": "",
    "for t, p in enumerate({parts}):": "taken",
    "for p in {parts}:": "taken, uncounted",
    "for t in range(0, n - 1, 2):": "two",
    "for t in range(n):\n    if t % 5 == 4:\n        continue": "",
}
"""The head of a loop → its particularity: the loop takes the part, no counted step, or two parts in a step."""

STARTS = (
    "torch.zeros({shape}, dtype=D)",
    "x0.sum({axis}) * 0.1",
    "self.start.expand({shape})",
    "{first}",
    "{first}.detach()",
)

CELLS = {
    "nn.Linear(4, 4, dtype=D)": "torch.tanh({f}({h}) + {p})",
    "nn.GRUCell(4, 4, dtype=D)": "{f}({p}, {h})",
    "nn.RNNCell(4, 4, dtype=D)": "{f}({q}, {h})",
    "nn.LayerNorm(4, dtype=D)": "{f}({h} + {p})",
    "nn.Parameter(torch.randn(4, 4, dtype=D) * 0.3)": "torch.sigmoid({p} @ {f} + {h})",
    "nn.Linear(4, 8, dtype=D)": "(lambda a, b: a.sigmoid() * b.tanh() + 0.5 * {h})(*{f}({p}).chunk(2, -1))",
    "nn.Linear(8, 4, bias=False, dtype=D)": "{f}(torch.cat([{p}, {h}], -1)).tanh()",
    "nn.ParameterList([nn.Parameter(torch.randn(4, dtype=D)) for _ in range(12)])": "torch.tanh({h} * {f}[{t}] + {p})",
    "nn.Parameter(torch.randn(12, 4, dtype=D))": "torch.tanh({h} + {f}[{t}] * {p})",
    "[0.1 * (k % 7) - 0.3 for k in range(12)]": "torch.sin({h} * {f}[{t}] + {p})",
    "nn.Dropout(0.3)": "torch.tanh({f}({h}) + {p})",
    "nn.Embedding(4, 4, dtype=D)": "torch.tanh({f}({h}.argmax(-1)) + {p})",
}
"""A line of ``__init__`` → the step's expression with it."""

RARE = ("Dropout", "Embedding", "ParameterList")

EXPRESSIONS = (
    "{h} * 0.5 + {p}",
    "torch.where({p} > 0, {h}, {q} * 0.5)",
    "torch.where({p} < 0.2 * {t}, {h}, {q} * 0.5)",
    "{h} - {h}.mean(-1, keepdim=True)",
    "torch.cat([{h}[:, 2:], {q}[:, :2]], -1)",
    "F.softmax({h}, -1) * {p}",
    "torch.tanh({h} * ({t} + 1) * 0.1 + {p})",
    "({t} - 3) * 0.1 * {p} + {h}.sin()",
    "{p} / ({t} + 1) - {h}.cos()",
    "torch.full((2, 1), 0.5 ** {t}, dtype=D) * {p} + {h}.sigmoid()",
    "torch.lerp({h}, {p}.tanh(), {q}.sigmoid())",
    "{h}.detach() * {p}.sigmoid()",
    "torch.addcmul({p}, {h}.tanh(), {q}.tanh())",
    "{h}.clamp(-1, 1) + {p}.exp() * 0.1",
    "({h}.tanh() ** 2) - {t}",
)

#: Statements that write into a tensor ``h``.
IN_PLACE = (
    "{h} += {p}",
    "{h} *= 0.5 + 0.1 * {t}",
    "{h} /= ({p}.square() + 1)",
    "{h}.mul_(0.5).add_({p}, alpha=0.3)",
    "{h}.tanh_()",
    "F.leaky_relu({h}, 0.1, inplace=True)",
    "{h}.clamp_(-1, 1).masked_fill_({p}.detach() > 0.3, 0.25)",
    "{h}[:, :2].mul_(0.5)",
)


#: Statements with alternating steps, or with reads of overlapping parts; they update a state ``h``.
UNEVEN = (
    "{h} = {h}.detach() if {t} % 3 == 0 else {h}",
    "{h} = {h} * 0.5 if {t} % 2 else {h}.sin()",
    "if {t} % 4 == 1:\n    {h} = torch.tanh({h} + {p})",
    "{h} = {h} + 0.3 * {whole}.narrow({axis}, min({t}, n - 2), 2).sum({axis})",
    "{h} = {h} * {whole}.narrow({axis}, max({t} - 2, 0), min({t}, 2) + 1).mean({axis})",
)


class _Loop:
    """The text of a loop during its generation."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.init: list[str] = ["self.start = nn.Parameter(torch.randn(4, dtype=D))"]
        self.before: list[str] = []
        self.step: list[str] = []
        self.after: list[str] = []
        self.results: list[str] = []
        self.made = 0

    def fresh(self) -> str:
        self.made += 1
        return f"v{self.made}"

    def expression(self, states: list[str], part: str, step: str) -> str:
        rng = self.rng
        names = {
            "h": rng.choice(states),
            "q": rng.choice([*states, part]),
            "p": rng.choice([part, part, *states]),
            "t": step,
        }
        if rng.random() < 0.5:
            return rng.choice(EXPRESSIONS).format(**names)
        line, text = rng.choice(list(CELLS.items()))
        if any(word in line for word in RARE) and rng.random() < 0.7:
            return rng.choice(EXPRESSIONS).format(**names)
        name = f"f{len(self.init)}"
        self.init.append(f"self.{name} = {line}")
        return text.format(f=f"self.{name}", **names)


def generate_loop(seed: int) -> Program:
    """The program of a seed, always the same one."""
    rng = random.Random(seed)
    loop, axis, steps = _Loop(rng), rng.choice((0, 1)), rng.randint(7, 12)
    dtype = rng.choice(("float64", "float64", "float64", "float32"))
    extents = (steps, BATCH, WIDTH) if axis == 0 else (BATCH, steps, WIDTH)
    grad = rng.choice(("", ".requires_grad_()"))
    arguments = [("x0", f"torch.randn({extents}, dtype=D){grad}", False)]
    loop.before.append(f"n = x0.shape[{axis}]")
    source = "x0"
    for _ in range(rng.choice((1, 1, 1, 2))):
        source = _add_loop(loop, source, axis, arguments)
    results = ", ".join(rng.sample(loop.results, rng.randint(1, len(loop.results))))
    body = tuple(loop.before)
    return Program(seed, dtype, tuple(loop.init), tuple(arguments), body, results, rng.random() < 0.9)


def _add_loop(loop: _Loop, source: str, axis: int, arguments: list) -> str:
    """Adds one loop over the steps of ``source``; returns the name of its stacked results, in the same layout."""
    rng, shape = loop.rng, f"({BATCH}, {WIDTH})"
    way, special = rng.choice(list(WAYS.items()))
    states = [loop.fresh() for _ in range(rng.randint(1, 3))]
    first = f"{source}.select({axis}, 0)"
    for state in states:
        start = rng.choice(STARTS)
        if len(arguments) == 1 and rng.random() < 0.2:
            arguments.append(("h0", f"torch.randn({shape}, dtype=D).requires_grad_()", False))
            start = "h0"
        loop.before.append(f"{state} = {start.format(shape=shape, axis=axis, first=first)}")
    made, total, written = loop.fresh(), loop.fresh(), loop.fresh()
    loop.before += [f"{made}, {total} = [], 0"]
    into = rng.random() < 0.4 and "uncounted" not in special
    whole = f"n, {BATCH}, {WIDTH}" if axis == 0 else f"{BATCH}, n, {WIDTH}"
    if into:
        loop.before.append(
            f"{written} = {rng.choice(('torch.zeros', 'torch.ones', source + '.new_zeros'))}({whole}).to(D)"
        )
        if rng.random() < 0.7:  # a new tensor without a cast
            loop.before[-1] = f"{written} = torch.zeros({whole}, dtype=D)"
    step = f"len({made})" if "uncounted" in special else "t"
    lines = []
    part = "p"
    if "taken" not in special:
        index = rng.choice(("t", "t", "n - 1 - t", "t - n"))
        if special == "two":
            index = "t"
        lines.append(f"p = {_part(source, index, axis, rng)}")
        if special == "two":
            lines.append(f"p = p * 0.5 + {_part(source, 't + 1', axis, rng)}")
    for _ in range(rng.randint(0, 2)):
        name = loop.fresh()
        lines.append(f"{name} = {loop.expression(states, part, step)}")
        part = rng.choice((part, name))
    if rng.random() < 0.2:  # layers of equal size
        cells = f"f{len(loop.init)}"
        loop.init.append(f"self.{cells} = nn.ModuleList([nn.GRUCell(4, 4, dtype=D) for _ in range({len(states)})])")
        held = loop.fresh()
        loop.before.append(f"{held} = [{', '.join(states)}]")
        lines += [f"for k, cell in enumerate(self.{cells}):", f"    {held}[k] = p = cell(p, {held}[k])"]
        lines.append(f"{', '.join(states)}{',' if len(states) == 1 else ''} = {held}")
    elif rng.random() < 0.3:  # all at once
        lines.append(f"{', '.join(states)} = {', '.join(loop.expression(states, part, step) for _ in states)}")
    else:
        lines += [f"{state} = {loop.expression(states, part, step)}" for state in states]
    shown = rng.choice(states)
    order = rng.choice((f"{made}.append({shown})", f"{made}.append({shown})", f"{made}.insert(0, {shown})"))
    lines.append(order)
    if rng.random() < 0.3:
        lines.append(f"{total} = {total} + {rng.choice(states)}.square().mean()")
        loop.results.append(total)
    if into:
        index = rng.choice(("t", "n - 1 - t"))
        text = f"{index}" if axis == 0 else f":, {index}"
        forms = (f"{written}[{text}] = {shown}", f"{written}[{text}] = {shown}", f"{written}[{text}].copy_({shown})")
        lines.append(rng.choice(forms))
        loop.results.append(written)
        if rng.random() < 0.1:
            lines.append(f"{shown} = {shown} + {written}[{text}]")
    in_place = random.Random(f"{loop.init} {lines}")  # a separate generator keeps the other statements as they were
    if in_place.random() < 0.3:
        name = loop.fresh()
        given = {"h": name, "p": in_place.choice(states), "t": step}
        lines += [f"{name} = {in_place.choice(states)} + 0.5", in_place.choice(IN_PLACE).format(**given)]
        lines.append(f"{in_place.choice(states)} = {name}")
    if in_place.random() < 0.3:
        given = {"h": in_place.choice(states), "p": in_place.choice(states), "t": step, "whole": source, "axis": axis}
        lines += in_place.choice(UNEVEN).format(**given).split("\n")
    way = way.format(parts=rng.choice((f"{source}.unbind({axis})", f"[{source}.select({axis}, k) for k in range(n)]")))
    loop.before.append("\n".join([way, *(f"    {line}" for line in lines)]))
    loop.results += states
    stacked = loop.fresh()
    loop.before.append(f"{stacked} = torch.stack({rng.choice((made, made, made + '[::-1]'))}, {axis})")
    loop.results += [stacked, f"{made}[0]", f"{made}[len({made}) // 2] * 2"]
    loop.before.append(f"n = {stacked}.shape[{axis}]")
    return stacked


def _part(source: str, index: str, axis: int, rng: random.Random) -> str:
    if axis == 0:
        return rng.choice((f"{source}[{index}]", f"{source}[{index}]", f"{source}.select(0, {index})"))
    forms = f"{source}[:, {index}]", f"{source}[:, {index}, :]", f"{source}.select(1, {index})"
    return rng.choice(forms)


@contextmanager
def _short_loops() -> Iterator[list[bool]]:
    """While active, loops of few operators are rolled up as well; yields a list that notes whether loops were found."""
    before = rolled.LEAST_ROWS, rolled.find_loops
    found: list[bool] = []

    def find(calls):
        loops = before[1](calls)
        found.append(bool(loops))
        return loops

    rolled.LEAST_ROWS, rolled.find_loops = 1, find
    try:
        yield found
    finally:
        rolled.LEAST_ROWS, rolled.find_loops = before


def check_loop(program: Program) -> Verdict:
    """See :func:`tests.fuzz.check.check`; the status tells whether a loop was found in a recorded run."""
    with _short_loops() as found:
        verdict = check(program)
    return replace(verdict, status="same (a loop)") if verdict.status == "same" and any(found) else verdict
