"""Engines: the ways to obtain the values of a graph's calls. A further one is a class like these.

`interpret` takes its operators out of the compiled code and runs them one by one; `tap` leaves
them in it, and has the compiled code return their values. One graph may have both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

import torch

from torchair_scope.capture.bodies import tags_in_bodies
from torchair_scope.capture.cut import Part
from torchair_scope.capture.partition import Region
from torchair_scope.capture.parts import RegionCompiler, dumped
from torchair_scope.capture.saved import Saved
from torchair_scope.capture.tap import Tap
from torchair_scope.capture.targets import handles_tokens
from torchair_scope.capture.written import Written
from torchair_scope.options import EngineName


class Engine(Protocol):
    """Obtains the values of some calls of one graph.

    It is made of the graph's module, whose graph it may add nodes to that change no value, of that
    graph as it was written, and of what is saved by it.
    """

    @property
    def cuts(self) -> bool:
        """Whether its operators are taken out of the compiled code."""

    def holds(self, node: torch.fx.Node) -> bool:
        """Whether a node is one of its operators."""

    def connected(self, regions: list[Region]) -> list[Region]:
        """The regions with those inputs and outputs that this engine needs besides."""

    def part(self, compiler: RegionCompiler, region: Region) -> Part:
        """Make the part of a region that has operators of this engine."""


class Interpret:
    """Runs its operators one by one, in regions of their own."""

    cuts = True

    def __init__(self, gm: torch.fx.GraphModule, written: Written, saved: Saved) -> None:
        self._gm = gm
        self._saved = saved

    def holds(self, node: torch.fx.Node) -> bool:
        """Whether a node is saved, or may be compiled no more in a graph that is cut.

        Bodies in a scope are kept whole, for no compiler to see, and effect tokens are no values
        that a compiled part of a graph could return.
        """
        has_tags = next(tags_in_bodies(node), None) is not None
        return self._saved.holds(node) or has_tags or handles_tokens(node)

    def connected(self, regions: list[Region]) -> list[Region]:
        """The regions as they are: the interpreter sees every value."""
        return regions

    def part(self, compiler: RegionCompiler, region: Region) -> Part:
        """Leave a region to the interpreter."""
        return dumped(self._gm, region, self._saved)


_ENGINES: Mapping[EngineName, Callable[[torch.fx.GraphModule, Written, Saved], Engine]] = {
    "interpret": Interpret,
    "tap": Tap,
}


def engines_of(gm: torch.fx.GraphModule, written: Written, saved: Saved) -> list[Engine]:
    """The engines for a graph, each with the calls of which it obtains the values."""
    saved = _tokens_interpreted(gm, saved)
    shares = {name: saved.by(name) for name in _ENGINES}
    return [
        make(gm, written, shares[name])
        for name, make in _ENGINES.items()
        if any(map(shares[name].holds, written.graph.nodes))
    ]


def part_of(region: Region, engines: list[Engine], compiler: RegionCompiler) -> Part:
    """Make the part of a region: by the engine whose operators it has, else it is compiled."""
    for engine in engines:
        if engine.cuts == (region.kind == "dumped") and any(map(engine.holds, region.nodes)):
            return engine.part(compiler, region)
    return compiler.part(region)


def _tokens_interpreted(gm: torch.fx.GraphModule, saved: Saved) -> Saved:
    """In a graph that is cut, operators with effect tokens are the interpreter's in any case."""
    if not any(map(saved.by("interpret").holds, gm.graph.nodes)):
        return saved
    orders = {node.name for node in gm.graph.nodes if handles_tokens(node)}
    return replace(
        saved,
        calls={
            name: replace(call, engine="interpret") if name in orders else call
            for name, call in saved.calls.items()
        },
    )
