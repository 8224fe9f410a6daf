"""What the benchmarks share: steps that alternate, medians, and tables, printed and as JSON."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

REPEATS = 5
# As much as a step of a benchmark's model writes, in bytes.
READY = 1 << 30


def arguments(description: str | None, **further: dict[str, Any]) -> argparse.Namespace:
    """The command line that each benchmark has, and further options; torch has one thread then."""
    parser = argparse.ArgumentParser(description=description)
    for name, facts in further.items():
        parser.add_argument(f"--{name}", **facts)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to dump to")
    parser.add_argument("--json", type=Path, help="the file to write the table to")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="the median is of so many")
    parser.add_argument("--quick", action="store_true", help="the smallest case only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    return options


@contextmanager
def scratch(options: argparse.Namespace) -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="benchmark-") as folder:
        yield Path(folder)


def seconds(run: Callable[[], Any]) -> float:
    """How long something takes, from when the disk is idle and memory is there.

    Virtual machines give memory that is free back to their host. To get it again has been seen to
    cost ten times as much as to write to it, and by chance hits one side or another.
    """
    gc.collect()
    os.sync()
    with mmap.mmap(-1, READY, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for page in range(0, READY, mmap.PAGESIZE):
            memory[page] = 1
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def alternating(
    sides: Mapping[str, Callable[[int], float]], repeats: int
) -> dict[str, list[float]]:
    """The seconds of each side, one repetition of all sides after the other."""
    measured: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(repeats):
        for side, measure in sides.items():
            measured[side].append(measure(repeat))
    return measured


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


class Table:
    """A table: a row for each line, ready to be printed and written as JSON."""

    def __init__(self, title: str, columns: Sequence[str]) -> None:
        self.title = title
        self.columns = list(columns)
        self.rows: list[list[Any]] = []

    def add(self, *cells: Any) -> None:
        """Add a row."""
        self.rows.append(list(cells))

    def __str__(self) -> str:
        lines = [self.columns, *([_text(cell) for cell in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        texts = (
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            for line in lines
        )
        return "\n".join([self.title, *texts])

    def as_json(self) -> dict[str, Any]:
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows}


def _text(cell: Any) -> str:
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def show(tables: Sequence[Table], path: Path | None) -> None:
    """Print tables, and write them as JSON if there is a path."""
    for table in tables:
        print(f"{table}\n", flush=True)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([table.as_json() for table in tables], indent=1) + "\n")


def peak_of(run: Callable[[], Any]) -> int:
    """The most memory, in bytes, that this process holds while something runs."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # What is freed and kept for later would hide the difference.
    Path("/proc/self/clear_refs").write_text("5")
    run()
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    )
    return int(line.split()[1]) * 1024
