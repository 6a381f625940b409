"""The live page in a real browser, under load. `make browser` installs Playwright; without it, the tests are skipped.

With `VSCHED_SCREENSHOTS`, the pictures of the documentation are written into that folder.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api")

from PIL import Image
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.patience import PATIENCE_S
from tests.trace_format import check_trace_events

ROOT = Path(__file__).resolve().parents[2]
SLOTS = 2
CLIENTS = 6


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server with the demo model and two slots."""
    log = tmp_path_factory.mktemp("server") / "log"
    settings = [
        f"--set=generate.slots={SLOTS}",
        '--set=generate.memory={use="pinned", tokens=6400}',
        "--set=arena.embedding_bytes=8388608",
        "--set=generate.threads=1",
        "--set=encode.threads=1",
    ]
    command = [sys.executable, "-m", "vsched", "serve", "workers/demo-model", "--port=0", *settings]
    with log.open("wb") as output:
        server = subprocess.Popen(command, cwd=ROOT, stderr=output, stdout=output)
        try:
            yield _ready(log, server)
        finally:
            server.terminate()
            server.wait(60)


def _ready(log: Path, server: subprocess.Popen[bytes]) -> str:
    for _ in range(1200):
        found = re.search(r"served at (http://\S+)/v1", log.read_text())
        if found is not None:
            return found[1]
        assert server.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(f"not ready: {log.read_text()}")


@pytest.fixture(scope="module")
def load(url: str) -> Iterator[None]:
    """Clients that send one request after the other, more than there are slots."""
    stopping = threading.Event()

    def ask(number: int) -> None:
        while not stopping.is_set():
            text = f"Question {number} " * 8
            body = {"prompt": text, "max_tokens": 1200, "ignore_eos": True}
            with contextlib.suppress(OSError):
                _post(f"{url}/v1/completions", body)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    yield
    stopping.set()
    _post(f"{url}/admin/clear", {})
    for thread in threads:
        thread.join()


def _post(address: str, body: object) -> Any:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        return json.load(reply)


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """The page, once it shows a state; it must not log an error or break its content security policy."""
    opened = browser.new_page(viewport={"width": 1200, "height": 1000})
    problems: list[str] = []
    opened.on("console", lambda message: problems.append(message.text))
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.goto(url)
    expect(opened.get_by_role("status").first).to_have_text("ready")
    yield opened
    opened.close()
    refused = "status of 400"  # tests do that on purpose
    assert [text for text in problems if refused not in text] == []


def show(page: Page, tab: str) -> None:
    page.get_by_role("tab", name=tab).click()


def picture(page: Page, name: str, *, opened: Locator | None = None) -> None:
    """Write a screenshot for the documentation, if asked, after a click that opens a row."""
    folder = os.environ.get("VSCHED_SCREENSHOTS")
    if folder:
        page.wait_for_timeout(15_000)  # for the charts to have lines
        if opened is not None:
            opened.click()
        page.locator("body").screenshot(path=Path(folder) / f"page-{name}.png")


def test_page_reports_why_requests_wait(page: Page, load: None) -> None:
    waits = page.get_by_role("list", name="Why requests wait")
    expect(waits).to_contain_text(
        re.compile(rf"\d requests, the oldest for .*: all {SLOTS} slots are taken")
    )
    expect(waits).to_contain_text("What would help: more generate.slots or replicas.")
    page.get_by_label("Show").select_option("waiting")
    page.locator("button.row").last.click()
    expect(page.get_by_text(f"all {SLOTS} slots are taken").first).to_be_visible()
    expect(page.get_by_text("What would help: more generate.slots").first).to_be_visible()
    expect(page.get_by_text(re.compile(r"For [\d.]+ m?s: all")).first).to_be_visible()
    expect(
        page.get_by_role("img", name=re.compile("KV blocks of generate: .* held"))
    ).to_be_visible()
    page.get_by_label("Show").select_option("all")
    picture(page, "now", opened=page.locator("button.row").last)


