"""Several agents, one policy: PPO with shared weights and a central critic on VMAS' balance, or on MPE's simple_spread.

Each agent of each game is a row. The policy sees its own observation, the critic those of the whole team: `agents_of`
finds the rows of one game at one time. ``pip install flatroll[agents]``, for simple_spread also ``mpe2``.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any, cast

import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule as Sampler
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal

from flatroll.estimators import GAE, ClipPPOLoss
from flatroll.layout import agents_of
from flatroll.rollouts import Collector
from flatroll.wrappers import PettingZooSource, RewardSum, as_vector_env

STEPS, EPOCHS, MINIBATCH = 100, 10, 1_200  # vector steps of a batch; rows of a gradient step


def make_env(name: str, num_games: int, seed: int) -> RewardSum:
    """The games, all agents of which are there from the first step to the last."""
    if name == "balance":
        import vmas  # type: ignore[import-not-found]

        options: Any = {"max_steps": 100, "terminated_truncated": True, "clamp_actions": True, "seed": seed}
        games: Any = vmas.make_env("balance", num_envs=num_games, n_agents=3, **options)
    else:
        from mpe2 import simple_spread_v3  # type: ignore[import-not-found]

        games = PettingZooSource([simple_spread_v3.parallel_env(max_cycles=25) for _ in range(num_games)])
    return RewardSum(as_vector_env(games))


class Gaussian(Independent):  # type: ignore[type-arg]  # at run time it takes none
    """A normal distribution over actions with one log-probability for all dims."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        super().__init__(Normal(loc, scale, validate_args=False), 1, validate_args=False)


class LocScale(nn.Module):
    """A mean from a network, and a learned standard deviation."""

    def __init__(self, net: nn.Module, size: int) -> None:
        super().__init__()
        self.net, self.log_scale = net, nn.Parameter(torch.full((size,), -0.5))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        loc = self.net(observation)
        return loc, self.log_scale.exp().expand_as(loc)


def mlp(inputs: int, outputs: int, scale: float) -> nn.Sequential:
    """Two hidden layers; the last one starts small where its outputs should."""
    last = nn.Linear(128, outputs)
    nn.init.orthogonal_(last.weight, scale)
    return nn.Sequential(nn.Linear(inputs, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), last)


def add_team(batch: TensorDict, agents: int) -> TensorDict:
    """Write what the whole team saw into each row, ``"team"`` and ``("next", "team")``, ``[N, agents * obs]``."""
    rows = agents_of(batch, max_num_agents=agents)  # [J, agents]
    assert rows.numel() == len(batch)  # nobody is absent, and batches are whole steps
    for key, source in (("team", "observation"), (("next", "team"), ("next", "observation"))):
        seen = cast(Tensor, batch[source])
        joint = seen[rows].flatten(1)  # [J, agents * obs]
        team = seen.new_empty(len(batch), joint.shape[1])
        team[rows] = joint[:, None].expand(-1, agents, -1)
        batch.set(key, team)
    return batch


def train(name: str, frames: int, seed: int, num_games: int) -> Iterator[tuple[int, float]]:
    """Train for ``frames`` rows; yield after each batch rows so far, and the mean return of the episodes that ended."""
    torch.manual_seed(seed)
    env = make_env(name, num_games, seed)
    inputs, space = env.single_observation_space.shape[0], env.single_action_space  # type: ignore[index]
    agents = int(env.stream.source.agents[0].max()) + 1  # type: ignore[index]
    if isinstance(space, spaces.Discrete):
        read: Any = ["logits"]
        net: nn.Module = mlp(inputs, int(space.n), 0.01)
    else:
        read, net = ["loc", "scale"], LocScale(mlp(inputs, space.shape[0], 0.01), space.shape[0])  # type: ignore[index]
    kind: Any = {"distribution_class": Categorical if read == ["logits"] else Gaussian}
    parts: list[Any] = [
        TensorDictModule(net, ["observation"], read),
        Sampler(read, ["action"], return_log_prob=True, **kind),
    ]
    actor = ProbabilisticTensorDictSequential(*parts)
    critic = TensorDictModule(mlp(agents * inputs, 1, 1.0), ["team"], ["state_value"])
    steps = STEPS if name == "balance" else 25
    collector = Collector(env, actor, frames_per_batch=steps * env.num_envs, total_frames=-1, seed=seed)
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    loss = ClipPPOLoss(
        actor, critic, entropy_coeff=0.001 if name == "balance" else 0.01, normalize_advantage=True
    )
    optimizer = torch.optim.Adam(loss.parameters(), lr=5e-4)
    for batch in collector:
        ended = batch["next", "done"]
        if ended.any():
            yield collector.frames, float(batch["next", "episode_reward"][ended].mean())
        rows = gae(add_team(batch, agents))
        for _ in range(EPOCHS):
            for some in torch.randperm(len(rows)).chunk(len(rows) // MINIBATCH):
                losses = loss(rows[some])
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
                optimizer.step()
        if collector.frames >= frames:
            break
    collector.shutdown()


def main(argv: list[str] | None = None) -> int:
    """Train and print the curve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--game", default="balance", choices=["balance", "simple_spread"], help="%(default)s")
    parser.add_argument("--games", type=int, default=32, help="played at once (default: %(default)s)")
    parser.add_argument(
        "--frames", type=int, default=400_000, help="rows to learn from (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of weights, actions and games (%(default)s)")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    for rows, mean in train(args.game, args.frames, args.seed, args.games):
        print(f"{rows:>10,} rows: mean return {mean:8.2f}")
    print(f"{args.game}, seed {args.seed}: {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
