"""One layer of a six-layer encoder in a scope: what is compiled, what is dumped, what comes out."""

import copy

import pytest
import torch

import torchair_scope as torchair
from tests.support.encoder import encoder
from tests.support.replay import assert_replays
from torchair_scope.store.reader import read

SCOPED = 2


@pytest.fixture
def model():
    return encoder(layers=6)


@pytest.fixture
def x():
    return torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))


def scoped_twin(model):
    twin = copy.deepcopy(model)
    torchair.dump_ops(twin[SCOPED], name="layer")
    return twin


def compile_scoped(model, path, inner):
    options = {"path": str(path), "backend": inner}
    return torch.compile(model, backend="torchair_scope", options=options, fullgraph=True)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_inference_has_two_compiled_regions_and_the_result_is_unchanged(model, x, dump_path, inner):
    scoped = scoped_twin(model)
    with torch.no_grad():
        expected = torch.compile(model, backend=inner)(x)
        result = compile_scoped(scoped, dump_path, inner)(x)
    if inner == "aot_eager":
        assert torch.equal(result, expected)
    else:
        torch.testing.assert_close(result, expected)
    (rank,) = read(dump_path).ranks
    assert [graph["regions"] for graph in rank.graphs] == [["compiled", "dumped", "compiled"]]
    assert_replays(read(dump_path))


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_training_has_two_compiled_regions_each_way_and_the_gradients_are_unchanged(
    model, x, dump_path, inner
):
    scoped = scoped_twin(model)
    torch.compile(model, backend=inner)(x).square().sum().backward()
    compile_scoped(scoped, dump_path, inner)(x).square().sum().backward()
    for name, gradient in gradients(scoped).items():
        expected = gradients(model)[name]
        if inner == "aot_eager":
            assert torch.equal(gradient, expected), name
        else:
            torch.testing.assert_close(gradient, expected)
    (rank,) = read(dump_path).ranks
    assert {graph["direction"]: graph["regions"] for graph in rank.graphs} == {
        "forward": ["compiled", "dumped", "compiled"],
        "backward": ["compiled", "dumped", "compiled"],
    }
    assert_replays(read(dump_path))


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_only_operators_of_the_scoped_layer_are_on_disk(model, x, dump_path, inner):
    with torch.no_grad():
        compile_scoped(scoped_twin(model), dump_path, inner)(x)
    (rank,) = read(dump_path).ranks
    (graph,) = rank.graphs
    modules = {node["name"]: node["module"] for node in graph["nodes"]}
    dumped = {modules[call.node].split(".")[0] for call in rank.calls}
    assert dumped == {str(SCOPED)}
    of_the_layer = [
        node["name"] for node in graph["nodes"] if (node["module"] or "").startswith(str(SCOPED))
    ]
    assert of_the_layer
    views_and_all = {node["name"] for node in graph["nodes"] if node["scope"] == "layer"}
    picked_out = {call.node for call in rank.calls} ^ views_and_all
    assert all(name.startswith("getitem") for name in picked_out)


def test_inductor_is_called_for_exactly_two_regions(model, x, dump_path):
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        compile_scoped(scoped_twin(model), dump_path, "inductor")(x)
    cached = torch._dynamo.utils.counters["inductor"]
    assert cached["fxgraph_cache_miss"] + cached["fxgraph_cache_hit"] == 2


def test_batches_of_any_size_share_one_compile(model, dump_path):
    compiled = torch.compile(
        scoped_twin(model), backend="torchair_scope", options={"path": str(dump_path)}, dynamic=True
    )
    with torch.no_grad():
        for batch in (2, 3, 7):
            x = torch.randn(batch, 5, 32)
            torch.testing.assert_close(compiled(x), model(x))
    (rank,) = read(dump_path).ranks
    assert len(rank.graphs) == 1
    assert len(rank.steps) == 3
    assert_replays(read(dump_path))
