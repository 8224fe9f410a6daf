"""Replay finds what a dump says wrongly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import torchair_scope
from tests.support.replay import assert_replays, replay, resolve
from torchair_scope.store.reader import Dump, read


@pytest.fixture
def dump(dump_path):
    def f(x):
        with torchair_scope.scope.data_dump():
            return torch.dropout(x + 1, 0.5, True)

    options = {"path": str(dump_path), "backend": "aot_eager"}
    torch.compile(f, backend="torchair_scope", options=options)(torch.ones(3))
    return read(dump_path)


def test_a_sound_call_is_equal_and_a_random_one_is_skipped(dump):
    verdicts = assert_replays(dump)
    assert [(verdict.kind, verdict.detail) for verdict in verdicts] == [
        ("equal", ""),
        ("skipped", "random operator"),
    ]


@pytest.mark.parametrize("slot", ["INPUT.0", "OUTPUT.0"])
def test_a_call_with_a_wrong_value_in_a_file_is_different(dump, slot):
    (call, _) = dump.ranks[0].calls
    path = {**call.input_files, **call.output_files}[slot]
    array = np.load(path)
    array[1] += 0.25
    np.save(path, array)
    verdict = replay(call)
    assert (verdict.kind, verdict.detail) == ("different", "value 0: 1 of 3 elements")
    with pytest.raises(AssertionError, match=r"step 0 add \(aten\.add\.Tensor\): value 0"):
        assert_replays(dump)


def test_a_dump_without_a_call_does_not_pass(tmp_path):
    with pytest.raises(AssertionError, match="no call"):
        assert_replays(Dump(tmp_path, []))


def test_targets_are_found_by_the_names_in_records():
    assert resolve("aten.add.Tensor") is torch.ops.aten.add.Tensor
    assert resolve("auto_functionalized_v2") is torch.ops.higher_order.auto_functionalized_v2
    assert resolve("<built-in function mul>")(2, 3) == 6
