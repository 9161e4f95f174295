"""The dashboard's figures, its routes, and the page itself in a real browser."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from paceline.serve.dashboard import state, stats_body
from paceline.serve.fake import FakeEngine
from paceline.serve.speculation import SpeculationInfo
from paceline.types import EngineStats, PredictionStats, SpeculationStats

from .http_support import MODEL, Live, live

NGRAM = SpeculationInfo(algorithm="NGRAM", policy="adaptive")
HOSTILE = "<script>document.title = 'owned'</script><b>off</b>"


def busy(step: int, **more: Any) -> EngineStats:
    """A server after `step` steps, of 20 ms each."""
    said = SpeculationStats(
        depth=3, budget=12, reason="fastest", recent=(0.8, 0.5, 0.25),
        prediction=PredictionStats(steps=step, predicted_seconds=0.021 * step,
                                   real_seconds=0.02 * step, median=0.05, p90=0.125),
    )  # fmt: skip
    values: dict[str, Any] = {
        "running": 4, "waiting": 2, "pages_total": 100, "pages_free": 60, "pages_cached": 30,
        "steps_total": step, "step_seconds_total": 0.02 * step, "prompt_tokens_total": 200,
        "cached_prompt_tokens_total": 50, "committed_tokens_total": 10 * step,
        "drafted_tokens_total": 12 * step, "accepted_tokens_total": 6 * step, "speculation": said,
    }  # fmt: skip
    return EngineStats(**(values | more))


def test_every_figure_of_the_page() -> None:
    body = stats_body("m", NGRAM, busy(100))
    assert body["pages"] == {"used": 10, "cached": 30, "free": 60}
    assert body["prefix_hits"] == 0.25
    assert (body["running"], body["waiting"], body["state"]) == (4, 2, "speculating")
    assert body["acceptance"] == (0.8, 0.5, 0.25)
    assert (body["error_median"], body["error_p90"]) == (0.05, 0.125)
    assert body["totals"]["tokens"] == 1000 and body["totals"]["foretold_steps"] == 100
    assert stats_body("m", NGRAM, EngineStats())["prefix_hits"] is None


@given(running=st.integers(0, 2), waiting=st.integers(0, 2), depth=st.integers(0, 2),
       algorithm=st.sampled_from(["NONE", "NGRAM"]))  # fmt: skip
def test_one_word_for_what_goes_on(running: int, waiting: int, depth: int, algorithm: str) -> None:
    said = SpeculationStats(depth=depth, budget=depth)
    stats = EngineStats(running=running, waiting=waiting, speculation=said)
    word = state(SpeculationInfo(algorithm=algorithm), stats)
    assert (word == "idle") == (running + waiting == 0)
    if word != "idle":
        assert (word == "no drafter") == (algorithm == "NONE")
    assert word != "speculating" or depth > 0
    assert word != "plain" or depth == 0


class _Busy(FakeEngine):
    """An engine whose figures a test sets."""

    told = EngineStats()

    @property
    def stats(self) -> EngineStats:
        return self.told


def test_the_page_and_its_figures_need_no_key() -> None:
    engine = _Busy()
    engine.told = busy(3)
    with live(engine, api_key="k", speculation=NGRAM) as server:
        page = httpx.get(f"{server.url}/")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "http://" not in page.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in page.text
        stats = httpx.get(f"{server.url}/stats")
        assert stats.json()["model"] == MODEL and stats.headers["cache-control"] == "no-store"
        engine.die("killed")
        dead = httpx.get(f"{server.url}/stats")
        assert dead.status_code == 503 and "not running" in dead.json()["error"]["message"]
        assert httpx.get(f"{server.url}/").status_code == 200


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no Chromium here: the dashboard is not tested in a browser")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--window-size=1240,840"):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()


def text(browser: webdriver.Chrome, element: str) -> str:
    found = browser.find_element(By.ID, element)
    return found.text if found.is_displayed() else ""


def shows(browser: webdriver.Chrome, element: str, wanted: str) -> None:
    """Within ten seconds."""
    WebDriverWait(browser, 10, 0.1).until(lambda _: wanted in text(browser, element))


def test_what_a_person_sees(browser: webdriver.Chrome) -> None:
    engine = _Busy()
    engine.told = busy(100)
    with live(engine, speculation=NGRAM) as server, _stepping(engine):
        browser.get(server.url)
        shows(browser, "model", MODEL)
        shows(browser, "drafter", "NGRAM drafter, policy adaptive")
        shows(browser, "state", "speculating")
        shows(browser, "requests", "4 running")
        shows(browser, "requests-note", "2 waiting")
        shows(browser, "depth", "depth 3")
        shows(browser, "depth-note", "up to 12 draft tokens a step: fastest")
        shows(browser, "positions", "80 %")
        shows(browser, "pages-note", "10 in use, 30 cached, 60 free")
        shows(browser, "prefix", "25 %")
        shows(browser, "step", "20.0 ms")
        shows(browser, "step-note", "21.0 ms; error 5.0 %, p90 13 %")
        WebDriverWait(browser, 10).until(lambda _: text(browser, "rate") not in ("", "-", "0.0"))
        assert text(browser, "off") == text(browser, "trouble") == text(browser, "suspect") == ""
        _keep_picture(browser)
        assert text(browser, "synthetic") == ""
        said = SpeculationStats(reason=HOSTILE, suspect=True, synthetic_acceptance=0.7)
        engine.told = busy(5000, speculation=said)
        shows(browser, "off", f"Speculation is off: {HOSTILE}")
        shows(browser, "suspect", "check-drafter")
        shows(browser, "synthetic", "Synthetic acceptance 0.7")
        assert browser.title == "Paceline"
        engine.told = busy(6000)
        WebDriverWait(browser, 10).until(lambda _: text(browser, "off") == "")
        engine.told = busy(6000, running=0, waiting=0)
        shows(browser, "depth", "idle")
        assert text(browser, "off") == ""
        assert _complaints(browser) == []
        engine.die("killed")
        shows(browser, "trouble", "the engine is not running")
    shows(browser, "trouble", "does not answer")
    assert _other_hosts(browser, server) == []


@contextlib.contextmanager
def _stepping(engine: _Busy) -> Iterator[None]:
    """Steps pass while the page looks on."""
    over = threading.Event()

    def step() -> None:
        while not over.wait(0.1):
            if engine.told.steps_total < 5000:
                engine.told = busy(engine.told.steps_total + 5)

    thread = threading.Thread(target=step)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _complaints(browser: webdriver.Chrome) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser")]  # type: ignore[no-untyped-call]


def _other_hosts(browser: webdriver.Chrome, server: Live) -> list[str]:
    script = "return performance.getEntriesByType('resource').map(each => each.name)"
    return [name for name in browser.execute_script(script) if not name.startswith(server.url)]


def _keep_picture(browser: webdriver.Chrome) -> None:
    """PACELINE_PICTURES names a directory for screenshots."""
    directory = os.environ.get("PACELINE_PICTURES")
    if directory:
        browser.save_screenshot(str(Path(directory) / "dashboard.png"))
