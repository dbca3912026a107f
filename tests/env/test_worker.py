import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import hostile_backend
import psutil
import pytest

from routepilot.env import child
from routepilot.env import worker as worker_module
from routepilot.env.accuracy import Gate
from routepilot.env.child import one_line
from routepilot.env.errors import InputError, MachineError, ModelError
from routepilot.env.measure import TimingPlan
from routepilot.env.models import Model, prepare
from routepilot.env.outcomes import Measurement, Outcome, Status
from routepilot.env.routes import DEFAULT_ROUTE, Route
from routepilot.env.worker import Worker
from routepilot.env.worker_child import pack_outcome, unpack_outcome

BACKEND = "hostile_backend:make"
PLAN = TimingPlan(warmup_seconds=0.0, block_seconds=0.01)
MIB = 1 << 20


def route(text):
    return hostile_backend.CATALOG.parse(text)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    file = hostile_backend.hostile_model(folder / "hostile.onnx")
    return prepare(file, cache=folder / "cache")


@pytest.fixture
def make(model, tmp_path, monkeypatch):
    """A maker of workers that are closed, with a check that no child is left."""
    folder = str(Path(hostile_backend.__file__).parent)
    monkeypatch.setenv("PYTHONPATH", folder, prepend=os.pathsep)
    made = []

    def maker(options=None, **settings):
        settings = {"gate": Gate(), "plan": PLAN, "deadline_seconds": 30.0, **settings}
        made.append(Worker(BACKEND, options or {}, model, tmp_path / "work", **settings))
        return made[-1]

    yield maker
    for worker in made:
        worker.close()
    assert not [p for p in psutil.Process().children() if "worker_child" in " ".join(p.cmdline())]


def pids(worker_or_path):
    """Process ids of the children that built something, in order, each once."""
    lines = (worker_or_path / "work" / "builds.jsonl").read_text().splitlines()
    return list(dict.fromkeys(json.loads(line)[0] for line in lines))


