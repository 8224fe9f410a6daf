"""Compile a graph with TorchAir piece by piece: the rules that make TorchAir take the pieces.

    backend = piecewise_backend(torchair, config, assign)     # assign(node) -> key of its piece
    torch.compile(model, backend=backend)

A second, independent implementation of the rules, which knows nothing of `torchair_scope`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import default_partition
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.fx.passes.split_module import split_module

ENTER, EXIT = "air.scope_enter.default", "air.scope_exit.default"


def lift_scopes(gm: GraphModule) -> GraphModule:
    """Markers have no data edges, so that cutting would move them: turn them into metadata."""
    stack: list[Any] = []
    for node in list(gm.graph.nodes):
        if str(node.target) == ENTER:
            stack.append(node.args[:2])
            gm.graph.erase_node(node)
        elif str(node.target) == EXIT:
            stack.pop()
            gm.graph.erase_node(node)
        elif node.op not in ("placeholder", "output", "get_attr"):
            node.meta["air_scopes"] = tuple((tuple(keys), tuple(values)) for keys, values in stack)
    return gm


def lower_scopes(gm: GraphModule) -> GraphModule:
    """Write a balanced pair of markers around each node that stood in a scope."""
    for node in list(gm.graph.nodes):
        for keys, values in node.meta.get("air_scopes", ()):
            with gm.graph.inserting_before(node):
                enter = torch.ops.air.scope_enter.default
                gm.graph.call_function(enter, (list(keys), list(values)))
            with gm.graph.inserting_after(node):
                gm.graph.call_function(torch.ops.air.scope_exit.default, ())
    return gm


def cut(gm: GraphModule, assign: Callable[[Node], Any]) -> GraphModule:
    """Split; a getitem stays with the operator whose tuple it reads, as no input can be a tuple."""
    piece_of: dict[Node, Any] = {}
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output"):
            source = node.args[0] if node.target is operator.getitem else None
            piece_of[node] = piece_of[source] if source in piece_of else assign(node)
    return split_module(gm, None, piece_of.__getitem__)


def _symbols(value: Any) -> set[Any]:
    if isinstance(value, torch.Tensor):
        value = (*value.shape, *value.stride(), value.storage_offset())
    if isinstance(value, (list, tuple)):
        return set().union(*map(_symbols, value))
    symbolic = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return set(free_symbols(value)) if symbolic else set()


def _symbol(node: Node) -> Any:
    value = node.meta.get("val")
    if node.op == "placeholder" and isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
        return value.node.expr
    return None


def pass_symbols(parent: GraphModule) -> None:
    """Make each symbol in the shape of any value of a piece an input of it; all inputs first."""
    have = {_symbol(node): node for node in parent.graph.nodes if _symbol(node) is not None}
    for call in _module_calls(parent):
        piece = getattr(parent, call.target)
        inputs = [node for node in piece.graph.nodes if node.op == "placeholder"]
        need = set().union(*(_symbols(node.meta.get("val")) for node in piece.graph.nodes))
        need -= {_symbol(node) for node in inputs}
        first = next(iter(piece.graph.nodes))
        for symbol in sorted(need & set(have), key=str):
            with piece.graph.inserting_before(first):
                inputs.append(piece.graph.placeholder(f"sym_{symbol}"))
            inputs[-1].meta["val"] = have[symbol].meta["val"]
            call.args = (*call.args, have[symbol])
        first_call = next(node for node in piece.graph.nodes if node.op != "placeholder")
        for node in inputs:
            first_call.prepend(node)
        piece.recompile()


def _module_calls(parent: GraphModule) -> list[Node]:
    return [node for node in parent.graph.nodes if node.op == "call_module"]


def _dense_order(value: Any) -> list[int] | None:
    """The permutation that makes a dense tensor in another layout contiguous, else None.

    A layout with gaps is left alone: only a view of an input has one, and it keeps its strides.
    """
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.is_contiguous():
        return None

    def hint(size: Any) -> int:
        return size if isinstance(size, int) else size.node.hint

    order = sorted(range(value.dim()), key=lambda dim: -hint(value.stride(dim)))
    expected = 1
    for dim in reversed(order):
        if hint(value.size(dim)) != 1 and hint(value.stride(dim)) != expected:
            return None
        expected *= hint(value.size(dim))
    return order


class _Piece(torch.nn.Module):
    """Calls TorchAir's unboxed callable, and restores the strides that the graph expects."""

    def __init__(self, run: Callable[..., Any], single: bool, orders: dict[int, list[int]]) -> None:
        super().__init__()
        self.run, self.single, self.orders = run, single, orders

    def forward(self, *args: Any) -> Any:
        outputs = list(self.run(*args))
        for index, order in self.orders.items():
            value = outputs[index].permute(order)
            if not value.is_contiguous():
                back = sorted(range(len(order)), key=order.__getitem__)
                outputs[index] = value.contiguous().permute(back)
        return outputs[0] if self.single else tuple(outputs)


def compile_pieces(
    parent: GraphModule,
    compiler: Callable[..., Any],
    on_error: Callable[[GraphModule, Exception], Callable[..., Any]] | None = None,
) -> GraphModule:
    """Replace each piece of a cut graph by what `compiler` makes of it."""
    for call in _module_calls(parent):
        piece = lower_scopes(getattr(parent, call.target))
        output = next(node for node in piece.graph.nodes if node.op == "output")
        single = not isinstance(output.args[0], (tuple, list))
        if single:  # TorchAir takes a flat tuple or list only
            output.args = ((output.args[0],),)
        piece.recompile()
        values = output.args[0]
        orders = {
            index: order
            for index, node in enumerate(values)
            if isinstance(node, Node) and (order := _dense_order(node.meta.get("val")))
        }
        inputs = [node.meta["val"] for node in piece.graph.nodes if node.op == "placeholder"]
        try:
            run = compiler(piece, inputs)
        except Exception as error:
            _forget_open_scopes()
            if on_error is None:
                raise
            run = on_error(piece, error)
        setattr(parent, call.target, _Piece(run, single, orders))
    parent.recompile()
    return parent


def _forget_open_scopes() -> None:
    """A conversion that failed inside a scope leaves it open for this thread's later ones."""
    from torchair.scope import _scope_attr

    _scope_attr.local.__dict__.clear()


def piecewise_backend(
    torchair: Any,
    config: Any,
    assign: Callable[[Node], Any],
    on_error: Callable[[GraphModule, Exception], Callable[..., Any]] | None = None,
    seen: list[GraphModule] | None = None,
) -> Callable[..., Any]:
    """A backend for `torch.compile`; the cut graphs are appended to `seen`."""
    from torchair.npu_fx_compiler import _get_merged_decompositions

    decompositions = _get_merged_decompositions(config, {})

    def compiler(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        parent = cut(lift_scopes(gm), assign)
        pass_symbols(parent)
        if seen is not None:
            seen.append(parent)
        compiled = compile_pieces(parent, torchair.get_compiler(config), on_error)
        return make_boxed_func(compiled.forward)

    def backend(gm: GraphModule, inputs: list[Any], **kwargs: Any) -> Callable[..., Any]:
        return aot_module_simplified(
            gm,
            inputs,
            fw_compiler=compiler,
            bw_compiler=compiler,
            inference_compiler=compiler,
            partition_fn=default_partition,
            decompositions=decompositions,
            keep_inference_input_mutations=True,
        )

    return backend
