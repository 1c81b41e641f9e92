"""Models with an uncapturable part: whole=False and torch.compile(backend="tvm_dispatch") beside eager.

    python -m benchmarks parts                      # both models
    python -m benchmarks parts --device cuda --only experts

Measures for each model the share of an eager forward's time in dispatched modules, the largest difference of 20 losses
from eager's (AdamW, dropout on, one seed), and medians of a step (forward and backward), peers by turns. ``experts``
routes tokens in a Python loop over the selected experts; ``filter`` uses NumPy between its layers to select tokens.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.results import Results, Row, machine, versions
from bridge import add_tvm_dispatch, stats
from bridge.state import SampleCall
from bridge.ways import compare_ways, quickest

STEPS = 20


class Filtered(nn.Module):
    """A BERT that keeps, after some layers, the half of the tokens with the largest first feature, chosen by NumPy."""

    def __init__(self, quick: bool):
        super().__init__()
        from transformers import BertConfig
        from transformers.models.bert.modeling_bert import BertLayer

        small = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40}
        config = BertConfig(attn_implementation="sdpa", **(small if quick else {"hidden_size": 384}))
        if not quick:
            config.num_attention_heads, config.intermediate_size = 6, 1536
        self.before = nn.ModuleList(BertLayer(config) for _ in range(2))
        self.after = nn.ModuleList(BertLayer(config) for _ in range(2))
        self.head = nn.Linear(config.hidden_size, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.before:
            x = layer(x)
        worth = x[..., 0].detach().cpu().numpy()  # not the norms: behind a LayerNorm they are equal but for rounding
        order = torch.from_numpy(worth.argsort(1)[:, x.shape[1] // 2 :].copy()).to(x.device)
        x = x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))
        for layer in self.after:
            x = layer(x)
        return self.head(x.mean(1)).logsumexp(-1).mean()


def _experts(quick: bool) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import MixtralConfig, MixtralForCausalLM

    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    width = {"hidden_size": 24, "intermediate_size": 40} if quick else {"hidden_size": 256, "intermediate_size": 512}
    config = MixtralConfig(vocab_size=61 if quick else 2000, use_cache=False, attention_dropout=0.1, **heads, **width)
    config._experts_implementation = "eager"
    ids = torch.randint(3, config.vocab_size, (2, 8) if quick else (4, 128))
    return MixtralForCausalLM(config), {"input_ids": ids, "labels": ids}


def _filter(quick: bool) -> tuple[nn.Module, dict[str, Any]]:
    model = Filtered(quick)
    return model, {"x": torch.randn(*((2, 8) if quick else (4, 128)), model.head.in_features)}


MODELS: dict[str, Callable[[bool], tuple[nn.Module, dict[str, Any]]]] = {"experts": _experts, "filter": _filter}


def losses(model: nn.Module, batch: dict[str, Any]) -> list[float]:
    """The loss of each of ``STEPS`` steps under one seed."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    found = []
    for _ in range(STEPS):
        result = model(**batch)
        loss = result if isinstance(result, Tensor) else result.loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def measure(name: str, quick: bool, device: str) -> Row:
    """One row: coverage, the largest difference of the losses, and the ratios."""
    torch.manual_seed(0)
    model, batch = MODELS[name](quick)
    model, batch = model.to(device).train(), {key: value.to(device) for key, value in batch.items()}
    ours = add_tvm_dispatch(copy.deepcopy(model), batch, whole=False)
    pairs = zip(losses(ours, batch), losses(copy.deepcopy(model), batch), strict=True)
    row: Row = {"module": name, "largest_difference": max(abs(a - b) / abs(b) for a, b in pairs)}
    counted = stats(ours)
    row |= {"coverage": counted.coverage, "parts": len(counted.parts), "misses": counted.misses.total()}
    ways = compare_ways(SampleCall(model, (), batch))
    row |= {"parts_to_eager": ways[0].ratio, "compiled_to_eager": ways[1].ratio}
    row |= {"told": [str(way) for way in ways], "quickest": quickest(ways)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="torch.set_num_threads")
    parser.add_argument("--quick", action="store_true", help="tiny models: does it work")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.threads:
        torch.set_num_threads(options.threads)
    print(f"forward + backward, float32, on {options.device}; {versions()}; {machine()}\n")
    print("| model | in parts | of a forward | difference of losses | whole=False / eager | torch.compile / eager |")
    print("|---|---:|---:|---:|---:|---:|")
    rows = []
    for name in MODELS:
        if options.only not in name:
            continue
        row = measure(name, options.quick, options.device)
        rows.append(row)
        ratios = ["-" if row[each] is None else f"{row[each]:.2f}" for each in ("parts_to_eager", "compiled_to_eager")]
        share, difference = f"{100 * row['coverage']:.0f}%", f"{row['largest_difference']:.1e}"
        print(f"| {name} | {row['parts']} | {share} | {difference} | {' | '.join(ratios)} |")
    print("".join(f"\n{row['module']}: {row['quickest']}\n" + "\n".join(row["told"]) for row in rows))
    if options.json:
        Results.of("parts", "python -m benchmarks parts", rows).save(options.json)


if __name__ == "__main__":
    main()
