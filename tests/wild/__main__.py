"""Public packages' models, a small one a family, trained three steps beside eager → a table: hits, parts, refusals.

    python -m tests.wild [TEXT …]     families whose names have one of these texts

A package that is not installed is told and left out: ``make test-wild`` installs them in an environment of its own.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bridge import UnsupportedModule, add_tvm_dispatch, stats
from bridge.base.objects import packed
from bridge.base.torch_internals import pytree

IDS = torch.randint(2, 50, (2, 9), generator=torch.Generator().manual_seed(0))
PICTURES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
EDGES = torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]])
SMALL = {
    **{name: 16 for name in ("hidden_size", "d_model", "n_embd", "dim", "intermediate_size", "ffn_dim", "d_ff")},
    **{name: 2 for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")},
    **{name: 2 for name in ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads")},
    **{"decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_kv": 8, "head_dim": 8},
    **{"vocab_size": 50, "pad_token_id": 0, "embedding_size": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16},
}


def _language(name: str, **sample: Any) -> Callable[[], tuple[nn.Module, Any]]:
    def build() -> tuple[nn.Module, Any]:
        transformers = importlib.import_module("transformers")
        config = getattr(transformers, f"{name}Config")
        fields = {key: value for key, value in SMALL.items() if hasattr(config(), key)}
        return getattr(transformers, f"{name}Model")(config(**fields)), {"input_ids": IDS, **sample}

    return build


def _picture(name: str) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (importlib.import_module("timm").create_model(name, num_classes=4), (PICTURES,))


def _graph(name: str) -> Callable[[], tuple[nn.Module, Any]]:
    layers = "torch_geometric.nn"
    return lambda: (getattr(importlib.import_module(layers), name)(4, 8), (torch.randn(5, 4), EDGES))


LANGUAGE = "Bert Roberta Electra Albert DistilBert GPT2 GPTNeoX OPT Bloom Llama Mistral Qwen2 Gemma Phi MPNet DebertaV2"
PICTURE = "resnet10t mobilenetv3_small_050 efficientnet_lite0 regnetx_002 test_vit test_convnext test_byobnet"
GRAPH = "GCNConv SAGEConv GraphConv GATConv GATv2Conv TransformerConv TAGConv ARMAConv ChebConv SGConv"
FAMILIES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    **{f"transformers {name}": _language(name) for name in LANGUAGE.split()},
    **{f"transformers {name}": _language(name, decoder_input_ids=IDS) for name in ("T5", "Bart")},
    **{f"timm {name}": _picture(name) for name in PICTURE.split()},
    **{f"torch_geometric {name}": _graph(name) for name in GRAPH.split()},
}


def _step(module: nn.Module, sample: Any, i: int) -> list[torch.Tensor]:
    torch.manual_seed(i)
    out = module(**sample) if isinstance(sample, dict) else module(*sample)
    leaves = [leaf for leaf in pytree.tree_leaves(packed(out)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    sum(leaf.square().mean() for leaf in leaves).backward()
    with torch.no_grad():
        for each in module.parameters():
            if each.grad is not None:
                each -= 0.01 * each.grad
                each.grad = None
    return [*leaves, *module.state_dict().values()]


def run(build: Callable[[], tuple[nn.Module, Any]]) -> tuple[str, str]:
    """The verdict on a family, and words."""
    torch.manual_seed(0)
    try:
        module, sample = build()
    except ImportError as error:
        return "left out", str(error)
    module = module.double()
    sample = pytree.tree_map(lambda each: each.double() if each.is_floating_point() else each, sample)
    eager = copy.deepcopy(module)
    try:
        add_tvm_dispatch(module, sample, on_miss="compile")
    except UnsupportedModule as refused:
        try:
            add_tvm_dispatch(module, sample, on_miss="compile", whole=False)
        except UnsupportedModule:
            return "refused", str(refused.ops[0]).splitlines()[0]
    for i in range(3):
        for wanted, got in zip(_step(eager, sample, i), _step(module, sample, i), strict=True):
            if not torch.allclose(wanted, got, rtol=1e-5, atol=1e-6):  # RMSNorm, T5: norms in float32 whatever the type
                return "WRONG", f"step {i}: off by {(wanted - got).abs().max():.2g}"
    found = stats(module)
    words = f"{found.hits} hits" + (f", {next(iter(found.misses))}" if found.misses else "")
    return ("parts" if hasattr(found, "parts") else "hit" if found.hits == 3 else "missed"), words


def main() -> None:
    """Prints the table; exits with 1 where one is wrong or raises."""
    texts, verdicts = sys.argv[1:], Counter[str]()
    for name, build in FAMILIES.items():
        if texts and not any(text in name for text in texts):
            continue
        try:
            verdict, words = run(build)
        except Exception as error:  # noqa: BLE001 - told in the table
            verdict, words = "CRASH", f"{type(error).__name__}: {' '.join(str(error).split())}"
        verdicts[verdict] += 1
        print(f"{verdict:9s} {name:36s} {words[:110]}", flush=True)
    print(dict(verdicts))
    sys.exit(bool(verdicts["WRONG"] or verdicts["CRASH"]))


if __name__ == "__main__":
    main()
