"""A buffer over a log draws what a buffer draws that was filled with the rows."""

import copy
import pickle
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from tensordict import TensorDict

from flatroll.buffers import (
    DiskStorage,
    ImmutableDatasetWriter,
    LazyTensorStorage,
    MultiStepTransform,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
)
from flatroll.datasets import ReplayLog, ReplayLogStorage, ReplayMismatchError
from flatroll.datasets.replay_log.replay import Replayer
from flatroll.disk import Folder
from flatroll.rollouts import Collector

ROWS, BATCH = 480, 60
Sample = Callable[[ReplayBuffer], Any]


class Scripted(gym.Env[Any, Any]):
    """The observation is (draw of the episode, step); episodes have 1 to 12 steps."""

    observation_space = gym.spaces.Box(-1e9, 1e9, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.start = self.np_random.random()
        self.length = int(self.np_random.integers(1, 13))
        self.t = 0
        return np.array([self.start, 0.0]), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        ended = self.t == self.length
        return np.array([self.start, self.t]), float(action), ended and action == 0, ended and action == 1, {}


class Drifting(Scripted):
    """Depends on how many resets this object has seen."""

    resets = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.resets = 0 if seed is not None else self.resets + 1
        _, info = super().reset(seed=seed)
        self.start += self.resets
        return np.array([self.start, 0.0]), info


class Noisy(Scripted):
    """No seed determines its steps."""

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return obs + np.random.default_rng().random(), *rest


def many(kind: Any, mode: str = "NextStep") -> Callable[[], Any]:
    return lambda: SyncVectorEnv([kind] * 3, autoreset_mode=AutoresetMode(mode))


def collect(path: Path, env: Any, batch: int = BATCH, rows: int = ROWS, **arguments: Any) -> list[TensorDict]:
    arguments.setdefault("seed", 3)
    with Collector(env, frames_per_batch=batch, total_frames=rows, log=path, **arguments) as collector:
        return [rows.clone() for rows in collector]


def cat(parts: Any) -> Any:
    """Join batches; tensordict's types do not know that torch does."""
    return torch.cat(parts)


def pair(
    log: ReplayLog, batches: list[TensorDict], sampler: Callable[[], Sampler], **arguments: Any
) -> tuple[ReplayBuffer, ReplayBuffer]:
    """Return a buffer over the log and one that was extended with the same batches; both draw alike."""

    def buffer(storage: Any) -> ReplayBuffer:
        options = {name: make() for name, make in arguments.items()}
        generator = torch.Generator().manual_seed(5)
        return ReplayBuffer(storage=storage, sampler=sampler(), batch_size=24, generator=generator, **options)

    filled = buffer(LazyTensorStorage(len(log)))
    for batch in batches:
        filled.extend(batch)
    return buffer(ReplayLogStorage(log)), filled


def assert_alike(made: Any, expected: Any) -> None:
    """All columns are equal bit by bit."""
    assert set(made.keys(True, True)) == set(expected.keys(True, True))
    for key in expected.keys(True, True):
        assert made[key].dtype is expected[key].dtype, key
        assert made[key].numpy().tobytes() == expected[key].numpy().tobytes(), key


def check_samples(made: ReplayBuffer, expected: ReplayBuffer, count: int = 6) -> None:
    for _ in range(count):
        ours, info = made.sample(return_info=True)
        theirs, other = expected.sample(return_info=True)
        assert_alike(ours, theirs)
        assert info.keys() == other.keys()
        assert all(torch.equal(info[name], other[name]) for name in info)


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how rows are made: runs of one env alone, and windows of all."""
    found: Counter[str] = Counter()
    env_rows = Replayer.env_rows
    window = Replayer.window

    def counted_rows(self: Replayer, *arguments: Any, **how: Any) -> list[TensorDict]:
        found["alone"] += 1
        return env_rows(self, *arguments, **how)

    def counted_window(self: Replayer, number: int) -> TensorDict:
        found["together"] += 1
        return window(self, number)

    monkeypatch.setattr(Replayer, "env_rows", counted_rows)
    monkeypatch.setattr(Replayer, "window", counted_window)
    return found


SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "slices": lambda: SliceSampler(slice_len=6),
    "short slices too": lambda: SliceSampler(slice_len=8, strict_length=False),
    "slices once": lambda: SliceSamplerWithoutReplacement(slice_len=6),
    "prioritized slices": lambda: PrioritizedSliceSampler(ROWS, 0.7, 0.9, slice_len=6),
    "rows": RandomSampler,
    "rows once": SamplerWithoutReplacement,
}


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_are_those_of_a_filled_buffer(tmp_path: Path, name: str, mode: str) -> None:
    make = many(Scripted, mode)
    batches = collect(tmp_path / "log", make)
    with ReplayLog(tmp_path / "log", create_env_fn=make) as log:
        made, expected = pair(log, batches, SAMPLERS[name])
        assert len(made) == ROWS
        check_samples(made, expected)
        assert_alike(made[:], expected[:])
        assert_alike(made[torch.tensor([400, 0, 479, 400])], expected[torch.tensor([400, 0, 479, 400])])


def test_slices_of_envs_of_the_registry(tmp_path: Path, stepped: Counter[str]) -> None:
    env = gym.make_vec("CartPole-v1", num_envs=8, vectorization_mode="sync")
    batches = collect(tmp_path / "log", env, batch=512, rows=8192)
    with ReplayLog(tmp_path / "log") as log:
        made, expected = pair(log, batches, SAMPLERS["slices"])
        assert made.stats()["trajectories"] == expected.stats()["trajectories"]
        stepped.clear()
        check_samples(made, expected)
        assert stepped["alone"] > 0  # a few rows of few envs


@pytest.mark.parametrize("kind", [Drifting, Noisy])
def test_envs_that_are_stepped_together_and_rows_that_are_kept(tmp_path: Path, kind: Any) -> None:
    make = many(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if kind is Noisy else "error", RuntimeWarning)
        batches = collect(tmp_path / "log", make)
    with ReplayLog(tmp_path / "log", create_env_fn=make) as log:
        assert (log.kept == ROWS) is (kind is Noisy)
        check_samples(*pair(log, batches, SAMPLERS["slices"]))


def test_a_vector_env_that_is_not_divided(tmp_path: Path, stepped: Counter[str]) -> None:
    env = gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point")
    batches = collect(tmp_path / "log", env)
    with ReplayLog(tmp_path / "log") as log:
        made, expected = pair(log, batches, SAMPLERS["slices"])
        stepped.clear()
        check_samples(made, expected)
        assert stepped["alone"] == 0
        assert stepped["together"] <= ROWS // BATCH  # each window once, then it is in memory


def test_transforms_that_read_ahead(tmp_path: Path) -> None:
    make = many(Scripted)
    batches = collect(tmp_path / "log", make)
    with ReplayLog(tmp_path / "log", create_env_fn=make) as log:
        check_samples(*pair(log, batches, RandomSampler, transform=lambda: MultiStepTransform(3, 0.9)))


def test_a_continued_log_joins_no_trajectories(tmp_path: Path) -> None:
    make = many(Scripted)
    batches = collect(tmp_path / "log", make)
    again = collect(tmp_path / "log", make, seed=8)
    with ReplayLog(tmp_path / "log", create_env_fn=make) as log:
        assert len(log) == 2 * ROWS
        made = ReplayBuffer(
            storage=ReplayLogStorage(log),
            sampler=SliceSampler(slice_len=4, strict_length=False),
            batch_size=64,
        )
        rows = cat([*batches, *again])
        for _ in range(20):
            sample, info = made.sample(return_info=True)
            at = info["index"]
            assert torch.equal(sample["observation"], rows["observation"][at])
            # Rows of a slice follow one another.
            inside = ~sample["is_init"][1:, 0]
            same = (at[1:] < ROWS) == (at[:-1] < ROWS)
            assert bool(same[inside].all())
            expected = sample["next", "observation"][:-1][inside]
            assert torch.equal(sample["observation"][1:][inside], expected)


def test_without_slices_nothing_is_made_before_it_is_sampled(tmp_path: Path, stepped: Counter[str]) -> None:
    make = many(Scripted)
    collect(tmp_path / "log", make)
    with ReplayLog(tmp_path / "log", create_env_fn=make) as log:
        stepped.clear()
        buffer = ReplayBuffer(storage=ReplayLogStorage(log), batch_size=8)
        assert len(buffer) == ROWS
        assert sum(stepped.values()) <= 1  # the first batch, whose columns the buffer looks at


def test_rows_in_memory_are_not_made_again(tmp_path: Path, stepped: Counter[str]) -> None:
    make = many(Scripted)
    collect(tmp_path / "log", make)
    with ReplayLog(tmp_path / "log", create_env_fn=make) as log:
        storage = ReplayLogStorage(log)
        buffer = ReplayBuffer(storage=storage)
        index = torch.tensor([100, 101, 300])
        first = buffer[index]
        stepped.clear()
        assert_alike(buffer[index], first)
        assert not stepped

        small = ReplayLogStorage(log, cache_bytes=2000)
        kept = ReplayBuffer(storage=small)
        kept[:]
        assert small._bytes <= 2000
        assert small._bytes == sum(
            piece[key].nbytes for piece in small._pieces.values() for key in piece.keys(True, True)
        )
        none = ReplayBuffer(storage=ReplayLogStorage(log, cache_bytes=0))
        assert_alike(none[index], first)


def test_a_run_of_windows_is_begun_once(tmp_path: Path, stepped: Counter[str]) -> None:
    def long() -> Any:
        return TimeLimit(gym.make("CartPole-v1", max_episode_steps=-1, disable_env_checker=True), 60)

    make = many(long, "SameStep")  # all envs have equally many rows in a batch
    batches = collect(tmp_path / "log", make, batch=12, rows=2400)
    with ReplayLog(tmp_path / "log", create_env_fn=make) as log:
        buffer = ReplayBuffer(storage=ReplayLogStorage(log))
        rows = cat(batches)
        # 4 rows of env 0 in each of 5 windows in a row.
        at = torch.cat([torch.arange(first, first + 4) for first in range(1200, 1260, 12)])
        stepped.clear()
        assert torch.equal(buffer[at]["observation"], rows["observation"][at])
        assert stepped == {"alone": 1}


class Careless(Scripted):
    """Draws from the global generators when it is made."""

    def __init__(self) -> None:
        np.random.random()
        torch.rand(1)


def states() -> tuple[Any, Any]:
    return np.random.get_state(legacy=False)["state"]["pos"], torch.get_rng_state().tolist()


def test_samples_leave_the_global_generators_alone(tmp_path: Path) -> None:
    make = many(Careless)
    collect(tmp_path / "log", make)
    with ReplayLog(tmp_path / "log", create_env_fn=make) as log:
        buffer = ReplayBuffer(storage=ReplayLogStorage(log))
        before = states()
        assert len(buffer[torch.tensor([7, 300])]) == 2
        assert states() == before


def test_several_threads(tmp_path: Path) -> None:
    make = many(Scripted)
    batches = collect(tmp_path / "log", make)
    with ReplayLog(tmp_path / "log", create_env_fn=make) as log:
        buffer = ReplayBuffer(
            storage=ReplayLogStorage(log, cache_bytes=5000),
            sampler=SliceSampler(slice_len=4, strict_length=False),
            batch_size=16,
            prefetch=2,
        )
        rows = cat(batches)
        wrong: list[int] = []

        def read() -> None:
            for _ in range(5):
                sample, info = buffer.sample(return_info=True)
                same = sample["observation"] == rows["observation"][info["index"]]
                wrong.append(int((~same).sum()))

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == [0] * 15


@pytest.mark.parametrize("writer", [None, ImmutableDatasetWriter])
def test_writes_are_refused_and_change_nothing(tmp_path: Path, writer: Any) -> None:
    make = many(Scripted)
    batches = collect(tmp_path / "log", make)
    with ReplayLog(tmp_path / "log", create_env_fn=make) as log:
        options = {} if writer is None else {"writer": writer()}
        buffer = ReplayBuffer(storage=ReplayLogStorage(log), sampler=SliceSampler(slice_len=2), **options)
        before = buffer[:]
        text = "extend a"  # the way out, which both say
        writes: list[Callable[[], Any]] = [
            lambda: buffer.extend(batches[0]),
            lambda: buffer.extend(torch.zeros(3)),
            lambda: buffer.add(batches[0][0]),
            lambda: buffer.__setitem__(0, batches[0][0]),
            lambda: buffer.storage.set(0, batches[0][0]),
            lambda: buffer.empty(),
        ]
        for write in writes:
            with pytest.raises(RuntimeError, match=text):
                write()
            assert len(buffer) == ROWS
        assert_alike(buffer[:], before)


def test_a_refused_empty_leaves_the_rows_of_a_folder(tmp_path: Path) -> None:
    storage = DiskStorage(8, tmp_path / "rows")
    ReplayBuffer(storage=storage).extend(TensorDict({"x": torch.arange(5)}, [5]))
    storage.close()
    buffer = ReplayBuffer(storage=DiskStorage(path=tmp_path / "rows", read_only=True))
    with pytest.raises(RuntimeError, match="reading only"):
        buffer.empty()
    assert buffer[:]["x"].tolist() == [0, 1, 2, 3, 4]


def test_saves_copies_and_other_uses_name_the_way_out(tmp_path: Path) -> None:
    make = many(Scripted)
    collect(tmp_path / "log", make)
    with ReplayLog(tmp_path / "log", create_env_fn=make) as log:
        buffer = ReplayBuffer(storage=ReplayLogStorage(log))
        for save in (buffer.state_dict, lambda: buffer.dumps(tmp_path / "saved")):
            with pytest.raises(RuntimeError, match=r"keep .*log.*make the buffer again"):
                save()
        assert not Folder(tmp_path / "saved").versions()

        state = ReplayBuffer(storage=LazyTensorStorage(ROWS))
        state.extend(log.rows())
        with pytest.raises(ValueError, match="make the buffer again"):
            buffer.load_state_dict(state.state_dict())
        assert len(buffer) == ROWS

        for use in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match="belong to one process"):
                use(buffer)

        with pytest.raises(ValueError, match="already belongs to another buffer"):
            ReplayBuffer(storage=buffer.storage)
        with pytest.raises(TypeError, match="to rank them"):
            ReplayBuffer(storage=ReplayLogStorage(log), writer=TensorDictMaxValueWriter())


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"log must be an open ReplayLog\(path\)"):
        ReplayLogStorage(tmp_path)  # type: ignore[arg-type]
    make = many(Scripted)
    collect(tmp_path / "log", make)
    with (
        ReplayLog(tmp_path / "log", create_env_fn=make) as log,
        pytest.raises(ValueError, match="cache_bytes"),
    ):
        ReplayLogStorage(log, cache_bytes=-1)


def test_an_env_that_makes_other_rows(tmp_path: Path) -> None:
    make = many(Scripted)
    collect(tmp_path / "log", make)
    with ReplayLog(tmp_path / "log", create_env_fn=many(Drifting)) as log:
        storage = ReplayLogStorage(log)
        with pytest.raises(ReplayMismatchError):
            ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=2))
        assert not storage.filling
