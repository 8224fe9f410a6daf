"""A chain of big temporaries.

Correct: after the call and `del`, weak references to inputs and outputs are dead; the peak of
memory in the scope is about one extra tensor, not the sum of all.
"""

import torch

MUST = ["aten.add"]
COUNT = {"aten.add": 20}


def make(data_dump):
    def f(x):
        for _ in range(20):
            with data_dump():
                x = x + 1
        return x * 2

    return f, (torch.zeros(1 << 18),)
