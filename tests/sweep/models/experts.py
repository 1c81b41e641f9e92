"""HuggingFace decoders whose tokens are routed to a few of many experts, in each of the forms that experts have."""

from __future__ import annotations

import torch
import transformers as hf
from torch import nn

from tests.sweep.models.batches import Case, decoder, language

__all__ = ["MODELS"]


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


MODELS = {
    "mixtral": Case(lambda: _mixtral("grouped_mm"), language, dtype=torch.float32),
    "mixtral-batched": Case(lambda: _mixtral("batched_mm"), language),
    "mixtral-loop": Case(lambda: _mixtral("eager"), language),
    "qwen2-moe": Case(lambda: _qwen("grouped_mm"), language, dtype=torch.float32),
    "qwen2-moe-batched": Case(lambda: _qwen("batched_mm"), language),
}
