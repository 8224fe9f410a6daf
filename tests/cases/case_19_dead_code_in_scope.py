"""Values computed only to be looked at: the compiler removes them as dead code.

A correct dump: a warning says that tagged nodes were removed by the compiler, because to see them
was the user's intent. A scope that is dead as a whole does not break the cut.
"""

import torch

MUST = ["aten.add"]


def make(data_dump):
    def f(x):
        with data_dump():
            probe = x.exp().sum()  # noqa: F841
            y = x + 1
        with data_dump():
            only_dead = (x * 3).max()  # noqa: F841
        return y

    return f, (torch.ones(8),)
