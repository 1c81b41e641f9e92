"""Models of PyTorch's dynamo benchmarks, of random parameters, each with a batch: HuggingFace's list and TIMM's.

Names, batch sizes (divided where the dashboard divides them) and lengths come from the lists, and so do the defaults of
each class's configuration. Nothing is downloaded: where the list names published weights, their sizes stand here.
Dropout draws as usual, with a probability that drops nothing, as on the dashboard: gradients can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_peers import Batch

_DROPS_NOTHING = 1e-30


@dataclass(frozen=True)
class PublicModel:
    """A model of a list.

    Attributes:
        make: a module of random parameters, whose first result is a loss.
        batch: ``batch(rows)``: arguments of a call.
        small: whether it is a small form for a CPU.
        left_out: the reason why it is not measured; empty: it is.
    """

    suite: str
    rows: int
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    small: bool = False
    left_out: str = ""


_HUGGINGFACE = """
AlbertForMaskedLM 4 512
AlbertForQuestionAnswering 8 512
AllenaiLongformerBase 4 1024
BartForCausalLM 4 1024
BartForConditionalGeneration 4 1024
BertForMaskedLM 16 512
BertForQuestionAnswering 32 512
BlenderbotForCausalLM 4 128
BlenderbotForConditionalGeneration 16 128
BlenderbotSmallForCausalLM 64 128
BlenderbotSmallForConditionalGeneration 64 128
CamemBert 16 512
DebertaV2ForMaskedLM 2 512
DebertaV2ForQuestionAnswering 8 512
DistilBertForMaskedLM 128 128
DistilBertForQuestionAnswering 512 128
DistillGPT2 16 512
ElectraForCausalLM 32 512
ElectraForQuestionAnswering 128 512
GPT2ForSequenceClassification 4 1024
GPTJForCausalLM 1 128
GPTJForQuestionAnswering 1 128
GPTNeoForCausalLM 32 128
GPTNeoForSequenceClassification 32 128
GoogleFnet 16 512
LayoutLMForMaskedLM 16 512
LayoutLMForSequenceClassification 32 512
M2M100ForConditionalGeneration 16 128
MBartForCausalLM 4 1024
MBartForConditionalGeneration 4 1024
MT5ForConditionalGeneration 16 128
MegatronBertForCausalLM 4 512
MegatronBertForQuestionAnswering 16 512
MobileBertForMaskedLM 128 128
MobileBertForQuestionAnswering 256 128
OPTForCausalLM 2 2048
PLBartForCausalLM 8 1024
PLBartForConditionalGeneration 8 1024
PegasusForCausalLM 32 128
PegasusForConditionalGeneration 64 128
RobertaForCausalLM 16 512
RobertaForQuestionAnswering 32 512
T5ForConditionalGeneration 4 1024
T5Small 4 1024
TrOCRForCausalLM 32 256
XGLMForCausalLM 8 128
XLNetLMHeadModel 8 512
YituTechConvBert 16 512
"""
"""Name, rows, tokens."""
_PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "AllenaiLongformerBase": (
        "LongformerForMaskedLM",
        {"vocab_size": 50265, "max_position_embeddings": 4098, "type_vocab_size": 1},
    ),
    "CamemBert": (
        "CamembertForMaskedLM",
        {"vocab_size": 32005, "max_position_embeddings": 514, "type_vocab_size": 1},
    ),
    "DistillGPT2": ("GPT2LMHeadModel", {"n_layer": 6}),
    "GoogleFnet": ("FNetForMaskedLM", {}),
    "T5Small": ("T5ForConditionalGeneration", {}),
    "YituTechConvBert": ("ConvBertForMaskedLM", {}),
}
"""Class and sizes of the list's published weights, where they are not the defaults."""
_ROBERTA = {"max_position_embeddings": 514}
_OPTIONS: dict[str, dict[str, Any]] = {
    "GPT2ForSequenceClassification": {"pad_token_id": 0},
    "GPTNeoForSequenceClassification": {"pad_token_id": 0},
    "RobertaForCausalLM": _ROBERTA,
    "RobertaForQuestionAnswering": _ROBERTA,
}
"""Settings for a batch of several rows, or of 512 tokens beside the padding's positions."""
_LEFT_OUT = dict.fromkeys(
    ("GPTJForCausalLM", "GPTJForQuestionAnswering"), "6 billion parameters, which the dashboard leaves out as well"
)
_DECODER_INPUTS = ("T5", "M2M100", "MT5", "Blenderbot", "Pegasus")
_DEPTHS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
_DEPTHS += ("n_layer", "n_layers")
_SMALL_DEPTH, _SMALL_WORDS, _SMALL_ROWS, _SMALL_TOKENS = 2, 8192, 4, 128
_SMALL_HUGGINGFACE = """
BartForCausalLM BartForConditionalGeneration BertForMaskedLM BertForQuestionAnswering
BlenderbotSmallForConditionalGeneration CamemBert DistilBertForMaskedLM DistillGPT2 ElectraForCausalLM
GPT2ForSequenceClassification GoogleFnet LayoutLMForMaskedLM MobileBertForMaskedLM MT5ForConditionalGeneration
OPTForCausalLM PLBartForConditionalGeneration RobertaForCausalLM T5Small XLNetLMHeadModel YituTechConvBert
"""


