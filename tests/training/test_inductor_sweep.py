"""The Inductor sweep: its plan, its pauses, its bad inputs, and a fault in a build."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from routepilot.env.backends import inductor_catalog as knobs  # noqa: E402
from routepilot.env.backends.base import BuildFailure  # noqa: E402
from routepilot.env.backends.inductor_build import RESULT  # noqa: E402
from routepilot.env.backends.inductor_package import Build  # noqa: E402
from routepilot.env.errors import InputError  # noqa: E402
from routepilot.env.outcomes import Status  # noqa: E402
from routepilot.env.tables import load_table, merge_tables  # noqa: E402
from routepilot.training import inductor_builders, inductor_sweep  # noqa: E402
from routepilot.training.inductor_builders import Builders  # noqa: E402
from routepilot.training.inductor_plan import ROUTES, planned, read_plan  # noqa: E402


@pytest.mark.parametrize("device", knobs.DEVICES)
def test_the_plan_is_legal_and_full(device: str) -> None:
    import torch._inductor.config as config

    catalog = knobs.make_catalog(config, "2", device)
    routes = planned(catalog, 48)
    assert len(set(routes)) == 48 and all(catalog.is_legal(route) for route in routes)
    assert str(routes[0]) == ROUTES[0] and routes == planned(catalog, 48)
    assert planned(catalog, 2, texts=("-freezing=on", "-no=such"))[0].values == {"-freezing": "on"}


def test_every_route_of_the_plan_exists_somewhere() -> None:
    import torch._inductor.config as config

    catalogs = [knobs.make_catalog(config, "2", device) for device in knobs.DEVICES]
    for text in ROUTES:
        names = {token.partition("=")[0] for token in text.split()}
        assert any(names <= {k.name for k in catalog.knobs} for catalog in catalogs), text


def test_bad_plans_and_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_plan(tmp_path / "none.txt")
    (tmp_path / "plan.txt").write_text("# nothing\n")
    with pytest.raises(InputError, match="holds no route"):
        read_plan(tmp_path / "plan.txt")
    assert inductor_sweep.main(["tcn", "-o", str(tmp_path), "--seconds", "0"]) == 2
    assert inductor_sweep.main(["tcn", "-o", str(tmp_path), "--option", "cpu"]) == 2
    assert (
        inductor_sweep.main(["no-such-model", "-o", str(tmp_path), "--option", "device=cpu"]) == 2
    )


def _child(folder: Path, code: str) -> Build:
    folder.mkdir(parents=True)
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, cwd=folder)
    return Build(folder, process)


COUNTING = """
import time
for i in range(100000):
    open('count', 'w').write(str(i))
    time.sleep(0.01)
"""


@pytest.fixture
def builders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builders[str]:
    """Builders whose builds are fakes: small programs in the place of the compiler."""

    def start(code: Any, place: Path, *, own_group: bool) -> Build:
        assert own_group
        return _child(place / f"build{len(list(place.iterdir()))}", code)

    (tmp_path / "builds").mkdir()
    monkeypatch.setattr(inductor_builders, "start_build", start)
    return Builders(tmp_path / "builds", tmp_path / "lock", 2, 1.0)


def test_nothing_runs_while_something_is_timed(builders: Builders[str], tmp_path: Path) -> None:
    builders.start("a", COUNTING)  # type: ignore[arg-type]
    count = tmp_path / "builds" / "build0" / "count"
    while not count.exists():
        time.sleep(0.02)
    with builders.paused():
        before = count.read_text()
        time.sleep(0.3)
        assert count.read_text() == before
    time.sleep(0.3)
    assert count.read_text() != before
    builders.close()


def test_a_build_in_the_middle_of_timing_a_kernel_finishes_it_first(
    builders: Builders[str], tmp_path: Path
) -> None:
    holding = f"""
import fcntl, time
with open({str(tmp_path / "lock")!r}, 'a') as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    open('holds', 'w').close()
    time.sleep(0.5)
    open('done', 'w').close()
time.sleep(60)
"""
    builders.start("a", holding)  # type: ignore[arg-type]
    place = tmp_path / "builds" / "build0"
    while not (place / "holds").exists():
        time.sleep(0.02)
    with builders.paused():
        assert (place / "done").exists()
    builders.close()


def test_late_and_dead_builds_are_outcomes(builders: Builders[str]) -> None:
    builders.start("slow", "import time; time.sleep(60)")  # type: ignore[arg-type]
    builders.start("dead", "import os; os.abort()")  # type: ignore[arg-type]
    assert not builders.has_room
    found = {}
    end = time.monotonic() + 20
    while len(found) < 2 and time.monotonic() < end:
        found.update({built.job: built.result for built in builders.finished()})
        time.sleep(0.05)
    slow, dead = found["slow"], found["dead"]
    assert isinstance(slow, BuildFailure) and slow.status is Status.TIMED_OUT
    assert isinstance(dead, BuildFailure) and "signal 6" in dead.reason
    assert builders.running == 0


def test_a_result_is_taken_up(builders: Builders[str]) -> None:
    text = json.dumps({"status": "ok", "hash": "h", "reason": "", "seconds": 1.0})
    builders.start("good", f"open({RESULT!r}, 'w').write({text!r})")  # type: ignore[arg-type]
    found: list[Any] = []
    while not found:
        found = list(builders.finished())
        time.sleep(0.05)
    assert found[0].result.hash == "h" and 0 < found[0].result.seconds < 20


def test_a_default_that_fails_gives_the_model_up() -> None:
    work: Any = SimpleNamespace(
        model=SimpleNamespace(name="m"), failures=0, error="", default=None, steps=[1, 2]
    )
    inductor_sweep.Sweep._fail(SimpleNamespace(), work, "broken")  # type: ignore[arg-type]
    assert work.steps == [] and work.error == "broken"


@pytest.mark.compiler
def test_a_sweep_resumes_and_its_tables_merge(tmp_path: Path) -> None:
    (tmp_path / "plan.txt").write_text("-freezing=on\n-precision=bf16\n")
    common = ["tcn", "--option", "device=cpu", "--option", "wrapper=O0", "--controls", "1"]
    common += ["--plan", str(tmp_path / "plan.txt"), "--seconds", "900"]
    assert inductor_sweep.main([*common, "-o", str(tmp_path / "a"), "--routes", "1"]) == 0
    first = load_table(tmp_path / "a" / "table.parquet")
    (routes,) = first.outcomes.values()
    assert {str(route): len(found) for route, found in routes.items()} == {"": 2, "-freezing=on": 1}
    again = [*common, "-o", str(tmp_path / "b"), "--routes", "2", "--resume"]
    assert inductor_sweep.main([*again, str(tmp_path / "a" / "table.parquet")]) == 0
    summary = json.loads((tmp_path / "b" / "summary.json").read_text())
    assert summary["builds"] == 2, "the default's package and the new route, nothing else"
    merged = merge_tables([first, load_table(tmp_path / "b" / "table.parquet")])
    (routes,) = merged.outcomes.values()
    assert {str(route): len(found) for route, found in routes.items()} == {
        "": 2, "-freezing=on": 1, "-precision=bf16": 1,
    }  # fmt: skip
    assert not list((tmp_path / "b" / "builds").glob(".draft-*/cache"))
    assert os.path.getsize(tmp_path / "b" / "table.parquet") > 0
