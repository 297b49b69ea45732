"""TorchRL's offline and off-policy losses on samples of our buffers: updates equal to those on padded trajectories."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gymnasium import spaces
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.distributions import Independent, Normal

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing it warns about packages that are not there
    pytest.importorskip("torchrl")
    from torchrl import objectives
    from torchrl.collectors.utils import split_trajectories
    from torchrl.modules import QValueActor, ValueOperator
    from torchrl.objectives import SoftUpdate

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.estimators import reward2go
from flatroll.layout import run_starts
from flatroll.rollouts import Collector
from flatroll.trainers.torchrl import spec_of
from flatroll.wrappers import StepCounter
from flatroll.wrappers.testing import Script, make_scripted

INPUTS = 3
UPDATES = 2


class Net(nn.Module):
    """An MLP of one or more entries, seen through sines: scripted observations count up to hundreds."""

    def __init__(self, inputs: int, outputs: int, *last: nn.Module, norm: nn.Module | None = None) -> None:
        super().__init__()
        hidden = [nn.Linear(inputs, 16), *([] if norm is None else [norm]), nn.Tanh()]
        self.layers = nn.Sequential(*hidden, nn.Linear(16, outputs), *last)

    def forward(self, *entries: Tensor) -> Tensor | tuple[Tensor, ...]:
        out: Tensor | tuple[Tensor, ...] = self.layers(torch.cat(entries, -1).mul(0.7).sin())
        return out


class RowNormal(Independent):  # type: ignore[type-arg]
    """Normal numbers whose draw is a function of the mean: each row has the same one in any layout."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        super().__init__(Normal(loc, scale, validate_args=False), 1, validate_args=False)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        base: Any = self.base_dist
        draw: Tensor = base.loc + base.scale * (7.0 * base.loc).sin().detach()
        return draw.expand(*sample_shape, *draw.shape)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        return self.rsample(sample_shape).detach()


def stochastic() -> Any:
    body = TensorDictModule(Net(INPUTS, 4, NormalParamExtractor()), ["observation"], ["loc", "scale"])
    draw: Any = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["action"], distribution_class=RowNormal, default_interaction_type="random"
    )
    return ProbabilisticTensorDictSequential(body, draw)


def deterministic() -> Any:
    return TensorDictModule(Net(INPUTS, 2, nn.Tanh()), ["observation"], ["action"])


def state_value() -> Any:
    return ValueOperator(Net(INPUTS, 1))


def action_value() -> Any:
    return ValueOperator(Net(INPUTS + 2, 1), in_keys=["observation", "action"])


def batch_normalised() -> Any:
    return ValueOperator(Net(INPUTS + 2, 1, norm=OverRows(16)), in_keys=["observation", "action"])


class OverRows(nn.Module):
    """Normalises by mean and deviation of all rows, as CrossQ's critics do."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        rows = tuple(range(x.ndim - 1))
        scaled: Tensor = (x - x.mean(rows)) / (x.var(rows) + 1e-5).sqrt() * self.weight
        return scaled


def discrete_value() -> Any:
    return QValueActor(Net(INPUTS, 5), in_keys=["observation"], action_space="categorical")


class Transformer(nn.Module):
    """A decision transformer of one layer: each row reads itself and those before it in its run."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = Net(INPUTS + 4, 16), nn.Linear(16, 4)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(
        self, observation: Tensor, return_to_go: Tensor, action: Tensor, step: Tensor, is_init: Tensor
    ) -> tuple[Tensor, Tensor]:
        runs = is_init.squeeze(-1).cumsum(-1)
        earlier = torch.ones(runs.shape[-1], runs.shape[-1], dtype=torch.bool).tril()
        mask = (runs.unsqueeze(-1) == runs.unsqueeze(-2)) & earlier
        last = torch.where(is_init, 0.0, action.roll(1, -2))
        x = self.embed(torch.cat([observation, 0.001 * return_to_go, last, step.float()], -1))
        seen = nn.functional.scaled_dot_product_attention(
            self.query(x), self.key(x), self.value(x), attn_mask=mask
        )
        loc, scale = self.head(x + seen).chunk(2, -1)
        return loc, scale.exp()


def decision_transformer() -> Any:
    read = ["observation", "return_to_go", "action", "step_count", "is_init"]
    draw: Any = ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=RowNormal)
    return ProbabilisticTensorDictSequential(TensorDictModule(Transformer(), read, ["loc", "scale"]), draw)


