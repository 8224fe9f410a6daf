"""A small transformer encoder, the model that scopes are tried on."""

from __future__ import annotations

import torch


class Layer(torch.nn.Module):
    """One encoder layer: self-attention and a feed-forward net, each with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.project = torch.nn.Linear(width, width)
        self.norm2 = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        x = x + self.project(scores.softmax(-1) @ value)
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


def encoder(layers: int = 6, width: int = 32, seed: int = 0) -> torch.nn.Sequential:
    """An encoder of `layers` layers, with weights that the seed decides."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(Layer(width) for _ in range(layers)))
