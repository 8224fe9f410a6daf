"""bfloat16, float8, float16 and bool in one scope; numpy has no bfloat16 and no float8.

A correct dump: values are read back exactly and the true dtype is recoverable, else a bfloat16
and a float32 run could not be told apart.
"""

import torch

NEEDS_NO_GRAD = True
MUST = ["_to_copy"]


def make(data_dump):
    def f(x):
        with data_dump():
            b = x.to(torch.bfloat16)
            q = b.to(torch.float8_e4m3fn)
            r = q.to(torch.bfloat16)
            p = x.to(torch.float8_e5m2).to(torch.float16)
            m = x > 0
        return r, p, m

    nan, inf = float("nan"), float("inf")
    return f, (torch.tensor([[0.1, -1.5, 448.0, nan], [1e-3, 3.0, -0.0, inf]]),)
