"""Benchmarks one update (loss, backward, clipping, optimizer step) beside the same update by hand in plain torch.

All use the same networks of two layers of 64, the same rows and the same optimizer, Adam with defaults; their losses
are compared before timing. They take turns in one process; times are the minimum processor time of one thread.
`update_step` runs eagerly and compiled; with ``compile=True`` its optimizer's step is part of the graph.
"""

import math
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from tensordict.nn.distributions import NormalParamExtractor
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal
from torch.nn import functional as F

from benchmarks.bench_losses import actor, mlp
from benchmarks.measure.timing import table, take_turns
from flatroll.estimators import A2CLoss, ClipPPOLoss, DQNLoss, LossModule, SACLoss, UpdateStep, update_step

OBSERVATIONS, ACTIONS, GAMMA = 8, 2, 0.99
MINIBATCHES = 64, 256, 2048
TURNS, CALLS = 100, 5
MAX_GRAD_NORM = 0.5


class Pair(NamedTuple):
    """The losses of a batch, made by flatroll and by hand, on networks of equal weights."""

    ours: LossModule
    plain: nn.Module


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(OBSERVATIONS + ACTIONS, 64, 64, 1)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        value: Tensor = self.net(torch.cat([observation, action], -1))
        return value


# Neither side asks torch to check its distributions' arguments.
def categorical(logits: Tensor) -> Distribution:
    return Categorical(logits=logits, validate_args=False)


def gaussian(loc: Tensor, scale: Tensor) -> Distribution:
    return Independent(Normal(loc, scale, validate_args=False), 1, validate_args=False)