BOUNDS = {"action_spec": spec_of(spaces.Box(-1.0, 1.0, (2,)))}
#: Those that leave padding out of all that they compute.
MASKED: dict[str, Callable[[], Any]] = {
    "TD3": lambda: objectives.TD3Loss(deterministic(), action_value(), **BOUNDS),
    "DDPG": lambda: objectives.DDPGLoss(deterministic(), action_value()),
    "BC": lambda: objectives.BCLoss(stochastic(), loss_function="l2"),
    "DecisionTransformer": lambda: objectives.DTLoss(decision_transformer()),
    "OnlineDecisionTransformer": lambda: objectives.OnlineDTLoss(decision_transformer(), target_entropy=-2.0),
    "REDQ": lambda: objectives.REDQLoss(stochastic(), action_value(), num_qvalue_nets=4, **BOUNDS),
    "SAC": lambda: objectives.SACLoss(stochastic(), action_value(), **BOUNDS),
    "DiscreteCQL": lambda: objectives.DiscreteCQLLoss(discrete_value(), action_space="categorical"),
}
#: Those in which padding takes part: in the loss of the critics, a mean over actions, the statistics of a layer, the
#: conservative penalty. Their slices are all of one length.
UNMASKED: dict[str, Callable[[], Any]] = {
    "IQL": lambda: objectives.IQLLoss(stochastic(), action_value(), state_value()),
    "TD3+BC": lambda: objectives.TD3BCLoss(deterministic(), action_value(), **BOUNDS),
    "CrossQ": lambda: objectives.CrossQLoss(stochastic(), batch_normalised(), **BOUNDS),
    "CQL": lambda: objectives.CQLLoss(stochastic(), action_value(), **BOUNDS),
}
WITHOUT_TARGETS = ("BC", "DecisionTransformer", "OnlineDecisionTransformer", "CrossQ")


def buffer_of_slices(action: Any, *, strict: bool) -> Any:
    """Episodes of 3 to 9 steps in a buffer of ours that draws slices of 4 rows, or of up to 4."""
    script = Script(4, lengths=[[3, 6], [5, 4], [9, 4], [7, 5]], action=action)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(400, compact_obs=True),
        sampler=SliceSampler(slice_len=4, strict_length=strict),
        batch_size=64,
    )
    collector = Collector(StepCounter(make_scripted(script)), frames_per_batch=200, compact_obs=True, seed=0)
    batch: Any = collector.rollout()
    reward, done = (batch["next", name] for name in ("reward", "done"))
    batch["return_to_go"] = reward2go(reward, done, gamma=1.0)
    buffer.extend(batch, final=collector.final)
    return buffer


def padded(sample: Any) -> Any:
    """The slices of a sample, ``[B, T]``, with TorchRL's mask."""
    sample = sample.clone()
    sample["collector", "traj_ids"] = run_starts(sample).cumsum(0)  # two slices may be of one trajectory
    return split_trajectories(sample)


def gradients(loss: Any, batch: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)  # of the critics that REDQ draws, and of CQL's random actions
    loss.zero_grad()
    values = loss(batch)
    sum(values[name].sum() for name in list(values.keys()) if name.startswith("loss")).backward()
    found = {name: weight.grad.clone() for name, weight in loss.named_parameters() if weight.grad is not None}
    assert found and any(bool(gradient.any()) for gradient in found.values())
    return found


@pytest.mark.parametrize("name", [*MASKED, *UNMASKED])
@pytest.mark.filterwarnings("ignore::UserWarning:torchrl", "ignore:No target network:UserWarning")
def test_updates_are_those_of_padded_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randn_like", lambda x: (5.0 * x).sin())  # TD3's noise, by the row
    buffer = buffer_of_slices("discrete" if name.startswith("Discrete") else "box", strict=name in UNMASKED)
    losses, optimizers, updaters = [], [], []
    for _ in range(2):
        torch.manual_seed(0)
        loss = (MASKED | UNMASKED)[name]()
        if name in ("TD3", "IQL"):  # targets along the slices
            loss.make_value_estimator(objectives.ValueEstimators.TDLambda)
        losses.append(loss)
        optimizers.append(torch.optim.SGD(loss.parameters(), lr=1e-4))
        updaters.append(None if name in WITHOUT_TARGETS else SoftUpdate(loss, eps=0.9))
    for _ in range(UPDATES):
        sample = buffer.sample()
        rows, slices = sample.clone(), padded(sample)
        assert bool(slices["collector", "mask"].all()) == (name in UNMASKED)
        flat, apart = gradients(losses[0], rows), gradients(losses[1], slices)
        assert flat.keys() == apart.keys()
        torch.testing.assert_close(flat, apart, rtol=1e-4, atol=1e-5)
        for optimizer, updater in zip(optimizers, updaters, strict=True):
            optimizer.step()
            if updater is not None:
                updater.step()
