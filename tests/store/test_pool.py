"""The writing goes on beside the model, and is whole whatever becomes of the process."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import torchair_scope as torchair
from tests.store.support import RANK_0, one_step, start
from tests.support.disks import mounted, slowed
from torchair_scope.scope import Row
from torchair_scope.store import contents, saving
from torchair_scope.store.files import Pace
from torchair_scope.store.identity import writing
from torchair_scope.store.pool import pool
from torchair_scope.store.reader import Rank, read
from torchair_scope.store.run import DumpWarning, complete_steps, open_run
from torchair_scope.store.writer import Step

LARGE = 50_000  # elements: beyond what is hashed at once


def rank_of(path: Path) -> Rank:
    (rank,) = read(path).ranks
    return rank


def save(step: Step, *tensors: torch.Tensor, node: str = "node") -> None:
    """One call that is given the tensors and returns the first."""
    call = step.begin_call(node, "aten.op.default", tensors, {}, {})
    call.finish(tensors[0])


@pytest.fixture
def slow_disk():
    """A writer that takes its time."""
    with slowed(0.05):
        yield


@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize("lag", [0, 1])
def test_changes_in_place_after_the_call_never_reach_a_file(dump_path, slow_disk, size, lag):
    graph = open_run(dump_path).graph(1, {})
    tensor = torch.zeros(size)
    for _ in range(2):
        step = graph.begin_step(pace=Pace(lag=lag))
        for number in range(4):
            tensor.fill_(number)
            save(step, tensor, node=f"node_{number}")
        tensor.numpy()[:] = -1  # which no version counter sees
        save(step, tensor, node="node_4")
        tensor.fill_(-2)
        step.finish()
        tensor.fill_(-3)
    complete_steps()
    rank = rank_of(dump_path)
    assert rank.problems == []
    for call in rank.calls:
        expected = [0, 1, 2, 3, -1][call.order]
        assert torch.equal(call.load_args()[0][0], torch.full((size,), float(expected)))


@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize("lag", [0, 1])
def test_announced_changes_never_reach_a_file(dump_path, slow_disk, size, lag):
    graph = open_run(dump_path).graph(1, {})
    tensor = torch.zeros(size)
    for _ in range(2):
        step = graph.begin_step(pace=Pace(announced=True, lag=lag))
        for number in range(3):
            with writing([tensor[1:]]):  # a view: it is the memory that counts
                tensor.numpy()[:] = number
            save(step, tensor, node=f"node_{number}")
        step.finish()
        tensor.numpy()[:] = -1
    complete_steps()
    rank = rank_of(dump_path)
    assert rank.problems == []
    for call in rank.calls:
        assert torch.equal(call.load_args()[0][0], torch.full((size,), float(call.order)))


@pytest.mark.parametrize("announced", [False, True])
def test_a_parameter_that_changed_between_steps_is_written_anew(dump_path, announced):
    graph = open_run(dump_path).graph(1, {})
    weight = torch.nn.Parameter(torch.zeros(LARGE))
    changes = [
        lambda: None,
        lambda: weight.data.add_(1),
        lambda: None,
        lambda: weight.detach().numpy().__setitem__(7, 9.0),
        lambda: torch.autograd.graph.increment_version(weight),
        lambda: None,
    ]
    expected = []
    for change in changes:
        change()
        expected.append(weight.detach().clone())
        step = graph.begin_step(pace=Pace(announced=announced))
        save(step, weight)
        step.finish()
    rank = rank_of(dump_path)
    for call in rank.calls:
        assert torch.equal(call.load_args()[0][0], expected[call.step])
    assert [step["written"] > 0 for step in rank.steps] == [True, True, False, True, False, False]


def test_a_value_is_on_disk_once_and_each_of_its_files_has_its_number(dump_path):
    graph = open_run(dump_path).graph(1, {})
    value = torch.randn(LARGE)
    equal, other = value.clone(), torch.randn(LARGE)
    for announced in (True, False):
        step = graph.begin_step(pace=Pace(announced=announced))
        save(step, value, value[:], equal, other, value.view(2, -1), value.view(torch.int32))
        step.finish()
    rank = rank_of(dump_path)
    for call in rank.calls:
        numbers = [call.record["contents"][f"INPUT.{i}"] for i in range(6)]
        assert numbers[0] == numbers[1] == numbers[2] == call.record["contents"]["OUTPUT.0"]
        assert len(set(numbers)) == 4
    inodes = {}
    for call in rank.calls:
        for slot, path in (call.input_files | call.output_files).items():
            inodes.setdefault(call.record["contents"][slot], set()).add(path.stat().st_ino)
    assert len(inodes) == 4
    assert all(len(of_number) == 1 for of_number in inodes.values())


def test_small_values_and_numbers_are_on_disk_once(dump_path):
    graph = open_run(dump_path).graph(1, {})
    for _ in range(3):
        one_step(graph, torch.ones(4), torch.ones(4))
    files = list((dump_path / RANK_0).rglob("*.npy"))
    assert len(files) == 18
    assert len({path.stat().st_ino for path in files}) == 3  # ones, twos, and the number 1


def test_equal_bytes_of_another_dtype_or_shape_are_another_value(dump_path):
    step = open_run(dump_path).graph(1, {}).begin_step()
    zeros = torch.zeros(4)
    save(step, zeros, zeros.view(2, 2), zeros.to(torch.int32), zeros.bfloat16())
    step.finish()
    (call,) = rank_of(dump_path).calls
    numbers = call.record["contents"]
    assert numbers["INPUT.3"] == numbers["INPUT.0"]  # its file has float32
    assert len({numbers[f"INPUT.{i}"] for i in range(3)}) == 3
    assert call.load_args()[0][3].dtype is torch.bfloat16


def test_values_that_only_have_the_same_checksum_are_told_apart(dump_path, monkeypatch):
    monkeypatch.setattr(contents, "checksum", lambda data: 1)
    step = open_run(dump_path).graph(1, {}).begin_step()
    first, second = torch.zeros(LARGE), torch.ones(LARGE)
    save(step, first, second)
    step.finish()
    (call,) = rank_of(dump_path).calls
    assert torch.equal(call.load_args()[0][0], first)
    assert torch.equal(call.load_args()[0][1], second)


def test_memory_that_is_used_again_is_another_value(dump_path):
    graph = open_run(dump_path).graph(1, {})
    for announced in (True, False):
        step = graph.begin_step(pace=Pace(announced=announced))
        for number in range(20):
            save(step, torch.full((LARGE,), float(number)), node=f"node_{number}")
        step.finish()
    for call in rank_of(dump_path).calls:
        assert call.load_args()[0][0][0] == call.order


# File systems without links


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("number", ["EPERM", "ENOTSUP", "EXDEV"])
def test_without_hard_links_each_file_is_written_and_the_summary_says_so_once(
    dump_path, monkeypatch, number
):
    def refuse(*args, **kwargs):
        raise OSError(getattr(errno, number), "no links here")

    monkeypatch.setattr(os, "link", refuse)
    graph = open_run(dump_path).graph(1, {})
    value = torch.randn(LARGE)
    for _ in range(2):
        step = graph.begin_step()
        save(step, value, value)
        step.finish()
    rank = rank_of(dump_path)
    assert rank.problems == []
    for call in rank.calls:
        assert all(torch.equal(loaded, value) for loaded in call.load_args()[0])
    files = list(rank.folder.rglob("*.npy"))
    assert len({path.stat().st_ino for path in files}) == len(files) == 6
    text = str(torchair.scope.summary())
    assert text.count(str(rank.folder)) == 1
    assert "no hard links" in text


@pytest.mark.usefixtures("without_kernels")
def test_past_the_most_links_of_a_file_the_value_is_written_once_more(dump_path, monkeypatch):
    link = os.link

    def refuse(source, *args, **kwargs):
        if os.stat(source).st_nlink >= 3:
            raise OSError(errno.EMLINK, "too many links")
        return link(source, *args, **kwargs)

    monkeypatch.setattr(os, "link", refuse)
    value = torch.randn(LARGE)
    step = open_run(dump_path).graph(1, {}).begin_step()
    save(step, *[value] * 7)
    step.finish()
    rank = rank_of(dump_path)
    assert rank.problems == []
    assert all(torch.equal(loaded, value) for loaded in rank.calls[0].load_args()[0])
    assert len({path.stat().st_ino for path in rank.folder.rglob("*.npy")}) == 3


@pytest.mark.parametrize("size", [3, LARGE])
def test_eager_code_that_writes_behind_torchs_back_is_dumped_as_it_was(dump_path, size):
    graph = open_run(dump_path).graph(1, {})
    buffer = torch.zeros(size)
    for _ in range(3):
        step = graph.begin_step()
        for value in (0, 1):
            buffer.data.fill_(value)
            save(step, buffer, node=f"n{value}")
            save(step, buffer[: size - 1], node=f"part{value}")
        step.finish()
    for call in rank_of(dump_path).calls:
        (loaded,) = call.load_args()[0]
        assert loaded.unique().tolist() == [int(call.node[-1])], (call.step, call.node)


def test_a_sparse_tensor_leaves_the_others_of_its_call_alone(dump_path):
    dense, sparse = torch.ones(3), torch.eye(3).to_sparse()
    step = open_run(dump_path).graph(1, {}).begin_step()
    save(step, dense, sparse)
    step.finish()
    (call,) = rank_of(dump_path).calls
    assert list(call.record["files"]) == ["INPUT.0", "INPUT.1", "OUTPUT.0"]
    assert torch.equal(call.load_args()[0][1].to_dense(), torch.eye(3))


def test_small_values_that_nobody_waits_for_are_written_soon(dump_path):
    step = open_run(dump_path).graph(1, {}).begin_step()
    step.begin_call("node", "aten.op.default", (), {}, {}).finish(torch.ones(3))
    deadline = time.monotonic() + 20
    while not list(dump_path.rglob("*.npy")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    step.finish()


def test_small_values_count_as_in_flight_until_they_are_written(dump_path):
    most = 1 << 18
    with slowed(0.002):
        step = open_run(dump_path).graph(1, {}).begin_step(pace=Pace(max_inflight=most))
        for number in range(300):
            call = step.begin_call(f"n{number}", "aten.op.default", (), {}, {})
            call.finish(torch.randn(1000))
            assert pool().in_flight() <= most + 64 * 4000  # a batch that is being collected
        step.finish()
    assert len(list(dump_path.rglob("*.npy"))) == 300


def test_an_error_of_ours_with_small_values_is_told_and_holds_up_nobody(dump_path, monkeypatch):
    find = contents.Contents.find

    def fails(self, value):
        if value.shape == (2,):
            raise MemoryError("no more")
        return find(self, value)

    monkeypatch.setattr(contents.Contents, "find", fails)
    step = open_run(dump_path).graph(1, {}).begin_step()
    for node, size in (("a", 1), ("b", 2), ("c", 1), ("d", 3)):
        save(step, torch.ones(size), node=node)
    with pytest.warns(DumpWarning, match="no more"):
        step.finish()
    monkeypatch.undo()
    rank = rank_of(dump_path)
    for call in rank.calls:
        slots = set(call.record["files"]) | {lost["slot"] for lost in call.record["missing"]}
        assert slots == {"INPUT.0", "OUTPUT.0"}
    assert [call.record["missing"] != [] for call in rank.calls if call.node == "b"] == [True]


@pytest.mark.usefixtures("kernels")
def test_what_cannot_be_made_with_others_is_made_alone(dump_path, monkeypatch):
    make = saving.make_small

    def some_fail(folder, files):
        errors = make(folder, files[::2])
        return errors and [
            errors[i // 2] if i % 2 == 0 else errno.EMLINK for i in range(len(files))
        ]

    monkeypatch.setattr(saving, "make_small", some_fail)
    step = open_run(dump_path).graph(1, {}).begin_step()
    values = [torch.full((3,), float(number % 4)) for number in range(20)]
    for number, value in enumerate(values):
        save(step, value, node=f"n{number}")
    step.finish()
    rank = rank_of(dump_path)
    assert rank.problems == []
    assert all(torch.equal(c.load_args()[0][0], v) for c, v in zip(rank.calls, values, strict=True))


def test_a_file_that_was_removed_is_written_again(dump_path):
    graph = open_run(dump_path).graph(1, {})
    value = torch.randn(LARGE)
    for announced in (True, False, True):
        for path in (dump_path / RANK_0).rglob("*.npy"):
            path.unlink()
        step = graph.begin_step(pace=Pace(announced=announced))
        save(step, value, torch.ones(3))
        step.finish()
    call = rank_of(dump_path).calls[-1]
    assert torch.equal(call.load_args()[0][0], value)
    assert torch.equal(call.load_args()[0][1], torch.ones(3))


# The pace


def test_a_step_is_complete_when_it_returns_and_with_lag_when_the_next_one_does(
    dump_path, slow_disk
):
    graph = open_run(dump_path).graph(1, {})

    def complete_after(pace: Pace) -> list[int]:
        step = graph.begin_step(pace=pace)
        save(step, torch.randn(LARGE))
        step.finish()
        return [record["step"] for record in rank_of(dump_path).steps]

    assert complete_after(Pace()) == [0]
    assert complete_after(Pace(lag=1)) == [0]
    assert complete_after(Pace(lag=1)) == [0, 1]
    assert complete_after(Pace()) == [0, 1, 2, 3]


def test_no_more_than_max_inflight_waits_to_be_written(dump_path, monkeypatch):
    alive, most = set(), 0
    write = saving.write_npy

    def watch(folder, name, value):
        time.sleep(0.01)
        alive.discard(name)
        return write(folder, name, value)

    monkeypatch.setattr(saving, "write_npy", watch)
    step = open_run(dump_path).graph(1, {}).begin_step(pace=Pace(max_inflight=3 * 4 * LARGE))
    for number in range(20):
        call = step.begin_call(f"n{number}", "aten.op.default", (), {}, {})
        call.finish(torch.randn(LARGE))
        alive.add(f"n{number}-aten.op.default.OUTPUT.0.{call.stamp}.npy")
        most = max(most, len(alive - {p.name for p in dump_path.rglob("*.npy")}))
    step.finish()
    assert most <= 3
    assert rank_of(dump_path).problems == []


def test_threads_that_dump_at_once_share_values_and_lose_none(dump_path):
    graph = open_run(dump_path).graph(1, {})
    shared = torch.randn(LARGE)

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for number in range(10):
            step = graph.begin_step(pace=Pace(announced=number % 2 == 0, lag=number % 3 % 2))
            save(step, torch.randn(LARGE, generator=generator), shared, node=f"by_{seed}")
            step.finish()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    complete_steps()
    rank = rank_of(dump_path)
    assert rank.problems == []
    assert len(rank.steps) == 40
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        calls = sorted((c for c in rank.calls if c.node == f"by_{seed}"), key=lambda c: c.step)
        for call in calls:
            own, common = call.load_args()[0]
            assert torch.equal(own, torch.randn(LARGE, generator=generator))
            assert torch.equal(common, shared)


# Ends


LAGGING = """
    from torchair_scope.store import saving
    from torchair_scope.store.files import Pace
    write = saving.write_npy
    def write_slowly(*args):
        time.sleep(0.02)
        return write(*args)
    saving.write_npy = write_slowly
    graph = open_run(sys.argv[1]).graph(1, {})
    def run(pace):
        step = graph.begin_step(pace=pace)
        for number in range(8):
            call = step.begin_call(f"n{number}", "aten.op.default", (torch.randn(9000),), {}, {})
            call.finish(torch.randn(9000))
        return step
