import pytest

from routepilot.env.accuracy import Gate
from routepilot.training.defaults import (
    choose_agent,
    find_policy,
    find_table,
    released_name,
    released_policies,
)


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


def test_every_released_policy_loads():
    assert {"cpu", "h200"} <= set(released_policies())
