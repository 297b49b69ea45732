"""What costs a beginner an hour: quiet surprises, and errors that send one the wrong way."""

import pickle
import warnings
from itertools import islice
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, SliceSampler, collate
from flatroll.rollouts import Collector, rollout
from flatroll.wrappers.testing import Script, make_scripted


def scripted(length: int = 5) -> Any:
    return make_scripted(Script(2, lengths=length), autoreset_mode="SameStep", backend="native")


def test_a_storage_may_be_the_first_argument_or_the_error_says_how() -> None:
    try:
        assert ReplayBuffer(LazyTensorStorage(10)).storage.max_size == 10
    except TypeError as error:
        assert "storage=" in str(error)


def test_a_sample_of_slices_longer_than_the_episodes_is_full() -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(1000),
        sampler=SliceSampler(slice_len=64, strict_length=False),
        batch_size=256,
    )
    buffer.extend(rollout(scripted(), num_steps=20))
    assert len(buffer.sample()) == 256


class Doubles(gym.Env[Any, Any]):
    """Observes like MuJoCo's envs: in float64. Its episodes have three steps."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float64)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.time = 0
        return np.zeros(3), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return np.full(3, self.time / 3), 0.0, False, self.time == 3, {}


@pytest.mark.parametrize(
    "run", [rollout, lambda env, policy, num_steps: next(Collector(env, policy, frames_per_batch=2))]
)
@pytest.mark.parametrize(
    "policy", [nn.Linear(3, 2), TensorDictModule(nn.Linear(3, 2), ["observation"], ["action"])]
)
def test_float64_observations_get_a_hint(run: Any, policy: Any) -> None:
    with pytest.raises((TypeError, RuntimeError), match=r"dtype=torch\.float32"):
        run(Doubles(), policy, num_steps=2)


def test_float64_observations_are_cast_where_asked() -> None:
    policy = nn.Linear(3, 2)
    collected = next(Collector(Doubles(), policy, frames_per_batch=7, obs_dtype=torch.float32))
    for batch in (collected, rollout(Doubles(), policy, num_steps=7, obs_dtype=torch.float32)):
        assert batch["observation"].dtype is batch["next", "observation"].dtype is torch.float32
        ends = batch["next", "observation"][batch["next", "done"].squeeze(-1)]
        assert len(ends) == 2 and (ends == 1).all()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_the_callers_env_stays_open_after_an_error_and_the_collector_goes_on(
    error: type[BaseException],
) -> None:
    env, calls = scripted(), []
    closed: list[bool] = []
    env.close_extras = lambda **_: closed.append(True)

    def policy(observation: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 5:
            raise error
        return torch.zeros(len(observation), dtype=torch.long)

    collector = Collector(env, policy, frames_per_batch=6)
    next(collector)
    with pytest.raises(error):
        next(collector)
    assert not closed
    assert next(collector)["observation"][:, 2].tolist()[0] == 0  # after a reset of its own


def test_an_env_that_the_collector_made_is_closed_after_an_error() -> None:
    closed: list[bool] = []

    def make() -> Any:
        env = scripted()
        env.close_extras = lambda **_: closed.append(True)
        return env

    collector = Collector(make, lambda observation: 1 / 0, frames_per_batch=6)
    with pytest.raises(ZeroDivisionError):
        next(collector)
    assert closed


def test_a_buffer_that_waits_for_whole_trajectories_says_how_many_rows_wait() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    collector = Collector(
        scripted(50), frames_per_batch=4, trajs_per_batch=2, replay_buffer=buffer, total_frames=8
    )
    list(collector)
    with pytest.raises(RuntimeError, match=r"8 rows .*wait"):
        buffer.sample()


def test_a_started_collector_says_why_it_cannot_be_pickled() -> None:
    collector = Collector(scripted(), frames_per_batch=4)
    next(collector)
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(collector)


def test_nested_info_entries_are_kept_or_the_error_names_reward_sum() -> None:
    env = RecordEpisodeStatistics(scripted())
    try:
        assert ("episode", "r") in rollout(env, num_steps=8, info_keys=["episode"]).keys(True)
    except (TypeError, ValueError) as error:
        assert "RewardSum" in str(error)


def test_an_env_of_torchrl_is_called_by_its_name() -> None:
    class EnvBase:
        """What torchrl's envs look like: callable, since they are modules."""

        def __call__(self) -> None: ...

    EnvBase.__module__ = "torchrl.envs.common"
    with pytest.raises(TypeError, match="torchrl") as error:
        rollout(EnvBase(), num_steps=2)
    assert "factory" not in str(error.value)


def plain(sample: Any) -> list[int]:
    return list(map(int, sample["x"]))


class Samples(IterableDataset[Any]):
    def __init__(self, buffer: ReplayBuffer) -> None:
        self.buffer = buffer

    def __iter__(self) -> Any:
        return islice(iter(self.buffer), 5)


def of_numbers(generator: torch.Generator | None, rows: int = 10_000) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyTensorStorage(rows), batch_size=4, generator=generator)
    buffer.extend(TensorDict({"x": torch.arange(rows)}, [rows]))
    return buffer


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("members", [1, 2])
def test_workers_of_a_data_loader_draw_rows_of_their_own(members: int, method: str) -> None:
    """In every epoch others, the same ones if the loader has a generator of the same seed."""
    if method == "spawn" and members == 1:
        pytest.skip("two processes take seconds to start: once is enough")
    epochs = []
    for _ in range(2 if method == "fork" else 1):
        generator = torch.Generator().manual_seed(0)
        buffer: Any = of_numbers(generator)
        if members == 2:
            buffer = ReplayBufferEnsemble(
                buffer, of_numbers(None), batch_size=4, sample_from_all=True, stack=False, generator=generator
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forks, among others
            loader = DataLoader(
                Samples(buffer),
                batch_size=None,
                num_workers=2,
                collate_fn=plain,
                multiprocessing_context=method,
                generator=torch.Generator().manual_seed(7),
            )
            epochs += [[tuple(rows) for rows in loader] for _ in range(2 if method == "fork" else 1)]
    rows = [row for epoch in epochs[:2] for sample in epoch for row in sample]
    # Of 80 rows of 10,000, less than one comes twice by chance.
    assert len(rows) == 40 * min(2, len(epochs)) and len(set(rows)) >= len(rows) - 3
    assert epochs[2:] == epochs[:2][: len(epochs[2:])]


def test_a_data_loader_takes_samples_with_the_librarys_collate() -> None:
    samples = list(DataLoader(Samples(of_numbers(None)), batch_size=None, collate_fn=collate))
    assert [sample.batch_size for sample in samples] == [(4,)] * 5
    (first, _) = DataLoader(Samples(of_numbers(None)), batch_size=3, collate_fn=collate)
    assert first.batch_size == (12,)
    rows = next(iter(DataLoader(of_numbers(None, 20), batch_size=5, collate_fn=collate)))  # type: ignore[arg-type]
    assert torch.equal(rows["x"], torch.arange(5))
    assert [len(x) for x in DataLoader(Samples(of_numbers(None)), batch_size=None, collate_fn=plain)] == [
        4
    ] * 5
