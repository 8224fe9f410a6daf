"""A value that was changed behind torch's back is not taken for the one that it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import torchair_scope as torchair
from torchair_scope.store.reader import read

CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "all signs": torch.Tensor.neg_,
    "signs of every other row": lambda value: value[::2].neg_(),
    "two signs": lambda value: value.view(-1)[:2].neg_(),
    "signs of a block": lambda value: value[:64, :64].neg_(),
    "two rows change places": lambda value: value[:2].copy_(value[:2].flip(0).clone()),
    "through NumPy": lambda value: np.negative(value.numpy(), out=value.numpy()),
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_without_a_version_is_on_disk(
    dump_path: Path, kind: str, dtype: torch.dtype
) -> None:
    weight = torch.randn(256, 256, dtype=dtype)

    @torch.compile(
        backend="torchair_scope", options={"path": str(dump_path), "backend": "aot_eager"}
    )
    @torchair.dump_ops
    def double(x: torch.Tensor) -> torch.Tensor:
        return x + weight

    x = torch.zeros(256, dtype=dtype)
    double(x)
    version = weight._version
    CHANGES[kind](weight.data)
    assert weight._version == version
    double(x)
    first, second = read(dump_path).ranks[0].calls
    assert not torch.equal(second.load_args()[0][1], first.load_args()[0][1])
    assert torch.equal(second.load_args()[0][1], weight)
    assert torch.equal(second.load_outputs(), weight)
