"""The model that the tests in this folder compile."""

from __future__ import annotations

from typing import Any

import torch


class ScopedNet(torch.nn.Module):
    """Two linear layers; the second, and its tanh, stand in TorchAir's own `data_dump` scope."""

    def __init__(self, torchair: Any) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
        self.scope = torchair.scope.data_dump

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.a(x))
        with self.scope():
            h = torch.tanh(self.b(h))
        return h * 2


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal values on the host; strides may differ, and with them the last bit."""
    torch.testing.assert_close(actual.cpu(), expected.cpu(), atol=1e-6, rtol=1e-5)
