"""The route minimiser on made engines, and `explain` on a real run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from synthetic import CATALOG, measurement

from routepilot.env.errors import InputError
from routepilot.env.outcomes import Outcome, Status
from routepilot.env.routes import DEFAULT_ROUTE, Route
from routepilot.training.explain import explain, minimise
from routepilot.training.runs import Run, write_run
from routepilot.training.tune import tune

WINNER = CATALOG.route({"-engine": "b", "-precision": "half", "-fuse": "off", "-level": "1"})


class Made:
    """A fake compiler: log speed-ups add up over knobs; `-fuse` leaves the engine as it is."""

    def __init__(self, effects: Mapping[str, float], broken: str = "") -> None:
        self.effects, self.broken, self.asked = effects, broken, list[Route]()

    def __call__(self, route: Route) -> Outcome:
        self.asked.append(route)
        if self.broken and self.broken not in route.values:
            return Outcome(route, Status.ACCURACY_FAILED, "too far off", engine_hash="broken")
        value = sum(self.effects.get(name, 0.0) for name, _ in route.settings)
        acting = " ".join(f"{n}={v}" for n, v in route.settings if n != "-fuse")
        return Outcome(
            route, Status.OK, measurement=measurement(value), engine_hash=acting or "default"
        )


def test_each_knob_gets_what_it_brings() -> None:
    made = Made({"-engine": 0.5, "-precision": 0.3, "-level": 0.0})
    knobs, minimal, speedup = minimise(CATALOG, WINNER, made)
    by_name = {knob.knob: knob for knob in knobs}
    assert by_name["-engine"].verdict == by_name["-precision"].verdict == "matters"
    assert by_name["-engine"].effect == pytest.approx(0.5)
    assert by_name["-fuse"].verdict == "same engine"
    assert by_name["-level"].verdict == "no measurable effect"
    low, high = by_name["-level"].low, by_name["-level"].high
    assert low is not None and high is not None and low < 0 < high
    assert str(minimal) == "-engine=b -precision=half"
    assert speedup[0] == pytest.approx(2.2255, rel=1e-3)
    # The winner, one a knob, and the small route: nothing is built that is not counted.
    assert len(made.asked) == 1 + 4 + 1


def test_knobs_that_stand_in_for_one_another_are_not_both_dropped() -> None:
    class Either(Made):
        def __call__(self, route: Route) -> Outcome:
            outcome = super().__call__(route)
            helped = {"-precision", "-level"} & set(route.values)
            return Outcome(
                route,
                Status.OK,
                measurement=measurement(0.4 if helped else 0.0),
                engine_hash=outcome.engine_hash,
            )

    knobs, minimal, _ = minimise(CATALOG, WINNER, Either({}))
    assert all(knob.is_idle for knob in knobs)
    assert {"-precision", "-level"} & set(minimal.values)


def test_a_knob_without_which_accuracy_fails_is_needed() -> None:
    knobs, minimal, _ = minimise(CATALOG, WINNER, Made({"-engine": 0.5}, broken="-precision"))
    needed = next(knob for knob in knobs if knob.knob == "-precision")
    assert needed.verdict == "needed" and "too far off" in needed.reason
    assert "-precision" in minimal.values


def test_dropping_a_knob_drops_what_means_nothing_without_it() -> None:
    route = CATALOG.route({"-precision": "int", "-pack": "off"})
    made = Made({"-precision": 0.2, "-pack": 0.1})
    minimise(CATALOG, route, made)
    assert all(CATALOG.is_legal(asked) for asked in made.asked)


def test_the_default_route_has_nothing_to_drop() -> None:
    made = Made({})
    assert minimise(CATALOG, DEFAULT_ROUTE, made) == ((), DEFAULT_ROUTE, (1.0, 1.0, 1.0))
    assert not made.asked


def test_explain_looks_into_both_engines(tiny_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tune(tiny_file, out=out, agent="random", max_builds=2)
    result = json.loads((out / "result.json").read_text())
    # Whichever route won on so small a model, openvino is explained beside the default.
    result["route"] = "-engine=openvino -quantize=weights8"
    (out / "result.json").write_text(json.dumps(result))
    found = explain(out)
    assert found.default is not None and found.winner is not None
    assert found.default.nodes["Conv"] == 1 and found.winner.nodes["Convolution"] == 1
    for layers in (found.default, found.winner):
        assert 0 < layers.sum_ms < 2 * layers.profiled_ms
        assert layers.end_to_end_ms > 0 and layers.inferences == 20
    assert [knob.knob for knob in found.knobs] == ["-engine", "-quantize"]
    written = json.loads((out / "explanation.json").read_text())
    assert written["builds"] == found.builds >= 5
    assert set(written["engines"]) == {"default", "winner"}
    assert not list(out.glob(".explanation*"))


def test_explain_names_the_models_behind_the_policy(tiny_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tune(tiny_file, out=out, max_builds=0)
    models = explain(out).models
    assert len(models) == 5
    likeness = [model.likeness for model in models]
    assert likeness == sorted(likeness, reverse=True) and 0 <= likeness[-1] <= 1


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run.json"):
        explain(tmp_path)


def test_a_run_without_an_answer_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, Run("nowhere", "cpu"))
    (tmp_path / "result.json").write_text('{"state": "searching", "route": ""}')
    with pytest.raises(InputError, match="no confirmed answer"):
        explain(tmp_path)
    (tmp_path / "result.json").write_text('{"state": "done", "route": ""}')
    with pytest.raises(InputError, match="repeat"):
        explain(tmp_path)
