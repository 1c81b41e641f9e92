"""Proofs about extents hold for all sizes, and asking leaves no guard."""

from autodiff.extents import ExtentScope, below, content, divides, minimum, same


def test_proofs_leave_no_guard():
    scope = ExtentScope()
    n, m = scope.symbol("n", 128), scope.symbol("m", 128, high=512)
    assert same(n * m, m * n) and same(n * 0 + 3, 3) and same(minimum(n, 1), 1)
    assert not same(n, m) and not same(n, 128) and not same(3, n)
    assert divides(n * 64, n * m * 128) and divides(16, n * 64) and divides(n, 0) and divides(2, 6)
    assert not divides(16, n) and not divides(n, m) and not divides(n, 128) and not divides(4, 6)
    assert content(n * m * 768 + n * 512) == 256 and content(n + 1) == 1 and content(12) == 12
    assert below(m * 2, 1025) and below(3, 4)
    assert not below(m * 2, 1024) and not below(n, 2**62) and not below(4, 4)
    assert scope.guards == ()
