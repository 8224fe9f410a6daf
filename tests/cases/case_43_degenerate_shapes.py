"""0-d and empty tensors, tensors of one row, and NaN, infinity and -0.0.

A correct dump: () is a file of shape (); (0, 3) is a file of shape (0, 3), not a missing file;
NaN and -0.0 survive.
"""

import torch

MUST = ["aten.sum", "aten.mul"]


def make(data_dump):
    def f(x, e):
        with data_dump():
            s = x.sum()
            z = e * 2
            n = x.log() * -0.0
        return s, z, n

    return f, (torch.tensor([[-1.0, 0.0, 1.0]]), torch.empty(0, 3))
