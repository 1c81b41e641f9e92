"""Models with code that cannot be captured: the largest modules inside are dispatched; the eager rest is named."""

import copy
from collections.abc import MutableMapping

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bridge import UnsupportedModule, add_tvm_dispatch, explain, remove_tvm_dispatch, stats
from bridge.dispatch import dispatcher, parts
from tests.bridge.beside import beside, double

pytestmark = pytest.mark.usefixtures("lowered_once")

WIDTH = 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.2, self.training)


class Picks(nn.Module):
    """A shape that numbers decide, between modules that can be captured."""

    def __init__(self):
        super().__init__()
        self.before, self.after = Block(), Block()

    def forward(self, x):
        x = self.before(x)
        rows = torch.from_numpy((x[:, 0] > 0).detach().cpu().numpy().nonzero()[0]).to(x.device)
        return self.after(x).index_select(0, rows).sum(0) + x.mean(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU())
        self.layers = nn.ModuleList([Block(), Picks()])
        self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.unused = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, *, scale=1.0):
        x = self.drop(self.shared(self.stem(x)))
        for layer in self.layers:
            x = layer(x).expand(x.shape).contiguous()
        return self.shared(x) * scale


def pair(**options):
    torch.manual_seed(0)
    eager = Model().double()
    x = torch.randn(9, WIDTH, dtype=torch.float64)
    return add_tvm_dispatch(copy.deepcopy(eager), x, whole=False, **options), eager, x


def trained(module, x, steps=5):
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(x, scale=2.0).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *module.state_dict().values(), torch.get_rng_state()]


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.composes(
    "code between modules that cannot be captured",
    "`whole=False`: the largest modules are dispatched, the rest is told",
    section="Guards",
)
def test_the_largest_modules_are_dispatched_and_train_alike():
    dispatched, eager, x = pair()
    counted = stats(dispatched)
    assert set(counted.parts) == {"stem", "layers.0", "layers.1.before", "layers.1.after", "shared"}
    assert list(dispatched.state_dict()) == list(eager.state_dict()) and repr(dispatched) == repr(eager)
    same([*dispatched.state_dict().values()], [*eager.state_dict().values()])  # the sample's run left nothing
    same(trained(dispatched, x), trained(eager, x))
    assert counted.hits >= 5 * len(counted.parts)
    plain = copy.deepcopy(dispatched)
    with pytest.raises(ValueError, match="not dispatched"):
        stats(plain)


@pytest.mark.composes("code between modules that cannot be captured")
def test_it_says_what_stays_eager_where_and_why():
    dispatched, *_ = pair()
    counted = stats(dispatched)
    told = {each.path: each for each in counted.eager}
    assert set(told) == {"layers.1", "drop"} and told["layers.1"].module_name == "Picks"
    (problem,) = told["layers.1"].problems
    assert "numpy" in problem.op and "test_parts.py" in problem.where
    assert 0 < counted.coverage <= 1 and counted.coverage == pytest.approx(sum(counted.shares.values()))
    report = explain(dispatched)
    for text in (repr(counted), str(report.full), report._repr_html_()):
        assert "layers.1.before" in text and "numpy" in text and f"{100 * counted.coverage:.0f}%" in text
    assert len(report.entries) == len(counted.entries)


def test_removing_takes_off_what_was_put_on_and_leaves_the_users_own():
    torch.manual_seed(0)
    module, x = Model().double(), torch.randn(9, WIDTH, dtype=torch.float64)
    add_tvm_dispatch(module.shared, x.clone().requires_grad_())
    add_tvm_dispatch(module, x, whole=False)
    assert "shared" in stats(module).parts and "shared" in stats(module).shares
    remove_tvm_dispatch(module)
    with pytest.raises(ValueError, match="shared"):
        stats(module)
    assert [path for path, child in module.named_modules() if parts.dispatcher_of(child)] == ["shared"]


def test_another_sample_adds_entries_to_the_parts():
    dispatched, eager, x = pair()
    for module in (dispatched, eager):
        module.eval()
    with torch.no_grad():
        add_tvm_dispatch(dispatched, x[:4], whole=False)
        same(dispatched(x[:4]), eager(x[:4]))
    assert all(len(each.entries) == 2 and each.hits >= 1 for each in stats(dispatched).parts.values())


def test_other_calls_follow_on_miss():
    dispatched, eager, x = pair(on_miss="compile")
    for rows in (x, x[:5], x[:7]):
        same(trained(dispatched, rows, 2), trained(eager, rows, 2))
    assert stats(dispatched).hits > stats(dispatched).misses.total()


def test_a_module_that_can_be_captured_is_dispatched_whole():
    module, x = Block(), torch.randn(3, WIDTH)
    add_tvm_dispatch(module, x, whole=False)
    assert len(stats(module).entries) == 1 and not hasattr(stats(module), "parts")


