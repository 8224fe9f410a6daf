"""`max_bytes=`, `max_calls=`, `min_free=`: what follows once they are reached is measured only."""

from __future__ import annotations

import os

import pytest
import torch

from torchair_scope.scope import configure, data_dump, summary
from torchair_scope.sizes import as_text, size
from torchair_scope.store import budget
from torchair_scope.store.reader import read
from torchair_scope.store.run import DumpWarning, RankFolder


@pytest.fixture(autouse=True)
def _nothing_used():
    with configure():
        budget._usages.clear()
        yield
        budget._usages.clear()


def compiled(function):
    return torch.compile(function, backend="torchair_scope", options={"backend": "aot_eager"})


def bytes_on_disk(path):
    """Bytes of the tensors' files, each once however many names it has."""
    files = {os.stat(f).st_ino: os.stat(f).st_size for f in path.rglob("*.npy")}
    return sum(files.values())


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (0, 0),
        (1000, 1000),
        ("1000", 1000),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("1.5KiB", 1536),
        ("500 MB", 500_000_000),
        ("3b", 3),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(value, number):
    assert size(value, "max_bytes") == number


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (-1, ValueError),
        ("-1", ValueError),
        ("2 parsecs", ValueError),
        ("", ValueError),
        (1.5, TypeError),
        (True, TypeError),
    ],
)
@pytest.mark.parametrize("option", ["max_bytes", "min_free"])
def test_what_is_no_size_is_refused(option, value, error):
    with pytest.raises(error, match=f"{option} is .*"):
        data_dump("mine", **{option: value})


@pytest.mark.parametrize("value", [-1, "many", 1.5, True])
def test_what_is_no_number_of_calls_is_refused(value):
    with pytest.raises((TypeError, ValueError), match="max_calls is"):
        data_dump("mine", max_calls=value)


def test_sizes_are_shown_in_the_largest_unit():
    assert [as_text(n) for n in (12, 2048, 3 << 20, 1 << 30)] == ["12 B", "2 KiB", "3 MiB", "1 GiB"]


