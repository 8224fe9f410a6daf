"""A scope around a call of a model that TorchAir has compiled: it is dumped, as eager code."""

from __future__ import annotations

import pytest
import torch
import torchair

from tests.torchair.inside.models import assert_same

pytestmark = [
    pytest.mark.usefixtures("patched"),
    pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function"),
    pytest.mark.filterwarnings("ignore:Because acl graph fixes memory addresses:UserWarning"),
]


def shift(x):
    return torch.tanh(torch.relu(x) + 1)


BY_NAME = [pytest.param(name, marks=pytest.mark.only_in("C")) for name in ("npu", "npugraph_ex")]


@pytest.fixture(params=["get_npu_backend", *BY_NAME])
def compiled(request, dump_config, compile_with):
    """`shift`, compiled in each way that TorchAir has."""
    if request.param == "get_npu_backend":
        return compile_with(dump_config(), shift)
    return torch.compile(shift, backend=request.param, fullgraph=True)


@pytest.mark.parametrize("first_call_in_scope", [True, False])
def test_the_call_is_dumped_and_others_are_what_they_were(
    compiled, device, recorder, read_dump, dump_path, first_call_in_scope
):
    x = torch.randn(3, 4).to(device)
    if not first_call_in_scope:
        assert_same(compiled(x), shift(x))
    graphs = len(recorder.ge_graphs) + len(recorder.acl_graphs)
    with torchair.scope.data_dump("step", path=dump_path):
        result = compiled(x)
    assert_same(result, shift(x))
    assert len(recorder.ge_graphs) + len(recorder.acl_graphs) == graphs
    (rank,) = read_dump().ranks
    assert rank.problems == []
    assert [call.target for call in rank.calls] == [
        "aten.relu.default",
        "aten.add.Tensor",
        "aten.tanh.default",
    ]
    assert_same(compiled(x), result)
    assert len(read_dump().ranks[0].calls) == 3


def test_other_scopes_of_torchair_in_such_a_call_do_no_harm(
    compile_with, dump_config, device, read_dump, dump_path
):
    def function(x):
        with torchair.scope.limit_core_num(2, 4):
            return torch.relu(x) + 1

    x = torch.randn(3, 4).to(device)
    compiled = compile_with(dump_config(), function)
    with torchair.scope.data_dump("step", path=dump_path):
        assert_same(compiled(x), torch.relu(x) + 1)
    assert "aten.relu.default" in [call.target for call in read_dump().ranks[0].calls]
