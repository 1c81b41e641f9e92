"""Models with several inputs or results: pictures beside texts, boxes matched with a picture's objects."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F

from tests.sweep.models.batches import SPECIAL, WIDTH, Arguments, Case, images, text_only

CLASSES = 3
QUERIES = 5


def _clip() -> nn.Module:
    text = {**WIDTH, **SPECIAL, "attention_dropout": 0.1}
    layers = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
    pictures = {**layers, "image_size": 32, "patch_size": 8, "attention_dropout": 0.1}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=pictures, projection_dim=16))


def _pairs() -> Arguments:
    return {**text_only(), "pixel_values": images()["pixel_values"], "return_loss": True}


def _detr() -> nn.Module:
    backbone = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 3, "decoder_attention_heads": 3}
    widths = {"d_model": 24, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "num_queries": QUERIES, "dropout": 0.1}
    return hf.DetrForObjectDetection(
        hf.DetrConfig(backbone_config=backbone, num_labels=CLASSES, use_timm_backbone=False, **layers, **widths)
    )


def _objects() -> list[dict[str, Tensor]]:
    """The objects in two pictures: classes, and boxes (center, width, height) as shares of the picture."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for count in (2, 3):
        center = torch.rand(count, 2, generator=generator) * 0.4 + 0.3
        size = torch.rand(count, 2, generator=generator) * 0.2 + 0.1
        classes = torch.randint(CLASSES, (count,), generator=generator)
        found.append({"class_labels": classes, "boxes": torch.cat([center, size], 1)})
    return found


def _scenes() -> Arguments:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def matched_loss(result: Any) -> Tensor:
    """The loss of DETR, outside of the model: queries and objects are matched, then classes and boxes compared."""
    losses = []
    for logits, boxes, truth in zip(result.logits, result.pred_boxes, _objects(), strict=True):
        wanted = truth["boxes"].to(boxes)
        classes = truth["class_labels"].to(logits.device)
        cost = torch.cdist(boxes, wanted, p=1) - logits.softmax(-1)[:, classes]
        rows, columns = (torch.as_tensor(each) for each in linear_sum_assignment(cost.detach().cpu().numpy()))
        labels = torch.full((QUERIES,), CLASSES, device=logits.device)
        labels[rows] = classes[columns]
        losses.append(F.cross_entropy(logits, labels) + F.l1_loss(boxes[rows], wanted[columns]))
    return torch.stack(losses).mean()


MODELS = {
    "clip": Case(_clip, _pairs),
    "detr": Case(_detr, _scenes, matched_loss),
    "detr-matches-inside": Case(_detr, lambda: {**_scenes(), "labels": _objects()}, dtype=torch.float32),
}
