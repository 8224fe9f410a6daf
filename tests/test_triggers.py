"""`when=` and `keep_last=`: steps that are saved only if something comes true in them."""

from __future__ import annotations

import csv
import math

import pytest
import torch

from torchair_scope.scope import configure, data_dump, summary
from torchair_scope.store import trigger
from torchair_scope.store.reader import read
from torchair_scope.store.run import DumpWarning


@pytest.fixture(autouse=True)
def _no_defaults():
    with configure():
        yield
    trigger._forget()


def compiled(function):
    return torch.compile(function, backend="torchair_scope", options={"backend": "aot_eager"})


def steps_of(path):
    """The steps of each graph that are saved, by direction."""
    (rank,) = read(path).ranks
    assert rank.problems == []
    directions = {graph["graph"]: graph["direction"] for graph in rank.graphs}
    found = {}
    for call in rank.calls:
        found.setdefault(directions[call.graph], set()).add(call.step)
    return {direction: sorted(steps) for direction, steps in found.items()}


def tensors_in(path):
    return list(path.rglob("*.npy")) + list(path.rglob("stats.csv"))


def division(path, **options):
    def function(x, y):
        with data_dump("quotient", path=str(path), **options):
            return x / y

    return function


def run(function, divisors):
    """The results for each divisor."""
    return [function(torch.ones(100), torch.full((100,), float(divisor))) for divisor in divisors]


@pytest.mark.parametrize("in_eager", [False, True])
def test_a_step_is_saved_if_it_holds_nan_or_inf(dump_path, in_eager):
    function = division(dump_path, when="nonfinite")
    results = run(function if in_eager else compiled(function), [1, 0, 2, 0, math.nan, 3])
    assert [float(result[0]) for result in results[:4]] == [1, math.inf, 0.5, math.inf]
    (steps,) = steps_of(dump_path).values()
    assert steps == [1, 3, 4]


def test_what_is_saved_is_what_was_there(dump_path):
    function = compiled(division(dump_path, when="nonfinite", keep_last=2))
    run(function, [1, 2, 4, 0, 5])
    calls = read(dump_path).ranks[0].calls
    assert [call.step for call in calls] == [1, 2, 3]
    for call, divisor in zip(calls, [2.0, 4.0, 0.0], strict=True):
        args, kwargs = call.load_args()
        assert torch.equal(args[1], torch.full((100,), divisor))
        assert kwargs == {}
        assert torch.equal(args[0] / args[1], call.load_outputs())
        described = call.record["outputs"]["tensor"]
        assert (described["shape"], described["stride"], described["device"]) == ([100], [1], "cpu")


def test_changes_in_place_after_a_call_do_not_reach_what_is_held(dump_path):
    function = compiled(division(dump_path, when="nonfinite", keep_last=3))
    x, y = torch.ones(100), torch.ones(100)
    for value in (1.0, 2.0, 0.0):
        y.fill_(value)
        function(x, y).fill_(7)
        x.add_(1)
    for call, (above, below) in zip(
        read(dump_path).ranks[0].calls, [(1.0, 1.0), (2.0, 2.0), (3.0, 0.0)], strict=True
    ):
        (numerator, divisor), _ = call.load_args()
        assert (float(numerator[0]), float(divisor[0])) == (above, below)
        assert torch.equal(call.load_outputs(), numerator / divisor)


def test_only_the_first_such_step_is_saved(dump_path):
    function = compiled(division(dump_path, when="nonfinite:first", keep_last=1))
    run(function, [1, 2, 0, 3, 0])
    assert steps_of(dump_path) == {"inference": [1, 2]} or steps_of(dump_path) == {
        "forward": [1, 2]
    }


def test_a_thousand_clean_steps_leave_no_tensors_behind(dump_path):
    function = compiled(division(dump_path, when="nonfinite", keep_last=3))
    run(function, range(1, 1001))
    assert tensors_in(dump_path) == []
    (row,) = summary_of("quotient")
    assert (row.dumped, row.calls) == (0, 0)
    assert row.tagged == sum(row.missing.values()) == 1
    assert list(row.missing) == ["not triggered: `when` asked for no step of it"]
    assert trigger._memory._bytes <= 3 * 3 * 400


def summary_of(scope):
    with pytest.warns(DumpWarning, match="nothing of it is saved"):
        rows = summary().rows
    return [row for row in rows if row.scope == scope]


def test_the_account_adds_up_where_some_steps_are_saved(dump_path):
    function = division(dump_path, when="nonfinite")
    run(function, [1, 0, 2])
    (row,) = summary().rows
    assert (row.tagged, row.dumped, row.calls) == (3, 1, 1)
    assert row.missing == {"not triggered: `when` asked for no step of it": 2}


def test_a_predicate_is_asked_of_each_tensor(dump_path):
    asked = []

    def is_large(tensor):
        asked.append(float(tensor.max()))
        return tensor.max() > 10

    function = compiled(division(dump_path, when=is_large))
    run(function, [1, 0.05, 2])
    assert steps_of(dump_path).popitem()[1] == [1]
    assert asked[:3] == [1, 1, 1]


def test_a_predicate_that_raises_is_taken_for_false_and_named(dump_path):
    def broken(tensor):
        raise KeyError("no such thing")

    function = compiled(division(dump_path, when=broken))
    with pytest.warns(DumpWarning, match=r"raised KeyError\('no such thing'\) for a tensor of"):
        results = run(function, [1, 0])
    assert math.isinf(results[1][0])
    assert tensors_in(dump_path) == []


