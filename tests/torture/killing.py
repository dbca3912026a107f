"""kill -9 at random moments, again and again: one loop for every verb, backend and victim.

Owns when and whom it strikes, and what every killed run must keep: its records, a sound store, no
process left. What else must hold is the `Course`'s to say.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import warm as warm_parent

from routepilot.env.child import MARK_VARIABLE

#: Most strikes at one output: after them it is let finish.
STRIKES = 6

#: Seconds between two looks at a run; a look opens its store.
POLL = 0.01

#: Seconds that a run may take on a busy machine.
PATIENCE = 240.0


def routepilot(*words: object) -> list[str]:
    return [sys.executable, "-m", "routepilot", *map(str, words)]


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


class Run:
    """One command line, forked by a warm parent, which lets only one run at a time."""

    def __init__(self, parent: subprocess.Popen[str], words: list[str], place: Path) -> None:
        self._parent, self._code = parent, None
        self._output, self._errors = place / "warm-output", place / "warm-errors"
        request = {"words": words, "output": str(self._output), "errors": str(self._errors)}
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdin.write(json.dumps(request) + "\n")
        parent.stdin.flush()
        self.pid = int(parent.stdout.readline())

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self._code is None and select.select([self._parent.stdout], [], [], 0)[0]:
            assert self._parent.stdout is not None
            self._code = int(self._parent.stdout.readline())
        return self._code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, seconds: float = PATIENCE) -> int:
        end = time.monotonic() + seconds
        while (code := self.poll()) is None:
            assert time.monotonic() < end, f"not back after {seconds:g} s"
            time.sleep(POLL)
        return code

    def communicate(self) -> tuple[str, str]:
        """Wait for its end; what it said."""
        self.wait()
        return self._output.read_text(), self._errors.read_text()


@contextmanager
def warm(place: Path, *modules: str) -> Iterator[Callable[[list[object]], Run]]:
    """A warm parent, in which some modules are loaded already; yields what starts a run."""
    environment = {
        **os.environ, warm_parent.MISSING: str(place / "missing.json"), "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    parent = subprocess.Popen(
        [sys.executable, str(Path(warm_parent.__file__)), *modules], env=environment, cwd=place,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield lambda words: Run(parent, [str(word) for word in words], place)
    finally:
        parent.kill()
        parent.communicate()


def workers(pid: int) -> list[psutil.Process]:
    """The children of a run that are ours."""
    found = []
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    for child in children:
        try:
            if "routepilot.env" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue
    return found


def strike(run: Run, whom: str) -> bool:
    """Kill the run, or one of its children; returns whether somebody was there to be killed."""
    if run.poll() is not None:
        return False
    if whom == "parent":
        run.kill()
        return run.wait() == -signal.SIGKILL
    for child in workers(run.pid):
        try:
            child.send_signal(signal.SIGKILL)
            return True
        except psutil.Error:
            continue
    return False


def recorded(store: Path) -> int:
    """Records in the store."""
    if not store.exists():
        return 0
    with closing(sqlite3.connect(store)) as base, base:
        if not base.execute("SELECT 1 FROM sqlite_master WHERE name = 'records'").fetchone():
            return 0
        return int(base.execute("SELECT count(*) FROM records").fetchone()[0])


def is_sound(store: Path) -> None:
    if store.exists():
        with closing(sqlite3.connect(store)) as base, base:
            assert base.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def nothing_runs(parent: int, seconds: float = 10.0) -> None:
    """No child of a dead parent lives on."""
    end = time.monotonic() + seconds
    while True:
        left = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK_VARIABLE, "").startswith(f"{parent}-"):
                    left.append(process)
            except psutil.Error:
                continue
        if not left:
            return
        assert time.monotonic() < end, left
        time.sleep(0.02)


def drafts(*folders: Path) -> list[Path]:
    return [p for folder in folders for p in folder.rglob(".*") if p.name.startswith(".draft")]


@dataclass(frozen=True)
class Course:
    """A command, and what must hold of it however often it is killed.

    Attributes:
        name: For the report.
        words: Of the command line, from the output and the seed.
        out: Name of the output in the test's folder, from a number.
        store: The store of an output; None where the verb has none.
        facts: Of an output and what the command said: all that an uninterrupted run and a resumed
            one have in common.
        left: Called with an output at its end: nothing may be left behind.
        again: Builds of an output that a sound run would not have made, from it and the sound one;
            they may not be more than the kills. None where that is not counted.
        seeds: How many runs of different seed there are.
        builds: Records of a run, about.
        ending: Seconds in which what a dead parent left must end.
    """

    name: str
    words: Callable[[Path, int], list[object]]
    out: Callable[[str], str]
    facts: Callable[[Path, str], Any]
    left: Callable[[Path], None]
    store: Callable[[Path], Path] | None = None
    again: Callable[[Path, Path], int] | None = None
    seeds: int = 3
    builds: int = 10
    ending: float = 10.0

    def records(self, out: Path) -> int:
        return recorded(self.store(out)) if self.store else 0


class Killer:
    """Kills runs of a course until so many of each victim are dead.

    Args:
        course: What is run.
        place: Folder of the outputs.
        begin: Starts a run (`warm`).
        kills: How many of each victim, `parent` and `child`.
        rng: Chooses moments and victims.
    """

    def __init__(
        self,
        course: Course,
        place: Path,
        begin: Callable[[list[object]], Run],
        kills: dict[str, int],
        rng: random.Random,
    ) -> None:
        self._course, self._place, self._begin, self._rng = course, place, begin, rng
        self._open = Counter(kills)
        self._sound: dict[int, tuple[Any, Path, float]] = {}
        self.killed: Counter[str] = Counter()
        self.runs = self.again = 0

    def kill_all(self) -> None:
        """Until all kills are done; each output is finished and compared."""
        while +self._open:
            self._one(self.runs % self._course.seeds)
            self.runs += 1

    def sound(self, seed: int) -> tuple[Any, Path, float]:
        """What an uninterrupted run gives, its output, and the seconds that it takes.

        It is a process of its own, from its first import on; the runs that are killed are forks.
        """
        if seed not in self._sound:
            out = self._place / self._course.out(f"whole-{seed}")
            begun = time.monotonic()
            output = finish(routepilot(*self._course.words(out, seed)))
            seconds = time.monotonic() - begun
            wanted = self._course.facts(out, output)
            if not self._sound:  # the first fork says what the others need not import
                first = self._place / self._course.out("first")
                self._begin(self._course.words(first, seed)).communicate()
            self._sound[seed] = wanted, out, seconds
        return self._sound[seed]

    def _one(self, seed: int) -> None:
        course = self._course
        wanted, whole, seconds = self.sound(seed)
        out = self._place / course.out(f"out-{self.runs}")
        struck, kept, text = 0, 0, None
        while text is None:
            run, begun, is_dead = self._begin(course.words(out, seed)), time.monotonic(), False
            while struck < STRIKES and +self._open and not is_dead:
                whom = self._rng.choice(list((+self._open).elements()))
                self._await_a_moment(run, out, seconds, whom)
                before = course.records(out)
                if not strike(run, whom):
                    break
                struck += 1
                self._open[whom] -= 1
                self.killed[whom] += 1
                is_dead = whom == "parent"
                # The build in flight is made again; killed twice, it would count as greedy.
                while course.records(out) < before + 2 and run.poll() is None:
                    time.sleep(POLL)
            output, errors = run.communicate()
            assert "Traceback" not in errors, errors
            nothing_runs(run.pid, course.ending)
            if course.store:
                is_sound(course.store(out))
            now = course.records(out)
            assert now >= kept, "records were lost"
            kept = now
            if run.poll() == 0:
                text = output
                if not struck:  # a fork needs less time than the sound run, which had to import
                    seconds = min(seconds, time.monotonic() - begun)
                    self._sound[seed] = wanted, whole, seconds
            else:
                assert is_dead, f"a killed child ended the run: {errors}"
        assert course.facts(out, text) == wanted
        course.left(out)
        if course.again:
            again = course.again(out, whole)
            assert again <= struck, (again, struck)
            self.again += again

    def _await_a_moment(self, run: Run, out: Path, seconds: float, whom: str) -> None:
        """Let it go on for a while: by the clock, or by what is on record.

        The machine may be slower or faster than it was when the sound run was timed.
        """
        share = self._rng.uniform(0.0 if whom == "parent" else 0.1, 1.0)
        end = time.monotonic() + share * seconds
        enough = self._course.records(out) + self._rng.randrange(self._course.builds + 1)
        while time.monotonic() < end and run.poll() is None:
            if self._course.store and self._course.records(out) > enough:
                time.sleep(self._rng.uniform(0.0, 0.1))
                return
            time.sleep(POLL)

    def figures(self) -> dict[str, int]:
        """For the report."""
        counted = {"built_again": self.again} if self._course.again else {}
        return {**self.killed, "runs": self.runs, **counted}
