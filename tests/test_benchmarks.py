"""The benchmarks' entry lists and runs them; their helpers do as documented."""

import threading

import pytest
import torch
from transformers.modeling_outputs import MaskedLMOutput

from benchmarks import cold_start, dynamic, dynamic_epochs, gpu_models, gpu_peers
from benchmarks.__main__ import main, scripts
from benchmarks.foreign_threads import foreign_threads
from benchmarks.results import Results


def test_the_entry_lists_every_script(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert {"train_blocks", "whole_models", "compile_time", "overhead"} <= scripts().keys()
    assert all(name in printed and line and line in printed for name, line in scripts().items())


def test_a_name_that_there_is_not(capsys):
    assert main(["nothing"]) == 2
    assert "no benchmark 'nothing'" in capsys.readouterr().err


def test_it_runs_one_with_its_options(capsys):
    with pytest.raises(SystemExit) as left:
        main(["compile_time", "--help"])
    assert left.value.code == 0 and "--quick" in capsys.readouterr().out


def test_starts_with_and_without_a_cache(tmp_path, monkeypatch, capsys):
    path, started = tmp_path / "cold_start.json", []

    def start(name, quick, folder, threads, off, device):
        found = folder.exists() and not off
        folder.mkdir(exist_ok=True)
        (folder / "file").write_text("artifact")
        started.append(off)
        return {"add": 0.25 if found else 2.0, "step": 0.5, "bits": "same" if cached_alike or not found else "others"}

    cached_alike = True
    monkeypatch.setattr("sys.argv", ["python"])
    monkeypatch.setattr("runpy.run_module", lambda *args, **options: cold_start.main())
    monkeypatch.setattr(cold_start, "start", start)
    main(["cold_start", "--quick", "--only", "BertLayer", "--json", str(path)])
    (row,) = Results.load(path).rows
    assert row["second_to_first"] == 0.125 and row["cache_bytes"] == 8 and started == [False, False, True]
    assert "| second / first |" in capsys.readouterr().out
    cached_alike = False
    with pytest.raises(RuntimeError, match="other bits"):
        main(["cold_start", "--quick", "--only", "BertLayer"])


def test_foreign_threads_are_gone_afterwards():
    before = threading.active_count()
    with foreign_threads(4):
        assert threading.active_count() == before + 4
    assert threading.active_count() == before


def test_inference(tmp_path, monkeypatch, capsys):
    path = tmp_path / "inference.json"
    monkeypatch.setattr("sys.argv", ["python"])
    main(["inference", "--quick", "--only", "1x14", "--json", str(path)])
    (row,) = Results.load(path).rows
    assert {"eager_ms", "jit_ms", "ours_ms", "ours_to_best"} <= row.keys() and row["best"] in ("eager", "jit")
    assert "| ours / quickest other |" in capsys.readouterr().out


class Words(torch.nn.Module):
    """Has the arguments of transformers' BERT, whose capture would take longer (``test_trainer_uses`` has it)."""

    def __init__(self, config):
        super().__init__()
        self.words = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.scores = torch.nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, input_ids, attention_mask, labels):
        scores = self.scores(torch.tanh(self.words(input_ids)) * attention_mask[..., None])
        return MaskedLMOutput(torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()))


@pytest.mark.sweep
def test_sizes_that_vary(tmp_path, monkeypatch, capsys):
    path = tmp_path / "dynamic.json"
    monkeypatch.setattr(dynamic_epochs, "BertForMaskedLM", Words)
    bound = {"two layers": lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())}
    monkeypatch.setattr(dynamic, "BOUND", bound)
    monkeypatch.setattr("runpy.run_module", lambda *args, **options: dynamic.main())
    monkeypatch.setattr("sys.argv", ["python"])
    main(["dynamic", "--quick", "--trainer", "--json", str(path)])
    rows = {row["module"].rpartition(": ")[2]: row for row in Results.load(path).rows}
    assert {"bind", "call", "batch"} <= rows.keys()
    assert {"static_counts", "dynamic_counts"} <= rows["batch"].keys()
    (trained,) = [row for row in rows.values() if "entries" in row]
    assert (trained["entries"], trained["misses"]) == (1, 0)
    assert "| dynamic / static |" in capsys.readouterr().out


def test_blocks_and_models_on_a_gpu(monkeypatch, capsys):
    def made(quick):
        return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())

    case = gpu_models.Case(made, lambda quick: gpu_peers.Batch((torch.randn(4, 3),)), "fp32")
    monkeypatch.setattr(gpu_models, "CASES", {"two layers": case})
    monkeypatch.setattr("sys.argv", ["python", "--quick", "--peers", "eager", "ours", "graph", "--patience", "60"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu_models.main()
    lines = capsys.readouterr().out.splitlines()
    assert any("two layers wall: ours" in line and "/eager" in line for line in lines)
    assert any("two layers graph: " in line and "Error" in line for line in lines)  # no GPU; the others go on


def test_first_steps_in_processes_of_their_own(monkeypatch, capsys):
    asked_for = []

    def measured(script, name, which, quick):
        asked_for.append((script, name, which[: which.index("--rounds")]))
        return {"eager": 0.5} if which[2] == "max-autotune" else {"eager": 0.5, which[2]: 2.0}

    monkeypatch.setattr(gpu_models, "cold", measured)
    peers = ["ours", "default", "max-autotune"]
    monkeypatch.setattr("sys.argv", ["python", "--cold", "--only", "GPT-2", "--peers", *peers])
    gpu_models.main()
    assert asked_for == [("gpu_models", "GPT-2 block (4, 1024) bf16", ["--peers", "eager", each]) for each in peers]
    told = capsys.readouterr().out.splitlines()[-1]
    assert told == "GPT-2 block (4, 1024) bf16 cold first step: ours 2.0 s; /default 1.00"


def test_row_kernels_on_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["python"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main(["gpu_rows", "--quick", "--only", "GELU"])
    lines = capsys.readouterr().out.splitlines()
    kernels = [line.split(" | ")[0] for line in lines if line.startswith("| ")][1:]
    assert kernels == ["| GELU + bias forward", "| GELU + bias backward"]


@pytest.mark.sweep
def test_recurrent(tmp_path, monkeypatch, capsys):
    path = tmp_path / "recurrent.json"
    monkeypatch.setattr("sys.argv", ["python"])
    monkeypatch.setenv("BRIDGE_CACHE", "0")
    main(["recurrent", "--quick", "--only", "LSTM by hand", "--json", str(path)])
    (row,) = Results.load(path).rows
    assert {"ours_ms", "unrolled_ms", "eager_ms", "layer_ms", "ours_to_unrolled"} <= row.keys()
    assert row["best"] in ("eager", "layer") and "| ours / quickest other |" in capsys.readouterr().out


def test_a_recurrent_layer_of_torchs_has_no_steps_to_unroll(tmp_path, monkeypatch):
    path = tmp_path / "recurrent.json"
    monkeypatch.setattr("sys.argv", ["python"])
    monkeypatch.setenv("BRIDGE_CACHE", "0")
    options = ["--only", "nn.LSTM", "--peers", "unrolled,eager", "--shape", "8,5,128"]
    main(["recurrent", "--quick", *options, "--json", str(path)])
    (row,) = Results.load(path).rows
    assert "unrolled_ms" not in row and row["best"] == "eager"
