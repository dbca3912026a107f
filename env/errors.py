"""Every error RoutePilot raises on purpose, under one base.

A message says what was given, what is allowed and what to do next, in one line. Faults of a
candidate route are never errors: they are outcomes (`env/outcomes.py`).
"""

from __future__ import annotations


class RoutePilotError(Exception):
    """Anything RoutePilot refuses or cannot do; `exit_code` is what the command line returns."""

    exit_code = 1


class InputError(RoutePilotError):
    """The user gave something that cannot be used: exit code 2, nothing written."""

    exit_code = 2


class RouteError(InputError):
    """A route, route expression or knob that the catalog does not allow."""


class ModelError(InputError):
    """A model file, shape or input set that cannot be used."""


class TableError(InputError):
    """A route table or record store that is damaged, of another schema or another target."""


class PolicyError(InputError):
    """A policy file or card that is damaged, not ours, or does not fit."""


class MissingExtraError(InputError):
    """An optional dependency is needed; the message names the extra that brings it."""


class MachineError(RoutePilotError):
    """The machine, not the candidate, is at fault: no device, disk full, worker cannot start."""


class LostSlotError(MachineError):
    """A slot of a cluster is gone and no other could take its place."""
