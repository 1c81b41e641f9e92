"""The corpus of one tree equals itself, and a planted difference of each kind is reported."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from bridge import Unsupported, UnsupportedModule
from tests.corpus import fuzzed
from tests.corpus.__main__ import main
from tests.corpus.compare import MOST_LISTED, Report, differences
from tests.corpus.forwards import counted
from tests.corpus.numbers import apart, pack, pack_text, scrubbed, unpack_text
from tests.corpus.store import Store
from tests.corpus.suites import SUITES, chosen
from tests.fuzz import play

CASES = ["plain/3", "plain/55", "moduleinfo/nn.ReLU#0"]
"""A refused case, and two dispatched ones."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    assert main(["freeze", "--out", str(folder), "--only", *CASES, "--jobs", "0", "--forwards", "all"]) == 0
    return folder


@pytest.fixture
def compare(folder, capsys):
    def run(*arguments):
        status = main(["compare", "--with", str(folder), "--jobs", "0", *arguments])
        return status, capsys.readouterr().out

    return run


def test_records(folder):
    found = {record["case"]: record for record in Store(folder)}
    assert [*found] == CASES
    refused, random, relu = found.values()
    assert refused["status"] == "refused" and "Parted" in refused["reason"]
    assert random["status"] == relu["status"] == "ok"
    assert (random["hits"], relu["hits"]) == (2, 1)
    assert relu["forwards"] > 0 and relu["kernels"] == 2
    text = unpack_text(relu["texts"]["entry 0 forward"])
    assert text.startswith("program ReLU_forward: 1 steps, arena 0 bytes\n") and "T.prim_func" in text


def test_a_tree_is_equal_to_itself(compare):
    status, told = compare("--forwards", "all")
    assert status == 0
    assert "3 cases (2 ok, 1 refused), 3 equal, 0 differ" in told


def test_freezing_goes_on_where_it_was_ended(folder, tmp_path, capsys):
    (tmp_path / "header.json").write_bytes((folder / "header.json").read_bytes())
    lines = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "records.jsonl").write_text("".join([*lines[:2], lines[2][:99]]))
    assert main(["freeze", "--out", str(tmp_path), "--only", *CASES, "--jobs", "0"]) == 0
    assert [record["case"] for record in Store(tmp_path)] == CASES
    header = json.loads((tmp_path / "header.json").read_text())
    (tmp_path / "header.json").write_text(json.dumps({**header, "sources": "others"}))
    assert main(["freeze", "--out", str(tmp_path), "--only", *CASES, "--jobs", "0"]) == 2
    assert "another tree's" in capsys.readouterr().err


def test_wrong_numbers_are_told(compare, monkeypatch):
    monkeypatch.setattr(play, "SEED", 6)
    status, told = compare("--only", "plain/55", "--diff", "plain/55")
    assert status == 1 and "FAILURE: wrong numbers: 1 cases\n  plain/55: call 0, " in told


def test_a_refusal_is_told(compare, monkeypatch):
    def refuse(module, *args, **kwargs):
        raise UnsupportedModule("Random", [Unsupported("aten.sin", "here", "planted")])

    monkeypatch.setattr(fuzzed, "add_tvm_dispatch", refuse)
    status, told = compare("--only", "plain")
    assert status == 1
    assert "FAILURE: worse status: 1 cases\n  plain/55: ok -> refused: aten.sin: planted\n" in told
    assert "\nrefusal text: 1 cases\n  plain/3: autograd.Function Parted: " in f"\n{told}"


def test_kinds_of_differences(folder):
    refused, random, _ = Store(folder)

    def kinds(now, before):
        return {each.kind for each in differences(now, before)}

    other = copy.deepcopy(random)
    name = next(name for name, value in random["values"].items() if value.get("dtype") == "float64")
    value = torch.tensor([1.0, 2.0], dtype=torch.float64)
    before = {**random, "values": {**random["values"], name: pack(value)}}
    for factor, kind in ((1 + 1e-14, "bits within tolerance"), (1 + 1e-9, "wrong numbers")):
        other["values"][name] = pack(value * factor)
        assert kinds(other, before) == {kind}
    other = {**random, "texts": {**random["texts"], "entry 0 forward": pack_text("another program")}, "steps": 1}
    assert kinds(other, random) == {"program text", "counts"}
    program = unpack_text(random["texts"]["entry 0 forward"])
    for old, new, kind in (("amax", "amax_7", "names in programs"), ("(x0, add;", "(add, x0;", "program text")):
        other = {**random, "texts": {**random["texts"], "entry 0 forward": pack_text(program.replace(old, new))}}
        assert kinds(other, random) == {kind}
    for name, kind in (("generator", "generator"), ("gradient of parameter generator_head.bias", "wrong numbers")):
        one, two = ({**random, "values": {f"call 0, {name}": pack(torch.tensor([number]))}} for number in (1.0, 2.0))
        assert kinds(one, two) == {kind}
    assert kinds({**random, "hits": 1}, random) == {"fewer hits"}
    assert kinds({**random, "about": refused["about"], "case": refused["case"]}, refused) >= {"fell away"}
    assert kinds({**random, "about": "other"}, random) == {"another case"}


@pytest.mark.parametrize("kind, is_failure", [("worse status", True), ("fell away", False)])
def test_each_failure_is_listed(kind, is_failure):
    count = MOST_LISTED + 7
    told = str(Report(found={kind: [(f"plain/{seed}", "words") for seed in range(count)]}))
    assert told.count("plain/") == (count if is_failure else MOST_LISTED)
    assert ("and 7 more" in told) is not is_failure


def test_distances():
    ones = torch.ones(5000)
    assert apart(pack(ones), pack(ones.clone())) is None
    assert apart(pack(ones + 1e-7), pack(ones)) == ("1.2e-07 in float32", False)
    assert apart(pack(ones * 2), pack(ones)) == ("1.0e+00 in float32", True)
    assert apart(pack(torch.tensor([1.0, torch.nan])), pack(torch.tensor([1.0, torch.inf])))[1]
    assert apart(pack(torch.tensor([True])), pack(torch.tensor([False])))[1]
    assert apart(pack(ones[4096::4096]), pack(ones[:1])) is None
    assert apart(pack(None), pack(ones))[1] and apart(pack(None), pack(None)) is None
    assert apart(pack(torch.tensor([1 + 1j])), pack(torch.tensor([1 + 1.0000001j])))[1] is False


def test_what_varies_between_processes_is_no_difference():
    assert scrubbed("at fuzz/3-8abc47-cpu.py:312, <object at 0x7f0012345678>") == "at fuzz/3-cpu.py:312, <object at 0x>"


def test_runs_of_forward_are_counted():
    module = torch.nn.ReLU()
    with counted(module) as forwards:
        module(torch.ones(2)), module.forward(torch.ones(2)), torch.nn.Tanh()(torch.ones(2))
    assert forwards.count == 2


def test_choosing():
    assert chosen(["plain", "dynamic"], 10) == [*(f"plain/{i}" for i in range(6)), "dynamic/0", "dynamic/1"]
    assert chosen(["plain"], 5, seed=7) == ["plain/7", "plain/8", "plain/9"]
    assert len(chosen(["zoo"], 500)) == -(-len(chosen(["zoo"])) // 4)
    assert chosen(["loops/17"]) == ["loops/17"]
    with pytest.raises(ValueError, match="no suite 'zoos'; there are plain"):
        chosen(["zoos"])
    assert {"plain", "dynamic", "loops", "zoo", "moduleinfo", "special", "opinfo"} == SUITES.keys()
