"""A scope in a scope, an early return out of one, an exception through one.

A correct dump: all three operators once each; the operator after the inner scope still belongs to
the outer one; `late`, computed after the exception, belongs to none.
"""

import torch

MUST = ["aten.add", "aten.sin", "aten.sub"]
MUST_NOT = ["aten.tanh"]


def make(data_dump):
    def early(x):
        with data_dump():
            if x.shape[0] == 3:
                return x.sin()
            return x.cos()

    def f(x):
        with data_dump():
            a = x + 1
            b = early(a)
            c = b - 3
        try:
            with data_dump():
                raise ValueError("inside scope")
        except ValueError:
            late = c.tanh()
        return late

    return f, (torch.randn(3),)
