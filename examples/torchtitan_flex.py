"""torchtitan's flex attention as a plain call, which the compiler of the block lowers: an override.

    torchrun --nproc-per-node 2 -m torchtitan.train --module llama3 --config llama3_debugmodel \\
        --compile.enable --compile.backend tvm_dispatch \\
        --override.imports examples.torchtitan_flex.plain_flex --training.disable-cuda-graphs

torchtitan 0.3.0 wraps ``flex_attention`` in a ``torch.compile`` of its own, and accepts no backend but Inductor and
``aot_eager`` around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torchtitan.config import derive, override
from torchtitan.models.common.attention import FlexAttention
from torchtitan.protocols.module import Module

import bridge  # noqa: F401 - registers the backend


class PlainFlex(Module):
    """``FlexAttention`` without its inner ``torch.compile``; operands are ``[batch, length, heads, size]``."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: BlockMask,
        score_mod: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        heads = [each.transpose(1, 2) for each in (q_BLNH, k_BLNH, v_BLNH)]
        options = {"score_mod": score_mod, "block_mask": attention_masks, "scale": scale, "enable_gqa": enable_gqa}
        return flex_attention(*heads, **options).transpose(1, 2)


@override(target=FlexAttention.Config, description="flex_attention that the enclosing compiled block lowers")
def plain_flex(cfg: FlexAttention.Config) -> PlainFlex.Config:
    return derive(cfg, PlainFlex.Config)
