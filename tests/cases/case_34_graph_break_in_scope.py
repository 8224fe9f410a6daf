"""A graph break inside the scope. Not fullgraph: `print` cannot be traced.

Dynamo skips the whole frame: the backend is never called for it, and the functions called from it
are compiled separately and without a tag.

Correct: the operators are dumped as eager code runs them, and a warning names the break.
"""

import torch

FULLGRAPH = False
REASON_NOT_FULLGRAPH = "print() in the scope is a deliberate graph break"
MUST = ["aten.sin", "aten.mul", "aten.add", "aten.cos"]
COUNT = {"aten.add": 1}


def make(data_dump):
    def helper(t):
        t = t * 2
        print("", end="")
        return t + 1

    def f(x):
        with data_dump():
            y = helper(x.sin())
            z = y.cos()
        return z + 1

    return f, (torch.ones(3),)
