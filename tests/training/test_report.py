"""The report page: self-contained, escaped, true to its result."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from routepilot.env.errors import InputError
from routepilot.training.charts import best_so_far, frontier
from routepilot.training.effects import knob_effects
from routepilot.training.plots import write_figure
from routepilot.training.report import render, summary, write_report


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


def explanation() -> dict[str, Any]:
    layer = {"name": "a layer", "kind": "Conv", "kernel": "a kernel", "milliseconds": 1.5}
    engine = {
        **{"by_kind": {"Conv": 2.0}, "nodes": {"Conv": 3}, "sum_ms": 2.0, "end_to_end_ms": 2.5},
        **{"profiled_ms": 3.0, "costliest": [layer]},
    }
    knob = {"knob": "-k", "value": "v", "verdict": "needed", "reason": "too far off"}
    there = {"speedup": 1.25, "status": "ok", "best": "-there=1", "best_speedup": 1.5}
    return {
        "builds": 4,
        "knobs": [{**knob, "speedup": None}],
        "minimal": {"route": "", "speedup": 1.2},
        "engines": {"default": engine, "winner": engine},
        "models": [{"name": "a relative", "likeness": 0.5, **there}],
    }


class Outside(HTMLParser):
    """Collects what a page would fetch, and its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.fetched += [v for k, v in attrs if k in ("src", "href") and v and v != "data:,"]


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
    assert parser.scripts == 1, "the sorting script alone"
    assert "&lt;script&gt;" in page


def test_default_answer_says_why() -> None:
    page = render(result(is_default=True, route="", note="nothing measured faster"))
    assert "The default route stays" in page
    assert "nothing measured faster" in page


def test_chart_steps_up_only() -> None:
    made = [trial("a", speedup=0.5), trial("b", speedup=2.0), trial("c", speedup=1.2)]
    drawn = best_so_far(made, seconds=False)
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


def test_the_front_is_drawn_by_the_metric_of_the_gate() -> None:
    made = [{**trial("-a=1", speedup=1.2), "losses": {"rel_l2": 1e-6, "cos": 0.002}}]
    drawn = frontier(made, 0.01, "cos")
    (point,) = drawn["points"]
    assert drawn["x_label"] == "error (cos)" and len(drawn["x_ticks"]) >= 2
    ticks = {tick["text"]: tick["x"] for tick in drawn["x_ticks"]}
    assert ticks["2e-3"] == pytest.approx(point["x"]) and ticks["1e-2"] == drawn["limit_x"]
    page = render(result(trials=made, manifest={"gate": {"metric": "cos", "limit": 0.01}}))
    assert "error (cos)" in page
    exact = frontier([{**trial("-a=1"), "losses": {"l1": 0.0}}], 0.0, "l1")
    assert exact["points"][0]["x"] == exact["limit_x"], "a limit of nothing has a place too"


def test_the_page_says_who_chose() -> None:
    assert "chosen by the policy cpu<" in render(result(agent="ppo"))
    assert "chosen by the agent random<" in render(result(policy="random", agent="random"))
    assert "by the agent random;" in summary(result(policy="random", agent="random"))


def test_knobs_are_not_broken_behind_their_hyphen() -> None:
    same = {**trial("-a=1"), "reason": "same engine as -engine=openvino <b>"}
    page = render(result(trials=[same]))
    assert 'same engine as <span class="knob">-engine=openvino</span> &lt;b&gt;' in page


def test_the_front_holds_what_nothing_feasible_beats() -> None:
    made = [
        {**trial("-a=1", speedup=1.2), "losses": {"rel_l2": 1e-6}},
        {**trial("-a=2", speedup=1.1), "losses": {"rel_l2": 1e-4}},
        {**trial("-a=3", speedup=2.0), "losses": {"rel_l2": 1e-3}},
        {**trial("-a=4", "accuracy_failed", 5.0), "losses": {"rel_l2": 0.3}},
        {**trial("-a=5", "invalid_output", None), "losses": {"rel_l2": "inf"}},
    ]
    drawn = frontier(made, 1e-2)
    places = [tuple(map(float, pair.split(","))) for pair in drawn["front"].split()]
    assert len(places) == 4, "two steps: what the first error allows, what the second does"
    assert places[0][1] == places[1][1] > places[2][1] == places[3][1], "SVG's y falls with speed"
    assert places[3][0] == pytest.approx(drawn["limit_x"], abs=0.1), "up to the limit"
    assert len(drawn["points"]) == 4
    beyond = [p["x"] > drawn["limit_x"] for p in drawn["points"]]
    assert beyond == [False, False, False, True]


def test_effects_recover_what_was_put_in() -> None:
    made = []
    for number in range(24):
        settings = [f"-a={number % 2}", f"-b={number // 2 % 2}", f"-c={number // 4 % 2}"]
        kept = [s for s in settings if s.endswith("1")]
        speedup = 2.0 ** ("-a=1" in kept) * 0.8 ** ("-b=1" in kept)
        made.append(trial(" ".join(kept), speedup=speedup))
    effects = {e["setting"]: e for e in knob_effects(made)}
    assert 1.8 < effects["-a=1"]["speedup"] < 2.05
    assert effects["-b=1"]["high"] < 1.0
    assert effects["-c=1"]["low"] <= 1.03 and effects["-c=1"]["high"] >= 0.97
    assert knob_effects(made[:3]) == []


