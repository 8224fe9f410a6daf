"""Runs of a cut graph: threads, memory, wrong paths and full disks."""

import gc
import os
import threading
import weakref

import pytest
import torch

import torchair_scope as torchair
from tests.support.disks import mounted
from torchair_scope.store.reader import read
from torchair_scope.store.run import DumpWarning


def compile_scoped(path, scale=3.0, on_error="warn"):
    def function(x):
        x = x * scale
        with torchair.scope.data_dump("shift"):
            x = x + 1
        return x.sin()

    options = {"path": str(path), "backend": "aot_eager", "on_error": on_error}
    return torch.compile(function, backend="torchair_scope", options=options)


def expected(x, scale=3.0):
    return (x * scale + 1).sin()


def test_eight_threads_share_one_compiled_graph_and_each_step_is_whole(dump_path):
    function = compile_scoped(dump_path)
    function(torch.full((4,), -1.0))
    wrong = []

    def work(seed):
        for index in range(5):
            x = torch.full((4,), float(seed * 10 + index))
            if not torch.equal(function(x), expected(x)):
                wrong.append((seed, index))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    (rank,) = read(dump_path).ranks
    assert sorted(step["step"] for step in rank.steps) == list(range(41))
    assert all(step["complete"] for step in rank.steps)
    values = set()
    for call in rank.calls:
        (before, one), _ = call.load_args()
        assert torch.equal(before + one, call.load_outputs())
        values.add(before[0].item())
    assert len(values) == 41


def test_a_path_that_is_a_file_is_an_error_before_any_work(tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("mine")
    with pytest.raises(NotADirectoryError, match="taken"):
        compile_scoped(taken)(torch.ones(2))
    assert taken.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_a_path_without_permission_is_an_error_before_any_work(tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o700)
    function = compile_scoped(locked / "dump")
    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(2))
    os.seteuid(65534)
    try:
        with pytest.raises(PermissionError, match="locked"):
            function(torch.ones(2))
    finally:
        os.seteuid(0)


@pytest.fixture
def small_disk(tmp_path, monkeypatch):
    """A disk of one MiB, which may be filled to the last byte."""
    monkeypatch.setenv("TORCHAIR_SCOPE_MIN_FREE", "0")
    with mounted(tmp_path / "disk", "1m") as folder:
        yield folder


def test_on_a_full_disk_the_results_stay_right_and_one_warning_names_the_file(small_disk):
    function = compile_scoped(small_disk)
    inputs = torch.rand(4, 100_000)
    with pytest.warns(DumpWarning, match=r"npy.*No space left") as warned:
        results = [function(x) for x in inputs]
    assert len([warning for warning in warned if warning.category is DumpWarning]) == 1
    assert all(torch.equal(*pair) for pair in zip(results, map(expected, inputs), strict=True))
    (rank,) = read(small_disk).ranks
    assert not all(step["complete"] for step in rank.steps)
    for call in rank.calls:
        for path in call.input_files.values():
            assert path.stat().st_size > 128


def test_a_small_disk_is_left_with_its_floor_and_has_statistics_only(small_disk, monkeypatch):
    monkeypatch.delenv("TORCHAIR_SCOPE_MIN_FREE")
    function = compile_scoped(small_disk)
    inputs = torch.rand(4, 100_000)
    with pytest.warns(DumpWarning, match="disk: less than 1 GiB of it would be free") as warned:
        results = [function(x) for x in inputs]
    assert len([warning for warning in warned if warning.category is DumpWarning]) == 1
    assert all(torch.equal(*pair) for pair in zip(results, map(expected, inputs), strict=True))
    assert not list(small_disk.rglob("*.npy"))
    assert len(list(small_disk.rglob("stats.csv"))) == 4


def test_on_error_raise_stops_the_model_on_a_full_disk(small_disk):
    function = compile_scoped(small_disk, on_error="raise")
    function(torch.rand(10))
    with pytest.raises(OSError, match="No space left"):
        function(torch.rand(1_000_000))


def test_nothing_of_a_run_is_kept_when_it_is_over(dump_path):
    function = compile_scoped(dump_path)
    function(torch.zeros(1000))
    x = torch.ones(1000)
    result = function(x)
    dead = [weakref.ref(x.untyped_storage()), weakref.ref(result.untyped_storage())]
    watched = [weakref.ref(x), weakref.ref(result)]
    del x, result
    gc.collect()
    assert [reference() for reference in watched] == [None, None]
    assert [reference() for reference in dead] == [None, None]


def test_an_operator_that_fails_raises_its_own_error_and_the_step_is_incomplete(dump_path):
    def function(x, index):
        with torchair.scope.data_dump():
            return torch.gather(x.sin(), 0, index)

    options = {"path": str(dump_path), "backend": "aot_eager"}
    compiled = torch.compile(function, backend="torchair_scope", options=options)
    compiled(torch.ones(3), torch.tensor([1]))
    with pytest.raises(RuntimeError, match="out of bounds"):
        compiled(torch.ones(3), torch.tensor([7]))
    (rank,) = read(dump_path).ranks
    assert [step["complete"] for step in rank.steps] == [True, False]
    assert [call.node for call in rank.calls if call.step == 1] == ["sin", "gather"]
    assert not rank.calls[-1].finished
    assert rank.calls[-1].input_files
