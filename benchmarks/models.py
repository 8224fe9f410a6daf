"""The models that benchmarks run: a transformer encoder, and a chain of small operators."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

# The width of BERT-base; two sentences.
BATCH, TOKENS, WIDTH, HEADS = 2, 64, 768, 12

Scope = Callable[[], AbstractContextManager[None]]


class Layer(torch.nn.Module):
    """Self-attention and a feed-forward net, each with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.project = torch.nn.Linear(WIDTH, WIDTH)
        self.norm2 = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).view(BATCH, TOKENS, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(BATCH, TOKENS, WIDTH)
        x = x + self.project(mixed)
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


class Encoder(torch.nn.Module):
    """An encoder of some layers.

    Args:
        layers: how many.
        scoped: which of them are in a scope.
        scope: opens one.
    """

    def __init__(self, layers: int, scoped: range = range(0), scope: Scope = nullcontext) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))
        self.scoped = scoped
        self.scope = scope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number in self.scoped:
                with self.scope():
                    x = layer(x)
            else:
                x = layer(x)
        return x


def sentences(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The encoder's input in one step: another one each time, as in a real run."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, TOKENS, WIDTH, generator=generator).to(dtype)


class Chain(torch.nn.Module):
    """Many operators on tensors of 64 bytes, in a scope."""

    def __init__(self, operators: int, scope: Scope = nullcontext) -> None:
        super().__init__()
        self.operators = operators
        self.scope = scope
        self.weight = torch.nn.Parameter(torch.full((16,), 0.999))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.scope():
            for number in range(self.operators):
                x = x * self.weight if number % 2 else x + self.weight
        return x
