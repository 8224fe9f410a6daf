"""Other formats hold what the dump holds."""

from __future__ import annotations

import json

import numpy as np
import pandas
import pytest
import safetensors.torch
import torch

import torchair_scope
from torchair_scope.analysis.export_files import export, named_tensors


@pytest.fixture
def dump(sound_dumps):
    return torchair_scope.load(sound_dumps["bfloat16"])


def test_npz_has_every_array(dump, tmp_path):
    with np.load(export(dump, tmp_path / "dump.npz", "npz")) as archive:
        names = [name for name, _ in named_tensors(dump)]
        assert sorted(archive.files) == sorted(names)
        for name, tensor in named_tensors(dump):
            np.testing.assert_array_equal(archive[name], tensor.numpy())


def test_safetensors_has_every_tensor_in_its_true_dtype(dump, tmp_path):
    loaded = safetensors.torch.load_file(export(dump, tmp_path / "dump.st", "safetensors"))
    for name, tensor in named_tensors(dump):
        assert loaded[name].dtype == tensor.torch().dtype
        assert torch.equal(loaded[name], tensor.torch())


def test_parquet_is_the_frame(dump, tmp_path):
    frame = pandas.read_parquet(export(dump, tmp_path / "dump.parquet", "parquet"))
    pandas.testing.assert_frame_equal(frame, dump.frame(), check_dtype=False)


def test_msprobe_finds_the_files_that_it_writes_itself(dump, tmp_path):
    root = export(dump, tmp_path / "msprobe", "msprobe")
    assert sorted(path.name for path in root.iterdir()) == ["step0", "step1"]
    folder = root / "step1" / "rank0"
    content = json.loads((folder / "dump.json").read_text())
    assert (content["task"], content["level"], content["framework"]) == ("tensor", "L1", "pytorch")
    calls = {str(call): call for call in dump.calls(step=1)}
    assert len(content["data"]) == len(calls)
    assert list(json.loads((folder / "construct.json").read_text())) == list(content["data"])
    stack = json.loads((folder / "stack.json").read_text())
    assert [names for (names, _) in stack.values()] == [[name] for name in content["data"]]
    softmax = content["data"]["Aten._softmax.0.forward"]
    (record,) = softmax["output"]
    (call,) = dump.calls(node="_softmax", step=1)
    value = torch.load(folder / "dump_tensor_data" / record["data_name"])
    assert torch.equal(value, call.outputs["OUTPUT.0"].torch())
    assert record["dtype"] == "torch.bfloat16"
    assert record["Max"] == value.max().item()
    backward = content["data"]["Aten.gelu_backward.0.backward"]
    assert set(backward) == {"input", "output"}
    assert len(backward["input"]) == 2


def test_a_format_that_there_is_not_is_an_error_with_those_there_are(dump, tmp_path):
    with pytest.raises(ValueError, match="one of msprobe, npz, safetensors, parquet"):
        export(dump, tmp_path / "x", "hdf5")
