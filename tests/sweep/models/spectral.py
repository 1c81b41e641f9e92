"""Models with complex numbers inside: Fourier transforms, rotations as complex factors, state spaces."""

from __future__ import annotations

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from tests.sweep.models.batches import DROPOUT, VOCABULARY, WIDTH, Arguments, Case, tokens


def _fnet() -> nn.Module:
    options = {**WIDTH, "hidden_dropout_prob": DROPOUT["hidden_dropout_prob"]}
    options.pop("num_attention_heads")
    return hf.FNetForMaskedLM(hf.FNetConfig(**options))


def _unpadded() -> Arguments:
    ids = tokens()
    return {"input_ids": ids, "labels": ids}


def _sequences() -> Arguments:
    return {"x": torch.randn(3, 11, 6)}


class RotaryAttention(nn.Module):
    """Causal attention whose queries and keys are rotated by complex factors, as in LLaMA's first code."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, factors: Tensor) -> Tensor:
        query, key, value = (each(x).unflatten(-1, (self.heads, -1)) for each in (self.query, self.key, self.value))
        query, key = self.turned(query, factors).transpose(1, 2), self.turned(key, factors).transpose(1, 2)
        result = F.scaled_dot_product_attention(query, key, value.transpose(1, 2), is_causal=True)
        return self.out(result.transpose(1, 2).flatten(2))

    @staticmethod
    def turned(x: Tensor, factors: Tensor) -> Tensor:
        """Pairs of neighbours as complex numbers, times a factor for each position and pair."""
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * factors[:, None, :]).flatten(3)


class RotaryBlock(nn.Module):
    def __init__(self, width: int, heads: int, inner: int):
        super().__init__()
        self.attention = RotaryAttention(width, heads)
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.gate, self.up, self.down = nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(inner, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, factors: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.before(x), factors))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Rotary(nn.Module):
    """A small LLaMA with its rotations in complex form."""

    def __init__(self, width: int = 24, heads: int = 3, layers: int = 2, longest: int = 40):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(RotaryBlock(width, heads, 40) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        frequencies = 10_000.0 ** -(torch.arange(0, width // heads, 2) / (width // heads))
        angles = torch.outer(torch.arange(longest), frequencies).double()
        self.register_buffer("factors", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        factors = self.factors[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x, factors)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class StateSpace(nn.Module):
    """A diagonal S4 layer: a long convolution by FFT, whose kernel is a sum of complex exponentials."""

    def __init__(self, width: int, states: int = 4):
        super().__init__()
        self.log_step = nn.Parameter(torch.rand(width) * 2 - 4)
        self.log_decay = nn.Parameter(torch.full((width, states), 0.5).log())
        self.frequency = nn.Parameter(torch.pi * torch.arange(states).repeat(width, 1))
        self.mix = nn.Parameter(torch.randn(width, states, dtype=torch.complex128))
        self.skip = nn.Parameter(torch.randn(width))
        self.out, self.drop = nn.Linear(width, 2 * width), nn.Dropout(0.1)

    def kernel(self, length: int) -> Tensor:
        """(width, length): the weight of the element that lies this many steps back."""
        poles = torch.complex(-self.log_decay.exp(), self.frequency)
        steps = poles * self.log_step.exp()[:, None]
        powers = (steps[..., None] * torch.arange(length, device=steps.device)).exp()
        factors = self.mix * (steps.exp() - 1) / poles
        return 2 * torch.einsum("ws,wsl->wl", factors, powers).real

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        series = x.transpose(1, 2)
        spectrum = torch.fft.rfft(series, n=2 * length) * torch.fft.rfft(self.kernel(length), n=2 * length)
        y = torch.fft.irfft(spectrum, n=2 * length)[..., :length] + series * self.skip[:, None]
        return x + F.glu(self.out(self.drop(F.gelu(y.transpose(1, 2)))))


class StateSpaces(nn.Module):
    def __init__(self, inputs: int = 6, width: int = 12):
        super().__init__()
        self.up, self.down = nn.Linear(inputs, width), nn.Linear(width, 2)
        self.layers = nn.ModuleList(StateSpace(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for layer in self.layers:
            x = layer(x)
        return self.down(x.mean(1))


MODELS = {
    "fnet": Case(_fnet, _unpadded),
    "llama-complex": Case(Rotary, _unpadded),
    "s4": Case(StateSpaces, _sequences),
}
