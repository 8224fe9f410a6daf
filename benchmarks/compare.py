"""Compare two dumps: time against reading both once, and the most memory that it takes.

python benchmarks/compare.py --gigabytes 2

"read" is the time of one process that reads every byte of both dumps once, from the page cache and
after the cache has been dropped; "compare" is what `torchair-scope compare` does after its imports.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

import torchair_scope
from torchair_scope.analysis.compare import bytes_to_compare
from torchair_scope.analysis.executors import forks_for
from torchair_scope.store.run import open_run

CALLS = 32
# The target of the second dump differs in every element, by a rounding or a few.
ROUNDING = 1e-7
DTYPES = ("float32", "bfloat16", "float16")


def write(path: Path, gigabytes: float, dtype: str, noise: float) -> None:
    """Write calls `y = x * 3`; all tensors are different ones, and have a file of their own."""
    kind = getattr(torch, dtype)
    size = 2 if dtype == "float16" else 4
    elements = int(gigabytes * 1e9 / size / CALLS / 2)
    step = open_run(path).graph(1, {"direction": "inference", "nodes": []}).begin_step()
    for position in range(CALLS):
        generator = torch.Generator().manual_seed(position)
        x = torch.randn(elements, generator=generator)
        if noise:
            x *= 1 + noise * torch.randn(elements, generator=generator)
        call = step.begin_call(
            f"mul_{position}", "aten.mul.Tensor", (x.to(kind), 3), {}, {"scope": "s"}
        )
        call.finish((x * 3).to(kind))
    step.finish()


def files_of(*paths: Path) -> Iterator[Path]:
    """What both dumps have on disk, each file once."""
    seen = set()
    for path in paths:
        for file in sorted(path.rglob("*.npy")):
            if file.stat().st_ino not in seen:
                seen.add(file.stat().st_ino)
                yield file


def read(*paths: Path) -> int:
    """Read every byte of the arrays once."""
    total = 0
    buffer = bytearray(1 << 18)
    for file in files_of(*paths):
        with open(file, "rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                total += count
    return total


def drop_from_cache(*paths: Path) -> None:
    for file in files_of(*paths):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def compare(golden: Path, target: Path) -> torchair_scope.analysis.compare.Comparison:
    dumps = torchair_scope.load(golden), torchair_scope.load(target)
    with forks_for(bytes_to_compare(*dumps)) as executor:
        return torchair_scope.compare(*dumps, executor=executor)


@contextmanager
def timed(found: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    found[name] = min(found.get(name, np.inf), time.perf_counter() - start)


def measure(golden: Path, target: Path, repeat: int) -> None:
    """Print a row; runs in a process of its own, as the command line does."""
    found: dict[str, float] = {}
    for _ in range(repeat):
        drop_from_cache(golden, target)
        with timed(found, "cold read"):
            size = read(golden, target)
        with timed(found, "read"):
            read(golden, target)
        with timed(found, "compare"):
            comparison = compare(golden, target)
        drop_from_cache(golden, target)
        with timed(found, "cold compare"):
            compare(golden, target)
    agreements = {each.agreement for result in comparison.results for each in result.tensors}
    print(f"  {size / 1e9:.2f} GB, {comparison.verdict.kind}, {'/'.join(sorted(agreements))}")
    for heat in ("", "cold "):
        reading, comparing = found[f"{heat}read"], found[f"{heat}compare"]
        print(
            f"  {heat or 'warm '}read {reading:6.2f} s   compare {comparing:6.2f} s   "
            f"ratio {comparing / reading:5.2f}"
        )
    workers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    print(f"  peak memory {peak_memory():.2f} GB, and {workers:.2f} GB of each worker process")


def peak_memory() -> float:
    """Of this process, in GB; what `getrusage` says of it begins with its parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of each dump")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES[:1]))
    parser.add_argument("--repeat", type=int, default=3, help="the shortest time counts")
    parser.add_argument("--measure", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure, options.repeat)
        return
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for dtype in options.dtypes:
            golden = Path(folder, dtype)
            write(golden, options.gigabytes, dtype, 0.0)
            for name, noise in (("equal", 0.0), ("rounded", ROUNDING)):
                target = Path(folder, f"{dtype}-{name}")
                write(target, options.gigabytes, dtype, noise)
                print(f"{dtype}, {name} in every element", flush=True)
                again = [sys.executable, __file__, "--repeat", str(options.repeat)]
                subprocess.run([*again, "--measure", golden, target], check=True)


if __name__ == "__main__":
    main()
