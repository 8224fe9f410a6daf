"""Operators that return `torch.return_types` (topk, frexp, native_layer_norm): mixed dtypes.

A correct dump: OUTPUT.0 with the floating point values and OUTPUT.1 with the int64 or int32 ones
are separate files. Members that nobody uses (mean and rstd of the layer norm) are outputs all the
same.
"""

import torch

MUST = ["aten.topk", "aten.frexp", "aten.native_layer_norm"]


def make(data_dump):
    def f(x):
        with data_dump():
            v, i = torch.topk(x, 2)
            m, e = torch.frexp(x)
            n = torch.nn.functional.layer_norm(x, (6,))
        return v, i, m, e, n

    return f, (torch.rand(4, 6),)
