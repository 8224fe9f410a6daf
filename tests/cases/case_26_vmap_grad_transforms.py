"""`vmap` and `grad` inside the scope.

In Dynamo's graph the tagged nodes are `_vmap_increment_nesting`, `_add_batch_dim` and so on, in
the ATen graph they are gone.

A correct dump: no failure, and the shapes dumped are the batched ones.
"""

import torch

MUST = ["aten.sin"]


def make(data_dump):
    def f(x):
        with data_dump():
            y = torch.vmap(lambda t: t.sin() * 2)(x)
            g = torch.func.grad(lambda t: (t * t).sum())(x)
        return y + g

    return f, (torch.randn(3, 2),)
