"""A few threads that write, and the bound on what waits for them.

Writing releases the interpreter's lock, so the model goes on meanwhile. One pool serves all dumps
of the process.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Iterable
from typing import Any, Protocol

from torchair_scope.store.sections import section

THREADS = min(4, max(2, os.cpu_count() or 2))
# To wake a thread costs as much as a small file, so it is woken for this much, each job, and each
# part of a collection, counted as so many bytes beside its own. What is less is done when it is
# waited for, or after a while.
_BYTES_TO_WAKE = 1 << 17
_BYTES_OF_A_JOB = 1 << 12
_SECONDS_QUEUED = 0.25


class Group:
    """Jobs that are waited for together."""

    def __init__(self) -> None:
        self.outstanding = 0
        self.is_cancelled = False


class Job(Protocol):
    """Something to be written.

    Attributes:
        group: what it belongs to.
        nbytes: of the memory that it holds until it is done.
        parts: of a collection, those that it has so far.
        storage: the memory that it reads, if that may be written to only once it is done.
        started: whether a thread is at it; set by the pool.
    """

    group: Group
    nbytes: int
    parts: list[Any]
    storage: int | None
    started: bool

    def run(self) -> bool:
        """Do it; no error may get out. False if it is not done yet: `Pool.done` is called later."""


def _weight(job: Job) -> int:
    return job.nbytes + _BYTES_OF_A_JOB * (len(job.parts) or 1)


class Pool:
    """Runs jobs on threads, which are started at the first one.

    A job may be a collection, which grows while nobody has time for it: threads take up the others
    first.
    """

    def __init__(self) -> None:
        self._jobs: collections.deque[Job] = collections.deque()
        self._collections: collections.deque[Job] = collections.deque()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._work = threading.Condition(self._lock)
        self._queued = 0
        self._idle = 0
        self._waiting = 0
        self._waiting_for_any = 0
        self._threads: list[threading.Thread] = []
        self._outstanding = 0
        self._in_flight = 0
        self._reading: collections.Counter[int] = collections.Counter()

    def submit(self, job: Job, limit: int) -> None:
        """Have a job run; past `limit` bytes in flight, wait until others are done."""
        self._take(job, self._jobs, limit)

    def collect(self, job: Job, limit: int) -> None:
        """Have a collection run that may still grow; else as `submit`."""
        self._take(job, self._collections, limit)

    def add(self, job: Job, part: Any, nbytes: int, most: int) -> bool:
        """Give a collection one more part, of so many bytes; False if that is too late.

        With `most` parts it is full, and taken up in its turn.
        """
        with self._lock:
            if job.started or len(job.parts) >= most:
                return False
            job.parts.append(part)
            job.nbytes += nbytes
            self._in_flight += nbytes
            self._queued += nbytes + _BYTES_OF_A_JOB
            if len(job.parts) == most:
                self._collections.remove(job)
                self._jobs.append(job)
            if self._idle and self._is_worth_it():
                self._work.notify()
            return True

    def _take(self, job: Job, queue: collections.deque[Job], limit: int) -> None:
        with self._lock:
            while self._in_flight and self._in_flight + job.nbytes > limit:
                self._wait_for_any()
            self._expect(job)
            is_first = not (self._jobs or self._collections)
            queue.append(job)
            self._queued += _weight(job)
            if len(self._threads) < THREADS:
                self._start_thread()
            elif self._idle and (is_first or self._is_worth_it()):
                self._work.notify()

    def _is_worth_it(self) -> bool:
        """Whether what is queued is more than is worth to wait for, or somebody waits for it."""
        return self._queued >= _BYTES_TO_WAKE or self._waiting > 0

    def _expect(self, job: Job) -> None:
        job.group.outstanding += 1
        self._outstanding += 1
        self._in_flight += job.nbytes
        if job.storage is not None:
            self._reading[job.storage] += 1

    def done(self, job: Job) -> None:
        """A job has nothing left to do."""
        with self._lock:
            job.group.outstanding -= 1
            self._outstanding -= 1
            self._in_flight -= job.nbytes
            if job.storage is not None:
                self._reading[job.storage] -= 1
                if not self._reading[job.storage]:
                    del self._reading[job.storage]
                job.storage = None
            if self._waiting_for_any or (self._waiting and not job.group.outstanding):
                self._changed.notify_all()

    def in_flight(self) -> int:
        """The bytes that wait to be written."""
        return self._in_flight

    def wait(self, group: Group) -> None:
        """Wait until a group is done; if that is interrupted, what has not begun is lost."""
        interrupted: BaseException | None = None
        with self._lock:
            while group.outstanding:
                try:
                    self._wait()
                except BaseException as error:
                    group.is_cancelled = True
                    interrupted = error
        if interrupted is not None:
            raise interrupted

    def wait_for_all(self) -> None:
        """Wait until nothing is in flight."""
        with self._lock:
            while self._outstanding:
                self._wait()

    def wait_for_readers(self, storages: Iterable[int]) -> None:
        """Wait until no job reads any of these storages: they are about to be written to."""
        if not self._reading:
            return
        with self._lock:
            for storage in storages:
                while storage in self._reading:
                    self._wait_for_any()

    def unless_started(self, job: Job) -> _Unstarted:
        """A block in which no thread takes up the job; yields whether none has."""
        return _Unstarted(self._lock, job)

    def _wait(self) -> None:
        """Wait until a group is done, or for nothing."""
        if self._idle and self._queued:
            self._work.notify_all()
        self._waiting += 1
        try:
            self._changed.wait()
        finally:
            self._waiting -= 1

    def _wait_for_any(self) -> None:
        """Wait until a job is done, or for nothing."""
        self._waiting_for_any += 1
        try:
            self._wait()
        finally:
            self._waiting_for_any -= 1

    def _start_thread(self) -> None:
        # Daemons: others would be waited for before the functions of atexit run.
        thread = threading.Thread(target=self._write, name="torchair_scope writer", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _write(self) -> None:
        with section:  # For good: what a finaliser would wait for here never comes.
            while True:
                job = self._next()
                if job.run():
                    self.done(job)
                del job

    def _next(self) -> Job:
        with self._lock:
            has_waited = False
            while not self._queued or not (has_waited or self._is_worth_it()):
                self._idle += 1
                has_waited = not self._work.wait(_SECONDS_QUEUED if self._queued else None)
                self._idle -= 1
            job = (self._jobs or self._collections).popleft()
            self._queued -= _weight(job)
            job.started = True
        return job


class _Unstarted:
    def __init__(self, lock: threading.RLock, job: Job) -> None:
        self._lock = lock
        self._job = job

    def __enter__(self) -> bool:
        self._lock.acquire()
        return not self._job.started

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


_pool = Pool()


def pool() -> Pool:
    """The pool of this process."""
    return _pool


def _forget() -> None:
    """A forked child has none of its parent's threads, and owes none of its files."""
    global _pool
    _pool = Pool()


os.register_at_fork(after_in_child=_forget)
