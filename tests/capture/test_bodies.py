"""Scopes in and around operators with bodies: control flow, loops, nested compile regions."""

import pytest
import torch
from torch._higher_order_ops._invoke_quant import InvokeQuant
from torch._higher_order_ops.hints_wrap import hints_wrapper
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

import torchair_scope as torchair
from tests.support.bits import difference
from tests.support.bodies import calls_of, dump, gelu, names
from torchair_scope.store.reader import read

every_inner = pytest.mark.parametrize(
    "inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
data_dump = torchair.scope.data_dump


def branch(x):
    with data_dump("branch"):
        y = gelu(x)
    return y.sin()


def in_branch(x):
    return torch.cond(x.sum() > 0, branch, torch.cos, (x,)) * 2


def around_cond(x):
    with data_dump("around"):
        y = torch.cond(x.sum() > 0, gelu, torch.cos, (x,))
    return y * 2


def in_loop(x):
    def body(i, y):
        with data_dump("body"):
            z = gelu(y)
        return i + 1, z.sin()

    return while_loop(lambda i, y: i < 3, body, (torch.tensor(0), x))


def in_map(x, w):
    def body(row, w):
        with data_dump("row"):
            z = gelu(row)
        return z * w

    return map_over(body, x, w)


def in_scan(x):
    def body(carry, row):
        with data_dump("row"):
            z = gelu(carry * row)
        return z.sin(), z.cos()

    return scan(body, x[0], x)


@every_inner
def test_of_a_scope_in_a_branch_the_operators_are_dumped_when_the_branch_runs(dump_path, inner):
    rank = dump(in_branch, (torch.ones(3),), inner, dump_path / "taken")
    (call,) = rank.calls
    assert (call.node, call.target, call.scope) == ("cond_0__gelu", "aten.gelu.default", "branch")
    assert call.record["body"] == "true_graph_0"
    assert difference(call.load_outputs(), gelu(torch.ones(3))) is None


def test_of_a_branch_that_does_not_run_nothing_is_dumped(dump_path):
    options = {"path": str(dump_path), "backend": "aot_eager"}
    compiled = torch.compile(in_branch, backend="torchair_scope", options=options)
    torch.testing.assert_close(compiled(-torch.ones(3)), torch.cos(-torch.ones(3)) * 2)
    compiled(torch.ones(3))
    (rank,) = read(dump_path).ranks
    assert [(call.step, call.node) for call in rank.calls] == [(1, "cond_0__gelu")]


@every_inner
def test_a_scope_around_cond_dumps_it_and_its_branch(dump_path, inner):
    rank = dump(around_cond, (torch.ones(3),), inner, dump_path)
    assert names(rank.calls) == ["sum_1", "gt", "cond", "cond_0__gelu"]
    cond = rank.calls[2]
    assert difference(cond.load_args()[0][3], (torch.ones(3),)) is None
    assert difference(cond.load_outputs(), (gelu(torch.ones(3)),)) is None
    assert {call.scope for call in rank.calls} == {"around"}


@every_inner
def test_a_loop_dumps_each_run_of_its_condition_and_its_body(dump_path, inner):
    def body(i, y):
        return i + 1, gelu(y)

    def function(x):
        with data_dump("loop"):
            return while_loop(lambda i, y: i < 2, body, (torch.tensor(0), x))

    rank = dump(function, (torch.zeros(3),), inner, dump_path)
    inside = [call for call in rank.calls if call.node.startswith("while_loop_0__")]
    assert names(inside) == [
        "while_loop_0__0__cond__lt",
        *("while_loop_0__0__add", "while_loop_0__0__gelu"),
        "while_loop_0__1__cond__lt",
        *("while_loop_0__1__add", "while_loop_0__1__gelu"),
        "while_loop_0__2__cond__lt",
    ]
    first, second = (call for call in inside if "gelu" in call.target)
    assert difference(second.load_args()[0][0], first.load_outputs()) is None
    assert [call.load_outputs().item() for call in inside if "cond" in call.node] == [1, 1, 0]


@every_inner
def test_in_nested_bodies_the_places_nest(dump_path, inner):
    def innermost(y):
        with data_dump("deep"):
            return gelu(y)

    def body(i, y):
        return i + 1, torch.cond(y.sum() > 1, innermost, torch.exp, (y,))

    def loop(x):
        return while_loop(lambda i, y: i < 3, body, (torch.tensor(0), x))[1]

    def function(x):
        return torch.cond(x.sum() < 9, loop, torch.neg, (x,)) + 1

    rank = dump(function, (torch.zeros(3),), inner, dump_path)
    assert names(rank.calls) == [f"cond_0__while_loop_0__{i}__cond_0__gelu" for i in (1, 2)]


@every_inner
@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (in_loop, (torch.ones(3),), [f"while_loop_0__{i}__gelu" for i in range(3)]),
        (in_map, (torch.ones(2, 3), torch.ones(3)), [f"map_impl_0__{i}__gelu" for i in range(2)]),
        (
            in_scan,
            (torch.ones(2, 3),),
            [f"scan_0__{i}__{name}" for i in range(2) for name in ("mul", "gelu")],
        ),
    ],
    ids=["while_loop", "map", "scan"],
)
def test_each_run_of_a_body_has_names_of_its_own(dump_path, inner, function, inputs, expected):
    rank = dump(function, inputs, inner, dump_path)
    assert names(rank.calls) == expected


