"""Programs that tests of many processes start: `python -m tests.support.programs NAME FOLDER`.

Each dumps to `FOLDER/dump`, and saves what it computed as `FOLDER/result_{rank}.pt`. `ranks` is for
as many processes as torchrun's environment says, and has a folder in FOLDER for each of its parts.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.support.disks import slowed
from torchair_scope.scope import data_dump
from torchair_scope.store.run import complete_steps

TIMEOUT = timedelta(seconds=20)
SLOW_RANK = 2
SLOW_STEPS = 6
SECONDS_A_FILE = 2.0
SECONDS_LATE = 1.0
SIZES = (4, 40_000)  # elements: one file with others, and one alone


# Ranks


@contextlib.contextmanager
def _process_group(folder: Path) -> Iterator[int]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = (folder / "meeting").as_uri()
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=world_size, timeout=TIMEOUT
    )
    try:
        yield rank
    finally:
        dist.destroy_process_group()


def _compiled(function: Callable, folder: Path) -> Callable:
    options = {"path": str(folder / "dump"), "backend": "aot_eager"}
    return torch.compile(function, backend="torchair_scope", options=options, fullgraph=True)


def _all_reduce(x: torch.Tensor) -> torch.Tensor:
    return functional.all_reduce(x, "sum", dist.group.WORLD)


def of_rank(rank: int) -> torch.Tensor:
    """What a rank gives to its model."""
    return torch.arange(4.0) + 10 * rank


def ranks(folder: Path) -> None:
    """Run all parts, one after the other, in one process group."""
    with _process_group(folder) as rank:
        for part in (collective, late_rank, one_rank, slow_disk, very_slow_disk):
            own = folder / part.__name__
            own.mkdir(exist_ok=True)
            torch.save(part(own, rank), own / f"result_{rank}.pt")


def collective(folder: Path, rank: int) -> list[torch.Tensor]:
    """Each rank dumps a sum over the ranks, and what waits for it."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        with data_dump("exchange"):
            x = _all_reduce(x)
        return x + 1

    compiled = _compiled(function, folder)
    return [compiled(of_rank(rank) + step) for step in range(2)]


def late_rank(folder: Path, rank: int) -> list[torch.Tensor]:
    """One rank comes late to a sum, whose result arrives when the others wait for it."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with data_dump("exchange"):
            x = _all_reduce(x).sin()
        return x + 1

    compiled = _compiled(function, folder)
    results = []
    for size in SIZES:
        x = of_rank(rank).repeat(size // 4)
        if rank == SLOW_RANK:
            time.sleep(SECONDS_LATE)
        results.append(compiled(x))
    return results


def one_rank(folder: Path, rank: int) -> list[torch.Tensor]:
    """Rank 1 alone opens a scope, in the model and around a call of it."""

    def scope(name: str) -> AbstractContextManager[None]:
        return data_dump(name) if rank == 1 else contextlib.nullcontext()

    def function(x: torch.Tensor) -> torch.Tensor:
        with scope("inside"):
            x = _all_reduce(x * 2)
        return _all_reduce(x + 1)

    compiled, x = _compiled(function, folder), of_rank(rank)
    results = [compiled(x)]
    with scope("around"):
        results.append(compiled(x))
    return results


def slow_disk(folder: Path, rank: int) -> dict[str, Any]:
    """The disk of one rank is so slow that all steps take longer than a collective may take."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with data_dump("exchange"):
            x = _all_reduce(x.sin())
        return x + 1

    compiled = _compiled(function, folder)
    began = time.monotonic()
    with slowed(SECONDS_A_FILE if rank == SLOW_RANK else 0):
        # Equal values would be written once.
        results = [compiled(of_rank(rank) + step) for step in range(SLOW_STEPS)]
    return {"results": results, "seconds": time.monotonic() - began}


def very_slow_disk(folder: Path, rank: int) -> dict[str, Any]:
    """The disk of one rank takes longer for each file than a collective may take."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with data_dump("exchange", steps="0", lag=1):
            x = _all_reduce(x.sin())
        return x + 1

    compiled = _compiled(function, folder)
    began = time.monotonic()
    with slowed(TIMEOUT.total_seconds() + 2 if rank == SLOW_RANK else 0):
        results = [compiled(of_rank(rank)) for _ in range(SLOW_STEPS)]
        running = time.monotonic() - began
        complete_steps()
    return {"results": results, "running": running, "seconds": time.monotonic() - began}


# Forked children


def _in_child(work: Callable[[], None]) -> None:
    """Run `work` in a forked child and wait for its end, which has to be a good one."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise RuntimeError(f"the child ended with status {status}")


def _shift(x: torch.Tensor) -> torch.Tensor:
    x = x.sin()
    with data_dump("shift"):
        x = x + 1
    return x.cos()


def _expect_shift(compiled: Callable, x: torch.Tensor) -> None:
    if not torch.equal(compiled(x), (x.sin() + 1).cos()):
        raise AssertionError("the result is wrong")


def fork_after_a_run(folder: Path) -> None:
    """A child runs the compiled function that its parent has run, and compiles one of its own."""
    compiled = _compiled(_shift, folder)
    _expect_shift(compiled, torch.ones(3))

    def child() -> None:
        _expect_shift(compiled, torch.full((3,), 2.0))
        torch._dynamo.reset()
        _expect_shift(_compiled(_shift, folder), torch.full((4,), 3.0))

    _in_child(child)
    _expect_shift(compiled, torch.full((3,), 4.0))


def fork_in_a_scope(folder: Path) -> None:
    """A child is forked in a scope of its parent's, and opens one more."""
    os.environ["TORCHAIR_SCOPE_PATH"] = str(folder / "dump")

    def child() -> None:
        torch.full((3,), 2.0)
        with data_dump("child"):
            torch.full((3,), 3.0)

    with data_dump("parent"):
        torch.zeros(3)
        _in_child(child)
        torch.ones(3)


class Squares(torch.utils.data.Dataset):
    """A data set that opens a scope for each sample."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        with data_dump("sample"):
            return torch.full((2,), float(index)) ** 2


def data_loader(folder: Path) -> None:
    """Workers compute samples in scopes while their parent dumps, in a scope and outside."""
    os.environ["TORCHAIR_SCOPE_PATH"] = str(folder / "dump")
    with data_dump("parent"):
        torch.zeros(3)
    loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=2)
    outside = list(loader)
    with data_dump("parent"):
        inside = [batch + 1 for batch in loader]
    torch.save([outside, inside], folder / "result_0.pt")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    globals()[sys.argv[1]](Path(sys.argv[2]))
