"""Samples of the rule of scans: small bodies, in both directions."""

from __future__ import annotations

import torch
from tvm import relax
from tvm.relax import TupleGetItem, op

from autodiff.ir import bindings
from autodiff.scan import Scan, body_text, scan_call, scan_of
from partition import differentiable_scans
from tests.autodiff.evaluate import function, tensor_type
from tests.autodiff.gradcheck import draw
from tests.autodiff.samples import sample

__all__: list[str] = []


def _step(scope, h, x, w, b):
    """h' = tanh(h w + x + b); y = h' h"""
    product = scope.emit(op.add(scope.emit(op.matmul(h, w)), scope.emit(op.add(x, b))))
    after = scope.emit(op.tanh(product))
    return [after, scope.emit(op.multiply(after, h))]


def _scan(length, reverse):
    h, x, w, b = draw(2, 3), draw(length, 2, 3, seed=1), draw(3, 3, seed=2), draw(3, seed=3)
    body = function(_step, h, x[0], w, b)
    plain = Scan(body_text(body), 1, 1, length, reverse)

    def whole(scope, *params):
        made = scope.emit(scan_call(plain, params))
        return [scope.emit(TupleGetItem(made, index)) for index in range(2)]

    ready = differentiable_scans(function(whole, h, x, w, b), [0, 1, 2, 3])
    scan = next(scan_of(value)[0] for _, value in bindings(ready) if isinstance(value, relax.Call))

    def build(scope, *params):
        assert [tensor_type(each) for each in (h, x, w, b)] == [param.ty for param in params]
        made = scope.emit(scan_call(scan, params))
        return [TupleGetItem(made, index) for index in range(2)]

    def reference(h, x, w, b):
        ys = {}
        for step in reversed(range(length)) if reverse else range(length):
            after = torch.tanh(h @ w + x[step] + b)
            h, ys[step] = after, after * h
        return [h, torch.stack([ys[step] for step in range(length)])]

    sample("library.scan", build, reference, h, x, w, b)


for _length in (1, 2, 5):
    _scan(_length, reverse=False)
_scan(4, reverse=True)
