from __future__ import annotations

import collections
import enum
import errno
import json
import math
import os
import struct
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torchair_scope.store.manifest import Manifest, Opaque, decode, encode, plain, resolve_op

Point = collections.namedtuple("Point", ["x", "y"])


class Color(enum.IntEnum):
    RED = 1


class Rude:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def round_trip(value, device=None):
    """Through the text of a manifest; tensors are kept aside by slot."""
    tensors = {}

    def hand_over(tensor, slot):
        tensors[slot] = tensor
        return {"slot": slot}

    text = json.dumps(encode(value, "INPUT.0", hand_over), allow_nan=False)
    return decode(json.loads(text), lambda description: tensors[description["slot"]], device)


def same(first, second) -> bool:
    """Equal in type, structure and every bit of a float."""
    if type(first) is not type(second):
        return False
    if isinstance(first, float):
        return (math.isnan(first) and math.isnan(second)) or bits(first) == bits(second)
    if isinstance(first, complex):
        return same(first.real, second.real) and same(first.imag, second.imag)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def bits(number: float) -> bytes:
    return struct.pack("d", number)


constants = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(allow_nan=True, allow_infinity=True),
    st.text(),
    st.sampled_from([torch.float32, torch.float8_e4m3fn, torch.bool]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")]),
    st.sampled_from([torch.strided, torch.sparse_coo]),
    st.sampled_from([torch.contiguous_format, torch.channels_last]),
    st.sampled_from([torch.ops.aten.add.Tensor, torch.ops.aten.relu.default, torch.ops.aten.add]),
    st.just(...),
)
trees = st.recursive(
    constants,
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(st.text() | st.integers(), children, max_size=3),
    ),
    max_leaves=8,
)


@given(trees)
def test_a_tree_of_arguments_comes_back_through_json(tree):
    assert same(round_trip(tree), tree)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -0.0, 0.1, 5e-324, 2**80])
def test_numbers_come_back_exactly(number):
    assert same(round_trip(number), number)
    assert same(round_trip(complex(-0.0, number)), complex(-0.0, number))


def test_slices_sizes_and_named_tuples_come_back():
    assert round_trip(slice(1, None, 2)) == slice(1, None, 2)
    assert same(round_trip(torch.Size([2, 3])), torch.Size([2, 3]))
    back = round_trip(Point([1], y=2.5))
    assert (back._fields, back.x, back.y) == (("x", "y"), [1], 2.5)


def test_a_named_tuple_of_torch_comes_back_as_its_own_type():
    result = torch.ones(2, 2).max(dim=0)
    back = round_trip(result)
    assert type(back) is torch.return_types.max
    assert back.values is result.values


def test_every_tensor_of_a_tree_is_handed_over_with_its_slot():
    slots = []
    tensor = torch.ones(1)
    tree = [None, tensor, {"a": 1, "b": (tensor, 2)}, Point(1, tensor)]
    encode(tree, "INPUT.1", lambda _, slot: slots.append(slot) or {"slot": slot})
    assert slots == ["INPUT.1.1", "INPUT.1.2.1.0", "INPUT.1.3.1"]


def test_symbolic_numbers_are_recorded_as_their_value():
    env = ShapeEnv()
    from torch._dynamo.source import ConstantSource

    symbol = env.create_symbol(5, source=ConstantSource("s"))
    size = env.create_symintnode(symbol, hint=5)
    assert round_trip([size, size * 2]) == [5, 10]
    unbacked = env.create_unbacked_symint()
    assert round_trip(unbacked) == Opaque(repr(unbacked))


def test_what_has_no_encoding_is_kept_as_text():
    assert round_trip(Color.RED) == Opaque("<Color.RED: 1>")
    assert round_trip(print) == Opaque("<built-in function print>")
    assert "whose repr raises RuntimeError" in round_trip(Rude()).text


def test_a_graph_module_is_kept_as_its_printed_code():
    module = torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    encoded = encode(module, "INPUT.1", lambda *_: {})
    assert list(encoded) == ["graph_module"]
    assert "relu" in encoded["graph_module"]
    assert "relu" in round_trip(module).text


def test_another_device_takes_the_place_of_recorded_ones_but_meta():
    kwargs = {"device": torch.device("cuda:0"), "other": torch.device("meta")}
    expected = {"device": torch.device("cpu"), "other": torch.device("meta")}
    assert round_trip(kwargs, device="cpu") == expected


def test_an_operator_is_found_by_the_name_in_a_record():
    assert resolve_op("aten.add.Tensor") is torch.ops.aten.add.Tensor
    with pytest.raises(AttributeError):
        resolve_op("aten.no_such_operator.default")


def test_facts_of_a_record_are_made_json():
    facts = {"dtype": torch.float32, 1: (1, {2}), "nan": math.nan, "scope": None, "x": {"y": 1.5}}
    assert plain(facts) == {
        "dtype": "torch.float32",
        "1": [1, [2]],
        "nan": "nan",
        "scope": None,
        "x": {"y": 1.5},
    }
    assert json.loads(json.dumps(plain(facts), allow_nan=False)) == plain(facts)


def test_records_of_many_threads_stay_whole_lines(tmp_path: Path):
    manifest = Manifest(str(tmp_path / "manifest.jsonl"))

    def work(worker: int) -> None:
        for number in range(200):
            manifest.append({"worker": worker, "number": number, "text": "x" * (number * 7)})

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = (tmp_path / "manifest.jsonl").read_text().splitlines()
    seen = [(record["worker"], record["number"]) for record in map(json.loads, lines)]
    assert sorted(seen) == [(worker, number) for worker in range(8) for number in range(200)]
    manifest.close()


def test_a_manifest_is_appended_to_and_closed_to_others(tmp_path: Path):
    path = tmp_path / "manifest.jsonl"
    for number in range(2):
        manifest = Manifest(str(path))
        manifest.append({"number": number})
        manifest.close()
    assert path.read_text() == '{"number":0}\n{"number":1}\n'
    assert path.stat().st_mode & 0o027 == 0


def test_a_record_that_failed_leaves_no_half_line_and_goes_before_the_next(tmp_path, monkeypatch):
    path = tmp_path / "manifest.jsonl"
    manifest = Manifest(str(path))
    manifest.append({"number": 0})
    write = os.write
    room = [5, 0]  # bytes that the disk still takes, call by call

    def write_to_a_full_disk(descriptor, data):
        taken = room.pop(0)
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:taken])

    monkeypatch.setattr(os, "write", write_to_a_full_disk)
    with pytest.raises(OSError, match="No space"):
        manifest.append({"number": 1})
    assert path.read_text() == '{"number":0}\n'
    monkeypatch.undo()
    manifest.append({"number": 2})
    assert path.read_text() == '{"number":0}\n{"number":1}\n{"number":2}\n'
    manifest.close()
