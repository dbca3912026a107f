"""RoutePilot: learned selection of compiler build routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routepilot.training.optuna_study import policy_sampler
    from routepilot.training.tune import tune

__all__ = ["policy_sampler", "tune"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "tune":
        from routepilot.training.tune import tune

        return tune
    if name == "policy_sampler":
        from routepilot.training.optuna_study import policy_sampler

        return policy_sampler
    raise AttributeError(f"module 'routepilot' has no attribute {name!r}")
