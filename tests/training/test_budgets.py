"""Budgets, presets, other targets, and what a manifest says of the machine."""

from __future__ import annotations

import json
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import synthetic
from typer.testing import CliRunner

from routepilot.agents import make_agent
from routepilot.agents.base import Expecting, Problem, search
from routepilot.env import probes
from routepilot.env.backends import load_backend
from routepilot.env.backends.recorded import ModelReplay, Replay
from routepilot.env.errors import InputError, TableError
from routepilot.env.measure import TimingPlan
from routepilot.env.models import Model
from routepilot.env.outcomes import Outcome
from routepilot.env.routes import Route
from routepilot.env.store import RecordStore
from routepilot.env.tables import load_table
from routepilot.training import cli, cli_corpus, machine
from routepilot.training.collect import (
    CorpusModel,
    Repeats,
    collect,
    plan_routes,
    table_from_store,
)
from routepilot.training.compare import compare
from routepilot.training.defaults import find_table
from routepilot.training.effort import Effort, preset
from routepilot.training.enough import Stop
from routepilot.training.inputs import NamedModel
from routepilot.training.manifest import manifest
from routepilot.training.search import Budget, Search, run_search
from routepilot.training.session import Session, SessionConfig
from routepilot.training.training_run import has_settled
from routepilot.training.tune import tune


def test_fewer_than_no_builds_are_refused() -> None:
    with pytest.raises(InputError, match="give 0 or more"):
        Budget(-1)


def test_efforts_spend_more_and_measure_closer_in_order() -> None:
    quick, standard, thorough = (preset(effort) for effort in Effort)
    assert quick.builds < standard.builds < thorough.builds
    assert quick.routes < standard.routes < thorough.routes
    assert quick.steps < standard.steps < thorough.steps
    assert quick.plan.precision > standard.plan.precision > thorough.plan.precision


def test_expected_gain_falls_as_the_best_routes_are_built() -> None:
    replay = Replay(synthetic.table())
    model = replay.models[0]
    rest = replay.without_families((model.card.family,))
    problem = Problem(replay.catalog, model.card.features, model.routes, 16, 0)
    agent = make_agent("two-way-gp", problem, replay=rest)
    assert isinstance(agent, Expecting)
    expected = [agent.expected_gain()]
    recorded = dict(zip(model.routes, model.outcomes, strict=True))
    search(agent, lambda route: recorded.get(route, model.default), 12)
    expected.append(agent.expected_gain())
    assert expected[0] > 0.1 > expected[1] >= 0


class Replayed:
    """A fake session that answers from a table."""

    def __init__(self, model: ModelReplay) -> None:
        self._model = model
        self._recorded = dict(zip(model.routes, model.outcomes, strict=True))

    def default(self) -> Outcome:
        return self._model.default

    def outcome(self, route: Route, incumbent: float | None = None) -> Outcome:
        del incumbent
        return self._recorded[route]


class Collected(Replayed):
    """The same for a collection, which also looks at the catalog and the timing."""

    def __init__(self, model: ModelReplay) -> None:
        super().__init__(model)
        self.catalog, self.features = synthetic.CATALOG, model.card.features
        self.config = SessionConfig()


@pytest.mark.parametrize("place", range(4))
def test_a_search_stops_under_the_noise_and_misses_no_more_than_that(place: int) -> None:
    replay = Replay(synthetic.table())
    model = replay.models[place]
    rest = replay.without_families((model.card.family,))
    problem = Problem(replay.catalog, model.card.features, model.routes, 60, 0)
    agent = make_agent("two-way-gp", problem, replay=rest)
    budget = Budget(60, min_gain=0.025)
    found = run_search(cast(Session, Replayed(model)), agent, budget)
    assert found.ended_by == "noise" and found.builds < len(model.routes)
    best = max(outcome.gain for outcome in found.outcomes)
    assert best > model.oracle - 0.1


def test_tune_tells_its_noise_floor(tiny: Model, tmp_path: Path) -> None:
    floor = tune(tiny, out=tmp_path, agent="default", max_builds=0).manifest["noise_floor"]
    assert isinstance(floor, float) and 0 < floor < 1


def test_an_answer_is_on_disk_before_the_first_build(tiny: Model, tmp_path: Path) -> None:
    found = []

    def look(*asked: object) -> None:
        found.append(json.loads((tmp_path / "result.json").read_text()))

    tune(tiny, out=tmp_path, agent="fast", max_builds=2, on_ask=look)
    assert [len(result["trials"]) for result in found] == [0, 1]
    assert all(r["state"] == "searching" and r["is_default"] for r in found)
    assert all(r["agent"] == "fast" and r["speedup"] == 1.0 for r in found)
    answered = json.loads((tmp_path / "result.json").read_text())
    assert answered["state"] == "done"
    tune(tiny, out=tmp_path, agent="fast", max_builds=3, on_ask=look)
    assert found[-1] == answered, "a confirmed answer stands until there is another"