def gone(pid, seconds=5.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_default_outcome_and_a_measured_route(make):
    with make() as worker:
        default = worker.default_outcome()
        assert default.is_feasible and default.route.is_default
        assert default.log_speedup == 0.0
        assert default.measurement.latency_ms == pytest.approx(5, rel=0.05)
        assert set(default.losses) == {"l0", "l1", "l2", "lInf", "cos", "rel_l2"}
        assert default.losses["lInf"] == 0.0
        assert default.build_seconds > 0 and default.measure_seconds > 0
        fast = worker.trial(route("-speed=2"))
        assert fast.is_feasible and fast.reason == ""
        assert fast.measurement.low < math.log(2) < fast.measurement.high
        assert fast.engine_hash and fast.engine_hash != default.engine_hash
        slow = worker.trial(route("-speed=0.1"))
        assert slow.is_feasible and slow.measurement.rounds == 2
        assert slow.log_speedup == pytest.approx(-math.log(10), abs=0.05)


def test_every_misdeed_is_an_outcome_and_the_next_trial_works(make, tmp_path, monkeypatch):
    expected = {
        "segv": (Status.CRASHED, "SIGSEGV.*assertion failed in fusion.cpp.*while building"),
        "abort": (Status.CRASHED, "SIGABRT"),
        "sigkill": (Status.KILLED, "killed by SIGKILL, and not by the kernel.*while building"),
        "exit": (Status.CRASHED, "code 3.*last words: licence not found"),
        "raise": (Status.BUILD_FAILED, "KeyError.*tactic.*building"),
        "nomem": (Status.OUT_OF_MEMORY, "out of memory while building"),
        "fail": (Status.BUILD_FAILED, "^no tactic for node 7$"),
        "refuse": (Status.REFUSED, "^unknown option$"),
        "run_segv": (Status.CRASHED, "SIGSEGV.*while running"),
        "run_raise": (Status.CRASHED, "ValueError: no kernel for this node.*running"),
        "time_raise": (Status.CRASHED, "the clock stopped.*timing"),
        "nan": (Status.INVALID_OUTPUT, "'y'.*NaN"),
        "inf": (Status.INVALID_OUTPUT, "'y'.*Inf"),
        "shape": (Status.INVALID_OUTPUT, "'y'.*shape"),
        "dtype": (Status.INVALID_OUTPUT, "'y'.*float16"),
        "missing": (Status.INVALID_OUTPUT, "'y'.*missing"),
        "inaccurate": (Status.ACCURACY_FAILED, "rel_l2.*0.05.*0.01"),
    }

    monkeypatch.setattr(child, "memory_kills", lambda: 3)
    worker = make()
    reference = worker.trial(route("-speed=2"))
    for deed, (status, words) in expected.items():
        outcome = worker.trial(route(f"-do={deed}"))
        assert outcome.status is status, (deed, outcome)
        assert re.search(words, outcome.reason), (deed, outcome.reason)
        assert "\n" not in outcome.reason
        assert outcome.measurement is None and not outcome.is_feasible
        assert outcome.route == route(f"-do={deed}")
        assert bool(outcome.engine_hash) == ("while building" not in outcome.reason) or (
            deed in ("fail", "refuse")
        )
    again = worker.trial(route("-speed=2"))
    assert again.is_feasible and again.losses == reference.losses
    # Clean refusals and wrong outputs cost no new child; the endings do, a SIGKILL two: once more.
    assert len(pids(tmp_path)) == 1 + 10


def test_garbage_on_stdout_harms_nothing(make, tmp_path):
    worker = make()
    outcome = worker.trial(route("-do=garbage"))
    assert outcome.is_feasible and outcome.reason == ""
    assert (tmp_path / "work" / "worker.log").stat().st_size > MIB
    assert worker.trial(route("-speed=2")).is_feasible and len(pids(tmp_path)) == 1


def test_a_close_that_raises_spoils_the_child_but_not_the_outcome(make, tmp_path):
    worker = make()
    assert worker.trial(route("-do=close_raise")).is_feasible
    assert worker.trial(route("-speed=2")).is_feasible
    assert len(pids(tmp_path)) == 2


def test_a_child_whose_default_engine_changed_is_replaced(make, tmp_path):
    worker = make()
    assert worker.trial(route("-do=poison")).status is Status.BUILD_FAILED
    assert worker.trial(route("-speed=2")).is_feasible  # poisoned, its outputs would be off by one
    assert len(pids(tmp_path)) == 2


@pytest.mark.parametrize("deed", ["run_hang", "silence", "helpers"])
def test_hangs_end_at_the_deadline(make, tmp_path, deed):
    worker = make(deadline_seconds=3.0)
    worker.default_outcome()
    start = time.monotonic()
    outcome = worker.trial(route(f"-do={deed}"))
    assert time.monotonic() - start < 6
    if deed == "silence":  # it closed the pipes instead
        assert outcome.status is Status.CRASHED
        return
    assert outcome.status is Status.TIMED_OUT
    assert "3 s" in outcome.reason
    assert outcome.build_seconds + outcome.measure_seconds == pytest.approx(3, abs=1)
    assert ("running" in outcome.reason) == (deed == "run_hang")
    assert (outcome.build_seconds < 1) == (deed == "run_hang")
    if deed == "helpers":  # those of the compiler die with it, whatever their group
        helpers = json.loads((tmp_path / "work" / "helpers.json").read_text())
        assert len(helpers) == 2 and all(gone(pid) for pid in helpers)


def test_a_child_that_died_idle_is_not_the_next_route_s_fault(make, tmp_path):
    worker = make()
    worker.default_outcome()
    os.kill(pids(tmp_path)[-1], signal.SIGKILL)
    assert gone(pids(tmp_path)[-1])
    assert worker.trial(route("-speed=2")).is_feasible


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        (itertools.count(3), "killed by the system, out of memory (while building)"),
        (itertools.repeat(None), "killed by the system, probably out of memory (while building)"),
    ],
)
def test_want_of_memory_is_told_by_the_kernel_s_count(make, monkeypatch, counts, reason):
    monkeypatch.setattr(child, "memory_kills", lambda: next(counts))
    outcome = make().trial(route("-do=sigkill"))
    assert (outcome.status, outcome.reason) == (Status.OUT_OF_MEMORY, reason)