def noise(path, **options):
    def function(seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(1000, generator=generator)
        with data_dump("noise", path=str(path), **options):
            return (x * 2).sin() + x

    return function


def run(function, steps):
    return [function(seed) for seed in range(steps)]


def kept(path):
    """(tensors with a file, tensors with a row, reasons) of each call."""
    (rank,) = read(path).ranks
    return [
        (
            len(call.record["files"]),
            len(call.record.get("statistics", ())),
            {lost["reason"] for lost in call.record["missing"]},
        )
        for call in rank.calls
    ]


def test_past_max_bytes_only_statistics_are_saved(dump_path):
    function = noise(dump_path, max_bytes="20KiB")
    with pytest.warns(
        DumpWarning, match="budget: max_bytes=20 KiB of scope 'noise' is reached"
    ) as w:
        results = [function(seed) for seed in range(4)]
    assert len([each for each in w if "max_bytes" in str(each.message)]) == 1
    assert 15_000 < bytes_on_disk(dump_path) <= 20 << 10
    reason = {"budget: max_bytes=20 KiB of scope 'noise' is reached"}
    found = kept(dump_path)
    assert found[0] == (3, 0, set())
    assert all(each == (0, each[1], reason) and each[1] >= 2 for each in found[3:])
    with configure(), data_dump("other", path=dump_path / "other"):
        wanted = [noise(dump_path / "more")(seed) for seed in range(4)]
    assert all(map(torch.equal, results, wanted))


def test_values_that_are_on_disk_cost_nothing(dump_path):
    weight = torch.randn(2000)
    for _ in range(5):
        with data_dump("mine", path=dump_path, max_bytes="26KiB"):
            weight.view(10, 200).t()
    assert all(statistics == 0 for _, statistics, _ in kept(dump_path))
    assert bytes_on_disk(dump_path) <= 26 << 10


def test_past_max_calls_only_statistics_are_saved(dump_path):
    function = compiled(noise(dump_path, max_calls=4))
    with pytest.warns(DumpWarning, match="budget: max_calls=4 of scope 'noise' is reached"):
        run(function, 3)
    assert [bool(files) for files, _, _ in kept(dump_path)] == [True] * 4 + [False] * 5
    (row,) = summary().rows
    assert (row.tagged, row.dumped, row.missing) == (3, 3, {})
    assert row.missing_tensors == {"budget: max_calls=4 of scope 'noise' is reached": 12}
    assert row.statistics == 12


def test_the_account_says_what_is_over_budget(dump_path):
    with pytest.warns(DumpWarning, match="max_calls=1"):
        noise(dump_path, max_calls=1)(0)
    (row,) = summary().rows
    assert (row.tagged, row.dumped) == (3, 1)
    assert row.missing == {"budget: only statistics are saved": 2}


def test_a_budget_of_a_scope_holds_for_those_in_it_and_for_no_other(dump_path):
    def scopes():
        with data_dump("outer", path=dump_path, max_calls=2):
            torch.ones(3)
            with data_dump("inner", max_calls=5):
                torch.ones(4)
                torch.ones(5)
        with data_dump("other", path=dump_path):
            torch.ones(6)

    with pytest.warns(DumpWarning, match="scope 'outer'"):
        scopes()
    assert [files for files, _, _ in kept(dump_path)] == [2, 2, 0, 2]


def test_the_process_has_a_budget_beside_those_of_scopes(dump_path, monkeypatch):
    monkeypatch.setenv("TORCHAIR_SCOPE_MAX_CALLS", "3")

    def scope(name):
        with data_dump(name, path=dump_path, max_calls=2):
            torch.ones(3).sin()

    scope("one")
    with pytest.warns(DumpWarning, match="max_calls=3 of the process is reached"):
        scope("two")
    assert [bool(files) for files, _, _ in kept(dump_path)] == [True, True, True, False]


def test_a_budget_that_is_raised_is_in_force_at_once(dump_path):
    def for_each_budget(*budgets):
        for most in budgets:
            with configure(max_calls=most), data_dump("mine", path=dump_path):
                torch.ones(3).sin()

    with pytest.warns(DumpWarning, match=r"max_calls=\d of the process"):
        for_each_budget(1, 2, None)
    assert [bool(files) for files, _, _ in kept(dump_path)] == [1, 0, 1, 0, 1, 1]


def test_a_nearly_full_disk_is_left_as_it_is(dump_path, monkeypatch):
    monkeypatch.setattr(RankFolder, "room", lambda self: (1 << 30) - 1)
    function = compiled(noise(dump_path))
    with pytest.warns(DumpWarning, match="disk: less than 1 GiB of it would be free") as warned:
        run(function, 3)
    assert len(warned) == 1
    assert bytes_on_disk(dump_path) == 0
    assert {rows for _, rows, _ in kept(dump_path)} == {2, 3}
    (row,) = summary().rows
    assert row.missing == {"disk: only statistics are saved, to leave min_free": 3}


def test_the_floor_can_be_another_or_none(dump_path, monkeypatch):
    monkeypatch.setattr(RankFolder, "room", lambda self: 1 << 20)
    for floor in (0, "500KB"):
        noise(dump_path, min_free=floor)(1)
    assert all(rows == 0 for _, rows, _ in kept(dump_path))


def test_a_weight_that_was_changed_unseen_counts_as_written(dump_path):
    weight = torch.randn(50_000)
    options = {"path": str(dump_path), "backend": "aot_eager"}

    @torch.compile(backend="torchair_scope", options=options)
    def function(x):
        with data_dump("mine", max_bytes=900_000):
            return x * weight

    x = torch.randn(50_000)

    def run_and_change():
        for _ in range(3):
            function(x)
            weight.data.mul_(-1)

    with pytest.warns(DumpWarning, match="max_bytes"):
        run_and_change()
    written = {path.stat().st_ino: path.stat().st_size for path in dump_path.rglob("*.npy")}
    assert 600_000 < sum(written.values()) <= 900_000


def test_what_waits_to_be_written_counts_as_written(dump_path, monkeypatch):
    monkeypatch.setattr(RankFolder, "room", lambda self: 12_000 - bytes_on_disk(dump_path))
    with pytest.warns(DumpWarning, match="disk"):
        noise(dump_path, min_free=1000)(1)
    assert 0 < bytes_on_disk(dump_path) <= 11_000


def test_both_kinds_are_kept_until_the_budget_is_reached(dump_path):
    with pytest.warns(DumpWarning, match="max_calls"):
        noise(dump_path, max_calls=2, data="both")(0)
    assert [(files > 0, rows) for files, rows, _ in kept(dump_path)] == [
        (True, 2),
        (True, 2),
        (False, 3),
    ]
