"""``save_compiled`` and ``load_compiled``: a loaded module works as the saved one did; refusals; damaged files."""

from __future__ import annotations

import contextlib
import copy
from collections import namedtuple

import pytest
import torch
from torch import nn

from bridge import (
    DispatchMiss,
    UnsupportedModule,
    add_tvm_dispatch,
    explain,
    load_compiled,
    remove_tvm_dispatch,
    save_compiled,
    stats,
)
from bridge.export import ResultRecord, entry_data

Pair = namedtuple("Pair", ["left", "right"])


class Block(nn.Module):
    """Dropout, a buffer that each call changes, tied weights, a frozen parameter, results in a structure."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"up": nn.Linear(6, 6), "norm": nn.BatchNorm1d(6)})
        self.down = nn.Linear(6, 6, bias=False)
        self.down.weight = self.inner["up"].weight
        self.fixed = nn.Parameter(torch.randn(6), requires_grad=False)
        self.drop = nn.Dropout(0.4)
        self.register_buffer("table", torch.randn(6), persistent=False)

    def forward(self, x, scale=None, *, power: int = 2):
        y = self.drop(self.inner["norm"](self.inner["up"](x)))
        y = self.down(y) * self.fixed + self.table if scale is None else self.down(y) * scale
        return {"pair": Pair(y, [x, None]), "sum": (y**power).sum()}


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block()


def saved(module: nn.Module, tmp_path, **options) -> nn.Module:
    save_compiled(module, tmp_path / "saved", **options)
    return load_compiled(tmp_path / "saved")


def stepped(module: nn.Module, x: torch.Tensor, **given) -> list[torch.Tensor]:
    """All that a step leaves."""
    torch.manual_seed(3)
    module.zero_grad()
    result = module(x, **given)
    result["sum"].backward()
    left = [result["pair"].left, result["sum"], torch.get_rng_state()]
    left += [parameter.grad for parameter in module.parameters() if parameter.requires_grad]
    return [each.detach().clone() for each in left] + [each.clone() for each in module.state_dict().values()]


def test_steps_have_the_same_bits(block, tmp_path):
    x = torch.randn(5, 6)
    loaded = saved(add_tvm_dispatch(block, x), tmp_path)
    for _ in range(3):
        pairs = zip(stepped(block, x), stepped(loaded, x), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    assert stats(loaded).hits == 3


def test_a_loaded_module_is_a_module(block, tmp_path):
    x = torch.randn(5, 6)
    loaded = saved(add_tvm_dispatch(block, x), tmp_path)
    assert type(loaded).__name__ == "Block"
    assert list(loaded.state_dict()) == list(block.state_dict())
    assert [name for name, _ in loaded.named_modules()] == [name for name, _ in block.named_modules()]
    assert loaded.down.weight is loaded.inner.up.weight
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in block.parameters()]
    loaded.load_state_dict({name: value * 0 + 1 for name, value in block.state_dict().items()})
    block.load_state_dict(loaded.state_dict())
    pairs = zip(stepped(block, x), stepped(loaded, x), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    seen = []
    loaded.register_forward_hook(lambda module, args, result: seen.append(result))
    result = loaded(x)
    assert seen[0] is result
    assert result["pair"]._fields == ("left", "right") and result["pair"].right == [x, None]


def test_calls_are_spelled_as_before(block, tmp_path):
    x = torch.randn(5, 6)
    loaded = saved(add_tvm_dispatch(block, x), tmp_path)
    loaded(x=x), loaded(x, power=2), loaded(x, None)
    assert stats(loaded).hits == 3
    with pytest.raises(DispatchMiss, match="keyword arguments"):
        loaded(x, power=3)


def test_entries_of_several_modes(block, tmp_path):
    x = torch.randn(5, 6)
    add_tvm_dispatch(block, x)
    block.eval()
    add_tvm_dispatch(block, x, freeze=True)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        add_tvm_dispatch(block, x)
    loaded = saved(block, tmp_path)
    assert not loaded.training and not loaded.drop.training
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with torch.no_grad(), mode:
            assert torch.equal(loaded(x)["sum"], block(x)["sum"])
    with pytest.raises(DispatchMiss, match=r"grad mode|training flag"):
        loaded(x)
    loaded.train(), block.train()
    pairs = zip(stepped(block, x), stepped(loaded, x), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert not stats(block).misses


def test_frozen_constants_follow_the_parameters(block, tmp_path):
    x = torch.randn(5, 6)
    loaded = saved(add_tvm_dispatch(block.eval(), x, freeze=True, on_miss="compile"), tmp_path)
    for _ in range(2):
        for module in (block, loaded):
            with torch.no_grad():
                module.fixed.mul_(1.5)
        with torch.inference_mode():
            assert torch.equal(loaded(x)["sum"], block(x)["sum"])
    assert (stats(loaded).hits, stats(loaded).misses) == (2, {})


def test_a_call_that_was_not_saved_is_an_error(block, tmp_path):
    x = torch.randn(5, 6)
    loaded = saved(add_tvm_dispatch(block, x), tmp_path)
    for call, words in {
        "shape of args": lambda: loaded(x[:4]),
        "training flag": lambda: loaded.eval()(x),
        "dtype of parameter": lambda: loaded.train().double()(x),
    }.items():
        with pytest.raises(DispatchMiss, match=call):
            words()
    for plain in (copy.deepcopy(loaded.float()), remove_tvm_dispatch(loaded)):
        with pytest.raises(DispatchMiss, match="without its source"):
            plain(x)


def test_gradients_of_other_outputs_want_a_backward_that_was_saved(tmp_path):
    class Three(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y, y.exp(), y.sin()

    module, x = add_tvm_dispatch(Three(6, 6), torch.randn(5, 6)), torch.randn(5, 6)
    module(x)[0].sum().backward()  # this one is saved
    loaded = saved(module, tmp_path)
    loaded(x)[0].sum().backward()
    sum(each.sum() for each in loaded(x)).backward()
    with pytest.raises(RuntimeError, match="no backward was saved for gradients of outputs 1 alone"):
        loaded(x)[1].sum().backward()


def test_results_of_other_classes_are_records(tmp_path):
    from transformers.modeling_outputs import BaseModelOutput

    class Model(nn.Linear):
        def forward(self, x):
            return BaseModelOutput(last_hidden_state=super().forward(x))

    x = torch.randn(5, 6)
    module = add_tvm_dispatch(Model(6, 6), x)
    result = saved(module, tmp_path)(x)
    assert isinstance(result, ResultRecord)
    assert result.last_hidden_state is result["last_hidden_state"] is result[0]
    assert torch.equal(result[0], module(x)[0])
    with pytest.raises(AttributeError, match="no 'loss'"):
        _ = result.loss


def test_a_loaded_module_has_no_stages_to_explain(tmp_path):
    loaded = saved(add_tvm_dispatch(nn.Linear(6, 6), torch.randn(5, 6)), tmp_path)
    with pytest.raises(ValueError, match="was loaded"):
        explain(loaded)


def test_a_loaded_module_is_saved_again(block, tmp_path):
    x = torch.randn(5, 6)
    loaded = saved(add_tvm_dispatch(block, x), tmp_path)
    stepped(loaded, x)
    again = saved(loaded, tmp_path / "again")
    pairs = zip(stepped(loaded, x), stepped(again, x), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


class Scaled(nn.Linear):
    scale = 2.0

    def __init__(self):
        super().__init__(6, 6)
        self.gain = 1.0

    def forward(self, x):
        return super().forward(x) * self.gain


class Counting(nn.Linear):
    calls = 0

    def __init__(self):
        super().__init__(6, 6)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def sizes_that_vary():
    module, x = nn.Linear(6, 6), torch.randn(5, 6)
    return add_tvm_dispatch(module, x, dynamic_shapes=({0: torch.export.Dim("n", min=2)},))


def a_changed_attribute():
    module = add_tvm_dispatch(Scaled(), torch.randn(5, 6))
    module.gain = 3.0
    return module


def a_counter():
    return add_tvm_dispatch(Counting(), torch.randn(5, 6))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (sizes_that_vary, "sizes that vary"),
        (a_changed_attribute, "for the module as it was.*attribute"),
        (a_counter, "attributes that a call sets"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name(make, words, tmp_path):
    with pytest.raises(UnsupportedModule, match=f"(?s)cannot be saved.*{words}"):
        save_compiled(make(), tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_folders(tmp_path):
    x, module = torch.randn(5, 6), nn.Linear(6, 6)
    with pytest.raises(ValueError, match="not dispatched"):
        save_compiled(module, tmp_path / "saved")
    with pytest.raises(ValueError, match="no compiled call"):
        save_compiled(add_tvm_dispatch(module), tmp_path / "saved")
    add_tvm_dispatch(module, x)
    with pytest.raises(FileExistsError):
        save_compiled(module, tmp_path)
    for _ in range(2):  # the second takes the first one's place
        loaded = saved(module, tmp_path)
        assert torch.equal(loaded(x), module(x))
        with torch.no_grad():
            module.weight.add_(1)
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]
    with pytest.raises(ValueError, match="not saved by save_compiled"):
        (tmp_path / "saved" / "compiled.index").write_text("[]")
        load_compiled(tmp_path / "saved")
    with pytest.raises(ValueError, match="not saved by save_compiled: it has no"):
        load_compiled(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_compiled(tmp_path / "nowhere")


def test_damage_is_noticed_in_every_file(tmp_path):
    module = add_tvm_dispatch(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), torch.randn(5, 6))
    save_compiled(module, tmp_path / "saved")
    files = sorted((tmp_path / "saved").iterdir())
    assert len(files) >= 4
    for file in files:
        whole = file.read_bytes()
        for at in (0, len(whole) // 3, len(whole) - 1):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            with pytest.raises(ValueError, match=r"damaged|not saved by|format"):
                load_compiled(tmp_path / "saved")
        file.write_bytes(whole)
    load_compiled(tmp_path / "saved")


def test_settings_that_mean_the_same_are_accepted(monkeypatch):
    """A precision that was never set, and the one that it stands for."""
    for now, then, is_refused in (("none", "ieee", False), ("ieee", "none", False), ("tf32", "ieee", True)):
        monkeypatch.setattr(entry_data, "_settings", lambda device, now=now: {"precision": now})
        with pytest.raises(ValueError, match="saved for precision") if is_refused else contextlib.nullcontext():
            entry_data.refuse_other_settings({"settings": {"precision": then}}, torch.device("cuda"))


def test_another_machine_or_version_is_told(tmp_path, monkeypatch):
    module = add_tvm_dispatch(nn.Linear(6, 6), torch.randn(5, 6))
    with monkeypatch.context() as patch:
        patch.setattr("bridge.compile.runtime.storage.versions", lambda: (("torch", "another"),))
        save_compiled(module, tmp_path / "saved")
    with pytest.raises(ValueError, match="was saved for versions"):
        load_compiled(tmp_path / "saved")
