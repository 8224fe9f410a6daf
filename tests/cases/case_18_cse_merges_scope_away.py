"""The scoped operator is a duplicate of an unscoped one.

The min-cut partitioner, Inductor's default, eliminates common sub-expressions and keeps the first
node with its tag: the scope's tag would vanish.

A correct dump: `sin` is dumped all the same, whichever of the two is kept.
"""

import torch

GRAD = True
MUST = ["aten.sin"]


def make(data_dump):
    def f(x, w):
        a = x.sin()
        with data_dump():
            b = x.sin()
        return (a @ w + b * 2).sum()

    return f, (torch.randn(3, 3, requires_grad=True), torch.randn(3, 3))
