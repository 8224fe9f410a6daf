"""Equality bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.support.bits import difference

NAN = float("nan")


@pytest.mark.parametrize(
    ("actual", "expected", "detail"),
    [
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), "1 of 2 elements"),
        (torch.tensor([NAN]), torch.tensor([1.0]), "1 of 1 elements"),
        (torch.tensor([NAN]), torch.tensor([-NAN]), "1 of 1 elements"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "dtype"),
        (torch.ones(2), torch.ones(2, 1), "shape"),
        (torch.ones(2, 2), torch.ones(2, 2).t(), "stride"),
        (torch.ones(2), 1, "expected 1"),
        (1, 1.0, "expected 1.0"),
        ([torch.ones(2)], [], "1 values, expected 0"),
        ([None], [torch.ones(1)], "None"),
    ],
)
def test_what_differs_is_named(actual, expected, detail):
    assert detail in difference(actual, expected)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([NAN, -0.0, 0.0, float("inf")]),
        torch.tensor(NAN, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.ones(2, 3).t(),
        torch.zeros(3, dtype=torch.float8_e4m3fn),
        torch.tensor([1 + 2j]).conj(),
        torch.eye(3).to_sparse(),
    ],
    ids=lambda value: f"{value.dtype}-{value.layout}-{tuple(value.shape)}",
)
def test_a_value_equals_itself(value):
    assert difference(value, value.clone()) is None


def test_a_tuple_stands_for_a_named_tuple():
    values, indices = torch.topk(torch.arange(4.0), 2)
    assert difference(torch.topk(torch.arange(4.0), 2), (values, indices)) is None
