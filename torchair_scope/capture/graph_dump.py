"""Write a graph as text: what `config.debug.graph_dump.type = "py"` does."""

from __future__ import annotations

import operator
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchair_scope.capture.nodes import source_of
from torchair_scope.capture.tags import scope_of
from torchair_scope.store.layout import FILE_MODE, make_folders


def write_graph(gm: GraphModule, path: str | os.PathLike[str]) -> None:
    """Write every node of `gm` to the file `path`: source line, scope, and the node itself.

    Example:
        >>> import pathlib, torch
        >>> from torchair_scope.capture.graph_dump import write_graph
        >>> write_graph(torch.fx.symbolic_trace(lambda x: x + 1), "graph.py")
        >>> print(pathlib.Path("graph.py").read_text().strip())
        ## FX Code: x = placeholder()
        ## FX Code: add = operator.add(x, 1)
        ## FX Code: return add

    An ATen graph gives lines such as

        # File "model.py", line 12: h = x + y
        # Scope attention/rope
        ## FX Code: add_1: torch.float32[2, 2]cpu = torch.ops.aten.add.Tensor(add, arg1_1)

    Each line is a comment, so the file is valid Python. The graphs in `gm` (bodies of control flow)
    follow the main one. The file appears whole or not at all.

    Args:
        gm: an ATen graph, with fake values in `node.meta["val"]`; a node without one is written
            without its type.
        path: the file to write; its folder is made if there is none.

    Raises:
        OSError: the file cannot be written; the message names it.
    """
    _write_whole(os.path.abspath(path), "\n".join(_lines(gm)) + "\n")


def _lines(gm: GraphModule) -> Iterator[str]:
    for graph_name, module in gm.named_modules():
        if not isinstance(module, GraphModule):
            continue
        if graph_name:
            yield from ("", f"# Graph {graph_name}")
        previous_heading: list[str] = []
        for node in module.graph.nodes:
            heading = _heading(node)
            if heading != previous_heading:
                yield from ("", *heading)
            yield f"## FX Code: {_one_line(_code(node))}"
            previous_heading = heading


def _heading(node: Node) -> list[str]:
    """Source line and scope, said once for the nodes in a row that share them."""
    lines = []
    if source := source_of(node):
        lines.append(_one_line(f'# File "{source.file}", line {source.line}: {source.code}'))
    if scope := scope_of(node):
        lines.append(_one_line(f"# Scope {scope}"))
    return lines


def _one_line(text: str) -> str:
    return " ".join(part.strip() for part in text.splitlines() if part.strip())


def _code(node: Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]!r}"
    value = node.meta.get("val")
    described = node.name if value is None else f"{node.name}: {_type_of(value)}"
    if node.op == "get_attr":
        return f"{described} = self.{node.target}"
    arguments = [repr(argument) for argument in node.args]
    arguments += [f"{name}={argument!r}" for name, argument in node.kwargs.items()]
    return f"{described} = {_target_name(node)}({', '.join(arguments)})"


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(str(size) for size in value.shape)
        return f"{value.dtype}[{sizes}]{value.device}"
    if isinstance(value, (tuple, list)):
        inner = ", ".join(_type_of(item) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f'"Sym({value})"'
    return "None" if value is None else type(value).__name__


def _target_name(node: Node) -> str:
    if node.op == "placeholder":
        return "placeholder"
    if isinstance(node.target, str):
        return f"self.{node.target}"
    module = node.target.__module__ or ""
    if module.startswith("torch._ops."):
        return f"torch.ops.{node.target}"
    module = "operator" if module == operator.getitem.__module__ else module
    return f"{module}.{node.target.__name__}"


def _write_whole(path: str, text: str) -> None:
    folder = os.path.dirname(path)
    make_folders(folder)
    handle, temporary = tempfile.mkstemp(prefix=".graph_", suffix=".tmp", dir=folder)
    try:
        # A path in a stack trace can hold bytes that are not UTF-8.
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.chmod(temporary, FILE_MODE)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
