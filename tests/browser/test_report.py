"""The report of `vsched simulate --html` in a real browser. `make browser` runs it, as `test_page.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api")

from playwright.sync_api import Browser, Locator, Page, expect

from tests.unit.sim.shapes import COST, arrival, config
from vsched.sim.fast.simulation import simulate
from vsched.sim.report.rendering import render_html
from vsched.sim.workload.requests import Text, workload_of


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report of two policies under overload, with two tenants."""
    arrivals = [
        arrival(n, n * 10.0, Text(n, 10 + 200 * (n % 2)), outputs=40, tenant=f"tenant {n % 2}")
        for n in range(200)
    ]
    outcomes = [
        simulate(
            config("generate.slots=1", f"generate.admission.use={use}"),
            workload_of("two tenants", arrivals),
            cost=COST,
            label=use,
        )
        for use in ("fifo", "shortest-first")
    ]
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_html(outcomes), encoding="utf-8")
    return path


@pytest.fixture(params=["light", "dark"])
def page(browser: Browser, file: Path, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The report; it must not log an error, load anything, or be wider than the window."""
    scheme: Any = request.param
    opened = browser.new_page(viewport={"width": 1200, "height": 1000}, color_scheme=scheme)
    problems: list[str] = []
    loaded: list[str] = []
    opened.on("console", lambda message: problems.append(message.text))
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("request", lambda sent: loaded.append(sent.url))
    opened.goto(file.as_uri())
    expect(opened.locator("html[data-ready]")).to_have_count(1)
    assert opened.evaluate("document.documentElement.scrollWidth") <= 1200
    yield opened
    opened.close()
    assert problems == []
    assert {url for url in loaded if not url.startswith("data:")} <= {file.as_uri()}


def chart(page: Page, title: str) -> Locator:
    return page.locator("figure", has=page.get_by_text(title, exact=True))


def test_charts_show_values_and_zoom_with_the_pointer(page: Page) -> None:
    waiting, running = chart(page, "Waiting requests"), chart(page, "Running requests")
    area = waiting.locator(".u-over")
    area.hover()
    expect(waiting.locator(".u-legend")).to_contain_text(re.compile(r"time.*\d s.*fifo.*\d"))
    expect(running.locator(".u-legend")).to_contain_text(re.compile(r"time.*\d s.*fifo.*\d"))
    plot = waiting.locator(".plot")
    whole = plot.get_attribute("data-range")
    box = area.bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.25, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, y, steps=4)
    page.mouse.up()
    expect(plot).not_to_have_attribute("data-range", whole or "")
    zoomed = plot.get_attribute("data-range")
    expect(running.locator(".plot")).to_have_attribute("data-range", zoomed or "")
    area.dblclick()
    expect(plot).to_have_attribute("data-range", whole or "")


def test_charts_work_with_the_keyboard(page: Page) -> None:
    figure = chart(page, "Time to first token, ms")
    plot = figure.locator(".plot")
    plot.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    said = figure.locator("output")
    expect(said).to_have_text(re.compile(r"^[\d.]+ %: fifo [\d.,]+, shortest-first [\d.,]+ ms$"))
    page.keyboard.press("End")
    expect(said).to_have_text(re.compile(r"^99\.99 %: "))
    whole = plot.get_attribute("data-range")
    page.keyboard.press("+")
    expect(plot).not_to_have_attribute("data-range", whole or "")
    page.keyboard.press("0")
    expect(plot).to_have_attribute("data-range", whole or "")


def test_charts_of_a_tenant(page: Page) -> None:
    figure = chart(page, "Time to first token, ms")
    read = figure.locator("output")

    def read_last() -> str:
        figure.locator(".plot").focus()
        page.keyboard.press("End")
        expect(read).to_have_text(re.compile("99.99 %"))
        return str(read.inner_text())

    values = {read_last()}
    for tenant in ("tenant 0", "tenant 1"):
        page.get_by_label("Tenant", exact=True).select_option(tenant)
        values.add(read_last())
    assert len(values) >= 2
    expect(chart(page, "Between two tokens, ms")).to_be_hidden()


def test_overload_is_at_the_top(page: Page) -> None:
    expect(page.get_by_role("note").first).to_be_in_viewport()
    expect(page.get_by_role("note").first).to_contain_text("Overload")
