"""A step that no scope selects, against one of the same model without a scope.

What such a step costs is the cut: the operators of a scope run one by one, as eager code runs
them, and no kernel spans its border. So there are two things to compare it with: plain Inductor,
and a model of which the scoped part is eager code. `python benchmarks/unselected_steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import Table, alternating, arguments, median, scratch, seconds, show
from models import Chain, Encoder, sentences

import torchair_scope as torchair

STEPS = 10
NEVER = 10**9


def main() -> None:
    options = arguments(__doc__)
    table = Table(
        "1. seconds of a step that no scope selects",
        ["model", "operators", "plain", "eager part", "unselected", "to plain", "to eager part"],
    )
    with scratch(options) as folder:
        layers = 2 if options.quick else 6
        for name, make, x in (
            (f"encoder, 1 of {layers} layers", partial(_encoder, layers), sentences(0)),
            (f"encoder, all {layers} layers", partial(_encoder, layers, layers), sentences(0)),
            ("chain of 100 small operators", _chain, torch.ones(16)),
        ):
            _measure(table, name, make, x, folder, options.repeats)
    show([table], options.json)


def _measure(
    table: Table,
    name: str,
    make: Callable[..., torch.nn.Module],
    x: torch.Tensor,
    folder: Path,
    repeats: int,
) -> None:
    scope = partial(torchair.scope.data_dump, "part", steps=NEVER, path=str(folder / "dump"))
    # Each has a code of its own: Dynamo counts recompiles by code object.
    sides = {
        "plain": _compiled(make(), "inductor"),
        "eager part": _compiled(make(eager=True), "inductor"),
        "unselected": _compiled(make(scope=scope), "torchair_scope"),
    }
    results = [side(x) for side in sides.values()]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-3, atol=1e-3)

    def time(step: Callable[[torch.Tensor], Any]) -> Callable[[int], float]:
        return lambda repeat: seconds(lambda: [step(x) for _ in range(STEPS)]) / STEPS

    measured = alternating({side: time(step) for side, step in sides.items()}, 2 * repeats)
    if (folder / "dump").exists():
        raise SystemExit("a step that is not selected has left files")
    plain, eager, unselected = (median(measured[side]) for side in sides)
    (row,) = torchair.scope.summary().rows[-1:]
    table.add(name, row.tagged, plain, eager, unselected, unselected / plain, unselected / eager)


def _compiled(model: torch.nn.Module, backend: str) -> Callable[[torch.Tensor], Any]:
    model.requires_grad_(False)
    return torch.compile(model, backend=backend)


def _encoder(layers: int, scoped: int = 1, *, eager: bool = False, **scope: Any) -> torch.nn.Module:
    first = (layers - scoped) // 2
    part = range(first, first + scoped)
    encoder = Encoder(layers, part if scope else range(0), **scope)
    for number in part if eager else ():
        encoder.layers[number].forward = torch.compiler.disable(encoder.layers[number].forward)
    return encoder


def _chain(*, eager: bool = False, **scope: Any) -> torch.nn.Module:
    chain = Chain(100, **scope)
    if eager:
        chain.forward = torch.compiler.disable(chain.forward)  # type: ignore[method-assign]
    return chain


if __name__ == "__main__":
    main()
