"""The model of `torchair-scope demo`, which copies this file beside its dumps."""

from __future__ import annotations

import torch

import torchair_scope as torchair

FEATURES = 64


class Block(torch.nn.Module):
    """Attention and a gated sum, from (tokens, 64) to (tokens, 64), with a scope around both."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(FEATURES, FEATURES)
        self.norm = torch.nn.LayerNorm(FEATURES)
        self.query = torch.nn.Linear(FEATURES, FEATURES)
        self.gate = torch.nn.Linear(FEATURES, FEATURES)
        self.head = torch.nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the model."""
        h = torch.nn.functional.silu(self.embed(x)) + x
        with torchair.scope.data_dump("block"):
            normed = self.norm(h)
            weights = torch.softmax(self.query(normed) @ normed.T, dim=-1)
            h = h + (weights @ normed) * torch.sigmoid(self.gate(normed))
        return torch.nn.functional.silu(self.head(h))
