"""Who decides: everything that asks for routes and is told outcomes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from routepilot.env.errors import InputError

if TYPE_CHECKING:
    from routepilot.agents.base import Agent, AgentFactory, Problem
    from routepilot.agents.policy import LoadedPolicy
    from routepilot.env.backends.recorded import Replay

#: Agents by name, each with its sentence.
AGENTS: dict[str, str] = {
    "default": "builds nothing: the default route",
    "fast": "one change at a time, in trtexec's order",
    "mixed": "fast, then the product over the knobs that helped",
    "full": "the product of all values, in trtexec's order",
    "recentred": "one change at a time around the best so far",
    "random": "legal routes at random",
    "tpe": "Optuna's tree-structured Parzen estimator, from nothing",
    "gp": "Optuna's Gaussian process, from nothing",
    "best-on-average": "routes by their mean gain over other models",
    "knn": "routes by their mean gain over the most similar models",
    "coreset": "complementary routes, ordered by predicted value",
    "two-way-gp": "greedy on the surrogate over models and routes",
    "greedy": "greedy on the same surrogate, weighed by what happened on models alike",
    "thompson": "Thompson sampling on the same surrogate",
    "ppo": "the learned policy on the same surrogate",
}

#: Agents that learn from a route table.
NEEDS_TABLE = frozenset({"best-on-average", "knn", "coreset", "two-way-gp", "greedy", "thompson"})


def make_factory(
    name: str, *, replay: Replay | None = None, policy: LoadedPolicy | None = None
) -> AgentFactory:
    """What makes an agent of a name for any problem; learning from a table happens here, once.

    Args:
        name: A name of `AGENTS`, or `module:factory` of an agent that is not ours; the factory is
            called with the problem.
        replay: Replay of a route table, for the names of `NEEDS_TABLE`.
        policy: Policy, for `ppo`.

    Raises:
        InputError: Unknown name, or what the agent needs is missing.
        MissingExtraError: A package is missing.
    """
    if ":" in name:
        module, _, factory = name.partition(":")
        try:
            made: AgentFactory = getattr(importlib.import_module(module), factory)
        except (ImportError, AttributeError, ValueError) as error:
            raise InputError(f"agent {name!r} cannot be loaded: {error}") from None
        return made
    if name not in AGENTS:
        raise InputError(
            f"agent {name!r} does not exist; there is: {', '.join(AGENTS)}; or module:factory"
        )
    if name in NEEDS_TABLE:
        if replay is None or not replay.models:
            raise InputError(f"agent {name} learns from a route table; give one with --table")
        return _from_table(name, replay)
    if name == "ppo":
        if policy is None:
            raise InputError("agent ppo needs a policy; give one with --policy")
        from routepilot.agents.believer import by_policy

        return by_policy(policy)
    if name in ("tpe", "gp"):
        from routepilot.agents.bayes import OptunaAgent

        return lambda problem: OptunaAgent(name, problem)
    from routepilot.agents import sweeps

    factories: dict[str, AgentFactory] = {
        "default": sweeps.DefaultAgent,
        "fast": sweeps.fast,
        "mixed": sweeps.MixedAgent,
        "full": sweeps.full,
        "recentred": sweeps.RecentredAgent,
        "random": sweeps.RandomAgent,
    }
    return factories[name]


def _from_table(name: str, replay: Replay) -> AgentFactory:
    from routepilot.agents import believer, transfer
    from routepilot.env.surrogate import Surrogate

    if name == "best-on-average":
        return transfer.best_on_average(replay)
    if name == "knn":
        return transfer.nearest(replay)
    if name == "coreset":
        return transfer.coreset(replay)
    surrogate = Surrogate(replay)
    make = {
        "two-way-gp": believer.two_way_gp,
        "greedy": believer.greedy,
        "thompson": believer.thompson,
    }
    return make[name](surrogate)


def make_agent(
    name: str,
    problem: Problem,
    *,
    replay: Replay | None = None,
    policy: LoadedPolicy | None = None,
) -> Agent:
    """One agent for one problem; see `make_factory`."""
    return make_factory(name, replay=replay, policy=policy)(problem)
