"""A dump as objects: runs, ranks, graphs, steps, scopes and calls. `load` gives it."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torchair_scope.analysis import damage
from torchair_scope.analysis.source import Folder
from torchair_scope.analysis.tensors import Tensor

if TYPE_CHECKING:
    import pandas

Record = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Call:
    """One execution of one node.

    Args:
        step: the step that it belongs to.
        order: its position in the step.
        node: `fx.Node.name`.
        target: the operator, as `aten.add.Tensor`.
        time: when it began, UTC, 20 digits.
        tensors: its inputs and outputs by slot, numbers that were saved among them.
        record: its line of the manifest; None if there is none.
    """

    step: Step = field(repr=False)
    order: int
    node: str
    target: str
    time: str = field(repr=False)
    tensors: dict[str, Tensor] = field(repr=False)
    record: Record | None = field(repr=False, default=None)

    def __str__(self) -> str:
        return f"{self.step} {self.node} ({self.target})"

    @property
    def graph(self) -> Graph:
        """The graph that it belongs to."""
        return self.step.graph

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The arguments by slot."""
        return {slot: tensor for slot, tensor in self.tensors.items() if tensor.is_input}

    @property
    def outputs(self) -> dict[str, Tensor]:
        """The results by slot."""
        return {slot: tensor for slot, tensor in self.tensors.items() if not tensor.is_input}

    @property
    def operator(self) -> str:
        """The operator that ran, where the target only wraps it; else the target."""
        return str((self.record or {}).get("operator", self.target))

    @property
    def scope(self) -> str | None:
        """The scope path, `outer/inner`, if it is known."""
        scope = (self.record or {}).get("scope")
        return None if scope is None else str(scope)

    @property
    def module(self) -> str | None:
        """The path of the module that it was born in, if it is known."""
        module = self._fact("module")
        return None if module is None else str(module)

    @property
    def source(self) -> Record | None:
        """The line of user code that it comes from: `file`, `line` and `code`."""
        source = self._fact("source")
        return source if isinstance(source, dict) else None

    @property
    def is_random(self) -> bool:
        """Whether it is known to draw random numbers."""
        return bool((self.record or {}).get("nondeterministic"))

    @property
    def finished(self) -> bool:
        """Whether the operator returned."""
        return not (self.record or {}).get("unfinished", False)

    def _fact(self, name: str) -> Any:
        record = self.record or {}
        # Each run of a body has a call of its own; the graph's record lists its operators once.
        listed = self.graph.nodes.get(record.get("listed_as", self.node), {})
        fact = record.get(name)
        return listed.get(name) if fact is None else fact


@dataclass(frozen=True, eq=False)
class Step:
    """One run of one graph."""

    graph: Graph = field(repr=False)
    number: int
    folder: Folder = field(repr=False)
    calls: list[Call] = field(repr=False, default_factory=list)
    record: Record | None = field(repr=False, default=None)

    def __str__(self) -> str:
        return f"{self.graph.name}/{self.number}"


@dataclass(frozen=True, eq=False)
class Graph:
    """One graph, or one place in eager code at which a scope was opened."""

    rank: Rank = field(repr=False)
    kind: str
    number: int
    record: Record = field(repr=False)
    steps: list[Step] = field(repr=False, default_factory=list)

    @property
    def name(self) -> str:
        """The name of its folder, `graph_1` or `eager_1`."""
        return f"{self.kind}_{self.number}"

    @property
    def direction(self) -> str | None:
        """`forward`, `backward` or `inference`; None if there is no record of it."""
        direction = self.record.get("direction")
        return None if direction is None else str(direction)

    @cached_property
    def nodes(self) -> dict[str, Record]:
        """What the graph's record says of its nodes, by name."""
        return {str(node.get("name")): node for node in self.record.get("nodes", ())}


@dataclass(frozen=True, eq=False)
class Rank:
    """The dump of one process."""

    folder: Folder
    number: int
    world_size: int
    run: Record = field(repr=False)
    graphs: list[Graph] = field(repr=False, default_factory=list)
    unreadable: list[str] = field(repr=False, default_factory=list)
    account: list[Record] = field(repr=False, default_factory=list)

    @property
    def calls(self) -> list[Call]:
        """All calls, step by step."""
        return [call for graph in self.graphs for step in graph.steps for call in step.calls]

    @property
    def has_manifest(self) -> bool:
        """Whether there is a manifest with at least a run record."""
        return bool(self.run)

    @cached_property
    def problems(self) -> list[str]:
        """What is cut or missing, one sentence each."""
        return [*self.unreadable, *damage.problems_of(self)]


