"""Courses: on what a policy is trained and scored, one for each route table and limit.

Owns how tables, limits and families become environments, how episodes alternate over courses, and
how an environment is taken up again in the middle of an episode. Knows no network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np

from routepilot.env.accuracy import Gate
from routepilot.env.backends.recorded import Replay
from routepilot.env.errors import InputError
from routepilot.env.forecast import Calibration, fit, seen_odds
from routepilot.env.likeness import Kernel
from routepilot.env.records import RouteTable
from routepilot.env.route_env import Randomness, RouteSelectionEnv, Seen
from routepilot.env.surrogate import Surrogate, leave_family_out

#: Fewest families that a policy can be trained on.
LEAST_FAMILIES = 3


@dataclass(frozen=True, eq=False)
class School:
    """One route table, with surrogates that do not know what they are asked about.

    Attributes:
        table: The table without the families that are held out.
        trained: Replay of the models that episodes are played on.
        judged: Replay of the models that score the policy: of the validation families, or of the
            training families where there are none.
        surrogates: By family, blind to it. Validation families are judged by a surrogate that
            knows the training families alone.
    """

    table: RouteTable
    trained: Replay
    judged: Replay
    surrogates: Mapping[str, Surrogate]


def open_school(
    table: RouteTable,
    held_out: Sequence[str],
    validation: Sequence[str],
    gate: Gate,
    kernel: Kernel,
    on_fit: Callable[[int, int], None] | None = None,
) -> School:
    """Fit what a table's episodes need.

    Args:
        table: Route table.
        held_out: Families left out of everything.
        validation: Families that score the policy and train nothing.
        gate: Accuracy gate.
        kernel: Kernel of the surrogates.
        on_fit: Hears before each fit how many are done, and of how many.

    Raises:
        InputError: Fewer than `LEAST_FAMILIES` families are left to train on.
    """
    known = table.without_families(held_out)
    kept = known.without_families(validation)
    if len(kept.families) < LEAST_FAMILIES:
        raise InputError(
            f"{LEAST_FAMILIES} families are needed to train on and the {table.catalog.name} table"
            f" has {len(kept.families)} left; hold out fewer"
        )
    trained = Replay(kept, gate)
    # Beliefs about speed and loss do not depend on the limit: one fit serves every course.
    surrogates = leave_family_out(trained, kernel, on_fit)
    waiting = tuple(family for family in known.families if family in validation)
    if not waiting:
        return School(known, trained, trained, surrogates)
    surrogates.update(dict.fromkeys(waiting, Surrogate(trained, kernel)))
    return School(known, trained, Replay(known, gate).only_families(waiting), surrogates)


def courses(
    schools: Sequence[School], limits: Sequence[float], randomness: Randomness
) -> list[RouteSelectionEnv]:
    """Environments for training: every school at the first limit, then at the next."""
    return [
        RouteSelectionEnv(
            school.trained.table,
            replace(school.trained.gate, limit=limit),
            randomness,
            school.surrogates,
        )
        for limit in limits
        for school in schools
    ]


def exams(
    schools: Sequence[School], limits: Sequence[float], budget: int
) -> list[RouteSelectionEnv]:
    """Environments for scoring, in the same order: nothing random, one price."""
    fixed = Randomness((budget, budget), (0.005, 0.005))
    return [
        RouteSelectionEnv(
            school.judged.table, replace(school.judged.gate, limit=limit), fixed, school.surrogates
        )
        for limit in limits
        for school in schools
    ]


def calibrate(schools: Sequence[School], limit: float) -> Calibration:
    """Calibration of a forecast's chances on the training families of every table."""
    found = [seen_odds(s.trained.models, s.surrogates, limit) for s in schools]
    return fit(np.concatenate([odds for odds, _ in found]), np.concatenate([h for _, h in found]))


class AlternatingEnv(gymnasium.Env[Seen, np.int64]):
    """One environment over several courses: an episode of each in turn.

    Where it stands is said by a `point`: the turn, the random state from which the episode began,
    and the actions since. Going through them again gives the same state, so nothing of an
    episode's inside has to be written down.

    Args:
        courses: Courses; what was fitted for them is shared, their episodes are not.
        first: The first episode's course.
        stride: Courses between one episode's and the next.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  (Gymnasium's own form)

    def __init__(self, courses: Sequence[RouteSelectionEnv], first: int, stride: int) -> None:
        self._courses = [copy.copy(course) for course in courses]
        self._turn, self._stride = first - stride, stride
        self._began: dict[str, Any] = {}
        self._actions: list[int] = []
        self.observation_space = self._courses[0].observation_space
        self.action_space = self._courses[0].action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Seen, dict[str, Any]]:
        """Begin an episode of the next course."""
        super().reset(seed=seed)
        self._turn += self._stride
        return self._begin(options)

    def step(self, action: np.int64) -> tuple[Seen, float, bool, bool, dict[str, Any]]:
        """See `RouteSelectionEnv`."""
        self._actions.append(int(action))
        return self._course.step(action)

    def point(self) -> dict[str, Any]:
        """Where it stands, as plain data."""
        return {"turn": self._turn, "random": self._began, "actions": list(self._actions)}

    def go_to(self, point: Mapping[str, Any]) -> Seen:
        """Stand where a point says; returns what is seen there."""
        self._turn = int(point["turn"])
        self.np_random.bit_generator.state = point["random"]
        seen, _ = self._begin(None)
        for action in point["actions"]:
            seen, *_ = self.step(np.int64(action))
        return seen

    @property
    def _course(self) -> RouteSelectionEnv:
        return self._courses[self._turn % len(self._courses)]

    def _begin(self, options: dict[str, Any] | None) -> tuple[Seen, dict[str, Any]]:
        self._began, self._actions = dict(self.np_random.bit_generator.state), []
        self._course.np_random = self.np_random
        return self._course.reset(options=options)
