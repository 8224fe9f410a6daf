from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.store.support import RANK_0, files, one_step, run, running
from torchair_scope.store.reader import read
from torchair_scope.store.run import DumpWarning, open_run

STAMP = "20250102030405123456"
DUMP_AND_END = """
    one_step(open_run(sys.argv[1]).graph(1, {}), torch.ones(2))
"""
DUMP_AND_STAY = """
    graph = open_run(sys.argv[1]).graph(1, {})
    one_step(graph, torch.ones(2))
    print("ready", flush=True)
    sys.stdin.readline()
"""


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]


def earlier_run(dump_path: Path, **facts) -> Path:
    """A rank folder whose run record has these facts."""
    folder = dump_path / RANK_0
    folder.mkdir(parents=True)
    record = {"record": "run", "time": STAMP, "host": socket.gethostname(), **facts}
    (folder / "manifest.jsonl").write_text(json.dumps(record) + "\n")
    return folder


def test_a_process_has_one_run_in_a_folder_however_it_is_spelled(dump_path: Path):
    first = open_run(dump_path)
    (dump_path.parent / "link").symlink_to(dump_path)
    assert open_run(str(dump_path)) is first
    assert open_run(dump_path.parent / "link") is first
    assert open_run(dump_path, on_error="raise").folder == first.folder
    assert len(records(dump_path / RANK_0)) == 1


def test_without_a_path_the_dump_goes_to_the_current_folder(tmp_path: Path):
    assert open_run().folder == str(tmp_path / RANK_0)


def test_the_rank_of_the_environment_names_the_folder(dump_path: Path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    run = open_run(dump_path)
    assert Path(run.folder).name == "worldsize8_global_rank3"
    record = read(dump_path).ranks[0].run
    assert (record["rank"], record["world_size"]) == (3, 8)


def test_the_run_record_says_who_wrote_the_dump(dump_path: Path):
    open_run(dump_path)
    record = read(dump_path).ranks[0].run
    assert record["pid"] == os.getpid()
    assert record["host"] == socket.gethostname()
    assert record["command"] == sys.orig_argv
    assert record["versions"]["torch"] == torch.__version__
    assert record["versions"]["numpy"] == np.__version__
    assert re.fullmatch(r"\d{20}", record["time"])


def test_files_and_folders_are_closed_to_others(dump_path: Path):
    old_mask = os.umask(0)
    try:
        one_step(open_run(dump_path / "deep").graph(1, {}), torch.ones(2))
    finally:
        os.umask(old_mask)
    modes = {oct(path.stat().st_mode & 0o777) for path in dump_path.rglob("*") if path.is_file()}
    assert modes == {"0o640"}
    folders = [dump_path, *(path for path in dump_path.rglob("*") if path.is_dir())]
    assert {oct(folder.stat().st_mode & 0o777) for folder in folders} == {"0o750"}


def test_an_unknown_on_error_is_refused_with_the_legal_values(dump_path: Path):
    with pytest.raises(ValueError, match=r"on_error='ignore': expected 'warn' or 'raise'"):
        open_run(dump_path, on_error="ignore")
    assert not dump_path.exists()


# An earlier run


def test_an_earlier_run_is_moved_aside_under_its_time_and_loses_nothing(dump_path: Path):
    run(DUMP_AND_END, dump_path)
    before = files(dump_path / RANK_0)
    time = records(dump_path / RANK_0)[0]["time"]
    aside = dump_path / f"{RANK_0}.{time}"
    with pytest.warns(DumpWarning, match=re.escape(str(aside))):
        one_step(open_run(dump_path).graph(1, {}), torch.zeros(3))
    assert files(aside) == before
    assert len(before) == 4
    ranks = read(dump_path).ranks
    assert [rank.folder.name for rank in ranks] == [RANK_0]
    assert ranks[0].run["pid"] == os.getpid()
    assert read(aside).ranks[0].problems == []


def test_a_dump_without_a_manifest_is_moved_aside_as_well(dump_path: Path):
    step = dump_path / RANK_0 / "graph_1" / "0"
    step.mkdir(parents=True)
    np.save(step / "add-aten.add.Tensor.INPUT.0.npy", np.ones(2))
    os.utime(dump_path / RANK_0, (0, 1_000_000_000.25))
    with pytest.warns(DumpWarning, match="earlier run"):
        open_run(dump_path)
    moved = dump_path / f"{RANK_0}.20010909014640250000"
    assert list(files(moved)) == ["graph_1/0/add-aten.add.Tensor.INPUT.0.npy"]


def test_a_second_folder_with_the_same_time_gets_a_number(dump_path: Path):
    earlier_run(dump_path)
    (dump_path / f"{RANK_0}.{STAMP}").mkdir()
    with pytest.warns(DumpWarning):
        open_run(dump_path)
    assert (dump_path / f"{RANK_0}.{STAMP}.1" / "manifest.jsonl").exists()


def test_a_time_that_is_none_does_not_lead_out_of_the_dump_folder(dump_path: Path):
    earlier_run(dump_path, time="../../elsewhere")
    with pytest.warns(DumpWarning):
        open_run(dump_path)
    assert {path.parent for path in dump_path.glob(f"{RANK_0}*")} == {dump_path}
    assert not (dump_path.parent / "elsewhere").exists()


def test_an_empty_rank_folder_is_used_without_a_word(dump_path: Path):
    (dump_path / RANK_0).mkdir(parents=True)
    assert open_run(dump_path).folder == str(dump_path / RANK_0)


def test_a_process_that_still_runs_keeps_its_folder_until_it_ends(dump_path: Path):
    with running(DUMP_AND_STAY, dump_path) as other:
        before = files(dump_path / RANK_0)
        with pytest.warns(DumpWarning, match=f"process {other.pid}.*pid{os.getpid()}"):
            one_step(open_run(dump_path).graph(1, {}), torch.zeros(3))
        own = dump_path / f"{RANK_0}.pid{os.getpid()}"
        assert open_run(dump_path).folder == str(own)
        assert read(own).ranks[0].run["pid"] == os.getpid()
        assert files(dump_path / RANK_0) == before
        # One that was killed and is not yet waited for has ended.
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        dump_path.rename(dump_path.with_name("other"))
        with pytest.warns(DumpWarning, match="earlier run"):
            assert open_run(dump_path.with_name("other")).folder.endswith(RANK_0)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="process start times need /proc")
