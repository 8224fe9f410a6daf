"""The most natural mistake: the scope is opened outside the compiled function.

Tracing does not see it, so the graph has no tag. Not compiled as a whole: the outer function
stays eager on purpose, the inner one is compiled with `BACKEND`.

Correct: the call is dumped, all of its graph, and is not compiled anew.
"""

import torch

EAGER_OUTER = True
REASON_NOT_FULLGRAPH = "the scope is outside the compiled function on purpose"
BACKEND = "eager"
MUST = ["aten.sin", "aten.add"]


def make(data_dump):
    inner = torch.compile(lambda x: x.sin() + 1, backend=BACKEND, fullgraph=True)

    def f(x):
        with data_dump():
            return inner(x)

    return f, (torch.ones(3),)
