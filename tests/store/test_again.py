"""What is handed over again costs a link, and is the same value in every record."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.store.support import RANK_0
from tests.support.disks import slowed
from torchair_scope.options import Limit
from torchair_scope.samples import Sample
from torchair_scope.store.choice import Choice
from torchair_scope.store.files import Pace
from torchair_scope.store.reader import read
from torchair_scope.store.run import DumpWarning, complete_steps, open_run

LARGE = 50_000  # elements: beyond what is hashed at once
ANNOUNCED = Pace(announced=True)
BUSY = 8  # values that writers of a slow disk are at


def save(step, node, *values, **further):
    step.begin_call(node, "aten.op.default", values, {}, {}, **further).finish(values[0])


def calls_of(path):
    (rank,) = read(path).ranks
    assert rank.problems == []
    return {call.node: call for call in rank.calls}


@pytest.mark.parametrize("size", [4, LARGE])
@pytest.mark.parametrize("inference", [False, True])
def test_a_tensor_that_comes_again_is_described_and_loaded_as_the_first_time(
    dump_path, size, inference
):
    with torch.inference_mode(inference):
        tensor = torch.randn(size, 2).t()
        step = open_run(dump_path).graph(1, {}).begin_step(pace=ANNOUNCED)
        save(step, "first", tensor)
        save(step, "again", [tensor, tensor[1:]], tensor)
        step.finish()
    calls = calls_of(dump_path)
    slots = ["INPUT.0.0", "INPUT.0.1", "INPUT.1", "OUTPUT.0", "OUTPUT.1"]
    assert list(calls["again"].record["files"]) == slots
    (first,) = calls["first"].record["args"]
    (again, part), whole = calls["again"].record["args"]
    assert again["tensor"] == {**first["tensor"], "slot": "INPUT.0.0"}
    assert whole["tensor"] == {**first["tensor"], "slot": "INPUT.1"}
    assert part["tensor"]["shape"] == [1, size]
    (both, whole), _ = calls["again"].load_args()
    assert [torch.equal(both[0], tensor), torch.equal(whole, tensor)] == [True, True]
    assert both[0].stride() == tensor.stride()
    assert torch.equal(both[1], tensor[1:])


@pytest.mark.parametrize("order", [("part", "whole"), ("whole", "part")])
def test_scopes_that_keep_different_parts_do_not_share_them(dump_path, order):
    tensor = torch.randn(LARGE)
    choices = {"part": Choice(sample=Sample(head=7)), "whole": Choice()}
    step = open_run(dump_path).graph(1, {}).begin_step(pace=ANNOUNCED)
    for node in (*order, *(f"{node}_again" for node in order)):
        save(step, node, tensor, choice=choices[node.partition("_")[0]])
    step.finish()
    calls = calls_of(dump_path)
    for node, call in calls.items():
        expected = tensor.numpy()[:7] if node.startswith("part") else tensor.numpy()
        assert np.array_equal(np.load(call.input_files["INPUT.0"]), expected)


def test_equal_numbers_of_different_types_are_different_files(dump_path):
    numbers = (1, True, 1.0, 0.0, -0.0, [1, 2], (1, 2), [1.0, 2.0], [[1, 2]], 1 + 0j)
    step = open_run(dump_path).graph(1, {}).begin_step()
    for node in ("first", "again"):
        step.begin_call(node, "aten.op.default", numbers, {}, {}).finish(torch.ones(1))
    step.finish()
    for call in calls_of(dump_path).values():
        for position, number in enumerate(numbers):
            array = np.load(call.input_files[f"INPUT.{position}"])
            expected = np.array(number)
            assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
            assert array.tobytes() == expected.tobytes()


def keep_writers_busy(step):
    for number in range(BUSY):  # with what nobody has to wait for
        numbers = list(range(number, number + 1000))
        step.begin_call(f"busy_{number}", "aten.op.default", (numbers,), {}, {}).finish(None)


def dumped_twice(path, weight, pace):
    """A graph whose second step has looked at the memory of a weight."""
    graph = open_run(path).graph(1, {})
    for number in range(2):
        step = graph.begin_step(pace=pace)
        save(step, f"earlier_{number}", weight)
        step.finish()
    complete_steps()
    return graph


def remove_earlier_files(path):
    for number in range(2):
        for file in (path / RANK_0 / "graph_1" / str(number)).glob("*.npy"):
            file.unlink()


def call_of(path, node):
    (rank,) = read(path).ranks
    return next(call for call in rank.calls if call.node == node)


@pytest.mark.usefixtures("without_kernels")
def test_a_file_that_is_removed_while_a_step_is_written_is_written_again(dump_path):
    weight = torch.randn(LARGE)
    graph = dumped_twice(dump_path, weight, ANNOUNCED)
    with slowed(0.05):
        step = graph.begin_step(pace=ANNOUNCED)
        keep_writers_busy(step)
        save(step, "later", weight)
        remove_earlier_files(dump_path)
        step.finish()
    call = call_of(dump_path, "later")
    assert call.record["missing"] == []
    assert torch.equal(call.load_args()[0][0], weight)


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.filterwarnings("ignore:torchair_scope cannot write")
def test_memory_that_the_model_has_back_is_not_read_when_a_file_is_gone(dump_path):
    weight = torch.randn(LARGE)
    value = weight.clone()
    pace = Pace(announced=True, lag=1)
    graph = dumped_twice(dump_path, weight, pace)
    with slowed(0.05):
        step = graph.begin_step(pace=pace)
        keep_writers_busy(step)
        save(step, "later", weight)
        step.finish()
        weight.numpy()[:] = -1
        remove_earlier_files(dump_path)
        complete_steps()
    call = call_of(dump_path, "later")
    for file in (call.input_files | call.output_files).values():
        assert np.array_equal(np.load(file), value.numpy())
    assert {lost["reason"] for lost in call.record["missing"]} <= {"No such file or directory"}
    assert len(call.record["missing"]) + len(call.record["files"]) == 2


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.filterwarnings("ignore:torchair_scope cannot write")
@pytest.mark.parametrize("lag", [0, 1])
def test_after_files_are_removed_later_steps_are_whole_again(dump_path, lag):
    weight = torch.randn(LARGE)
    pace = Pace(announced=True, lag=lag)
    graph = dumped_twice(dump_path, weight, pace)
    with slowed(0.05):
        for number in range(4):
            step = graph.begin_step(pace=pace)
            keep_writers_busy(step)
            save(step, f"later_{number}", weight)
            step.finish()
            if not number:
                remove_earlier_files(dump_path)
        complete_steps()
    for number in (2, 3):
        call = call_of(dump_path, f"later_{number}")
        assert call.record["missing"] == []
        assert torch.equal(call.load_args()[0][0], weight)


def test_values_whose_files_are_removed_count_as_bytes_again(dump_path):
    most = 6 * 4 * LARGE
    weights = [torch.randn(LARGE) for _ in range(4)]
    choice = Choice(limits=(Limit(f"scope-{dump_path}", max_bytes=most, max_calls=None),))
    graph = open_run(dump_path).graph(1, {})

    def run_step():
        step = graph.begin_step(pace=ANNOUNCED)
        for position, weight in enumerate(weights):
            save(step, f"n{position}", weight, choice=choice)
        step.finish()

    for _ in range(2):
        run_step()
    remove_earlier_files(dump_path)
    with pytest.warns(DumpWarning, match="max_bytes"):
        run_step()
    (rank,) = read(dump_path).ranks
    written = sum(step["written"] for step in rank.steps)
    assert 5 * 4 * LARGE < written <= most