"""


def assert_whole(path: Path, calls: int) -> Rank:
    rank = rank_of(path)
    assert len(rank.calls) == calls
    assert sum(len(call.record["files"]) for call in rank.calls) == 2 * calls
    for file in rank.folder.rglob("*"):
        if file.is_file() and file.name != "manifest.jsonl":
            np.load(file)
    return rank


@pytest.mark.parametrize("end", ["pass", "raise RuntimeError", "sys.exit(3)"])
def test_at_exit_what_was_handed_over_is_written(dump_path, end):
    script = LAGGING + f"    run(Pace(lag=1)).finish()\n    {end}\n"
    with start(script, dump_path) as process:
        process.communicate(timeout=60)
    assert process.returncode == {"pass": 0, "raise RuntimeError": 1, "sys.exit(3)": 3}[end]
    assert assert_whole(dump_path, 8).problems == []


HANDLERS = {
    "": -signal.SIGTERM,
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))": 7,
}


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("pace", ["Pace(lag=1)", "Pace()"])
def test_after_sigterm_what_was_handed_over_is_written_and_the_status_is_kept(
    dump_path, handler, pace
):
    script = f"    import signal\n    {handler or 'pass'}\n" + LAGGING
    script += f"    step = run({pace})\n    print('ready', flush=True)\n    time.sleep(60)\n"
    with start(script, dump_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == HANDLERS[handler]
    assert_whole(dump_path, 8)


def test_a_child_that_is_terminated_leaves_its_parents_dump_alone(dump_path):
    script = (
        LAGGING
        + """
    run(Pace(lag=1)).finish()
    child = os.fork()
    if not child:
        time.sleep(60)
    time.sleep(0.1)
    os.kill(child, 15)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    )
    with start(script, dump_path) as process:
        printed, errors = process.communicate(timeout=60)
    assert (printed, process.returncode) == ("-15\n", 0), errors
    assert assert_whole(dump_path, 8).problems == []


