"""Compare two dumps: time against reading both once, and the most memory that it takes.

python benchmarks/compare.py --gigabytes 2
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import torch

import torchair_scope
from torchair_scope.store.run import open_run

CALLS = 32


def write(path: Path, gigabytes: float, noise: float) -> None:
    """Write `x * 1` for tensors that are equal on both sides up to the noise."""
    elements = int(gigabytes * 1e9 / 4 / CALLS / 2)
    step = open_run(path).graph(1, {"direction": "inference", "nodes": []}).begin_step()
    for position in range(CALLS):
        generator = torch.Generator().manual_seed(position)
        x = torch.randn(elements, generator=generator)
        x += noise * torch.randn(elements, generator=generator)
        call = step.begin_call(f"mul_{position}", "aten.mul.Tensor", (x, 1), {}, {"scope": "s"})
        call.finish(x)
    step.finish()


def read(path: Path) -> int:
    """Read every byte of the arrays once."""
    total = 0
    for file in path.rglob("*.npy"):
        with open(file, "rb", buffering=0) as stream:
            buffer = bytearray(1 << 20)
            while count := stream.readinto(buffer):
                total += count
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of each dump")
    parser.add_argument("--noise", type=float, default=1e-7, help="0 for equal dumps")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        golden, target = Path(folder, "golden"), Path(folder, "target")
        write(golden, options.gigabytes, 0.0)
        write(target, options.gigabytes, options.noise)
        start = time.perf_counter()
        size = read(golden) + read(target)
        reading = time.perf_counter() - start
        start = time.perf_counter()
        comparison = torchair_scope.compare(golden, target)
        comparing = time.perf_counter() - start
    # Pages of mapped files are counted among them, which the system takes back when it needs to.
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"read both once  {size / 1e9:8.2f} GB  {reading:8.2f} s")
    print(f"compare         {comparison.verdict.kind:>11}  {comparing:8.2f} s")
    print(f"ratio           {comparing / reading:20.2f}")
    print(f"peak memory, mapped pages included  {memory:.2f} GB")


if __name__ == "__main__":
    main()