def _config(name: str, small: bool) -> Any:
    import transformers

    architecture, options = _PUBLISHED.get(name, (name, _OPTIONS.get(name, {})))
    config = getattr(transformers, architecture).config_class(**options)
    config.use_cache = False
    if small:
        for depth in _DEPTHS:
            if getattr(config, depth, None) is not None:
                setattr(config, depth, _SMALL_DEPTH)
        config.vocab_size = _SMALL_WORDS
    for key, value in vars(config).items():
        if "drop" in key and "layerdrop" not in key and isinstance(value, float) and value > 0:
            setattr(config, key, _DROPS_NOTHING)
    return config


def _language_model(name: str, small: bool) -> nn.Module:
    import transformers

    return getattr(transformers, _PUBLISHED.get(name, (name,))[0])(_config(name, small))


def _text(name: str, rows: int, tokens: int, small: bool) -> Batch:
    """Random words, with labels for the class."""
    config = _config(name, small)

    def random(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape)

    # not the first words: some models treat padding and sentence ends specially
    ids = torch.randint(5, config.vocab_size, (rows, tokens))
    arguments = {"input_ids": ids}
    if name.startswith(_DECODER_INPUTS) and "ForCausalLM" not in name:
        arguments["decoder_input_ids"] = ids.clone()
    if name.endswith("QuestionAnswering"):
        return Batch(kwargs=arguments | {f"{end}_positions": random(tokens, rows) for end in ("start", "end")})
    is_class = name.endswith("SequenceClassification")
    labels = random(config.num_labels, rows) if is_class else random(config.vocab_size, rows, tokens)
    return Batch(kwargs=arguments | {"labels": labels})


def _language(name: str, rows: int, tokens: int, small: bool = False) -> PublicModel:
    return PublicModel(
        "HuggingFace",
        rows,
        lambda: _language_model(name, small),
        lambda rows: _text(name, rows, tokens, small),
        small,
        _LEFT_OUT.get(name, ""),
    )