class Hopeless(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(x) + float(x.sum().detach().cpu().numpy())


def test_a_model_without_parts_is_refused_and_left():
    module, x = Hopeless(), torch.randn(3, WIDTH)
    before = dict(vars(module))
    with pytest.raises(UnsupportedModule, match="numpy"):
        add_tvm_dispatch(module, x, whole=False)
    assert vars(module) == before and "_compiled_call_impl" not in vars(module.act)


def test_an_error_on_the_way_leaves_the_model_as_it_was(monkeypatch):
    torch.manual_seed(0)
    module, x = Model().double(), torch.randn(9, WIDTH, dtype=torch.float64)
    before, state = {path: dict(vars(child)) for path, child in module.named_modules()}, torch.get_rng_state()
    added = dispatcher.Dispatcher.add

    def add(self, call):
        if isinstance(call.module, Block):
            raise KeyboardInterrupt
        return added(self, call)

    monkeypatch.setattr(dispatcher.Dispatcher, "add", add)
    with pytest.raises(KeyboardInterrupt):
        add_tvm_dispatch(module, x, whole=False)
    assert {path: dict(vars(child)) for path, child in module.named_modules()} == before
    assert torch.equal(torch.get_rng_state(), state)


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        return checkpoint(self.second, self.first(x), use_reentrant=True)


@pytest.mark.cpu("on a GPU the checkpoint calls it again on a thread of autograd's, which the sample run does not see")
def test_what_a_reentrant_checkpoint_calls_is_compiled_with_gradients_too():
    torch.manual_seed(0)
    eager, x = Reentrant().double(), torch.randn(5, WIDTH, dtype=torch.float64)
    module, found = add_tvm_dispatch(copy.deepcopy(eager), x, whole=False), []
    for each in (module, eager):
        torch.manual_seed(2)
        each(x).square().sum().backward()
        found.append([parameter.grad for parameter in each.parameters()])
    same(*found)
    counted = stats(module)
    assert counted.parts["second"].hits == 2 and not counted.misses


class Prints(nn.Module):
    """Autocast and no_grad around a module, a hook on it, and its result read by Python."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.teacher = Block()
        self.seen = []

    def forward(self, x):
        with torch.no_grad():
            wanted = self.teacher(x)
        with torch.autocast("cpu", torch.bfloat16):
            y = self.block(x)
        print(float((y - wanted).detach().abs().cpu().numpy().max()) > 0)
        return (y - wanted).float()


def test_modes_around_a_part_and_hooks_on_it(capsys):
    torch.manual_seed(0)
    eager, x = Prints(), torch.randn(5, WIDTH)
    eager.block.register_forward_hook(lambda module, args, result: result * 2)
    module = add_tvm_dispatch(copy.deepcopy(eager), x, whole=False)
    found = []
    for each in (module, eager):
        torch.manual_seed(2)
        y = each(x)
        y.square().sum().backward()
        found.append([y.detach(), *[parameter.grad for parameter in each.block.parameters()]])
    torch.testing.assert_close(*found, rtol=0.1, atol=0.1)
    assert {path: each.hits for path, each in stats(module).parts.items()} == {"block": 1, "teacher": 1}


def test_what_does_not_go_with_it():
    for options in ({}, {"sample_input": torch.ones(2, WIDTH), "dynamic_shapes": ({0: torch.export.Dim.DYNAMIC},)}):
        with pytest.raises(TypeError, match="whole=False"):
            add_tvm_dispatch(Block(), whole=False, **options)


class Transformed(nn.Module):
    def __init__(self, transform):
        super().__init__()
        self.first, self.transform = nn.Linear(4, 4), transform
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x):
        return self.transform(self.inner, self.first(x))


def per_sample(inner, h):
    def loss(parameters, row):
        return torch.func.functional_call(inner, parameters, (row,)).square().sum()

    found = torch.vmap(torch.func.grad(loss), (None, 0))(dict(inner.named_parameters()), h)
    return sum(each.flatten(1).sum(1, keepdim=True) for each in found.values())


TRANSFORMS = {
    "jvp": lambda f, h: torch.func.jvp(f, (h,), (torch.ones_like(h),))[1],
    "vjp": lambda f, h: torch.func.vjp(f, h)[1](torch.ones_like(h))[0],
    "grad": lambda f, h: torch.func.grad(lambda z: f(z).square().sum())(h),
    "vmap": lambda f, h: torch.vmap(f)(h),
    "jacrev": lambda f, h: torch.func.jacrev(f)(h[0]),
    "hessian": lambda f, h: torch.func.hessian(lambda z: f(z).sum())(h[0]),
    "per-sample gradients": per_sample,
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_modules_called_under_a_transform_are_no_parts(transform):
    def make():
        return Transformed(transform).double(), None

    def step(module, _, i):
        y = module(double(i, 3, 4))
        y.square().sum().backward()
        return y

    beside(make, step, lambda m, own: (double(9, 3, 4),), whole=False)


class CountingHooks(nn.Module):
    """Hooks that count on the parameters of the modules that they are for."""

    def __init__(self, returns):
        super().__init__()
        self.layers, self.returns = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), returns
        for layer in self.layers:
            for each in layer.parameters():
                each.uses = 0
            layer.register_forward_hook(self.count)

    def count(self, layer, args, out):
        for each in layer.parameters():
            assert isinstance(each, nn.Parameter)
            each.uses += 1
        return out if self.returns else None

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("returns", [False, True])
def test_hooks_may_count_on_parameters(returns):
    def step(module, _, i):
        y = module(double(i, 3, 4))
        y.square().sum().backward()
        return y, [each.uses for each in module.parameters()]

    beside(lambda: (CountingHooks(returns).double(), None), step, lambda m, own: (double(9, 3, 4),), whole=False)
    module = CountingHooks(returns).double()
    with pytest.raises(UnsupportedModule, match="weight"):
        add_tvm_dispatch(module, double(9, 3, 4))
    assert [each.uses for each in module.parameters()] == [0, 0, 0, 0]


class View(MutableMapping):
    """A mapping in the place of a module's parameters, as tensordict has it."""

    def __init__(self, held):
        self.held = dict(held)

    def __getitem__(self, name):
        return self.held[name]

    def __setitem__(self, name, value):
        self.held[name] = value

    def __delitem__(self, name):
        del self.held[name]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)

    def copy(self):
        return dict(self.held)


