"""Scopes inside control flow: the operator around them is dumped, and the user is told."""

import pytest
import torch

import torchair_scope as torchair
from torchair_scope.store.reader import read


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_an_operator_with_a_scope_in_its_body_is_dumped_and_nothing_breaks(dump_path, inner):
    def gelu(x):
        with torchair.scope.data_dump("branch"):
            return torch.nn.functional.gelu(x)

    def function(x):
        return torch.cond(x.sum() > 0, gelu, torch.sin, (x,)) * 2

    options = {"path": str(dump_path), "backend": inner}
    compiled = torch.compile(function, backend="torchair_scope", options=options)
    with pytest.warns(UserWarning, match=r"scope 'branch' .* lies in the body of cond"):
        result = compiled(torch.ones(3))
    torch.testing.assert_close(result, torch.nn.functional.gelu(torch.ones(3)) * 2)
    torch.testing.assert_close(compiled(-torch.ones(3)), torch.sin(-torch.ones(3)) * 2)
    (rank,) = read(dump_path).ranks
    assert {call.target for call in rank.calls} == {"cond"}
    assert [call.scope for call in rank.calls] == ["branch", "branch"]