class PlainPPO(nn.Module):
    def __init__(self, policy: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.policy, self.critic = policy, critic

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        dist = categorical(self.policy(batch["observation"]))
        ratio = (dist.log_prob(batch["action"]) - batch["action_log_prob"]).exp()
        advantage = batch["advantage"]
        objective = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        value = self.critic(batch["observation"]).squeeze(-1)
        of_critic = F.smooth_l1_loss(value, batch["value_target"])
        entropy: Tensor = dist.entropy().mean()
        return of_critic - objective - 0.01 * entropy


class PlainA2C(PlainPPO):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        dist = categorical(self.policy(batch["observation"]))
        objective = (dist.log_prob(batch["action"]) * batch["advantage"]).mean()
        value = self.critic(batch["observation"]).squeeze(-1)
        of_critic = F.smooth_l1_loss(value, batch["value_target"])
        entropy: Tensor = dist.entropy().mean()
        return of_critic - objective - 0.01 * entropy


class PlainDQN(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.target = network, deepcopy(network)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            after = self.target(batch["next_observation"]).amax(-1)
            target = batch["reward"] + GAMMA * after * (1.0 - batch["terminated"])
        value = self.network(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1))
        return F.mse_loss(value.squeeze(-1), target)


class PlainSAC(nn.Module):
    def __init__(self, policy: nn.Module, critics: nn.ModuleList) -> None:
        super().__init__()
        self.policy, self.critics, self.targets = policy, critics, deepcopy(critics)
        self.log_alpha = nn.Parameter(torch.zeros(()))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        observation, after = batch["observation"], batch["next_observation"]
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            dist = gaussian(*self.policy(after))
            action = dist.rsample()
            first, second = (critic(after, action).squeeze(-1) for critic in self.targets)
            value = torch.min(first, second) - alpha * dist.log_prob(action)
            target = batch["reward"] + GAMMA * value * (1.0 - batch["terminated"])
        first, second = (critic(observation, batch["action"]).squeeze(-1) for critic in self.critics)
        of_critics = F.smooth_l1_loss(first, target) + F.smooth_l1_loss(second, target)
        dist = gaussian(*self.policy(observation))
        action = dist.rsample()
        log_prob = dist.log_prob(action)
        self.critics.requires_grad_(False)  # the actor's loss goes through them and does not train them
        first, second = (critic(observation, action).squeeze(-1) for critic in self.critics)
        self.critics.requires_grad_(True)
        of_actor = (alpha * log_prob - torch.min(first, second)).mean()
        of_alpha = -(self.log_alpha * (log_prob.detach() - ACTIONS)).mean()
        total: Tensor = of_critics + of_actor + of_alpha
        return total


def ppo(kind: type[ClipPPOLoss] | type[A2CLoss] = ClipPPOLoss, by: type[PlainPPO] = PlainPPO) -> Pair:
    policy, critic = mlp(OBSERVATIONS, 64, 64, 4), mlp(OBSERVATIONS, 64, 64, 1)
    plain = by(deepcopy(policy), deepcopy(critic))
    value = TensorDictModule(critic, ["observation"], ["state_value"])
    return Pair(kind(actor(policy, ["logits"], categorical), value, diagnostics=False), plain)


def dqn() -> Pair:
    network = mlp(OBSERVATIONS, 64, 64, 4)
    return Pair(DQNLoss(network, diagnostics=False), PlainDQN(deepcopy(network)))


def sac() -> Pair:
    policy = nn.Sequential(mlp(OBSERVATIONS, 64, 64, 2 * ACTIONS), NormalParamExtractor())
    keys: dict[str, Any] = {"in_keys": ["observation", "action"], "out_keys": ["state_action_value"]}
    loss = SACLoss(
        actor(policy, ["loc", "scale"], gaussian), TensorDictModule(Critic(), **keys), diagnostics=False
    )
    critics: Any = loss.qvalue_network
    return Pair(loss, PlainSAC(deepcopy(policy), nn.ModuleList(deepcopy(c.module) for c in critics)))


def rows(count: int, continuous: bool) -> TensorDict:
    action = torch.randn(count, ACTIONS) if continuous else torch.randint(4, (count,))
    done = torch.rand(count, 1) < 0.05
    after = {"observation": torch.randn(count, OBSERVATIONS), "reward": torch.randn(count, 1)}
    entries: dict[str, Any] = {
        "observation": torch.randn(count, OBSERVATIONS),
        "action": action,
        "action_log_prob": torch.full((count,), -math.log(4.0)),
        "advantage": torch.randn(count, 1),
        "value_target": torch.randn(count, 1),
        "next": after | {"done": done, "terminated": done},
    }
    return TensorDict(entries, [count])


def by_hand(batch: TensorDict) -> dict[str, Tensor]:
    """The columns as a hand-written loop holds them: one number per row, flags as floats."""
    columns = {key: batch[key] for key in ("observation", "action", "action_log_prob")}
    columns |= {key: batch[key].squeeze(-1) for key in ("advantage", "value_target")}
    columns["next_observation"] = batch["next", "observation"]
    columns["reward"] = batch["next", "reward"].squeeze(-1)
    return columns | {"terminated": batch["next", "terminated"].squeeze(-1).float()}


def total_of(loss: LossModule, batch: TensorDict) -> Tensor:
    total: Tensor = reduce(torch.add, loss(batch).values())  # without diagnostics, it returns losses alone
    return total


def step_of(loss: LossModule, **options: Any) -> UpdateStep:
    return update_step(loss, torch.optim.Adam(loss.parameters()), max_grad_norm=MAX_GRAD_NORM, **options)


def updates(pair: Pair, batch: TensorDict) -> dict[str, Callable[[], object]]:
    """One update of each of the two, which learn on from call to call; their losses agree before they start."""
    columns = by_hand(batch)
    losses: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: total_of(pair.ours, batch),
        "plain": lambda: pair.plain(columns),
    }
    first = []
    for loss in losses.values():
        torch.manual_seed(0)
        first.append(loss().detach())
    torch.testing.assert_close(*first)
    weights = [x for x in pair.plain.parameters() if x.requires_grad]
    optimizer = torch.optim.Adam(weights)

    def by_hand_once() -> None:
        optimizer.zero_grad()
        losses["plain"]().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(weights, MAX_GRAD_NORM)
        optimizer.step()

    return {"ours": partial(step_of(pair.ours), batch.copy()), "plain": by_hand_once}


CASES: dict[str, Callable[[], Pair]] = {
    "ClipPPOLoss": ppo,
    "A2CLoss": partial(ppo, A2CLoss, PlainA2C),
    "DQNLoss": dqn,
    "SACLoss": sac,
}


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("Networks of two layers of 64, Adam, gradients clipped, float32, one thread, diagnostics=False\n")
    lines = []
    for name, make in CASES.items():
        compiled_step = step_of(make().ours, compile=True)
        for count in MINIBATCHES:
            batch = rows(count, continuous=name == "SACLoss")
            runs = updates(make(), batch) | {"compiled": partial(compiled_step, batch)}
            times = take_turns(runs, turns=TURNS, calls=CALLS, clock=time.thread_time)
            ours, compiled, plain = (1e6 * min(times[who].turns) for who in ("ours", "compiled", "plain"))
            numbers = [f"{plain:.0f}", f"{ours:.0f}", f"{compiled:.0f}"]
            lines.append([name, str(count), *numbers, f"{ours / plain:.2f}", f"{compiled / plain:.2f}"])
        print(f"{name}: compiled in {compiled_step.compile_seconds:.0f} s", flush=True)
    of_each = [
        "by hand, µs",
        "update_step, µs",
        "compiled, µs",
        "update_step / by hand",
        "compiled / by hand",
    ]
    print(table(["", "rows", *of_each], lines))


if __name__ == "__main__":
    main()
