from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from torchair_scope.store import layout

STAMP = "20250102030405123456"
identifiers = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*", fullmatch=True)
any_name = st.text(min_size=1, max_size=600)
LEGAL = re.compile(r"[A-Za-z0-9_.-]{1,255}")


@given(identifiers, any_name, any_name)
def test_a_file_name_has_legal_characters_and_fits_any_file_system(node, target, slot):
    name = layout.file_name(layout.call_stem(node, target), slot, STAMP)
    assert LEGAL.fullmatch(name)
    assert name.endswith(f".{STAMP}.npy")


@given(identifiers, st.from_regex(r"[a-z_]{1,20}\.[a-z_]{1,20}\.[A-Za-z_]{1,20}", fullmatch=True))
def test_a_short_legal_name_is_kept_as_torchair_writes_it(node, target):
    node = node[:100]
    name = layout.file_name(layout.call_stem(node, target), "INPUT.0", STAMP)
    assert name == f"{node}-{target}.INPUT.0.{STAMP}.npy"


@given(
    st.text(alphabet="ab", min_size=1, max_size=4), st.text(alphabet="ab", min_size=1, max_size=4)
)
def test_two_long_names_that_differ_at_the_end_never_share_a_file(first, second):
    stems = {layout.call_stem("n" * 300 + end, "aten.add.Tensor") for end in (first, second)}
    assert len(stems) == len({first, second})


@given(any_name, any_name)
def test_two_keywords_never_share_a_file(first, second):
    names = {layout.file_name("add", f"KWARG.{keyword}", STAMP) for keyword in (first, second)}
    assert len(names) == len({first, second})


def test_a_very_long_name_leaves_inputs_and_outputs_one_stem():
    stem = layout.call_stem("node", "aten." + "x" * 400)
    for slot in ("INPUT.0", "INPUT.12.103", "OUTPUT.999.999"):
        assert layout.file_name(stem, slot, STAMP) == f"{stem}.{slot}.{STAMP}.npy"


def test_two_runs_name_a_python_function_alike_although_its_address_changes():
    first, second = (layout.call_stem("f", f"<function f at {at}>") for at in ("0x7f01", "0x8a02"))
    assert first == second


@pytest.mark.parametrize(
    ("parts", "slot"),
    [
        (("INPUT", 3), "INPUT.3"),
        (("INPUT", 1, 0), "INPUT.1.0"),
        (("OUTPUT", 0, 2, 1), "OUTPUT.0.2.1"),
        (("KWARG", "weight"), "KWARG.weight"),
    ],
)
def test_a_slot_says_which_value_a_file_holds(parts, slot):
    assert layout.slot_name(*parts) == slot


def test_time_stamps_are_twenty_digits_and_always_later_than_the_one_before():
    stamps = [layout.time_stamp() for _ in range(2000)]
    assert all(re.fullmatch(r"20\d{18}", stamp) for stamp in stamps)
    assert stamps == sorted(set(stamps))


def test_without_torch_distributed_and_environment_there_is_one_rank(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert layout.rank_and_world_size() == (0, 1)


def test_rank_and_world_size_of_the_environment_count_when_both_are_set(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert layout.rank_and_world_size() == (3, 8)


@pytest.mark.parametrize(("rank", "world_size"), [("x", "8"), ("8", "8"), ("-1", "2"), ("", "1")])
def test_a_rank_that_is_none_is_refused_with_its_value(monkeypatch, rank, world_size):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(ValueError, match=re.escape(f"RANK={rank!r} and WORLD_SIZE={world_size!r}")):
        layout.rank_and_world_size()


def test_torch_distributed_with_several_processes_goes_before_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        assert layout.rank_and_world_size() == (1, 2)
    finally:
        dist.destroy_process_group()


def test_a_rank_folder_is_told_from_one_that_was_moved_aside():
    name = layout.rank_folder_name(rank=3, world_size=8)
    assert name == "worldsize8_global_rank3"
    assert layout.parse_rank_folder_name(name) == (3, 8)
    assert layout.parse_rank_folder_name(f"{name}.{STAMP}") is None
    assert layout.parse_rank_folder_name(f"{name}.pid12") is None


def test_made_folders_are_closed_to_others_and_existing_ones_are_left_as_they_are(tmp_path: Path):
    tmp_path.chmod(0o700)
    old_mask = os.umask(0)
    try:
        layout.make_folders(str(tmp_path / "a" / "b"))
    finally:
        os.umask(old_mask)
    assert [
        oct(p.stat().st_mode & 0o777) for p in (tmp_path, tmp_path / "a", tmp_path / "a/b")
    ] == [
        "0o700",
        "0o750",
        "0o750",
    ]


def test_a_folder_inside_a_file_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as caught:
        layout.make_folders(str(tmp_path / "file" / "folder"))
    assert caught.value.filename == str(tmp_path / "file")


def test_a_taken_name_gets_a_number(tmp_path: Path):
    assert layout.free_name(str(tmp_path / "x")) == str(tmp_path / "x")
    (tmp_path / "x").touch()
    (tmp_path / "x.1").touch()
    assert layout.free_name(str(tmp_path / "x")) == str(tmp_path / "x.2")
