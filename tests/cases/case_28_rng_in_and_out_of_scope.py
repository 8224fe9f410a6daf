"""Dropout before, in and after the scope.

An interpreted scope uses the eager generator, Inductor its own, unless `fallback_random` is set.

A correct dump: the three masks equal eager's for the same seed (under Inductor with
`fallback_random`); the operator never runs twice, which would advance the generator.
"""

import torch
import torch.nn.functional as F

RANDOM = True
MUST = ["native_dropout"]


def make(data_dump):
    def f(x):
        a = F.dropout(x, 0.5)
        with data_dump():
            b = F.dropout(a + 1, 0.5)
        return F.dropout(b + 1, 0.5)

    return f, (torch.ones(64),)