@every_inner
@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (in_branch, (torch.ones(3),)),
        (in_loop, (torch.ones(3),)),
        (in_map, (torch.ones(2, 3), torch.ones(3))),
    ],
    ids=["cond", "while_loop", "map"],
)
def test_the_backward_of_a_body_is_dumped_as_far_as_it_comes_from_the_scope(
    dump_path, inner, function, inputs
):
    rank = dump(function, inputs, inner, dump_path, backward=True)
    assert {call.target for call in calls_of(rank, "forward")} == {"aten.gelu.default"}
    again = [(call.target, call.record.get("recompute")) for call in calls_of(rank, "backward")]
    assert set(again) == {("aten.gelu.default", True), ("aten.gelu_backward.default", None)}


def short_targets(calls):
    return [call.target.removeprefix("aten.").partition(".")[0] for call in calls]


@every_inner
def test_of_scan_with_gradients_the_operators_of_the_scope_are_dumped_in_each_run(dump_path, inner):
    rank = dump(in_scan, (torch.ones(2, 3),), inner, dump_path, backward=True)
    assert names(calls_of(rank, "forward")) == [
        f"scan_0__{i}__{name}" for i in range(2) for name in ("mul", "gelu")
    ]
    for i in range(2):
        run = [c for c in calls_of(rank, "backward") if c.node.startswith(f"scan_1__{i}__")]
        again = [call for call in run if call.record.get("recompute")]
        assert short_targets(again) == ["mul", "gelu"]
        assert short_targets(run[2:]) == ["gelu_backward", "mul", "mul"]
    assert {call.scope for call in rank.calls} == {"row"}


def weighted_scan(x, w):
    def body(carry, row):
        with data_dump("kept"):
            kept = carry.tanh()
        with data_dump("used"):
            used = row * w
        return kept + used, kept.cos()

    return scan(body, x[0], x)


def test_sums_of_the_gradients_of_what_scan_closes_over_belong_to_no_scope(dump_path):
    inputs = (torch.ones(2, 3), torch.full((3,), 2.0))
    rank = dump(weighted_scan, inputs, "aot_eager", dump_path, backward=True)
    found = {(c.scope, t) for c, t in zip(rank.calls, short_targets(rank.calls), strict=True)}
    assert {("kept", "tanh"), ("used", "mul")} <= found
    assert ("kept", "add") not in found
    assert ("used", "add") not in found


def test_a_scope_around_scan_with_gradients_has_all_of_its_backward(dump_path):
    def function(x):
        with data_dump("around"):
            return scan(lambda carry, row: (carry * row, row.sin()), x[0], x)

    rank = dump(function, (torch.ones(2, 3),), "aot_eager", dump_path, backward=True)
    backward = calls_of(rank, "backward")
    assert {"scan", "mul", "cos"} <= set(short_targets(backward))
    assert {call.scope for call in backward} == {"around"}


def test_scopes_in_branches_in_scan_with_gradients_are_dumped(dump_path):
    def body(carry, row):
        return torch.cond(row.sum() > 0, branch, torch.cos, (carry,)), row.exp()

    def function(x):
        return scan(body, x[0], x)

    rank = dump(function, (torch.ones(2, 3),), "aot_eager", dump_path, backward=True)
    forward, backward = calls_of(rank, "forward"), calls_of(rank, "backward")
    assert names(forward) == [f"scan_0__{i}__cond_0__gelu" for i in range(2)]
    assert set(short_targets(backward)) == {"gelu", "gelu_backward"}
    assert {call.scope for call in rank.calls} == {"branch"}


def test_a_scope_in_scan_of_which_nothing_is_differentiated_is_dumped_in_the_forward(dump_path):
    def body(carry, row):
        with data_dump("mask"):
            mask = row > 0
        return carry * mask, row.sin()

    def function(x):
        return scan(body, x[0], x)

    rank = dump(function, (torch.ones(2, 3),), "aot_eager", dump_path, backward=True)
    assert names(calls_of(rank, "forward")) == ["scan_0__0__gt", "scan_0__1__gt"]
    assert all(call.record.get("recompute") for call in calls_of(rank, "backward"))


