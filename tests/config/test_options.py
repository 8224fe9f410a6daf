"""Options as a user sets and reads them."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from torchair_scope.config import CompilerConfig


def keep_all(node: object) -> object:
    return node


def test_nothing_is_dumped_by_default() -> None:
    debug = CompilerConfig().debug
    for group in (debug.data_dump, debug.graph_dump):
        assert group.type.value is None
        assert not group.type
        assert not group.enabled
        assert group.path is None
    assert debug.data_dump.filter is None


@pytest.mark.parametrize(("group", "value"), [("data_dump", "npy"), ("graph_dump", "py")])
def test_type_is_read_as_an_option_object_with_its_value(group: str, value: str) -> None:
    options = getattr(CompilerConfig().debug, group)
    options.type = value
    assert options.type.value == value
    assert options.type
    assert options.enabled
    options.type = None
    assert options.type.value is None
    assert not options.enabled


def test_type_can_be_set_through_its_option_object_with_the_same_check() -> None:
    data_dump = CompilerConfig().debug.data_dump
    data_dump.type.value = "npy"
    assert data_dump.enabled
    with pytest.raises(ValueError, match="not in optional list"):
        data_dump.type.value = "pt"


@pytest.mark.parametrize(
    ("group", "legal"), [("data_dump", "[None, 'npy']"), ("graph_dump", "[None, 'py']")]
)
@pytest.mark.parametrize("value", ["csv", "NPY", "", True, 1, ["npy"], b"npy"])
def test_any_other_type_is_refused_with_the_legal_ones(
    group: str, legal: str, value: object
) -> None:
    options = getattr(CompilerConfig().debug, group)
    with pytest.raises(ValueError, match="not in optional list") as refusal:
        options.type = value
    assert legal in str(refusal.value)
    assert repr(value) in str(refusal.value)
    assert options.type.value is None


def test_a_refused_type_leaves_the_one_before() -> None:
    data_dump = CompilerConfig().debug.data_dump
    data_dump.type = "npy"
    with pytest.raises(ValueError, match="not in optional list"):
        data_dump.type = "pt"
    assert data_dump.type.value == "npy"


@pytest.mark.parametrize("value", ["txt", "pbtxt"])
def test_forms_of_the_ge_graph_are_refused_with_what_to_use_instead(value: str) -> None:
    graph_dump = CompilerConfig().debug.graph_dump
    with pytest.raises(ValueError, match=r'GE graph.*use "py"'):
        graph_dump.type = value
    assert not graph_dump.enabled


@pytest.mark.parametrize(
    ("group", "class_name", "known"),
    [
        ("", "CompilerConfig", ["debug", "dump_config"]),
        ("debug", "DebugConfig", ["data_dump", "graph_dump"]),
        ("debug.data_dump", "DataDump", ["type", "path", "filter"]),
        ("debug.graph_dump", "GraphDump", ["type", "path"]),
    ],
)
def test_an_unknown_option_is_refused_with_the_known_ones_at_every_level(
    group: str, class_name: str, known: list[str]
) -> None:
    options: object = CompilerConfig()
    for name in group.split(".") if group else []:
        options = getattr(options, name)
    sentence = f"{class_name} has no option colour, all options {known}"
    with pytest.raises(ValueError) as on_set:  # noqa: PT011 - compared whole below
        options.colour = "red"  # type: ignore[attr-defined]
    assert str(on_set.value) == sentence
    with pytest.raises(AttributeError) as on_read:
        options.colour  # type: ignore[attr-defined]  # noqa: B018
    assert str(on_read.value) == sentence


def test_a_group_cannot_be_replaced_by_a_value() -> None:
    debug = CompilerConfig().debug
    with pytest.raises(TypeError, match=r"group of options \['type', 'path', 'filter'\].*'npy'"):
        debug.data_dump = "npy"  # type: ignore[assignment]
    assert not debug.data_dump.enabled


def test_path_is_made_absolute_when_it_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "link").symlink_to(target)
    data_dump = CompilerConfig().debug.data_dump
    monkeypatch.chdir(tmp_path)
    data_dump.path = "link/dump"
    monkeypatch.chdir("/")
    assert data_dump.path == os.path.join(os.path.realpath(target), "dump")
    data_dump.path = tmp_path
    assert data_dump.path == os.path.realpath(tmp_path)


def test_path_set_to_none_is_unset() -> None:
    data_dump = CompilerConfig().debug.data_dump
    data_dump.path = "dump"
    data_dump.path = None
    assert data_dump.path is None


@pytest.mark.parametrize("value", [3, b"dump", ["dump"]])
def test_path_that_is_no_path_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match=r"path must be str, os\.PathLike or None"):
        CompilerConfig().debug.data_dump.path = value  # type: ignore[assignment]


def test_filter_takes_a_callable_or_none_and_refuses_the_rest_at_once() -> None:
    data_dump = CompilerConfig().debug.data_dump
    data_dump.filter = keep_all
    assert data_dump.filter is keep_all
    with pytest.raises(TypeError, match="filter must be Callable or None, got <class 'str'>"):
        data_dump.filter = "add"  # type: ignore[assignment]
    assert data_dump.filter is keep_all
    data_dump.filter = None
    assert data_dump.filter is None


def test_configurations_do_not_share_values() -> None:
    one, other = CompilerConfig(), CompilerConfig()
    one.debug.data_dump.type = "npy"
    one.debug.data_dump.path = "dump"
    assert not other.debug.data_dump.enabled
    assert other.debug.data_dump.path is None


@pytest.mark.parametrize(
    ("group", "option", "value"),
    [
        ("data_dump", "type", "npy"),
        ("data_dump", "path", "dump"),
        ("data_dump", "filter", keep_all),
        ("graph_dump", "type", "py"),
        ("graph_dump", "path", "dump"),
    ],
)
def test_configurations_are_equal_as_long_as_every_option_is(
    group: str, option: str, value: object
) -> None:
    one, other = CompilerConfig(), CompilerConfig()
    assert one == other
    setattr(getattr(one.debug, group), option, value)
    assert one != other
    setattr(getattr(other.debug, group), option, value)
    assert one == other
    assert one != "a configuration"


def pickled(config: CompilerConfig) -> CompilerConfig:
    return pickle.loads(pickle.dumps(config))


@pytest.mark.parametrize("clone", [copy.deepcopy, pickled])
def test_a_copy_is_equal_and_independent(
    clone: Callable[[CompilerConfig], CompilerConfig],
) -> None:
    config = CompilerConfig()
    config.debug.data_dump.type = "npy"
    config.debug.data_dump.filter = keep_all
    copied = clone(config)
    assert copied == config
    copied.debug.data_dump.type = None
    assert config.debug.data_dump.enabled
    with pytest.raises(ValueError, match="has no option"):
        copied.debug.colour = "red"


def test_a_configuration_shows_its_options() -> None:
    config = CompilerConfig()
    config.debug.data_dump.type = "npy"
    assert repr(config) == (
        "CompilerConfig(debug=DebugConfig("
        "data_dump=DataDump(type='npy', path=None, filter=None), "
        "graph_dump=GraphDump(type=None, path=None)), "
        "dump_config=DumpConfig(enable_dump=False, dump_path='./', dump_mode='all', "
        "dump_step='', dump_data='tensor', dump_layer=''))"
    )
