"""A tensor that arrives only as a keyword argument (`attn_mask=`), as in every attention operator.

A correct dump: the mask is saved too, under a name that tells which keyword argument it was;
keyword arguments that are not tensors (`scale=0.5`) are recorded. Walking only `node.args` loses
the mask.
"""

import torch
import torch.nn.functional as F

MUST = ["scaled_dot_product"]
N_INPUT_TENSORS = {"scaled_dot_product": 4}


def make(data_dump):
    def f(q, k, v, m):
        with data_dump():
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=m, scale=0.5)
        return o * 2

    def heads():
        return torch.randn(1, 2, 4, 8)

    return f, (heads(), heads(), heads(), torch.zeros(4, 4))
