"""The engine `tap`: the values that the compiled code itself has computed.

The operators of a scope stay in the compiled code. Their values become further outputs of it, are
handed to the store as the interpreter would hand them, and are let go before the caller sees them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from torchair_scope.capture.account import Outcome, account
from torchair_scope.capture.border import at_borders
from torchair_scope.capture.cut import Part
from torchair_scope.capture.hand_over import HandOver
from torchair_scope.capture.overwritten import with_copies
from torchair_scope.capture.partition import Region
from torchair_scope.capture.parts import RegionCompiler
from torchair_scope.capture.saved import Saved
from torchair_scope.capture.tap_plan import plan_taps, unpack
from torchair_scope.capture.tapped_code import TappedRegion
from torchair_scope.capture.tapped_part import TappedPart
from torchair_scope.capture.written import Written, WrittenCall


class Tap:
    """Obtains values of calls as further outputs of the compiled code that they are in."""

    cuts = False

    def __init__(self, gm: fx.GraphModule, written: Written, saved: Saved) -> None:
        self._saved = saved.calls
        tapped = (call for node, call in written.calls.items() if node.name in saved.calls)
        calls = list(at_borders(tapped, saved.calls))
        own = set(gm.graph.nodes)
        for call in calls:
            unpack(call.place)
        self._calls: dict[fx.Node, list[WrittenCall]] = {}
        for call in with_copies(gm.graph, calls):
            self._calls.setdefault(call.place, []).append(call)
        self._added = frozenset(gm.graph.nodes) - own
        kept = [saved.calls[call.node.name] for call in calls]
        self._tags = tuple({call.tag for call in kept})
        self._on_this_rank = any(call.on_this_rank for call in kept)

    def holds(self, node: fx.Node) -> bool:
        """Whether a tapped call has its first result from a node."""
        return node in self._calls

    def connected(self, regions: list[Region]) -> list[Region]:
        """The regions, with what they need of each other to hand over their calls."""
        made_in = {node: index for index, region in enumerate(regions) for node in region.nodes}
        wanted: set[fx.Node] = set()
        connected = []
        for index, region in enumerate(regions):
            plan = plan_taps(region, self._calls_in(region))
            missing = [
                node
                for node in plan.inputs
                if node not in region.inputs and made_in.get(node, -1) < index
            ]
            wanted.update(missing)
            connected.append(replace(region, inputs=(*region.inputs, *missing)))
        return [
            replace(
                region,
                outputs=tuple(
                    node for node in region.nodes if node in wanted or node in region.outputs
                ),
            )
            for region in connected
        ]

    def part(self, compiler: RegionCompiler, region: Region) -> Part:
        """Compile a region, with taps for the steps in which they are handed over."""
        calls = self._calls_in(region)
        plan = plan_taps(region, calls)
        tapped = TappedPart(
            TappedRegion(compiler, region, plan.taps, self._added),
            HandOver(plan, self._saved, compiler.gm),
            self._tags,
            lambda error: self._give_up(calls, error),
        )
        if self._on_this_rank:
            tapped.compile_with_taps()
        else:
            tapped.compile_without_taps()
        return Part(tapped.run, tapped.inputs, region.outputs, tapped.facts)

    def _calls_in(self, region: Region) -> list[WrittenCall]:
        return [call for node in region.nodes for call in self._calls.get(node, ())]

    def _give_up(self, calls: Sequence[WrittenCall], error: Exception) -> None:
        names = [call.node.name for call in calls]
        warnings.warn(
            f"the values from {names[0]} to {names[-1]} are not dumped, and what computes them is "
            f"compiled as without a scope, since {error}. Take a smaller scope, or tap='boundary', "
            "or engine='interpret'.",
            stacklevel=2,
        )
        account.note([self._saved[name].number for name in names], Outcome.NOT_TAPPED)
