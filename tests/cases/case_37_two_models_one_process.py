"""Two compiled models (target and draft) with equal graphs and node names, called in turn.

A correct dump: two graph numbers, two step counters, nothing overwritten, also when the second is
compiled after five steps of the first. `make` gives a plain function that calls both; `parts`
gives them one by one, to be compiled separately.
"""

import torch

MUST = ["aten.mm"]


def _part(data_dump, w):
    def g(x):
        h = x.relu()
        with data_dump():
            h = h @ w
        return h

    return g


def parts(data_dump):
    torch.manual_seed(0)
    return [(_part(data_dump, torch.randn(4, 4)), (torch.randn(2, 4),)) for _ in range(2)]


def make(data_dump):
    (g1, i1), (g2, _) = parts(data_dump)
    return (lambda x: g2(g1(x))), i1
