"""Memory is followed through views, and writes to it are found."""

from __future__ import annotations

import operator

import torch
from torch import fx

from torchair_scope.capture.memory import aliased_write, storages, written_by
from torchair_scope.capture.partition import partition

aten = torch.ops.aten


def test_views_of_views_lie_in_the_memory_of_their_base_and_copies_do_not() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    flat = graph.call_function(aten.view.default, (x, [-1]))
    parts = graph.call_function(aten.split.Tensor, (flat, 2))
    half = graph.call_function(operator.getitem, (parts, 1))
    copy = graph.call_function(aten.clone.default, (half,))
    total = graph.call_function(aten.add.Tensor, (half, y))
    graph.output((copy, total))
    memory = storages(graph)
    assert memory[x] == memory[flat] == memory[parts] == memory[half]
    assert len({memory[node] for node in (x, y, copy, total)}) == 4


def test_all_written_arguments_are_found_by_position_name_and_in_lists() -> None:
    graph = fx.Graph()
    x, y, z = map(graph.placeholder, "xyz")
    assert written_by(graph.call_function(aten.add_.Tensor, (x, y))) == [x]
    assert written_by(graph.call_function(aten.add.out, (x, y), {"out": z})) == [z]
    assert written_by(graph.call_function(aten._foreach_add_.List, ([x, y], [z, z]))) == [x, y]
    assert written_by(graph.call_function(aten.add.Tensor, (x, y))) == []
    assert written_by(graph.call_function(operator.setitem, (x, 0, y))) == [x]


def test_region_that_writes_what_it_also_gets_as_a_view_is_told_apart() -> None:
    graph = fx.Graph()
    cache, x = graph.placeholder("cache"), graph.placeholder("x")
    turned = graph.call_function(aten.t.default, (cache,))
    result = graph.call_function(aten.add.Tensor, (turned, 1))
    write = graph.call_function(aten.copy_.default, (cache, x))
    graph.output((result,))
    memory = storages(graph)
    dumped, compiled = partition(graph, lambda node: node is turned)
    assert aliased_write(compiled.nodes, compiled.inputs, memory) is write
    assert aliased_write(dumped.nodes, dumped.inputs, memory) is None
    (whole,) = partition(graph, lambda node: False)
    assert aliased_write(whole.nodes, whole.inputs, memory) is None
