"""Marker operators are lifted into metadata, and put back around exactly their operators."""

from __future__ import annotations

import pytest
import torch

from torchair_scope.capture.markers import (
    has_dump_markers,
    lift_markers,
    lower_markers,
    lower_tags,
    markers_of,
)
from torchair_scope.capture.tags import Tag, put_tag, scope_of

DUMP = (["torchair_enable_data_dump"], ["True"])
CORES = (["_op_aicore_num", "_op_vectorcore_num"], ["2", "4"])
KERNEL = (["_super_kernel_scope"], ["fused"])


@pytest.fixture(scope="module", autouse=True)
def air():
    """TorchAir's marker operators, as it declares them."""
    libraries = []
    for namespace in ("air", "npugraph_ex"):
        if hasattr(getattr(torch.ops, namespace), "scope_enter"):
            continue
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define("scope_enter(str[] keys, str[] values, bool need_execute=False) -> ()")
        library.define("scope_exit(bool need_execute=False) -> ()")
        libraries.append(library)
    yield
    for library in libraries:
        library._destroy()


def graph_of(*items, namespace="air"):
    """A chain of operators; a tuple opens a scope, None closes one, a name is a unary operator."""
    graph = torch.fx.Graph()
    value = graph.placeholder("x")
    operators = getattr(torch.ops, namespace)
    for item in items:
        if isinstance(item, tuple):
            graph.call_function(operators.scope_enter.default, item)
        elif item is None:
            graph.call_function(operators.scope_exit.default)
        else:
            operator = getattr(torch.ops.aten, item).default
            value = graph.create_node("call_function", operator, (value,), name=item)
    graph.output((value,))
    return graph


def shown(graph):
    """The graph's operators and markers in order, as "(" with the first key, ")" and names."""
    texts = []
    for node in graph.nodes:
        if node.op == "call_function":
            name = node.target._schema.name.partition("::")[2]
            enter = f"({node.args[0][0]}" if name == "scope_enter" else name
            texts.append(")" if name == "scope_exit" else enter)
    return texts


def node(graph, name):
    return next(node for node in graph.nodes if node.name == name)


@pytest.mark.parametrize("namespace", ["air", "npugraph_ex"])
def test_the_markers_of_data_dump_become_tags(namespace):
    graph = graph_of("exp", DUMP, "tanh", "sin", None, "relu", namespace=namespace)
    assert has_dump_markers(graph)
    lift_markers(graph)
    assert shown(graph) == ["exp", "tanh", "sin", "relu"]
    scopes = [scope_of(node(graph, name)) for name in ("exp", "tanh", "sin", "relu")]
    assert scopes == [None, "data_dump", "data_dump", None]
    assert not markers_of(node(graph, "tanh"))


def test_a_tag_that_is_there_stays_within_the_markers_of_data_dump():
    graph = graph_of(DUMP, "tanh", None)
    put_tag(node(graph, "tanh"), Tag("mine", "model.py:1"))
    lift_markers(graph)
    assert scope_of(node(graph, "tanh")) == "mine"


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ((DUMP, None, "tanh"), False),
        ((CORES, "tanh", None), False),
        ((CORES, DUMP, "tanh", None, None), True),
        ((DUMP, CORES, "tanh", None, None), True),
        ((DUMP, CORES, None, None, "tanh"), False),
        (("tanh",), False),
    ],
)
def test_an_empty_pair_of_markers_is_no_dump_scope(items, expected):
    assert has_dump_markers(graph_of(*items)) == expected


@pytest.mark.parametrize(
    "items",
    [
        ("exp", CORES, "tanh", "sin", None, "relu"),
        (CORES, "exp", KERNEL, "tanh", None, "sin", None),
        (CORES, KERNEL, "tanh", None, None, "relu"),
        (KERNEL, "exp", None, KERNEL, "tanh", None),
        (KERNEL, "exp", None, CORES, "tanh", None),
    ],
)
def test_lifting_and_lowering_gives_the_same_graph_again(items):
    graph = graph_of(*items)
    before = shown(graph)
    lift_markers(graph)
    assert not any("scope" in text for text in shown(graph) if "(" in text)
    lower_markers(graph)
    assert shown(graph) == before
    graph.lint()


def test_empty_scopes_are_dropped():
    graph = graph_of(CORES, None, "tanh", KERNEL, None)
    lift_markers(graph)
    lower_markers(graph)
    assert shown(graph) == ["tanh"]


def test_both_sides_of_a_node_that_is_taken_out_get_a_pair_of_their_own():
    graph = graph_of(CORES, "exp", "tanh", "sin", None)
    lift_markers(graph)
    tanh = node(graph, "tanh")
    tanh.meta["torchair_scope_markers"] = ()
    lower_markers(graph)
    key = "(_op_aicore_num"
    assert shown(graph) == [key, "exp", ")", "tanh", key, "sin", ")"]


def test_a_scope_that_also_dumps_is_split():
    both = (DUMP[0] + CORES[0], DUMP[1] + CORES[1])
    graph = graph_of(both, "tanh", None)
    lift_markers(graph)
    assert scope_of(node(graph, "tanh")) == "data_dump"
    (marker,) = markers_of(node(graph, "tanh"))
    assert (list(marker.keys), list(marker.values)) == CORES


def test_lowered_markers_carry_the_arguments_and_the_namespace():
    graph = graph_of(CORES, "tanh", None, namespace="npugraph_ex")
    lift_markers(graph)
    lower_markers(graph)
    enter = next(node for node in graph.nodes if node.op == "call_function")
    assert enter.target is torch.ops.npugraph_ex.scope_enter.default
    assert enter.args == CORES


def test_tags_become_markers_for_the_dump_of_torchair():
    graph = graph_of("exp", "tanh", "sin", "relu")
    for name in ("tanh", "sin"):
        put_tag(node(graph, name), Tag("mine", "model.py:1"))
    lower_tags(graph, "air")
    assert shown(graph) == ["exp", "(torchair_enable_data_dump", "tanh", "sin", ")", "relu"]


@pytest.mark.parametrize(
    ("items", "said"),
    [(("tanh", None), "without a scope_enter"), ((CORES, "tanh"), "without a scope_exit")],
)
def test_markers_that_are_not_balanced_are_an_error(items, said):
    with pytest.raises(ValueError, match=said):
        lift_markers(graph_of(*items))
