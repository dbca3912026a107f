"""The oracle: who knows a recorded model's outcomes beforehand.

Owns the row of an evaluation that nothing can beat. It exists in replays alone, where its figures
say what the others are measured against and that the accounting of builds is right.
"""

from __future__ import annotations

from routepilot.agents.base import AgentFactory
from routepilot.agents.transfer import ListedAgent
from routepilot.env.backends.recorded import ModelReplay
from routepilot.env.routes import Route


class OracleAgent(ListedAgent):
    """Builds the routes it was given and stops."""

    def upcoming(self) -> Route | None:
        """The next of the given routes."""
        return next(self._ranking, None)


def oracle(model: ModelReplay) -> AgentFactory:
    """The best recorded route of a model, then a stop; nothing where the default is best."""
    best = [model.routes[int(model.gain.argmax())]] if model.oracle > 0 else []
    return lambda problem: OracleAgent("oracle", problem, best)
