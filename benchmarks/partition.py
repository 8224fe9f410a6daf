"""How long it takes to cut a graph: `python benchmarks/partition.py`.

Prints a table, and fails if 50,000 nodes take two seconds or more, or if a node of the largest
graph takes more than twice as long as one of the smallest.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torchair_scope.capture.partition import partition

SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
REPEATS = 3
SCOPE_LENGTH = 20
LAYER_WIDTH = 100

aten = torch.ops.aten


def chain(count: int) -> fx.Graph:
    """Each node uses the last one: every scope is a region."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(count):
        value = graph.call_function(aten.sin.default, (value,))
    graph.output((value,))
    return graph


def dynamic_chain(count: int) -> fx.Graph:
    """A chain of values with a symbolic size, as `torch.compile(dynamic=True)` gives."""
    graph = chain(count)
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment):
        value = torch.empty(environment.create_unbacked_symint(), 3)
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder("size").meta["val"] = value.shape[0]
    for node in graph.find_nodes(op="placeholder", sort=False):
        node.meta.setdefault("val", value)
    for node in graph.find_nodes(op="call_function", target=aten.sin.default, sort=False):
        node.meta["val"] = value
    return graph


def layers(count: int) -> fx.Graph:
    """Layers of nodes that each use two of the layer before."""
    graph = fx.Graph()
    layer = [graph.placeholder("x")] * LAYER_WIDTH
    for _ in range(count // LAYER_WIDTH):
        pairs = zip(layer, layer[1:] + layer[:1], strict=True)
        layer = [graph.call_function(aten.add.Tensor, pair) for pair in pairs]
    graph.output(tuple(layer))
    return graph


def random_graph(count: int) -> fx.Graph:
    """Each node uses two random ones of the last thousand; some write in place, some are random."""
    graph, draw = fx.Graph(), random.Random(0)
    values = [graph.placeholder("x")]
    targets = (
        [aten.add.Tensor] * 16 + [aten.mul.Tensor] * 2 + [aten.add_.Tensor, aten.rand_like.default]
    )
    for _ in range(count):
        target = draw.choice(targets)
        arity = 1 if target is aten.rand_like.default else 2
        values.append(graph.call_function(target, tuple(draw.choices(values[-1000:], k=arity))))
    graph.output((values[-1],))
    return graph


def views_of_one_buffer(count: int) -> fx.Graph:
    """Every tenth node writes to the one buffer that all the others read through views."""
    graph = fx.Graph()
    buffer = view = graph.placeholder("x")
    for position in range(count):
        if position % 10 == 9:
            graph.call_function(aten.add_.Tensor, (buffer, 1))
        else:
            view = graph.call_function(aten.view.default, (view, [-1]))
    graph.output((view,))
    return graph


def seconds_to_cut(graph: fx.Graph) -> tuple[float, int]:
    """The best processor time of a few runs, and the number of regions."""
    positions = {node: position for position, node in enumerate(graph.nodes)}
    best = float("inf")
    for _ in range(REPEATS):
        start = time.process_time()
        regions = partition(graph, lambda node: positions[node] // SCOPE_LENGTH % 2 == 1)
        best = min(best, time.process_time() - start)
    return best, len(regions)


def main() -> int:
    """Print the table; 1 if a promise is broken."""
    shapes: list[Callable[[int], fx.Graph]] = [
        chain,
        dynamic_chain,
        layers,
        random_graph,
        views_of_one_buffer,
    ]
    broken = []
    print(f"{'graph':<20} {'nodes':>7} {'regions':>8} {'seconds':>9} {'us per node':>12}")
    for shape in shapes:
        per_node = []
        for count in SIZES:
            seconds, regions = seconds_to_cut(shape(count))
            per_node.append(seconds / count)
            row = f"{shape.__name__:<20} {count:>7} {regions:>8} {seconds:>9.3f}"
            print(f"{row} {per_node[-1] * 1e6:>12.1f}", flush=True)
        if seconds >= 2:
            broken.append(
                f"{shape.__name__}: {SIZES[-1]} nodes took {seconds:.2f} s, not under 2 s"
            )
        if per_node[-1] > 2 * per_node[0]:
            broken.append(f"{shape.__name__}: a node takes longer in a larger graph")
    print("\n".join(broken) or "50,000 nodes in under 2 s, time linear in the number of nodes: yes")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
