"""What to dump, where to and in which form: the options under `config.debug`."""

from __future__ import annotations

import os

from torchair_scope.config.options import CallableOption, Choice, FolderPath, OptionGroup, SubGroup
from torchair_scope.store.layout import rank_and_world_size, time_stamp

_NO_GE_GRAPH = (
    "It is a form of TorchAir's GE graph, which only TorchAir on an Ascend NPU has; "
    'use "py", which has every ATen node with its source line and scope.'
)


class _Dump(OptionGroup):
    type = Choice()
    path = FolderPath()

    @property
    def enabled(self) -> bool:
        """Whether `type` is set."""
        return self.type.value is not None


class DataDump(_Dump):
    """`config.debug.data_dump`: save the tensors of the operators that run.

    Example:
        >>> from torchair_scope.config import CompilerConfig
        >>> config = CompilerConfig()
        >>> config.debug.data_dump.type = "npy"
        >>> config.debug.data_dump.filter = lambda node: node if "mm" in node.name else None

    Options:
        type: None (only scopes are dumped) or "npy" (a graph without a scope is dumped whole).
        path: the dump folder, made absolute when it is set; None is the current folder.
        filter: called with each `torch.fx.Node` that would be dumped; returns the node, or None to
            leave it out.
    """

    type = Choice("npy")
    filter = CallableOption()


class GraphDump(_Dump):
    """`config.debug.graph_dump`: write each graph that is compiled as text, to find node names in.

    Example:
        >>> from torchair_scope.config import CompilerConfig
        >>> config = CompilerConfig()
        >>> config.debug.graph_dump.type = "py"

    Options:
        type: None or "py".
        path: the folder to write to, made absolute when it is set; None is the current folder.
    """

    type = Choice("py", unavailable={"txt": _NO_GE_GRAPH, "pbtxt": _NO_GE_GRAPH})

    def full_path(self, name: str) -> str:
        """Path of the file for the graph `name`, `{name}_rank_{r}_pid_{pid}_ts_{ts}.py`.

        `ts` is the UTC time to the microsecond, so no two calls name the same file.
        """
        rank, _ = rank_and_world_size()
        file_name = f"{name}_rank_{rank}_pid_{os.getpid()}_ts_{time_stamp()}.py"
        return os.path.join(self.path or os.getcwd(), file_name)


class DebugConfig(OptionGroup):
    """`config.debug`: the groups `data_dump` and `graph_dump`."""

    data_dump = SubGroup(DataDump)
    graph_dump = SubGroup(GraphDump)
