"""The report in a real browser: Debian's chromium, driven by Playwright, where there is one."""

from __future__ import annotations

import os
import shutil
import time

import numpy as np
import pytest
import torch

import torchair_scope
from torchair_scope.analysis.report import write_report
from torchair_scope.store.run import open_run

pytestmark = pytest.mark.slow

OPERATORS = 5000
WRONG = 3210
SECONDS = 3.0
WIDTH, HEIGHT = 1280, 800
# Chromium as root needs no sandbox; without the others it looks for its maker's servers.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
DRAWN = "() => new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))"


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("there is no chromium here; on Debian: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of 5,000 operators, of which one is wrong."""
    folder = tmp_path_factory.mktemp("browser")
    write_chain(folder / "golden")
    shutil.copytree(folder / "golden", folder / "target", copy_function=os.link)
    for name in (f"tanh_{WRONG}-*OUTPUT*", f"tanh_{WRONG + 1}-*INPUT*"):
        (file,) = (folder / "target").rglob(name)
        wrong = np.load(file) + np.float32(0.5)
        file.unlink()
        np.save(file, wrong)
    comparison = torchair_scope.compare(folder / "golden", folder / "target", confirm=False)
    assert len(comparison.results) == OPERATORS
    return write_report(comparison, folder / "report.html", title="5,000 operators")


def write_chain(path):
    nodes = [{"name": f"tanh_{position}", "module": "layers"} for position in range(OPERATORS)]
    step = open_run(path).graph(1, {"direction": "inference", "nodes": nodes}).begin_step()
    value = torch.linspace(-1, 1, 16)
    for position in range(OPERATORS):
        facts = {"scope": f"model/layer_{position // 100}"}
        result = value.tanh() + 0.1
        step.begin_call(f"tanh_{position}", "aten.tanh.default", (value,), {}, facts).finish(result)
        value = result
    step.finish()


LONG_OPERATOR = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"


def write_long_names(path):
    node = "_scaled_dot_product_flash_attention_for_cpu_backward_1234"
    source = {"file": "/model/modelling_with_a_long_name.py", "line": 12345, "code": "x"}
    facts = {"scope": "encoder_of_the_model/layer_12/self_attention", "source": source}
    step = open_run(path).graph(1, {"direction": "backward"}).begin_step()
    value = torch.ones(2, 16, 1, 8, 4)
    step.begin_call(node, LONG_OPERATOR, (value,), {}, facts).finish((value, value + 1, value))
    step.finish()


@pytest.fixture(scope="module", params=["light", "dark"])
def opened(request, browser, report):
    """The open report; it is a failure if the console has anything to say."""
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=request.param)
    said = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda asked: asked.url.startswith("http") and said.append(asked.url))
    page.goto(report.as_uri())
    yield page
    page.close()
    assert said == []


@pytest.fixture
def page(opened):
    """The report as it is when it has been opened."""
    yield opened
    opened.evaluate(
        "Object.assign(state, {sort: 'id', down: false, query: '', scope: '', chosen: page.first});"
        "document.getElementById('search').value = ''; fill(); choose(page.first)"
    )


def cells(page, column):
    """The texts of one column of the table, from the top."""
    return page.locator(f"#calls tbody tr td:nth-child({column})").all_inner_texts()


def test_the_first_wrong_operator_is_seen_without_scrolling(page):
    assert page.locator("section.verdict").inner_text().startswith("aten.tanh.default")
    assert f"tanh_{WRONG} " in page.locator("section.verdict p").inner_text()
    for part in ("#first", "section.verdict p", "#chart .plot-container", "#search"):
        box = page.locator(part).first.bounding_box()
        assert box["y"] >= 0
        assert box["y"] + box["height"] <= HEIGHT
        assert box["x"] + box["width"] <= WIDTH


def test_all_columns_are_seen_without_scrolling(page):
    assert_all_columns_are_seen(page)


