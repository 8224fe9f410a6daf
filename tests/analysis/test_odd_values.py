"""Values and damage that are rare: the analysis says what it sees of them, and never breaks."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch

import torchair_scope
from tests.analysis.test_compare import write_dump
from torchair_scope.analysis import as_json
from torchair_scope.analysis.report import write_dump_report, write_report

NAN, INF = float("nan"), float("inf")
INT64 = torch.iinfo(torch.int64)
ONES = torch.ones(3)


def many(dtype, factor):
    return (torch.linspace(0.1, 2.0, 40) * factor).to(dtype)


# Golden and target values, and whether they agree.
PAIRS = {
    "no elements": (torch.zeros(0, 3), torch.zeros(0, 3), True),
    "no dimensions": (torch.tensor(1.5), torch.tensor(2.5), False),
    "bool": (torch.tensor([True, False]), torch.tensor([True, True]), False),
    "complex": (torch.tensor([1 + 2j, NAN * 1j]), torch.tensor([1 + 2j, 3 + 0j]), False),
    "NaN in both": (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0]), True),
    "NaN in all": (torch.full((70000,), NAN), torch.full((70000,), NAN), True),
    "infinite in both": (torch.tensor([INF, -INF, 1.0]), torch.tensor([INF, -INF, 1.0]), True),
    "other infinities": (torch.tensor([INF, 1.0]), torch.tensor([-INF, 1.0]), False),
    "NaN and infinite": (torch.tensor([NAN, INF]), torch.tensor([INF, NAN]), False),
    "ends of int64": (
        torch.tensor([INT64.max, INT64.min]),
        torch.tensor([INT64.min, INT64.max]),
        False,
    ),
    "float64 cannot tell": (torch.tensor([INT64.max]), torch.tensor([INT64.max - 1]), False),
    "uint8": (
        torch.tensor([0, 255], dtype=torch.uint8),
        torch.tensor([255, 0], dtype=torch.uint8),
        False,
    ),
    "largest float32": (torch.tensor([3.4e38]), torch.tensor([-3.4e38]), False),
    "largest float64": (torch.tensor([1.7e308]).double(), torch.tensor([-1.7e308]).double(), False),
    "1e300": (torch.tensor([1e300]).double(), torch.tensor([1e300]).double() * (1 + 1e-15), True),
    "other shape": (ONES, torch.ones(4), False),
    "other dimensions": (ONES, torch.ones(()), False),
    "float and integer": (ONES, ONES.long(), True),
    "float and bool": (ONES, ONES.bool(), True),
    "float and complex": (ONES, ONES.cfloat(), True),
    "float and another complex": (ONES, ONES.cfloat() * 1j, False),
    "complex and float": (ONES.cfloat(), ONES, True),
    "float and float8": (ONES, ONES.to(torch.float8_e5m2), True),
    **{
        str(dtype): (many(dtype, 1), many(dtype, -1), False)
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)
    },
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("side", ["input", "output"])
def test_values_of_every_kind_are_compared_and_shown(tmp_path, name, side):
    golden, target, agrees = PAIRS[name]
    paths = []
    for path, value in (("golden", golden), ("target", target)):
        given, returned = (value, ONES) if side == "input" else (ONES, value)
        call = ("clone", "aten.clone.default", (given,), returned, {})
        paths.append(write_dump(tmp_path / path, [call]))
    comparison = torchair_scope.compare(*paths, confirm=False)
    (result,) = comparison.results
    tensor = result.inputs[0] if side == "input" else result.outputs[0]
    assert tensor.agrees == agrees, tensor
    json.dumps(as_json.json_of_comparison(comparison), allow_nan=False)
    write_report(comparison, tmp_path / "report.html")
    dump = torchair_scope.load(paths[1])
    if side == "output":
        write_dump_report(dump, tmp_path / "dump.html")
    assert len(dump.frame()) == 2
    assert all(each.reason for each in torchair_scope.replay(dump))


def cut(data, chance):
    return data[: chance.randrange(len(data))]


def flipped(data, chance):
    at = chance.randrange(min(len(data), 200))
    return data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]


def shuffled(data, chance):
    lines = data.split(b"\n")
    chance.shuffle(lines)
    return b"\n".join(lines)


DAMAGES = {
    "cut": cut,
    "flipped": flipped,
    "shuffled": shuffled,
    "empty": lambda data, chance: b"",
    "random": lambda data, chance: chance.randbytes(100),
    "twice": lambda data, chance: data + data,
    "no number": lambda data, chance: data.replace(b'"graph":', b'"graph":"x","g":', 2),
    "no list": lambda data, chance: data.replace(b'"args":', b'"args":5,"a":', 2),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("what", ["manifest.jsonl", "*OUTPUT*.npy", "*INPUT*.npy"])
def test_no_damage_breaks_the_analysis_or_is_taken_for_agreement(tmp_path, what, damage):
    values = [torch.full((5, 5), float(n)) for n in range(4)]
    calls = [(f"clone_{n}", "aten.clone.default", (x,), x, {}) for n, x in enumerate(values)]
    whole = write_dump(tmp_path / "whole", calls)
    for seed in range(4):
        chance = random.Random(f"{what} {damage} {seed}")
        damaged = shutil.copytree(whole, tmp_path / f"damaged_{seed}")
        file = chance.choice(sorted(damaged.rglob(what)))
        data = file.read_bytes()
        changed = DAMAGES[damage](data, chance)
        file.unlink()
        file.write_bytes(changed)
        dump = torchair_scope.load(damaged)
        comparison = torchair_scope.compare(whole, dump)
        torchair_scope.compare(dump, whole)
        dump.frame()
        torchair_scope.replay(dump)
        if damage in ("empty", "cut", "random"):
            assert dump.problems
            assert comparison.notes
        if damage in ("empty", "random") and what.endswith("OUTPUT*.npy"):
            assert comparison.verdict.kind == "unclear"
    write_report(comparison, tmp_path / "report.html")
