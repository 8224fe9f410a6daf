"""Values of nodes and the symbols in them: which sizes a part of a graph has to be told.

A compiler that gets a part of a dynamic graph must find each symbol that occurs in a size, a stride
or a number of that part among the part's inputs. Here a symbol is traced to the node that *binds*
it: the first node whose value is exactly that symbol. Symbols go by their names, `s0` or `u1`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_SHAPE_QUERIES = (
    "aten::sym_size",
    "aten::sym_stride",
    "aten::sym_numel",
    "aten::sym_storage_offset",
)


def value_of(node: fx.Node) -> Any:
    """What tracing saw as the node's value: a fake tensor, a SymInt, a tuple; None if unknown."""
    value = node.meta.get("val")
    return node.meta.get("example_value") if value is None else value


def is_symbolic(node: fx.Node) -> bool:
    """Whether the node is arithmetic on sizes: a number that no tensor's data went into."""
    if node.op != "call_function":
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target._schema.name in _SHAPE_QUERIES:
        return True
    if not isinstance(value_of(node), (*_SYMBOLIC, int, float)):
        return False
    return not any(isinstance(value_of(used), torch.Tensor) for used in node.all_input_nodes)


def symbols_of(node: fx.Node) -> list[str]:
    """The symbols in the node's value: in its number, or in any size, stride or storage offset."""
    found: dict[str, None] = {}
    for number in _symbolic_numbers(value_of(node)):
        found.update(dict.fromkeys(sorted(symbol.name for symbol in free_symbols(number))))
    return list(found)


def symbol_bound_by(node: fx.Node) -> str | None:
    """The symbol that the node's value is, or None if the value is anything else, `2*s0` say."""
    return symbol_of(value_of(node))


def binders(graph: fx.Graph) -> dict[str, fx.Node]:
    """For each symbol the first node, in program order, whose value is exactly that symbol."""
    found: dict[str, fx.Node] = {}
    for node in graph.nodes:
        symbol = symbol_bound_by(node)
        if symbol is not None:
            found.setdefault(symbol, node)
    return found


def bind_symbols(graph: fx.Graph) -> list[fx.Node]:
    """Give each symbol that first occurs as the size of a tensor a node that binds it.

        bind_symbols(gm.graph)
        regions = partition(gm.graph, dumped)

    Such symbols come from operators like `nonzero`, whose output size is only known when they have
    run. An `aten.sym_size.int(node, dim)` node is put right after the operator (after the last
    placeholder, for a placeholder), unless a node reads that size already. Names of nodes do not
    change.

    Returns:
        The new nodes.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    bound = {symbol_bound_by(node) for node in placeholders}
    new_nodes = []
    for node in list(graph.nodes):
        bound.add(symbol_bound_by(node))
        for dim, symbol in _symbolic_sizes(node):
            if symbol in bound:
                continue
            bound.add(symbol)
            if all(symbol_bound_by(user) != symbol for user in node.users):
                place = placeholders[-1] if node.op == "placeholder" else node
                new_nodes.append(_insert_size(graph, node, dim, place))
    return new_nodes


def _insert_size(graph: fx.Graph, node: fx.Node, dim: int, place: fx.Node) -> fx.Node:
    with graph.inserting_after(place):
        size = graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
    size.meta["val"] = value_of(node).shape[dim]
    return size


def _symbolic_sizes(node: fx.Node) -> list[tuple[int, str]]:
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return []
    pairs = [(dim, symbol_of(size)) for dim, size in enumerate(value.shape)]
    return [(dim, symbol) for dim, symbol in pairs if symbol is not None]


def symbol_of(number: Any) -> str | None:
    """The symbol that a number is; None if it is anything else."""
    # Nested integers (jagged sizes) are SymInts without an expression: they have no free symbols.
    if not isinstance(number, (torch.SymInt, torch.SymFloat)) or not free_symbols(number):
        return None
    expression = number.node.expr
    return str(expression.name) if expression.is_Symbol else None


def _symbolic_numbers(value: Any) -> Iterator[Any]:
    if isinstance(value, _SYMBOLIC):
        yield value
    elif isinstance(value, torch.Tensor):
        yield from (size for size in value.shape if isinstance(size, torch.SymInt))
        if value.layout is torch.strided:
            yield from (stride for stride in value.stride() if isinstance(stride, torch.SymInt))
            offset = value.storage_offset()
            if isinstance(offset, torch.SymInt):
                yield offset
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _symbolic_numbers(part)