def test_all_columns_are_seen_where_names_are_long(browser, tmp_path):
    for side in ("golden", "target"):
        write_long_names(tmp_path / side)
    comparison = torchair_scope.compare(tmp_path / "golden", tmp_path / "target")
    report = write_report(comparison, tmp_path / "report.html")
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    page.goto(report.as_uri())
    assert_all_columns_are_seen(page)
    operator = page.locator("#calls tbody td:nth-child(4)").first
    assert operator.get_attribute("title") == operator.inner_text() == LONG_OPERATOR
    page.close()


def assert_all_columns_are_seen(page):
    table = page.locator("#scroll")
    assert table.evaluate("box => box.scrollWidth <= box.clientWidth")
    edge = table.bounding_box()["x"] + table.evaluate("box => box.clientLeft + box.clientWidth")
    assert edge <= WIDTH
    for row in ("thead tr", "tbody tr"):
        boxes = page.locator(f"#calls {row}").first.locator("th, td").all()
        assert len(boxes) == 11
        assert all(box.bounding_box()["x"] + box.bounding_box()["width"] <= edge for box in boxes)
    for head in page.locator("#calls th").all():
        width = head.evaluate("cell => [cell.scrollWidth, cell.clientWidth]")
        assert width[0] <= width[1], head.inner_text()


def test_every_operator_is_a_point_of_the_chart(page):
    assert page.locator("#chart .point").count() == OPERATORS


def test_columns_sort_as_numbers_and_the_other_way_round(page):
    assert page.locator("#shown").inner_text() == f"{OPERATORS} of {OPERATORS} calls"
    page.get_by_role("button", name="output").click()
    assert cells(page, 1)[0] == str(WRONG)
    assert cells(page, 2)[:2] == ["made", "agrees"]
    page.get_by_role("button", name="call").click()
    names = [name.rpartition("_")[2] for name in cells(page, 3)]
    assert names[:12] == [str(number) for number in range(12)]
    page.get_by_role("button", name="call").click()
    assert cells(page, 1)[0] == str(OPERATORS - 1)


def test_search_finds_by_operator_scope_and_role(page):
    for words, found in (("made", 1), ("layer_32", 100), (f"tanh_{WRONG}", 1), ("nothing", 0)):
        page.fill("#search", words)
        assert page.locator("#shown").inner_text() == f"{found} of {OPERATORS} calls"
        assert page.locator("#calls tbody tr").count() == found


def test_a_scope_of_the_tree_selects_its_calls(page):
    page.locator('[data-scope="model/layer_7"]').click()
    assert page.locator("#shown").inner_text() == f"100 of {OPERATORS} calls"


def test_the_rest_of_the_table_comes_with_scrolling(page):
    before = page.locator("#calls tbody tr").count()
    page.evaluate("document.getElementById('scroll').scrollTop = 1e9")
    page.wait_for_function(f"document.querySelectorAll('#calls tbody tr').length > {before}")


def test_the_details_of_a_chosen_operator_are_drawn(page):
    assert page.locator("#detail h2").inner_text().startswith("aten.tanh.default")
    assert page.locator("#detail .plot .heatmaplayer").count() >= 1
    page.fill("#search", "tanh_17")
    page.locator("#calls tbody tr").first.click()
    assert "tanh_17" in page.locator("#detail h2").inner_text()


def test_text_can_be_read_in_light_and_dark(page):
    def luminance(part, what):
        code = "(node, what) => getComputedStyle(node)[what].match(/[0-9.]+/g).slice(0, 3)"
        rgb = [int(value) / 255 for value in page.locator(part).first.evaluate(code, what)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    background = luminance("body", "backgroundColor")
    for part in ("body", "#first", ".soft", "td.agrees", "td.number"):
        pair = sorted([background, luminance(part, "color")])
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4, part  # contrast, as WCAG defines it


@pytest.mark.alone
def test_5000_operators_are_there_in_three_seconds(browser, report):
    taken = []
    for _ in range(3):
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        start = time.perf_counter()
        page.goto(report.as_uri())
        page.evaluate(DRAWN)
        taken.append(time.perf_counter() - start)
        assert page.locator("#chart .point").count() == OPERATORS
        page.close()
    assert min(taken) < SECONDS, taken
