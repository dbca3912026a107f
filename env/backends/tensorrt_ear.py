"""What TensorRT says while it works: its logger, its error recorder, and what it prints past both.

Owns listening. Most failures are None or False in Python, so these words are the only reason there
is. Knows no network and no route.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def captured_output() -> Iterator[list[str]]:
    """Collect the lines that libraries print to stdout and stderr, past Python.

    The list is filled when the block ends; the lines are then written to the real stderr too, each
    once, so that a log file holds them.
    """
    lines: list[str] = []
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        try:
            yield lines
        finally:
            libc.fflush(None)
            for descriptor, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, descriptor)
                os.close(copy)
            sink.seek(0)
            lines += sink.read().decode(errors="replace").splitlines()
    if lines:
        print("\n".join(dict.fromkeys(lines)), file=sys.stderr, flush=True)


class Ear:
    """Listens to one builder: its log lines and its error recorder.

    Args:
        trt: The compiler's module.

    Attributes:
        logger: For the builder and the parser.
        recorder: For whatever has an `error_recorder`.
        lines: `(severity name, text)` since the last `clear`.
    """

    def __init__(self, trt: Any) -> None:
        self.lines: list[tuple[str, str]] = []
        ear = self

        class Logger(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, msg: str) -> None:
                ear.lines.append((severity.name, msg))

        class Recorder(trt.IErrorRecorder):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.IErrorRecorder.__init__(self)
                self.errors: list[tuple[Any, str]] = []

            def num_errors(self) -> int:
                return len(self.errors)

            def get_error_code(self, index: int) -> Any:
                return self.errors[index][0]

            def get_error_desc(self, index: int) -> str:
                return self.errors[index][1]

            def has_overflowed(self) -> bool:
                return False

            def clear(self) -> None:
                self.errors.clear()

            def report_error(self, code: Any, desc: str) -> bool:
                self.errors.append((code, desc))
                return True

        self.logger, self.recorder = Logger(), Recorder()

    def clear(self) -> None:
        """Forget what was heard."""
        self.lines.clear()
        self.recorder.clear()

    def errors(self) -> str:
        """The errors heard, each once, on one line; empty if there were none."""
        said = [text for severity, text in self.lines if "ERROR" in severity]
        said += [desc for _, desc in self.recorder.errors]
        kept: list[str] = []
        for text in (" ".join(s.split()) for s in said):
            if not any(text in other or other in text for other in kept):
                kept.append(text)
        return "; ".join(kept)
