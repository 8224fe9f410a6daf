"""TorchAir's `dump_config`: its values and errors, and what it does to a dump."""

from __future__ import annotations

import copy

import pytest
import torch

import torchair_scope as torchair
from torchair_scope.config import CompilerConfig
from torchair_scope.scope import data_dump
from torchair_scope.store.reader import read


def run(function, config, *inputs, times=1):
    backend = torchair.get_npu_backend(compiler_config=config, inner="aot_eager")
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for _ in range(times):
        compiled(*inputs)


def scoped(x):
    x = x.sin() * 2
    with data_dump("mine"):
        x = x.cos()
    return x.tan()


def calls_of(path):
    (rank,) = read(path).ranks
    assert rank.problems == []
    return [(call.step, call.node) for call in rank.calls]


@pytest.fixture
def config(dump_path):
    dump_path.mkdir()
    made = CompilerConfig()
    made.dump_config.enable_dump = True
    made.dump_config.dump_path = str(dump_path)
    return made


def test_values_read_as_torchair_reads_them(tmp_path):
    config = CompilerConfig().dump_config
    assert [getattr(config, name).value for name in config.option_names()] == [
        *("0", "./", "all", "", "tensor", "")
    ]
    config.enable_dump = True
    config.dump_mode = "input"
    config.dump_step = "0|3-5|10"
    config.dump_data = "stats"
    config.dump_layer = "mm_1 softmax"
    config.dump_path = tmp_path
    assert [getattr(config, name).value for name in config.option_names()] == [
        *("1", str(tmp_path), "input", "0|3-5|10", "stats", "mm_1 softmax")
    ]
    assert copy.deepcopy(config) == config != CompilerConfig().dump_config


@pytest.mark.parametrize(
    ("option", "value", "error", "message"),
    [
        ("enable_dump", 3, ValueError, r"Value 3 .* not in optional list \[False, True\]"),
        ("dump_mode", "both", ValueError, r"not in optional list \['input', 'output', 'all'\]"),
        ("dump_step", "1,2", ValueError, r"1,2 is Illegal format, correct example:0\|1\|2-5\|6"),
        ("dump_step", "5-3", ValueError, "ends before it begins"),
        ("dump_layer", "a*", ValueError, "correct example:Mul_1 Add1 Conv2D_1"),
        ("dump_path", "not/there", FileNotFoundError, "Please set legal dir path"),
        ("dump_data", "both", ValueError, r"not in optional list \['tensor', 'stats'\]"),
        ("quant_dumpable", True, ValueError, "DumpConfig has no option quant_dumpable, all opt"),
    ],
)
def test_illegal_values_have_torchairs_errors(option, value, error, message):
    with pytest.raises(error, match=message):
        setattr(CompilerConfig().dump_config, option, value)


def test_nothing_is_in_force_that_is_not_enabled(config, dump_path, tmp_path):
    config.dump_config.enable_dump = False
    config.dump_config.dump_step = "7"
    config.debug.data_dump.path = str(tmp_path / "other")
    run(scoped, config, torch.ones(2))
    assert calls_of(tmp_path / "other") == [(0, "cos")]
    assert not list(dump_path.iterdir())


def test_steps_and_mode_are_those_of_the_scopes(config, dump_path):
    config.dump_config.dump_step = "1|3"
    config.dump_config.dump_mode = "output"
    run(scoped, config, torch.ones(2), times=5)
    assert calls_of(dump_path) == [(1, "cos"), (3, "cos")]
    assert not any(call.input_files for call in read(dump_path).ranks[0].calls)


def test_named_nodes_are_dumped_besides_those_in_scopes(config, dump_path):
    config.dump_config.dump_layer = "sin tan"
    run(scoped, config, torch.ones(2))
    assert calls_of(dump_path) == [(0, "sin"), (0, "cos"), (0, "tan")]


def test_named_nodes_are_dumped_where_there_is_no_scope(config, dump_path):
    config.dump_config.dump_layer = "mul"
    run(lambda x: x.sin() * 2, config, torch.ones(2))
    assert calls_of(dump_path) == [(0, "mul")]


def test_without_named_nodes_a_graph_without_a_scope_is_dumped_whole(config, dump_path):
    with pytest.warns(UserWarning, match="FALLBACK to EAGER"):
        run(lambda x: x.sin() * 2, config, torch.ones(2))
    assert calls_of(dump_path) == [(0, "sin"), (0, "mul")]


@pytest.mark.parametrize(("data", "files"), [("tensor", 2), ("stats", 0)])
def test_statistics_are_saved_in_place_of_tensors(config, dump_path, data, files):
    config.dump_config.dump_data = data
    run(scoped, config, torch.ones(2))
    assert calls_of(dump_path) == [(0, "cos")]
    assert len(list(dump_path.rglob("*.npy"))) == files
    assert len(list(dump_path.rglob("stats.csv"))) == (not files)