def test_the_kernel_itself_kills_for_want_of_memory(in_small_group, make, monkeypatch, tmp_path):
    """No count is made up here: the kernel kills a child at the limit of its control group."""
    monkeypatch.setattr(worker_module, "Child", in_small_group(512 * MIB))
    worker = make()
    assert worker.default_outcome().is_feasible
    before = child.memory_kills()
    outcome = worker.trial(route("-do=eat"))
    reason = "killed by the system, out of memory (while building)"
    assert (outcome.status, outcome.reason) == (Status.OUT_OF_MEMORY, reason)
    assert child.memory_kills() >= before + 2  # it was tried once more
    assert len(pids(tmp_path)) == 2
    assert worker.trial(route("-speed=2")).is_feasible


def test_the_memory_of_every_control_group_above_counts(monkeypatch, tmp_path):
    listed = "4:memory:/a/b\n3:cpu,cpuacct:/a/c\n0::/../d\n"
    top = Path("/sys/fs/cgroup")
    groups = child.memory_groups(listed)
    assert groups == [top / "memory/a/b", top / "memory/a", top / "memory", top / "d", top]
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "memory.max").write_text(str(100 * MIB))
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(child, "memory_groups", lambda: [tmp_path / "job", tmp_path])
    assert child.machine_memory_bytes() == 100 * MIB
    (tmp_path / "memory.limit_in_bytes").write_text(str(50 * MIB))
    assert child.machine_memory_bytes() == 50 * MIB


def test_the_kernel_s_count_is_read():
    counted = child.memory_kills()
    told = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.M)
    assert counted == (int(told[1]) if told else None)


def test_a_default_killed_by_somebody_is_no_fault_of_the_model(make, monkeypatch):
    monkeypatch.setattr(child, "memory_kills", lambda: 3)
    with pytest.raises(MachineError, match="default route.*was not built.*what kills processes"):
        make({"default": "sigkill"}).default_outcome()


def test_memory_is_limited(make):
    worker = make(memory_limit_bytes=500 * MIB)
    outcome = worker.trial(route("-do=eat"))
    assert outcome.status is Status.OUT_OF_MEMORY
    assert "limit is 500 MiB" in outcome.reason
    assert worker.trial(route("-speed=2")).is_feasible


def test_the_same_engine_is_not_measured_twice(make):
    worker = make()
    twin = worker.trial(route("-twin=b"))
    assert twin.is_feasible and twin.reason == "same engine as the default route"
    measured = twin.measurement
    assert (measured.log_speedup, measured.low, measured.high, measured.rounds) == (0, 0, 0, 0)
    assert twin.losses == worker.default_outcome().losses
    fast = worker.trial(route("-speed=2"))
    known = {fast.engine_hash: fast}
    again = worker.trial(route("-speed=2 -twin=b"), known=known)
    assert again == replace(
        fast,
        route=route("-speed=2 -twin=b"),
        reason="same engine as -speed=2",
        build_seconds=again.build_seconds,
        measure_seconds=again.measure_seconds,
    )
    assert again.measure_seconds < fast.measure_seconds
    wrong = worker.trial(route("-do=inaccurate"))
    twin = worker.trial(route("-do=inaccurate -twin=b"), known={wrong.engine_hash: wrong})
    assert twin.status is Status.ACCURACY_FAILED and wrong.reason in twin.reason
    # What is not final is measured: a crash, or an outcome that was never timed.
    for useless in (replace(fast, status=Status.CRASHED), replace(fast, measurement=None)):
        fresh = worker.trial(route("-speed=2 -twin=b"), known={fast.engine_hash: useless})
        assert fresh.is_feasible and fresh.measurement.rounds >= 6


