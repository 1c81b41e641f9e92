"""Symbolic extents compute like integers, and every answer they give holds wherever their guards hold."""

import itertools
import random

import pytest
from tvm import relax, tirx

from autodiff.extents import Extent, ExtentScope, from_tir, maximum, minimum, sample_of


def scope_of(**samples: int) -> tuple[ExtentScope, list[Extent]]:
    scope = ExtentScope()
    return scope, [scope.symbol(name, sample) for name, sample in samples.items()]


OPERATORS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "max": maximum,
    "min": minimum,
}
QUESTIONS = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "bool": lambda a, b: bool(a),
}


def script(seed: int) -> list[tuple[str, int, int, int]]:
    """Random steps: an operator or a question, two operands' places, a number to use instead of the second."""
    rng = random.Random(seed)
    names = [*OPERATORS] * 2 + [*QUESTIONS]
    return [(rng.choice(names), rng.randrange(99), rng.randrange(99), rng.randrange(-3, 9)) for _ in range(14)]


def run(steps: list[tuple[str, int, int, int]], values: list) -> tuple[list, list[bool]]:
    """All values, and the answers to all questions."""
    values, answers = list(values), []
    for name, one, other, number in steps:
        a = values[one % len(values)]
        b = values[other % len(values)] if number % 2 else number
        if name in QUESTIONS:
            answers.append(bool(QUESTIONS[name](a, b)))
            continue
        if name in ("//", "%"):
            b = values[other % 2] if number % 2 else 1 + abs(number)
        values.append(OPERATORS[name](a, b))
    return values, answers


@pytest.mark.parametrize("seed", range(60))
def test_answers_hold_where_the_guards_hold(seed: int):
    steps = script(seed)
    scope, (n, m) = scope_of(n=6, m=5)
    values, answers = run(steps, [n, m])
    broken, compiled = scope.broken(), scope.compiled(values)
    assert broken({"n": 6, "m": 5}) is None
    held = 0
    for sizes in itertools.product(range(2, 14), repeat=2):
        given = dict(zip("nm", sizes, strict=True))
        if broken(given) is None:
            held += 1
            assert run(steps, list(sizes))[1] == answers, (sizes, scope.guards)
            assert list(compiled(given)) == run(steps, list(sizes))[0]
    assert held


def test_what_can_be_proven_is_no_guard():
    scope, (n, m) = scope_of(n=6, m=5)
    assert n * m * 8 % m == 0 and n * m * 8 // (n * 4) == 2 * m
    assert (n * 3 + 1) % 3 == 1 and (n * m * 4 + n * 4) // 4 == n * m + n
    assert n != 0 and n != 1 and n * m > n and n + 1 > n and n * m >= 2 * n and n * m - n > 0
    assert n * m == m * n and (n + 1) * (n - 1) == n * n - 1
    assert maximum(n, 1) is n and minimum(1, n) == 1 and maximum(n * m, n) == n * m
    assert scope.guards == ()


def test_what_holds_for_the_sample_is_a_guard():
    scope, (n, m) = scope_of(n=6, m=5)
    assert n > m and n != 7 and n % 3 == 0 and not n * m == 64
    assert [str(guard) for guard in scope.guards] == ["n >= m + 1", "n != 7", "((n) % (3)) == 0", "m*n != 64"]
    broken = scope.broken()
    assert broken({"n": 9, "m": 4}) is None
    for sizes in ({"n": 4, "m": 5}, {"n": 8, "m": 5}, {"n": 1, "m": 0}):
        assert broken(sizes) is not None


def test_a_divisor_that_may_be_0_is_a_guard():
    scope, (n, m) = scope_of(n=6, m=5)
    assert str(n // (m - 3)) == "((n) // (m - 3))" and n % (m - 3) == 0
    broken = scope.broken()
    assert broken({"n": 8, "m": 5}) is None
    assert str(broken({"n": 8, "m": 3})) == "m != 3" and str(broken({"n": 7, "m": 5})) == "((n) % (m - 3)) == 0"
    assert str(broken({"n": 1, "m": 3})) == "n >= 2"
    with pytest.raises(ZeroDivisionError, match="n divided by m - 5"):
        n // (m - 5)


def test_answers_for_other_sizes_are_guards_of_their_own():
    scope, (n, m) = scope_of(n=6, m=5)
    assert n > m
    with scope.assuming({"n": 9, "m": 8}) as guards:
        assert n % 3 == 0 and m % 2 == 0 and sample_of(n) == 9 and scope.assumed is not None
    assert sample_of(n) == 6 and scope.assumed is None and [str(guard) for guard in scope.guards] == ["n >= m + 1"]
    broken = scope.broken(guards)
    assert broken({"n": 12, "m": 14}) is None and broken({"n": 1, "m": 14}) is not None
    assert str(broken({"n": 6, "m": 5})) == "((m) % (2)) == 0"


def test_what_an_extent_is_made_of():
    _, (n, m) = scope_of(n=6, m=5)
    assert [(str(symbol), *rest) for symbol, *rest in [n.linear, (2 * n + 3).linear]] == [("n", 1, 0), ("n", 2, 3)]
    assert [each.linear for each in (n * m, n + m, 3 - n, n // 4, n * n)] == [None] * 5
    (_, _), scope = (n == 7, m // (n - 2) == 8), n.scope
    assert [sorted(map(str, guard.symbols)) for guard in scope.guards] == [["n"], ["n"], ["m", "n"]]


def test_a_bound_above_proves_what_none_would():
    scope = ExtentScope()
    n = scope.symbol("n", 6, high=512)
    assert n < 1024 and n // 600 == 0 and not scope.guards
    assert scope.broken()({"n": 513}) is not None


def test_an_index_fixes_the_extent():
    scope, (n, m) = scope_of(n=6, m=5)
    assert list(range(m)) == [0, 1, 2, 3, 4] and not scope.broken()({"n": 9, "m": 5})
    assert scope.broken()({"n": 9, "m": 6}) is not None
    assert sample_of(n) == 6 and sample_of(7) == 7 and len(scope.guards) == 1


def test_equal_extents_are_one_key():
    _, (n, m) = scope_of(n=6, m=5)
    assert {n * m: 1}[m * n] == 1 and hash((n, 3)) == hash((n + 0, 3))
    assert isinstance(n - n, int) and isinstance(0 * n, int)


def test_through_relax_and_back():
    scope, (n, m) = scope_of(n=6, m=5)
    x = relax.Var("x", relax.TensorType((n, 3, m), "float32"))
    assert [from_tir(extent) for extent in x.ty.shape.values] == [n, 3, m]
    call = relax.BlockBuilder().normalize(relax.op.reshape(x, (n * m, 3)))
    assert [from_tir(extent) for extent in call.ty.shape.values] == [n * m, 3]
    for value in (n * m - n, n // 4, n % 4, maximum(n, m), minimum(n, 4), (n // 2) * 3 + 1):
        assert from_tir(value.__tvm_ffi_object__()) == value
    assert not scope.guards


def test_a_variable_of_no_scope_is_refused():
    with pytest.raises(ValueError, match="wanted a variable of an extent, got k"):
        from_tir(tirx.Var("k", "int64"))
    with pytest.raises(ValueError, match="there is one already"):
        scope_of(n=6)[0].symbol("n", 4)
    with pytest.raises(ValueError, match="wanted a sample from 2 to None, got 1"):
        scope_of(n=1)
