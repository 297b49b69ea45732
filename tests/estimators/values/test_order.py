"""Rows that do not follow one another are refused, or told of, where an estimator sums along them."""

import pickle
import warnings
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from flatroll.buffers import (
    LazyTensorStorage,
    MultiStepTransform,
    NextObservationDelta,
    NextStateReconstructor,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
)
from flatroll.estimators import GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator
from flatroll.layout import encode_delta, join, split_trajectories
from flatroll.rollouts import Collector
from flatroll.wrappers import CompactObs, StepCounter

ROWS = 256


def critic() -> TensorDictModule:
    return TensorDictModule(nn.Linear(4, 1), ["observation"], ["state_value"])


def gae(**options: Any) -> GAE:
    return GAE(gamma=0.99, lmbda=0.95, value_network=critic(), **options)


@pytest.fixture(scope="module")
def collected() -> TensorDict:
    """Rows of one env of CartPole, with step counts."""
    torch.manual_seed(0)
    batch = next(iter(Collector(StepCounter(gym.make("CartPole-v1")), None, frames_per_batch=ROWS, seed=0)))
    assert isinstance(batch, TensorDict)
    return batch


@pytest.fixture
def batch(collected: TensorDict) -> TensorDict:
    return collected.clone()


def bare(batch: TensorDictBase) -> TensorDictBase:
    """The rows without step counts and ids: only observations tell that they do not follow."""
    return batch.exclude("step_count", ("next", "step_count"), "collector", "is_init")


def shuffled(batch: TensorDictBase) -> TensorDictBase:
    return batch[torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))]


ORDERED = [
    gae,
    lambda: TDLambdaEstimator(gamma=0.9, lmbda=0.5, value_network=critic()),
    lambda: TD1Estimator(gamma=0.9, value_network=critic()),
    lambda: TD0Estimator(
        gamma=0.9, value_network=critic(), shifted=True
    ),  # reads the next value from the next row
]


@pytest.mark.parametrize("make", ORDERED)
def test_a_gap_in_the_step_count_is_an_error(batch: TensorDict, make: Any) -> None:
    make()(batch.clone())
    step, ends = batch["step_count"].flatten(), batch["next", "done"].flatten()
    row = int((~ends[:-2] & ~ends[1:-1]).nonzero()[0])
    lacking = batch[torch.arange(ROWS) != row + 1]
    text = (
        rf"row {row + 1} does not follow row {row} in its run: 'step_count' is {int(step[row + 2])} after "
        rf"{int(step[row])}\. Call the estimator on the batch as it was collected, before you shuffle"
    )
    with pytest.raises(ValueError, match=text):
        make()(lacking)
    with pytest.raises(ValueError, match="does not follow"):
        make()(shuffled(batch).exclude("collector", "is_init"))


@pytest.mark.parametrize("make", ORDERED)
def test_observations_tell_where_there_are_no_step_counts(batch: TensorDict, make: Any) -> None:
    make()(bare(batch))
    with pytest.raises(ValueError, match=r"its next observation is that of row \d+\. Call the estimator"):
        make()(bare(shuffled(batch)))


def test_rows_that_are_looked_at_now_and_then_are_found_in_the_end(batch: TensorDict) -> None:
    estimator = gae()
    for _ in range(20):
        estimator(bare(batch))
    with pytest.raises(ValueError, match="its next observation is that of row"):
        for _ in range(16):
            estimator(bare(shuffled(batch)))


def test_single_steps_take_rows_in_any_order(batch: TensorDict) -> None:
    """A TD(0) target reads its own row only."""
    network = critic()
    whole = TD0Estimator(gamma=0.9, value_network=network)(batch.clone())
    order = torch.randperm(ROWS)
    for rows in (batch[order], bare(batch[order])):
        estimated = TD0Estimator(gamma=0.9, value_network=network)(rows)
        torch.testing.assert_close(estimated["value_target"], whole["value_target"][order])


def buffer_of(batch: TensorDictBase, sampler: Any, **options: Any) -> ReplayBuffer:
    storage = LazyTensorStorage(ROWS, compact_obs=options.pop("compact", False))
    generator = torch.Generator().manual_seed(0)
    buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=64, generator=generator, **options)
    buffer.extend(batch)
    return buffer