@dataclass(frozen=True, eq=False)
class Dump:
    """A dump. `torchair_scope.load` gives it."""

    folder: Folder
    ranks: list[Rank]

    @property
    def runs(self) -> list[Record]:
        """The run record of each rank: versions, command line, host."""
        return [rank.run for rank in self.ranks]

    @property
    def graphs(self) -> list[Graph]:
        """The graphs of all ranks."""
        return [graph for rank in self.ranks for graph in rank.graphs]

    @property
    def steps(self) -> list[Step]:
        """The steps of all graphs."""
        return [step for graph in self.graphs for step in graph.steps]

    @property
    def scopes(self) -> list[str]:
        """The scope paths, sorted."""
        return sorted({call.scope for call in self.calls() if call.scope is not None})

    @property
    def problems(self) -> list[str]:
        """What is cut or missing in each rank, one sentence each."""
        return [f"{rank.folder.name}: {text}" for rank in self.ranks for text in rank.problems]

    def calls(
        self,
        *,
        scope: str | None = None,
        target: str | None = None,
        node: str | None = None,
        step: int | None = None,
        rank: int | None = None,
    ) -> list[Call]:
        """The calls that match, in order of rank, graph, step and execution.

        Args:
            scope: a scope path, which stands for the scopes inside it as well, or a pattern.
            target: the operator, as `aten.add.Tensor`, or a pattern such as `aten.mm*`.
            node: the node's name, or a pattern.
            step: which run of each graph, from 0.
            rank: which process.
        """
        return [
            call
            for call in (call for each in self.ranks for call in each.calls)
            if (scope is None or _in_scope(call.scope, scope))
            and (target is None or fnmatch.fnmatchcase(call.target, target))
            and (node is None or fnmatch.fnmatchcase(call.node, node))
            and (step is None or call.step.number == step)
            and (rank is None or call.graph.rank.number == rank)
        ]

    def tensor(self, name: str, *, step: int | None = None) -> Tensor:
        """A tensor by name: `add_1.OUTPUT.0`, or `graph_1/0/add_1.OUTPUT.0`, or its file's name.

        Args:
            name: one of these.
            step: which run of each graph, where the name does not say it.

        Raises:
            LookupError: there is none, or more than one.
        """
        found = [
            (call, tensor)
            for call in self.calls(step=step)
            for slot, tensor in call.tensors.items()
            if name in _names_of(call, slot, tensor)
        ]
        if len(found) == 1:
            return found[0][1]
        if not found:
            from torchair_scope.analysis.advice import no_such_name

            told = no_such_name(self, name)
            raise LookupError(f"{self.folder.url} has no tensor {name!r}; {told}")
        which = ", ".join(f"{call.step}/{call.node}.{tensor.slot}" for call, tensor in found[:3])
        raise LookupError(f"{name!r} is the name of {len(found)} tensors; say which: {which}, …")

    def frame(self, *, statistics: bool = True) -> pandas.DataFrame:
        """One row a tensor, as a pandas `DataFrame`; needs the extra `analysis`.

        Args:
            statistics: read every tensor for its minimum, maximum, mean and the like.
        """
        from torchair_scope.analysis.frame import frame_of

        return frame_of(self, statistics=statistics)


def _in_scope(scope: str | None, wanted: str) -> bool:
    if scope is None:
        return False
    return scope == wanted or scope.startswith(f"{wanted}/") or fnmatch.fnmatchcase(scope, wanted)


def _names_of(call: Call, slot: str, tensor: Tensor) -> Iterator[str]:
    yield f"{call.node}.{slot}"
    yield f"{call.step}/{call.node}.{slot}"
    yield f"{call.graph.rank.folder.name}/{call.step}/{call.node}.{slot}"
    if tensor.file is not None:
        name = tensor.file.url.rpartition("/")[2]
        yield name
        yield name.removesuffix(".npy")
