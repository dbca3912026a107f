"""A run's folder: what is in it, and how a later verb finds the model and the settings again.

Owns the names of the files and `run.json`, which `tune` writes before it builds anything. It names
a folder of this machine, so it stays out of results and reports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from routepilot.env.accuracy import Gate
from routepilot.env.errors import InputError, RoutePilotError
from routepilot.env.models import Model
from routepilot.training.files import write_json
from routepilot.training.session import SessionConfig

#: Folder with the answer, ready to ship.
DEPLOY = "deploy"
#: The answer as data.
RESULT = "result.json"
#: Every outcome.
RECORDS = "records.sqlite"
#: What `explain` found.
EXPLANATION = "explanation.json"
#: This file's own.
RUN = "run.json"


@dataclass(frozen=True)
class Run:
    """What a run was started with.

    Attributes:
        model: Folder of the prepared model.
        backend: Backend name.
        options: Backend options.
        gate: Accuracy gate.
        deadline_seconds: As in `SessionConfig`.
        policy: Policy by name or path, or None.
        agent: Agent by name, or None.
        seed: Seed of inputs and agent.
    """

    model: str
    backend: str
    options: Mapping[str, str] = field(default_factory=dict)
    gate: Gate = field(default_factory=Gate)
    deadline_seconds: float = 120.0
    policy: str | None = None
    agent: str | None = None
    seed: int = 0

    @property
    def config(self) -> SessionConfig:
        """Settings of a session like the run's."""
        return SessionConfig(
            self.backend, self.options, self.gate, deadline_seconds=self.deadline_seconds
        )

    def load_model(self) -> Model:
        """The prepared model.

        Raises:
            InputError: It is gone.
        """
        try:
            return Model.load(Path(self.model))
        except (OSError, RoutePilotError) as error:
            raise InputError(
                f"the prepared model of this run cannot be read ({error});"
                " repeat `routepilot tune` with the same folder"
            ) from None


def write_run(folder: Path, run: Run) -> None:
    """Keep what a run was started with."""
    write_json(folder / RUN, asdict(run))


def read_run(folder: Path) -> Run:
    """What a run was started with.

    Raises:
        InputError: The folder holds no readable run.
    """
    data = _read(folder, RUN)
    try:
        return Run(**{**data, "gate": Gate(**data["gate"])})
    except (TypeError, KeyError) as error:
        raise InputError(
            f"{str(folder / RUN)!r} is not a run of this version ({error});"
            " repeat `routepilot tune` there"
        ) from None


def read_result(folder: Path) -> dict[str, Any]:
    """The content of a run's `result.json`.

    Raises:
        InputError: The folder holds no readable result.
    """
    return _read(folder, RESULT)


def _read(folder: Path, name: str) -> dict[str, Any]:
    source = folder / name
    try:
        data = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else error
        raise InputError(
            f"{str(source)!r} cannot be read ({words});"
            " give a folder that `routepilot tune -o` wrote"
        ) from None
    if not isinstance(data, dict):
        raise InputError(f"{str(source)!r} holds no object; repeat `routepilot tune` there")
    return data