@pytest.mark.parametrize("whole", [True, False])
def test_parameters_in_a_mapping_of_ones_own(whole):
    def make():
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        module[0].__dict__["_parameters"] = View(module[0]._parameters)
        return module, None

    def step(module, _, i):
        y = module(double(i, 3, 4))
        y.square().sum().backward()
        if i == 1:
            module[0]._parameters["weight"] = nn.Parameter(double(5, 4, 4))
        return y

    beside(make, step, lambda m, own: (double(9, 3, 4),), steps=4, whole=whole)


def test_a_branch_of_torchs_that_draws_between_parts():
    """``torch.cond`` is Dynamo's in eager: a run of the sample does not let it trace, and later calls do."""

    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.after = Block().double(), Block().double()

        def forward(self, x):
            x = self.before(x)
            drawn = x.abs().sum() > 0  # whatever the device draws
            return self.after(torch.cond(drawn, lambda t: F.dropout(t.sin(), 0.5), lambda t: t.cos(), (x,)))

    def step(module, own, i):
        y = module(double(i, 3, WIDTH))
        y.sum().backward()
        return y

    module = beside(lambda: (Chooses(), None), step, lambda m, own: (double(9, 3, WIDTH),), whole=False, hits=0)
    assert [each.hits for each in stats(module).parts.values()] == [3, 3]


class Derived(nn.Module):
    """A field and its gradient with respect to the positions, which are read before autograd follows them, or that
    reads a value which an operator has overwritten."""

    def __init__(self, switches):
        super().__init__()
        self.net, self.switches = nn.Sequential(nn.Linear(WIDTH, 20), nn.Tanh(), nn.Linear(20, 1)), switches

    def forward(self, x):
        if self.switches:
            shift = x.mean()
            field = self.net(x.requires_grad_()) + shift
        else:
            x = x.detach().requires_grad_()
            field = self.net(x)
            field.mul_(field.tanh())
        return field, torch.autograd.grad(field.sum(), x, create_graph=True)[0]


class Hooked(nn.Module):
    """A backward hook on one of the modules inside."""

    def __init__(self):
        super().__init__()
        self.before, self.between, self.after = Block(), nn.Linear(WIDTH, WIDTH), Block()
        self.seen = 0
        self.between.register_full_backward_hook(self.note)

    def note(self, module, given, grads):
        self.seen += 1

    def forward(self, x):
        return self.after(self.between(self.before(x)))


class Routed(nn.Module):
    """Experts, each of the rows that a router sends to it."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        best, y = self.router(x).argmax(-1), torch.zeros_like(x)
        for place, expert in enumerate(self.experts):
            (rows,) = torch.where(best == place)
            y = y.index_add(0, rows, expert(x[rows]))
        return y


@pytest.mark.parametrize("make", [lambda: Derived(True), lambda: Derived(False), Hooked, Routed])
def test_a_refusal_that_names_parts_is_right(make):
    with pytest.raises(UnsupportedModule, match="whole=False") as refused:
        add_tvm_dispatch(make().double(), double(0, 6, WIDTH))
    assert len(refused.value.ops) == 1

    def step(module, own, i):
        results = module(double(i, 6, WIDTH))
        sum(each.square().sum() for each in (results if isinstance(results, tuple) else (results,))).backward()
        return results

    options = {"whole": False, "on_miss": "compile"}
    beside(lambda: (make().double(), None), step, lambda module, own: (double(0, 6, WIDTH),), hits=3, **options)