def test_failures_are_told_in_the_compilers_words() -> None:
    failed = {**trial("-x=1", "build_failed", None), "reason": "no kernel for <Op>"}
    page = render(result(trials=[failed, failed, trial("-y=1")]))
    assert page.count("no kernel for &lt;Op&gt;") == 3  # two builds, one kind of failure


def test_comparison_and_explanation_are_on_the_page() -> None:
    row = {
        **{"builds": 2, "seconds": 1.0, "route": "", "speedup": 1.0},
        **{"speedup_low": 1.0, "speedup_high": 1.0},
    }
    comparison = {"fingerprint": "f" * 64, "max_builds": 2, "agents": {"some agent": row}}
    page = render(result(), comparison, explanation())
    for words in ("some agent", "too far off", "sum of all layers", "a relative", "a kernel"):
        assert words in page
    assert "1.250x" in page and "-there=1" in page, "what the winner's route did there"
    assert "some agent" not in render(result(), {**comparison, "fingerprint": "other"})
    text = summary(result(), comparison)
    assert "| some agent | 2 | 1 | `default` |" in text


class Structure(HTMLParser):
    """Tables, headings of cells, pictures and identifiers of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def test_a_screen_reader_finds_captions_headings_and_words_for_pictures() -> None:
    row = {"builds": 2, "seconds": 1.0, "route": "", "speedup": 1.0}
    row |= {"speedup_low": 1.0, "speedup_high": 1.0}
    comparison = {"fingerprint": "f" * 64, "max_builds": 2, "agents": {"ppo": row}}
    route = {"route": "-a=1", "chance": 0.5, "speedup": 1.2, "low": 1.0, "high": 1.5}
    forecast = {"routes": [route], "models": [{"name": "m", "likeness": 0.1}]}
    trials = [trial(f"-a={i} -b=1", speedup=1.0 + i / 10) for i in range(5)]
    trials.append({**trial("-c=1", "crashed", None), "reason": "words " * 50})
    page = Structure()
    page.feed(render(result(trials=trials, forecast=forecast), comparison, explanation()))
    tables = page.all("table")
    # builds, forecast, effects, knobs, operators, two engines, models, failures, agents, manifest
    assert len(tables) == len(page.all("caption")) == 11
    assert all(cell.get("scope") in ("col", "row") for cell in page.all("th"))
    assert len(page.all("details")) == 1, "long words fold away"
    identifiers = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(identifiers) == len(set(identifiers))
    pictures = page.all("svg")
    assert len(pictures) == 3
    for picture in pictures:
        assert picture["role"] == "img"
        assert set(str(picture["aria-labelledby"]).split()) <= set(identifiers)
    assert all(region["aria-label"] for region in page.all("div") if region.get("role") == "region")


def luminance(colour: str) -> float:
    """Relative luminance of `#rgb` or `#rrggbb`, as WCAG 2.2 defines it."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["ink", "soft", "good", "bad", "blue"])
def test_every_text_colour_stands_out_from_the_paper(scheme: int, name: str) -> None:
    page = render(result())
    colours = [dict(re.findall(r"--(\w+): (#\w+)", block)) for block in page.split(":root {")[1:3]]
    ink, paper = luminance(colours[scheme][name]), luminance(colours[scheme]["paper"])
    contrast = (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05)
    assert contrast >= 4.5, f"{name}: {contrast:.2f}"


def test_an_unfinished_run_promises_nothing() -> None:
    unfinished = result(is_default=True, route="", state="searching", note="nothing is confirmed")
    page, text = render(unfinished), summary(unfinished)
    assert "Not finished" in page and "default route stays" not in page
    assert "Not finished" in text and "default route stays" not in text


@pytest.mark.parametrize("speedups", [[1.05], [8.0, 0.05], [1.3, 1.31, 1.32], [30.0]])
def test_no_two_labels_of_an_axis_overlap(speedups: list[float]) -> None:
    drawn = best_so_far([trial("-a=1", speedup=s) for s in speedups], seconds=False)
    places = sorted(tick["y"] for tick in drawn["y_ticks"])
    assert any(tick["is_default"] for tick in drawn["y_ticks"])
    assert all(b - a >= 24 for a, b in zip(places, places[1:], strict=False))


def test_the_band_stays_inside_the_picture() -> None:
    wide = {**trial("-a=1", speedup=3.0), "speedup_low": 1.5, "speedup_high": 7.0}
    drawn = best_so_far([wide], seconds=False)
    heights = [float(point.split(",")[1]) for point in drawn["band"].split()]
    assert min(heights) >= drawn["margin"] and max(heights) <= drawn["height"] - drawn["margin"]


def test_summary_cannot_be_broken_by_names() -> None:
    text = summary(result(model="a|b <img>\n`x`"))
    assert "<img>" not in text and "a\\|b" in text
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(rows) == 3
    assert "**1.50x**" in text


@pytest.mark.parametrize(("kind", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_figures_are_written(kind: str, magic: bytes, tmp_path: Path) -> None:
    content = result(model="costs $5 $6")
    for one in content["trials"]:
        one |= {"speedup_low": one["speedup"], "speedup_high": one["speedup"]}
    (tmp_path / "result.json").write_text(json.dumps(content))
    assert write_figure(tmp_path, kind).read_bytes().startswith(magic)


def test_a_result_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"model": "m"}')
    with pytest.raises(InputError, match="version"):
        write_report(tmp_path)