def test_until_noise_needs_an_agent_with_a_belief(tiny: Model, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="until-noise"):
        tune(tiny, out=tmp_path, agent="random", until_noise=True, max_builds=2)


def test_a_comparison_stops_those_who_expect_and_lets_the_others_spend(
    tiny: Model, tmp_path: Path
) -> None:
    budget = Budget(2, min_gain=5.0)  # nobody expects 150x
    agents = ("two-way-gp", "random")
    rows = compare(NamedModel(tiny), agents, budget, SessionConfig(), tmp_path)
    assert [row.search.ended_by for row in rows.values()] == ["noise", "builds"]
    assert [row.search.builds for row in rows.values()] == [0, 2]
    with pytest.raises(InputError, match="random.*--until-noise.*two-way-gp"):
        compare(NamedModel(tiny), ["random"], budget, SessionConfig(), tmp_path)


@pytest.mark.parametrize("place", range(4))
def test_a_model_of_a_collection_is_left_once_nothing_is_expected(place: int) -> None:
    table = synthetic.table()
    model = Replay(table).models[place]
    session = cast(Session, Collected(model))
    watch = Stop(table).watch(session, model.card.family, model.routes)
    built = []
    for route in model.routes:
        if watch.is_enough():
            break
        outcome = session.outcome(route)
        watch.tell(route, outcome)
        built.append(outcome)
    assert 0 < len(built) < len(model.routes)
    assert max(outcome.gain for outcome in built) > model.oracle - 0.1


def test_what_a_collection_expects_never_comes_from_its_own_family() -> None:
    table = synthetic.table(2)
    model = Replay(table).models[0]
    with pytest.raises(InputError, match="family0"):
        Stop(table).watch(cast(Session, Collected(model)), "family0", model.routes)


def test_a_collection_until_the_noise_still_times_the_controls(tiny: Model, tmp_path: Path) -> None:
    backend = load_backend("cpu", {})
    routes = plan_routes(backend.catalog(), 1)[:4]
    coarse = SessionConfig(plan=replace(TimingPlan(), precision=5.0))  # tells nothing apart
    collect(
        [CorpusModel(tiny, "toys", False)],
        tmp_path / "s.sqlite",
        coarse,
        routes,
        tmp_path / "work",
        repeats=Repeats(controls=1),
        until=Stop(load_table(find_table("cpu"))),
    )
    table = table_from_store(tmp_path / "s.sqlite", backend.target().key, [tiny.fingerprint], {})
    assert {str(r): len(o) for r, o in table.outcomes[tiny.fingerprint].items()} == {"": 2}


def test_training_settles_when_a_rise_drowns_in_the_scatter() -> None:
    assert not has_settled([0.1, 0.2, 0.3]), "too few to tell"
    assert not has_settled([0.0, 0.5, 0.4, 0.5, 0.6, 0.7]), "it still rises"
    assert has_settled([0.1, 0.7, 0.701, 0.7, 0.701])
    assert has_settled([0.7, 0.6, 0.5, 0.4]), "it falls"
    assert has_settled([0.7, 0.7, 0.7, 0.7])
    assert has_settled([0.7, 0.7, 0.7, 0.7 + 2e-16]), "equal but for the last bit"
    assert not has_settled([0.70, 0.70, 0.71, 0.71]), "slowly, and clearly"


