"""Random graphs of 4x4 tensors, with all that is known about them by construction."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import fx

aten = torch.ops.aten


@dataclass
class RandomGraph:
    """A graph, and an account of it that was kept while it was made.

    Memory is numbered: `memory[node]` is what the node's value lies in. `pairs` are the pairs of
    nodes that must stay in order; `together` those that must stay in one region.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    tensors: list[fx.Node] = field(default_factory=list)
    memory: dict[fx.Node, int] = field(default_factory=dict)
    reads: dict[fx.Node, set[int]] = field(default_factory=dict)
    writes: dict[fx.Node, set[int]] = field(default_factory=dict)
    ordered: list[fx.Node] = field(default_factory=list)
    tagged: set[fx.Node] = field(default_factory=set)
    neutral: set[fx.Node] = field(default_factory=set)
    together: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)

    @property
    def calls(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "call_function"]

    def place(self, tensor: fx.Node, memory: int | None = None) -> fx.Node:
        """A new tensor, in memory of its own unless said otherwise."""
        self.memory[tensor] = len(self.memory) if memory is None else memory
        self.tensors.append(tensor)
        return tensor

    def call(self, target: object, *args: object) -> fx.Node:
        """A call that reads its arguments."""
        node = self.graph.call_function(target, args)
        self.reads[node] = {self.memory[used] for used in node.all_input_nodes}
        self.writes[node] = set()
        return node

    def pairs(self) -> set[tuple[fx.Node, fx.Node]]:
        """All pairs of calls (earlier, later) that must not change places."""
        calls = [node for node in self.calls if node.target is not operator.getitem]
        found = set()
        for position, later in enumerate(calls):
            for earlier in calls[:position]:
                uses = earlier in later.all_input_nodes
                effects = earlier in self.ordered and later in self.ordered
                conflict = (
                    self.writes[earlier] & (self.reads[later] | self.writes[later])
                    or self.reads[earlier] & self.writes[later]
                )
                if uses or effects or conflict:
                    found.add((earlier, later))
        found |= {
            (item, user) for _, item in self.together for user in item.users if user.op != "output"
        }
        return found

    def module(self) -> fx.GraphModule:
        return fx.GraphModule(torch.nn.Module(), self.graph)


def _unary(made: RandomGraph, draw: st.DrawFn) -> None:
    target = draw(st.sampled_from([aten.sin.default, aten.neg.default]))
    made.place(made.call(target, draw(st.sampled_from(made.tensors))))


def _binary(made: RandomGraph, draw: st.DrawFn) -> None:
    target = draw(st.sampled_from([aten.add.Tensor, aten.mul.Tensor]))
    pair = [draw(st.sampled_from(made.tensors)) for _ in range(2)]
    made.place(made.call(target, *pair))


def _view(made: RandomGraph, draw: st.DrawFn) -> None:
    target = draw(st.sampled_from([aten.t.default, aten.alias.default, aten.detach.default]))
    tensor = draw(st.sampled_from(made.tensors))
    made.place(made.call(target, tensor), made.memory[tensor])


def _split(made: RandomGraph, draw: st.DrawFn) -> None:
    tensor = draw(st.sampled_from(made.tensors))
    parts = made.call(aten.split.Tensor, tensor, 2)
    made.memory[parts] = made.memory[tensor]
    halves = []
    for index in range(2):
        half = made.call(operator.getitem, parts, index)
        made.memory[half] = made.memory[tensor]
        made.neutral.add(half)
        made.together.append((parts, half))
        halves.append(half)
    made.place(made.call(aten.cat.default, halves[::-1]))


def _in_place(made: RandomGraph, draw: st.DrawFn) -> None:
    tensor = draw(st.sampled_from(made.tensors))
    memory = made.memory[tensor]
    # An operator may not read what it overwrites through another view.
    others = [other for other in made.tensors if made.memory[other] != memory]
    other = draw(st.sampled_from([2.0, *others]))
    target = draw(st.sampled_from([aten.add_, aten.mul_]))
    node = made.call(target.Scalar if other == 2.0 else target.Tensor, tensor, other)
    made.writes[node] = {memory}
    made.ordered.append(node)
    made.place(node, memory)


def _random(made: RandomGraph, draw: st.DrawFn) -> None:
    node = made.call(aten.rand_like.default, draw(st.sampled_from(made.tensors)))
    made.ordered.append(node)
    made.place(node)


def _check(made: RandomGraph, draw: st.DrawFn) -> None:
    tensor = draw(st.sampled_from(made.tensors))
    made.neutral.add(made.call(aten._assert_tensor_metadata.default, tensor, [4, 4]))


PURE = [_unary, _binary]
ALL = [*PURE, _view, _split, _in_place, _in_place, _random, _check]


@st.composite
def random_graphs(draw: st.DrawFn, *, steps: list = ALL, max_steps: int = 12) -> RandomGraph:
    """Graphs with two inputs and up to `max_steps` steps, some nodes of them tagged."""
    made = RandomGraph()
    for name in ("x", "y"):
        made.place(made.graph.placeholder(name))
    for step in draw(st.lists(st.sampled_from(steps), min_size=1, max_size=max_steps)):
        step(made, draw)
    made.tagged = {node for node in made.calls if draw(st.booleans())}
    made.graph.output(tuple(draw(st.lists(st.sampled_from(made.tensors), min_size=1, max_size=4))))
    return made
