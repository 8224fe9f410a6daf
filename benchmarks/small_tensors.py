"""Many operators on tensors of 64 bytes: what a dump costs for each call.

python benchmarks/small_tensors.py [--folder DISK]
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from baseline import Baseline
from dumping import compiled
from measuring import Table, alternating, arguments, median, scratch, seconds, show
from models import Chain

import torchair_scope as torchair
from torchair_scope.capture.tags import tag_of

OPERATORS, STEPS = 500, 20


class Sides:
    """One chain of operators, undumped, with our dump, and with the baseline's."""

    def __init__(self, folder: Path) -> None:
        self.theirs, self.ours = folder / "theirs", folder / "ours"
        self.generator = torch.Generator().manual_seed(0)
        scope = torchair.scope.data_dump
        baseline = Baseline(self.theirs, wanted=lambda node: tag_of(node) is not None)
        options = {"path": str(self.ours), "backend": "aot_eager"}
        self.steps = {
            "undumped": compiled(Chain(OPERATORS), torch.float32, "aot_eager"),
            "baseline": compiled(Chain(OPERATORS, scope), torch.float32, baseline),
            "ours": compiled(
                Chain(OPERATORS, scope), torch.float32, "torchair_scope", options=options
            ),
        }
        for side in self.steps:
            self.run(side)

    def run(self, side: str) -> None:
        for _ in range(STEPS):
            self.steps[side](torch.randn(16, generator=self.generator))

    def time(self, side: str) -> float:
        for folder in (self.theirs, self.ours):
            shutil.rmtree(folder, ignore_errors=True)
        return seconds(lambda: self.run(side))


def main() -> None:
    options = arguments(__doc__)
    title = f"6. microseconds for each of {OPERATORS * STEPS} calls on tensors of 64 bytes"
    table = Table(title, ["undumped", "baseline", "ours", "ours / baseline"])
    with scratch(options) as folder:
        sides = Sides(folder)
        measured = alternating(
            {side: lambda repeat, side=side: sides.time(side) for side in sides.steps},
            options.repeats,
        )
    each = {side: median(times) / OPERATORS / STEPS * 1e6 for side, times in measured.items()}
    baseline, ours = (each[side] - each["undumped"] for side in ("baseline", "ours"))
    table.add(each["undumped"], baseline, ours, ours / baseline)
    show([table], options.json)


if __name__ == "__main__":
    main()