def test_a_process_number_that_was_given_to_another_process_does_not_count(dump_path: Path):
    earlier_run(dump_path, pid=os.getppid(), process_start=1)
    with pytest.warns(DumpWarning, match="earlier run"):
        assert open_run(dump_path).folder == str(dump_path / RANK_0)


def test_a_run_of_another_host_is_left_alone(dump_path: Path):
    earlier_run(dump_path, pid=1, host="elsewhere.example")
    with pytest.warns(DumpWarning, match=r"elsewhere\.example"):
        assert open_run(dump_path).folder == str(dump_path / f"{RANK_0}.pid{os.getpid()}")


def test_processes_that_start_together_never_share_a_folder(dump_path: Path):
    script = """
        print("ready", flush=True)
        sys.stdin.readline()
        warnings.simplefilter("ignore")
        one_step(open_run(sys.argv[1]).graph(1, {}), torch.ones(2))
        print("done", flush=True)
        sys.stdin.readline()
    """
    with running(script, dump_path) as first, running(script, dump_path) as second:
        for process in (first, second):
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in (first, second):
            assert process.stdout.readline() == "done\n"
        folders = list(dump_path.iterdir())
        assert len(folders) == 2
        assert {read(f).ranks[0].run["pid"] for f in folders} == {first.pid, second.pid}
        assert [read(f).problems for f in folders] == [[], []]


# Forks


def test_a_forked_child_writes_beside_its_parent(dump_path: Path):
    script = """
        graph = open_run(sys.argv[1]).graph(1, {"direction": "inference"})
        one_step(graph, torch.ones(2))
        open_step = graph.begin_step()
        child = os.fork()
        if child == 0:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                one_step(graph, torch.zeros(3))
                one_step(open_run(sys.argv[1]).graph(2, {}), torch.zeros(3))
                add_call(open_step, torch.zeros(3))
                open_step.finish()
            print(os.getpid(), [str(warning.message) for warning in caught], flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        open_step.finish()
        one_step(graph, torch.ones(2))
    """
    child, _, warned = run(script, dump_path).partition(" ")
    assert f"pid{child}" in warned
    (parents,) = read(dump_path).ranks
    assert [(call.graph, call.step) for call in parents.calls] == [(1, 0), (1, 2)]
    assert parents.problems == []
    (childs,) = read(dump_path / f"{RANK_0}.pid{child}").ranks
    assert childs.run["pid"] == int(child)
    assert [record["graph"] for record in childs.graphs] == [1, 2]
    assert childs.graphs[0]["direction"] == "inference"
    assert [(call.graph, call.step) for call in childs.calls] == [(1, 0), (2, 0)]
    assert childs.problems == []


