"""A custom operator with `mutates_args`, called on a view of a buffer.

It becomes `auto_functionalized_v2`, whose only positional argument is the OpOverload and whose
tensors are keyword arguments (`x=`, `_all_bases=[...]`, `_opt_base_index=None`).

A correct dump: the record shows the real operator (`bugcase10::scatter_row`), not just
`auto_functionalized_v2`; the base tensor is saved before and after; the OpOverload is not saved
as an array.
"""

import torch


@torch.library.custom_op("bugcase10::scatter_row", mutates_args={"out"})
def scatter_row(
    x: torch.Tensor, out: torch.Tensor, opt: torch.Tensor | None = None
) -> torch.Tensor:
    out.copy_(x * 2)
    return x + 1


@scatter_row.register_fake
def _(x, out, opt=None):
    return torch.empty_like(x)


MUST = ["auto_functionalized"]


def make(data_dump):
    def f(x):
        buf = torch.zeros(4, 3)
        with data_dump():
            r = torch.ops.bugcase10.scatter_row(x, buf[1], None)
        return buf * 1, r

    return f, (torch.ones(3),)
