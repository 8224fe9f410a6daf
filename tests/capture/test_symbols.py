"""Symbols are traced to the nodes that bind them."""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torchair_scope.capture.symbols import (
    bind_symbols,
    binders,
    is_symbolic,
    symbol_bound_by,
    symbols_of,
)

aten = torch.ops.aten


def with_value(node: fx.Node, value: object) -> fx.Node:
    node.meta["val"] = value
    return node


def unbacked(count: int) -> tuple[FakeTensorMode, list[torch.SymInt]]:
    environment = ShapeEnv()
    sizes = [environment.create_unbacked_symint() for _ in range(count)]
    return FakeTensorMode(shape_env=environment), sizes


def test_symbols_of_sizes_strides_offsets_numbers_and_tuples_are_found() -> None:
    mode, (a, b, c) = unbacked(3)
    node = fx.Graph().placeholder("x")
    with mode:
        tensor = torch.empty_strided((a, 3), (b, 1))
    names = [str(size) for size in (a, b, c)]
    assert symbols_of(with_value(node, tensor)) == names[:2]
    assert symbols_of(with_value(node, 2 * c)) == names[2:]
    assert symbols_of(with_value(node, (tensor, [c]))) == names
    assert symbols_of(with_value(node, torch.ones(2))) == []
    assert symbols_of(with_value(node, None)) == []


def test_only_a_bare_symbol_is_bound() -> None:
    _, (size,) = unbacked(1)
    node = fx.Graph().placeholder("x")
    assert symbol_bound_by(with_value(node, size)) == str(size)
    assert symbol_bound_by(with_value(node, size * 2)) is None
    assert symbol_bound_by(with_value(node, 3)) is None


def test_size_that_an_operator_makes_is_bound_right_behind_it() -> None:
    mode, (size,) = unbacked(1)
    graph = fx.Graph()
    x = with_value(graph.placeholder("x"), torch.ones(3))
    with mode:
        found = with_value(graph.call_function(aten.nonzero.default, (x,)), torch.empty(size, 1))
        end = with_value(graph.call_function(aten.neg.default, (found,)), torch.empty(size, 1))
    graph.output((end,))
    names = [node.name for node in graph.nodes]
    (new,) = bind_symbols(graph)
    assert (new.target, new.args, new.prev) == (aten.sym_size.int, (found, 0), found)
    assert new.meta["val"] is not None
    assert binders(graph) == {str(size): new}
    assert [node.name for node in graph.nodes if node is not new] == names
    assert bind_symbols(graph) == []


def test_size_of_a_placeholder_is_bound_behind_the_last_placeholder() -> None:
    mode, (size,) = unbacked(1)
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    with mode:
        with_value(x, torch.empty(size))
    graph.output((x, y))
    (new,) = bind_symbols(graph)
    assert new.prev is y


def test_size_that_is_an_input_is_not_bound_again() -> None:
    mode, (size,) = unbacked(1)
    graph = fx.Graph()
    with mode:
        x = with_value(graph.placeholder("x"), torch.empty(size))
    number = with_value(graph.placeholder("size"), size)
    graph.output((x,))
    assert bind_symbols(graph) == []
    assert binders(graph) == {str(size): number}


def test_arithmetic_on_sizes_is_told_from_operators_that_read_data() -> None:
    _, (size,) = unbacked(1)
    graph = fx.Graph()
    x = with_value(graph.placeholder("x"), torch.ones(3))
    number = with_value(graph.call_function(aten.sym_size.int, (x, 0)), size)
    product = with_value(graph.call_function(operator.mul, (number, 2)), size * 2)
    item = with_value(graph.call_function(aten._local_scalar_dense.default, (x,)), size)
    assert [is_symbolic(node) for node in (x, number, product, item)] == [False, True, True, False]
