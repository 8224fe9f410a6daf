"""What `data_dump` and `dump_ops` put on the graph, and what they leave as it was."""

import copy
import inspect
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import torchair_scope as torchair
from torchair_scope.capture.tags import scope_of, tag_of
from torchair_scope.scope import data_dump, dump_ops, summary
from torchair_scope.store.reader import read


def scopes_of(function, *inputs, **compile_options):
    """Target and scope of each operator of the graph that Dynamo makes."""
    seen = []

    def backend(gm, example_inputs):
        for node in gm.graph.nodes:
            if node.op.startswith("call_"):
                seen.append((getattr(node.target, "__name__", node.target), scope_of(node)))
        return gm.forward

    torch.compile(function, backend=backend, fullgraph=True, **compile_options)(*inputs)
    return seen


def test_only_operators_inside_the_block_are_tagged():
    def function(x):
        x = x.sin()
        with data_dump("mine"):
            x = x.cos()
        return x.tan()

    assert scopes_of(function, torch.ones(2)) == [("sin", None), ("cos", "mine"), ("tan", None)]


def test_nested_scopes_have_a_path_and_the_outer_one_comes_back():
    def function(x):
        with data_dump("outer"):
            x = x.sin()
            with data_dump("inner"):
                x = x.cos()
            return x.tan()

    assert scopes_of(function, torch.ones(2)) == [
        ("sin", "outer"),
        ("cos", "outer/inner"),
        ("tan", "outer"),
    ]


def test_a_scope_without_a_name_is_called_by_file_and_line():
    def function(x):
        with data_dump():
            return x.sin()

    line = inspect.getsourcelines(function)[1] + 1
    assert scopes_of(function, torch.ones(2)) == [("sin", f"test_scope.py:{line}")]


def test_a_scope_knows_where_it_was_opened_when_it_has_a_name():
    tags = []

    def function(x):
        with data_dump("named"):
            return x.sin()

    def backend(gm, example_inputs):
        tags.extend(tag_of(node) for node in gm.graph.nodes if node.op == "call_method")
        return gm.forward

    torch.compile(function, backend=backend)(torch.ones(2))
    line = inspect.getsourcelines(function)[1] + 1
    assert [tag.opened_at for tag in tags] == [f"test_scope.py:{line}"]


def test_loops_comprehensions_early_returns_and_exceptions_keep_scopes_apart():
    def early(x):
        with data_dump("early"):
            if x.shape[0] == 2:
                return x.sin()
            return x.cos()

    def function(x):
        for index in range(2):
            with data_dump(f"round{index}"):
                x = x + index
        with data_dump("list"):
            x = sum([x * factor for factor in (2, 3)])
        x = early(x)
        try:
            with data_dump("raises"):
                raise ValueError
        except ValueError:
            return x.tan()

    tagged = scopes_of(function, torch.ones(2))
    assert [scope for _, scope in tagged[:2]] == ["round0", "round1"]
    assert tagged[-2:] == [("sin", "early"), ("tan", None)]
    assert {scope for _, scope in tagged[2:-2]} == {"list"}


def test_a_scope_survives_dynamic_shapes():
    def function(x):
        with data_dump("mine"):
            y = x.reshape(x.shape[0] * x.shape[1])
        return y.sin()

    tagged = scopes_of(function, torch.ones(2, 3), dynamic=True)
    assert ("reshape", "mine") in tagged
    assert ("sin", None) in tagged


@pytest.mark.parametrize("name", [3, b"mlp", torch.ones(1)])
def test_a_name_that_is_no_string_is_refused(name):
    with pytest.raises(TypeError, match="a scope's name is a string or None"):
        data_dump(name)
    with pytest.raises(TypeError, match="a scope's name is a string or None"):
        torchair.dump_ops(torch.sin, name=name)


