"""Benchmarks losses on one minibatch, forward and backward, beside TorchRL's with the same networks.

Networks are those of common scripts: two layers of 64 for the policy gradients, of 120 and 84 for DQN, of 256 for SAC.
Times include target updates, if there are any. They are the best of several turns; ratios are computed from them.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from tensordict.nn.distributions import NormalParamExtractor
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal

from benchmarks.measure.timing import table, take_turns
from flatroll import estimators

ROWS = 256
Step = Callable[[], object]


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def rows(action: Tensor) -> TensorDict:
    done = torch.rand(ROWS, 1) < 0.05
    return TensorDict(
        {
            "observation": torch.randn(ROWS, 8),
            "action": action,
            "action_log_prob": -torch.rand(ROWS),
            "advantage": torch.randn(ROWS, 1),
            "value_target": torch.randn(ROWS, 1),
            "next": {
                "observation": torch.randn(ROWS, 8),
                "reward": torch.randn(ROWS, 1),
                "done": done,
                "terminated": done,
            },
        },
        [ROWS],
    )


class StateAction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(10, 256, 256, 1)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        value: Tensor = self.net(torch.cat([observation, action], -1))
        return value


class Gaussian(Independent):  # type: ignore[type-arg]  # at run time it takes none
    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        super().__init__(Normal(loc, scale), 1)


def actor(net: nn.Module, params: Any, kind: Any) -> ProbabilisticTensorDictSequential:
    parts: list[Any] = [
        TensorDictModule(net, ["observation"], params),
        ProbabilisticTensorDictModule(params, ["action"], distribution_class=kind, return_log_prob=True),
    ]
    return ProbabilisticTensorDictSequential(*parts)


def step(loss: Any, batch: TensorDict, updater: Any = None) -> Step:
    def run() -> None:
        out = loss(batch.copy())
        total: Any = sum(value for key, value in out.items() if key.startswith("loss"))
        total.backward()
        if updater is not None:
            updater.step()

    return run


def policy_gradient(kind: str, losses: ModuleType) -> Step:
    networks = (
        actor(mlp(8, 64, 64, 4), ["logits"], Categorical),
        TensorDictModule(mlp(8, 64, 64, 1), ["observation"], ["state_value"]),
    )
    return step(getattr(losses, kind)(*networks), rows(torch.randint(4, (ROWS,))))


def dqn(losses: ModuleType) -> Step:
    network: Any = TensorDictModule(mlp(8, 120, 84, 4), ["observation"], ["action_value"])
    if losses is not estimators:
        wrapper = importlib.import_module("torchrl.modules").QValueActor
        network = wrapper(network.module, in_keys=["observation"], action_space="categorical")
    loss = losses.DQNLoss(network, action_space="categorical")
    loss.make_value_estimator(gamma=0.99)
    return step(loss, rows(torch.randint(4, (ROWS,))), losses.SoftUpdate(loss, tau=0.005))


def sac(losses: ModuleType) -> Step:
    net = nn.Sequential(mlp(8, 256, 256, 4), NormalParamExtractor())
    critic = TensorDictModule(StateAction(), ["observation", "action"], ["state_action_value"])
    loss = losses.SACLoss(actor(net, ["loc", "scale"], Gaussian), critic, target_entropy=-2.0)
    loss.make_value_estimator(gamma=0.99)
    return step(loss, rows(torch.randn(ROWS, 2)), losses.SoftUpdate(loss, tau=0.005))


CASES: dict[str, Callable[[ModuleType], Step]] = {
    "ClipPPOLoss": lambda losses: policy_gradient("ClipPPOLoss", losses),
    "A2CLoss": lambda losses: policy_gradient("A2CLoss", losses),
    "DQNLoss, SoftUpdate": dqn,
    "SACLoss, SoftUpdate": sac,
}


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(f"{ROWS} rows, float32, one core\n")
    if not importlib.util.find_spec("torchrl"):
        print("torchrl is not installed: no comparison.")
        return
    warnings.simplefilter("ignore")  # importing it warns about packages that are not there
    peer = importlib.import_module("torchrl.objectives")
    lines = []
    for name, make in CASES.items():
        times = take_turns({"ours": make(estimators), "peer": make(peer)}, turns=30, calls=3)
        ours, theirs = (1e3 * min(times[who].turns) for who in ("ours", "peer"))
        lines.append([name, f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.1f}"])
    print(table(["", "ours, ms", "torchrl, ms", "torchrl / ours"], lines))


if __name__ == "__main__":
    main()
