"""A step that no scope selects, against one of the same model without a scope.

What such a step costs is the cut: the operators of a scope run one by one, as eager code runs
them, and the rest is compiled. So it is compared with plain Inductor, and with what the two parts
take by themselves: the scoped layers in eager code, and the share of the others of plain Inductor.

python benchmarks/unselected_steps.py
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from dumping import Step, compiled
from measuring import Table, alternating, arguments, median, scratch, seconds, show
from models import Chain, Encoder, sentences

import torchair_scope as torchair

STEPS = 10
NEVER = 10**9


def main() -> None:
    options = arguments(__doc__)
    table = Table(
        "1. seconds of a step that no scope selects",
        ["model", "plain", "scoped part, eager", "unselected", "to plain", "to both parts"],
    )
    layers = 2 if options.quick else 6
    with scratch(options) as folder:
        scope = partial(torchair.scope.data_dump, "part", steps=NEVER, path=str(folder / "dump"))
        for scoped in (1, layers):
            first = (layers - scoped) // 2
            part = range(first, first + scoped)
            model = Encoder(layers, part, scope)
            in_eager = torch.nn.Sequential(*(model.layers[number] for number in part))
            name = f"encoder, {scoped} of {layers} layers in a scope"
            row = _measured(Encoder(layers), model, in_eager, sentences(0), options.repeats)
            table.add(name, *row(1 - scoped / layers))
        chain = Chain(100)
        row = _measured(chain, Chain(100, scope), chain, torch.ones(16), options.repeats)
        table.add("chain of 100 small operators", *row(0.0))
        _must_be_empty(folder)
    show([table], options.json)


class _Row:
    def __init__(self, plain: float, in_eager: float, unselected: float) -> None:
        self.seconds = (plain, in_eager, unselected)

    def __call__(self, share_outside: float) -> tuple[float, ...]:
        plain, in_eager, unselected = self.seconds
        both = share_outside * plain + in_eager
        return plain, in_eager, unselected, unselected / plain, unselected / both


def _measured(
    plain: torch.nn.Module,
    scoped: torch.nn.Module,
    part: torch.nn.Module,
    x: torch.Tensor,
    repeats: int,
) -> _Row:
    sides = {
        "plain": compiled(plain, torch.float32, "inductor"),
        "in eager": torch.no_grad()(part),
        "unselected": compiled(scoped, torch.float32, "torchair_scope"),
    }
    torch.testing.assert_close(sides["unselected"](x), sides["plain"](x), rtol=1e-3, atol=1e-3)

    def timed(step: Step) -> float:
        return seconds(lambda: [step(x) for _ in range(STEPS)]) / STEPS

    measures = {name: (lambda repeat, step=step: timed(step)) for name, step in sides.items()}
    measured = alternating(measures, 2 * repeats)
    return _Row(*(median(measured[side]) for side in sides))


def _must_be_empty(folder: Path) -> None:
    if (folder / "dump").exists():
        raise SystemExit("a step that is not selected has left files")


if __name__ == "__main__":
    main()
