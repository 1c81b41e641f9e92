"""Families of public packages: lines of ``families.txt`` → modules and their calls' arguments, by generic builders."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

Call = tuple[tuple, dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """A package's module, by the expressions of its constructor and of its calls' arguments."""

    package: str
    name: str
    constructor: str
    arguments: str

    def imported(self) -> list[Any]:
        """The modules whose names the expressions use."""
        without_cuda()
        modules = [importlib.import_module(each) for each in _MODULES.get(self.package, [self.package])]
        for name in ("schnet", "dimenet", "gnnff", "visnet") if self.package == "torch_geometric" else ():
            importlib.import_module(f"torch_geometric.nn.models.{name}").radius_graph = _radius_graph
        return modules

    def build(self) -> tuple[nn.Module, Callable[[int], Call]]:
        """The module, and call i → its arguments; ``ImportError`` where the package is not installed."""
        names = _names(self.constructor, self.imported()) | {"torch": torch, "nn": nn} | _OWN
        names |= {name: importlib.import_module(name) for name in (self.package,)}
        made = eval(self.constructor, names)
        if self.package == "peft":
            made = _adapted(made)
        module, sample = made if isinstance(made, tuple) else (made, None)
        size = re.search(r"img_size=(\d+)", self.constructor)
        arguments = f"picture({size[1] if size else 64})" if self.package == "timm" else self.arguments

        def call(i: int) -> Call:
            torch.manual_seed(i)
            given = {**names, **_given(i), "call": _call, "module": module}
            return sample() if sample else eval(f"call({arguments})", given)

        return module, call


def families() -> Iterator[Family]:
    """The families of ``families.txt``, in order."""
    text = Path(__file__).with_suffix(".txt").read_text()
    package, known = "", set()
    for line in re.sub(r"\n +", " ", text).splitlines():
        if line.startswith("["):
            package = line.strip("[]")
        elif line and not line.startswith("#"):
            constructor, _, arguments = line.partition(" : ")
            named = re.match(r"(\w+) = (.*)", constructor)
            constructors = constructor.split() if package in ("transformers", "peft") else [constructor]
            for each in constructors:
                short = re.sub(r"^(\w+\.)*|Config(?=\()|\((\)|.*=\*\*.*|(?!use_|.*dropout).*)$", "", each)
                if package == "transformers":
                    each = re.sub(r"^(\w+)\(?(.*?)\)?$", r"transformer(\1, \2)", each)
                name = named[1] if named else short
                name = each.partition("(")[0] if (package, name) in known else name  # another file's class of that name
                known.add((package, name))
                yield Family(package, name, named[2] if named else each, arguments)


def _call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


def _given(i: int) -> dict[str, Any]:
    """Names for call ``i``'s arguments: graphs with another number of nodes and edges each, other data of one size."""
    n = 24 + 5 * i
    edges = torch.randint(0, n, (2, 3 * n + i))
    kinds = torch.arange(edges.shape[1]) % 3
    image = torch.rand(2, 3, 32, 32)
    return {
        "n": n,
        "x": torch.randn(n, 4),
        "e": edges,
        "w": torch.rand(edges.shape[1]),
        "a": torch.randn(edges.shape[1], 3),
        "t": kinds,
        "p": torch.randn(n, 3),
        "z": torch.arange(n) % 5 + 1,
        "b": torch.arange(n) * 2 // n,
        "picture": lambda size=32: torch.randn(2, 3, size, size),
        "image": image.requires_grad_(),
        "grey": torch.randn(2, 1, 32, 32),
        "latent": torch.randn(2, 4, 8, 8),
        "words": torch.randn(2, 5, 16),
        "video": torch.randn(2, 4, 2, 8, 8),
        "step": torch.tensor([3, 7]),
        "embedding": torch.randn(12, 8, requires_grad=True),
        "label": torch.randint(0, 3, (12,)),
        "points": torch.randn(9, 4),
    }


def _names(expression: str, modules: list[Any]) -> dict[str, Any]:
    """The objects of an expression's names in a package."""
    found = {}
    for name in re.findall(r"[A-Za-z_]\w*", expression):
        for module in modules:
            try:
                found[name] = getattr(module, name)
            except AttributeError:
                with contextlib.suppress(ImportError):
                    found[name] = importlib.import_module(f"{module.__name__}.{name}")
    return found


def _mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs))


# transformers and peft: a class's configuration with each size cut down

_SIZES = (
    (r"^type_vocab|^num_channels$|^num_labels|max_.*position|^num_buckets", None),
    (r"vocab_size", 64),
    (r"experts_per_tok|top_?k$|n_group$|topk_group|num_selected_experts", 1),
    (r"num_(local_|routed_)?experts$|n_routed_experts", 4),
    (r"lora_rank|qk_nope_head_dim|qk_rope_head_dim|v_head_dim|state_size|d_state|headdim", 8),
    (r"heads?$", 2),
    (r"layers$|n_layer$|depth$|blocks$", 2),
    (r"head_dim|d_kv|kv_channels|rotary_dim", 8),
    (r"image_size", 32),
    (r"patch_size", 8),
    (r"num_mel_bins", 16),
    (r"hidden_size|d_model|n_embd|_dim$|^dim$|intermediate|d_ff|inner|embedding_size|ffn|channels|rank|projection", 16),
)


