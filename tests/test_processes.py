"""Many processes and many threads: each has its own dump, and none disturbs another."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.support import programs
from tests.support.bits import difference
from tests.support.replay import assert_replays
from torchair_scope.scope import data_dump
from torchair_scope.store.reader import Rank, read

ROOT = Path(__file__).parent.parent
RANKS = range(4)


def start(program: str, folder: Path, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.programs", program, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment},
    )


def finish(processes: list[subprocess.Popen]) -> list[str]:
    """What the processes said; none of them may fail, or run for longer than three minutes."""
    try:
        said = [process.communicate(timeout=180)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), said
    return said


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Path:
    """The folder in which four processes, with the environment of torchrun, ran all their parts."""
    folder = tmp_path_factory.mktemp("ranks")
    everywhere = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in RANKS]
    said = finish([start("ranks", folder, **everywhere, **mine) for mine in own])
    assert not any("DumpWarning" in text for text in said), said
    return folder


def results_in(folder: Path) -> list:
    return [torch.load(folder / f"result_{rank}.pt") for rank in RANKS]


def rank_of(folder: Path, position: int = 0) -> Rank:
    rank = read(folder / "dump").ranks[position]
    assert rank.problems == []
    return rank


def folders(path: Path) -> list[str]:
    return sorted(folder.name for folder in path.iterdir())


@pytest.mark.slow
def test_each_rank_has_its_own_folder_with_its_collectives_and_what_waits_for_them(ranks):
    folder = ranks / "collective"
    results = results_in(folder)
    assert folders(folder / "dump") == [f"worldsize4_global_rank{rank}" for rank in RANKS]
    given = [[2 * (programs.of_rank(rank) + step) for rank in RANKS] for step in range(2)]
    total = [sum(tensors) for tensors in given]
    for rank in RANKS:
        assert difference(results[rank], [tensor + 1 for tensor in total]) is None
        dump = rank_of(folder, rank)
        assert (dump.run["rank"], dump.run["world_size"]) == (rank, 4)
        assert [(call.step, call.target, call.scope) for call in dump.calls] == [
            (step, f"_c10d_functional.{operator}.default", "exchange")
            for step in range(2)
            for operator in ("all_reduce", "wait_tensor")
        ]
        for reduce, wait in (dump.calls[:2], dump.calls[2:]):
            assert difference(reduce.load_args()[0][0], given[reduce.step][rank]) is None
            assert difference(wait.load_outputs(), total[wait.step]) is None


@pytest.mark.slow
def test_what_arrives_while_one_waits_for_a_collective_is_dumped_as_it_arrives(ranks):
    folder = ranks / "late_rank"
    results = results_in(folder)
    one_row = sum(programs.of_rank(rank) for rank in RANKS)
    totals = [one_row.repeat(size // 4) for size in programs.SIZES]
    for rank in RANKS:
        assert difference(results[rank], [total.sin() + 1 for total in totals]) is None
        calls = rank_of(folder, rank).calls
        waits = [call for call in calls if "wait_tensor" in call.target]
        users = [call for call in calls if call.target == "aten.sin.default"]
        for wait, user, total in zip(waits, users, totals, strict=True):
            assert difference(wait.load_outputs(), total) is None
            assert difference(user.load_args()[0][0], total) is None


@pytest.mark.slow
def test_a_rank_may_dump_alone(ranks):
    folder = ranks / "one_rank"
    results = results_in(folder)
    total = sum(2 * programs.of_rank(rank) for rank in RANKS)
    assert difference(results, [[4 * (total + 1)] * 2] * 4) is None
    assert folders(folder / "dump") == ["worldsize4_global_rank1"]
    calls = rank_of(folder).calls
    of_the_model = [call.target for call in calls if call.scope == "inside"]
    assert of_the_model == [
        "aten.mul.Tensor",
        "_c10d_functional.all_reduce.default",
        "_c10d_functional.wait_tensor.default",
    ]
    around = [call.target for call in calls if call.kind == "eager"]
    assert sum("all_reduce" in target for target in around) == 2


@pytest.mark.slow
def test_a_disk_that_is_slow_over_many_steps_trips_no_timeout_of_a_collective(ranks):
    folder = ranks / "slow_disk"
    facts = results_in(folder)
    assert facts[programs.SLOW_RANK]["seconds"] > programs.TIMEOUT.total_seconds()
    given = [
        [programs.of_rank(rank) + step for rank in RANKS] for step in range(programs.SLOW_STEPS)
    ]
    totals = [sum(x.sin() for x in tensors) for tensors in given]
    for rank in RANKS:
        torch.testing.assert_close(facts[rank]["results"], [total + 1 for total in totals])
        assert len(rank_of(folder, rank).steps) == programs.SLOW_STEPS


@pytest.mark.slow
def test_files_that_take_longer_than_a_collective_may_trip_no_timeout_if_a_step_need_not_wait(
    ranks,
):
    facts = results_in(ranks / "very_slow_disk")
    total = sum(programs.of_rank(rank).sin() for rank in RANKS)
    for rank in RANKS:
        torch.testing.assert_close(facts[rank]["results"], [total + 1] * programs.SLOW_STEPS)
        assert len(rank_of(ranks / "very_slow_disk", rank).steps) == 1
        assert facts[rank]["running"] < programs.TIMEOUT.total_seconds()
    assert facts[programs.SLOW_RANK]["seconds"] > programs.TIMEOUT.total_seconds()


def values(rank: Rank) -> list[float]:
    """The first element of what each call gave."""
    return [call.load_outputs().flatten()[0].item() for call in rank.calls]


def children_of(path: Path) -> list[Rank]:
    """The dumps that processes wrote beside that of their parent."""
    parent = path / "worldsize1_global_rank0"
    found = [read(folder).ranks[0] for folder in sorted(path.glob(f"{parent.name}.pid*"))]
    pid = rank_of(path.parent).run["pid"]
    assert all(child.run["pid"] != pid for child in found)
    assert len(found) == len(list(path.iterdir())) - 1
    return found


def test_a_forked_child_dumps_beside_its_parent_what_it_runs_of_its_parents_code(tmp_path):
    finish([start("fork_after_a_run", tmp_path)])
    sin = [torch.tensor(value).sin().item() for value in (1.0, 2.0, 3.0, 4.0)]
    parent, (child,) = rank_of(tmp_path), children_of(tmp_path / "dump")
    assert values(parent) == pytest.approx([sin[0] + 1, sin[3] + 1])
    assert child.problems == []
    assert values(child) == pytest.approx([sin[1] + 1, sin[2] + 1])


def test_a_child_that_is_forked_in_a_scope_writes_nothing_into_it(tmp_path):
    finish([start("fork_in_a_scope", tmp_path)])
    assert [call.node for call in rank_of(tmp_path).calls] == ["zeros", "ones"]
    for child in children_of(tmp_path / "dump"):
        assert child.problems == []
        assert set(values(child)) <= {2.0, 3.0}


def test_workers_of_a_data_loader_dump_beside_their_parent(tmp_path):
    finish([start("data_loader", tmp_path)])
    outside, inside = torch.load(tmp_path / "result_0.pt")
    samples = torch.arange(8.0).square().view(4, 2, 1).expand(4, 2, 2)
    assert torch.equal(torch.stack(outside), samples)
    assert torch.equal(torch.stack(inside), samples + 1)
    parent, children = rank_of(tmp_path), children_of(tmp_path / "dump")
    assert {call.scope for call in parent.calls} == {"parent"}
    assert [call.target for call in parent.calls].count("aten.add.Tensor") == 4
    for child in children:
        assert child.problems == []
        assert "sample" in {call.scope for call in child.calls}


def test_eight_threads_share_a_compiled_model_inside_and_outside_scopes(dump_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    model.requires_grad_(False)
    inputs = torch.randn(8, 5, 3, 4)
    options = {"path": str(dump_path), "backend": "aot_eager"}
    compiled = torch.compile(model, backend="torchair_scope", options=options, fullgraph=True)
    compiled(inputs[0, 0])
    together = threading.Barrier(8)

    def work(thread: int) -> list[torch.Tensor]:
        scope = contextlib.nullcontext if thread % 2 else functools.partial(data_dump, str(thread))
        together.wait()
        results = []
        for x in inputs[thread]:
            with scope():
                results.append(compiled(x))
        return results

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    assert difference(results, [[model(x) for x in own] for own in inputs]) is None
    (rank,) = read(dump_path).ranks
    assert rank.problems == []
    assert_replays(read(dump_path))
    for thread in range(8):
        own = [call for call in rank.calls if call.scope == str(thread)]
        names = ["t", "addmm", "gelu", "t_1", "addmm_1"] * (0 if thread % 2 else 5)
        assert [call.node for call in own] == names
        for call, x in zip(own[1::5], inputs[thread], strict=False):
            assert torch.equal(call.load_args()[0][1], x)


def test_a_scope_opened_while_another_thread_compiles_is_dumped_and_leaves_that_graph_alone(
    dump_path, monkeypatch
):
    monkeypatch.setenv("TORCHAIR_SCOPE_PATH", str(dump_path))
    tracing, in_scope, traced = threading.Event(), threading.Event(), threading.Event()

    @torch.compiler.assume_constant_result
    def meanwhile() -> float:
        tracing.set()
        in_scope.wait(60)
        return 1.0

    def open_a_scope() -> None:
        tracing.wait(60)
        with data_dump("mine"):
            torch.full((3,), 2.0)
            in_scope.set()
            traced.wait(60)
            torch.zeros(3)

    thread = threading.Thread(target=open_a_scope)
    thread.start()
    function = torch.compile(lambda x: x * meanwhile() + 1, backend="torchair_scope")
    assert torch.equal(function(torch.ones(3)), torch.full((3,), 2.0))
    traced.set()
    thread.join()
    (rank,) = read(dump_path).ranks
    assert [(call.kind, call.node) for call in rank.calls] == [
        ("eager", "full"),
        ("eager", "zeros"),
    ]
