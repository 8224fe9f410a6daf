"""`dynamic=True` with sizes that are expressions (s0*s1) and cross the border of the scope.

Inductor needs every free symbol of its inputs bound; a piece that gets only `s0*s1` fails with
"expected [s77] to have been codegen-ed".

A correct dump: one compile for all shapes below, and sizes are recorded as plain integers.
"""

import torch

DYNAMIC = True
MUST = ["aten.view"]


def make(data_dump):
    def f(x):
        a = x.sin()
        with data_dump():
            b = a.reshape(x.shape[0] * x.shape[1]) + x.shape[0]
        return b * x.shape[1]

    return f, (torch.randn(3, 5),)


def more_inputs():
    return [(torch.randn(4, 6),), (torch.randn(7, 2),)]
