"""BatchNorm in training mode in the scope: running statistics and num_batches_tracked are mutated.

A correct dump: the statistics after N steps equal the unscoped ones; the dump shows the operator
whole, not its decomposition. The result of the backward operator has a None in it (x has no
gradient).
"""

import torch

GRAD = True
MUST = ["batch_norm"]


class M(torch.nn.Module):
    def __init__(self, data_dump):
        super().__init__()
        self.bn, self.data_dump = torch.nn.BatchNorm1d(4), data_dump

    def forward(self, x):
        with self.data_dump():
            y = self.bn(x)
        return y.relu()


def make(data_dump):
    torch.manual_seed(0)
    return M(data_dump), (torch.rand(3, 4),)
