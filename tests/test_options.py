"""Options of scopes: which values they take, where they come from, and what they leave out."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys

import pytest
import torch

import torchair_scope as torchair
from torchair_scope.numbers import numbers
from torchair_scope.options import in_force, options_of
from torchair_scope.scope import configure, data_dump, dump_ops
from torchair_scope.store.reader import MissingTensorError, read


@pytest.fixture(autouse=True)
def _no_defaults():
    with configure():
        yield


def compiled(function, path=None, **options):
    if path is not None:
        options["path"] = str(path)
    options["backend"] = "aot_eager"
    return torch.compile(function, backend="torchair_scope", options=options, fullgraph=True)


def calls_of(path):
    """(scope, step, node) of each call; none if there is no dump."""
    if not path.exists():
        return []
    (rank,) = read(path).ranks
    assert rank.problems == []
    return [(call.scope, call.step, call.node) for call in rank.calls]


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "members"),
    [
        ("0|3-5|10", {0, 3, 4, 5, 10}),
        ("", set()),
        ("7|", {7}),
        (3, {3}),
        ({1, 2}, {1, 2}),
        ([4, 1], {1, 4}),
        (range(0, 20, 5), {0, 5, 10, 15}),
        (range(0), set()),
    ],
)
def test_numbers_are_written_as_in_torchair_or_as_python_has_them(value, members):
    found = numbers(value, "steps")
    assert {number for number in range(30) if number in found} == members


@pytest.mark.parametrize("value", ["a", "1-", "1,2", "5-3", "-1", -1, {-2}, range(-3, 3)])
def test_numbers_that_are_none_are_refused(value):
    with pytest.raises(ValueError, match="steps"):
        numbers(value, "steps")


@pytest.mark.parametrize("value", [1.5, True, {"1"}, object()])
def test_what_can_be_no_numbers_is_refused(value):
    with pytest.raises(TypeError, match=r"ranks is .*a string such as"):
        numbers(value, "ranks")


@pytest.mark.parametrize("give", [data_dump, dump_ops, configure])
def test_a_misspelt_option_is_refused_with_the_nearest_right_one(give):
    with pytest.raises(TypeError, match="no option 'stesp': did you mean 'steps'"):
        give(stesp="1")


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"mode": "inputs"}, ValueError),
        ({"mode": 1}, TypeError),
        ({"ops": 1}, TypeError),
        ({"path": 1}, TypeError),
        ({"on_error": "ignore"}, ValueError),
    ],
)
def test_an_illegal_value_is_refused_by_name(option, error):
    with pytest.raises(error, match=next(iter(option))):
        data_dump("mine", **option)


# --- where they come from ------------------------------------------------------------------------


def test_the_more_local_option_wins(monkeypatch):
    given = options_of({"mode": "input"}, "here")
    assert in_force(given).mode == "input"
    assert in_force(options_of({}, "here")).mode == "all"
    monkeypatch.setenv("TORCHAIR_SCOPE_MODE", "output")
    assert in_force(options_of({}, "here")).mode == "output"
    with configure(mode="all"):
        assert in_force(options_of({}, "here")).mode == "all"
        assert in_force(given).mode == "input"
        with configure(mode=None):
            assert in_force(options_of({}, "here")).mode == "output"
    assert in_force(options_of({}, "here")).mode == "output"


def test_configure_holds_without_a_with_block(dump_path):
    configure(path=dump_path, steps=1)
    for _ in range(3):
        with data_dump("mine"):
            torch.ones(2)
    assert calls_of(dump_path) == [("mine", 1, "ones")]


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TORCHAIR_SCOPE_STESP", "1", "did you mean 'TORCHAIR_SCOPE_STEPS'"),
        ("TORCHAIR_SCOPE_MODE", "al", "mode is 'al'; it can be one of all, input, output"),
    ],
)
def test_a_wrong_variable_fails_at_import(variable, value, message, monkeypatch):
    monkeypatch.setenv(variable, value)
    finished = subprocess.run(
        [sys.executable, "-c", "import torchair_scope"],
        capture_output=True,
        text=True,
        check=False,
        cwd=torchair.__path__[0] + "/..",
    )
    assert message in finished.stderr


def test_a_scope_has_the_options_of_the_one_around_it_but_for_its_own(dump_path):
    def function(x):
        with data_dump("outer", steps="0", mode="output"):
            x = x.sin()
            with data_dump("inner", steps="1"):
                x = x.cos()
            return x.tan()

    run = compiled(function, dump_path)
    for _ in range(3):
        run(torch.ones(2))
    assert calls_of(dump_path) == [
        ("outer", 0, "sin"),
        ("outer", 0, "tan"),
        ("outer/inner", 1, "cos"),
    ]
    (rank,) = read(dump_path).ranks
    assert not any(call.input_files for call in rank.calls)


# --- steps ---------------------------------------------------------------------------------------


def test_steps_that_are_not_selected_leave_nothing_and_compute_the_same(dump_path):
    def function(x):
        x = x * 2
        with data_dump("mine", steps="1|3-4"):
            x = x + 1
        return x.sin()

    run = compiled(function, dump_path)
    x = torch.randn(5)
    for step in range(6):
        assert torch.equal(run(x), (x * 2 + 1).sin())
        assert dump_path.exists() == (step > 0)
    assert calls_of(dump_path) == [("mine", step, "add") for step in (1, 3, 4)]
    (rank,) = read(dump_path).ranks
    assert [record["step"] for record in rank.steps] == [1, 3, 4]
    assert sorted(path.name for path in (rank.folder / "graph_1").parent.glob("graph_*/*")) == [
        "1",
        "3",
        "4",
    ]


def test_steps_of_the_backward_are_counted_by_themselves(dump_path):
    def function(x):
        with data_dump("mine", steps=1):
            return x.sin().sum()

    run = compiled(function, dump_path)
    x = torch.ones(3, requires_grad=True)
    for _ in range(3):
        run(x).backward()
    (rank,) = read(dump_path).ranks
    assert {call.step for call in rank.calls} == {1}
    assert {graph["direction"] for graph in rank.graphs} == {"forward", "backward"}


def test_steps_of_eager_code_are_entries_and_the_backward_follows_them(dump_path):
    x = torch.ones(3, requires_grad=True)
    for _ in range(4):
        with data_dump("mine", path=dump_path, steps={0, 2}):
            y = x.sin()
        y.sum().backward()
    (rank,) = read(dump_path).ranks
    assert rank.problems == []
    steps = {}
    for call in rank.calls:
        steps.setdefault(call.target, []).append(call.step)
    assert steps == {
        "aten.sin.default": [0, 2],
        "aten.cos.default": [0, 1],
        "aten.mul.Tensor": [0, 1],
    }


# --- ranks ---------------------------------------------------------------------------------------


def test_a_rank_that_is_not_selected_makes_no_folder(dump_path, monkeypatch):
    def function(x):
        with data_dump("mine", ranks="1-3", path=dump_path):
            return x + 1

    run = compiled(function)
    run(torch.ones(2))
    with data_dump("eager", ranks={1}, path=dump_path):
        torch.ones(2)
    assert not dump_path.exists()
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    run(torch.ones(2))
    assert calls_of(dump_path) == [("mine", 1, "add")]


# --- mode ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "files"), [("input", ["INPUT.0", "INPUT.1"]), ("output", ["OUTPUT.0"])]
)
@pytest.mark.parametrize("how", ["compiled", "eager"])
def test_mode_says_which_tensors_have_a_file(mode, files, how, dump_path):
    def function(x):
        with data_dump("mine", mode=mode, path=dump_path):
            return x + 1

    (compiled(function) if how == "compiled" else function)(torch.ones(2))
    (rank,) = read(dump_path).ranks
    (call,) = rank.calls
    assert rank.problems == []
    assert sorted([*call.input_files, *call.output_files]) == files
    load = call.load_outputs if mode == "input" else call.load_args
    with pytest.raises(MissingTensorError, match=f"only {mode}s are dumped"):
        load()


# --- ops -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["compiled", "eager"])
def test_ops_is_a_pattern_that_targets_are_compared_with(how, dump_path):
    def function(x):
        with data_dump("mine", ops="aten.[ac]*", path=dump_path):
            return (x + 1).sin().cos()

    (compiled(function) if how == "compiled" else function)(torch.ones(2))
    assert [node for _, _, node in calls_of(dump_path)] == ["add", "cos"]


def is_sine(node):
    return "sin" in str(node.target)


@pytest.mark.parametrize("ops", [is_sine, lambda node: "sin" in node.name])
def test_ops_is_a_predicate_on_the_node(ops, dump_path):
    def function(x):
        with data_dump("mine", ops=ops):
            return (x + 1).sin().cos()

    compiled(function, dump_path)(torch.ones(2))
    assert calls_of(dump_path) == [("mine", 0, "sin")]


def test_a_predicate_may_be_written_where_the_scope_is_traced(dump_path):
    def function(x):
        with data_dump("mine", ops=lambda node: "sin" in node.name):
            return (x + 1).sin().cos()

    compiled(function, dump_path)(torch.ones(2))
    assert calls_of(dump_path) == [("mine", 0, "sin")]


def test_operators_that_ops_leaves_out_are_compiled(dump_path):
    parts = []

    def inner(gm, example_inputs):
        parts.append([node.name for node in gm.graph.nodes if node.op == "call_function"])
        return gm.forward

    def function(x):
        with data_dump("mine", ops="*sin*"):
            return (x + 1).sin().cos()

    config = torchair.CompilerConfig()
    config.debug.data_dump.path = str(dump_path)
    backend = torchair.get_npu_backend(compiler_config=config, inner=inner)
    torch.compile(function, backend=backend)(torch.ones(2))
    assert parts == [["add"], ["cos"]]


# --- path and on_error ---------------------------------------------------------------------------


def test_scopes_of_one_graph_may_have_dumps_of_their_own(tmp_path):
    path_of_a, path_of_b = tmp_path / "a", str(tmp_path / "b")

    def function(x):
        with data_dump("a", path=path_of_a):
            x = x.sin()
        with data_dump("b", path=path_of_b, steps=1):
            x = x.cos()
        return x

    run = compiled(function)
    run(torch.ones(2))
    run(torch.ones(2))
    assert calls_of(tmp_path / "a") == [("a", 0, "sin"), ("a", 1, "sin")]
    assert calls_of(tmp_path / "b") == [("b", 1, "cos")]


def test_a_scope_may_ask_for_errors(tmp_path):
    path = tmp_path / "file"
    path.write_text("")

    def function(x):
        with data_dump("mine", path=path, on_error="raise"):
            return x + 1

    with pytest.raises(NotADirectoryError):
        compiled(function)(torch.ones(2))


# --- dump_ops ------------------------------------------------------------------------------------


def test_dump_ops_takes_the_same_options(dump_path):
    @dump_ops(steps=1, ops="*sin*")
    def function(x):
        return (x + 1).sin()

    run = compiled(function, dump_path)
    run(torch.ones(2))
    run(torch.ones(2))
    assert calls_of(dump_path) == [(function.__qualname__, 1, "sin")]


def test_modules_of_one_class_may_have_options_of_their_own(dump_path):
    model = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Tanh())
    for step, layer in enumerate(model):
        dump_ops(layer, name="layer", steps=step)
    run = compiled(model, dump_path)
    run(torch.ones(2))
    run(torch.ones(2))
    assert calls_of(dump_path) == [("layer", 0, "tanh"), ("layer", 1, "tanh_1")]


def test_a_modules_options_are_copied_and_pickled_with_it(dump_path):
    layer = dump_ops(torch.nn.Tanh(), mode="output", ops=is_sine)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert again.forward.options == layer.forward.options
        assert again.forward.key == layer.forward.key


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize(
    ("option", "error", "text"),
    [
        ({"mode": "everything"}, ValueError, "mode is 'everything'; it can be one of all"),
        ({"steps": 1.5}, TypeError, "steps is 1.5"),
        ({"stesp": "1"}, TypeError, "no option 'stesp': did you mean 'steps'"),
    ],
)
def test_an_illegal_option_in_traced_code_is_the_error_that_it_is_elsewhere(
    fullgraph, option, error, text
):
    @torch.compile(backend="torchair_scope", fullgraph=fullgraph)
    def function(x):
        with data_dump("mine", **option):
            return x + 1

    with pytest.raises(error, match=re.escape(text)):
        function(torch.ones(2))


# --- values that traced code has not written down -----------------------------------------------

LIMIT = 2
MADE_OF_A_NUMBER = {
    "an int": lambda n: {"steps": n},
    "a bool": lambda n: {"mode": "output" if n > 1 else "all"},
    "a str": lambda n: {"mode": ("all", "input", "output")[n]},
    "a range": lambda n: {"steps": range(n)},
    "a list": lambda n: {"steps": [n, 0]},
    "a tuple": lambda n: {"steps": (n, 0)},
    "a set": lambda n: {"steps": {n, 0}},
    "a frozenset": lambda n: {"ranks": frozenset({0, n})},
    "a dict": lambda n: {"sample": {"head": n}},
    "a slice": lambda n: {"sample": slice(n)},
    "slices": lambda n: {"sample": (slice(n), slice(None, None, n))},
    "a product": lambda n: {"max_inflight": n * 1024},
}


class Holder:
    pass


def from_closure(make):
    limit = 2

    def function(x):
        with data_dump("mine", **make(limit)):
            return x + 1

    return function, ()


def from_global(make):
    def function(x):
        with data_dump("mine", **make(LIMIT)):
            return x + 1

    return function, ()


def from_attribute(make):
    holder = Holder()
    holder.number = 2

    def function(x):
        with data_dump("mine", **make(holder.number)):
            return x + 1

    return function, ()


def from_argument(make):
    def function(x, limit):
        with data_dump("mine", **make(limit)):
            return x + 1

    return function, (2,)


def saved(path):
    """What is dumped: step, node, files, and what is in them."""
    (rank,) = read(path).ranks
    return [
        (call.step, call.node, sorted(call.input_files), sorted(call.output_files), shapes(call))
        for call in rank.calls
    ]


def shapes(call):
    try:
        return [tuple(value.shape) for value in call.load_outputs()]
    except MissingTensorError:
        return None


@pytest.mark.parametrize("source", [from_closure, from_global, from_attribute, from_argument])
@pytest.mark.parametrize("kind", MADE_OF_A_NUMBER)
def test_an_option_may_be_made_of_what_dynamo_traces_as_a_variable(kind, source, tmp_path):
    x, make = torch.zeros(3, 3), MADE_OF_A_NUMBER[kind]
    function, arguments = source(make)
    run = torch.compile(
        function,
        backend="torchair_scope",
        options={"path": str(tmp_path / "traced"), "backend": "aot_eager"},
        fullgraph=True,
        dynamic=True,
    )
    for _ in range(3):
        run(x, *arguments)
    for _ in range(3):
        with data_dump("mine", path=tmp_path / "written", **make(2)):
            x + 1
    assert saved(tmp_path / "traced") == saved(tmp_path / "written")


def test_another_value_of_such_an_option_is_looked_up_anew(dump_path):
    def function(x, limit):
        with data_dump("mine", steps=[limit]):
            return x + 1

    run = compiled(function, dump_path)
    for limit in (0, 1, 0, 5):
        run(torch.zeros(3), limit)
    # Each value is a graph of its own, which counts its own steps: only limit 0 has had its step.
    assert calls_of(dump_path) == [("mine", 0, "add")]
