"""A tapped step against the same step without a dump, and against an interpreted one.

python benchmarks/tap.py [--quick] [--folder DISK]
"""

from __future__ import annotations

from pathlib import Path

import torch
from dumping import compiled, values
from measuring import Table, alternating, arguments, median, scratch, seconds, show
from models import Encoder, sentences

import torchair_scope as torchair

LAYERS = 6


class Sides:
    """One model compiled by Inductor: undumped, tapped and interpreted."""

    def __init__(self, folder: Path, scoped: range, dtype: torch.dtype) -> None:
        self.folder, self.bare = folder, folder / "bare"
        self.dtype = dtype
        self.inputs = 0
        self.steps = {"undumped": compiled(Encoder(LAYERS), dtype, "inductor")}
        for engine in ("tap", "interpret"):
            model = Encoder(LAYERS, scoped, torchair.scope.data_dump)
            options = {"path": str(folder / engine), "backend": "inductor", "engine": engine}
            self.steps[engine] = compiled(model, dtype, "torchair_scope", options=options)
        for step in self.steps.values():
            step(self.next_input())

    def next_input(self) -> torch.Tensor:
        """The input of the next step, unlike all before it."""
        self.inputs += 1
        return sentences(self.inputs, self.dtype)

    def time_step(self, side: str) -> float:
        x = self.next_input()
        return seconds(lambda: self.steps[side](x))

    def time_bare(self, repeat: int) -> float:
        """Write the values that the last tapped step has added, once each, with nothing else."""
        folders = sorted((self.folder / "tap").glob("*/graph_*/*"), key=lambda f: int(f.name))
        first, last = values(folders[0]), values(folders[-1])
        contents = [last[value].read_bytes() for value in last.keys() - first.keys()]
        self.bare.mkdir(exist_ok=True)

        def write() -> None:
            for number, content in enumerate(contents):
                with open(self.bare / f"{repeat}-{number}", "wb", buffering=0) as file:
                    file.write(content)

        return seconds(write)


def main() -> None:
    options = arguments(__doc__)
    case = ("layers in scope", "dtype")
    one = Table(
        "added time of a tapped step, against 1.3 bare writes of its new bytes + 10 % of the step",
        [*case, "undumped", "tapped", "added", "bare write", "bound", "/ bound"],
    )
    both = Table(
        "a tapped step, against an interpreted one",
        [*case, "interpreted", "tapped", "/ interpreted"],
    )
    dtypes = (torch.float32,) if options.quick else (torch.float32, torch.bfloat16)
    for scoped in (range(2, 3), range(LAYERS)):
        for dtype in dtypes:
            torch.compiler.reset()
            with scratch(options) as folder:
                sides = Sides(folder, scoped, dtype)
                measured = alternating(
                    {
                        "undumped": lambda repeat, sides=sides: sides.time_step("undumped"),
                        "tap": lambda repeat, sides=sides: sides.time_step("tap"),
                        "bare": sides.time_bare,
                        "interpret": lambda repeat, sides=sides: sides.time_step("interpret"),
                    },
                    options.repeats,
                )
            undumped, tapped, bare, interpreted = map(median, measured.values())
            bound = 1.3 * bare + 0.1 * undumped
            row = (len(scoped), str(dtype).removeprefix("torch."))
            added = tapped - undumped
            one.add(*row, undumped, tapped, added, bare, bound, added / bound)
            both.add(*row, interpreted, tapped, tapped / interpreted)
    show([one, both], options.json)


if __name__ == "__main__":
    main()
