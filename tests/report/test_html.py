"""The page: self-contained, the report's own numbers, and nothing from a graph is ever markup."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from graphopt.execute.backend import Backend
from graphopt.ir.origin import Origin
from graphopt.pipeline.pass_base import Refusal
from graphopt.report.build import build_report
from graphopt.report.data import Report
from graphopt.report.html import report_html
from tests.support.steps import step_executable

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# No host name resolves: what a page loads from anywhere fails.
NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND"
SECONDS = 120
PAYLOAD = """<img src=x onerror="document.title='broken out'"></script><script>document.title='broken out'</script>"""
QUOTES = "\"' onload=alert(1) x='"

needs_chromium = pytest.mark.skipif(
    not Path(CHROMIUM).exists(), reason=f"no Chromium at {CHROMIUM}: apt-get install chromium (CI does)"
)
Dom = Callable[[Report], str]


@pytest.fixture
def dom(tmp_path: Path) -> Dom:
    """The document of a report after a real browser has rendered it."""

    def render(report: Report) -> str:
        report.to_html(tmp_path / "report.html")
        return chromium(tmp_path, "--dump-dom").stdout

    return render


def chromium(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    profile = folder / "profile"
    shutil.rmtree(profile, ignore_errors=True)
    command = [CHROMIUM, *FLAGS, NO_NETWORK, f"--user-data-dir={profile}", *arguments]
    return subprocess.run(
        [*command, (folder / "report.html").as_uri()], capture_output=True, text=True, timeout=SECONDS, check=True
    )


def hostile_report() -> Report:
    """A report in which every text that can come from a graph is an attack."""
    executable = step_executable()
    program = executable.program
    program.origins = dict.fromkeys(program.origins, Origin(f"body.{PAYLOAD}", f"{QUOTES}.py:1", f"x = {PAYLOAD}"))
    record = replace(program.history[0], name=PAYLOAD + QUOTES, refusals=(Refusal(PAYLOAD, PAYLOAD),))
    program.history = (record, *program.history[1:])
    executable = replace(executable, backend=Backend("aten", PAYLOAD))
    report = build_report(executable, notes=(PAYLOAD,), title=PAYLOAD)
    points = tuple(replace(point, op=PAYLOAD + QUOTES, segment=PAYLOAD + QUOTES) for point in report.timeline)
    values = tuple(replace(value, name=PAYLOAD, spec=PAYLOAD, memory_class=PAYLOAD) for value in report.largest)
    return replace(report, timeline=points, largest=values, backend=PAYLOAD)


def embedded(page: str) -> dict[str, object]:
    (text,) = re.findall(r'<script type="application/json" id="report-data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def bytes_of(page: str, element: str) -> int:
    (found,) = re.findall(rf'id="{element}" data-bytes="(\d+)"', page)
    return int(found)


def test_loads_nothing():
    page = report_html(build_report(step_executable()))
    assert re.findall(r"\b(?:src|href)=|url\(|@import|https?:", page) == []
    assert "default-src 'none'" in page


def test_holds_the_whole_report_as_data():
    report = build_report(step_executable())
    assert embedded(report_html(report)) == json.loads(json.dumps(report.as_dict()))


def test_holds_hostile_text_as_data():
    report = hostile_report()
    page = report_html(report)
    assert embedded(page) == json.loads(json.dumps(report.as_dict()))
    assert page.count("<script") == page.count("</script>") == 1
    assert "<img" not in page


def test_a_long_program_keeps_its_peak_and_few_columns():
    report = build_report(step_executable())
    points = tuple(replace(report.timeline[0], position=i, live_bytes=i % 977) for i in range(20_000))
    page = report_html(replace(report, timeline=points))
    assert page.count('class="op"') <= 500
    assert 'id="peak" data-bytes="976"' in page


def attribute_names(page: str) -> set[str]:
    """The names of all attributes in a document."""
    names: set[str] = set()

    class Collector(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            names.update(name for name, _ in attrs)

    Collector().feed(page)
    return names


@needs_chromium
@pytest.mark.browser
def test_a_browser_shows_the_numbers_of_the_report(dom: Dom):
    report = replace(build_report(step_executable()), measured_peak_bytes=12345)
    page = dom(report)
    assert bytes_of(page, "predicted-peak") == bytes_of(page, "peak") == report.predicted_peak_bytes
    assert bytes_of(page, "measured-peak") == 12345
    assert bytes_of(page, "resident") == report.resident_bytes
    for kind, nbytes in report.memory.items():
        assert bytes_of(page, f"memory-{kind}") == nbytes
    assert re.findall(r'data-pass="([^"]+)"', page) == [record.name for record in report.records]
    assert page.count('class="segment"') == 3
    assert page.count('class="op"') == len(report.timeline)


@needs_chromium
@pytest.mark.browser
def test_a_browser_renders_hostile_text_as_text(dom: Dom):
    page = dom(hostile_report())
    assert re.findall(r"<(?:img|iframe|object|embed|link|base|form)\b", page) == []
    assert page.count("<script") == 1
    (title,) = re.findall(r"<head>.*?<title>(.*?)</title>", page, re.DOTALL)
    assert title.startswith("&lt;img src=x onerror=")
    assert [name for name in attribute_names(page) if name.startswith("on")] == []


@needs_chromium
@pytest.mark.browser
def test_a_browser_draws_the_page(tmp_path: Path):
    build_report(step_executable()).to_html(tmp_path / "report.html")
    chromium(tmp_path, "--window-size=1200,1600", f"--screenshot={tmp_path / 'page.png'}")
    # A blank page of this size compresses to less than 10 KB.
    assert (tmp_path / "page.png").stat().st_size > 30_000
