"""A scope opened inside a branch of `torch.cond`: only nodes of the branch's graph carry the tag.

A correct dump: `sin` and `add` of the branch that ran, and nothing of the other branch. A flat
walk over the outer graph finds no tag at all.
"""

import torch

MUST = []
MUST_NESTED = ["aten.sin", "aten.add"]
MUST_NOT = ["aten.cos"]


def make(data_dump):
    def yes(a):
        with data_dump():
            return a.sin() + 1

    def no(a):
        with data_dump():
            return a.cos() - 1

    def f(x):
        return torch.cond(x.sum() > 0, yes, no, (x,)) * 2

    return f, (torch.ones(3),)
