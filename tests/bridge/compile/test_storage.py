"""Programs as files: equal after a load, the same text and the same bits in another process, damage is noticed."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from bridge.compile import CallLibrary, Launch, MakeView, RunLoop
from bridge.compile.runtime import storage
from bridge.compile.runtime.storage import load, save, texts
from tests.bridge.compile.stored_program import bits, digest, programs


@pytest.fixture(scope="module")
def made():
    return programs()


@pytest.mark.sweep  # for programs and kernels in another process see tests/bridge/artifact/test_kernels.py
def test_another_process_makes_the_same_program_and_a_loaded_one_computes_the_same_bits(made, tmp_path):
    steps = [step for program in made.values() for step in program.steps]
    kinds = {type(step) for step in steps} | {step.allocates for step in steps if isinstance(step, CallLibrary)}
    assert kinds == {Launch, CallLibrary, RunLoop, MakeView, True, False}
    assert any(isinstance(step, Launch) and step.offsets for step in steps), "a product at addresses"
    assert all(program.constants and program.layout.views for program in made.values())
    expected = {}
    for direction, program in made.items():
        save(program, tmp_path / direction)
        expected[direction] = [digest(program), bits(program, program)]
    command = [sys.executable, "-m", "tests.bridge.compile.stored_program", str(tmp_path)]
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def test_a_loaded_program_is_equal(made, tmp_path):
    for program in made.values():
        save(program, tmp_path / "program")
        loaded = load(tmp_path / "program", program.backend)
        assert loaded == program and hash(loaded) == hash(program) and texts(loaded) == texts(program)
        assert str(loaded).splitlines()[1:] == str(program).splitlines()[1:]
        assert bits(loaded, loaded) == bits(program, program)
    assert [path.name for path in tmp_path.iterdir()] == ["program"]


def changed_constants(program):
    (slot, tensor), *rest = program.constants
    return ((slot, tensor + 1), *rest)


@pytest.mark.parametrize(
    "change",
    [
        lambda program: {"name": "other"},
        lambda program: {"steps": program.steps[:-1]},
        lambda program: {"steps": (dataclasses.replace(program.steps[0], writes=(99,)), *program.steps[1:])},
        lambda program: {"layout": dataclasses.replace(program.layout, arena_bytes=1)},
        lambda program: {"constants": changed_constants(program)},
        lambda program: {"kernels": dict(zip(program.kernels, reversed(program.kernels.values()), strict=True))},
    ],
)
def test_programs_that_differ_are_unequal(made, change):
    program = made["forward"]
    assert dataclasses.replace(program, stage_seconds={}) == program
    assert dataclasses.replace(program, **change(program)) != program


@pytest.mark.parametrize("where", ["begin", "middle", "end"])
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_damage_is_noticed(made, tmp_path, where, damage):
    path = tmp_path / "program"
    save(made["forward"], path)
    content = bytearray(path.read_bytes())
    at = {"begin": 9, "middle": len(content) // 2, "end": len(content) - 1}[where]
    if damage == "cut":
        del content[at:]
    else:
        content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="program"):
        load(path, made["forward"].backend)


@pytest.mark.parametrize("name", ["backend", "versions"])
def test_a_program_of_another_kind_is_refused(made, tmp_path, monkeypatch, name):
    program = made["forward"]
    told = texts(program)
    monkeypatch.setattr(storage, "texts", lambda program: {**told, name: "another"})
    save(program, tmp_path / "program")
    with pytest.raises(ValueError, match=f"saved for {name} 'another'"):
        load(tmp_path / "program", program.backend)