# Paths that cannot be


@pytest.mark.parametrize("inside", ["", "deeper/still"])
def test_a_path_that_is_a_file_is_refused_by_name(tmp_path: Path, inside: str):
    (tmp_path / "file").write_text("keep")
    path = tmp_path / "file" / inside
    with pytest.raises(NotADirectoryError, match=re.escape(f"cannot dump to {path}")) as caught:
        open_run(path)
    assert caught.value.filename == str(path)
    assert (tmp_path / "file").read_text() == "keep"


def test_a_rank_folder_that_is_a_file_is_refused_by_name(dump_path: Path):
    dump_path.mkdir()
    (dump_path / RANK_0).touch()
    with pytest.raises(NotADirectoryError, match=re.escape(str(dump_path / RANK_0))):
        open_run(dump_path)


def test_a_refused_path_can_be_used_once_it_is_right(dump_path: Path):
    dump_path.touch()
    with pytest.raises(NotADirectoryError):
        open_run(dump_path)
    dump_path.unlink()
    one_step(open_run(dump_path).graph(1, {}), torch.ones(2))
    assert read(dump_path).problems == []


def test_a_folder_without_permission_is_refused_by_name(tmp_path_factory):
    script = """
        import tempfile
        base = Path(tempfile.mkdtemp())
        base.chmod(0o555)
        if os.geteuid() == 0:
            os.seteuid(65534)
        for path in (base, base / "new" / "dump"):
            try:
                open_run(path)
            except PermissionError as error:
                assert error.filename == str(path), error
                assert str(path) in error.strerror, error
            else:
                raise AssertionError(path)
        os.seteuid(os.getuid())
        assert list(base.iterdir()) == []
        base.rmdir()
    """
    run(script)


# A dump that is deleted under way


def test_a_dump_deleted_between_steps_starts_anew_with_all_its_records(dump_path: Path):
    graph = open_run(dump_path).graph(1, {"direction": "forward"})
    one_step(graph, torch.ones(2))
    shutil.rmtree(dump_path)
    one_step(graph, torch.ones(2))
    (rank,) = read(dump_path).ranks
    assert rank.problems == []
    assert rank.run["pid"] == os.getpid()
    assert rank.graphs[0]["direction"] == "forward"
    assert [call.step for call in rank.calls] == [1]


def test_a_folder_that_another_process_took_over_meanwhile_is_not_written_to(dump_path: Path):
    graph = open_run(dump_path).graph(1, {})
    shutil.rmtree(dump_path)
    with running(DUMP_AND_STAY, dump_path):
        before = files(dump_path / RANK_0)
        with pytest.warns(DumpWarning, match=f"pid{os.getpid()}"):
            one_step(graph, torch.zeros(3))
        assert files(dump_path / RANK_0) == before
        assert read(dump_path / f"{RANK_0}.pid{os.getpid()}").problems == []


def test_a_killed_process_leaves_whole_files_and_at_most_one_cut_line(dump_path: Path):
    script = """
        graph = open_run(sys.argv[1]).graph(1, {})
        print("ready", flush=True)
        while True:
            one_step(graph, torch.ones(100, 100), torch.ones(5))
    """
    for attempt in range(3):
        with running(script, dump_path / str(attempt)) as process:
            signal.sigtimedwait([], 0.05 + 0.0317 * attempt)
            process.kill()
            process.wait()
        folder = dump_path / str(attempt) / RANK_0
        arrays = [np.load(path) for path in folder.rglob("*.npy")]
        assert {array.size for array in arrays} <= {1, 5, 10_000}
        lines = (folder / "manifest.jsonl").read_bytes().split(b"\n")
        assert all(json.loads(line) for line in lines[:-1])
        for call in read(folder).ranks[0].calls:
            assert call.load_args()[0][0].numel() in (5, 10_000)


def test_opening_a_run_warns_of_nothing(dump_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_step(open_run(dump_path).graph(1, {}), torch.ones(2))