def test_page_changes_a_policy(page: Page, url: str, load: None) -> None:
    show(page, "Policies")
    page.get_by_role("button", name="Change generate.admission").click()
    page.get_by_label("Policy").select_option("shortest-first")
    page.get_by_label("Fields as JSON").fill('{"nonsense": 1}')
    page.get_by_role("button", name="Change", exact=True).last.click()
    expect(page.get_by_role("alert")).to_contain_text("nonsense")
    page.get_by_label("Fields as JSON").fill('{"ageing_s": 2.5}')
    page.get_by_role("button", name="Change", exact=True).last.click()
    expect(page.get_by_text("shortest-first decides as generate.admission")).to_be_visible()
    row = page.get_by_role("row", name=re.compile("^generate.admission shortest-first"))
    expect(row).to_contain_text("ageing_s = 2.5")
    with urllib.request.urlopen(f"{url}/admin/policies") as reply:
        assert json.load(reply)["generate.admission"]["use"] == "shortest-first"
    _post(f"{url}/admin/policies", {"generate.admission": {"use": "fifo"}})


def test_page_saves_a_timeline_for_perfetto(page: Page, tmp_path: Path, load: None) -> None:
    """In the format of `vsched replay --timeline`, with all processes, steps and phases."""
    show(page, "Timeline")
    expect(page.get_by_role("img", name=re.compile(r"[1-9]\d* steps, [1-9]"))).to_be_visible()
    page.get_by_role("button", name="Pause").click()
    picture(page, "timeline")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save for Perfetto").click()
    saved = tmp_path / "trace.json"
    download.value.save_as(saved)
    events = json.loads(saved.read_text())["traceEvents"]
    check_trace_events(events)
    names = {one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert {"scheduler", "generate"} <= names
    assert {one["name"] for one in events if one["ph"] == "b"} >= {"queue", "prefill", "decode"}
    assert {one["ph"] for one in events} == {"M", "X", "b", "e", "C"}


def test_page_shows_memory(page: Page) -> None:
    show(page, "Memory")
    expect(page.get_by_role("rowheader", name="generate rank 0").first).to_be_visible()
    expect(page.get_by_role("row", name=re.compile("generate rank 0 kv"))).to_be_visible()


def drop(page: Page, name: str, kind: str, data: bytes) -> None:
    """Drop a file on the playground."""
    dropped = page.evaluate_handle(
        """([name, type, data]) => {
            const dropped = new DataTransfer();
            dropped.items.add(new File([new Uint8Array(data)], name, {type}));
            return dropped;
        }""",
        [name, kind, list(data)],
    )
    page.locator(".drop").dispatch_event("drop", {"dataTransfer": dropped})


def test_playground_takes_a_dropped_image(page: Page) -> None:
    show(page, "Playground")
    file = io.BytesIO()
    Image.new("RGB", (224, 224), (200, 30, 30)).save(file, "PNG")
    drop(page, "red.png", "image/png", file.getvalue())
    expect(page.get_by_alt_text("The image of the message")).to_be_visible()
    page.get_by_label("Output tokens at most").fill("40")
    page.get_by_role("button", name="Send").click()
    times = page.get_by_role("heading", name="Where the time went")
    expect(times).to_be_visible()
    expect(page.locator("output.answer")).not_to_be_empty()
    expect(page.get_by_text(re.compile(r"1 images\s+or frame groups encoded"))).to_be_visible()
    picture(page, "playground")
    show(page, "Now")
    show(page, "Playground")
    expect(page.locator("output.answer")).not_to_be_empty()


def test_playground_takes_a_dropped_video(page: Page) -> None:
    pytest.importorskip("av")
    from tests.unit.media.video_files import video

    show(page, "Playground")
    drop(page, "colors.mp4", "video/mp4", video(4, size=(112, 112), rate=2))
    expect(page.get_by_label("The video of the message")).to_be_visible()
    page.get_by_label("Output tokens at most").fill("10")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_text(re.compile(r"2 images\s+or frame groups encoded"))).to_be_visible()
    expect(page.locator("output.answer")).not_to_be_empty()


