"""Values get the strides back that the graph was traced with."""

from __future__ import annotations

import pytest
import torch

from torchair_scope.capture.layouts import layout_restorer

DENSE = {
    "contiguous": torch.arange(24.0).view(2, 3, 4),
    "transposed": torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
    "permuted": torch.arange(24.0).view(2, 3, 4).permute(1, 2, 0),
    "channels_last": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "of one": torch.arange(3.0).view(3, 1).t(),
    "scalar": torch.tensor(1.0),
    "empty": torch.empty(0, 3).t(),
}


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_value_gets_its_traced_strides_back(name):
    traced = DENSE[name]
    (restored,) = layout_restorer([traced])([traced.contiguous()])
    assert torch.equal(restored, traced)
    if traced.numel() > 1:
        # Where a dimension has one element, its stride says nothing.
        strides = [
            [step for step, size in zip(value.stride(), value.shape, strict=True) if size > 1]
            for value in (restored, traced)
        ]
        assert strides[0] == strides[1]


def test_a_value_with_the_right_strides_is_not_copied():
    traced = DENSE["permuted"]
    (restored,) = layout_restorer([traced])([traced])
    assert restored is traced


@pytest.mark.parametrize(
    "traced",
    [torch.zeros(4, 6)[:, ::2], torch.zeros(3, 1).expand(3, 4), torch.eye(3).to_sparse(), 7, None],
    ids=["with gaps", "expanded", "sparse", "number", "nothing"],
)
def test_what_was_not_traced_as_dense_is_left_as_it_comes(traced):
    value = torch.ones(3)
    (restored,) = layout_restorer([traced])([value])
    assert restored is value


def test_symbolic_sizes_are_not_guarded_on():
    from torch._dynamo.source import ConstantSource
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    env = ShapeEnv()
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    with FakeTensorMode(shape_env=env) as mode:
        traced = mode.from_tensor(
            torch.zeros(3, 5), source=ConstantSource("x"), symbolic_context=context
        ).t()
        guards = len(env.guards)
        restore = layout_restorer([traced])
        assert len(env.guards) == guards
    (restored,) = restore([torch.arange(8.0).view(2, 4)])
    assert restored.stride() == (1, 2)
    assert torch.equal(restored, torch.arange(8.0).view(2, 4))
