from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.store.support import RANK_0, one_step, steps
from tests.support.bits import difference
from tests.support.disks import mounted, watched
from torchair_scope.store.reader import Call, MissingTensorError, Rank, read
from torchair_scope.store.run import DumpWarning, open_run


def dump_call(path: Path, args: tuple, kwargs: dict, result: object, **facts: object) -> Call:
    """Dump one call and read it back."""
    step = open_run(path).graph(1, {}).begin_step()
    step.begin_call("node", "aten.op.default", args, kwargs, facts).finish(result)
    step.finish()
    (call,) = rank_of(path).calls
    return call


def rank_of(path: Path) -> Rank:
    (rank,) = read(path).ranks
    return rank


def slots(call: Call) -> dict[str, list]:
    """The files of a step as `{slot: value}`, read by name alone as other tools do."""
    folder = call.folder / f"graph_{call.graph}" / str(call.step)
    pattern = re.compile(r"node-aten\.op\.default\.(.+)\.(\d{20})\.npy")
    matches = {path: pattern.fullmatch(path.name) for path in folder.iterdir()}
    assert len({match[2] for match in matches.values()}) == 1
    return {match[1]: np.load(path).tolist() for path, match in matches.items()}


def test_names_are_those_of_torchair_with_one_time_for_a_call(dump_path: Path):
    tensor = torch.ones(2)
    call = dump_call(dump_path, (tensor, [None, tensor], 3), {"out": tensor}, (tensor, [tensor]))
    assert call.folder == dump_path / RANK_0
    assert slots(call) == {
        "INPUT.0": [1, 1],
        "INPUT.1.1": [1, 1],
        "INPUT.2": 3,
        "KWARG.out": [1, 1],
        "OUTPUT.0": [1, 1],
        "OUTPUT.1.0": [1, 1],
    }


def test_positional_numbers_are_files_and_constants_of_the_record(dump_path: Path):
    args = (1, 2.5, True, [1, 2], [], (0.5, 1), 1 + 2j)
    call = dump_call(dump_path, args, {"alpha": 2, "dim": [0, 1]}, 7)
    assert slots(call) == {
        "INPUT.0": 1,
        "INPUT.1": 2.5,
        "INPUT.2": True,
        "INPUT.3": [1, 2],
        "INPUT.4": [],
        "INPUT.5": [0.5, 1],
        "INPUT.6": 1 + 2j,
        "OUTPUT.0": 7,
    }
    assert call.load_args() == (args, {"alpha": 2, "dim": [0, 1]})
    assert call.load_outputs() == 7


def test_what_is_neither_tensor_nor_number_is_in_the_record_only(dump_path: Path):
    args = (None, "text", torch.float32, torch.ops.aten.relu.default, slice(1, 2), 2**70)
    call = dump_call(dump_path, args, {"device": torch.device("cpu")}, None)
    assert call.input_files == {}
    assert not (call.folder / "graph_1").exists()
    assert call.load_args() == (args, {"device": torch.device("cpu")})
    assert call.load_outputs() is None


def test_outputs_are_numbered_over_a_tuple_or_list(dump_path: Path):
    values, indices = torch.tensor([[1.0, 2.0]]).max(dim=1)
    call = dump_call(dump_path, (), {}, torch.return_types.max((values, indices)))
    assert slots(call) == {"OUTPUT.0": [2.0], "OUTPUT.1": [1]}
    assert type(call.load_outputs()) is torch.return_types.max


def test_inputs_are_written_before_the_operator_changes_them(dump_path: Path):
    tensor = torch.zeros(2)
    step = open_run(dump_path).graph(1, {}).begin_step()
    call = step.begin_call("node", "aten.add_.Tensor", (tensor, 1), {}, {})
    tensor.add_(1)
    call.finish(tensor)
    step.finish()
    (read_back,) = rank_of(dump_path).calls
    assert read_back.load_args()[0][0].tolist() == [0, 0]
    assert read_back.load_outputs().tolist() == [1, 1]


CALLS = {
    "aten.add.Tensor": lambda: ((torch.randn(3, 4).t(), torch.randn(3)), {"alpha": 2}),
    "aten.cat.default": lambda: (([torch.randn(2, 3), torch.randn(1, 3)], 0), {}),
    "aten.index.Tensor": lambda: ((torch.randn(3, 4), [None, torch.tensor([0, 2])]), {}),
    "aten.max.dim": lambda: ((torch.tensor([[1.0, float("nan")]]), 1), {}),
    "aten.mul.Tensor": lambda: ((torch.randn(2, 1).expand(2, 5), float("inf")), {}),
    "aten.mm.default": lambda: (
        (torch.randn(4, 8)[:, ::2].bfloat16(), torch.ones(4, 2).bfloat16()),
        {},
    ),
    "aten._to_copy.default": lambda: ((torch.randn(5),), {"dtype": torch.float8_e4m3fn}),
    "aten.full.default": lambda: (
        ([2, 2], True),
        {"dtype": torch.bool, "device": torch.device("cpu")},
    ),
    "aten.split.Tensor": lambda: ((torch.randn(5, 0), 2), {}),
    "aten.clone.default": lambda: (
        (torch.randn(1, 2, 3, 4),),
        {"memory_format": torch.channels_last},
    ),
    "aten.sym_size.int": lambda: ((torch.randn(3), 0), {}),
}


