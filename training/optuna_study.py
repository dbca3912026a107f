"""The released policy as an Optuna sampler, in one line.

    study = optuna.create_study(direction="maximize", sampler=routepilot.policy_sampler("m.onnx"))

Owns the choice of the agent behind it; `agents/optuna_sampler.py` owns the translation. Builds and
times nothing: the objective does. Needs the extra `bayes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from routepilot.agents import make_agent
from routepilot.agents.base import Problem
from routepilot.env.accuracy import Gate
from routepilot.env.backends import load_backend
from routepilot.env.backends.base import Target
from routepilot.env.features import model_features
from routepilot.env.models import Model, prepare
from routepilot.env.routes import Catalog
from routepilot.training.defaults import choose_agent
from routepilot.training.session import SessionConfig

if TYPE_CHECKING:
    from routepilot.agents.optuna_sampler import RouteSampler


@dataclass(frozen=True)
class _Study:
    """What the choice of an agent rests on."""

    config: SessionConfig
    catalog: Catalog
    target: Target


def policy_sampler(
    model: str | Path | Model | None = None,
    *,
    backend: str = "cpu",
    threads: int = 1,
    policy: str | None = None,
    agent: str | None = None,
    max_builds: int = 8,
    gate: Gate | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    seed: int = 0,
) -> RouteSampler:
    """A sampler that asks the policy which `tune` would ask.

    Args:
        model: ONNX file or prepared model, whose features the policy sees; None hides them.
        backend: Backend name, for the catalog.
        threads: Threads an engine may use.
        policy: Policy by name or path; None for the one that fits.
        agent: Another agent by name, e.g. `greedy`; excludes `policy`.
        max_builds: Trials that the agent reckons with; it stops the study after them.
        gate: Accuracy gate of the objective; relative L2 error below 1e-2 when None.
        shapes: Shapes for dynamic inputs.
        seed: Seed of the agent.

    Returns:
        The sampler; `sampler.catalog` is what `suggest_route` takes.

    Raises:
        InputError: Anything in the input that cannot be used.
        MissingExtraError: Optuna is not installed.
    """
    from routepilot.agents.optuna_sampler import RouteSampler

    options = {"threads": str(threads)}
    compiler = load_backend(backend, options)
    catalog = compiler.catalog()
    config = SessionConfig(backend=backend, options=options, gate=gate or Gate())
    study = _Study(config, catalog, compiler.target())
    choice = choose_agent(study, policy=policy, agent=agent)
    ready = model
    if model is not None and not isinstance(model, Model):
        ready = prepare(Path(model), shapes=shapes, seed=seed)
    features = model_features(ready) if isinstance(ready, Model) else None
    problem = Problem(catalog, features, None, max_builds, seed, config.gate.limit)
    asked = make_agent(choice.agent, problem, replay=choice.replay, policy=choice.policy)
    return RouteSampler(asked, catalog, config.gate.metric)
