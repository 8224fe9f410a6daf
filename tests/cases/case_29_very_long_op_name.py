"""Custom operators whose qualified names are over 200 characters, as those of fused kernels are.

With node name, INPUT.0 and timestamp the file name would pass 255 bytes.

A correct dump: names are shortened and hashed, the true target is in the manifest, and two long
names with a common prefix do not collide.
"""

import torch

_A = "fused_" + "norm_quant_matmul_" * 12 + "a"
_B = "fused_" + "norm_quant_matmul_" * 12 + "b"
_lib = torch.library.Library("bugcase29", "DEF")
for _name, _addend in ((_A, 1.0), (_B, 2.0)):
    _lib.define(f"{_name}(Tensor x) -> Tensor")
    _lib.impl(_name, lambda x, addend=_addend: x + addend, "CompositeExplicitAutograd")

MUST = ["bugcase29.fused_"]
_opa, _opb = getattr(torch.ops.bugcase29, _A).default, getattr(torch.ops.bugcase29, _B).default


def make(data_dump):
    def f(x):
        with data_dump():
            a = _opa(x)
            b = _opb(x)
        return a * b

    return f, (torch.randn(3),)