def test_page_works_with_the_keyboard(page: Page, load: None) -> None:
    page.get_by_role("tab", name="Now").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Timeline")).to_have_attribute("aria-selected", "true")
    expect(page.get_by_role("tab", name="Timeline")).to_be_focused()
    timeline = page.get_by_role("img", name=re.compile("^Timeline of 20.0 seconds"))
    timeline.focus()
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Go on")).to_be_visible()
    page.keyboard.press("+")
    expect(page.get_by_role("img", name=re.compile("^Timeline of 14.0 seconds"))).to_be_visible()


@pytest.mark.parametrize("tab", ["Now", "Timeline", "Policies", "Memory", "Playground"])
def test_controls_have_names_for_screen_readers(page: Page, tab: str) -> None:
    show(page, tab)
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, canvas, figure, table")]
            .filter(one => !one.closest("[hidden]") && !one.closest(".u-wrap"))
            .filter(one => !one.closest("figure") || one.matches("figure"))
            .filter(one => !(one.getAttribute("aria-label") || one.getAttribute("aria-labelledby")
                || one.labels?.length || one.textContent.trim()))
            .map(one => one.outerHTML.slice(0, 80))"""
    )
    assert unnamed == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_has_contrast(browser: Browser, url: str, scheme: Any) -> None:
    """Text and faint text on the ground have the contrast of WCAG 2, level AA."""
    opened = browser.new_page(color_scheme=scheme)
    opened.goto(url)
    expect(opened.get_by_role("status").first).to_have_text("ready")
    opened.wait_for_selector("dl.tiles")
    colours = opened.evaluate(
        """() => [getComputedStyle(document.body), getComputedStyle(document.querySelector("dt"))]
            .map(style => style.color).concat(getComputedStyle(document.body).backgroundColor)"""
    )
    text, faint, ground = map(luminance, colours)
    for one in (text, faint):
        assert (max(one, ground) + 0.05) / (min(one, ground) + 0.05) >= 4.5
    assert (ground > 0.5) == (scheme == "light")
    opened.close()


def luminance(colour: str) -> float:
    """Relative luminance of a colour, WCAG 2."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_playground_shows_waiting_and_reasoning(page: Page) -> None:
    waiting = page.get_by_text("Waiting for the first token for")

    def answer(route: Route) -> None:
        expect(waiting).to_be_visible()
        deltas = [
            {"reasoning_content": "It is"},
            {"reasoning_content": " navy."},
            {"content": "Blue"},
        ]
        chunks = [{"id": "chatcmpl-1", "choices": [{"delta": delta}]} for delta in deltas]
        events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        route.fulfill(content_type="text/event-stream", body=f"{events}data: [DONE]\n\n")

    page.route("**/v1/chat/completions", answer)
    show(page, "Playground")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_text("It is navy.")).to_be_visible()
    expect(page.locator("output.answer")).to_have_text("Blue")
    expect(waiting).to_have_count(0)


def test_playground_forgets_a_removed_file(page: Page) -> None:
    show(page, "Playground")
    chooser = page.locator("input[type=file]")
    drop(page, "notes.txt", "text/plain", b"no image")
    expect(page.get_by_role("alert")).to_have_text("notes.txt is neither an image nor a video")
    chooser.set_input_files(ROOT / "docs/images/quickstart-number.png")
    expect(page.get_by_alt_text("The image of the message")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
    page.get_by_role("button", name="Remove").click()
    expect(chooser).to_have_value("")


def test_page_fits_a_phone(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 800})
    for tab in ("Now", "Timeline", "Policies", "Memory", "Playground"):
        show(page, tab)
        expect(page.get_by_role("tab", name=tab)).to_have_attribute("aria-selected", "true")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, tab
    places = [page.locator(one).bounding_box() for one in ("input[type=file]", ".drop")]
    chooser, box = [place["x"] + place["width"] for place in places if place is not None]
    assert chooser <= box
