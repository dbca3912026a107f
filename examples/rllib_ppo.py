"""PPO of Ray's RLlib on the route-selection environment, the mask applied by RLlib's own module.

Needs `pip install 'routepilot[ray,train]' 'ray[rllib]'`. It shows the interface, in half a minute;
`routepilot train` makes policies to use. An illegal action is an error in the environment, so a run
that ends has taken none.
"""

import gymnasium
import numpy as np
import ray
from gymnasium import spaces
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.examples.rl_modules.classes.action_masking_rlm import ActionMaskingTorchRLModule
from ray.tune.registry import register_env

from routepilot.env.backends.recorded import Replay
from routepilot.env.surrogate import leave_family_out
from routepilot.env.tables import load_table
from routepilot.training.defaults import find_table

table = load_table(find_table("cpu"))
names = ("silero_vad", "tcn", "bert", "plcmos", "ocr_cls")
table = table.only(card.fingerprint for card in table.models if card.name in names)
surrogates = leave_family_out(Replay(table))  # of each family, blind to it
NAME = "routepilot.env.route_env:RoutePilot/RouteSelection-v0"


class Masked(gymnasium.ObservationWrapper):
    """What RLlib's masking module reads: the mask, and everything else as one vector."""

    def __init__(self, env):
        """Take an environment of ours."""
        super().__init__(env)
        size = sum(int(np.prod(env.observation_space[k].shape)) for k in ("candidates", "context"))
        self.observation_space = spaces.Dict(
            {
                "observations": spaces.Box(-20.0, 20.0, (size,), np.float32),
                "action_mask": spaces.Box(0.0, 1.0, (int(env.action_space.n),), np.float32),
            }
        )

    def observation(self, seen):
        """What is seen, as RLlib wants it."""
        flat = np.concatenate([seen["candidates"].ravel(), seen["context"]])
        return {"observations": flat, "action_mask": seen["mask"].astype(np.float32)}


def make(config):
    """One environment."""
    return Masked(gymnasium.make(NAME, table=table, surrogates=surrogates))


ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
register_env("routes", make)
config = (
    PPOConfig()
    .environment("routes")
    .env_runners(num_env_runners=0)
    .learners(num_learners=0)
    .training(train_batch_size_per_learner=256, minibatch_size=64, num_epochs=2)
    .rl_module(rl_module_spec=RLModuleSpec(module_class=ActionMaskingTorchRLModule))
    .debugging(seed=0)
)
trainer = config.build_algo()
for _ in range(2):
    result = trainer.train()
found = result["env_runners"]
episodes, value = int(found["num_episodes_lifetime"]), float(found["episode_return_mean"])
print(f"{episodes} episodes, mean return {value:.3f}")
trainer.stop()
ray.shutdown()
