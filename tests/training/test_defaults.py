from dataclasses import replace
from types import SimpleNamespace

import pytest

from routepilot.agents import make_factory
from routepilot.agents.policy import load_policy
from routepilot.env.accuracy import Gate
from routepilot.env.errors import InputError
from routepilot.training.compare import compare
from routepilot.training.defaults import (
    choose_agent,
    find_policy,
    find_table,
    released_name,
    released_policies,
)
from routepilot.training.inputs import NamedModel
from routepilot.training.search import Budget
from routepilot.training.session import SessionConfig


class Session:
    """What `choose_agent` reads of a session."""

    class config:
        gate = Gate()

    def __init__(self, backend: str) -> None:
        self.config.backend = backend


@pytest.mark.parametrize(("backend", "name"), [("cpu", "cpu"), ("cuda", "h200")])
def test_a_backend_gets_the_policy_that_is_released_for_it(backend, name):
    assert released_name(backend) == name
    assert find_policy(name).is_file() and find_table(name).is_file()
    choice = choose_agent(Session(backend), policy=None, agent=None)
    assert (choice.agent, choice.name) == ("ppo", name)
    assert choice.policy.replay.table.target.backend == backend
    assert find_policy(name).stat().st_size < 5 << 20


def test_a_policy_that_only_imitates_is_not_called_ppo(monkeypatch):
    loaded = load_policy(find_policy("cpu"))
    imitated = replace(loaded, card=replace(loaded.card, steps=0))
    monkeypatch.setattr("routepilot.agents.policy.load_policy", lambda _: imitated)
    assert choose_agent(Session("cpu"), policy="cpu", agent=None).agent == "bc"
    assert make_factory("bc", policy=imitated) is not None


@pytest.mark.parametrize(
    ("agents", "words"),
    [
        (["default", "oracle"], "evaluate"),
        (["default", "nobody"], "'nobody'"),
        (["bc"], "'cpu' went on for [0-9]+ steps"),
    ],
)
def test_compare_refuses_what_cannot_run_before_any_build(agents, words, tmp_path):
    named = NamedModel(SimpleNamespace(fingerprint="none"), "")
    with pytest.raises(InputError, match=words):
        compare(named, agents, Budget(2), SessionConfig(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_released_policy_loads():
    assert {"cpu", "h200"} <= set(released_policies())
