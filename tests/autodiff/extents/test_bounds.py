"""Bounds of terms are found once; a range that gets smaller lets more be proven, with no guard."""

from autodiff.extents import ExtentScope, below


def test_bounds_follow_a_range_that_gets_smaller():
    scope = ExtentScope()
    n = scope.symbol("n", 5)
    assert not below(2 * n + 1, 100)
    scope.narrow(n.linear[0], 3, 9)
    assert below(2 * n + 1, 100) and n > 2 and scope.guards == ()
    assert str(scope.broken()({"n": 10})) == "9 >= n"


def test_a_range_never_gets_larger():
    scope = ExtentScope()
    n = scope.symbol("n", 5, 4, 8)
    scope.narrow(n.linear[0], 2, None)
    assert (scope.range_of(n).low, scope.range_of(n).high) == (4, 8)


def test_terms_that_are_the_same_are_equal_without_a_proof():
    scope = ExtentScope()
    n = scope.symbol("n", 5, -8)
    assert (n * n + 3) // n == (n * n + 3) // n and {(n + 1) // 2: 1}[(1 + n) // 2] == 1
    assert all(guard.relation == "!=" for guard in scope.guards)  # only that none is divided by 0
