import subprocess
import sys
import time

import hostile_backend
import pytest

from routepilot.env.errors import InputError
from routepilot.env.measure import TimingPlan
from routepilot.env.models import prepare
from routepilot.env.outcomes import Measurement
from routepilot.training.aa_study import Sample, main, markdown, observe, study, summarize


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    file = hostile_backend.hostile_model(folder / "hostile.onnx")
    return prepare(file, cache=folder / "cache")


def test_summary_counts_false_wins_and_the_margin_they_would_have_needed():
    ends = [(-0.01, 0.01), (0.002, 0.01), (0.02, 0.03), (-0.03, -0.02)]
    found = [Sample(Measurement((a + b) / 2, a, b, 1, 1, 10, 0.0), 0.5, 0.25) for a, b in ends]
    row = summarize("m", "paired", found, 0.006)
    assert (row.false_wins, row.coverage, row.bare_coverage) == (0.25, 0.5, 0.25)
    assert row.needed_margin == pytest.approx(0.02)
    assert (row.worst, row.rounds, row.seconds) == (pytest.approx(0.025), 10, 0.5)
    assert row.others == 0.25
    assert "| m | paired | 4 | 25% | 50% | 25% |" in markdown([row], 0.006)


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
    rows = list(study([model], plan, backend="hostile_backend:make", repeats=3))
    assert [row.method for row in rows] == ["paired", "ABBA confirm"]
    assert all(row.coverage == 1.0 and row.worst < 0.05 and row.repeats == 3 for row in rows)
    assert all(0.0 <= row.others < 1000 for row in rows)
    with pytest.raises(InputError, match="repeats"):
        list(study([model], plan, repeats=0))


def test_command_line(model, capsys, tmp_path):
    arguments = ["--repeats", "1", "--backend", "hostile_backend:make", "--models"]
    assert main([*arguments, str(model.folder)]) == 0
    assert f"| {model.name} | paired | 1 |" in capsys.readouterr().out
    assert main([*arguments, str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