KILLED = """
    import random
    from torchair_scope.store.files import Pace
    torch.set_num_threads(1)
    values = [torch.randn(size) for size in (1, 16, 2000, 40000)]
    def dump(folder, seed):
        generator = random.Random(seed)
        graph = open_run(folder).graph(1, {})
        for number in range(10 ** 6):
            step = graph.begin_step(pace=Pace(announced=seed % 2 == 0, lag=number % 2))
            for position in range(4):
                value = generator.choice(values) + generator.randrange(3)
                call = step.begin_call(f"n{position}", "aten.op.default", (value, 1), {}, {})
                call.finish([value, value * 2])
            step.finish()
    for line in sys.stdin:
        folder, seed, seconds = line.split()
        child = os.fork()
        if not child:
            dump(folder, int(seed))
        time.sleep(float(seconds))
        os.kill(child, 9)
        os.waitpid(child, 0)
        print(folder, flush=True)
"""


@pytest.mark.slow
def test_after_a_thousand_kills_all_files_are_whole_and_all_records_true(tmp_path):
    generator = random.Random(0)
    files = records = cut = 0
    with start(KILLED) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(1000):
            seconds = generator.uniform(0.003, 0.06)
            process.stdin.write(f"{tmp_path / str(number)} {number} {seconds}\n")
            process.stdin.flush()
            folder = Path(process.stdout.readline().strip())
            counts = assert_sound_after_a_kill(folder / RANK_0)
            files, records, cut = files + counts[0], records + counts[1], cut + counts[2]
            subprocess.run(["rm", "-r", str(folder)], check=False)
        process.stdin.close()
        process.wait(timeout=60)
    # That there was something to look at: how much depends on the machine.
    assert files > 1_000
    assert records > 100


