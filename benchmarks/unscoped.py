"""A model without a scope: our backend against plain Inductor, in time and in generated code.

python benchmarks/unscoped.py
"""

from __future__ import annotations

import re

import torch
from dumping import compiled
from measuring import Table, alternating, arguments, median, seconds, show
from models import Encoder, sentences
from torch._inductor.utils import run_and_get_code

STEPS = 10


def main() -> None:
    options = arguments(__doc__)
    layers = 2 if options.quick else 6
    encoder = Encoder(layers)
    plain = compiled(encoder, torch.float32, "inductor")
    ours = compiled(encoder, torch.float32, "torchair_scope")
    x = sentences(0)
    codes = [_comparable(run_and_get_code(step, x)[1]) for step in (plain, ours)]

    def time(step):  # type: ignore[no-untyped-def]
        return lambda repeat: seconds(lambda: [step(x) for _ in range(STEPS)]) / STEPS

    # More of them than elsewhere: this ratio is to be known to a few per cent.
    measured = alternating({"plain": time(plain), "ours": time(ours)}, 4 * options.repeats)
    theirs, own = median(measured["plain"]), median(measured["ours"])
    table = Table(
        "1. seconds of a step of an unscoped encoder, with our backend and with plain Inductor",
        ["layers", "inductor", "torchair_scope", "ratio", "same code"],
    )
    table.add(layers, theirs, own, own / theirs, str(codes[0] == codes[1]))
    show([table], options.json)


def _comparable(code: list[str]) -> list[str]:
    """The code without the names of its compile: the number of its graph."""
    return [re.sub(r"AOT ID: \[.*?\]", "", text) for text in code]


if __name__ == "__main__":
    main()
