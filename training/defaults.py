"""Which agent, policy and table serve when the user names none.

Owns the released names under `checkpoints/` and the choice among them, with its reason.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from routepilot.env.backends.recorded import Replay
from routepilot.env.errors import InputError, PolicyError, TableError
from routepilot.env.liveness_table import LivenessTable, load_liveness
from routepilot.env.tables import load_table
from routepilot.env.wording import counted

if TYPE_CHECKING:
    from routepilot.agents.policy import LoadedPolicy
    from routepilot.env.backends.base import Target
    from routepilot.env.routes import Catalog
    from routepilot.training.session import SessionConfig


#: Most knobs of a catalog on which random routes are a sound search from nothing.
FEW_KNOBS = 32


@dataclass(frozen=True)
class Choice:
    """An agent and what it needs.

    Attributes:
        agent: Agent name for `make_agent`.
        name: Name for people: the policy's, or the agent's.
        why: One line that says what was chosen and why.
        replay: Route table for agents that learn from one.
        policy: Loaded policy for the agents that are one.
    """

    agent: str
    name: str
    why: str
    replay: Replay | None = None
    policy: LoadedPolicy | None = None


#: The policy for backends without one of their own.
ANY = "any"

#: Agents that did better than the policy that is released for a backend, in the README's figures.
BETTER_THAN_PPO = {"cuda": "grace"}

#: Name of the released liveness table, which is no route table.
LIVENESS = "liveness"

#: Released policy and table of backends whose own name they do not bear.
RELEASED_AS = {"cuda": "h200"}


def released_name(backend: str) -> str:
    """Name of the policy and the table that are released for a backend, if any are."""
    return RELEASED_AS.get(backend, backend)


def checkpoints_folder() -> Path:
    """Folder of released policies and tables, inside the installed package."""
    return Path(str(files("routepilot.checkpoints"))).resolve()


def released_policies() -> list[str]:
    """Names of the released policies."""
    return sorted(path.stem for path in checkpoints_folder().glob("*.safetensors"))


def released_tables() -> list[str]:
    """Names of the released route tables."""
    found = (checkpoints_folder() / "tables").glob("*.parquet")
    return sorted(path.stem for path in found if path.stem != LIVENESS)


def released_liveness() -> LivenessTable | None:
    """The released liveness table; None where this installation has none."""
    path = checkpoints_folder() / "tables" / f"{LIVENESS}.parquet"
    return load_liveness(path) if path.is_file() else None


def find_table(name: str) -> Path:
    """The file of a table given by path or released name.

    Raises:
        TableError: There is no such file or name.
    """
    path = Path(name)
    if path.suffix == ".parquet" or os.path.isfile(path):  # a folder may be called `cpu`
        return path
    released = checkpoints_folder() / "tables" / f"{name}.parquet"
    if os.path.exists(released):  # which a name that is too long answers too
        return released
    raise TableError(
        f"no route table {name!r}; released: {', '.join(released_tables()) or 'none'};"
        " or give the path of a .parquet file"
    )


def policies_folder() -> Path:
    """Folder of the policies that `routepilot policy pull` fetched, one folder each."""
    from platformdirs import user_data_dir

    return Path(user_data_dir("routepilot")) / "policies"


def pulled_policies() -> list[str]:
    """Names of the policies that were pulled."""
    return sorted(path.parent.name for path in policies_folder().glob("*/policy.safetensors"))


def find_policy(name: str) -> Path:
    """The weights file of a policy given by path, released name, or the name it was pulled under.

    Raises:
        PolicyError: There is no such file or name.
    """
    path = Path(name)
    for candidate in (path, path.with_suffix(".safetensors"), path / "policy.safetensors"):
        if os.path.isfile(candidate) and candidate.suffix == ".safetensors":
            return candidate
    released = checkpoints_folder() / f"{name}.safetensors"
    if os.path.exists(released):  # which a name that is too long answers too
        return released
    pulled = policies_folder() / name / "policy.safetensors"
    if os.path.exists(pulled):
        return pulled
    raise PolicyError(
        f"no policy {name!r}; released: {', '.join(released_policies()) or 'none'}; pulled:"
        f" {', '.join(pulled_policies()) or 'none'}; or give the path of a .safetensors file that"
        " `routepilot train` wrote"
    )


def policy_file(backend: str, policy: str | None, agent: str | None) -> Path | None:
    """The weights file of the policy that chooses for a backend; None when none does.

    Args:
        backend: Backend name.
        policy: Policy by name or path, or None for the one that is released.
        agent: Agent name, or None.

    Raises:
        PolicyError: There is no policy of that name.
    """
    from routepilot.agents import TRAINED_BY_PPO

    if policy is not None:
        return find_policy(policy)
    if agent not in TRAINED_BY_PPO and (agent is not None or backend in BETTER_THAN_PPO):
        return None
    names = [n for n in (released_name(backend), ANY) if n in released_policies()]
    return find_policy(names[0]) if names else None


class Policies:
    """Policies that are loaded once, for which there may be time before they are asked."""

    def __init__(self) -> None:
        self._loaded: dict[Path, LoadedPolicy] = {}

    def load(self, path: Path) -> LoadedPolicy:
        """The policy of a weights file; see `load_policy`."""
        from routepilot.agents.policy import load_policy

        if path not in self._loaded:
            self._loaded[path] = load_policy(path)
        return self._loaded[path]

    def foreload(self, backend: str, policy: str | None, agent: str | None) -> None:
        """Load the policy that `choose_agent` will ask for, if any."""
        path = policy_file(backend, policy, agent)
        if path is not None:
            self.load(path)


class Situation(Protocol):
    """What a choice rests on; a live session is one."""

    @property
    def config(self) -> SessionConfig:
        """Backend and gate."""
        ...

    @property
    def catalog(self) -> Catalog:
        """What can be decided."""
        ...

    @property
    def target(self) -> Target:
        """On what device."""
        ...


def choose_agent(
    session: Situation, *, policy: str | None, agent: str | None, policies: Policies | None = None
) -> Choice:
    """Pick who chooses the routes of a session.

    Args:
        session: The session, for its backend and model.
        policy: Policy by name or path, or None.
        agent: Agent name, or None.
        policies: Where policies are loaded.

    Raises:
        InputError: Both were given.
    """
    from routepilot.agents import NEEDS_TABLE, TRAINED_BY_PPO

    load = (policies or Policies()).load
    if policy is not None and agent is not None:
        raise InputError(f"both policy {policy!r} and agent {agent!r} were given; give one")
    backend = session.config.backend
    if policy is None and agent is None and backend in BETTER_THAN_PPO:
        better = BETTER_THAN_PPO[backend]
        table = load_table(find_table(released_name(backend)))
        why = f"agent {better}, which did better than the released policy on the {backend} backend"
        return Choice(better, better, why, Replay(table, session.config.gate))
    if agent is not None and agent not in TRAINED_BY_PPO:
        replay = None
        if agent in NEEDS_TABLE:
            table = load_table(find_table(released_name(backend)))
            replay = Replay(table, session.config.gate)
        return Choice(agent, agent, f"agent {agent}, as asked", replay)
    path = policy_file(backend, policy, agent)
    if policy is not None and path is not None:
        loaded = load(path)
        why = f"policy {policy}, as asked; {_records(loaded, session)}"
        return Choice(_agent_of(loaded), policy, why, policy=loaded)
    if path is None:
        # A random route changes half the knobs at once, of which few are worth a change.
        name = "random" if len(session.catalog.knobs) <= FEW_KNOBS else "recentred"
        return Choice(name, name, f"agent {name}: no policy is released for {backend}")
    loaded, name = load(path), path.stem
    reason = f"the released one for the {backend} backend"
    if name == ANY:
        reason = f"since none is released for the {backend} backend and it is for any catalog"
    why = f"policy {name}, {reason}; {_records(loaded, session)}"
    return Choice(agent or _agent_of(loaded), name, why, policy=loaded)


def _agent_of(policy: LoadedPolicy) -> str:
    """`bc` is a policy that only imitates its teacher."""
    return "ppo" if policy.card.steps > 0 else "bc"


def _records(policy: LoadedPolicy, session: Situation) -> str:
    """What a policy's beliefs about a session's target rest on, for people."""
    replay = policy.replay_for(session.catalog)
    if replay is None:
        known = ", ".join(sorted({r.catalog.name for r in policy.replays}))
        return f"it has no records of this catalog (of {known} alone) and goes by this run's builds"
    device = replay.table.target.device
    same = "this device" if device == session.target.device else f"another device ({device})"
    return f"it knows records of {counted(len(replay.models), 'model')} on {same}"
