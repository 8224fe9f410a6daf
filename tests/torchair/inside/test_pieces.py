"""TorchAir compiles a graph that is cut into pieces, if the pieces keep to its rules."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.torchair.inside.models import ScopedNet, assert_same
from tests.torchair.inside.piecewise import piecewise_backend


def in_pieces_of(size):
    """Assign the nodes, in program order, to pieces of `size` nodes each."""
    count = itertools.count()
    return lambda node: next(count) // size


# TorchAir says so whenever the second graph of a piece takes over the memory of the first.
@pytest.mark.filterwarnings("ignore:Because acl graph fixes memory addresses:UserWarning")
def test_a_model_in_pieces_gives_the_results_of_eager(
    torchair, device, compiler_config, mode, dynamic
):
    net = ScopedNet(torchair).eval().to(device)
    seen = []
    backend = piecewise_backend(torchair, compiler_config(mode), in_pieces_of(2), seen=seen)
    run = torch.compile(net, backend=backend, dynamic=dynamic, fullgraph=True)
    x = torch.randn(3, 4).to(device)
    with torch.no_grad():
        for value in (x, x, torch.randn(5, 4).to(device)):
            assert_same(run(value), net(value))
    assert sum(node.op == "call_module" for node in seen[0].graph.nodes) > 2


def test_a_scope_survives_in_the_pieces(torchair, device, compiler_config, recorder, dynamic):
    net = ScopedNet(torchair).eval().to(device)
    backend = piecewise_backend(torchair, compiler_config(), in_pieces_of(2))
    run = torch.compile(net, backend=backend, dynamic=dynamic, fullgraph=True)
    with torch.no_grad():
        run(torch.randn(3, 4).to(device))
    name = "torchair_enable_data_dump"
    marked = {type_ for graph in recorder.ge_graphs for type_ in graph.types_with_attribute(name)}
    assert "Tanh" in marked
    assert "Relu" not in marked


def test_a_piece_that_torchair_cannot_convert_falls_back_to_aten(torchair, device, compiler_config):
    def model(x):
        return torch.special.bessel_j0(x) + 1

    errors = []

    def fall_back(piece, error):
        errors.append(error)
        return piece.forward

    backend = piecewise_backend(torchair, compiler_config(), in_pieces_of(1), on_error=fall_back)
    x = torch.randn(3, 4).to(device)
    with torch.no_grad():
        assert_same(torch.compile(model, backend=backend, fullgraph=True)(x), model(x))
    assert [type(error) for error in errors] == [NotImplementedError]