@torchair.dump_ops
def decorated(x: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
    """Scale the sine."""
    return x.sin() * scale


def test_a_decorated_function_keeps_name_docstring_and_signature():
    assert decorated.__name__ == "decorated"
    assert decorated.__doc__ == "Scale the sine."
    assert decorated.__module__ == __name__
    assert str(inspect.signature(decorated)) == (
        "(x: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor"
    )
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert copy.deepcopy(decorated) is decorated


@pytest.mark.parametrize(
    ("decorate", "scope"),
    [
        (torchair.dump_ops, "plain"),
        (torchair.dump_ops(), "plain"),
        (torchair.dump_ops(name="rope"), "rope"),
    ],
)
def test_every_form_of_the_decorator_tags_a_function(decorate, scope):
    def plain(x):
        return x.sin()

    plain.__qualname__ = "plain"
    scoped = decorate(plain)
    assert scopes_of(lambda x: scoped(x).cos(), torch.ones(2)) == [("sin", scope), ("cos", None)]


class Holder:
    """Has one method of each kind, decorated on either side of the descriptor."""

    factor = 3

    @torchair.dump_ops(name="instance")
    def instance(self, x):
        return x.sin() * self.factor

    @classmethod
    @torchair.dump_ops(name="class_inside")
    def class_inside(cls, x):
        return x.sin() * cls.factor

    @torchair.dump_ops(name="class_outside")
    @classmethod
    def class_outside(cls, x):
        return x.sin() * cls.factor

    @staticmethod
    @torchair.dump_ops(name="static_inside")
    def static_inside(x):
        return x.sin()

    @torchair.dump_ops(name="static_outside")
    @staticmethod
    def static_outside(x):
        return x.sin()


class Heir(Holder):
    factor = 5


@pytest.mark.parametrize(
    "method", ["instance", "class_inside", "class_outside", "static_inside", "static_outside"]
)
@pytest.mark.parametrize("cls", [Holder, Heir])
def test_methods_keep_their_binding_and_their_tag(cls, method):
    bound = getattr(cls(), method)
    factor = 1 if method.startswith("static") else cls.factor
    expected = torch.ones(2).sin() * factor
    tagged = scopes_of(lambda x: bound(x), torch.ones(2))
    assert tagged
    assert {scope for _, scope in tagged} == {method}
    result = torch.compile(bound, backend="eager", fullgraph=True)(torch.ones(2))
    torch.testing.assert_close(result, expected)


def test_a_bound_method_stays_bound_to_its_object():
    holder = Holder()
    scoped = torchair.dump_ops(Heir().class_inside, name="late")
    assert scoped.__self__ is Heir
    scoped = torchair.dump_ops(holder.instance, name="late")
    assert scoped.__self__ is holder
    assert {scope for _, scope in scopes_of(scoped, torch.ones(2))} == {"late/instance"}


def test_generators_and_callable_objects_are_tagged():
    @torchair.dump_ops(name="generator")
    def parts(x):
        yield x.sin()
        yield x.cos()

    shift = torchair.dump_ops(torch.add, name="builtin")

    def function(x):
        first, second = parts(x)
        return shift(first, second)

    assert [scope for _, scope in scopes_of(function, torch.ones(2))] == [
        "generator",
        "generator",
        "builtin",
    ]


@torchair.dump_ops
class ScopedLayer(torch.nn.Module):
    """A layer."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run."""
        return self.linear(x).sin()


class InheritingLayer(ScopedLayer):
    pass


class PlainLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run."""
        return self.linear(x).sin()


@pytest.mark.parametrize("cls", [ScopedLayer, InheritingLayer])
def test_a_decorated_module_class_and_its_heirs_are_tagged_and_stay_what_they_are(cls):
    assert isinstance(cls, type)
    layer = cls()
    assert list(layer.state_dict()) == ["linear.weight", "linear.bias"]
    assert str(inspect.signature(layer.forward)) == "(x: torch.Tensor) -> torch.Tensor"
    for twin in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert {scope for _, scope in scopes_of(twin, torch.ones(1, 2))} == {"ScopedLayer"}


def test_a_live_module_is_tagged_alone_and_stays_what_it_is():
    model = torch.nn.Sequential(PlainLayer(), PlainLayer())
    keys = list(model.state_dict())
    assert torchair.dump_ops(model[1], name="second") is model[1]
    assert type(model[1]) is PlainLayer
    assert list(model.state_dict()) == keys
    assert str(inspect.signature(model[1].forward)) == "(x: torch.Tensor) -> torch.Tensor"
    assert model[1].forward.__doc__ == "Run."
    scopes = [scope for _, scope in scopes_of(model, torch.ones(1, 2))]
    assert scopes == [None, None, "second", "second"]


@pytest.mark.parametrize(
    "twin_of", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_a_copied_or_pickled_live_module_has_a_scope_of_its_own(twin_of):
    layer = torchair.dump_ops(PlainLayer(), name="mine")
    twin = twin_of(layer)
    with torch.no_grad():
        twin.linear.weight.zero_()
        twin.linear.bias.zero_()
    assert {scope for _, scope in scopes_of(twin, torch.ones(1, 2))} == {"mine"}
    result = torch.compile(twin, backend="eager")(torch.ones(1, 2))
    assert result.count_nonzero() == 0
    torchair.remove_dump_ops(twin)
    assert {scope for _, scope in scopes_of(layer, torch.ones(1, 2))} == {"mine"}


def test_a_live_module_with_a_scope_is_exported_as_without():
    layer = torchair.dump_ops(PlainLayer(), name="mine")
    assert layer.forward.__code__ is PlainLayer.forward.__code__
    assert layer.forward.__self__ is layer
    x = torch.ones(1, 2)
    for strict in (False, True):
        exported = torch.export.export(layer, (x,), strict=strict)
        targets = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
        assert targets == ["aten.linear.default", "aten.sin.default"]
        torch.testing.assert_close(exported.module()(x), layer.linear(x).sin())


def test_dump_ops_on_a_live_module_is_seen_by_code_that_was_compiled_before():
    model = torch.nn.Sequential(PlainLayer(), PlainLayer())
    seen = []

    def backend(gm, example_inputs):
        seen.append({scope_of(node) for node in gm.graph.nodes if node.op == "call_method"})
        return gm.forward

    compiled = torch.compile(model, backend=backend)
    compiled(torch.ones(1, 2))
    torchair.dump_ops(model[0], name="late")
    compiled(torch.ones(1, 2))
    torchair.remove_dump_ops(model[0])
    compiled(torch.ones(1, 2))
    assert seen[:2] == [{None}, {"late", None}]
    assert seen[2:] in ([], [{None}])


def test_a_compiled_module_is_scoped_inside():
    layer = PlainLayer()
    compiled = torch.compile(layer, backend="eager")
    assert torchair.dump_ops(compiled, name="mine") is compiled
    assert {scope for _, scope in scopes_of(layer, torch.ones(1, 2))} == {"mine"}
    torchair.remove_dump_ops(compiled)
    assert "forward" not in layer.__dict__


def test_dump_ops_can_be_undone_everywhere():
    def plain(x):
        return x.sin()

    class Layer(PlainLayer):
        def forward(self, x):
            return x.sin()

    own = Layer.forward
    assert torchair.remove_dump_ops(torchair.dump_ops(plain)) is plain
    assert torchair.remove_dump_ops(torchair.dump_ops(Layer)).forward is own
    holder = Holder()
    scoped = torchair.dump_ops(holder.instance)
    assert torchair.remove_dump_ops(scoped) == holder.instance
    layer = Layer()
    layer.forward = plain
    twice = torchair.dump_ops(torchair.dump_ops(layer, name="a"), name="b")
    assert {scope for _, scope in scopes_of(twice, torch.ones(2))} == {"b/a"}
    torchair.remove_dump_ops(layer)
    assert torchair.remove_dump_ops(layer).forward is plain


def test_any_number_of_decorated_functions_can_be_compiled_each_on_its_own():
    for index in range(torch._dynamo.config.recompile_limit + 2):
        scoped = torchair.dump_ops(lambda x, index=index: x.sin() + index, name=f"f{index}")
        assert {scope for _, scope in scopes_of(scoped, torch.ones(2))} == {f"f{index}"}


def test_any_number_of_live_modules_can_be_compiled_each_on_its_own():
    count = torch._dynamo.config.recompile_limit + 2
    layers = [torchair.dump_ops(PlainLayer(), name=f"layer{index}") for index in range(count)]
    seen = set()

    def backend(gm, example_inputs):
        seen.update(scope_of(node) for node in gm.graph.nodes if node.op == "call_method")
        return gm.forward

    def model(x):
        for layer in layers:
            torch._dynamo.graph_break()
            x = layer(x)
        return x

    with torch.no_grad():
        torch.compile(model, backend=backend)(torch.ones(1, 2))
    assert seen == {f"layer{index}" for index in range(count)}


@pytest.mark.parametrize("target", [PlainLayer(), PlainLayer, torch.sin, 3, len])
def test_undoing_what_was_not_done_is_an_error(target):
    with pytest.raises(ValueError, match="dump_ops was not applied"):
        torchair.remove_dump_ops(target)


@pytest.mark.parametrize("target", [3, "mlp", int])
def test_what_has_no_operators_is_refused(target):
    with pytest.raises(TypeError, match=r"dump_ops takes"):
        torchair.dump_ops(target)


def test_a_scope_in_eager_code_dumps_and_does_not_warn(dump_path, monkeypatch):
    monkeypatch.setenv("TORCHAIR_SCOPE_PATH", str(dump_path))
    with data_dump("mine"):
        result = torch.ones(2) + 1
    assert result.tolist() == [2, 2]
    (rank,) = read(dump_path).ranks
    assert [(call.node, call.scope) for call in rank.calls] == [("ones", "mine"), ("add", "mine")]


def test_without_a_path_an_eager_scope_dumps_to_the_current_folder(tmp_path):
    with data_dump():
        torch.ones(2)
    assert (tmp_path / "worldsize1_global_rank0").is_dir()


def shifted(x):
    with data_dump("shift"):
        return x + 1


def test_switched_off_scopes_leave_no_tag_and_dump_nothing_until_they_are_on_again(tmp_path):
    with torchair.scope.disabled():
        assert scopes_of(shifted, torch.ones(2)) == [("add", None)]
        shifted(torch.ones(2))
        assert not list(tmp_path.iterdir())
    assert scopes_of(shifted, torch.ones(2)) == [("add", "shift")]
    torchair.scope.disable()
    try:
        torch._dynamo.reset()
        assert scopes_of(shifted, torch.ones(2)) == [("add", None)]
    finally:
        torchair.scope.enable()
    shifted(torch.ones(2))
    assert list(tmp_path.iterdir())


def test_a_compiled_function_follows_the_switch():
    seen = []

    def backend(gm, example_inputs):
        seen.append({scope_of(node) for node in gm.graph.nodes if node.op == "call_function"})
        return gm.forward

    compiled = torch.compile(shifted, backend=backend)
    compiled(torch.ones(2))
    with torchair.scope.disabled():
        compiled(torch.ones(2))
    compiled(torch.ones(2))
    assert seen == [{"shift"}, {None}]


@pytest.mark.parametrize(("value", "said"), [("0", "False"), ("1", "True"), ("off", "can be 0")])
def test_the_environment_switches_scopes_off_and_a_wrong_value_is_refused(value, said):
    done = subprocess.run(
        [sys.executable, "-c", "from torchair_scope import switch; print(switch.on)"],
        env={**os.environ, "TORCHAIR_SCOPE": value},
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent,
    )
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize("backend", ["eager", None])
def test_a_scope_on_a_live_module_is_opened_where_the_user_calls_it(backend):
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Softplus()))
    dump_ops(model[0][0])

    def call(x):
        return model(x)

    run = call if backend is None else torch.compile(call, backend=backend)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(torch.ones(2))
        (row,) = summary().rows
    line = inspect.getsourcelines(call)[1] + 1
    assert row.opened_at == f"test_scope.py:{line}"
