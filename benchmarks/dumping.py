"""A dump against the plain serial one, against a bare write of its bytes, and its memory.

python benchmarks/dumping.py [--quick] [--folder DISK]
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from baseline import Baseline
from measuring import (
    Table,
    alternating,
    arguments,
    median,
    peak_of,
    scratch,
    seconds,
    show,
)
from models import Encoder, sentences

import torchair_scope as torchair
from torchair_scope.capture.tags import tag_of

Step = Callable[[torch.Tensor], Any]


class Sides:
    """One model, undumped, with our dump, and with the baseline's of the same operators."""

    def __init__(self, folder: Path, layers: int, scoped: range, dtype: torch.dtype) -> None:
        self.ours, self.theirs, self.bare = folder / "ours", folder / "theirs", folder / "bare"
        self.old = folder / "old"
        self.dtype = dtype
        self.inputs = 0
        self.undumped = compiled(Encoder(layers), dtype, "aot_eager")
        baseline = Baseline(self.theirs, wanted=lambda node: tag_of(node) is not None)
        model = Encoder(layers, scoped, torchair.scope.data_dump)
        self.baseline = compiled(model, dtype, baseline)
        model = Encoder(layers, scoped, torchair.scope.data_dump)
        options = {"path": str(self.ours), "backend": "aot_eager"}
        self.dumped = compiled(model, dtype, "torchair_scope", options=options)
        for step in (self.undumped, self.baseline, self.dumped):
            step(self.next_input())

    def next_input(self) -> torch.Tensor:
        """The input of the next step, unlike all before it."""
        self.inputs += 1
        return sentences(self.inputs, self.dtype)

    def time_undumped(self, repeat: int) -> float:
        # What frees memory is done before all sides, so that none alone finds it ready to use.
        for folder in (self.theirs, self.bare, self.old):
            shutil.rmtree(folder, ignore_errors=True)
        x = self.next_input()
        return seconds(lambda: self.undumped(x))

    def time_baseline(self, repeat: int) -> float:
        x = self.next_input()
        return seconds(lambda: self.baseline(x))

    def time_first(self, repeat: int) -> float:
        self.ours.rename(self.old)  # The next step begins a dump that has nothing yet.
        x = self.next_input()
        return seconds(lambda: self.dumped(x))

    def time_later(self, repeat: int) -> float:
        x = self.next_input()
        return seconds(lambda: self.dumped(x))

    def time_bare(self, repeat: int) -> float:
        """Write the values that the last step has added, once each, with nothing else."""
        before, after = (set(values(step)) for step in self.steps())
        new = values(self.steps()[1])
        contents = [new[value].read_bytes() for value in after - before]
        self.bare.mkdir()

        def write() -> None:
            for number, content in enumerate(contents):
                with open(self.bare / str(number), "wb", buffering=0) as file:
                    file.write(content)

        return seconds(write)

    def steps(self) -> list[Path]:
        """The folders of our first and our last step."""
        folders = sorted(self.ours.glob("*/graph_*/*"), key=lambda folder: int(folder.name))
        return [folders[0], folders[-1]]


def compiled(model: torch.nn.Module, dtype: torch.dtype, backend: Any, **options: Any) -> Step:
    """A step of a compiled model, in inference."""
    function = torch.compile(model.to(dtype).eval(), backend=backend, fullgraph=True, **options)

    def step(x: torch.Tensor) -> Any:
        with torch.no_grad():
            return function(x)

    return step


def values(folder: Path) -> dict[bytes, Path]:
    """The different values among the files below a folder, each with one of its files."""
    return {hashlib.sha256(path.read_bytes()).digest(): path for path in folder.rglob("*.npy")}


def size(paths: Any) -> int:
    return sum(path.stat().st_size for path in paths)


def on_disk(folder: Path) -> int:
    """What `du` says: the blocks of all files and folders, those with several names once."""
    facts = {path.stat().st_ino: path.stat() for path in (folder, *folder.rglob("*"))}
    return sum(fact.st_blocks * 512 for fact in facts.values())


def measure(tables: dict[str, Table], sides: Sides, case: tuple[Any, ...], repeats: int) -> None:
    """Measure one case, and add a row to each table."""
    undumped, baseline, first, later, bare = (
        median(needed)
        for needed in alternating(
            {
                "undumped": sides.time_undumped,
                "baseline": sides.time_baseline,
                "first": sides.time_first,
                "later": sides.time_later,
                "bare": sides.time_bare,
            },
            repeats,
        ).values()
    )
    their_bytes = size(sides.theirs.rglob("*.npy"))
    their_unique = size(values(sides.theirs).values())
    before, after = map(values, sides.steps())
    first_bytes = size(before.values())
    later_bytes = size(path for value, path in after.items() if value not in before)
    added = baseline - undumped
    tables["time"].add(
        *case, undumped, added, first - undumped, (first - undumped) / added,
        later - undumped, (later - undumped) / added,
    )  # fmt: skip
    tables["bytes"].add(
        *case, their_bytes, their_bytes / their_unique, first_bytes / their_bytes,
        later_bytes / their_bytes,
    )  # fmt: skip
    tables["bare"].add(*case, later_bytes, bare, later - undumped, (later - undumped) / bare)
    whole = size(values(sides.ours).values())
    tables["du"].add(*case, on_disk(sides.ours), whole, on_disk(sides.ours) / whole)
    quiet = peak_of(lambda: sides.undumped(sides.next_input()))
    dumping = peak_of(lambda: sides.dumped(sides.next_input()))
    region = size(values(sides.steps()[1]).values())
    tables["memory"].add(*case, dumping - quiet, region, (dumping - quiet) / region)


def main() -> None:
    options = arguments(__doc__)
    case = ("layers", "dumped", "dtype")
    tables = {
        "time": Table(
            "2. seconds that a dump adds to a step, against a serial Interpreter + np.save",
            [*case, "undumped", "baseline", "first", "/ baseline", "later", "/ baseline "],
        ),
        "bytes": Table(
            "2. bytes that a step leaves, against a serial Interpreter + np.save",
            [*case, "baseline", "/ unique", "first/base", "later/base"],
        ),
        "bare": Table(
            "3. seconds that a later step's dump adds, against a bare write of its new bytes",
            [*case, "bytes", "bare write", "added", "ratio"],
        ),
        "du": Table(
            "4. bytes on disk, against bytes of unique values", [*case, "du", "unique", "ratio"]
        ),
        "memory": Table(
            "8. peak memory over the undumped step, against the values of the dumped region",
            [*case, "over", "values", "ratio"],
        ),
    }
    for layers in (6,) if options.quick else (6, 24):
        for scoped in (range(2, 3), range(layers)):
            for dtype in (torch.float32, torch.bfloat16):
                with scratch(options) as folder:
                    torch.compiler.reset()
                    sides = Sides(folder, layers, scoped, dtype)
                    kind = str(dtype).removeprefix("torch.")
                    measure(tables, sides, (layers, len(scoped), kind), options.repeats)
    show(list(tables.values()), options.json)


if __name__ == "__main__":
    main()
