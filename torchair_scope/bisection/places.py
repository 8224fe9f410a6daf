"""Where in a model an error is looked for: by module, by line of the source, by node."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from torch import fx

from torchair_scope.capture import nodes
from torchair_scope.numbers import Numbers, numbers

Patterns = str | Iterable[str]
_SOURCE = re.compile(r"(?P<file>.+?)(?::(?P<lines>[^:/\\]*))?")
_RANGE = re.compile(r"(?P<first>\w+)(?:\.\.(?P<last>\w+))?")


@dataclass(frozen=True)
class Places:
    """Some operators of a program's graphs; all of them where nothing is given.

    An operator is meant if it fits one of each kind that is given.

    Args:
        modules: paths, which stand for the modules inside as well, or patterns: `layers.3*`.
        sources: files with lines, as `model.py:40-60`, `model.py:40|52` or `model.py`. An operator
            comes from a line if that is anywhere in its stack.
        nodes: names, as `mul_3`, or all from one node to another of its graph: `add_1..mul_3`.
    """

    modules: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()

    @classmethod
    def of(cls, module: Patterns = (), source: Patterns = (), nodes: Patterns = ()) -> Places:
        """The places that a user names.

        Raises:
            ValueError: one of them is no module, line or node; the text says what can be one.
        """
        places = cls(_several(module), _several(source), _several(nodes))
        if "" in places.modules:
            raise ValueError("module is empty; it can be a path or a pattern such as 'layers.3*'")
        for text in places.sources:
            _Lines.of(text)
        for text in places.nodes:
            _ends(text)
        return places

    @classmethod
    def of_json(cls, told: Mapping[str, Sequence[str]]) -> Places:
        """The same again from JSON."""
        return cls(**{kind: tuple(given) for kind, given in told.items()})

    def __bool__(self) -> bool:
        return bool(self.modules or self.sources or self.nodes)

    def __str__(self) -> str:
        kinds = {"module": self.modules, "source": self.sources, "nodes": self.nodes}
        told = (f"{kind} {' or '.join(given)}" for kind, given in kinds.items() if given)
        return " and ".join(told)

    def ranges(self, operators: Sequence[fx.Node]) -> list[tuple[int, int]]:
        """Where the operators that are meant begin and end, as positions among all of a graph."""
        meant = [True] * len(operators)
        if self.modules:
            found = (_fits(nodes.module_of(node), self.modules) for node in operators)
            meant = _both(meant, _with_gaps(list(found)))
        if self.sources:
            wanted = [_Lines.of(text) for text in self.sources]
            comes = (_comes_from(nodes.stack_of(node), wanted) for node in operators)
            meant = _both(meant, _with_gaps(list(comes)))
        if self.nodes:
            meant = _both(meant, _named(operators, self.nodes))
        return _runs(meant)


def _several(given: Patterns) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _fits(module: str | None, wanted: Sequence[str]) -> bool | None:
    """Whether a module is one of those; None if it is not known."""
    if module is None:
        return None
    return any(
        module == one or module.startswith(f"{one}.") or fnmatch.fnmatchcase(module, one)
        for one in wanted
    )


@dataclass(frozen=True)
class _Lines:
    """Lines of a file, or all of it."""

    file: tuple[str, ...]
    lines: Numbers | None

    @classmethod
    def of(cls, text: str) -> _Lines:
        match = _SOURCE.fullmatch(text)
        if match is None:
            raise ValueError("source is empty; it can be a file with lines: 'model.py:40-60'")
        if match["lines"] is None:
            return cls(PurePath(match["file"]).parts, None)
        try:
            lines = numbers(match["lines"], option="source")
        except ValueError:
            lines = Numbers(())
        if not lines.parts or 0 in lines:
            raise ValueError(
                f"source is {text!r}; it can be a file with lines, counted from 1: "
                "'model.py:40-60', 'model.py:40|52', or 'model.py'"
            )
        return cls(PurePath(match["file"]).parts, lines)

    def have(self, line: nodes.Source) -> bool:
        """Whether a line is one of them; the file's path may be given from any folder on."""
        same = PurePath(line.file).parts[-len(self.file) :] == self.file
        return same and (self.lines is None or line.line in self.lines)


def _comes_from(stack: Sequence[nodes.Source], wanted: Sequence[_Lines]) -> bool | None:
    if not stack:
        return None
    return any(lines.have(line) for lines in wanted for line in stack)


def _ends(text: str) -> tuple[str, str]:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"nodes is {text!r}; it can be the name of a node, 'mul_3', or two: 'add_1..mul_3'"
        )
    return match["first"], match["last"] or match["first"]


def _named(operators: Sequence[fx.Node], wanted: Sequence[str]) -> list[bool]:
    positions = {node.name: position for position, node in enumerate(operators)}
    meant = [False] * len(operators)
    for first, last in map(_ends, wanted):
        if first in positions and last in positions:
            for position in range(positions[first], positions[last] + 1):
                meant[position] = True
    return meant


def _both(one: Sequence[bool], other: Sequence[bool]) -> list[bool]:
    return [a and b for a, b in zip(one, other, strict=True)]


def _with_gaps(meant: list[bool | None]) -> list[bool]:
    """What is not known of an operator between two that are meant is that it is meant, too.

    Gradients that are added up belong to no module, and nor do casts of some compilers.
    """
    known = [position for position, each in enumerate(meant) if each is not None]
    filled = [bool(each) for each in meant]
    for before, after in itertools.pairwise(known):
        if meant[before] and meant[after]:
            filled[before:after] = [True] * (after - before)
    return filled


def _runs(meant: Sequence[bool]) -> list[tuple[int, int]]:
    found, position = [], 0
    for is_meant, group in itertools.groupby(meant):
        length = sum(1 for _ in group)
        if is_meant:
            found.append((position, position + length))
        position += length
    return found


def told_of(operators: Sequence[fx.Node]) -> dict[str, Any]:
    """What places there are in a graph, for who has named one that is nowhere."""
    modules = dict.fromkeys(nodes.module_of(node) for node in operators)
    lines: dict[str, list[int]] = {}
    for node in operators:
        for source in nodes.stack_of(node):
            lines.setdefault(source.file, []).append(source.line)
    return {
        "modules": [module for module in modules if module],
        "sources": [f"{file}:{min(found)}-{max(found)}" for file, found in lines.items()],
        "nodes": [node.name for node in operators],
    }
