"""Results that others are computed from: hooks, retained gradients and gradients with respect to them are eager's."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from tests.bridge.beside import beside, double


class Net(nn.Module):
    def __init__(self, results):
        super().__init__()
        self.body, self.neck, self.head = (nn.Linear(4, 4).double() for _ in range(3))
        self.results = results

    def forward(self, x):
        return self.results(self, x)


def one(m, x):
    z = torch.tanh(m.body(x))
    return z, m.head(z)


def loss_first(m, x):
    z = m.head(torch.tanh(m.body(x)))
    return z.square().mean(), z


def three(m, x):
    z = torch.tanh(m.body(x))
    y = m.neck(nn.functional.dropout(z, 0.3))
    return {"out": m.head(y * z), "hidden": (z, y), "again": z}


def parts(m, x):
    mean, spread = m.body(x).chunk(2, -1)
    return m.head(torch.cat([mean, spread.exp()], -1)), mean, spread


def waves(m, x):
    z = torch.complex(m.body(x), m.neck(x))
    return z, z * z.exp(), m.head(z.abs())


def spectrum(m, x):
    z = torch.fft.rfft(m.body(x))
    return m.head(torch.fft.irfft(z * z, n=4)), z


FORMS = {"z, head(z)": one, "loss, logits": loss_first, "three in a row": three, "chunks": parts}
FORMS |= {"complex": waves, "spectrum": spectrum}


def leaves(out):
    return [each for each in torch.utils._pytree.tree_leaves(out) if each.requires_grad]


def real(x):
    return torch.view_as_real(x) if x.is_complex() else x


def total(out):
    return sum((k + 1) * real(each).square().sum() for k, each in enumerate(leaves(out)))


def plain(m, out, own):
    total(out).backward()


def hooks(m, out, own):
    for k, each in enumerate(leaves(out)):
        each.register_hook(lambda g, k=k: own.seen.append((k, g.clone())))
    real(leaves(out)[0]).sum().backward(retain_graph=True)
    total(out).backward()


def changing_hook(m, out, own):
    leaves(out)[-1].register_hook(lambda g: g * 3)
    leaves(out)[0].register_hook(lambda g: g + 1)
    total(out).backward()


def dropped_hook(m, out, own):
    loss = real(leaves(out)[0]).sum() + real(leaves(out)[-1]).sum()
    for each in leaves(out)[1:]:
        each.register_hook(lambda g: own.seen.append(g.clone()))
    del each, out
    gc.collect()
    loss.backward()


def retained(m, out, own):
    for each in leaves(out):
        each.retain_grad()
    total(out).backward()
    own.seen += [each.grad for each in leaves(out)]


def asked(m, out, own):
    some = leaves(out)
    own.seen += torch.autograd.grad(total(out), some, retain_graph=True)
    own.seen += torch.autograd.grad(total(out), [some[-1], m.body.weight, m.head.weight], retain_graph=True)
    total(out).backward()


def twice(m, out, own):
    some = leaves(out)
    slopes = torch.autograd.grad(total(out), some, create_graph=True)
    (total(out) + sum(real(each).square().sum() for each in slopes)).backward()


def batched(m, out, own):
    y, z = leaves(out)[-1], leaves(out)[0]
    try:
        own.seen += torch.autograd.grad(y.flatten()[:2], z, torch.eye(2, dtype=y.dtype), is_grads_batched=True)
    except RuntimeError as error:
        own.seen.append("not have been used" in str(error))


LOOKS = [plain, hooks, changing_hook, dropped_hook, retained, asked, twice, batched]


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.__name__)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("sample", [True, False])
def test_all_of_the_gradient_is_seen(form, look, sample):
    def step(m, own, i):
        own.seen = []
        out = m(double(i, 3, 4))
        values = [each.detach().clone() for each in leaves(out)]
        holder = [out]
        del out
        look(m, holder.pop(), own)
        return values, own.seen

    beside(lambda: (Net(form), SimpleNamespace()), step, (lambda m, own: (double(9, 3, 4),)) if sample else None)


def apart(m, x):
    return torch.tanh(m.body(x)), m.head(x), m.neck(x)[:, 1:]


@pytest.mark.parametrize("results", [apart, one, three], ids=lambda results: results.__name__)
def test_hooks_of_results_that_the_loss_does_not_use_are_not_called(results):
    def step(m, own, i):
        seen, out = {}, leaves(m(double(i, 3, 4)))
        for k, each in enumerate(out):
            each.register_hook(lambda g, k=k: seen.update({k: g.clone()}))
            each.register_hook(lambda g: g * 2)
        out[1].sum().backward(retain_graph=True)
        first = sorted(seen.items())
        (out[0].sum() + out[-1].sum()).backward()
        return first, sorted(seen.items())

    beside(lambda: (Net(results), SimpleNamespace()), step, lambda m, own: (double(9, 3, 4),))


def test_nothing_is_computed_anew_where_nobody_looks():
    module = Net(three)
    add_tvm_dispatch(module, double(1, 3, 4))
    total(module(double(2, 3, 4))).backward()
    assert not stats(module).eager_backwards
    out = module(double(2, 3, 4))
    out["hidden"][0].register_hook(lambda g: None)
    total(out).backward()
    assert sum(stats(module).eager_backwards.values()) == 2  # of the two results that are computed from it


def test_a_result_that_is_written_afterwards():
    def step(m, own, i):
        z, y = m(double(i, 3, 4))
        z.retain_grad()
        y.mul_(2)
        (y.sum() + z.square().sum()).backward()
        return y, z.grad

    beside(lambda: (Net(one), None), step, lambda m, own: (double(9, 3, 4),))


def test_a_view_that_is_read_on_the_way_is_refused():
    def results(m, x):
        z = m.body(x)
        row = z[0]
        return z, row, m.head(row)

    with pytest.raises(UnsupportedModule, match="a view"):
        add_tvm_dispatch(Net(results), double(1, 3, 4))
