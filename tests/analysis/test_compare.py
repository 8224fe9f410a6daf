"""Pairs and verdicts beyond planted faults: other graphs, missing parts, other machines."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import pytest
import torch

import torchair_scope
from tests.analysis.conftest import rank_folder, without_manifest
from torchair_scope.analysis import executors
from torchair_scope.analysis.numerics import Tolerance
from torchair_scope.store.run import open_run


def write_dump(path, calls, direction="inference", nodes=()):
    """Dump calls `(node, target, args, result, facts)` as one step of one graph."""
    step = open_run(path).graph(1, {"direction": direction, "nodes": list(nodes)}).begin_step()
    for node, target, args, result, facts in calls:
        step.begin_call(node, target, args, {}, facts).finish(result)
    step.finish()
    return path


def chain(values, operators, names=None, facts=None):
    """Calls that hand their result on."""
    calls = []
    for position, operator in enumerate(operators):
        name = names[position] if names else f"{operator}_{position}"
        result = getattr(torch.ops.aten, operator).default(values)
        calls.append((name, f"aten.{operator}.default", (values,), result, (facts or {})))
        values = result
    return calls


X = torch.linspace(0.1, 0.9, 30).reshape(5, 6)


def test_a_dump_without_a_manifest_is_compared_by_its_names(float32_dump, faulty_dump):
    comparison = torchair_scope.compare(without_manifest(float32_dump), faulty_dump)
    assert (comparison.verdict.kind, comparison.verdict.call.pair.target.node) == ("made", "sub")
    assert {result.pair.rule for result in comparison.results} == {"name"}
    assert any("no manifest" in note for note in comparison.notes)


def test_a_target_without_a_manifest_is_judged_as_far_as_that_goes(sound_dumps, float32_dump):
    comparison = torchair_scope.compare(sound_dumps["float32"], without_manifest(float32_dump))
    assert comparison.verdict.kind == "agrees"


def test_other_graph_and_step_numbers_do_not_matter(sound_dumps, float32_dump):
    manifest = rank_folder(float32_dump) / "manifest.jsonl"
    lines = []
    for line in manifest.read_text().splitlines():
        record = json.loads(line)
        if "graph" in record:
            record["graph"] += 40
        lines.append(json.dumps(record))
    manifest.write_text("\n".join(lines) + "\n")
    for folder in rank_folder(float32_dump).glob("graph_*"):
        folder.rename(folder.with_name(f"graph_{int(folder.name[6:]) + 40}"))
    comparison = torchair_scope.compare(sound_dumps["float32"], float32_dump)
    assert comparison.verdict.kind == "agrees"
    assert not comparison.only_golden
    for result in comparison.results:
        assert result.pair.golden.graph.number + 40 == result.pair.target.graph.number
        assert result.pair.golden.step.number == result.pair.target.step.number


def test_a_scope_is_found_in_the_dump_of_a_whole_model(tmp_path):
    operators = ["sin", "cos", "tanh", "sin", "cos", "tanh", "exp"]
    whole = write_dump(tmp_path / "whole", chain(X, operators))
    scoped = chain(X, operators)[3:6]
    named = [(f"{name}_renamed", *rest[:-1], {"scope": "layer"}) for name, *rest in scoped]
    part = write_dump(tmp_path / "part", named)
    comparison = torchair_scope.compare(whole, part)
    assert len(comparison.results) == 3
    assert len(comparison.only_golden) == 4
    assert not comparison.only_target


def test_names_tell_repeated_layers_apart(tmp_path):
    operators = ["sin", "cos", "tanh"] * 3
    whole = write_dump(tmp_path / "whole", chain(X, operators))
    part = write_dump(tmp_path / "part", chain(X, operators)[3:6])
    comparison = torchair_scope.compare(whole, part)
    assert [result.pair.rule for result in comparison.results] == ["name"] * 3
    assert comparison.verdict.kind == "agrees"


def test_a_transpose_that_only_one_side_computes_again_is_not_taken_for_its_twin(tmp_path):
    weight = torch.arange(16.0).reshape(4, 4).t()  # eager code has kept it transposed
    transpose = ("aten.t.default", (weight,), weight.t(), {"scope": "s"})
    again = ("aten.t.default", (weight.t(),), weight, {"scope": "s"})
    product = ("mm", "aten.mm.default", (weight.t(), X[:4, :4]), weight.t() @ X[:4, :4], {})
    golden = write_dump(tmp_path / "golden", [("t_8", *transpose), product])
    target = write_dump(tmp_path / "target", [("t_3", *again), ("t_4", *transpose), product])
    comparison = torchair_scope.compare(golden, target)
    pairs = {each.pair.golden.node: each.pair.target.node for each in comparison.results}
    assert pairs == {"t_8": "t_4", "mm": "mm"}
    assert comparison.verdict.kind == "agrees"


def test_an_empty_module_path_is_that_of_the_outermost_module(tmp_path):
    source = {"file": "model.py", "line": 3, "code": "return x.sin() / x.cos()"}
    calls = {
        name: (name, f"aten.{name}.default", (X,), getattr(X, name)(), {"source": source})
        for name in ("sin", "cos")
    }
    eager = [(*call[:4], {**call[4], "module": ""}) for call in calls.values()]
    golden = write_dump(tmp_path / "golden", eager)
    target = write_dump(tmp_path / "target", list(calls.values())[::-1])
    comparison = torchair_scope.compare(golden, target)
    assert {each.pair.target.node for each in comparison.results} == {"sin", "cos"}
    assert not comparison.only_golden


def test_where_all_agrees_the_verdict_names_the_dtype_and_the_largest_error(tmp_path):
    golden = write_dump(tmp_path / "golden", chain(X, ["sin", "exp"]))
    target = write_dump(tmp_path / "target", chain(X.bfloat16(), ["sin", "exp"]))
    assert "all of their outputs are equal" in torchair_scope.compare(golden, golden).verdict.text
    text = torchair_scope.compare(golden, target).verdict.text
    errors = [
        ((after - before).abs().max() / before.abs().max()).item()
        for before, after in (
            (X.sin(), X.bfloat16().sin()),
            (X.sin().exp(), X.bfloat16().sin().exp()),
        )
    ]
    node = ("sin_0", "exp_1")[errors.index(max(errors))]
    assert "agree up to rounding of bfloat16" in text
    assert f"the largest error is {max(errors):.1e} of the largest value, in OUTPUT.0 of " in text
    assert f"/0 {node} (" in text


def test_a_decomposed_operator_is_paired_by_the_shape_of_its_result(tmp_path):
    silu = torch.ops.aten.silu.default(X)
    sigmoid = X.sigmoid()
    golden = [
        ("sin", "aten.sin.default", (X,), X.sin(), {}),
        ("silu", "aten.silu.default", (X,), silu, {}),
        ("cos", "aten.cos.default", (silu,), silu.cos(), {}),
    ]
    target = [
        golden[0],
        ("sigmoid", "aten.sigmoid.default", (X,), sigmoid, {}),
        ("mul", "aten.mul.Tensor", (X, sigmoid), X * sigmoid, {}),
        golden[2],
    ]
    comparison = torchair_scope.compare(
        write_dump(tmp_path / "golden", golden), write_dump(tmp_path / "target", target)
    )
    pairs = [
        (result.pair.golden.node, result.pair.target.node, result.pair.rule)
        for result in comparison.results
    ]
    assert pairs == [("sin", "sin", "name"), ("silu", "mul", "shape"), ("cos", "cos", "name")]
    assert [call.node for call in comparison.only_target] == ["sigmoid"]
    assert comparison.verdict.kind == "agrees"


def test_in_place_operators_of_eager_code_are_paired_with_functional_ones(tmp_path):
    eager = [("add_", "aten.add_.Tensor", (X.clone(), X), X + X, {"scope": "s"})]
    compiled = [("add", "aten.add.Tensor", (X, X), X + X, {"scope": "s"})]
    comparison = torchair_scope.compare(
        write_dump(tmp_path / "eager", eager), write_dump(tmp_path / "compiled", compiled)
    )
    assert len(comparison.results) == 1
    assert comparison.verdict.kind == "agrees"


def test_an_amplified_rounding_is_no_error(tmp_path):
    """The sum cancels: its inputs are off by a rounding, and it is off by all of its value."""
    golden = torch.tensor([1.0, -1.0]) + torch.tensor([1e-6, 0.0])
    target = torch.nextafter(golden, torch.tensor([2.0, 0.0]))
    paths = [
        write_dump(tmp_path / name, [("sum_1", "aten.sum.default", (x,), x.sum(), {})])
        for name, x in (("golden", golden), ("target", target))
    ]
    assert torchair_scope.compare(*paths).verdict.kind == "agrees"
    strict = torchair_scope.compare(*paths, tolerance=Tolerance(1e-6, 1e-8))
    assert strict.results[0].role == "amplifies" or strict.verdict.kind == "outside"


def normed(path, rounds_up=0, early=1.0, late=1.0):
    """Dump the norm of float32 values that were in bfloat16 for a moment.

    Some elements are rounded to bfloat16 the other way; factors make an operator before or after
    that wrong.
    """
    calls = []

    def call(target, args, result):
        calls.append((f"node_{len(calls)}", target, args, result, {}))
        return result

    values = call("aten.tanh.default", (X,), X.tanh() * early)
    narrow = values.bfloat16()
    narrow[:rounds_up] *= 1 + 2**-7
    narrow = call("aten._to_copy.default", (values,), narrow)
    wide = call("aten._to_copy.default", (narrow,), narrow.float())
    square = call("aten.square.default", (wide,), wide.square())
    mean = call("aten.mean.dim", (square, [-1], True), square.mean(-1, True) * late)
    scale = call("aten.rsqrt.default", (mean,), mean.rsqrt())
    call("aten.mul.Tensor", (wide, scale), wide * scale)
    return write_dump(path, calls)


def test_float32_that_is_computed_from_bfloat16_has_its_rounding(tmp_path):
    golden, target = normed(tmp_path / "golden"), normed(tmp_path / "target", rounds_up=2)
    comparison = torchair_scope.compare(golden, target)
    assert comparison.verdict.kind == "agrees", comparison.verdict.text
    assert {each.role for each in comparison.results} == {"agrees"}
    assert not all(each.worst_output.metrics.equal for each in comparison.results)


@pytest.mark.parametrize(
    ("fault", "wrong"), [({"early": 1.001}, "node_0"), ({"late": 1.3}, "node_4")]
)
def test_a_fault_in_a_float32_part_of_a_bfloat16_model_is_found(tmp_path, fault, wrong):
    golden = normed(tmp_path / "golden")
    target = normed(tmp_path / "target", rounds_up=2, **fault)
    verdict = torchair_scope.compare(golden, target).verdict
    assert (verdict.kind, verdict.call.pair.target.node) == ("made", wrong)


def test_an_error_of_the_golden_run_is_said_to_be_its_own(tmp_path):
    right = [("sin", "aten.sin.default", (X,), X.sin(), {})]
    wrong = [("sin", "aten.sin.default", (X,), X.sin() + 1, {})]
    comparison = torchair_scope.compare(
        write_dump(tmp_path / "golden", wrong), write_dump(tmp_path / "target", right)
    )
    assert comparison.verdict.kind == "made"
    assert "the golden run is wrong here" in comparison.verdict.text


def test_other_shapes_are_a_difference(tmp_path):
    paths = [
        write_dump(tmp_path / str(n), [("sin", "aten.sin.default", (x,), x.sin(), {})])
        for n, x in enumerate((X, X[:3]))
    ]
    verdict = torchair_scope.compare(*paths).verdict
    assert verdict.kind == "outside"


def test_random_operators_are_not_accused(tmp_path):
    facts = {"nondeterministic": True}
    paths = [
        write_dump(tmp_path / str(n), [("rand", "aten.rand_like.default", (X,), X + n, facts)])
        for n in range(2)
    ]
    verdict = torchair_scope.compare(*paths).verdict
    assert (verdict.kind, "random" in verdict.text) == ("unclear", True)


def test_nothing_in_common_cannot_be_judged(tmp_path):
    paths = [
        write_dump(tmp_path / "a", chain(X, ["sin"])),
        write_dump(tmp_path / "b", chain(X[:2], ["cos"])),
    ]
    comparison = torchair_scope.compare(*paths)
    assert comparison.verdict.kind == "unclear"
    assert (len(comparison.only_golden), len(comparison.only_target)) == (1, 1)


def test_a_missing_file_is_said_and_the_rest_is_compared(sound_dumps, float32_dump):
    call = torchair_scope.load(float32_dump).calls(node="tanh", step=0)[0]
    (float32_dump / call.outputs["OUTPUT.0"].file.url).unlink()
    comparison = torchair_scope.compare(sound_dumps["float32"], float32_dump)
    assert any(f"{call}: OUTPUT.0 is not on disk" in note for note in comparison.notes)
    (result,) = (
        each
        for each in comparison.results
        if each.pair.target.node == "tanh" and each.pair.target.step.number == 0
    )
    assert result.role == "unclear"
    assert comparison.verdict.kind == "unclear"


def test_ranks_are_paired_by_number(sound_dumps, float32_dump):
    folder = rank_folder(float32_dump)
    for rank in (0, 1):
        (float32_dump / f"worldsize2_global_rank{rank}").symlink_to(folder)
    folder_of_two = float32_dump.with_name("two")
    folder_of_two.mkdir()
    for rank in (0, 1):
        (folder_of_two / f"worldsize2_global_rank{rank}").symlink_to(folder)
    one = folder_of_two.with_name("one")
    one.mkdir()
    (one / "worldsize2_global_rank1").symlink_to(folder)
    assert len(torchair_scope.compare(folder_of_two, folder_of_two).results) == 2 * len(
        torchair_scope.load(sound_dumps["float32"]).calls()
    )


def two_on_a_line(path, order, wrong=0.0):
    """Two calls that differ in nothing but their inputs, in one order or the other."""
    y = X.flip(0) + 0.05
    parts = [("first", X.sin(), X), ("second", y.sin() + wrong, y)]
    nodes = [f"sin_{position}" for position in range(2)]
    facts = {"scope": "s", "source": {"file": "model.py", "line": 3, "code": "sin(x) + sin(y)"}}
    calls = [
        (node, "aten.sin.default", (value,), result, facts)
        for node, (_, result, value) in zip(nodes, [parts[k] for k in order], strict=True)
    ]
    total = parts[0][1] + parts[1][1]
    added = ("add", "aten.add.Tensor", (parts[0][1], parts[1][1]), total, facts)
    return write_dump(path, [*calls, added])


def test_twins_on_a_line_in_another_order_are_paired_by_their_inputs(tmp_path):
    golden = two_on_a_line(tmp_path / "golden", (0, 1))
    comparison = torchair_scope.compare(golden, two_on_a_line(tmp_path / "target", (1, 0)))
    assert comparison.verdict.kind == "agrees", comparison.verdict.text
    pairs = [(each.pair.golden.node, each.pair.target.node) for each in comparison.results]
    assert pairs == [("sin_1", "sin_0"), ("sin_0", "sin_1"), ("add", "add")]
    assert [each.pair.rule for each in comparison.results] == ["inputs", "inputs", "name"]
    assert (comparison.only_golden, comparison.only_target) == ([], [])


def test_a_fault_in_one_of_two_twins_is_found_in_another_order(tmp_path):
    golden = two_on_a_line(tmp_path / "golden", (0, 1))
    wrong = two_on_a_line(tmp_path / "target", (1, 0), wrong=0.25)
    verdict = torchair_scope.compare(golden, wrong).verdict
    assert (verdict.kind, verdict.call.pair.target.node) == ("made", "sin_0"), verdict.text


def test_a_twin_that_only_the_golden_run_has_is_left_over(tmp_path):
    """Of three on a line the target has two: which ones is known by their inputs."""
    values = [X, X.flip(0) + 0.05, X * 0.5]
    facts = {"scope": "s", "source": {"file": "model.py", "line": 3, "code": "sin"}}
    calls = [
        (f"sin_{position}", "aten.sin.default", (value,), value.sin(), facts)
        for position, value in enumerate(values)
    ]
    renamed = [(f"sin_{position}", *call[1:]) for position, call in enumerate(calls[1:])]
    paths = write_dump(tmp_path / "golden", calls), write_dump(tmp_path / "target", renamed)
    comparison = torchair_scope.compare(*paths)
    assert comparison.verdict.kind == "agrees", comparison.verdict.text
    assert [call.node for call in comparison.only_golden] == ["sin_0"]


def test_a_file_of_several_names_is_read_once(tmp_path):
    """The result of one operator is the input of the next, and may be one file."""
    calls = chain(X, ["sin", "cos", "tanh"])
    paths = [write_dump(tmp_path / name, calls) for name in ("golden", "target")]
    for path in paths:
        for one, other in (("sin_0", "cos_1"), ("cos_1", "tanh_2")):
            (output,) = path.rglob(f"{one}-*.OUTPUT.0.*")
            (following,) = path.rglob(f"{other}-*.INPUT.0.*")
            following.unlink()
            following.hardlink_to(output)
    told = []
    comparison = torchair_scope.compare(*paths, progress=told.append)
    sizes = {file.stat().st_ino: file.stat().st_size for file in tmp_path.rglob("*.npy")}
    assert sum(told) == sum(sizes.values())
    slots = [[each.slot for each in result.tensors] for result in comparison.results]
    assert slots == [["INPUT.0", "OUTPUT.0"]] * 3
    assert comparison.verdict.kind == "agrees"


def test_the_pool_of_the_command_line_gives_the_same(sound_dumps, faulty_dump, monkeypatch):
    monkeypatch.setattr(executors, "WORTH_A_FORK", 0)
    monkeypatch.setattr(executors, "_cores", lambda: 2)
    with executors.forks_for(1) as executor:
        there = torchair_scope.compare(sound_dumps["float32"], faulty_dump, executor=executor)
    here = torchair_scope.compare(sound_dumps["float32"], faulty_dump)
    assert executor is not None
    assert repr(there.results) == repr(here.results)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ThreadPoolExecutor(2),
        lambda: ProcessPoolExecutor(1, mp_context=get_context("spawn")),
    ],
    ids=["threads", "processes"],
)
def test_any_executor_gives_the_same(sound_dumps, faulty_dump, make):
    told = []
    with make() as executor:
        there = torchair_scope.compare(
            sound_dumps["float32"], faulty_dump, executor=executor, progress=told.append
        )
        replays = torchair_scope.replay(faulty_dump, node="sub", executor=executor)
    here = torchair_scope.compare(sound_dumps["float32"], faulty_dump)
    assert repr([each.tensors for each in there.results]) == repr(
        [each.tensors for each in here.results]
    )
    assert there.verdict.text == here.verdict.text
    assert sum(told) > 0
    assert {each.verdict for each in replays} == {"bug"}


@pytest.mark.slow
def test_a_cluster_of_dask_gives_the_same(sound_dumps, faulty_dump):
    distributed = pytest.importorskip("distributed")
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1"
    )
    with cluster, distributed.Client(cluster) as client:
        executor = client.get_executor()
        there = torchair_scope.compare(sound_dumps["float32"], faulty_dump, executor=executor)
        replays = torchair_scope.replay(faulty_dump, node="sub", executor=executor)
    here = torchair_scope.compare(sound_dumps["float32"], faulty_dump)
    assert repr(there.results) == repr(here.results)
    assert {each.verdict for each in replays} == {"bug"}
