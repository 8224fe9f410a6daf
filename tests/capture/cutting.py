"""Cut graphs in tests: run the pieces of a graph one after the other, as a compiled model would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd

from torchair_scope.capture.extract import Piece, extract
from torchair_scope.capture.partition import Region, partition
from torchair_scope.capture.symbols import bind_symbols


def annotated(node: fx.Node) -> bool:
    """Whether a node was traced under `torch.fx.traceback.annotate({"scope": ...})`."""
    return "scope" in node.meta.get("custom", {})


class Cut:
    """A graph in pieces."""

    def __init__(self, gm: fx.GraphModule, dumped: Callable[[fx.Node], bool] = annotated) -> None:
        self.gm = gm
        self.names = [node.name for node in gm.graph.nodes]
        self.new_nodes = bind_symbols(gm.graph)
        self.regions: list[Region] = partition(gm.graph, dumped)
        self.pieces: list[Piece] = [extract(gm, region) for region in self.regions]

    @property
    def kinds(self) -> str:
        """The kinds of the regions, as "cdc" for compiled, dumped, compiled."""
        return "".join(region.kind[0] for region in self.regions)

    def node(self, name: str) -> fx.Node:
        """The node of this name in the whole graph."""
        return next(node for node in self.gm.graph.nodes if node.name == name)

    def run(self, *inputs: Any) -> Any:
        """What the graph returns, computed piece by piece."""
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        values = dict(zip(placeholders, inputs, strict=True))
        for piece in self.pieces:
            results = piece.module(*(values[node] for node in piece.inputs))
            values.update(zip(piece.outputs, results, strict=True))
        (last,) = self.gm.graph.find_nodes(op="output")
        return fx.map_arg(last.args[0], values.__getitem__)


def cutting_backend(cuts: list[Cut]) -> Callable[..., Any]:
    """A backend that runs each ATen graph in pieces, and notes how it was cut."""

    def compile_in_pieces(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        cuts.append(Cut(gm))
        return make_boxed_func(cuts[-1].run)

    return aot_autograd(fw_compiler=compile_in_pieces, bw_compiler=compile_in_pieces)


def check_invariants(cut: Cut) -> None:
    """What holds for every cut: each node in one region, nothing read before it is there."""
    calls = [node for node in cut.gm.graph.nodes if node.op.startswith("call_")]
    placed = [node for region in cut.regions for node in region.nodes]
    assert sorted(placed, key=calls.index) == calls
    available = set(cut.gm.graph.find_nodes(op="placeholder"))
    for region, piece in zip(cut.regions, cut.pieces, strict=True):
        assert region.nodes
        assert available.issuperset(piece.inputs)
        assert sorted(region.nodes, key=calls.index) == list(region.nodes)
        available.update(piece.outputs)
    (last,) = cut.gm.graph.find_nodes(op="output")
    assert available.union(cut.gm.graph.find_nodes(op="get_attr")) >= set(last.all_input_nodes)
    assert all(
        one.kind != other.kind for one, other in zip(cut.regions, cut.regions[1:], strict=False)
    )
