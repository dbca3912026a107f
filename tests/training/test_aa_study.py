import math
import subprocess
import sys
import time

import hostile_backend
import numpy as np
import pytest

from routepilot.env.errors import InputError
from routepilot.env.measure import TimingPlan
from routepilot.env.models import prepare
from routepilot.env.outcomes import Measurement
from routepilot.training.aa_study import (
    Sample,
    components,
    main,
    markdown,
    observe,
    study,
    summarize,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    file = hostile_backend.hostile_model(folder / "hostile.onnx")
    return prepare(file, cache=folder / "cache")


def test_summary_counts_false_wins_and_the_margin_they_would_have_needed():
    ends = [(-0.01, 0.01), (0.002, 0.01), (0.02, 0.03), (-0.03, -0.02)]
    found = [Sample(Measurement((a + b) / 2, a, b, 1, 1, 10, 0.0), 0.5, 0.25) for a, b in ends]
    row = summarize("m", "paired", [[sample] for sample in found], 0.006)
    assert (row.false_wins, row.coverage, row.bare_coverage) == (0.25, 0.5, 0.25)
    assert row.needed_margin == pytest.approx(0.02)
    assert (row.worst, row.rounds, row.seconds) == (pytest.approx(0.025), 10, 0.5)
    assert row.others == 0.25
    assert row.smallest_win == pytest.approx(0.005 + 0.006)
    assert math.isnan(row.between) and math.isnan(row.within)
    head, ruler, line = markdown([row], 0.006).splitlines()[2:]
    assert line.startswith("| m | paired | 4 | 25% | 50% | 25% |")
    assert head.count("|") == ruler.count("|") == line.count("|")


@pytest.mark.parametrize(("between", "within"), [(0.03, 0.01), (0.0, 0.02), (0.01, 0.01)])
def test_what_builds_differ_by_is_told_from_what_timings_scatter(between, within):
    rng = np.random.default_rng(1)
    builds = rng.normal(0, between, (2000, 1))
    found = components(builds + rng.normal(0, within, (2000, 3)))
    assert found[0] == pytest.approx(between, rel=0.1, abs=0.15 * within)
    assert found[1] == pytest.approx(within, rel=0.1)


def test_the_load_of_other_processes_is_seen():
    idle = observe(lambda: time.sleep(0.5))
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        time.sleep(0.3)
        loaded = observe(lambda: time.sleep(0.5))
        busy.kill()
    assert loaded.others > 0.5
    assert idle.seconds == pytest.approx(0.5, abs=0.2)


def test_study_of_synthetic_engines(model):
    plan = TimingPlan(warmup_seconds=0.0)
    rows = list(study([model], plan, backend="hostile_backend:make", repeats=3, timings=2))
    assert [row.method for row in rows] == ["paired", "ABBA confirm"]
    assert all(row.coverage == 1.0 and row.worst < 0.05 and row.repeats == 3 for row in rows)
    assert all(0.0 <= row.others < 1000 for row in rows)
    assert all(0.0 <= row.within < 0.05 and 0.0 <= row.between < 0.05 for row in rows)
    with pytest.raises(InputError, match="timings"):
        list(study([model], plan, timings=0))
    with pytest.raises(InputError, match="repeats"):
        list(study([model], plan, repeats=0))


def test_command_line(model, capsys, tmp_path):
    arguments = ["--repeats", "1", "--backend", "hostile_backend:make", "--models"]
    assert main([*arguments, str(model.folder)]) == 0
    assert f"| {model.name} | paired | 1 |" in capsys.readouterr().out
    assert main([*arguments, str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