def test_a_nan_of_the_backward_brings_the_forward_that_is_kept(dump_path):
    def root(x):
        with data_dump("root", path=str(dump_path), when="nonfinite", keep_last=1):
            return torch.sqrt(x)

    function = compiled(root)
    for value in (4.0, 0.0, 9.0):
        function(torch.full((100,), value, requires_grad=True)).sum().backward()
    assert steps_of(dump_path) == {"forward": [1], "backward": [0, 1]}


def test_without_keep_last_only_the_graph_that_holds_it_is_saved(dump_path):
    def root(x):
        with data_dump("root", path=str(dump_path), when="nonfinite"):
            return torch.sqrt(x)

    function = compiled(root)
    for value in (4.0, 0.0):
        function(torch.full((100,), value, requires_grad=True)).sum().backward()
    assert steps_of(dump_path) == {"backward": [1]}


def test_each_outermost_scope_has_a_trigger_of_its_own(dump_path):
    def function(x, y):
        with data_dump("sum", path=str(dump_path)):
            z = x + y
        with data_dump("safe", path=str(dump_path), when="nonfinite"):
            s = z.sin()
        with data_dump("quotient", path=str(dump_path), when="nonfinite"):
            with data_dump("inner"):
                c = z.cos()
            return x / y, s, c

    run_all = compiled(function)
    for divisor in (1.0, 0.0):
        run_all(torch.ones(100), torch.full((100,), divisor))
    (rank,) = read(dump_path).ranks
    assert rank.problems == []
    assert [(call.step, call.scope) for call in rank.calls] == [
        (0, "sum"),
        (1, "sum"),
        (1, "quotient/inner"),
        (1, "quotient"),
    ]
    assert len({(call.step, call.order) for call in rank.calls}) == 4


@pytest.mark.parametrize("data", ["stats", "both"])
def test_statistics_wait_for_the_trigger_as_well(dump_path, data):
    function = compiled(division(dump_path, when="nonfinite", data=data))
    run(function, [1, 0])
    (file,) = dump_path.rglob("stats.csv")
    assert file.parent.name == "1"
    with open(file, newline="") as text:
        rows = list(csv.DictReader(text))
    assert [(row["slot"], row["mean"], row["shape"]) for row in rows] == [
        ("INPUT.0", "1.0", "100"),
        ("INPUT.1", "0.0", "100"),
        ("OUTPUT.0", "", "100"),
    ]
    assert rows[2]["positive_infinities"] == "100"
    assert len(list(dump_path.rglob("*.npy"))) == (3 if data == "both" else 0)


def test_the_mode_holds_for_what_is_held(dump_path):
    function = compiled(division(dump_path, when="nonfinite", mode="output"))
    run(function, [1, 0])
    (call,) = read(dump_path).ranks[0].calls
    assert not call.input_files
    assert len(call.output_files) == 1
    assert call.record["args"][0]["tensor"]["shape"] == [100]


def test_past_max_held_steps_and_then_tensors_are_let_go(dump_path):
    function = compiled(division(dump_path, when="nonfinite", keep_last=9, max_held="2KiB"))
    run(function, [1, 2, 3, 0])
    assert steps_of(dump_path).popitem()[1] == [3]
    small = dump_path / "small"
    function = compiled(division(small, when="nonfinite", max_held=1000))
    with pytest.warns(DumpWarning, match="budget: max_held=1000 B of the process is reached"):
        run(function, [0])
    (call,) = read(small).ranks[0].calls
    assert len(call.record["files"]) == 2
    assert call.record["statistics"] == [lost["slot"] for lost in call.record["missing"]]


def test_operators_that_raise_do_not_hide_the_nan_before(dump_path):
    def quotient():
        with data_dump("mine", path=dump_path, when="nonfinite"):
            x = torch.ones(100) / torch.zeros(100)
            torch.mm(x, x)

    with pytest.raises(RuntimeError):
        quotient()
    (rank,) = read(dump_path).ranks
    assert [call.target for call in rank.calls if call.finished][-1] == "aten.div.Tensor"


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float64", "complex64", "float8_e5m2", "float8_e4m3fn"]
)
def test_every_dtype_that_has_a_nan_is_looked_at(dtype):
    dtype = getattr(torch, dtype)
    clean = torch.full((100,), 400.0).to(dtype)
    assert not trigger.is_nonfinite(clean)
    stained = torch.full((100,), 400.0)
    stained[37] = math.nan
    assert trigger.is_nonfinite(stained.to(dtype))


@pytest.mark.parametrize("dtype", ["int64", "bool", "uint8", "int32"])
def test_dtypes_without_a_nan_never_fire(dtype):
    assert not trigger.is_nonfinite(torch.ones(3).to(getattr(torch, dtype)))


def test_sums_that_overflow_are_not_taken_for_infinities():
    assert not trigger.is_nonfinite(torch.full((4,), 1e308, dtype=torch.float64))
    assert not trigger.is_nonfinite(torch.full((4,), 3e38))
    assert trigger.is_nonfinite(torch.tensor([math.inf, -math.inf]))


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"when": "nan"}, ValueError),
        ({"when": 1}, TypeError),
        ({"keep_last": -1}, ValueError),
        ({"keep_last": 1.5}, TypeError),
        ({"max_held": 0}, ValueError),
    ],
)
def test_illegal_values_are_refused(option, error):
    with pytest.raises(error, match=next(iter(option))):
        data_dump("mine", **option)


def test_the_environment_can_ask_for_it(dump_path, monkeypatch):
    monkeypatch.setenv("TORCHAIR_SCOPE_WHEN", "nonfinite")
    monkeypatch.setenv("TORCHAIR_SCOPE_KEEP_LAST", "1")
    run(division(dump_path), [1, 2, 0])
    assert steps_of(dump_path) == {"forward": [1, 2]}
