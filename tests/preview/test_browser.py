"""Tests of the preview and the report in headless Chromium."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.conftest import Sharded, run_streamvid
from tests.dataset.samples import BUCKETS, ROW, Part, seal_parts, tar_bytes
from tests.preview.conftest import PreviewServer, Serve

BUCKET = "256px-17f-16x9"
HOSTILE = "\"'><img src=x onerror=window.hacked=1><script>window.hacked=1</script>{{7*7}}\u202e\x1b[31m"
# Sum of all layout shift scores; 0.1 is already visible.
SHIFTS = """new Promise(done => new PerformanceObserver(list =>
    done(list.getEntries().reduce((sum, one) => sum + one.value, 0))).observe({type: "layout-shift", buffered: true})
    || setTimeout(() => done(0), 300))"""
UNNAMED = """[...document.querySelectorAll("a, button, input, select, img, svg, summary")].filter(one => !(
    one.textContent.trim() || one.ariaLabel || one.title || one.hasAttribute("alt") || (one.labels || []).length
    || one.ariaHidden === "true")).map(one => one.outerHTML)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        reason = "no chromium: apt-get install --no-install-recommends chromium"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    with sync_playwright() as playwright:
        # Chromium's sandbox does not work as root, which the CI container uses.
        running = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running
        running.close()


class Watch:
    """A browser page that records errors, and requests to anything but `base`."""

    def __init__(self, browser: Browser, base: str, **options: Any) -> None:
        self.base, self.wrong = base, list[str]()
        self.page: Page = browser.new_context(**options).new_page()
        self.page.on("console", lambda said: self.wrong.append(said.text) if said.type != "log" else None)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on(
            "request", lambda sent: None if sent.url.startswith((base, "data:")) else self.wrong.append(sent.url)
        )

    def open(self, path: str) -> Page:
        self.page.goto(self.base + path)
        self.page.wait_for_load_state("networkidle")
        return self.page

    def close(self) -> None:
        self.page.context.close()
        assert not self.wrong


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
def test_every_page_fits_and_is_quiet(
    browser: Browser, demo: PreviewServer, width: int, scheme: Any, tmp_path: Path
) -> None:
    """Pages have no errors, requests to other hosts, horizontal scrolling, layout shifts or unnamed controls."""
    watch = Watch(browser, demo.base, viewport={"width": width, "height": 900}, color_scheme=scheme)
    sample = demo.get(f"/samples?bucket={BUCKET}").samples[0]
    for path in ("/", f"/samples?bucket={BUCKET}&sort=fps", f"{sample}?spatial=random_crop", "/step?ranks=2"):
        page = watch.open(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        assert page.evaluate(SHIFTS) < 0.02, path
        assert page.evaluate(UNNAMED) == [], path
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, back[4:-1].split(","))) < 128) == (scheme == "dark")
        assert page.evaluate("[...document.images].filter(one => one.complete && !one.naturalWidth).length") == 0, path
    watch.close()


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
def test_the_page_of_a_run_is_refreshed_while_it_trains(
    browser: Browser, demo: PreviewServer, run_folder: Path, width: int, scheme: Any
) -> None:
    metrics = run_folder / "metrics.jsonl"
    values = [{"step": step, "loss": 2 / step + step % 3 / 50, "samples_per_second": 9.5} for step in range(1, 61)]
    metrics.write_text("".join(json.dumps(value) + "\n" for value in values))
    watch = Watch(browser, demo.base, viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = watch.open("/run")
    assert page.locator("figcaption").all_text_contents() == ["Loss 0.03333", "Samples per second 9.5"]
    assert page.evaluate(UNNAMED) == [] and page.evaluate(SHIFTS) < 0.02
    before = page.locator(".curve path").first.get_attribute("d")
    with metrics.open("a") as file:
        file.write(json.dumps({"step": 61, "loss": 0.5, "eval_loss": 0.25}) + "\n")
    page.get_by_text("Held-out loss 0.25").wait_for()
    assert "step 61" in page.locator("main").inner_text()
    assert page.locator(".curve path").first.get_attribute("d") not in (before, None)
    assert page.evaluate("document.documentElement.scrollWidth") <= width and page.evaluate(UNNAMED) == []
    watch.close()


def test_keys_scrolling_and_playing(browser: Browser, demo: PreviewServer) -> None:
    watch = Watch(browser, demo.base, viewport={"width": 1440, "height": 500})
    page = watch.open("/samples?sort=codec")
    assert page.locator(".card").count() == 24
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "filter"
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement === document.querySelectorAll('.picture')[1]")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.getBoundingClientRect().top") > 300
    page.mouse.wheel(0, 20000)
    page.locator(".card").nth(33).wait_for()
    page.locator("[data-clip]").first.hover()
    page.wait_for_selector(".is-playing video")
    page.locator("[data-strip]").first.hover()
    page.wait_for_selector(".is-playing .strip")
    page.fill("#filter", "fps > 26")
    page.keyboard.press("Enter")
    page.wait_for_url("**where=fps*")
    assert 0 < page.locator(".card").count() < 24
    page.locator(".picture").first.click()
    page.wait_for_selector(".player")
    page.wait_for_load_state()  # the script that handles keys has run
    page.keyboard.press("ArrowRight")
    assert page.locator(".at").inner_text().startswith("2 / ")
    page.keyboard.press("ArrowLeft")
    page.select_option("select[name=temporal]", "uniform")
    page.wait_for_url("**temporal=uniform*")
    page.wait_for_load_state()
    page.keyboard.press("Escape")
    page.keyboard.press("Space")
    page.wait_for_selector(".play[aria-pressed=true]")
    page.wait_for_load_state("networkidle")
    watch.close()


