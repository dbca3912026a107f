"""The policy network in torch, as Stable-Baselines3's PPO trains it.

Owns the training side: the same network as `policy.py`, the mask inside the action distribution,
warm start by imitation. Needs the extra `train`; nothing here is needed to use a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.distributions import CategoricalDistribution
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import Tensor, nn
from torch.nn import functional as F

from routepilot.agents.policy import WIDTH, shapes
from routepilot.env.episode import CONTEXT_FEATURES, ROW_FEATURES

#: Logit of a masked action: its probability is 0 in float32, its gradient finite.
MASKED = -1e9


class RowNetwork(nn.Module):
    """Scores rows with shared weights; pools them for the stop score and the value."""

    def __init__(self) -> None:
        super().__init__()
        row, context = len(ROW_FEATURES) + len(CONTEXT_FEATURES), len(CONTEXT_FEATURES)
        self.row = nn.Sequential(
            nn.Linear(row, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.pool = nn.Sequential(nn.Linear(2 * WIDTH + context, WIDTH), nn.Tanh())
        self.score = nn.Linear(WIDTH, 1)
        self.stop = nn.Linear(WIDTH, 1)
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, rows: Tensor, context: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Masked logits and values.

        Args:
            rows: Shape (batch, rows, row features).
            context: Shape (batch, context features).
            mask: Shape (batch, rows + 1).

        Returns:
            Logits of shape (batch, rows + 1) and values of shape (batch, 1).
        """
        spread = context.unsqueeze(1).expand(-1, rows.shape[1], -1)
        hidden = self.row(torch.cat([rows, spread], -1))
        used = mask[:, :-1].unsqueeze(-1) > 0
        count = used.sum(1).clamp(min=1)
        mean = torch.where(used, hidden, 0.0).sum(1) / count
        peak = torch.where(used, hidden, -1.0).amax(1)
        peak = torch.where(used.any(1), peak, 0.0)
        pooled = self.pool(torch.cat([mean, peak, context], -1))
        logits = torch.cat([self.score(hidden).squeeze(-1), self.stop(pooled)], -1)
        return torch.where(mask > 0, logits, MASKED), self.value(pooled)


class RowPolicy(ActorCriticPolicy):
    """Stable-Baselines3's actor-critic over `RowNetwork`; the mask comes with the observation."""

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        lr_schedule: Callable[[float], float],
        **options: Any,
    ) -> None:
        super().__init__(observation_space, action_space, lr_schedule, **options)
        # The base class makes networks of its own; this policy has one, and its optimiser.
        for unused in ("mlp_extractor", "action_net", "value_net"):
            delattr(self, unused)
        self.net = RowNetwork()
        self.optimizer = torch.optim.Adam(
            self.net.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs
        )

    def _judge(self, obs: Any) -> tuple[CategoricalDistribution, Tensor]:
        logits, values = self.net(
            obs["candidates"].float(), obs["context"].float(), obs["mask"].float()
        )
        assert isinstance(self.action_dist, CategoricalDistribution)
        return self.action_dist.proba_distribution(action_logits=logits), values

    def forward(self, obs: Any, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Actions, values and log probabilities."""
        distribution, values = self._judge(obs)
        actions = distribution.get_actions(deterministic=deterministic)
        return actions, values, distribution.log_prob(actions)

    def evaluate_actions(self, obs: Any, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values, log probabilities and entropies of given actions."""
        distribution, values = self._judge(obs)
        return values, distribution.log_prob(actions), distribution.entropy()

    def get_distribution(self, obs: Any) -> CategoricalDistribution:
        """Distribution over actions."""
        return self._judge(obs)[0]

    def predict_values(self, obs: Any) -> Tensor:
        """Values alone."""
        return self._judge(obs)[1]

    def _predict(self, observation: Any, deterministic: bool = False) -> Tensor:
        actions: Tensor = self._judge(observation)[0].get_actions(deterministic=deterministic)
        return actions


def weights_of(net: RowNetwork) -> dict[str, NDArray[np.float32]]:
    """The network's weights as `policy.Network` takes them."""
    state = net.state_dict()
    return {name: state[name].detach().cpu().numpy().astype(np.float32) for name in shapes()}


class Imitation:
    """Warm start: cross-entropy to a teacher's choice, and regression of returns, pass by pass.

    What a pass depends on are the network, `optimizer` and `generator`; whoever keeps the three can
    go on from there.

    Args:
        net: Trained in place.
        lessons: `candidates`, `context` and `mask` that the teacher saw, its `targets`
            (probabilities, shape (n, rows + 1)) and the `values` (returns) that followed,
            shape (n,).
        seed: Seed of the shuffling.
        batch: Batch size.
        learning_rate: Of Adam.
    """

    def __init__(
        self,
        net: RowNetwork,
        lessons: Mapping[str, NDArray[Any]],
        *,
        seed: int,
        batch: int = 256,
        learning_rate: float = 1e-3,
    ) -> None:
        self._net, self._batch = net, batch
        self._seen = [
            torch.as_tensor(lessons[key]).float() for key in ("candidates", "context", "mask")
        ]
        self._wanted = torch.as_tensor(lessons["targets"])
        self._returns = torch.as_tensor(lessons["values"])
        self.generator = torch.Generator().manual_seed(seed)
        self.optimizer = torch.optim.Adam(net.parameters(), lr=learning_rate)

    def run_pass(self) -> float:
        """One pass over the lessons; returns its cross-entropy."""
        found = 0.0
        order = torch.randperm(len(self._wanted), generator=self.generator)
        for start in range(0, len(order), self._batch):
            places = order[start : start + self._batch]
            logits, value = self._net(*(seen[places] for seen in self._seen))
            entropy = -(self._wanted[places] * F.log_softmax(logits, -1)).sum(-1).mean()
            loss = entropy + F.mse_loss(value[:, 0], self._returns[places])
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            found += float(entropy.detach()) * len(places) / len(self._wanted)
        return found
