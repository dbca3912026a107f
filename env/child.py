"""A child process that answers JSON lines, and dies when it should.

Owns isolation: own process group, deadline, memory limit, log file, and the words for how a child
ended. Knows no route, model or backend; `worker.py` gives these a meaning.

Requests and answers travel over two pipes of their own as one JSON object a line, never as
pickles. The child's stdout and stderr go to a log file, so whatever a compiler prints is harmless.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from routepilot.env.errors import MachineError
from routepilot.env.interpreter import module_command
from routepilot.env.outcomes import Status

#: How often a busy child's memory, life and log are looked at.
POLL_SECONDS = 0.2

#: Share of a core that looking for descendants may take: it reads every process of the machine,
#: about 20 microseconds each.
SCAN_SHARE = 0.01

#: A log beyond this is emptied: a child that prints without end must not fill the disk.
LOG_BYTES = 64 << 20

#: Longest quotation of a log or an error message, characters.
QUOTE_LENGTH = 300

#: Longest answer, and most events before one: a child that writes without end is cut off.
ANSWER_BYTES, EVENTS = 64 << 20, 10_000

#: Environment variable that marks a child and all it starts, as `PARENT_PID-TOKEN`. A helper that
#: made itself a daemon is nobody's descendant any more, but it carries the mark.
MARK_VARIABLE = "ROUTEPILOT_CHILD"

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Ended:
    """The child is gone and did not answer.

    Attributes:
        status: `CRASHED`, `TIMED_OUT`, `OUT_OF_MEMORY` or `KILLED`.
        reason: How it ended, one line.
        by_sigkill: Somebody else sent SIGKILL: the kernel for want of memory, or a person.
    """

    status: Status
    reason: str
    by_sigkill: bool = False


def one_line(text: str) -> str:
    """Text on one line, without control characters, of bounded length."""
    line = " ".join(text.split())
    line = "".join(c for c in line if c.isprintable())
    return line if len(line) <= QUOTE_LENGTH else line[: QUOTE_LENGTH - 3] + "..."


def memory_groups(listed: str | None = None) -> list[Path]:
    """Folders of the control groups that may limit this process's memory, its own first.

    Args:
        listed: Text of `/proc/self/cgroup`; read from there when None. In a container it may name
            the host's folders, which are not there: the topmost is the container's then.
    """
    if listed is None:
        try:
            listed = Path("/proc/self/cgroup").read_text()
        except OSError:
            return []
    found = []
    for line in listed.splitlines():
        _, controllers, path = line.split(":", 2)
        top = Path("/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup")
        if "memory" in controllers.split(",") or not controllers:
            parts = [part for part in path.split("/") if part not in ("", "..")]
            found += [top.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]
    return found


def machine_memory_bytes() -> int:
    """Memory this process may hope for: the machine's, or a control group's if that is less."""
    total = int(psutil.virtual_memory().total)
    for group in memory_groups():
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                total = min(total, int((group / name).read_text()))
            except (OSError, ValueError):  # no such control group, or "max"
                continue
    return total


def memory_kills() -> int | None:
    """How many processes the kernel has killed for want of memory; None where it does not say.

    The machine's own want and a control group's both count (Linux 4.13 and later).
    """
    try:
        words = Path("/proc/vmstat").read_text().split()
        return int(words[words.index("oom_kill") + 1])
    except (OSError, ValueError):
        return None


def sigkilled(before: int | None) -> Ended:
    """How a process ended that SIGKILL ended.

    Who sent it is not told, but the kernel counts whom it kills for want of memory.

    Args:
        before: `memory_kills` while the process was still well.
    """
    now = memory_kills()
    if before is not None and before == now:
        reason = (
            "killed by SIGKILL, and not by the kernel for want of memory: by a person, a batch"
            " system or a memory daemon"
        )
        return Ended(Status.KILLED, reason, by_sigkill=True)
    sure = before is not None and now is not None
    reason = f"killed by the system, {'' if sure else 'probably '}out of memory"
    return Ended(Status.OUT_OF_MEMORY, reason, by_sigkill=True)


class Child:
    """One running child: Python on MODULE with `READ_FD WRITE_FD PARENT_PID`.

    The kernel kills the child when the *thread* that made it ends (PR_SET_PDEATHSIG), so that
    thread must outlive it.

    Args:
        module: Module to run; its `main` ends in `serve`.
        log: File its stdout and stderr are appended to.
        environment: Its environment variables.
        memory_limit_bytes: Limit on the resident memory of it and its descendants together.

    Raises:
        MachineError: The log cannot be written or the process cannot be started.
    """

    def __init__(
        self, module: str, log: Path, environment: Mapping[str, str], memory_limit_bytes: int
    ) -> None:
        self._log = log
        self._memory_limit = memory_limit_bytes
        self._buffer = bytearray()
        self._killed = False
        self._memory_kills = memory_kills()
        self._watched: list[psutil.Process] = []
        self._next_scan = 0.0
        self.events: list[dict[str, Any]] = []
        self._mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        end_orphans()
        request_read, self._request = os.pipe()
        self._reply, reply_write = os.pipe()
        try:
            with log.open("ab") as sink:
                self._log_start = sink.tell()
                self.process = subprocess.Popen(
                    [*module_command(module), str(request_read), str(reply_write)]
                    + [str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    env={**environment, MARK_VARIABLE: self._mark},
                    pass_fds=(request_read, reply_write),
                    start_new_session=True,
                )
        except OSError as error:
            self._close_pipes()
            raise MachineError(
                f"a worker child cannot be started with its log at {log}: {error}; check the disk"
                " and the process limit"
            ) from None
        finally:
            os.close(request_read)
            os.close(reply_write)

    @property
    def alive(self) -> bool:
        """True while the child runs and was not killed."""
        return self._request >= 0 and self.process.poll() is None

    @property
    def has_words(self) -> bool:
        """True when something waits to be read from it, or it will say no more."""
        if self._reply < 0 or self.process.poll() is not None:
            return True
        poll = select.poll()
        poll.register(self._reply, select.POLLIN)
        return bool(poll.poll(0))

    def ask(self, request: Mapping[str, Any], deadline_seconds: float) -> dict[str, Any] | Ended:
        """Send a request and wait for its answer; see `post` and `answer`."""
        self.post(request)
        return self.answer(deadline_seconds)

    def post(self, request: Mapping[str, Any]) -> None:
        """Send a request whose answer is fetched later; one at a time."""
        self.events = []
        self._memory_kills = memory_kills()
        try:
            _write(self._request, request)
        except BrokenPipeError:
            pass  # the answer says how the child ended
        except BaseException:
            self.kill()
            raise

    def answer(self, deadline_seconds: float) -> dict[str, Any] | Ended:
        """Wait for the answer to the request that was posted.

        Objects with the key `event` that arrive before the answer are kept in `events`.

        Returns:
            The answer, or how the child ended; it is killed with its whole group then.
        """
        try:
            return self._await(time.monotonic() + deadline_seconds, deadline_seconds)
        except BrokenPipeError:
            return self._ended()
        except ValueError as error:
            self.kill()
            words = f"the child wrote into its answers what does not belong there ({error})"
            return Ended(Status.CRASHED, one_line(words))
        except BaseException:
            self.kill()
            raise

    def _await(self, deadline: float, deadline_seconds: float) -> dict[str, Any] | Ended:
        poll = select.poll()
        poll.register(self._reply, select.POLLIN)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                self.kill()
                reason = f"no answer within {deadline_seconds:g} s; the process group was killed"
                return Ended(Status.TIMED_OUT, reason)
            if poll.poll(1000 * min(left, POLL_SECONDS)):
                data = os.read(self._reply, 1 << 16)
                if not data:
                    return self._ended()
                answer = self._take(data)
                if answer is not None:
                    return answer
            elif self.process.poll() is not None:
                return self._ended()
            ended = self._over_memory()
            if ended:
                return ended
            self._trim_log()

    def _take(self, data: bytes) -> dict[str, Any] | None:
        self._buffer += data
        lines: list[bytearray] = []
        if b"\n" in data:  # looked for in what is new only: a long answer comes in many pieces
            *lines, self._buffer = self._buffer.split(b"\n")
        if len(self._buffer) > ANSWER_BYTES or len(self.events) > EVENTS:
            raise ValueError("more than an answer may be")
        for line in lines:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("not a JSON object")
            if "event" not in message:
                return message
            self.events.append(message)
        return None

    def _tree(self) -> list[psutil.Process]:
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.Error:
            return []

    def _over_memory(self) -> Ended | None:
        start = time.monotonic()
        if start >= self._next_scan:
            self._watched = self._tree()
            took = time.monotonic() - start
            self._next_scan = start + took / SCAN_SHARE
        used = 0
        for process in self._watched:
            try:
                used += process.memory_info().rss
            except psutil.Error:
                continue
        if used <= self._memory_limit:
            return None
        self.kill()
        reason = f"used {used >> 20} MiB of memory, the limit is {self._memory_limit >> 20} MiB"
        return Ended(Status.OUT_OF_MEMORY, reason)

    def _trim_log(self) -> None:
        try:
            if self._log.stat().st_size > LOG_BYTES:
                os.truncate(self._log, 0)
                self._log_start = 0
        except OSError:
            pass  # a log somebody removed says nothing any more

    def _last_words(self) -> str:
        try:
            with self._log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, size - 4096))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f"; its last words: {one_line(last)}" if last else ""

    def _ended(self) -> Ended:
        """Words for a child that went by itself."""
        try:
            code = self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.kill()
            return Ended(Status.CRASHED, "the child closed its pipe without an answer")
        self.kill()  # what it started may still be there
        if code == -signal.SIGKILL:
            return sigkilled(self._memory_kills)
        if code < 0:
            return Ended(Status.CRASHED, f"ended by {_signal_name(-code)}{self._last_words()}")
        reason = f"exited with code {code} without an answer{self._last_words()}"
        return Ended(Status.CRASHED, reason)

    def kill(self) -> None:
        """Kill the child, its group and whatever else descends from it; idempotent."""
        if self._killed:
            return
        self._killed = True
        strays = self._tree()[1:] if self.process.returncode is None else []
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        for process in strays:  # those that left the group
            try:
                process.kill()
            except psutil.Error:
                continue
        self.process.wait()
        _end_marked(lambda mark: mark == self._mark)
        self._close_pipes()

    def close(self) -> None:
        """Let an idle child end by itself, or kill it after two seconds."""
        self._close_pipes()
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    def _close_pipes(self) -> None:
        for name in ("_request", "_reply"):
            descriptor = getattr(self, name)
            if descriptor >= 0:
                setattr(self, name, -1)
                os.close(descriptor)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _write(descriptor: int, message: Mapping[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def end_orphans() -> None:
    """Kill what children of dead parents left running: a killed parent cannot do it itself."""
    _end_marked(_is_orphaned)


def _is_orphaned(mark: str) -> bool:
    parent = mark.partition("-")[0]
    return parent.isdigit() and not psutil.pid_exists(int(parent))


def _end_marked(is_meant: Callable[[str], bool]) -> None:
    """Kill the processes whose mark is meant, again while they start others, ten times at most."""
    for _ in range(10):
        meant = [pid for pid, mark in _marks() if is_meant(mark)]
        if not meant:
            return
        for pid in meant:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        time.sleep(0.005)


def _marks() -> Iterator[tuple[int, str]]:
    """Every process that carries a mark: its number and the mark."""
    wanted = f"{MARK_VARIABLE}=".encode()
    for pid in psutil.pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # gone, or somebody else's
            continue
        for entry in environment:
            if entry.startswith(wanted) and pid != os.getpid():
                yield pid, entry[len(wanted) :].decode(errors="replace")


def die_with_parent(parent: int) -> None:
    """Have this process killed when the thread of `parent` that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(0)


class Line:
    """The child's end of the pipes.

    Args:
        arguments: `READ_FD WRITE_FD PARENT_PID`, as `Child` gives them.
    """

    def __init__(self, arguments: list[str]) -> None:
        requests, self._replies, parent = (int(a) for a in arguments)
        # Helpers that a compiler starts must not hold the pipes open after this process.
        os.set_inheritable(requests, False)
        os.set_inheritable(self._replies, False)
        self._requests = os.fdopen(requests, "rb")
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        die_with_parent(parent)

    def next(self) -> dict[str, Any] | None:
        """The next request; None when the parent is gone."""
        line = self._requests.readline()
        return json.loads(line) if line else None

    def send(self, message: Mapping[str, Any]) -> None:
        """Send an answer, or an event on the way to it."""
        _write(self._replies, message)
