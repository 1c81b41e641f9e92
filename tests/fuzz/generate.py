"""A random module from a seed: arguments, statements one after another, a result."""

from __future__ import annotations

import random
import warnings

import torch
from torch import Tensor

from tests.fuzz import indices, pointwise, shapes
from tests.fuzz.program import Program
from tests.fuzz.scope import Scope, is_float
from tests.fuzz.statements import RARE_STATEMENTS, STATEMENTS
from tests.fuzz.themes import VOCABULARY, is_complex, themes

DTYPES = ("float64", "float64", "float64", "float32", "float32", "bfloat16")
SHAPES = (
    *((2, 3, 4), (3, 4), (5,), (2, 5), (4, 4), (1, 6), (2, 3, 5), (6, 2), (2, 2, 3, 4), (3, 1), (2, 1, 4), (), (1,)),
    *((7, 33), (3, 65), (17, 19), (2, 4, 16), (1, 1), (0, 3), (2, 0), (40, 9), (8, 8)),
)
LAYOUTS = (
    *("{t}", "{t}", "{t}", "{t}", "{t}.clone().t()", "{t}.transpose(0, -1)", "{t}[..., ::2]", "{t}.expand(2, *{s})"),
    *(
        "{t}[1:]",
        "{t}.flip(0)",
        "{t}.movedim(0, -1)",
        "{t}.unsqueeze(0).expand(3, *{s})",
        "{t}.repeat(2, *[1] * {r})[::2]",
    ),
)
RARE_PROBABILITY = 0.15
"""The share of programs with a part that mostly cannot be dispatched."""


def generate(seed: int) -> Program:
    """The program of a seed, always the same one. Eager PyTorch runs it; dispatch may refuse it."""
    rng = random.Random(seed)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's advice on the proposals
        torch.manual_seed(seed)
        return _generate(rng, seed)


def _generate(rng: random.Random, seed: int) -> Program:
    dtype = rng.choice(DTYPES)
    training = rng.random() < 0.9
    scope = Scope(rng, dtype)
    scope.module.train(training)
    _add_arguments(scope)
    if "complex" in themes(seed):
        scope.argument(f"torch.randn({scope.choice(SHAPES)}, dtype=C){scope.choice(['.requires_grad_()', ''])}")
    length = rng.randint(3, 16)
    rare_at = rng.randrange(length) if rng.random() < RARE_PROBABILITY else -1
    expressions = {**pointwise.PROPOSALS, **shapes.PROPOSALS, **indices.PROPOSALS}
    statements = {**STATEMENTS, **indices.STATEMENTS}
    proposals = [(f, w, True) for f, w in expressions.items()] + [(f, w, False) for f, w in statements.items()]
    chosen = themes(seed)
    for name, vocabulary in VOCABULARY.items():
        proposals += vocabulary if name in chosen else ()
    weights = [weight for _, weight, _ in proposals]
    tries = 0
    while len(scope.body) < length and tries < 40 * length:
        tries += 1
        if len(scope.body) == rare_at:
            rare_at = -1
            _try(scope, RARE_STATEMENTS, False)
            continue
        propose, _, is_expression = rng.choices(proposals, weights)[0]
        _try(scope, propose, is_expression)
    result = _result(scope)
    return Program(
        seed, dtype, tuple(scope.init), tuple(scope.arguments), tuple(scope.body), result, training, tuple(scope.before)
    )


def _try(scope: Scope, propose, is_expression: bool) -> None:
    """Takes a proposal if eager does; otherwise mostly removes its definitions."""
    defined = scope.defined
    proposal = propose(scope)
    if proposal is not None and is_expression:
        proposal = f"{scope.fresh('v')} = {proposal}"
    if proposal is None or not scope.emit(proposal):
        if not scope.chance(0.05):  # sometimes stays: an unused parameter
            scope.undefine(defined)


