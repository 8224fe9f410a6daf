"""The values that a dump has on disk, so that each is written once.

A value that is there already, with the same bytes, dtype and shape, is a hard link to its file.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torchair_scope.store import npy
from torchair_scope.store.identity import checksum
from torchair_scope.store.npy import Folder, Npy

# Up to here a secure hash costs less than to make a file; beyond, it costs more than a comparison
# with the file that a checksum points to.
SMALL = 4096
_MOST = 1 << 15


_settling = threading.Lock()  # one for all: it is held for a few lines, and these are many


class Awaited:
    """Something that others wait for, without holding up a thread.

    Attributes:
        is_settled: whether there is nothing to wait for any more.
    """

    def __init__(self) -> None:
        self.is_settled = False
        self._waiting: list[Callable[[], None]] = []

    def _settle(self) -> None:
        with _settling:
            self.is_settled = True
            waiting, self._waiting = self._waiting, []
        for settled in waiting:
            settled()

    def when_settled(self, settled: Callable[[], None]) -> None:
        """Call something once this is settled: now, or by the thread that settles it."""
        with _settling:
            if not self.is_settled:
                self._waiting.append(settled)
                return
        settled()


class Content(Awaited):
    """Bytes on disk, or on their way there.

    Attributes:
        number: that call records have for it.
        checksum: of the bytes; None for a few, which a secure hash has told apart.
        path: a file that has them; None before it is settled, and if it could not be written.
        size: of the file.
    """

    def __init__(self, number: int, checksum: int | None = None) -> None:
        super().__init__()
        self.number = number
        self.size = 0
        self.checksum = checksum
        self.path: str | None = None
        self.is_lost = False

    def is_at(self, path: str, size: int) -> None:
        """It has been written."""
        self.size, self.path = size, path  # Who sees the path uses the size.
        self._settle()

    def lose(self) -> None:
        """It could not be written, or its file is gone."""
        self.path = None
        self.is_lost = True
        self._settle()

    def is_same(self, value: Npy) -> bool:
        """Whether a value that has been found to be this one truly is."""
        return self.path is not None and (self.checksum is None or npy.holds(self.path, value))


class Value(Awaited):
    """A value that has been handed over; its content is known once a writer has read it.

    Attributes:
        checksum: of its bytes, once they are read and if they are many.
        content: what it is; None if it is not on disk, and before it is read. Whether that is there
            is known when it is settled.
        reason: why it is not on disk.
    """

    def __init__(self, checksum: int | None = None) -> None:
        super().__init__()
        self.checksum = checksum
        self.content: Content | None = None
        self.reason: str | None = None
        self._is_there_in: object = None

    def settle(self, content: Content | None, reason: str | None = None) -> None:
        """Say what it is, or why it is not on disk."""
        self.content, self.reason = content, reason
        self._settle()

    def settle_as(self, result: Content | str) -> None:
        """As `settle`: it is this content, or it is not on disk for this reason."""
        if isinstance(result, str):
            self.settle(None, result)
        else:
            self.settle(result)

    def is_lost(self) -> bool:
        """Whether it is known that there is no file."""
        return self.is_settled and (self.content is None or self.content.path is None)

    def may_be_linked_to(self, step: object) -> bool:
        """Whether there is a file, or will be one; looked up once in a step."""
        if self.is_settled and self._is_there_in is not step:
            path = self.content.path if self.content is not None else None
            if path is None or not os.path.exists(path):
                return False
            self._is_there_in = step
        return True


class Contents:
    """What is on disk in one rank folder; its memory is bounded, the oldest are forgotten."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[Any, Content] = OrderedDict()
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def find(self, value: Npy) -> tuple[Content, bool]:
        """The content that a value most likely is, and whether it is new: then write it.

        One that is not new is certain for small values; else the file is to be compared.
        """
        total = None if len(value.data) <= SMALL else checksum(value.data)
        digest = (
            hashlib.blake2b(value.data.data, digest_size=20).digest() if total is None else total
        )
        key = value.descr, value.shape, digest
        with self._lock:
            content = self._by_key.get(key)
            if content is not None and not content.is_lost:
                self._by_key.move_to_end(key)
                return content, False
            content = self._by_key[key] = Content(next(self._numbers), total)
            if len(self._by_key) > _MOST:
                self._by_key.popitem(last=False)
            return content, True

    def unlisted(self) -> Content:
        """A content that only those who hold it link to."""
        with self._lock:
            return Content(next(self._numbers))


class Links:
    """Gives values further names: by hard links, or by copies where there can be none.

    Attributes:
        remark: what the user should know of it; None if all is well.
        can_link: whether the file system has links, as far as is known.
    """

    def __init__(self) -> None:
        self.remark: str | None = None
        self.can_link = True
        self._lock = threading.Lock()

    def make(self, content: Content, folder: Folder, name: str) -> int:
        """Put a content under a further name; give the bytes that were written for it.

        **Raises:** `OSError`; `FileNotFoundError` if its file has been removed.
        """
        source = content.path
        if source is None:
            raise FileNotFoundError(errno.ENOENT, "the file to link to is gone", name)
        if self.can_link:
            try:
                npy.link(source, folder, name)
                return 0
            except OSError as error:
                if not self._has_refused(error):
                    raise
        if self.can_link:
            return self._another(content, source, folder, name)
        return npy.copy_npy(source, folder, name)

    def _another(self, content: Content, source: str, folder: Folder, name: str) -> int:
        """Write a value once more, in a file that takes further links; others wait for that one."""
        with self._lock:
            if content.path == source:
                written = npy.copy_npy(source, folder, name)
                content.path = f"{folder.path}/{name}"
                return written
        return self.make(content, folder, name)

    def _has_refused(self, error: OSError) -> bool:
        """Whether the file system does not make this link, or none."""
        if error.errno == errno.EMLINK:
            self.remark = self.remark or (
                "values that have as many hard links as the file system allows are written anew"
            )
            return True
        if npy.has_no_links(error):
            self.can_link = False
            self.remark = (
                "the file system has no hard links, so equal values are written again and again "
                f"({error.strerror})"
            )
            return True
        return False


def _forget() -> None:
    """A forked child's copy of the lock may be held by no one."""
    global _settling
    _settling = threading.Lock()


os.register_at_fork(after_in_child=_forget)
