"""A module's buffer is updated in place inside the scope and again outside (a KV cache).

A correct dump: the buffer after N calls equals the unscoped one; the output of `index_copy` is the
value before `mul_`.
"""

import torch

NEEDS_NO_GRAD = True
MUST = ["aten.index_copy"]


class KV(torch.nn.Module):
    def __init__(self, data_dump):
        super().__init__()
        self.data_dump = data_dump
        self.register_buffer("kv", torch.zeros(2, 6, 4))

    def forward(self, x, pos):
        with self.data_dump():
            self.kv.index_copy_(1, pos, x)
            k = self.kv[:, :3]
        self.kv.mul_(2)
        return k.sum(-1)


def make(data_dump):
    return KV(data_dump), (torch.rand(2, 1, 4), torch.tensor([1]))
