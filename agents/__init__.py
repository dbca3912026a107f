"""Who decides: everything that asks for routes and is told outcomes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from routepilot.env.errors import InputError
from routepilot.env.wording import counted

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
    "forest-scratch": "SMAC's forest with a classifier of what is feasible, from nothing",
    "best-on-average": "routes by their mean gain over other models",
    "knn": "routes by their mean gain over the most similar models",
    "coreset": "complementary routes, ordered by predicted value",
    "grace": "the coreset of the most similar models' cluster, then refinement around the best",
    "forest": "SMAC's forest with a classifier of what is feasible, over models and routes",
    "transfer-gp": "expected improvement with the route covariance of other models",
    "two-way-gp": "greedy on the surrogate over models and routes",
    "greedy": "greedy on the same surrogate, weighed by what happened on models alike",
    "thompson": "Thompson sampling on the same surrogate",
    "bc": "a policy on the same surrogate that only imitates its teacher",
    "ppo": "the learned policy on the same surrogate",
    "ppo-no-stop": "the learned policy without its stop: it spends the whole budget",
    "oracle": "the best recorded route at once; in `evaluate` alone",
}

#: Agents that learn from a route table.
NEEDS_TABLE = frozenset(
    {
        "best-on-average",
        "knn",
        "coreset",
        "grace",
        "forest",
        "transfer-gp",
        "two-way-gp",
        "greedy",
        "thompson",
    }
)

#: Agents that are a trained policy.
NEEDS_POLICY = frozenset({"bc", "ppo", "ppo-no-stop"})

#: Those of them that PPO trained.
TRAINED_BY_PPO = frozenset({"ppo", "ppo-no-stop"})


def check_name(name: str) -> None:
    """Refuse what is no agent, or none that can run on a model of its own.

    Raises:
        InputError: It is not in `AGENTS`, or it is the oracle.
    """
    if name not in AGENTS and ":" not in name:
        raise InputError(
            f"agent {name!r} does not exist; there is: {', '.join(AGENTS)}; or module:factory"
        )
    if name == "oracle":
        raise InputError(
            "agent oracle knows the outcomes of a recorded model beforehand: it runs in"
            " `routepilot evaluate` alone; choose another agent here"
        )


def make_factory(
    name: str, *, replay: Replay | None = None, policy: LoadedPolicy | None = None
) -> AgentFactory:
    """What makes an agent of a name for any problem; learning from a table happens here, once.

    Args:
        name: A name of `AGENTS`, or `module:factory` of an agent that is not ours; the factory is
            called with the problem.
        replay: Replay of a route table, for the names of `NEEDS_TABLE`.
        policy: Policy, for the names of `NEEDS_POLICY`.

    Raises:
        InputError: Unknown name, or what the agent needs is missing or of another kind.
        MissingExtraError: A package is missing.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            made: AgentFactory = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise InputError(f"agent {name!r} cannot be loaded: {error}") from None
        return made
    check_name(name)
    if name in NEEDS_TABLE:
        if replay is None or not replay.models:
            raise InputError(f"agent {name} learns from a route table; give one with --table")
        return _from_table(name, replay)
    if name in NEEDS_POLICY:
        return _from_policy(name, policy)
    if name in ("tpe", "gp"):
        from routepilot.agents.bayes import OptunaAgent

        return lambda problem: OptunaAgent(name, problem)
    if name == "forest-scratch":
        from routepilot.agents.forest import forest_scratch

        return forest_scratch
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


def _from_policy(name: str, policy: LoadedPolicy | None) -> AgentFactory:
    from routepilot.agents.believer import by_policy

    if name == "bc" and (policy is None or policy.card.steps > 0):
        given = "none was given"
        if policy is not None:
            given = (
                f"policy {policy.card.name!r} went on for {counted(policy.card.steps, 'step')} of"
                " PPO"
            )
        raise InputError(
            f"agent bc needs a policy that only imitates, and {given}; train one with"
            " `routepilot train --steps 0` and give it with --policy"
        )
    if policy is None:
        raise InputError(f"agent {name} needs a policy; give one with --policy")
    return by_policy(policy, name)


def _from_table(name: str, replay: Replay) -> AgentFactory:
    from routepilot.agents import believer, grace, transfer, transfer_gp
    from routepilot.env.surrogate import Surrogate

    if name == "best-on-average":
        return transfer.best_on_average(replay)
    if name == "knn":
        return transfer.nearest(replay)
    if name == "coreset":
        return transfer.coreset(replay)
    if name == "grace":
        return grace.grace(replay)
    if name == "forest":
        from routepilot.agents.forest import forest

        return forest(replay)
    if name == "transfer-gp":
        return transfer_gp.transfer_gp(replay)
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
