"""`aten.index` and `aten.index_put` take a list of optional tensors; `x[:, i]` gives `[None, i]`.

A correct dump: the index tensor is saved as INPUT.1.1 and the None has no file. Whether an argument
is a list of tensors cannot be told from its first element.
"""

import torch

MUST = ["aten.index.Tensor", "aten.index_put"]


def make(data_dump):
    def f(x, i, v):
        y = x.clone()
        with data_dump():
            r = x[:, i]
            y[:, i] = v
        return r, y

    return f, (torch.randn(3, 4), torch.tensor([0, 2]), torch.ones(3, 2))
