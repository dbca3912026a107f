import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import synthetic

from routepilot.agents import make_factory
from routepilot.agents.policy import load_policy
from routepilot.env.accuracy import Gate
from routepilot.env.errors import InputError
from routepilot.env.routes import Catalog
from routepilot.env.tables import load_table
from routepilot.training import defaults
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

    def __init__(self, backend: str, catalog: Catalog | None = None, device: str = "") -> None:
        self.config.backend = backend
        table = load_table(find_table(released_name(backend))) if catalog is None else None
        self.catalog = table.catalog if table else catalog
        self.target = replace(table.target, device=device) if table else synthetic.TARGET


@pytest.mark.parametrize(("backend", "name"), [("cpu", "cpu"), ("cuda", "h200")])
def test_a_backend_gets_the_policy_that_is_released_for_it(backend, name):
    assert released_name(backend) == name
    assert find_policy(name).is_file() and find_table(name).is_file()
    choice = choose_agent(Session(backend), policy=None, agent="ppo")
    assert (choice.agent, choice.name) == ("ppo", name)
    assert choice.policy.replay.table.target.backend == backend
    assert find_policy(name).stat().st_size < 5 << 20


def test_the_default_is_the_policy_where_nothing_did_better():
    choice = choose_agent(Session("cpu"), policy=None, agent=None)
    assert (choice.agent, choice.name, choice.replay) == ("ppo", "cpu", None)
    choice = choose_agent(Session("cuda"), policy=None, agent=None)
    assert choice.agent == "grace" and "did better than the released policy" in choice.why
    assert choice.replay is not None and choice.policy is None
    assert make_factory("grace", replay=choice.replay) is not None


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
        (["bc"], "'cpu' went on for [0-9,]+ steps"),
    ],
)
def test_compare_refuses_what_cannot_run_before_any_build(agents, words, tmp_path):
    named = NamedModel(SimpleNamespace(fingerprint="none"), "")
    with pytest.raises(InputError, match=words):
        compare(named, agents, Budget(2), SessionConfig(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_policy_is_loaded_before_it_is_asked_for_and_once(monkeypatch):
    loaded = []

    def load(path):
        loaded.append(path.stem)
        return load_policy(path)

    monkeypatch.setattr("routepilot.agents.policy.load_policy", load)
    policies = defaults.Policies()
    policies.foreload("cpu", None, "random")  # asks no policy
    policies.foreload("cuda", None, None)
    assert loaded == []
    policies.foreload("cpu", None, None)
    session = Session("cpu")
    choice = choose_agent(session, policy=None, agent=None, policies=policies)
    assert loaded == ["cpu"] and choice.policy is policies.load(find_policy("cpu"))


def test_every_released_policy_loads():
    assert {"any", "cpu", "h200"} <= set(released_policies())


def test_the_choice_says_what_its_records_are_of():
    session = Session("cpu", device="a new device")
    why = choose_agent(session, policy=None, agent=None).why
    assert why.startswith("policy cpu, the released one for the cpu backend; it knows records of")
    assert "another device (" in why
    session.target = load_table(find_table("cpu")).target
    assert choose_agent(session, policy=None, agent=None).why.endswith("models on this device")


def test_a_backend_without_a_policy_gets_the_one_for_any_catalog(tmp_path, monkeypatch):
    session = Session("synthetic", synthetic.CATALOG)
    for suffix in (".safetensors", ".json"):
        shutil.copy(find_policy("cpu").with_suffix(suffix), tmp_path / f"any{suffix}")
    shutil.copytree(find_table("cpu").parent, tmp_path / "tables")
    monkeypatch.setattr(defaults, "checkpoints_folder", lambda: tmp_path)
    choice = choose_agent(session, policy=None, agent=None)
    assert (choice.agent, choice.name) == ("ppo", "any") and "no records" in choice.why
    (tmp_path / "any.safetensors").unlink()
    choice = choose_agent(session, policy=None, agent=None)
    assert choice.agent == "random" and "no policy" in choice.why


def test_a_folder_of_a_tables_name_does_not_hide_it(tmp_path, monkeypatch):
    (tmp_path / "cpu").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_table("cpu").is_file()
