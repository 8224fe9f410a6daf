"""An operator whose result is a list of tensors, used both inside and outside the scope.

A correct dump: `aten.split_with_sizes` has OUTPUT.0, OUTPUT.1 and OUTPUT.2, three separate files
and not one stacked array; INPUT.0 has shape (7, 3). `operator.getitem` nodes are never the only
record. The list (a Python list, not a Tensor) may cross the border of the scope.
"""

import torch

MUST = ["aten.split"]


def make(data_dump):
    def f(x):
        with data_dump():
            a, b, c = torch.split(x, [2, 2, 3])
        return a + b, c * 2

    return f, (torch.randn(7, 3),)