_TIMM = """
adv_inception_v3 128 299
beit_base_patch16_224 64 224
botnet26t_256 128 256
cait_m36_384 4 384
coat_lite_mini 128 224
convit_base 64 224
convmixer_768_32 32 224
convnext_base 64 224
convnextv2_nano.fcmae_ft_in22k_in1k 128 224
crossvit_9_240 256 240
cspdarknet53 64 256
deit_base_distilled_patch16_224 64 224
deit_tiny_patch16_224.fb_in1k 128 224
dla102 128 224
dm_nfnet_f0 128 192
dpn107 64 224
eca_botnext26ts_256 128 256
eca_halonext26ts 128 256
ese_vovnet19b_dw 256 224
fbnetc_100 512 224
fbnetv3_b 256 224
gernet_l 128 256
ghostnet_100 512 224
gluon_inception_v3 256 299
gmixer_24_224 128 224
gmlp_s16_224 128 224
hrnet_w18 128 224
inception_v3 128 299
jx_nest_base 32 224
lcnet_050 256 224
levit_128 1024 224
mixer_b16_224 128 224
mixnet_l 128 224
mnasnet_100 512 224
mobilenetv2_100 128 224
mobilenetv3_large_100 512 224
mobilevit_s 64 256
nfnet_l0 128 224
pit_b_224 64 224
pnasnet5large 16 331
poolformer_m36 64 224
regnety_002 1024 224
repvgg_a2 128 224
res2net101_26w_4s 128 224
res2net50_14w_8s 128 224
res2next50 128 224
resmlp_12_224 128 224
resnest101e 64 256
rexnet_100 256 224
sebotnet33ts_256 64 256
selecsls42b 128 224
spnasnet_100 128 224
swin_base_patch4_window7_224 64 224
swsl_resnext101_32x16d 32 224
tf_efficientnet_b0 128 224
tf_mixnet_l 128 224
tinynet_a 128 192
tnt_s_patch16_224 128 224
twins_pcpvt_base 128 224
visformer_small 128 224
vit_base_patch14_dinov2.lvd142m 128 518
vit_base_patch16_224 64 224
vit_base_patch16_siglip_256 128 256
volo_d1_224 64 224
xcit_large_24_p8_224 16 224
"""
"""Name, rows, pixels of a side: the dashboard's list of 61 until 2025, and four models that it has since."""
_SMALL_TIMM = """
crossvit_9_240 deit_tiny_patch16_224.fb_in1k ese_vovnet19b_dw fbnetc_100 ghostnet_100 gmixer_24_224 lcnet_050 levit_128
mnasnet_100 mobilenetv2_100 mobilenetv3_large_100 mobilevit_s regnety_002 resmlp_12_224 rexnet_100 selecsls42b
spnasnet_100 tf_efficientnet_b0 tinynet_a visformer_small
"""
_CLASSES = 1000


class Classifier(nn.Module):
    """A model of images with its loss, so that all compilers see both."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        scores = self.model(images)
        return nn.functional.cross_entropy(scores[0] if isinstance(scores, tuple) else scores, labels)


def _image_model(name: str) -> nn.Module:
    from timm import create_model

    return Classifier(create_model(name, pretrained=False, num_classes=_CLASSES, drop_rate=0.0))


def _images(rows: int, side: int) -> Batch:
    labels = torch.randint(0, _CLASSES, (rows,))
    return Batch(kwargs={"images": torch.randn(rows, 3, side, side), "labels": labels})


def _image(name: str, rows: int, side: int, small: bool = False) -> PublicModel:
    return PublicModel("TIMM", rows, lambda: _image_model(name), lambda rows: _images(rows, side), small)


def _listed(table: str) -> dict[str, tuple[int, int]]:
    return {name: (int(rows), int(size)) for name, rows, size in map(str.split, table.strip().splitlines())}


def _models() -> dict[str, PublicModel]:
    texts, images = _listed(_HUGGINGFACE), _listed(_TIMM)
    found = {name: _language(name, *sizes) for name, sizes in texts.items()}
    found |= {name: _image(name, *sizes) for name, sizes in images.items()}
    for name in _SMALL_HUGGINGFACE.split():
        found[f"{name} (small)"] = _language(name, _SMALL_ROWS, _SMALL_TOKENS, small=True)
    for name in _SMALL_TIMM.split():
        found[f"{name} (small)"] = _image(name, _SMALL_ROWS, images[name][1], small=True)
    return found


MODELS = _models()
"""By name. A small form has two layers of each stack, 8192 words and 4 x 128 tokens; images only have fewer rows."""
