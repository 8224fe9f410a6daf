"""In-place operators in the scope; AOTAutograd functionalises them.

A correct dump: the input of `add` is the value before it (2.0), its output is 3.0, the output of
`mul` is 9.0. A dumper that keeps references and saves later writes 9.0 three times, since
`t.numpy()` of a CPU tensor shares memory with `t`. The values are constants, to be checked.
"""

import torch

EXPECT_VALUES = {"first_input": 2.0, "after_add": 3.0, "after_mul": 9.0}
MUST = ["add", "mul"]


def make(data_dump):
    def f(x):
        y = x * 2
        with data_dump():
            y.add_(1)
            y.mul_(3)
        return y + 0

    return f, (torch.ones(4),)
