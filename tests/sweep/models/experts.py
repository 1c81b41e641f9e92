"""Models that route tokens to a few of many experts, in each implementation of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from tests.sweep.models.batches import Case, decoder, language


def _routed(model: type[nn.Module], config: hf.PreTrainedConfig, form: str) -> nn.Module:
    config._experts_implementation = form
    return model(config)


def _mixtral(form: str) -> nn.Module:
    options = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return _routed(hf.MixtralForCausalLM, hf.MixtralConfig(**decoder(**options)), form)


def _qwen(form: str) -> nn.Module:
    widths = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 20}
    options = {"num_experts": 5, "num_experts_per_tok": 2, "output_router_logits": True, "norm_topk_prob": True}
    return _routed(hf.Qwen2MoeForCausalLM, hf.Qwen2MoeConfig(**decoder(**options, **widths)), form)


class Expert(nn.Module):
    """A gated product."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Routed(nn.Module):
    """A common implementation: a loop over expert modules, each of which gets the rows that chose it."""

    def __init__(self, width: int = 24, hidden: int = 40, experts: int = 4, chosen: int = 2):
        super().__init__()
        self.norm, self.router, self.chosen = nn.LayerNorm(width), nn.Linear(width, experts), chosen
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, -2)
        weights, choices = self.router(rows).softmax(-1).topk(self.chosen)
        found = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            row, place = torch.where(choices == index)
            if len(row):
                found.index_add_(0, row, expert(rows[row]) * weights[row, place, None])
        return x + found.view_as(x)


MODELS = {
    "routed-modules": Case(lambda: nn.Sequential(Routed(), Routed()), lambda: {"input": torch.randn(3, 11, 24)}),
    "mixtral": Case(lambda: _mixtral("grouped_mm"), language, dtype=torch.float32),
    "mixtral-batched": Case(lambda: _mixtral("batched_mm"), language),
    "mixtral-loop": Case(lambda: _mixtral("eager"), language),
    "qwen2-moe": Case(lambda: _qwen("grouped_mm"), language, dtype=torch.float32),
    "qwen2-moe-batched": Case(lambda: _qwen("batched_mm"), language),
}
