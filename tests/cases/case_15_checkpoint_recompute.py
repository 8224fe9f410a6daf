"""Activation checkpointing: nodes of the forward graph are recomputed in the backward graph.

They have the same node names and the same tags there.

A correct dump: forward and recomputed values are both there, told apart by their graph, and equal.
Written to one folder they would overwrite each other.
"""

import torch
from torch.utils.checkpoint import checkpoint

GRAD = True
MUST = ["aten.sigmoid"]


class M(torch.nn.Module):
    def __init__(self, data_dump):
        super().__init__()
        self.l, self.data_dump = torch.nn.Linear(4, 4), data_dump

    def blk(self, x):
        h = self.l(x)
        with self.data_dump():
            h = torch.sigmoid(h)
        return h.sin()

    def forward(self, x):
        return checkpoint(self.blk, x, use_reentrant=False).sum()


def make(data_dump):
    torch.manual_seed(0)
    return M(data_dump), (torch.randn(2, 4, requires_grad=True),)