def test_rows_drawn_one_by_one_are_told_of_once(batch: TensorDict) -> None:
    buffer = buffer_of(batch, RandomSampler())
    with pytest.warns(UserWarning, match=r"\d+ of 64 rows are runs of one row that are not done") as told:
        estimator = gae()
        estimator(buffer.sample())
        estimator(buffer.sample())
    assert len(told) == 1
    TD0Estimator(gamma=0.9, value_network=critic())(buffer.sample())
    GAE(gamma=0.9, lmbda=0.0, value_network=critic())(buffer.sample())  # sums nothing up
    done = batch.clone()
    done["next", "done"][:] = True
    gae()(done)  # episodes of one step


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_what_is_right_is_accepted(batch: TensorDict, compact: bool, counted: bool) -> None:
    """Slices, n-step slices, rows of several series, padding, reconstructed and rounded next observations."""
    if not counted:
        batch = batch.exclude("step_count", ("next", "step_count"))
    slices = SliceSampler(slice_len=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            gae()(buffer_of(batch, slices, compact=compact).sample())
        gae()(buffer_of(batch, SliceSampler(slice_len=8, pad_output=True), compact=compact).sample())
        n_step = buffer_of(
            batch, SliceSampler(slice_len=8), compact=compact, transform=MultiStepTransform(3, 0.9)
        )
        gae()(n_step.sample())
        padded = split_trajectories(batch)
        gae()(padded)
        assert len(join(padded)) == ROWS
        gae(time_dim=0)(batch[:128].reshape(2, 64).transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_deltas_may_round(batch: TensorDict, dtype: torch.dtype) -> None:
    small = bare(batch).exclude(("next", "observation"))
    small["next", "delta", "observation"] = encode_delta(
        batch["observation"], batch["next", "observation"], dtype
    )
    gae()(NextObservationDelta()(small))


def test_compact_batches_are_checked_by_their_step_counts() -> None:
    torch.manual_seed(0)
    collector = Collector(
        CompactObs(StepCounter(gym.make("CartPole-v1"))), None, frames_per_batch=ROWS, seed=0
    )
    batch = next(iter(collector))
    gae()(batch.clone(), final=collector.final)
    with pytest.raises(ValueError, match="does not follow"):
        gae()(shuffled(batch).exclude("collector", "is_init"))
    rows = buffer_of(batch, SliceSampler(slice_len=8), transform=NextStateReconstructor()).sample()
    with pytest.warns(UserWarning, match="is NaN in"):
        gae()(rows)


def test_next_observations_that_stand_nowhere_are_accepted(batch: TensorDict) -> None:
    """They may have been changed on purpose, as random crops of images do."""
    rows = bare(batch)
    rows["next", "observation"] = rows["next", "observation"] + torch.rand(ROWS, 4)
    gae()(rows)  # a warning would be an error


def test_series_and_renamed_step_counts_are_named(batch: TensorDict) -> None:
    rows = batch.exclude("collector", "is_init", "step_count", ("next", "step_count"))[:128]
    rows["next", "done"][:] = False
    rows["time"] = torch.arange(128).unsqueeze(-1)
    rows["time"][70:] += 1
    estimator = gae()
    estimator.set_keys(step_count="time")
    for given in (rows.reshape(2, 64), pickle.loads(pickle.dumps(rows.reshape(2, 64)))):
        with pytest.raises(
            ValueError, match=r"row 6 of series \(1,\) does not follow row 5 in its run: 'time' is 71 a"
        ):
            estimator(given)


def test_nothing_is_read_in_torch_func_transforms(batch: TensorDict) -> None:
    """Values are not there: shuffled rows pass."""
    rows = bare(shuffled(batch))
    network = critic()
    estimator = GAE(gamma=0.9, lmbda=0.9, value_network=network, differentiable=True)

    def loss(reward: torch.Tensor) -> torch.Tensor:
        given = rows.clone(recurse=False)
        given["next", "reward"] = reward
        advantage: torch.Tensor = estimator(given)["advantage"]
        return advantage.sum()

    assert torch.func.grad(loss)(rows["next", "reward"]).isfinite().all()