def _add_arguments(scope: Scope) -> None:
    for position in range(scope.integer(1, 3)):
        shape = scope.choice(SHAPES)
        kind = scope.rng.random()
        grad = ".requires_grad_()" if scope.chance(0.6) else ""
        keyword = position > 0 and scope.chance(0.25)
        # A positional argument precedes keyword arguments, so it cannot depend on one.
        behind = {name for name, _, by_keyword in scope.arguments if by_keyword and not keyword}
        tensors = [name for name in scope.variables if name not in behind]
        if tensors and kind < 0.06:
            scope.argument(scope.choice(tensors), keyword)  # the same tensor twice
        elif tensors and kind < 0.12:
            other = scope.choice(tensors)
            scope.argument(f"{other}[:1]" if scope[other].dim() else other, keyword)
        elif kind < 0.7:
            text = f"torch.randn({shape}, dtype=D){grad}"
            if shape:
                layout = scope.choice(LAYOUTS)
                text = layout.replace("{t}", text).replace("{s}", str(shape)).replace("{r}", str(len(shape)))
            _argument(scope, [text, f"torch.randn({shape}, dtype=D){grad}"], keyword)
        elif kind < 0.76:
            scope.argument(f"torch.randn({shape}, dtype=torch.float32){grad}", keyword)
        elif kind < 0.86:
            integer = scope.choice(["torch.long", "torch.int32", "torch.uint8"])
            scope.argument(f"torch.randint(0, 4, {shape}, dtype={integer})", keyword)
        elif kind < 0.90:
            scope.argument(f"torch.rand({shape}) > 0.5", keyword)
        elif kind < 0.97:
            scope.argument(scope.choice(["0.5", "3", "True", "None", "'mean'"]), keyword)
        elif kind < 0.98:
            scope.argument("Keep()", keyword)
        elif kind < 0.99:
            scope.argument(f"torch.randn({shape}, dtype=torch.complex64)", keyword)
        else:
            scope.argument(f"(torch.randn(3, dtype=D){grad}, {{'k': torch.ones(2, dtype=D)}})", keyword)
    if scope.pick(is_float) is None:
        scope.arguments.insert(0, ("x0", "torch.randn(3, 4, dtype=D).requires_grad_()", False))
        scope.names["x0"] = eval(scope.arguments[0][1], scope.names)
        scope.variables.append("x0")


def _argument(scope: Scope, texts: list[str], keyword: bool) -> None:
    """Adds the first valid expression (a transpose of three axes may be invalid)."""
    for text in texts:
        try:
            scope.argument(text, keyword)
            return
        except (RuntimeError, TypeError, IndexError):
            continue


def _result(scope: Scope) -> str:
    """Forward's result: mostly the last values; sometimes several, nested, aliased, or no tensors at all."""
    made = [name for name in scope.variables if name not in {a for a, _, _ in scope.arguments}]
    if not made:
        return scope.variables[0]
    numbers = [name for name in made if isinstance(scope[name], Tensor) and is_complex(scope[name])]
    if numbers and scope.chance(0.8):
        return f"{numbers[-1]}, sum(t.abs().sum() for t in ({', '.join(numbers)},)), {_of_reals(scope, made)}"
    return _of_reals(scope, made)


def _of_reals(scope: Scope, made: list[str]) -> str:
    last = made[-1]
    floats = [name for name in made if isinstance(scope[name], Tensor) and is_float(scope[name])]
    main = floats[-1] if floats else last
    integers = any("randint" in text for _, text, _ in scope.arguments)
    if floats and (integers or scope.chance(0.5)):  # no dead code: eager would raise for its indices as well
        return f"{main}, sum(t.to(D).sin().sum() for t in ({', '.join(floats)},)), {last}"
    some = [scope.choice(scope.variables) for _ in range(2)]
    return scope.choice(
        [
            main,
            main,
            f"{main}, {last}",
            f"{main}, {some[0]}",
            f"{main}, {some[0]}, {some[1]}",
            f"{{'a': {main}, 'b': [{some[0]}, {last}]}}",
            f"Pair({main}, {some[0]} * 2)",
            f"{main}, None, 3, {some[0]}",
            f"{main}, {main}",
            f"{main}, {main}.detach(), {main}[..., :1] if {main}.dim() else {main}",
            f"({main} + 1).t() if {main}.dim() == 2 else {main}",
            f"{main}.sum(), {some[0]}.unsqueeze(0)",
            f"{main}.sum()",
            f"[{some[0]}.flatten(), {main}]",
        ]
    )
