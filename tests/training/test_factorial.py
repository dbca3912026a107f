"""The factorial study: its design is legal, its figures are those of known effects, it resumes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import synthetic

from routepilot.env.errors import InputError
from routepilot.env.models import Model
from routepilot.env.outcomes import Outcome, Status
from routepilot.env.routes import DEFAULT_ROUTE, Catalog, Knob, Route
from routepilot.training.factorial import analyse, combinations, main, strongest

CATALOG = Catalog("made", "1", tuple(Knob(f"-k{i}", ("a", "b"), "a", "Knob.") for i in range(5)))
SETTINGS = tuple((f"-k{i}", "b") for i in range(4))
EFFECTS = {"-k0": 0.4, "-k1": 0.2, "-k2": 0.1, "-k3": -0.3}


def outcomes(pair: float, loss: float = 1e-6) -> dict[Route, Outcome]:
    """Every combination: single effects, and one interaction of the first two knobs."""
    found = {}
    for route in combinations(CATALOG, SETTINGS):
        gain = sum(EFFECTS[name] for name in route.values)
        gain += pair * ({"-k0", "-k1"} <= set(route.values))
        error = loss if "-k2" in route.values else 1e-6
        found[route] = Outcome(
            route, Status.OK, measurement=synthetic.measurement(gain), losses={"rel_l2": error}
        )
    return found


def test_additive_effects_are_called_additive() -> None:
    row = analyse("m", CATALOG, SETTINGS, outcomes(0.0), 1e-2)
    assert row.best == "-k0=b -k1=b -k2=b"
    assert row.additive_share == pytest.approx(1.0)
    assert row.main_share == pytest.approx(1.0)
    assert row.picked_gain == pytest.approx(row.best_gain) == pytest.approx(0.7)
    assert row.best_single == pytest.approx(0.4)


@pytest.mark.parametrize("pair", [0.5, -0.5])
def test_an_interaction_is_seen(pair: float) -> None:
    row = analyse("m", CATALOG, SETTINGS, outcomes(pair), 1e-2)
    assert row.main_share < 0.95
    assert row.pair_share == pytest.approx(1.0)
    if pair > 0:
        assert row.additive_share == pytest.approx(0.7 / 1.2)
    else:  # the sum picks both, which is worse than one alone
        assert row.best == "-k0=b -k2=b"
        assert row.picked_gain == pytest.approx(0.2)
        assert row.greedy_gain == pytest.approx(row.best_gain) == pytest.approx(0.5)


def test_what_is_inaccurate_cannot_win_and_the_best_is_timed_again() -> None:
    def again(route: Route) -> Outcome:
        measured = synthetic.measurement(0.55)
        return Outcome(route, Status.OK, measurement=measured, losses={"rel_l2": 1e-6})

    row = analyse("m", CATALOG, SETTINGS, outcomes(0.0, loss=0.2), 1e-2, again)
    assert row.best == "-k0=b -k1=b"
    assert row.best_gain == pytest.approx(0.55)
    assert row.accurate == 8 and row.timed == 16


def test_the_strongest_knobs_are_those_whose_intervals_clear_zero() -> None:
    singles = {
        CATALOG.route({name: "b"}): Outcome(
            CATALOG.route({name: "b"}), Status.OK, measurement=synthetic.measurement(gain)
        )
        for name, gain in {**EFFECTS, "-k4": 0.005}.items()
    }
    assert strongest(CATALOG, singles, 8) == (
        ("-k0", "b"),
        ("-k3", "b"),
        ("-k1", "b"),
        ("-k2", "b"),
    )
    assert len(strongest(CATALOG, singles, 2)) == 2


def test_combinations_mean_something() -> None:
    found = combinations(synthetic.CATALOG, (("-engine", "b"), ("-pack", "off"), ("-level", "0")))
    assert found[0] == DEFAULT_ROUTE
    assert len(found) == len(set(found)) == 6  # -pack=off beside engine b means nothing
    assert all(synthetic.CATALOG.is_legal(route) for route in found)


def test_no_knob_that_matters_is_said() -> None:
    with pytest.raises(InputError, match="no knob moves m"):
        analyse("m", CATALOG, (), outcomes(0.0), 1e-2)


def test_the_command_measures_and_resumes(
    tiny: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--models", str(tiny.folder), "--knobs", "2", "--out", str(tmp_path / "out")]
    code = main([*command, "--limit", "0.3"])
    first = capsys.readouterr()
    assert code in (0, 2)  # 2 when nothing moves so small a model beyond the noise
    if code == 2:
        assert "no knob moves" in first.err
        return
    assert tiny.name in first.out and (tmp_path / "out" / "factorial.json").is_file()
    assert main([*command, "--limit", "0.3"]) == 0
    again = capsys.readouterr()
    assert again.out == first.out


def test_bad_numbers_are_one_line(
    tiny: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--models", str(tiny.folder), "--knobs", "9", "--out", str(tmp_path)]
    assert main(command) == 2
    assert "2 to 8" in capsys.readouterr().err
    assert math.isnan(analyse("m", CATALOG, SETTINGS, outcomes(0.0), 0.0).additive_share)
