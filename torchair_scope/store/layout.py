"""Names of folders and files, exactly as TorchAir's FX dump has them.

`{path}/worldsize{W}_global_rank{R}/graph_{G}/{step}/{node}-{target}.{slot}.{stamp}.npy`
"""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import os
import re
import threading
import time
from typing import Literal

import torch.distributed

MANIFEST = "manifest.jsonl"
FILE_MODE = 0o640
FOLDER_MODE = 0o750

# "eager" is for operators that no compiler has made a graph of.
GraphKind = Literal["graph", "eager"]

_LONGEST_NAME = 255  # bytes, of every common file system
_ENDING = len(".") + 20 + len(".npy")
_ROOM_FOR_SLOT = len(".OUTPUT.999.999")
_RANK_FOLDER = re.compile(r"worldsize(\d+)_global_rank(\d+)")
_FORBIDDEN = re.compile(r"[^A-Za-z0-9_.-]")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def rank_and_world_size() -> tuple[int, int]:
    """Say which process of how many this one is.

    torch.distributed answers when it is initialised with more than one process, else the
    environment's `RANK` and `WORLD_SIZE` when both are set, else it is `(0, 1)`.

    **Raises:** `ValueError` if `RANK` and `WORLD_SIZE` are set to something that is no rank.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        world_size = distributed.get_world_size()
        return (distributed.get_rank(), world_size) if world_size > 1 else (0, 1)
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or world is None:
        return 0, 1
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        raise ValueError(
            f"RANK={rank!r} and WORLD_SIZE={world!r} in the environment: expected whole numbers "
            "with 0 <= RANK < WORLD_SIZE; correct them, or unset one of them"
        )
    return int(rank), int(world)


def rank_folder_name(rank: int, world_size: int) -> str:
    """Name the folder of one process, `worldsize8_global_rank3`."""
    return f"worldsize{world_size}_global_rank{rank}"


def parse_rank_folder_name(name: str) -> tuple[int, int] | None:
    """Give `(rank, world_size)` of a rank folder; None for folders moved aside and all others."""
    match = _RANK_FOLDER.fullmatch(name)
    return None if match is None else (int(match[2]), int(match[1]))


def step_folder_name(graph: int, step: int, kind: GraphKind = "graph") -> str:
    """Name the folder of one step inside the rank folder, `graph_1/0`."""
    return f"{kind}_{graph}/{step}"


@functools.lru_cache(maxsize=4096)
def call_stem(node: str, target: str) -> str:
    """Name the files of one call up to the slot, `add_1-aten.add.Tensor`.

    Inputs and outputs share the stem, and so do two runs of one graph: memory addresses are left
    out. It leaves room for the slots that occur; a longer one is shortened by `file_name`.
    """
    longest = _LONGEST_NAME - _ENDING - _ROOM_FOR_SLOT
    return _safe(f"{node}-{_ADDRESS.sub('', target)}", longest)


@functools.lru_cache(maxsize=4096)
def slot_name(kind: str, *indices: int | str) -> str:
    """Say which value of a call a file holds.

        >>> from torchair_scope.store.layout import slot_name
        >>> slot_name("INPUT", 1, 0)  # member 0 of positional argument 1
        'INPUT.1.0'
        >>> slot_name("KWARG", "weight")
        'KWARG.weight'

    The kinds are INPUT, KWARG and OUTPUT.
    """
    return ".".join([kind, *map(str, indices)])


def file_name(stem: str, slot: str, stamp: str) -> str:
    """Name one `.npy` file; at most 255 bytes, characters `[A-Za-z0-9_.-]` only."""
    room = _LONGEST_NAME - _ENDING - len(stem) - len(".")
    return f"{stem}.{_safe_slot(slot, room)}.{stamp}.npy"


@functools.lru_cache(maxsize=4096)
def _safe_slot(slot: str, longest: int) -> str:
    if _FORBIDDEN.search(slot):  # two keywords may differ in forbidden characters only
        slot = f"{slot}-{_digest(slot)}"
    return _safe(slot, longest)


def _safe(text: str, longest: int) -> str:
    """Replace forbidden characters; past `longest` characters, the end gives way to a hash."""
    safe = _FORBIDDEN.sub("_", text)
    if len(safe) <= longest:
        return safe
    digest = _digest(text)
    return f"{safe[: longest - len(digest) - 1]}-{digest}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=6).hexdigest()


@functools.lru_cache(maxsize=4)
def _digits_of_second(second: int) -> str:
    return time.strftime("%Y%m%d%H%M%S", time.gmtime(second))


_stamp_lock = threading.Lock()
_last_stamp = 0  # microseconds since 1970


def time_stamp() -> str:
    """Give the time in UTC as 20 digits, to the microsecond; never the same twice in a process."""
    global _last_stamp
    with _stamp_lock:
        _last_stamp = max(time.time_ns() // 1000, _last_stamp + 1)
        second, microsecond = divmod(_last_stamp, 1_000_000)
    return f"{_digits_of_second(second)}{microsecond:06}"


def free_name(path: str) -> str:
    """Give `path`, or `path.1`, `path.2`, … : the first that does not exist."""
    candidates = itertools.chain([path], (f"{path}.{number}" for number in itertools.count(1)))
    return next(candidate for candidate in candidates if not os.path.lexists(candidate))


def make_folders(path: str) -> None:
    """Make a folder and its missing parents, each with mode 0750 at most.

    **Raises:** `OSError`, `NotADirectoryError` among them if a part of `path` is a file.
    """
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    if parent != path:
        make_folders(parent)
    try:
        os.mkdir(path, FOLDER_MODE)
    except FileExistsError:
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, "is a file, not a folder", path) from None


def _forget() -> None:
    """A forked child's copy of the lock may be held by no one."""
    global _stamp_lock
    _stamp_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)
