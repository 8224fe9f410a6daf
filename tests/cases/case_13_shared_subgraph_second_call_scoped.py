"""A `nested_compile_region` is called twice and only the second call is in the scope.

Dynamo traces the body once, at the first call, and both calls share its graph: the body's nodes
carry the tag of the first call (none).

A correct dump: the operators of the body are there for the second call only, with the result of
the first call as their input.
"""

import torch

MUST = ["invoke_subgraph"]
MUST_NESTED = ["aten.sin", "aten.mul"]


def make(data_dump):
    @torch.compiler.nested_compile_region
    def blk(x):
        return x.sin() * 2

    def f(x):
        a = blk(x)
        with data_dump():
            b = blk(a)
        return b

    return f, (torch.ones(3),)
