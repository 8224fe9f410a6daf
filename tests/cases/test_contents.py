"""What single cases ask for in words: files, values, order and state."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import weakref

import numpy as np
import pytest
import torch

import torchair_scope
from tests.cases import load
from tests.support.bits import difference
from tests.support.replay import assert_replays
from tests.support.running import run_case
from torchair_scope.store.reader import read

every_inner = pytest.mark.parametrize("inner", ["aot_eager", "inductor"])


@every_inner
def test_01_each_member_of_a_list_output_has_a_file_of_its_own(ran, inner):
    (call,) = _calls(ran("case_01_split_list_output", inner))
    assert _shapes(call.output_files) == {
        "OUTPUT.0": (2, 3),
        "OUTPUT.1": (2, 3),
        "OUTPUT.2": (3, 3),
    }
    assert _shapes(call.input_files)["INPUT.0"] == (7, 3)


@every_inner
def test_02_a_keyword_tensor_has_a_file_named_after_the_keyword(ran, inner):
    (call,) = _calls(ran("case_02_sdpa_kwargs_mask", inner), "scaled_dot_product")
    assert _shapes(call.input_files)["KWARG.attn_mask"] == (4, 4)
    args, kwargs = call.load_args()
    assert 0.5 in [value for value in (*args, *kwargs.values()) if isinstance(value, float)]


@every_inner
def test_04_an_index_after_a_none_keeps_its_place_in_the_list(ran, inner):
    calls = _calls(ran("case_04_optional_index_list", inner))
    for target in ("aten.index.Tensor", "aten.index_put"):
        (call,) = [call for call in calls if target in call.target]
        names = set(_shapes(call.input_files))
        assert "INPUT.1.1" in names
        assert "INPUT.1.0" not in names
        args, _ = call.load_args()
        assert args[1][0] is None
        assert args[1][1].tolist() == [0, 2]


@every_inner
@pytest.mark.parametrize(
    ("target", "dtypes"),
    [
        ("aten.topk", [torch.float32, torch.int64]),
        ("aten.frexp", [torch.float32, torch.int32]),
        ("aten.native_layer_norm", [torch.float32] * 3),
    ],
)
def test_05_members_of_a_named_tuple_keep_their_dtypes(ran, inner, target, dtypes):
    (call,) = _calls(ran("case_05_namedtuple_results", inner), target)
    assert [value.dtype for value in call.load_outputs()] == dtypes
    assert set(_arrays(call.output_files)) == {f"OUTPUT.{i}" for i in range(len(dtypes))}


@every_inner
def test_06_files_hold_the_values_at_the_time_of_the_call(ran, inner):
    expected = load("case_06_inplace_chain").EXPECT_VALUES
    add, mul = _calls(ran("case_06_inplace_chain", inner))
    assert (_arrays(add.input_files)["INPUT.0"] == expected["first_input"]).all()
    assert (_arrays(add.output_files)["OUTPUT.0"] == expected["after_add"]).all()
    assert (_arrays(mul.input_files)["INPUT.0"] == expected["after_add"]).all()
    assert (_arrays(mul.output_files)["OUTPUT.0"] == expected["after_mul"]).all()


@every_inner
def test_08_a_buffer_is_right_after_several_calls_and_dumped_before_its_last_change(
    inner, tmp_path
):
    run = run_case(load("case_08_kv_cache_buffer"), {"backend": inner}, tmp_path, calls=3)
    assert difference(run.result.state, run.reference.state) is None
    calls = _calls(run, "aten.index_copy")
    assert [call.step for call in calls] == [0, 1, 2]
    written = run.result.state["kv"]
    assert torch.equal(calls[-1].load_outputs() * 2, written)


@every_inner
def test_10_the_base_of_a_mutated_view_is_saved_before_and_after(ran, inner):
    run = ran("case_10_mutating_custom_op", inner)
    (call,) = _calls(run, "auto_functionalized")
    assert "scatter_row" in json.dumps(call.record)
    _, kwargs = call.load_args()
    assert torch.equal(kwargs["_all_bases"][0].reshape(-1), torch.zeros(12))
    result, base = call.load_outputs()
    assert torch.equal(result, torch.full((3,), 2.0))
    assert base.reshape(4, 3).tolist() == [[0.0] * 3, [2.0] * 3, [0.0] * 3, [0.0] * 3]


@every_inner
def test_10_the_true_operator_is_saved_with_what_it_changed_before_and_after(ran, inner):
    (call,) = _calls(ran("case_10_mutating_custom_op", inner), "bugcase10.scatter_row")
    assert call.node == "auto_functionalized_v2_0__scatter_row"
    (x, out, opt), kwargs = call.load_args()
    assert (x.tolist(), out.tolist(), opt, kwargs) == ([1.0] * 3, [0.0] * 3, None, {})
    assert call.load_outputs().tolist() == [2.0] * 3
    assert {name: value.tolist() for name, value in call.load_mutated().items()} == {
        "out": [2.0] * 3
    }
    assert set(_shapes(call.output_files)) == {"OUTPUT.0", "MUTATED.out"}


@every_inner
def test_15_forward_and_recomputed_values_are_both_there_and_equal(ran, inner):
    run = ran("case_15_checkpoint_recompute", inner)
    forward, recomputed = _calls(run, "aten.sigmoid.default")
    assert forward.graph != recomputed.graph
    assert forward.node == recomputed.node
    assert difference(recomputed.load_outputs(), forward.load_outputs()) is None
    assert _directions(run) == {forward.graph: "forward", recomputed.graph: "backward"}
    assert (forward.record.get("recompute"), recomputed.record["recompute"]) == (None, True)


@every_inner
def test_18_an_operator_that_equals_an_unscoped_one_is_dumped(ran, inner):
    run = ran("case_18_cse_merges_scope_away", inner)
    (call, *_) = _calls(run, "aten.sin")
    (x,), _ = call.load_args()
    assert difference(call.load_outputs(), x.sin()) is None


@every_inner
def test_19_operators_that_the_compiler_removed_are_warned_of(ran, inner):
    run = ran("case_19_dead_code_in_scope", inner)
    assert [str(warning.message) for warning in run.reference.warnings] == []
    assert any("removed" in str(warning.message) for warning in run.result.warnings)


@every_inner
def test_21_one_graph_serves_all_sizes_and_records_them_as_integers(ran, inner):
    run = ran("case_21_dynamic_derived_sizes", inner)
    assert len(_directions(run)) == 1
    views = _calls(run, "aten.view")
    assert [tuple(call.load_outputs().shape) for call in views] == [(15,), (24,), (14,)]
    assert [call.step for call in views] == [0, 1, 2]
    assert [call.load_args()[0][1] for call in views] == [[15], [24], [14]]


@every_inner
def test_24_low_precision_values_are_read_back_exactly_with_their_dtype(ran, inner):
    _, (x,) = load("case_24_low_precision_dtypes").make(contextlib.nullcontext)
    low = x.to(torch.bfloat16)
    eight = low.to(torch.float8_e4m3fn)
    other_eight = x.to(torch.float8_e5m2)
    expected = [low, eight, eight.to(torch.bfloat16), other_eight, other_eight.to(torch.float16)]
    calls = _calls(ran("case_24_low_precision_dtypes", inner), "_to_copy")
    _assert_same_in_any_order([call.load_outputs() for call in calls], expected)
    (mask,) = _calls(ran("case_24_low_precision_dtypes", inner), "aten.gt")
    assert difference(mask.load_outputs(), x > 0) is None


@every_inner
def test_26_values_inside_vmap_are_dumped_with_their_batch_dimension(ran, inner):
    (call,) = _calls(ran("case_26_vmap_grad_transforms", inner), "aten.sin")
    assert call.load_outputs().shape == (3, 2)


@every_inner
def test_28_random_numbers_equal_those_of_eager_and_the_operator_runs_once(ran, inner):
    run = ran("case_28_rng_in_and_out_of_scope", inner)
    function, inputs = load("case_28_rng_in_and_out_of_scope").make(contextlib.nullcontext)
    torch.manual_seed(1)
    eager = function(*inputs)
    assert difference(run.result.values, [eager]) is None
    (call,) = _calls(run, "native_dropout")
    assert call.record["nondeterministic"]


@every_inner
def test_29_long_names_with_a_common_prefix_do_not_collide(ran, inner):
    first, second = _calls(ran("case_29_very_long_op_name", inner))
    assert first.target.endswith("_a.default")
    assert second.target.endswith("_b.default")
    paths = [
        path
        for call in (first, second)
        for path in (*call.input_files.values(), *call.output_files.values())
    ]
    assert len({path.name for path in paths}) == 4
    assert max(len(path.name.encode()) for path in paths) <= 255
    (x,), _ = first.load_args()
    assert difference(first.load_outputs(), x + 1) is None
    assert difference(second.load_outputs(), x + 2) is None


@every_inner
def test_31_calls_of_one_line_are_recorded_in_order_of_execution(ran, inner):
    calls = sorted(_calls(ran("case_31_same_op_many_times", inner)), key=lambda call: call.order)
    assert [call.node for call in calls] == ["mul", *(f"mul_{i}" for i in range(1, 12))]
    value = torch.ones(3)
    for call in calls:
        value = value * 1.5
        assert difference(call.load_outputs(), value) is None
        value = value - 1


@every_inner
def test_32_the_operator_after_an_inner_scope_belongs_to_the_outer_one(ran, inner):
    calls = _calls(ran("case_32_nested_scopes", inner))
    assert [call.target for call in calls] == [
        "aten.add.Tensor",
        "aten.sin.default",
        "aten.sub.Tensor",
    ]
    before, inside, after = (call.scope for call in calls)
    assert before == after
    assert inside.startswith(f"{before}/")


@every_inner
def test_37_equal_graphs_of_two_models_count_their_own_steps(inner, tmp_path):
    (first, inputs), (second, _) = load("case_37_two_models_one_process").parts(
        torchair_scope.scope.data_dump
    )
    target = torch.compile(first, backend=_backend(inner, tmp_path), fullgraph=True)
    results = [target(*inputs) for _ in range(5)]
    draft = torch.compile(second, backend=_backend(inner, tmp_path), fullgraph=True)
    results += [draft(*inputs), draft(*inputs), target(*inputs)]
    calls = read(tmp_path).ranks[0].calls
    steps = {(call.graph, call.step): call.load_outputs() for call in calls}
    one, two = sorted({call.graph for call in calls})
    assert list(sorted(steps)) == [*((one, step) for step in range(6)), (two, 0), (two, 1)]
    dumped = [steps[one, step] for step in range(5)] + [steps[two, 0], steps[two, 1], steps[one, 5]]
    assert difference(dumped, results) is None
    assert_replays(read(tmp_path))


@every_inner
def test_39_the_local_shard_is_saved_and_its_placements_are_in_the_manifest(ran, inner):
    run = ran("case_39_dtensor", inner)
    (call,) = _calls(run)
    torch.manual_seed(0)
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    assert difference(call.load_args(), ((x, w), {})) is None
    (rank,) = run.dump.ranks
    assert rank.folder.name == "worldsize1_global_rank0"
    manifest = (rank.folder / "manifest.jsonl").read_text()
    assert re.search(r"Shard\(dim=0\)|S\(0\)", manifest)


@every_inner
def test_43_empty_and_scalar_outputs_have_files_and_special_values_survive(ran, inner):
    run = ran("case_43_degenerate_shapes", inner)
    shapes = {call.target: _shapes(call.output_files) for call in _calls(run, "aten.sum")}
    assert shapes == {"aten.sum.default": {"OUTPUT.0": ()}}
    empty, product = sorted(_calls(run, "aten.mul"), key=lambda call: call.load_outputs().numel())
    assert _shapes(empty.output_files) == {"OUTPUT.0": (0, 3)}
    (x, _) = load("case_43_degenerate_shapes").make(contextlib.nullcontext)[1]
    assert difference(product.load_outputs(), x.log() * -0.0) is None


@every_inner
def test_44_running_statistics_are_right_after_several_steps(inner, tmp_path):
    run = run_case(load("case_44_batchnorm_train"), {"backend": inner}, tmp_path, calls=3)
    exact = inner == "aot_eager"
    torch.testing.assert_close(
        run.result.state, run.reference.state, **({"rtol": 0, "atol": 0} if exact else {})
    )
    assert run.result.state["bn.num_batches_tracked"] == 3
    assert sorted(_directions(run).values()) == ["backward", "forward"]
    backward = _calls(run, "native_batch_norm_backward")
    assert [call.step for call in backward] == [0, 1, 2]
    assert all(call.load_outputs()[0] is None for call in backward)


@every_inner
def test_46_inputs_and_outputs_are_freed_after_the_call(inner, dump_path):
    function, (x,) = load("case_46_memory_is_released").make(torchair_scope.scope.data_dump)
    compiled = _compiled(function, inner, dump_path)
    result = compiled(x)
    references = [weakref.ref(x), weakref.ref(result)]
    del x, result
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@every_inner
def test_46_a_chain_of_temporaries_is_freed_on_the_way(inner, dump_path):
    size, alive = 1 << 12, []

    @torch.library.custom_op("torchair_scope_tests::count_alive", mutates_args=())
    def count_alive(x: torch.Tensor) -> torch.Tensor:
        alive.append(
            sum(type(item) is torch.Tensor and item.numel() == size for item in gc.get_objects())
        )
        return x + 1

    count_alive.register_fake(torch.empty_like)

    def chain(x):
        with torchair_scope.scope.data_dump():
            for _ in range(20):
                x = count_alive(x)
        return x * 2

    compiled = _compiled(chain, inner, dump_path)
    # What waits to be written is kept as well, up to a limit: here of one value.
    with torchair_scope.scope.configure(max_inflight=4 * size):
        compiled(torch.zeros(size))
    assert len(alive) == 20
    assert max(alive) - alive[0] <= 3


def _backend(inner, path):
    """A backend object of its own: Dynamo compiles equal code once for each of them."""
    config = torchair_scope.CompilerConfig()
    config.debug.data_dump.path = str(path)
    return torchair_scope.get_npu_backend(compiler_config=config, inner=inner)


def _compiled(function, inner, path):
    options = {"path": str(path), "backend": inner}
    return torch.compile(function, backend="torchair_scope", fullgraph=True, options=options)


def _calls(run, target=""):
    return [call for call in run.calls if target in call.target]


def _arrays(files):
    return {slot: np.load(path) for slot, path in files.items()}


def _shapes(files):
    return {slot: array.shape for slot, array in _arrays(files).items()}


def _directions(run):
    (rank,) = run.dump.ranks
    return {graph["graph"]: graph["direction"] for graph in rank.graphs}


def _assert_same_in_any_order(actual, expected):
    remaining = list(actual)
    for value in expected:
        same = [item for item in remaining if difference(item, value) is None]
        assert same, f"no call gave {value}"
        remaining = [item for item in remaining if item is not same[0]]
    assert not remaining
