"""What TorchAir told its C++ side, for tests to look at."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .acl_graph import TapedGraph


@dataclasses.dataclass
class GeGraphRecord:
    """One GE graph: everything that TorchAir handed to `TorchNpuGraphBase`.

    Attributes:
        name: the name that TorchAir gave the graph, `graph_1` and so on, with its own suffix.
        proto: the serialised GE `ModelDef`, as `load()` got it.
        options: the options of this graph, as `load()` got them.
        input_placements: for each input, 0 for the host and 1 for the device.
        output_dtypes: for each output, the number of its `ge::DataType`.
        executor_type: 0 for the CPU executor, 1 for the NPU executor.
        compiled, runs, auto_tunes: how often each was called.
    """

    name: str
    proto: bytes | None = None
    options: dict[str, str] = dataclasses.field(default_factory=dict)
    input_placements: list[int] = dataclasses.field(default_factory=list)
    output_dtypes: list[int] = dataclasses.field(default_factory=list)
    executor_type: int | None = None
    input_shapes: list[list[int]] = dataclasses.field(default_factory=list)
    output_shapes: list[list[int]] = dataclasses.field(default_factory=list)
    compiled: int = 0
    runs: int = 0
    auto_tunes: int = 0

    def model(self) -> Any:
        """The GE `ModelDef` that was loaded."""
        from torchair._ge_concrete_graph.ge_ir_pb2 import ModelDef

        model = ModelDef()
        model.ParseFromString(self.proto)
        return model

    def ops(self) -> list[Any]:
        """The GE operators (`OpDef`) of the graph, in order: Const, Data and NetOutput included."""
        return list(self.model().graph[0].op)

    def op_types(self) -> list[str]:
        """The types of `ops()`, such as `"Relu"`."""
        return [op.type for op in self.ops()]

    def types_with_attribute(self, name: str) -> list[str]:
        """The types of the operators that carry the attribute `name`."""
        return [op.type for op in self.ops() if name in op.attr]


@dataclasses.dataclass
class Recorder:
    """All that reached the simulated side since the last `clear()`.

    Attributes:
        ge_graphs: one record for each GE graph, in the order of `load()`.
        acl_graphs: one taped graph for each `NPUGraph`, in the order of creation.
        calls: `(name, arguments)` of each call of a module-level C++ function.
        acl_dump_configs: the paths given to `AclmdlSetDump`.
    """

    ge_graphs: list[GeGraphRecord] = dataclasses.field(default_factory=list)
    acl_graphs: list[TapedGraph] = dataclasses.field(default_factory=list)
    calls: list[tuple[str, tuple[Any, ...]]] = dataclasses.field(default_factory=list)
    acl_dump_configs: list[str] = dataclasses.field(default_factory=list)

    def clear(self) -> None:
        for records in (self.ge_graphs, self.acl_graphs, self.calls, self.acl_dump_configs):
            records.clear()

    @property
    def captures(self) -> int:
        """How many aclgraph captures began."""
        return sum(graph.captures for graph in self.acl_graphs)

    @property
    def replays(self) -> int:
        """How many aclgraph replays ran."""
        return sum(graph.replays for graph in self.acl_graphs)

    @property
    def capturing(self) -> bool:
        """Whether an aclgraph capture is going on."""
        return any(graph.capturing for graph in self.acl_graphs)


RECORDER = Recorder()
