"""Checkpoints of a training run: a killed run goes on where it was and ends with the same bytes.

Owns the files (safetensors with a JSON description, no pickle) and what of the networks, optimisers
and random generators goes into them. A checkpoint lies between two passes of imitation or between
two rollouts of PPO; it is whole or not there, and is for the run that wrote it alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from routepilot.env.drafts import whole_file
from routepilot.training.courses import AlternatingEnv
from routepilot.training.session import Say, silent

#: Folder of checkpoints inside a policy's.
FOLDER = "resume"

#: Version of the format; another one is not read.
VERSION = "2"


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stood.

    Attributes:
        phase: `imitation` or `ppo`.
        notes: Plain data.
        tensors: Everything else, by name.
    """

    phase: str
    notes: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors under a prefix, by the rest of their names."""
        return {k[len(prefix) :]: v for k, v in self.tensors.items() if k.startswith(prefix)}


class Keeper:
    """Writes and finds the checkpoints of one run.

    Args:
        folder: Folder of the policy.
        name: Name of the policy.
        key: Hash of everything the run's result depends on. A checkpoint of another key is not of
            this run, and is left aside.
        say: Hears when one is left aside.
    """

    def __init__(self, folder: Path, name: str, key: str, say: Say = silent) -> None:
        self._folder, self._key, self._say = folder / FOLDER, key, say
        self._state = self._folder / f"{name}.safetensors"
        self._lessons = self._folder / f"{name}.lessons.safetensors"

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint in place of the one before."""
        described = {"phase": checkpoint.phase, "notes": checkpoint.notes}
        _write(self._state, checkpoint.tensors, self._key, described)

    def load(self, max_seconds: float | None) -> Checkpoint | None:
        """The run's checkpoint, if there is one.

        Args:
            max_seconds: The run's limit. Imitation that another limit cut short is not taken up:
                with more time it would have learned more.
        """
        found = self._read(self._state)
        if found is None:
            return None
        described, tensors = found
        cut_at = described["notes"].get("cut_at")
        if cut_at not in (None, max_seconds):
            self._say(f"{self._state.name} in {FOLDER} was cut short at {cut_at:g} s: begun anew")
            return None
        return Checkpoint(described["phase"], described["notes"], tensors)

    def save_lessons(self, lessons: Mapping[str, NDArray[Any]], cut_at: float | None) -> None:
        """Write what the teacher showed, which takes long to play.

        Args:
            lessons: What it showed.
            cut_at: The limit in seconds that left it no time for more; None where it had all.
        """
        tensors = {name: torch.from_numpy(array) for name, array in lessons.items()}
        _write(self._lessons, tensors, self._key, {"cut_at": cut_at})

    def load_lessons(self, max_seconds: float | None) -> dict[str, NDArray[Any]] | None:
        """What the teacher showed this run, if it is there and no other limit cut it short."""
        found = self._read(self._lessons)
        if found is None or found[0]["cut_at"] not in (None, max_seconds):
            return None
        return {n: t.numpy() for n, t in found[1].items()}

    def drop_lessons(self) -> None:
        """Remove what imitation alone needs."""
        self._lessons.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove everything, at the end of a run."""
        self._state.unlink(missing_ok=True)
        self.drop_lessons()
        with suppress(OSError):  # another run's are there
            self._folder.rmdir()

    def _read(self, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        from safetensors import SafetensorError, safe_open

        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                described = file.metadata() or {}
                if (described.get("version"), described.get("key")) != (VERSION, self._key):
                    self._say(f"{path.name} in {FOLDER} is of another run: begun anew")
                    return None
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return json.loads(described["state"]), tensors
        except (OSError, SafetensorError, ValueError, KeyError):
            self._say(f"{path.name} in {FOLDER} is damaged: begun anew")
            return None


def _write(path: Path, tensors: Mapping[str, Tensor], key: str, described: object) -> None:
    from safetensors.torch import save

    path.parent.mkdir(exist_ok=True)
    described = json.dumps(described, allow_nan=False)
    metadata = {"version": VERSION, "key": key, "state": described}
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
    with whole_file(path) as draft:
        draft.write_bytes(data)


def optimizer_tensors(optimizer: torch.optim.Optimizer, prefix: str) -> dict[str, Tensor]:
    """What an optimiser remembers of each parameter."""
    state = optimizer.state_dict()["state"]
    return {
        f"{prefix}{number}.{name}": value
        for number, values in state.items()
        for name, value in values.items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Give an optimiser back what `optimizer_tensors` found, the prefix taken off."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        number, _, key = name.partition(".")
        state.setdefault(int(number), {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def imitation_checkpoint(imitation: Any, net: nn.Module, notes: Mapping[str, Any]) -> Checkpoint:
    """Where an `Imitation` stands between two passes."""
    tensors = {f"net.{name}": tensor for name, tensor in net.state_dict().items()}
    tensors |= optimizer_tensors(imitation.optimizer, "optimizer.")
    tensors["generator"] = imitation.generator.get_state()
    return Checkpoint("imitation", notes, tensors)


def restore_imitation(checkpoint: Checkpoint, imitation: Any, net: nn.Module) -> None:
    """Put an `Imitation` where `imitation_checkpoint` found it."""
    net.load_state_dict(checkpoint.part("net."))
    restore_optimizer(imitation.optimizer, checkpoint.part("optimizer."))
    imitation.generator.set_state(checkpoint.tensors["generator"])


def ppo_checkpoint(
    model: Any,
    envs: Sequence[AlternatingEnv],
    best: Mapping[str, NDArray[np.float32]],
    notes: Mapping[str, Any],
) -> Checkpoint:
    """Where PPO stands between two rollouts.

    Args:
        model: Stable-Baselines3's PPO.
        envs: Its environments.
        best: The best weights so far.
        notes: What the caller wants to find again.
    """
    kind, words, place, has_gauss, gauss = np.random.get_state()
    tensors = {f"net.{name}": tensor for name, tensor in model.policy.net.state_dict().items()}
    tensors |= {f"best.{name}": torch.from_numpy(array) for name, array in best.items()}
    tensors |= optimizer_tensors(model.policy.optimizer, "optimizer.")
    tensors["torch"] = torch.get_rng_state()
    tensors["numpy"] = torch.from_numpy(np.asarray(words, np.int64))
    tensors["starts"] = torch.from_numpy(np.asarray(model._last_episode_starts, bool))
    state = {
        "steps": int(model.num_timesteps),
        "updates": int(model._n_updates),
        "numpy": [kind, int(place), int(has_gauss), float(gauss)],
        "envs": [env.point() for env in envs],
    }
    return Checkpoint("ppo", {**notes, "model": state}, tensors)


def restore_ppo(
    checkpoint: Checkpoint, model: Any, envs: Sequence[AlternatingEnv]
) -> dict[str, NDArray[np.float32]]:
    """Put PPO where `ppo_checkpoint` found it; returns the best weights so far."""
    state = checkpoint.notes["model"]
    model.policy.net.load_state_dict(checkpoint.part("net."))
    restore_optimizer(model.policy.optimizer, checkpoint.part("optimizer."))
    seen = [env.go_to(point) for env, point in zip(envs, state["envs"], strict=True)]
    model._last_obs = {key: np.stack([one[key] for one in seen]) for key in seen[0]}
    model._last_episode_starts = checkpoint.tensors["starts"].numpy()
    model.num_timesteps, model._n_updates = int(state["steps"]), int(state["updates"])
    kind, place, has_gauss, gauss = state["numpy"]
    words = checkpoint.tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state((kind, words, place, has_gauss, gauss))
    torch.set_rng_state(checkpoint.tensors["torch"])
    return {name: tensor.numpy() for name, tensor in checkpoint.part("best.").items()}