@torch.compiler.nested_compile_region
def block(x):
    with data_dump("inner"):
        x = x.cos()
    return gelu(x)


def inside_then_outside(x):
    with data_dump("outer"):
        x = block(x)
    return block(x)


def outside_then_inside_then_outside(x):
    x = block(x)
    with data_dump("outer"):
        x = block(x)
    return block(x)


@every_inner
@pytest.mark.parametrize(
    ("function", "scopes"),
    [
        (inside_then_outside, ["outer", "outer/inner", "outer", "inner"]),
        (
            outside_then_inside_then_outside,
            ["inner", "outer", "outer/inner", "outer", "inner"],
        ),
    ],
    ids=["first", "second"],
)
def test_each_call_of_a_nested_region_is_dumped_for_its_own_scope(
    dump_path, inner, function, scopes
):
    rank = dump(function, (torch.ones(3),), inner, dump_path)
    assert [call.scope for call in rank.calls] == scopes
    targets = ["aten.cos.default", "aten.gelu.default"]
    outer = [call.target for call in rank.calls if call.scope.startswith("outer")]
    assert outer == ["invoke_subgraph", *targets]


def test_nested_regions_keep_to_their_scopes_in_the_backward(dump_path):
    rank = dump(inside_then_outside, (torch.ones(3),), "aot_eager", dump_path, backward=True)
    backward = calls_of(rank, "backward")
    outer = [call.target for call in backward if call.scope == "outer"]
    assert outer == ["invoke_subgraph", "aten.gelu_backward.default"]
    sines = [call.scope for call in backward if call.target == "aten.sin.default"]
    assert sines == ["inner", "outer/inner"]


def test_a_body_that_is_called_with_hints_is_dumped(dump_path):
    def body(x):
        with data_dump("hinted"):
            y = x.sin()
        return (y * 2,)

    def function(x):
        return hints_wrapper(body, (x,), {}, hints={"fast": True})[0] + 1

    rank = dump(function, (torch.ones(3),), "aot_eager", dump_path)
    assert names(rank.calls) == ["hints_wrapper_0__sin"]


@every_inner
def test_flex_attention_is_dumped_as_one_operator_that_ran_fused(dump_path, inner):
    def score(value, batch, head, query, key):
        with data_dump("score"):
            return value + (query - key)

    def function(q):
        return flex_attention(q, q, q, score_mod=score)

    rank = dump(function, (torch.ones(1, 1, 16, 16),), inner, dump_path)
    (call,) = rank.calls
    assert (call.target, call.scope, call.record["bodies"]) == ("flex_attention", "score", "fused")
    assert difference(call.load_args()[0][0], torch.ones(1, 1, 16, 16)) is None


def test_an_operator_of_which_nothing_is_known_is_dumped_as_one_with_a_warning(dump_path):
    def body(x):
        with data_dump("quantised"):
            return x.sin()

    def function(x):
        return InvokeQuant()(body, x) + 1

    options = {"path": str(dump_path), "backend": "aot_eager"}
    compiled = torch.compile(function, backend="torchair_scope", options=options)
    with pytest.warns(UserWarning, match=r"scope 'quantised' .* lies in the body of"):
        result = compiled(torch.ones(3))
    assert difference(result, torch.ones(3).sin() + 1) is None
    (call,) = read(dump_path).ranks[0].calls
    assert (call.node, call.scope) == ("invoke_quant_packed", "quantised")


def test_the_filter_is_asked_about_operators_in_bodies(dump_path):
    config = torchair.CompilerConfig()
    config.debug.data_dump.path = str(dump_path)
    config.debug.data_dump.filter = lambda node: node if "sin" in node.name else None

    def function(x):
        with data_dump():
            return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, torch.cos, (x,))

    backend = torchair.get_npu_backend(compiler_config=config, inner="aot_eager")
    torch.compile(function, backend=backend)(torch.ones(3))
    assert names(read(dump_path).ranks[0].calls) == ["cond_0__sin"]


def test_of_a_graph_that_is_dumped_as_a_whole_the_bodies_are_dumped(dump_path):
    def function(x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    options = {"path": str(dump_path), "type": "npy"}
    compiled = torch.compile(function, backend="torchair_scope", options=options)
    with pytest.warns(UserWarning, match="FALLBACK"):
        compiled(torch.ones(3))
    assert names(read(dump_path).ranks[0].calls) == ["sum_1", "gt", "cond", "cond_0__sin"]
