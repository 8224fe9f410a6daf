"""What costs little and comes often: small values, and values that are known, many in one job."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from torchair_scope.store.arrays import Array
from torchair_scope.store.contents import Content, Contents, Value
from torchair_scope.store.native import SmallFile
from torchair_scope.store.npy import Npy
from torchair_scope.store.pool import pool
from torchair_scope.store.saving import INTERRUPTED, Slot, StepFolder

_TOGETHER = 64


class Few(Protocol):
    """A slot that is to have a file, which costs little to make.

    Attributes:
        slot: which one.
        nbytes: of the memory that it holds.
        is_settled: whether it is known what became of it.
    """

    slot: Slot
    nbytes: int
    is_settled: bool

    def look_up(self, contents: Contents) -> None:
        """Say what it is, as far as that is known."""

    def file(self, path: str, paths: dict[Content, str]) -> SmallFile | None:
        """The file to be made now; None if it has to wait.

        **Arguments:**

        - `path`: where it will be.
        - `paths`: where the contents will be that are made before it; a new one is added.
        """

    def is_made(self, path: str) -> None:
        """The file is there."""

    def make(self, folder: StepFolder) -> None:
        """Make the file alone, and say so if that fails."""

    def when_possible(self, make: Callable[[], None]) -> None:
        """Call something once the file can be made: now, or by another thread."""

    def lose(self, reason: str) -> None:
        """The file is not made."""


class SmallValue:
    """A small value.

    Attributes:
        value: what others know it as.
    """

    _npy: Npy
    _content: Content

    def __init__(self, slot: Slot, array: Array) -> None:
        self.slot = slot
        self.nbytes = array.nbytes
        self.is_settled = False
        self.value = Value()
        self._array = array
        self._is_new = False

    def look_up(self, contents: Contents) -> None:
        """Find the equal content, or list a new one."""
        self._npy = Npy(self._array)
        self._content, self._is_new = contents.find(self._npy)

    def file(self, path: str, paths: dict[Content, str]) -> SmallFile | None:
        """A new file, or a link to the one that has the same."""
        name, content = self.slot.name, self._content
        self.value.content = content
        if self._is_new:
            paths[content] = path
            return SmallFile(name, self._npy.header + self._npy.data.tobytes())
        source = paths.get(content) or content.path
        return None if source is None else SmallFile(name, source=source)

    def is_made(self, path: str) -> None:
        """Tell those who wait for it."""
        size = self._npy.size
        self.slot.has_file(size, size if self._is_new else 0, self._content)
        if self._is_new:
            self._content.is_at(path, size)
        self.value.settle(self._content)

    def make(self, folder: StepFolder) -> None:
        """Write it, or link to it."""
        if self._is_new:
            self.value.settle_as(folder.write(self.slot, self._npy, self._content))
        else:
            self.value.settle_as(folder.link(self.slot, self._content, lambda: self._npy))

    def when_possible(self, make: Callable[[], None]) -> None:
        """A new one is; for another one, somebody may be at it."""
        if self._is_new:
            make()
        else:
            self._content.when_settled(make)

    def lose(self, reason: str) -> None:
        """Nobody else is to wait for it."""
        if self._is_new:
            self._content.lose()
        if not self.value.is_settled:
            self.value.settle(None, reason)


class KnownValue:
    """A value that is known without reading it."""

    nbytes = 0

    def __init__(self, slot: Slot, value: Value) -> None:
        self.slot = slot
        self.is_settled = False
        self._value = value

    def look_up(self, contents: Contents) -> None:
        """It is known what it is."""

    def file(self, path: str, paths: dict[Content, str]) -> SmallFile | None:
        """A link, once it is on disk."""
        content = self._value.content
        source = None if content is None else paths.get(content) or content.path
        return None if source is None else SmallFile(self.slot.name, source=source)

    def is_made(self, path: str) -> None:
        """Tell the call."""
        assert self._value.content is not None  # else there would have been no file to make
        self.slot.has_file(self._value.content.size, 0, self._value.content)

    def make(self, folder: StepFolder) -> None:
        """Link to it, if it is on disk."""
        folder.link_as(self.slot, self._value)

    def when_possible(self, make: Callable[[], None]) -> None:
        """Once a writer has read it."""
        self._value.when_settled(make)

    def lose(self, reason: str) -> None:
        """It is not this job's to lose."""


class SavingFew:
    """A `Job` that is collected until a thread takes it up: each slot alone would cost too much.

    Args:
        folder: the step's.
        first: the first slot.
    """

    def __init__(self, folder: StepFolder, first: Few) -> None:
        self.group = folder.group
        self.started = False
        self.nbytes = first.nbytes
        self.parts = [first]
        self.storage: int | None = None
        self._folder = folder
        self._lock = threading.Lock()
        self._open = 1

    def takes(self, one: Few) -> bool:
        """Take one more slot, unless that is too late."""
        return pool().add(self, one, one.nbytes, _TOGETHER)

    def run(self) -> bool:
        """Make the files: those that can be made now in one go, the others each alone."""
        few, self.parts = self.parts, []
        if self.group.is_cancelled:
            for one in few:
                one.slot.is_missing(INTERRUPTED)
                one.lose(INTERRUPTED)
            return self._ends()
        try:
            for one in self._left_over(few):
                self._make_alone(one)
        except Exception as error:
            for one in few:
                self._break(one, error)
        return self._ends()

    def _break(self, one: Few, error: Exception) -> None:
        if not one.is_settled:
            one.is_settled = True
            self._folder.breaks(one.slot, error)
            one.lose(str(error))

    def _left_over(self, few: list[Few]) -> list[Few]:
        """Make files in one go; give those that are not made."""
        paths: dict[Content, str] = {}
        files: list[SmallFile] = []
        together: list[Few] = []
        left: list[Few] = []
        for one in few:
            one.look_up(self._folder.store.contents)
            file = one.file(self._folder.path_of(one.slot), paths)
            if file is None:
                left.append(one)
            else:
                files.append(file)
                together.append(one)
        errors = self._folder.make_small(files) if files else []
        if errors is None:
            return few
        for one, error in zip(together, errors, strict=True):
            if error:
                left.append(one)
            else:
                one.is_settled = True
                one.is_made(self._folder.path_of(one.slot))
        return left

    def _make_alone(self, one: Few) -> None:
        with self._lock:
            self._open += 1
        one.when_possible(lambda: self._make(one))

    def _make(self, one: Few) -> None:
        try:
            one.make(self._folder)
            one.is_settled = True
        except Exception as error:
            self._break(one, error)
        finally:
            if self._ends():
                pool().done(self)

    def _ends(self) -> bool:
        with self._lock:
            self._open -= 1
            return not self._open