@pytest.mark.parametrize("target", CALLS)
def test_a_dumped_call_can_be_run_again_bit_for_bit(dump_path: Path, target: str):
    torch.manual_seed(0)
    namespace, packet, overload = target.split(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    args, kwargs = CALLS[target]()
    step = open_run(dump_path).graph(1, {}).begin_step()
    call = step.begin_call("node", target, args, kwargs, {})
    result = operator(*args, **kwargs)
    call.finish(result)
    step.finish()
    (read_back,) = rank_of(dump_path).calls
    loaded_args, loaded_kwargs = read_back.load_args()
    assert difference((loaded_args, loaded_kwargs), (args, kwargs)) is None
    again = operator(*loaded_args, **loaded_kwargs)
    assert difference(again, read_back.load_outputs()) is None
    assert difference(again, result) is None


def test_a_call_record_says_all_that_the_names_cannot(dump_path: Path):
    tensor = torch.randn(2, 3, requires_grad=True).t()[1:]
    call = dump_call(dump_path, (tensor,), {}, None, scope="a/b", nondeterministic=True)
    record = call.record
    (name,) = record["files"].values()
    assert record == {
        "record": "call",
        "graph": 1,
        "step": 0,
        "order": 0,
        "node": "node",
        "target": "aten.op.default",
        "time": name.split(".")[-2],
        "scope": "a/b",
        "nondeterministic": True,
        "args": [
            {
                "tensor": {
                    "slot": "INPUT.0",
                    "dtype": "torch.float32",
                    "shape": [2, 2],
                    "stride": [1, 3],
                    "storage_offset": 1,
                    "device": "cpu",
                    "requires_grad": True,
                }
            }
        ],
        "kwargs": {},
        "outputs": None,
        "files": {"INPUT.0": name},
        "contents": {"INPUT.0": 0},
        "missing": [],
    }


def test_graph_and_step_records_stand_around_the_calls(dump_path: Path):
    graph = open_run(dump_path).graph(7, {"direction": "backward", "dtype": torch.float32})
    one_step(graph, torch.ones(4), torch.ones(4))
    one_step(graph)
    rank = rank_of(dump_path)
    (record,) = rank.graphs
    assert (record["graph"], record["direction"], record["dtype"]) == (
        7,
        "backward",
        "torch.float32",
    )
    sizes = [path.stat().st_size for path in rank.folder.rglob("*.npy")]
    facts = ("graph", "step", "complete", "calls", "files", "bytes", "missing", "problems")
    assert [tuple(step[fact] for fact in facts) for step in rank.steps] == [
        (7, 0, True, 2, 6, sum(sizes), 0, []),
        (7, 1, True, 0, 0, 0, 0, []),
    ]
    assert [call.order for call in rank.calls] == [0, 1]
    assert rank.problems == []


def test_a_file_can_be_read_as_any_other_npy_file(dump_path: Path):
    for position, array in enumerate([torch.ones(3, 4).t(), torch.tensor(2), torch.empty(0, 3)]):
        one_step(open_run(dump_path).graph(position + 1, {}), array)
        (path,) = (dump_path / RANK_0 / f"graph_{position + 1}").rglob("*INPUT.0*.npy")
        expected = np.ascontiguousarray(array.numpy()).reshape(array.shape)
        own = path.with_name("own.npy")
        np.save(own, expected)
        assert path.read_bytes() == own.read_bytes()


def test_a_call_that_was_not_finished_is_recorded_with_its_inputs(dump_path: Path):
    step = open_run(dump_path).graph(1, {}).begin_step()
    step.begin_call("node", "aten.op.default", (torch.ones(2),), {}, {})
    step.finish()
    rank = rank_of(dump_path)
    (call,) = rank.calls
    assert not call.finished
    assert call.load_args()[0][0].tolist() == [1, 1]
    with pytest.raises(MissingTensorError, match="did not return"):
        call.load_outputs()
    assert rank.steps[0]["complete"] is False
    assert any("did not return" in problem for problem in rank.problems)


def test_threads_that_run_one_graph_get_steps_of_their_own(dump_path: Path):
    graph = open_run(dump_path).graph(1, {})

    def work(value: float) -> None:
        for _ in range(20):
            one_step(graph, torch.full((3,), value), torch.full((2,), value))

    threads = [threading.Thread(target=work, args=(float(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rank = rank_of(dump_path)
    assert rank.problems == []
    assert sorted(step["step"] for step in rank.steps) == list(range(80))
    for first, second in zip(rank.calls[::2], rank.calls[1::2], strict=True):
        assert first.step == second.step
        assert first.load_args()[0][0][0] == second.load_args()[0][0][0]


# What cannot be saved


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_tensor_without_data_is_one_warning_and_a_record(dump_path: Path, on_error: str):
    graph = open_run(dump_path, on_error=on_error).graph(1, {})
    with pytest.warns(DumpWarning) as caught:
        steps(graph, 2, torch.empty(2, device="meta"))
    assert len(caught) == 1
    assert re.search(
        r"INPUT\.0 of add_0 \(aten\.add\.Tensor, scope block\).*meta", str(caught[0].message)
    )
    rank = rank_of(dump_path)
    assert [lost["slot"] for lost in rank.calls[0].record["missing"]] == ["INPUT.0", "OUTPUT.0"]
    assert rank.steps[0]["complete"] is False
    with pytest.raises(MissingTensorError, match="meta"):
        rank.calls[0].load_args()


def test_an_argument_that_cannot_be_walked_is_no_error_of_the_model(dump_path: Path):
    class Broken(dict):
        def values(self):
            raise RuntimeError("broken")

    graph = open_run(dump_path).graph(1, {})
    step = graph.begin_step()
    with pytest.warns(DumpWarning, match="broken"):
        step.begin_call("node", "aten.op.default", (Broken(),), {}, {}).finish(torch.ones(2))
    step.finish()
    rank = rank_of(dump_path)
    assert "RuntimeError: broken" in rank.steps[0]["problems"]
    assert rank.calls[0].load_outputs().tolist() == [1, 1]


# Write errors


def block(dump_path: Path, graph: int) -> Path:
    """Put a file where the folder of a graph goes."""
    path = dump_path / RANK_0 / f"graph_{graph}"
    path.touch()
    return path


def test_a_file_that_cannot_be_written_is_one_warning_and_the_rest_goes_on(dump_path: Path):
    run = open_run(dump_path)
    blocked = block(dump_path, 1)
    with pytest.warns(DumpWarning, match=r"graph_1/0/add_0-aten.*Not a directory") as caught:
        steps(run.graph(1, {}), 2, torch.ones(2))
    assert len(caught) == 1
    blocked.unlink()
    graph = run.graph(2, {})
    one_step(graph, torch.ones(2))
    rank = rank_of(dump_path)
    assert [step["complete"] for step in rank.steps] == [False, False, True]
    lost = rank.calls[0].record["missing"]
    assert {entry["slot"] for entry in lost} == {"INPUT.0", "INPUT.1", "OUTPUT.0"}
    assert {entry["reason"] for entry in lost} == {"Not a directory"}
    assert all(entry["file"].startswith("add_0-aten.add.Tensor.") for entry in lost)
    assert difference(rank.calls[-1].load_outputs(), torch.full((2,), 2.0)) is None


def test_on_error_raise_gives_the_error_with_the_name_of_the_file(dump_path: Path):
    graph = open_run(dump_path, on_error="raise").graph(1, {})
    block(dump_path, 1)
    step = graph.begin_step()
    step.begin_call("node", "aten.op.default", (torch.ones(2),), {}, {})
    with pytest.raises(NotADirectoryError) as caught:
        step.finish()
    assert re.search(
        r"graph_1/0/node-aten\.op\.default\.INPUT\.0\.\d{20}\.npy", caught.value.filename
    )
    assert rank_of(dump_path).steps[0]["complete"] is False


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with mounted(tmp_path / "disk", "1m") as folder:
        yield folder


def assert_files_are_whole_and_claimed(rank: Rank) -> None:
    on_disk = {path.name for path in rank.folder.rglob("*") if path.is_file()}
    claimed = {name for call in rank.calls for name in call.record["files"].values()}
    assert on_disk - {"manifest.jsonl"} == claimed
    for path in rank.folder.rglob("*.npy"):
        np.load(path)


def test_a_disk_that_fills_up_is_one_warning_and_an_incomplete_step(small_disk: Path):
    graph = open_run(small_disk).graph(1, {})
    with pytest.warns(DumpWarning, match=r"\.npy: No space left on device") as caught:
        steps(graph, 4, torch.ones(30_000), torch.ones(100_000), torch.ones(5))
    assert len(caught) == 1
    rank = rank_of(small_disk)
    assert [step["complete"] for step in rank.steps] == [False] * 4
    assert_files_are_whole_and_claimed(rank)
    lost = {entry["reason"] for call in rank.calls for entry in call.record["missing"]}
    assert lost == {"No space left on device"}
    # Which of the large values still fitted is for the writers' threads to race for.
    assert rank.calls[0].record["files"]


def test_a_step_is_dumped_again_once_there_is_room(small_disk: Path):
    graph = open_run(small_disk).graph(1, {})
    filler = small_disk / "filler"
    filler.write_bytes(bytes(900_000))
    with pytest.warns(DumpWarning, match="No space"):
        one_step(graph, torch.ones(60_000))
    filler.unlink()
    one_step(graph, torch.ones(60_000))
    filler.write_bytes(bytes(450_000))
    one_step(graph, torch.ones(60_000))
    rank = rank_of(small_disk)
    assert [step["complete"] for step in rank.steps] == [False, True, False]
    assert_files_are_whole_and_claimed(rank)


def test_a_disk_without_a_free_byte_loses_no_record_for_good(small_disk: Path):
    graph = open_run(small_disk).graph(1, {})
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.warns(DumpWarning, match="No space") as caught:
        steps(graph, 3, *[torch.ones(100)] * 40)
    assert len(caught) == 1
    filler.unlink()
    one_step(graph, torch.ones(100))
    rank = rank_of(small_disk)
    assert [step["complete"] for step in rank.steps] == [False, False, False, True]
    assert [step["calls"] for step in rank.steps] == [40, 40, 40, 1]
    assert_files_are_whole_and_claimed(rank)


def test_a_dump_that_cannot_start_for_want_of_space_leaves_the_model_alone(small_disk: Path):
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(OSError, match="No space"):
        open_run(small_disk / "raise", on_error="raise")
    with pytest.warns(DumpWarning, match="No space"):
        run = open_run(small_disk / "warn")
    graph = run.graph(1, {})
    one_step(graph, torch.ones(100))
    filler.unlink()
    one_step(graph, torch.ones(100))
    rank = rank_of(small_disk / "warn")
    assert rank.run["pid"] == os.getpid()
    assert rank.steps[-1]["complete"] is True


def test_on_error_raise_gives_the_reason_of_a_full_disk(small_disk: Path):
    graph = open_run(small_disk, on_error="raise").graph(1, {})
    with pytest.raises(OSError, match="No space left on device") as caught:
        one_step(graph, torch.ones(400_000))
    assert caught.value.filename.endswith(".npy")
    assert not os.path.exists(caught.value.filename)
    assert all(np.load(path).size < 400_000 for path in small_disk.rglob("*.npy"))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", [2, 5000])
def test_nothing_is_written_to_a_file_that_ends_in_npy(dump_path: Path, size):
    graph = open_run(dump_path).graph(1, {})
    folder = dump_path / RANK_0 / "graph_1/0"
    folder.mkdir(parents=True)
    with watched(folder) as events:
        one_step(graph, torch.zeros(size))
    assert {name for what, name in events if what == "written"}
    assert not [name for what, name in events if what == "written" and name.endswith(".npy")]
    whole = {(folder / name).stat().st_ino for what, name in events if what == "moved"}
    assert whole == {path.stat().st_ino for path in folder.glob("*.npy")}


def test_lines_of_the_manifest_are_json_of_the_strict_kind(dump_path: Path):
    dump_call(dump_path, (float("nan"), {"inf": float("inf")}), {}, -float("inf"))

    def refuse(name: str) -> None:
        raise AssertionError(name)

    for line in (dump_path / RANK_0 / "manifest.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_a_write_warns_of_nothing_for_rare_dtypes(dump_path: Path):
    halves = torch.view_as_complex(torch.ones(2, 2, dtype=torch.float16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dump_call(dump_path, (halves, halves.conj()), {}, None).load_args()


def test_arguments_that_the_operator_changed_have_files_with_their_values_after_it(
    dump_path: Path,
):
    total = torch.zeros(2)
    step = open_run(dump_path).graph(1, {}).begin_step()
    call = step.begin_call("node", "aten.op.default", (total,), {}, {})
    total.add_(1)
    call.finish(None, {"total": total})
    step.finish()
    (read_back,) = rank_of(dump_path).calls
    assert slots(read_back) == {"INPUT.0": [0, 0], "MUTATED.total": [1, 1]}
    assert difference(read_back.load_mutated(), {"total": total}) is None
    assert rank_of(dump_path).problems == []