def test_records_of_another_target_are_refused_by_name_and_allowed_by_name(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from routepilot.env.backends import cpu

    result = tune(tiny, out=tmp_path, agent="fast", max_builds=2)
    monkeypatch.setattr(cpu, "processor", lambda: "another processor")
    with pytest.raises(TableError) as caught:
        tune(tiny, out=tmp_path, agent="fast", max_builds=2)
    told = str(caught.value)
    assert "device is 'another processor' here" in told and "--allow device" in told
    with RecordStore(tmp_path / "records.sqlite") as store:
        assert len(store.targets()) == 1, "a refused target leaves no trace"
    config = SessionConfig(allow=("device",))
    again = tune(tiny, out=tmp_path, agent="fast", max_builds=2, config=config)
    assert again.manifest["fresh_builds"] == 0
    assert again.manifest["allowed"] == ["device"]
    assert [o.route for o in again.search.outcomes] == [o.route for o in result.search.outcomes]


def test_what_is_allowed_is_exactly_what_is_overlooked(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from routepilot.env.backends import cpu

    tune(tiny, out=tmp_path, agent="default", max_builds=0)
    monkeypatch.setattr(cpu, "processor", lambda: "another processor")
    config = SessionConfig(options={"threads": "1"}, allow=("versions.onnx",))
    with RecordStore(tmp_path / "records.sqlite") as store:
        with pytest.raises(TableError, match="device"):
            Session(tiny, config, store, tmp_path / "work")


@pytest.mark.parametrize("name", ["nonsense", "version.onnx", "versions.", "versions", "settings"])
def test_what_no_target_has_cannot_be_allowed(name: str) -> None:
    with pytest.raises(InputError, match=f"--allow '{name}' is nothing.*versions.NAME"):
        SessionConfig(allow=("device", name))


def test_a_manifest_tells_of_clocks_and_of_who_else_uses_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"  # a fake: it answers as the tool does
    tool.write_text(
        "#!/bin/sh\ncase $1 in\n"
        "--query-gpu*) echo 'Fake GPU, 600.1, 1410, 1593, 1980, 41, 75.1, Enabled, Default';;\n"
        "*) echo \"$PPID, /usr/bin/python\"; echo '1, /usr/bin/somebody';;\nesac\n"
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "scaling_governor").write_text("powersave\n")
    monkeypatch.setattr(machine, "CPU_CLOCK", tmp_path)
    found = manifest(seed=3)
    clocks = found["clocks"]
    assert isinstance(clocks, dict)
    assert clocks["cpu"] == {"scaling_governor": "powersave"}
    assert clocks["gpus"][0]["clocks.sm"] == "1410"
    assert clocks["gpu_processes"] == ["somebody"]
    json.dumps(found)


def test_a_guest_without_frequency_files_tells_the_mean_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "CPU_CLOCK", tmp_path / "nowhere")
    monkeypatch.setattr(psutil, "cpu_freq", lambda: SimpleNamespace(current=2445.4))
    assert machine.clocks() == {"cpu": {"mhz": "2445"}}


def test_a_tool_that_fails_is_nothing_to_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "CPU_CLOCK", tmp_path / "nowhere")
    monkeypatch.setattr(psutil, "cpu_freq", lambda: None)
    assert machine.clocks() == {}


def test_a_collection_out_of_time_says_so(tiny_file: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    given = ["collect", "-o", str(tmp_path / "t.parquet"), "--models", str(tiny_file), "-q"]
    few = ["--routes", "30", "--controls", "0", "--recheck", "0"]
    found = run(cli_corpus.app, [*given, *few, "--max-seconds", "2"])
    assert found.exit_code == 0, found.output
    assert "(1 model; the time is up, the same command goes on)" in found.output


@pytest.mark.parametrize(
    ("ended_by", "told"),
    [
        ("builds", "the budget of 1 build is spent"),
        ("seconds", "the budget of 1.5 s is spent"),
        ("noise", "expects less of the next build than timing can tell"),
        ("agent", "the agent fast asks for no more builds"),
    ],
)
def test_what_ended_a_search_is_told(ended_by: str, told: str) -> None:
    assert told in Search("fast", (), 0.0, ended_by).ending(Budget(1, 1.5))


def test_tune_says_last_what_ended_it_and_the_seconds_as_given(
    tiny_file: Path, tmp_path: Path
) -> None:
    words = [*("tune", str(tiny_file), "-o", str(tmp_path / "out"), "--agent", "random")]
    words += ["--max-builds", "100000", "--max-seconds", "1.5", "--quiet"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    *_, ended, _ = done.output.strip().splitlines()
    assert ended == "the search ended: the budget of 1.5 s is spent"
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["ended_by"] == "seconds"
    spent = [t["build_seconds"] + t["measure_seconds"] for t in result["trials"]]
    assert sum(spent) - spent[-1] < 1.5, "the last build began within the budget"


def test_tune_says_that_it_probes_before_it_does_and_only_then(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder, folder, ignore=shutil.ignore_patterns("run", probes.FILE))
    model = Model(tiny.name, tiny.fingerprint, folder, tiny.inputs, tiny.outputs)
    heard: list[str] = []
    made = probes._made_in_child

    def making(*asked: Any) -> dict[str, float]:
        assert any(line.startswith("probing tiny") for line in heard), "said before it begins"
        heard.append("made")
        return made(*asked)

    monkeypatch.setattr(probes, "_made_in_child", making)
    tune(model, out=tmp_path / "out", agent="fast", max_builds=1, say=heard.append)
    said = [line for line in heard if line.startswith("probing")]
    assert len(said) == 1 and "120 s at most" in said[0] and heard.count("made") == 1
    heard.clear()
    tune(model, out=tmp_path / "out", agent="fast", max_builds=1, say=heard.append)
    assert not any("probing" in line for line in heard)
