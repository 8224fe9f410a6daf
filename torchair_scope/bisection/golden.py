"""What a golden dump knows of the values of a graph that is being judged."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from torchair_scope.analysis.arguments import by_slot
from torchair_scope.analysis.dump import Call, Dump, Graph, Rank, Step
from torchair_scope.analysis.judgement import TensorResult, agreement_of
from torchair_scope.analysis.load import load
from torchair_scope.analysis.metrics import measure
from torchair_scope.analysis.numerics import COMPUTED_IN, epsilon_of
from torchair_scope.analysis.pairing import CallPair, pair_calls
from torchair_scope.analysis.signature import direction_of, signature_of
from torchair_scope.analysis.source import Folder
from torchair_scope.analysis.tensors import MissingTensorError, Tensor
from torchair_scope.analysis.verdict import same_values
from torchair_scope.capture import nodes
from torchair_scope.capture.layouts import hint
from torchair_scope.capture.symbols import value_of
from torchair_scope.capture.targets import is_unpacking
from torchair_scope.store.arrays import UnsavableTensorError, to_numpy
from torchair_scope.store.layout import rank_and_world_size

Place = tuple[Any, ...]


def checked(dump: Dump) -> Dump:
    """A dump that can be golden.

    Raises:
        ValueError: no tensor of it was saved.
    """
    tensors = (tensor for call in dump.calls() for tensor in call.tensors.values())
    if not any(_whole(tensor) is not None for tensor in tensors):
        raise ValueError(
            f"golden is {dump.folder.url}, in which no whole tensor was saved: there is nothing "
            "to compare with. Dump the golden run with files, without a sample"
        )
    return dump


@functools.lru_cache(maxsize=1)
def golden_rank(url: str) -> Rank:
    """The part of a golden dump that this process is compared with; the only one if there is one.

    If the dump has other ranks only, it is one without calls.
    """
    ranks = load(url).ranks
    number, world_size = rank_and_world_size()
    found = [rank for rank in ranks if rank.number == number] or (ranks if len(ranks) == 1 else [])
    return found[0] if found else Rank(Folder(url), number, world_size, {})


class GoldenGraph:
    """Finds golden values for the nodes of one graph.

    Args:
        rank: the golden dump of this process.
        operators: those of the graph, in program order.
        direction: of the graph.
        twin: how many graphs that look the same were compiled before: these come first.
    """

    def __init__(
        self, rank: Rank, operators: Sequence[fx.Node], direction: str, twin: int = 0
    ) -> None:
        self._rank = rank
        self._direction = "forward" if direction == "inference" else direction
        self._twin = twin
        self._calls = _as_calls(operators, direction)
        self._call_of = dict(zip(operators, self._calls, strict=True))
        self._node_of = dict(zip(map(id, self._calls), operators, strict=True))
        self._at = functools.lru_cache(maxsize=2)(self._paired_at)
        computed_in = {tensor.dtype for call in self._calls for tensor in call.tensors.values()}
        self.computed_in = max(sorted(computed_in & COMPUTED_IN), key=epsilon_of, default=None)

    def knows(self, node: fx.Node, step: int) -> bool:
        """Whether there is a golden value for what a node computes."""
        return self._computed(node, self._at(step)) is not None

    def tensor(self, node: fx.Node, value: torch.Tensor, step: int) -> Tensor | None:
        """The golden tensor for the value of a node; None if the dump does not have it."""
        paired = self._at(step)
        found = self._computed(node, paired) or self._read(node, paired)
        if found is None and node.op == "placeholder":
            found = self._alike(node, value, paired)
        return found if found is not None and found.shape == tuple(value.shape) else None

    def compared(self, golden: Tensor, value: torch.Tensor, slot: str) -> TensorResult:
        """Compare a value with the golden one."""
        dtypes = golden.dtype, str(value.dtype).removeprefix("torch.")
        try:
            arrays = golden.numpy(), to_numpy(value.detach())
        except (MissingTensorError, UnsavableTensorError) as error:
            return TensorResult(slot, "unknown", None, dtypes, str(error))
        metrics = measure(*arrays, *dtypes, computed_in=self.computed_in)
        return TensorResult(slot, agreement_of(metrics), metrics, dtypes)

    def _computed(self, node: fx.Node, paired: _Paired) -> Tensor | None:
        producer, slot = _slot_of(node)
        pair = paired.sure(producer)
        return _whole(pair.golden.outputs.get(slot)) if pair else None

    def _read(self, node: fx.Node, paired: _Paired) -> Tensor | None:
        """The same as an input of the first operator that reads it: no later one may see it so."""
        user = next((user for user in node.users if user in self._call_of), None)
        if user is None or paired.sure(user) is None:
            return None
        return next((tensor for given, tensor in paired.inputs_of(user) if given is node), None)

    def _alike(self, node: fx.Node, value: torch.Tensor, paired: _Paired) -> Tensor | None:
        """An input of a golden operator on the line that reads this one.

        Where operators are taken apart none has the same inputs as a golden one. The values tell
        which is which; where they do not, only one without another of its shape is taken.
        """
        users = (user for user in node.users if user in self._call_of)
        lines = {_place(signature_of(self._call_of[user])) for user in users}
        found: dict[Any, Tensor] = {}
        for tensor in (tensor for line in lines for tensor in paired.inputs_at(line)):
            if tensor.shape == tuple(value.shape):
                found.setdefault(tensor.identity or id(tensor), tensor)
        for tensor in found.values():
            if self.compared(tensor, value, node.name).agrees:
                return tensor
        return next(iter(found.values())) if len(found) == 1 else None

    def _paired_at(self, step: int) -> _Paired:
        left = list(self._golden_calls(step))
        pairs: list[CallPair] = []
        for _ in range(self._twin + 1):
            pairs = [pair for pair in pair_calls(left, self._calls).pairs if _is_sure(pair)]
            taken = {id(pair.golden) for pair in pairs}
            golden, left = left, [call for call in left if id(call) not in taken]
        return _Paired({self._node_of[id(pair.target)]: pair for pair in pairs}, golden)

    def _golden_calls(self, step: int) -> Iterator[Call]:
        for graph in self._rank.graphs:
            for each, run in _runs_of(graph):
                if run == step:
                    for call in each.calls:
                        if direction_of(call) in (self._direction, None):
                            yield call


class _Paired:
    """The golden calls of one step, by the nodes that they are."""

    def __init__(self, by_node: dict[fx.Node, CallPair], golden: Iterable[Call]) -> None:
        self._by_node = by_node
        self._is_sure: dict[fx.Node, bool] = {}
        self._inputs: dict[Place, list[Tensor]] = defaultdict(list)
        for call in golden:
            whole = filter(None, map(_whole, call.inputs.values()))
            self._inputs[_place(signature_of(call))] += whole

    def inputs_at(self, place: Place) -> list[Tensor]:
        """What the golden operators of a line were given."""
        return self._inputs.get(place, [])

    def sure(self, node: fx.Node) -> CallPair | None:
        """The pair of an operator, if golden values flow through it as the graph says.

        Equal operators on one line may have been taken crosswise.
        """
        pair = self._by_node.get(node)
        if pair is None:
            return None
        if node not in self._is_sure:
            self._is_sure[node] = self._flows_in(node) and self._flows_on(node)
        return pair if self._is_sure[node] else None

    def inputs_of(self, node: fx.Node) -> Iterator[tuple[fx.Node, Tensor]]:
        """The nodes that an operator reads, with their golden values there."""
        pair = self._by_node.get(node)
        if pair is None or pair.rule == "shape":  # another operator, with other inputs
            return
        for slot, given in _inputs_of(node):
            tensor = _whole(pair.golden.inputs.get(slot))
            if tensor is not None:
                yield given, tensor

    def _flows_in(self, node: fx.Node) -> bool:
        return all(self._is_output(given, tensor) for given, tensor in self.inputs_of(node))

    def _flows_on(self, node: fx.Node) -> bool:
        values = [node, *filter(is_unpacking, node.users)]
        return all(
            self._is_output(value, tensor)
            for value in values
            for user in value.users
            for given, tensor in self.inputs_of(user)
            if given is value
        )

    def _is_output(self, node: fx.Node, tensor: Tensor) -> bool:
        """Whether a tensor is what a node has computed, or may be since that is not known."""
        producer, slot = _slot_of(node)
        pair = self._by_node.get(producer)
        output = _whole(pair.golden.outputs.get(slot)) if pair else None
        return output is None or same_values(output, tensor)


def _runs_of(graph: Graph) -> Iterator[tuple[Step, int]]:
    """The steps of a golden graph, and which run of its code each one is.

    One place in eager code may be entered for each layer of a model: then it has a step for each.
    """
    modules = [step.calls[0].module if step.calls else None for step in graph.steps]
    if graph.kind == "graph" or len(set(modules)) == 1:
        yield from ((step, step.number) for step in graph.steps)
        return
    seen: dict[str | None, int] = defaultdict(int)
    for step, module in zip(graph.steps, modules, strict=True):
        yield step, seen[module]
        seen[module] += 1


def _as_calls(operators: Sequence[fx.Node], direction: str) -> list[Call]:
    """The operators of a graph as calls of a dump in which nothing was saved."""
    rank = Rank(Folder("."), 0, 1, {})
    step = Step(Graph(rank, "graph", 0, {"direction": direction}), 0, rank.folder)
    for position, node in enumerate(operators):
        source = nodes.source_of(node)
        record = {
            "operator": nodes.operator_name(node),
            "module": nodes.module_of(node),
            "source": source._asdict() if source else None,
        }
        names = node.name, nodes.target_name(node)
        tensors = {
            slot: Tensor(slot, None, description=_described(value))
            for slot, value in by_slot(value_of(node)).items()
        }
        step.calls.append(Call(step, position, *names, "", tensors, record))
    return step.calls


def _described(value: torch.Tensor) -> dict[str, Any]:
    return {"dtype": str(value.dtype), "shape": tuple(hint(size) for size in value.shape)}


def _is_sure(pair: CallPair) -> bool:
    """Whether a pair is one beyond doubt: more is at stake than a row in a table."""
    golden, target = signature_of(pair.golden), signature_of(pair.target)
    if golden.shapes[:1] != target.shapes[:1]:
        return False
    if golden.source is None or target.source is None:
        return pair.rule == "name"
    modules = golden.module, target.module
    return golden.source == target.source and (None in modules or modules[0] == modules[1])


def _place(signature: Any) -> Place:
    return signature.module, signature.source


def _whole(tensor: Tensor | None) -> Tensor | None:
    """A tensor of which all values were saved; None for others."""
    is_whole = tensor is not None and tensor.file is not None and tensor.sample is None
    return tensor if is_whole else None


def _slot_of(node: fx.Node) -> tuple[fx.Node, str]:
    """The operator that computes a value, and the slot of it."""
    path: list[str] = []
    while is_unpacking(node):
        node, index = node.args[0], node.args[1]  # type: ignore[assignment]
        path.insert(0, str(index))
    return node, ".".join(["OUTPUT", *(path or ["0"])])


def _inputs_of(node: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    """The nodes that an operator reads, with their slots."""

    def visit(value: Any, slot: str) -> Iterator[tuple[str, fx.Node]]:
        if isinstance(value, fx.Node):
            yield slot, value
        elif isinstance(value, list | tuple):
            for position, member in enumerate(value):
                yield from visit(member, f"{slot}.{position}")

    for position, value in enumerate(node.args):
        yield from visit(value, f"INPUT.{position}")
    for name, value in node.kwargs.items():
        yield from visit(value, f"KWARG.{name}")
