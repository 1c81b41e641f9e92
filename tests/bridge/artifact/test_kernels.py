"""Kernels on disk: another process finds them, one of eight builds them, their bits are the same."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import pytest
import torch
from tvm.relax import op

from bridge.artifact import current_store
from bridge.compile.cpu.build import CpuLibraries
from tests.bridge.artifact.count_builds import counted, digest, in_children
from tests.bridge.compile_helpers import program

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")


def cold(folder):
    """A process that inherits nothing."""
    environment = {**os.environ, "BRIDGE_CACHE": "1", "BRIDGE_CACHE_DIR": str(folder), "PYTHONHASHSEED": "77"}
    script = "from tests.bridge.artifact.count_builds import main; main()"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cache" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def compiled():
    """A function with a product and a reduction: the names of its built kernels, and the bits of its results."""
    given = []
    build = CpuLibraries.build_bytes

    def count(libraries, functions):
        given.extend(functions)
        return build(libraries, functions)

    CpuLibraries.build_bytes = count
    made = program([((48, 64), "float32")] * 2, lambda emit, x, y: [emit(op.sum(op.exp(x * y), 1)), emit(op.tanh(x))])
    x = torch.arange(48.0 * 64).reshape(48, 64) / 4000
    result = digest(made([x, 1 - x]))
    return {"built": given, "bits": result}


def test_eight_processes_at_once_build_each_kernel_once(used_cache):
    """On an empty cache; on a full one, none."""
    results, again = in_children(8, compiled), in_children(8, compiled)
    built = [name for result in results for name in result["built"]]
    assert len(set(built)) == len(built) == 2 and not any(result["built"] for result in again)
    assert len({result["bits"] for result in [*results, *again]}) == 1


def test_damaged_kernels_cost_a_compilation(used_cache):
    (first,) = in_children(1, compiled)
    for damaged in ({"library"}, {"library", "kernel"}):
        for path in current_store().files():
            if path.parent.parent.name in damaged:
                content = bytearray(path.read_bytes())
                content[len(content) // 2] ^= 16
                path.write_bytes(content)
        (again,) = in_children(1, compiled)
        assert again["bits"] == first["bits"] and again["built"]
    (last,) = in_children(1, compiled)
    assert last["bits"] == first["bits"] and last["built"] == []


def test_other_processes_build_nothing_and_compute_the_same_bits(used_cache, monkeypatch):
    results = in_children(1)
    assert results[0]["built"]
    results += [*in_children(1), cold(used_cache)]
    done = [(result["built"], result["translated"], result["captured"]) for result in results]
    assert done[0][1:] == (2, 1) and done[1:] == [([], 0, 0)] * 2
    (other,) = in_children(1, lambda: counted(rows=40))
    assert len(other["built"]) < len(results[0]["built"]) / 2, "another size has kernels in common"
    monkeypatch.setenv("BRIDGE_CACHE", "0")
    results += in_children(1)
    assert sorted(results[-1]["built"]) == sorted(results[0]["built"])
    assert {result["hits"] for result in results} == {2}
    assert len({(result["bits"], result["rng"]) for result in results}) == 1, "code that was in no file, too"


def test_a_full_disk_costs_warnings_and_no_numbers(used_cache):
    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        return compiled()

    (usual,) = in_children(1, compiled)
    (alone,) = in_children(1, limited)
    assert alone["bits"] == usual["bits"]
    for path in current_store().files():
        path.unlink()
    (first,) = in_children(1, limited)
    assert first["bits"] == usual["bits"] and not list(current_store().files())
