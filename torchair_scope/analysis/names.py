"""Names of TorchAir's dump files, read back; and an order in which 10 comes after 2."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

_FILE = re.compile(
    r"(?P<stem>.+?)\.(?P<slot>(?:INPUT|OUTPUT)\.\d+(?:\.\d+)*|KWARG\..+)\.(?P<time>\d{20})\.npy"
)
_STEM = re.compile(r"(?P<node>\w+)-(?P<target>.+)")
_GRAPH = re.compile(r"(?P<kind>graph|eager)_(?P<number>\d+)")


class FileName(NamedTuple):
    """What the name of a dump file tells."""

    node: str
    target: str
    slot: str
    time: str


class GraphName(NamedTuple):
    """What the name of a graph's folder tells."""

    kind: str
    number: int


def parse_file_name(name: str) -> FileName | None:
    """Read `{node}-{target}.{slot}.{time}.npy`; None for other names.

    >>> from torchair_scope.analysis.names import parse_file_name
    >>> parse_file_name("add_1-aten.add.Tensor.INPUT.1.20261201061131151679.npy")[:3]
    ('add_1', 'aten.add.Tensor', 'INPUT.1')
    """
    match = _FILE.fullmatch(name)
    stem = _STEM.fullmatch(match["stem"]) if match else None
    if match is None or stem is None:
        return None
    return FileName(stem["node"], stem["target"], match["slot"], match["time"])


def parse_graph_name(name: str) -> GraphName | None:
    """Read `graph_3` or `eager_3`; None for other names."""
    match = _GRAPH.fullmatch(name)
    return None if match is None else GraphName(match["kind"], int(match["number"]))


@lru_cache(maxsize=4096)  # the slots of many calls have few names
def natural(text: str) -> tuple[tuple[int, str], ...]:
    """A key that sorts numbers in a text as numbers.

    >>> from torchair_scope.analysis.names import natural
    >>> sorted(["INPUT.10", "INPUT.2"], key=natural)
    ['INPUT.2', 'INPUT.10']
    """
    parts = re.split(r"(\d+)", text)
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)
