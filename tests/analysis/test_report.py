"""The report: one file, with the verdict in it, that asks for nothing from the network."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import torchair_scope
from torchair_scope.analysis.details import heat_map, histograms
from torchair_scope.analysis.report import write_dump_report, write_report


def data_of(path):
    text = path.read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(data)


@pytest.fixture(scope="module")
def report(sound_dumps, faulty_dump, tmp_path_factory):
    comparison = torchair_scope.compare(sound_dumps["float32"], faulty_dump)
    path = tmp_path_factory.mktemp("report") / "report.html"
    return write_report(comparison, path, title="faulty </script> dump")


def test_the_verdict_comes_first_and_every_call_is_there(report, faulty_dump):
    text = report.read_text(encoding="utf-8")
    assert re.search(r'<strong id="first" class="made">aten\.sub\.Tensor</strong>', text)
    page = data_of(report)
    assert page["rows"][page["first"]]["operator"] == "aten.sub.Tensor"
    assert len(page["rows"]) == len(torchair_scope.load(faulty_dump).calls())


def test_nothing_is_fetched(report):
    text = report.read_text(encoding="utf-8")
    assert not re.findall(r'<(?:script|img|iframe)[^>]+src=|<link[^>]+href="(?!data:)', text)


def test_a_title_cannot_end_the_data(report):
    assert data_of(report)["title"] == "faulty </script> dump"


def test_the_wrong_operator_has_histograms_and_a_heat_map(report):
    page = data_of(report)
    output = page["rows"][page["first"]]["tensors"][-1]
    assert output["slot"] == "OUTPUT.0"
    golden, target = (sum(counts) for counts in output["histogram"]["counts"])
    assert (golden, target) == (256, 255)
    assert np.array(output["heat"]["cells"]).shape == (16, 16)


def test_a_single_dump_shows_where_nan_is_made(faulty_dump, sound_dumps, tmp_path):
    page = data_of(write_dump_report(torchair_scope.load(faulty_dump), tmp_path / "one.html"))
    assert page["rows"][page["first"]]["operator"] == "aten.sub.Tensor"
    sound = torchair_scope.load(sound_dumps["float32"])
    assert data_of(write_dump_report(sound, tmp_path / "sound.html"))["first"] is None


def test_a_heat_map_keeps_the_largest_error_of_each_cell():
    golden = np.zeros((3, 500, 100))
    target = golden.copy()
    target[2, 499, 0] = 7
    heat = heat_map(golden, target, (2, 499, 0))
    cells = np.array(heat["cells"])
    assert heat["slice"] == "[2, :, :]"
    assert cells.shape == (48, 48)
    assert (cells.max(), cells[-1, 0], np.count_nonzero(cells)) == (7, 7, 1)


def test_histograms_share_their_bins():
    one, other = np.arange(100.0), np.arange(50.0, 300.0)
    found = histograms(one, other)
    assert [found["edges"][0], found["edges"][-1]] == [0, 299]
    for values, counts in zip((one, other), found["counts"], strict=True):
        assert counts == np.histogram(values, found["edges"])[0].tolist()
