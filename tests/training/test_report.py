"""The report page: self-contained, escaped, true to its result."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from routepilot.env.errors import InputError
from routepilot.training.report import chart, render, write_report


def trial(route: str, status: str = "ok", speedup: float | None = 1.5) -> dict[str, Any]:
    return {
        "route": route,
        "status": status,
        "reason": "",
        "speedup": speedup,
        "losses": {"rel_l2": 1e-3},
        "build_seconds": 0.1,
    }


def result(**changes: Any) -> dict[str, Any]:
    return {
        "model": "a model",
        "backend": "cpu",
        "policy": "cpu",
        "fingerprint": "f" * 64,
        "target": {"device": "a device", "key": "k"},
        "route": "-engine=openvino",
        "is_default": False,
        "speedup": 1.5,
        "speedup_low": 1.4,
        "speedup_high": 1.6,
        "note": "",
        "builds": 2,
        "builds_total": 5,
        "seconds": 12.3,
        "default_latency_ms": 8.1,
        "trials": [trial("-engine=openvino"), trial("-graph=off", "crashed", None)],
        "manifest": {"seed": 0, "packages": {"numpy": "2"}},
        **changes,
    }


class Outside(HTMLParser):
    """Collects what a page would fetch, and its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.fetched += [v for k, v in attrs if k in ("src", "href") and v]


def test_page_holds_the_answer_and_fetches_nothing() -> None:
    page = render(result())
    parser = Outside()
    parser.feed(page)
    assert not parser.fetched
    assert "1.500x" in page and "1.400x" in page
    assert page.count("<tr>") >= 5


def test_names_from_outside_are_escaped() -> None:
    page = render(result(model="<script>alert(1)</script>", note="<img src=x>"))
    parser = Outside()
    parser.feed(page)
    assert parser.scripts == 0
    assert "&lt;script&gt;" in page


def test_default_answer_says_why() -> None:
    page = render(result(is_default=True, route="", note="nothing measured faster"))
    assert "The default route stays" in page
    assert "nothing measured faster" in page


def test_chart_steps_up_only() -> None:
    drawn = chart([trial("a", speedup=0.5), trial("b", speedup=2.0), trial("c", speedup=1.2)])
    heights = [
        float(step.split()[1]) for step in drawn["path"].split(" V ")[1:] for step in ["V " + step]
    ]
    assert heights == sorted(heights, reverse=True)  # SVG y falls as the best rises
    assert heights[0] > heights[1] == heights[2]


def test_a_run_without_builds_still_draws() -> None:
    assert "Best so far" in render(result(trials=[], is_default=True, route=""))


def test_folder_without_a_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="result.json"):
        write_report(tmp_path)


def test_written_page_matches_the_result(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps(result(model="Grüße")))
    assert "Grüße" in write_report(tmp_path).read_text(encoding="utf-8")