def test_the_incumbent_reaches_the_timing(make):
    worker = make()
    assert worker.trial(route("-speed=1.02")).measurement.rounds >= 6
    assert worker.trial(route("-speed=1.02"), incumbent_log_speedup=1.0).measurement.rounds == 2


def test_a_permissive_gate_times_inaccurate_routes(make):
    outcome = make(gate=Gate(limit=0.5)).trial(route("-do=inaccurate"))
    assert outcome.is_feasible and outcome.losses["rel_l2"] == pytest.approx(0.05, rel=1e-3)


def test_a_reused_child_gives_the_results_of_a_fresh_one(make, tmp_path):
    texts = ["-speed=2", "-do=inaccurate -speed=0.5", "-do=nan", "-speed=0.98"]

    def facts(outcome):
        if outcome.measurement:
            speed = float(outcome.route.values["-speed"])
            assert outcome.log_speedup == pytest.approx(math.log(speed), abs=0.02)
        return outcome.status, outcome.reason, dict(outcome.losses), outcome.engine_hash

    gate = Gate(limit=0.2)
    reused = make(gate=gate)
    from_reused = [facts(reused.trial(route(text))) for text in texts]
    assert len(pids(tmp_path)) == 1
    from_fresh = []
    for text in texts:
        with make(gate=gate) as fresh:
            from_fresh.append(facts(fresh.trial(route(text))))
    assert len(pids(tmp_path)) == 1 + len(texts)
    assert from_reused == from_fresh


def test_confirm_is_fresh_judges_other_inputs_and_saves_winners_only(make, tmp_path):
    worker = make()
    worker.trial(route("-speed=2"))
    won = worker.confirm(route("-speed=2"), tmp_path / "win" / "engine")
    assert won.is_feasible and won.measurement.rounds == PLAN.quadruples
    assert won.measurement.low > 0.6
    saved = tmp_path / "win" / "engine"
    assert [p.name for p in saved.iterdir()] == ["engine.txt"]
    assert len(pids(tmp_path)) == 2
    lost = worker.confirm(route("-speed=0.98"), tmp_path / "lost")
    assert lost.is_feasible and lost.measurement.high < 0.02 and not (tmp_path / "lost").exists()
    same = worker.confirm(DEFAULT_ROUTE, saved)
    assert same.measurement.low == 0.0 and same.is_feasible
    assert saved.joinpath("engine.txt").read_text() == worker.default_outcome().engine_hash
    assert worker.confirm(route("-do=inaccurate")).status is Status.ACCURACY_FAILED
    assert worker.confirm(route("-do=segv")).status is Status.CRASHED
    assert worker.trial(route("-speed=2")).is_feasible


def test_noise_floor_is_small_and_above_the_margin(make):
    assert PLAN.margin <= make().noise_floor() < 0.05


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("segv", "crashed.*SIGSEGV"),
        ("fail", "build_failed.*no tactic"),
        ("inaccurate", "accuracy_failed.*0.05.*tolerance"),
        ("nan", "invalid_output.*NaN"),
        ("raise", "KeyError"),
    ],
)
def test_a_default_route_that_fails_is_an_error_with_its_reason(make, deed, words):
    with pytest.raises(ModelError, match=words) as failure:
        make({"default": deed}).default_outcome()
    assert "\n" not in str(failure.value)


def test_faults_of_the_machine_are_errors(make):
    worker = make()
    with pytest.raises(MachineError, match="fell off the bus"):
        worker.trial(route("-do=machine"))
    with pytest.raises(MachineError, match="disk is full"):
        worker.trial(route("-do=full"))
    assert worker.trial(route("-speed=2")).is_feasible
    with pytest.raises(MachineError, match="no such device"):
        make({"broken": "1"}).default_outcome()
    with pytest.raises(MachineError, match="cannot start.*shared object"):
        make({"dies": "1"}).default_outcome()