def assert_sound_after_a_kill(folder: Path) -> tuple[int, int, int]:
    """Give the number of files, of call records, and of cut lines."""
    names = set()
    for path in folder.rglob("*.npy"):
        array = np.load(path)
        assert array.dtype in (np.float32, np.int64)
        names.add(str(path.relative_to(folder)))
    manifest = folder / "manifest.jsonl"
    if not manifest.exists():
        return len(names), 0, 0
    *lines, last = manifest.read_bytes().split(b"\n")
    records = [json.loads(line) for line in lines]
    calls = [record for record in records if record["record"] == "call"]
    for call in calls:
        claimed = {f"graph_1/{call['step']}/{name}" for name in call["files"].values()}
        assert claimed <= names
    return len(names), len(calls), bool(last)


# A full disk


@pytest.fixture
def tmpfs(tmp_path):
    """A file system of 64 MiB."""
    with mounted(tmp_path / "disk", "64m") as folder:
        yield folder


@pytest.mark.parametrize("lag", [0, 1])
def test_a_disk_that_fills_up_breaks_neither_the_model_nor_a_file_nor_the_account(tmpfs, lag):
    def model(x: torch.Tensor) -> torch.Tensor:
        for number in range(12):
            x = x.sin() + number
        return x

    def scoped(x: torch.Tensor) -> torch.Tensor:
        with torchair.scope.data_dump("filling"):
            return model(x)

    options = {"path": str(tmpfs / "dump"), "backend": "aot_eager"}
    compiled = torch.compile(scoped, backend="torchair_scope", options=options, fullgraph=True)

    def run() -> list[Row]:
        for number in range(4):
            x = torch.randn(400_000, generator=torch.Generator().manual_seed(number))
            assert torch.equal(compiled(x), model(x))
        return torchair.scope.summary().rows

    with (
        torchair.scope.configure(lag=lag, min_free=0),
        pytest.warns(DumpWarning, match="No space left on device") as caught,
    ):
        rows = run()
    assert len(caught) == 1
    (row,) = rows
    rank = rank_of(tmpfs / "dump")
    files = [path for path in rank.folder.rglob("*") if path.is_file()]
    assert [path.name for path in files if path.suffix != ".npy"] == ["manifest.jsonl"]
    for path in rank.folder.rglob("*.npy"):
        np.load(path)
    claimed = [name for call in rank.calls for name in call.record["files"].values()]
    assert sorted(claimed) == sorted(path.name for path in files if path.suffix == ".npy")
    missing = [lost for call in rank.calls for lost in call.record["missing"]]
    assert {lost["reason"] for lost in missing} == {"No space left on device"}
    assert row.missing_tensors == {"No space left on device": len(missing)}
    assert row.calls == len(rank.calls)
    assert row.tagged == row.dumped + sum(row.missing.values())
