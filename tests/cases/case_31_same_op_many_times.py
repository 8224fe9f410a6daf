"""One Python line in a scope runs 12 times: nodes mul, mul_1 to mul_11 share a stack trace.

A correct dump: 12 distinct sets of files, with the order of execution recorded (mul_10 sorts before
mul_2 as text).
"""

import torch

MUST = ["aten.mul"]
COUNT = {"aten.mul": 12}


def make(data_dump):
    def f(x):
        for _ in range(12):
            with data_dump():
                x = x * 1.5
            x = x - 1
        return x

    return f, (torch.ones(3),)