def test_settings_that_mean_nothing_are_refused(make, model, tmp_path):
    for settings, words in (
        ({"deadline_seconds": 0.0}, "deadline"),
        ({"memory_limit_bytes": 0}, "memory"),
        ({"cpu": 4096}, "core 4096"),
    ):
        with pytest.raises(InputError, match=words):
            make(**settings)
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="work folder"):
        Worker(BACKEND, {}, model, tmp_path / "file" / "x", gate=Gate(), plan=PLAN)


def test_an_unknown_backend_is_an_input_error(model, tmp_path):
    with Worker("tvn", {}, model, tmp_path, gate=Gate(), plan=PLAN) as worker:
        with pytest.raises(InputError, match="tvn"):
            worker.default_outcome()


def test_the_child_is_pinned_and_its_environment_clean(make, tmp_path, monkeypatch):
    monkeypatch.setenv("__LUNOWUD", "-kgen:tiling=0")
    core = min(os.sched_getaffinity(0))
    worker = make({"threads": "1"}, cpu=core)
    worker.default_outcome()
    child = psutil.Process(pids(tmp_path)[-1])
    assert child.cpu_affinity() == [core]
    environment = child.environ()
    assert "__LUNOWUD" not in environment and worker.stray_flags == "-kgen:tiling=0"
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "1"
    assert os.getsid(child.pid) == os.getpgid(child.pid) == child.pid != os.getsid(0)


PARENT = """
    import os, signal, sys, threading, time
    from pathlib import Path
    import hostile_backend
    from routepilot.env.accuracy import Gate
    from routepilot.env.measure import TimingPlan
    from routepilot.env.models import Model
    from routepilot.env.worker import Worker
    model, workdir, deed = sys.argv[1:]
    worker = Worker("hostile_backend:make", {}, Model.load(Path(model)), Path(workdir),
                    gate=Gate(), plan=TimingPlan())
    worker.default_outcome()
    if deed:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        worker.trial(hostile_backend.CATALOG.parse(deed))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("deed", ["", "-do=hang"], ids=["idle", "busy"])
def test_a_child_dies_with_its_parent(model, make, tmp_path, deed):
    code = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PARENT)]
        + [str(model.folder), str(tmp_path / "work"), deed],
        timeout=60,
    ).returncode
    assert code == -signal.SIGKILL
    assert gone(pids(tmp_path)[-1])


def test_an_interrupt_kills_the_child_and_is_passed_on(make, tmp_path, request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    worker = make()
    worker.default_outcome()
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        worker.trial(route("-do=hang"))
    assert gone(pids(tmp_path)[-1])
    assert worker.trial(route("-speed=2")).is_feasible


def test_outcomes_survive_the_pipe():
    measured = Measurement(0.1, 0.05, 0.2, 1.5, 1.7, 7, 0.01)
    for outcome in (
        Outcome(DEFAULT_ROUTE, Status.OK, "", measured, {"l0": math.inf}, 1.0, 2.0, "h"),
        Outcome(Route((("-a", "1"), ("-b", "c"))), Status.CRASHED, "é"),
    ):
        assert unpack_outcome(json.loads(json.dumps(pack_outcome(outcome)))) == outcome


def test_quotes_stay_on_one_line_and_short():
    assert one_line("a\n\tb\x1b[31m\x00c") == "a b[31mc"
    assert len(one_line("x" * 10_000)) == 300


def test_models_are_real(model):
    assert isinstance(model, Model) and len(model.selection()) >= 1


def test_a_woken_child_is_starting_until_it_is_up(make):
    worker = make()
    assert not worker.is_starting  # nobody was woken
    worker.wake()
    assert worker.is_starting
    deadline = time.monotonic() + 30
    while worker.is_starting and time.monotonic() < deadline:
        time.sleep(0.02)
    assert time.monotonic() < deadline
    assert worker.default_outcome().is_feasible and not worker.is_starting


def test_nobody_waits_for_a_child_past_its_deadline(make):
    worker = make(deadline_seconds=0.001)
    worker.wake()
    time.sleep(0.01)
    assert not worker.is_starting
