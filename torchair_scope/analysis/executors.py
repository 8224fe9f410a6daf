"""Run many small tasks: here, on a pool of processes, or on any executor that a user has."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")
Progress = Callable[[int], None]

# Bytes of files from which processes pay: a fork is there at once, others import torch first.
WORTH_A_FORK = 1 << 28
WORTH_A_POOL = 1 << 32
_CHUNK_BYTES = 1 << 24


def run_tasks(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    sizes: Sequence[int],
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> list[Result]:
    """The results of a function for each task, in order.

    Args:
        function: can be pickled, as a function of a module can.
        tasks: what it is called with, one after the other.
        sizes: the bytes that each task reads.
        executor: where to run it; here if None.
        progress: is told the bytes of each task that is done.
    """
    if executor is not None:
        return list(_submitted(function, tasks, sizes, executor, progress))
    return run_in_turn(function, tasks, sizes, progress)


@contextmanager
def forks_for(size: int) -> Iterator[Executor | None]:
    """A pool of forks of this process if there is much to read, else nothing.

    For a program that has run no operator of torch yet, and for functions that run none: threads
    of torch do not survive a fork. Where there is no safe fork it is as `pool_for`.
    """
    if not sys.platform.startswith("linux"):
        with pool_for(size) as executor:
            yield executor
        return
    if size < WORTH_A_FORK or _cores() == 1:
        yield None
        return
    with ProcessPoolExecutor(_cores(), mp_context=get_context("fork")) as pool:
        with warnings.catch_warnings():  # of threads: those of numpy's BLAS know of forks
            warnings.simplefilter("ignore", DeprecationWarning)
            pool.submit(os.getpid).result()
        yield pool


@contextmanager
def pool_for(size: int, imports: Sequence[str] = ()) -> Iterator[Executor | None]:
    """A pool of new processes if there is much to do, else nothing.

    For programs with a main guard: each process imports the main module once more, and
    the modules called `imports`.
    """
    if size < WORTH_A_POOL or _cores() == 1:
        yield None
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(
        _cores(), mp_context=context, initializer=_import_all, initargs=(tuple(imports),)
    ) as pool:
        yield pool


def _import_all(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)


def _cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_in_turn(
    function: Callable[[Task], Result],
    tasks: Iterable[Task],
    sizes: Iterable[int],
    progress: Progress | None = None,
) -> list[Result]:
    """The results of a function for each task, in order, computed here."""
    results = []
    for task, size in zip(tasks, sizes, strict=True):
        results.append(function(task))
        if progress is not None:
            progress(size)
    return results


def _submitted(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    sizes: Sequence[int],
    executor: Executor,
    progress: Progress | None,
) -> Iterator[Result]:
    chunks = list(_chunks(tasks, sizes))
    futures: list[Future[list[Any]]] = [
        executor.submit(_run_chunk, function, chunk) for chunk, _ in chunks
    ]
    for future, (_, size) in zip(futures, chunks, strict=True):
        yield from future.result()
        if progress is not None:
            progress(size)


def _run_chunk(function: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
    return [function(task) for task in tasks]


def _chunks(tasks: Sequence[Task], sizes: Sequence[int]) -> Iterator[tuple[list[Task], int]]:
    """Small tasks together, so that sending them is not what takes the time."""
    chunk: list[Task] = []
    total = 0
    for task, size in zip(tasks, sizes, strict=True):
        chunk.append(task)
        total += size
        if total >= _CHUNK_BYTES or len(chunk) >= 256:
            yield chunk, total
            chunk, total = [], 0
    if chunk:
        yield chunk, total