def test_hostile_names_and_captions_are_text(browser: Browser, serve: Serve, tmp_path: Path) -> None:
    """SAFE-1: keys, captions, columns and rejections are shown as text on every page and in the report."""
    clip = replace(ROW.clip, num_bytes=3)
    rows = [replace(ROW, key=HOSTILE, text=HOSTILE, clip=clip, columns={HOSTILE: HOSTILE})]
    rows[0] = replace(rows[0], source=replace(ROW.source, name=HOSTILE))
    tar = tar_bytes([("a-0", {"mp4": b"clp", "txt": b"words"})])
    rejections = [(0, HOSTILE, HOSTILE, "not-media"), (1, HOSTILE, HOSTILE, HOSTILE)]
    seal_parts(
        tmp_path / "ds", BUCKETS[:1], [Part(BUCKETS[0], 0, tar, rows)], {HOSTILE: "string"}, rejections=rejections
    )
    server = serve(tmp_path / "ds")
    watch = Watch(browser, server.base)
    for path in ("/", "/samples", f"/samples?where={HOSTILE[:9]}", f"/sample/{BUCKETS[0].id}/0/0", "/step"):
        page = watch.open(path)
        assert page.evaluate("window.hacked === undefined && !document.querySelector('img[src=x]')"), path
        assert "{{7*7}}" in page.content() or "where" in path
    run_streamvid("report", tmp_path / "ds", "-o", tmp_path / "report.html")
    page.goto((tmp_path / "report.html").as_uri())
    assert page.evaluate("window.hacked === undefined && !document.querySelector('img[src=x]')")
    page.context.close()
    done = run_streamvid("stats", tmp_path / "ds", "--samples", HOSTILE, check=False)
    assert "\x1b" not in done.stdout + done.stderr


def test_the_report_opens_from_disk_and_loads_nothing(browser: Browser, sharded: Sharded, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    run_streamvid("report", sharded.root, "-o", path, "--samples-per-bucket", "2")
    assert path.stat().st_size < 1_000_000
    watch = Watch(browser, path.as_uri(), java_script_enabled=False, viewport={"width": 390, "height": 900})
    page = watch.open("")
    assert page.locator(".sheet img").count() >= 12 and page.locator(".histogram").count() >= 10
    sizes = page.locator(".sheet img").evaluate_all("all => all.map(one => one.naturalWidth)")
    assert min(sizes) > 100
    watch.close()