def _small(fields: dict[str, Any]) -> dict[str, Any]:
    """A configuration's sizes, cut down by their names; lists keep their lengths, but for one layer of each kind."""
    found = {}
    kinds = list(dict.fromkeys(fields.get("layer_types") or ()))[:4]
    for name, value in fields.items():
        size = next((size for pattern, size in _SIZES if re.search(pattern, name)), None)
        if name.endswith("token_id"):
            found[name] = {"pad": 0, "bos": 1, "eos": 2}.get(name.split("_")[0], 3)
        elif size is not None and type(value) is int:
            found[name] = min(value, size)
        elif re.search("hidden_sizes|embed_dims|neck", name) and isinstance(value, list):
            found[name] = [min(each, 16) for each in value]
        elif name == "depths":
            found[name] = [1] * len(value)
        elif name.endswith("_config") and isinstance(value, dict):
            found[name] = value | _small(value)
    if kinds:
        found |= {"layer_types": (kinds * 2)[: max(2, len(kinds))], "num_hidden_layers": max(2, len(kinds))}
    return found


def _transformer(cls: type, **more: Any) -> tuple[nn.Module, Callable[[], Call]]:
    defaults = cls.config_class().to_dict()
    module = cls(cls.config_class(**_small(defaults) | more))
    takes = inspect.signature(cls.forward).parameters
    main, length = module.main_input_name, 12

    def call() -> Call:
        ids = torch.randint(4, 60, (2, length))
        given: dict[str, Any] = {
            "input_ids": {"input_ids": ids},
            "pixel_values": {"pixel_values": torch.randn(2, 3, 32, 32)},
            "input_values": {"input_values": torch.randn(2, 1600)},
            "input_features": {"input_features": torch.randn(2, 16, 40)},
            "pixel_values_videos": {"pixel_values_videos": torch.randn(2, 4, 3, 32, 32)},
            "past_values": {"past_values": torch.randn(2, getattr(module.config, "context_length", 12), 1)},
        }[main].copy()
        if "attention_mask" in takes and main == "input_ids":
            given["attention_mask"] = torch.ones_like(ids)
        if "labels" in takes:
            token = re.search("LM|ConditionalGeneration|CTC|Token|ImageModeling|Protein", cls.__name__)
            given["labels"] = (ids // 2 if "CTC" in cls.__name__ else ids) if token else torch.tensor([0, 1])
        elif "decoder_input_ids" in takes:
            given["decoder_input_ids"] = ids
        if "start_positions" in takes:
            given |= {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}
        return (), given

    return module, call


def _adapted(config: Any) -> tuple[nn.Module, Callable[[], Call]]:
    import peft
    import transformers

    config.task_type = "CAUSAL_LM"
    base, call = _transformer(transformers.LlamaForCausalLM)
    if config.__dict__.get("target_modules", config) is None:
        config.target_modules = ["q_proj", "v_proj"]
    if config.__dict__.get("feedforward_modules", config) is None:
        config.feedforward_modules = []
    return peft.get_peft_model(base, config), call


def _unet(down: str, up: str, suffix: str, **more: Any) -> dict[str, Any]:
    """A configuration shared by diffusers' U-Nets: two levels, attention in the lower one."""
    return {
        "down_block_types": (f"DownBlock{suffix}", down),
        "up_block_types": (up, f"UpBlock{suffix}"),
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        **({} if suffix == "Motion" else {"attention_head_dim": 2}),
        **more,
    }


def _radius_graph(pos: torch.Tensor, r: float, batch: torch.Tensor, loop: bool = False, **_: Any) -> torch.Tensor:
    """The edges between nodes of one graph nearer than r; PyTorch Geometric takes them from a library in C."""
    near = (torch.cdist(pos, pos) < r) & (batch[:, None] == batch)
    return (near if loop else near & ~torch.eye(len(pos), dtype=torch.bool)).nonzero().t().flip(0)


@functools.cache
def without_cuda() -> torch.library.Library:
    """Operators that torchvision requires: its CUDA build cannot load its own with a torch without CUDA."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    if torch.version.cuda is None:
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def _gaussian() -> dict[str, Any]:
    gpytorch = importlib.import_module("gpytorch")

    class Covariance(nn.Module):
        def __init__(self, kernel: nn.Module):
            super().__init__()
            self.kernel = kernel

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.kernel(x).to_dense()

    class Exact(gpytorch.models.ExactGP):
        def __init__(self, x: torch.Tensor, y: torch.Tensor):
            super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    return {"gpytorch": gpytorch, "kernels": gpytorch.kernels} | {each.__name__: each for each in (Covariance, Exact)}


_MODULES = {
    "torch_geometric": ["torch_geometric.nn"],
    "timm": ["timm.models"],
    "torchvision": ["torchvision.models", "torchvision.models.segmentation"],
    "monai": ["monai.networks.nets"],
    "pytorch_metric_learning": ["pytorch_metric_learning.losses"],
    "gpytorch": ["gpytorch"],
}
"""Further namespaces for the lines of a package, besides the package itself."""
_OWN = {
    "mlp": _mlp,
    "transformer": _transformer,
    "unet": _unet,
    "sizes": {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 32},
    "Covariance": lambda *args: _gaussian()["Covariance"](*args),
    "Exact": lambda *args: _gaussian()["Exact"](*args),
}
