"""The step writer: one vector step at a time, stored env after env."""

import copy
import pickle
import threading
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from forms import examples
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from flatroll.buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    MultiStepTransform,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    StepWriter,
    TensorDictMaxValueWriter,
    Transform,
)
from flatroll.rollouts import Collector

STORAGES: dict[str, dict[str, Any]] = {"full": {}, "compact": {"compact_obs": True}}


@dataclass
class Envs:
    """E envs under same-step autoreset; an observation is (env, episode, step).

    Episode k of env e has ``length(e, k)`` steps, and ends terminated, truncated or both in turn.
    """

    count: int
    length: Callable[[int, int], int] = lambda env, episode: 3 + (5 * env + 3 * episode) % 7
    episode: Any = field(init=False)
    step: Any = field(init=False)

    def __post_init__(self) -> None:
        self.episode, self.step = np.zeros((2, self.count), np.int64)

    def observation(self, shift: int = 0) -> Any:
        return np.stack([np.arange(self.count), self.episode, self.step + shift], -1).astype(np.float32)

    def next(self) -> dict[Any, Any]:
        lengths = np.array([self.length(e, int(k)) for e, k in enumerate(self.episode)])
        ended, kind = self.step + 1 >= lengths, (self.episode + np.arange(self.count)) % 3
        step = {
            "observation": self.observation(),
            "action": self.step % 4,
            ("next", "observation"): self.observation(1),
            ("next", "reward"): self.step * 0.5 + np.arange(self.count),
            ("next", "terminated"): ended & (kind != 1),
            ("next", "truncated"): ended & (kind != 0),
        }
        self.episode, self.step = self.episode + ended, np.where(ended, 0, self.step + 1)
        return step


class Scripted(gym.Env[Any, Any]):
    """One of `Envs` as a Gymnasium env."""

    def __init__(self, env: int) -> None:
        self.observation_space = gym.spaces.Box(-1.0, 1e6, (3,), np.float32)
        self.action_space = gym.spaces.Discrete(4)
        self.env, self.episode, self.at = env, -1, 0

    def _observation(self) -> Any:
        return np.array([self.env, self.episode, self.at], np.float32)

    def reset(self, **options: Any) -> Any:
        super().reset(**options)
        self.episode, self.at = self.episode + 1, 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        reward = self.at * 0.5 + self.env
        self.at += 1
        ended = self.at >= 3 + (5 * self.env + 3 * self.episode) % 7
        kind = (self.episode + self.env) % 3
        return self._observation(), reward, ended and kind != 1, ended and kind != 0, {}


def buffer_of(capacity: int = 4096, storage: Any = None, **options: Any) -> ReplayBuffer:
    names = {"compact_obs", "frame_stack", "codec"} & options.keys()
    made = LazyTensorStorage(capacity, **{name: options.pop(name) for name in names})
    generator = torch.Generator().manual_seed(0)
    return ReplayBuffer(storage=storage or made, generator=generator, **options)


def play(writer: StepWriter, envs: Envs, steps: int) -> list[dict[Any, Any]]:
    written = [envs.next() for _ in range(steps)]
    for step in written:
        writer.write(step)
    return written


def row_of(step: dict[Any, Any], env: int) -> dict[Any, Any]:
    return {key: torch.as_tensor(value)[env] for key, value in step.items()}


def assert_reads(writer: StepWriter, written: list[dict[Any, Any]]) -> None:
    """All rows from the oldest on are those that were written, stored or waiting."""
    first, envs = writer.oldest, writer.num_envs
    steps = torch.arange(first, len(written)).repeat_interleave(envs)
    rows = writer.read(steps, torch.arange(envs).repeat(len(written) - first))
    assert len(rows) == len(writer) == len(steps)
    for key in written[0]:
        expected = torch.cat([torch.as_tensor(step[key]) for step in written[first:]])
        assert torch.equal(rows[key].flatten(), expected.flatten().to(rows[key].dtype)), key
    done = rows["next", "terminated"] | rows["next", "truncated"]
    assert torch.equal(rows["next", "done"], done)
    episode = rows["observation"][:, 1].long()
    env = rows["observation"][:, 0].long()
    assert torch.equal(rows["is_init"].flatten(), rows["observation"][:, 2] == 0)
    assert torch.equal(rows["collector", "traj_ids"], episode * envs + env)


# --- what is stored -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("count", [1, 8])
def test_the_rows_are_those_of_a_collector(count: int, storage: str) -> None:
    env = SyncVectorEnv(
        [lambda env=env: Scripted(env) for env in range(count)],  # type: ignore[misc]
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    collected = buffer_of(64 * count, **STORAGES[storage])
    collected.extend(next(Collector(env, lambda obs: obs[:, 2].long() % 4, frames_per_batch=48 * count)))
    buffer = buffer_of(64 * count, **STORAGES[storage])
    play(buffer.writer_for(count, window=16), Envs(count), 48)
    theirs, mine = collected[:], buffer[:]
    assert set(mine.keys(True, True)) == set(theirs.keys(True, True))

    def in_order(rows: Any) -> Any:
        env, episode, step = rows["observation"].long().unbind(-1)
        return rows[(env * 10_000 + episode * 100 + step).argsort()]

    for key, column in in_order(theirs).items(True, True):
        assert torch.equal(in_order(mine)[key], column), key


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("count", [1, 8, 1024])
def test_rows_stand_env_after_env(count: int, storage: str) -> None:
    buffer = buffer_of(24 * count, **STORAGES[storage])
    writer = buffer.writer_for(count, window=4)
    written = play(writer, Envs(count), 15)
    assert (len(buffer), len(writer), writer.steps) == (12 * count, 15 * count, 15)
    for step, env in [(0, 0), (6, count - 1), (11, count // 2)]:
        slot = step // 4 * count * 4 + env * 4 + step % 4
        assert buffer[slot]["observation"].tolist() == written[step]["observation"][env].tolist()
    assert_reads(writer, written)
    written += play(writer, Envs(count), 0)
    if count > 8:
        assert writer.sample(16).batch_size == (16,)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("window", [1, 2, 12])
def test_the_ring_wraps(window: int, storage: str) -> None:
    buffer = buffer_of(3 * 12, sampler=SliceSampler(slice_len=4), **STORAGES[storage])
    writer, envs = buffer.writer_for(3, window=window), Envs(3)
    written: list[dict[Any, Any]] = []
    for _ in range(9):
        written += play(writer, envs, 5)
        assert_reads(writer, written)
        assert writer.oldest == max(0, len(written) // window * window - 12)
    assert len(buffer) == 36


def test_trajectories_go_on_over_windows() -> None:
    buffer = buffer_of(2 * 64, sampler=SliceSampler(slice_len=20, strict_length=True), compact_obs=True)
    play(buffer.writer_for(2, window=8), Envs(2, lambda env, episode: 30), 32)
    sample = buffer.sample(200)
    slices = sample["observation"].view(-1, 20, 3)
    assert bool((slices[:, 1:, 2] == slices[:, :-1, 2] + 1).all())
    assert bool((slices[:, :, :2] == slices[:, :1, :2]).all())
    assert torch.equal(sample["next", "observation"][:, 2], sample["observation"][:, 2] + 1)


@pytest.mark.parametrize("storage", STORAGES)
def test_nested_steps_and_tensordicts(storage: str) -> None:
    buffers = [buffer_of(64, **STORAGES[storage]) for _ in range(3)]
    flat, nested, tds = writers = [buffer.writer_for(2, window=4) for buffer in buffers]
    envs = Envs(2)
    for _ in range(10):
        step = envs.next()
        step["next", "reward"] = step["next", "reward"][:, None]
        tensors = {key: torch.from_numpy(value.copy()) for key, value in step.items()}
        later = {key[1]: value for key, value in tensors.items() if key[0] == "next"}
        now = {key: value for key, value in tensors.items() if key[0] != "next"}
        flat.write(step)
        nested.write({**now, "next": later})
        tds.write(TensorDict({**now, "next": later}, [2]))
    rows = [writer.read(torch.arange(10), 1) for writer in writers]
    assert bool((rows[0] == rows[1]).all()) and bool((rows[0] == rows[2]).all())


def test_observations_of_a_dict_space_and_dtypes() -> None:
    kinds = [torch.uint8, torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.int32, torch.uint16]
    buffer = buffer_of(64, compact_obs=True)
    writer = buffer.writer_for(2, window=4)
    for t in range(7):
        now, later = (
            {f"eye{i}": torch.full((2, 3), (t + shift) % 2 or i, dtype=torch.int64).to(kind)}
            for shift in (0, 1)
            for i, kind in enumerate([torch.uint8])
        )
        for i, kind in enumerate(kinds):
            now[f"eye{i}"] = torch.tensor([[t % 2, i, 3]] * 2).to(kind)
            later[f"eye{i}"] = torch.tensor([[(t + 1) % 2, i, 3]] * 2).to(kind)
        writer.write({**now, "next": {**later, "done": torch.zeros(2, dtype=torch.bool)}})
    rows = writer.read(torch.arange(7), 1)
    for i, kind in enumerate(kinds):
        for at, shift in ((f"eye{i}", 0), (("next", f"eye{i}"), 1)):
            assert rows[at].dtype is kind
            expected = torch.stack([torch.tensor([(t + shift) % 2, i, 3]).to(kind) for t in range(7)])
            assert rows[at].double().equal(expected.double())
    assert ("next", "terminated") not in rows.keys(True)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    "make",
    [
        lambda t: np.arange(4.0).reshape(2, 2) + 1j * t,
        lambda t: (np.arange(4).reshape(2, 2) * 1j * t).astype(np.complex64),
        lambda t: np.asfortranarray(np.random.default_rng(t).random((2, 3, 4))),
        lambda t: np.random.default_rng(t).random((2, 6, 4))[:, ::2, ::-1],
        lambda t: np.broadcast_to(np.float32(t), (2, 3)),
        lambda t: np.full((2, 3), np.nan if t % 2 else float(t)),
        lambda t: torch.full((2, 3), float(t), requires_grad=True),
        lambda t: torch.full((2, 3), t * 1j).conj().imag,  # a view whose sign is turned when it is read
        lambda t: np.full((2, 0), t),
    ],
)
def test_arrays_of_all_kinds(make: Callable[[int], Any], storage: str) -> None:
    writer = buffer_of(64, **STORAGES[storage]).writer_for(2, window=2)
    for t in range(5):
        later = {"observation": make(t + 1), "done": np.zeros(2, np.bool_), "reward": [1, 2]}
        writer.write({"observation": make(t), "next": later})
    rows = writer.read(torch.arange(5), 1)
    for key, shift in (("observation", 0), (("next", "observation"), 1)):
        made = [torch.as_tensor(np.array(as_array(make(t + shift)))) for t in range(5)]
        assert torch.equal(rows[key].nan_to_num(7), torch.stack(made)[:, 1].nan_to_num(7))
    assert rows["collector", "traj_ids"].tolist() == [1] * 5


def as_array(value: Any) -> Any:
    return value.numpy(force=True) if isinstance(value, torch.Tensor) else value


def stacks(count: int, steps: int) -> list[dict[Any, Any]]:
    """Steps of envs that stack four frames; the first of an episode is repeated."""
    frames = torch.randint(256, (steps + 1, count, 10, 10), dtype=torch.uint8).numpy()
    shown = np.stack([frames[0]] * 4, 1)
    written = []
    for t in range(steps):
        ended = t % 20 == 19
        later = np.concatenate([shown[:, 1:], frames[t + 1][:, None]], 1)
        flags = np.full(count, ended)
        step = {"observation": shown, ("next", "observation"): later, ("next", "terminated"): flags}
        written.append(step | {("next", "reward"): np.ones(count)})
        shown = np.stack([frames[t + 1][:, ::-1]] * 4, 1) if ended else later
    return written


@pytest.mark.parametrize("codec", [False, True])
def test_frames_are_shared(codec: bool) -> None:
    options: dict[str, Any] = {"compact_obs": True, "frame_stack": {"observation": 4}}
    if codec:
        options["codec"] = {"observation": "zstd"}
    buffer = buffer_of(4 * 120, **options)
    writer = buffer.writer_for(4, window=20)
    written = stacks(4, 130)
    for step in written:
        writer.write(step)
    for t in [writer.oldest, 57, 99, 119, 120, 129]:
        rows = writer.read(t, torch.arange(4))
        for key in ("observation", ("next", "observation")):
            assert torch.equal(rows[key], torch.from_numpy(written[t][key].copy()))
    if not codec:  # a frame for each row, one for each end and first row
        assert buffer.stats()["bytes"] / 480 < 100 * 1.2 + 100


def test_a_window_takes_no_more_bytes_than_a_collectors() -> None:
    """Rows written step by step, against the same rows in windows of the same length."""
    collected, stepped = (buffer_of(64 * 8 * 16, compact_obs=True) for _ in range(2))
    envs = Envs(8, lambda env, episode: 200)
    writer = stepped.writer_for(8)
    written = play(writer, envs, 64 * 16)
    for w in range(16):
        window = written[64 * w : 64 * (w + 1)]
        columns = {
            key: torch.from_numpy(np.stack([step[key] for step in window], 1)).flatten(0, 1)
            for key in written[0]
        }
        ids = columns["observation"][:, 1].long() * 8 + columns["observation"][:, 0].long()
        done = columns["next", "terminated"] | columns["next", "truncated"]
        marks = {"is_init": columns["observation"][:, 2:] == 0, ("next", "done"): done[:, None]}
        more = {
            ("collector", "traj_ids"): ids,
            ("next", "reward"): columns["next", "reward"][:, None].float(),
        }
        flags = {key: columns[key][:, None] for key in (("next", "terminated"), ("next", "truncated"))}
        batch = TensorDict({}, [512])
        for key, value in (columns | marks | more | flags).items():
            batch[key] = value
        collected.extend(batch)
    assert len(stepped) == len(collected) == 8192
    assert stepped.stats()["bytes"] <= 1.1 * collected.stats()["bytes"]


@pytest.mark.parametrize("codec", [False, True])
def test_frames_take_no_more_bytes_than_a_collectors(codec: bool) -> None:
    """The same with stacks of frames, plain and compressed: frames are shared in a window and with the one before."""
    options: dict[str, Any] = {"compact_obs": True, "frame_stack": {"observation": 4}}
    options |= {"codec": {"observation": "zstd"}} if codec else {}
    collected, stepped = (buffer_of(4 * 160, **options) for _ in range(2))
    writer = stepped.writer_for(4, window=16)
    for step in stacks(4, 160):
        writer.write(step)
    for first in range(0, 160, 16):
        steps = torch.arange(first, first + 16).repeat(4)
        collected.extend(writer.read(steps, torch.arange(4).repeat_interleave(16)))
    assert len(stepped) == len(collected) == 640
    assert stepped.stats()["bytes"] <= 1.1 * collected.stats()["bytes"]


def test_stepping_allocates_nothing_per_row() -> None:
    buffer = buffer_of(8 * 64 * 4, compact_obs=True)
    writer, envs = buffer.writer_for(8), Envs(8)
    written = [envs.next() for _ in range(64 * 8)]
    for step in written[: 64 * 6 + 1]:
        writer.write(step)
    tracemalloc.start(1)
    try:
        before = tracemalloc.get_traced_memory()[0]
        for step in written[64 * 6 + 1 : 64 * 7 - 1]:
            writer.write(step)
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert after - before < 2000  # over 62 steps of 8 rows


# --- samplers, transforms, storages ---------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
def test_n_step_looks_into_the_waiting_rows(storage: str) -> None:
    transform = MultiStepTransform(n_steps=3, gamma=0.5)
    stepped, at_once = (buffer_of(2 * 32, transform=transform, **STORAGES[storage]) for _ in range(2))
    waiting, all_stored = stepped.writer_for(2, window=8), at_once.writer_for(2, window=1)
    for step in play(waiting, Envs(2), 21):
        all_stored.write(step)
    steps, envs = torch.arange(42) // 2, torch.arange(42) % 2
    mine, theirs = waiting.read(steps, envs), all_stored.read(steps, envs)
    assert len(stepped) == 32 and len(at_once) == 42
    slots = torch.arange(42)  # windows of one step: step after step
    assert bool((theirs == at_once[slots]).all())
    assert bool((mine == theirs).all())


def test_prioritized_samples() -> None:
    sampler = PrioritizedSampler(64, alpha=1.0, beta=1.0)
    buffer = buffer_of(64, sampler=sampler, batch_size=16, compact_obs=True)
    writer = buffer.writer_for(2, window=4)
    play(writer, Envs(2), 10)
    buffer.update_priority(torch.arange(16), torch.zeros(16) + 1e-9)
    buffer.update_priority(torch.tensor([5]), 1.0)
    info = buffer.sample(return_info=True)[1]
    assert info["index"].tolist().count(5) > 12
    assert len(writer.sample()) == 16


def test_files(tmp_path: Any) -> None:
    buffer = buffer_of(storage=LazyMemmapStorage(64, scratch_dir=tmp_path, compact_obs=True))
    writer = buffer.writer_for(2, window=4)
    assert_reads(writer, play(writer, Envs(2), 39))


class Doubled(Transform):
    """Stores twice the action."""

    def inv(self, td: Any, /) -> Any:
        return td.clone(recurse=False).set("action", td["action"] * 2)

    def forward(self, td: Any, /) -> Any:
        return td.set("seen", td["action"])


class Half(Transform):
    """Stores every second row."""

    def inv(self, td: Any, /) -> Any:
        return td[::2]


def test_what_inv_leaves_out_has_no_position() -> None:
    buffer = buffer_of(64, transform=Half())
    writer, envs = buffer.writer_for(2, window=4), Envs(2)
    with pytest.raises(ValueError, match="turned 8 rows into 4"):
        play(writer, envs, 4)
    assert (len(buffer), len(writer)) == (4, 0)


def test_what_inv_changes_is_stored_before_it_is_read() -> None:
    buffer = buffer_of(64, transform=Doubled())
    writer = buffer.writer_for(2, window=4)
    written = play(writer, Envs(2), 6)
    rows = writer.read(torch.arange(6), 0)
    assert rows["seen"].tolist() == [2 * int(step["action"][0]) for step in written]
    assert len(buffer) == 12
    assert writer.read(5, 1)["seen"].tolist() == [2 * int(written[5]["action"][1])]


# --- positions ------------------------------------------------------------------------------------------------------


def test_samples_hold_stored_and_waiting_rows() -> None:
    buffer = buffer_of(2 * 8)
    writer = buffer.writer_for(2, window=4)
    play(writer, Envs(2, lambda env, episode: 1000), 15)
    drawn = writer.sample(2000)["observation"]
    assert drawn[:, 2].unique().tolist() == list(range(4, 15))
    assert drawn[:, 0].mean() == pytest.approx(0.5, abs=0.05)


def test_a_flush_stores_what_waits() -> None:
    buffer = buffer_of(2 * 16, compact_obs=True, sampler=SliceSampler(slice_len=3))
    writer, envs = buffer.writer_for(2, window=8), Envs(2)
    written = play(writer, envs, 3)
    writer.flush()
    writer.flush()
    assert len(buffer) == 6
    for more in (4, 1, 9, 8, 13, 7):
        written += play(writer, envs, more)
        assert_reads(writer, written)
        if more in (4, 13):
            writer.flush()
            assert_reads(writer, written)
    assert writer.oldest % 8 == 0 and len(writer) >= 32


def test_two_writers_and_an_extend_in_one_buffer() -> None:
    buffer = buffer_of(64, compact_obs=True)
    first, second = (buffer.writer_for(2, window=4, writer=number) for number in (0, 1))
    one, two = Envs(2), Envs(2)
    written = []
    for _ in range(5):
        written += play(first, one, 4)
        play(second, two, 3)
    ids = buffer[:]["collector", "traj_ids"]
    assert (ids >> 40).unique().tolist() == [0, 1]
    assert_reads(first, written)
    play(second, two, 60)  # overwrites the rows of the first
    assert len(first) == 0 and first.oldest == 20
    with pytest.raises(IndexError, match="0 to 0 were requested"):
        first.read(0, 0)


def test_a_buffer_that_was_emptied() -> None:
    buffer = buffer_of(32)
    writer, envs = buffer.writer_for(2, window=4), Envs(2)
    written = play(writer, envs, 10)
    buffer.empty()
    assert (writer.oldest, len(writer)) == (8, 4)
    writer.flush()
    buffer.empty()
    assert len(writer) == 0 and len(writer.read([], [])) == len(buffer_of(8).writer_for(1).read([], [])) == 0
    written += play(writer, envs, 11)
    assert_reads(writer, written)


def test_threads_sample_meanwhile() -> None:
    buffer = buffer_of(4 * 64, compact_obs=True, sampler=SliceSampler(slice_len=4), batch_size=32)
    writer, envs = buffer.writer_for(4, window=16), Envs(4)
    play(writer, envs, 20)
    stop, wrong = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            for rows in (writer.sample(32), buffer.sample()):
                now, later = rows["observation"], rows["next", "observation"]
                ids = rows["collector", "traj_ids"]
                if not (
                    torch.equal(later[:, 2], now[:, 2] + 1)
                    and torch.equal(later[:, :2], now[:, :2])
                    and torch.equal(ids, (now[:, 1] * 4 + now[:, 0]).long())
                ):
                    wrong.append(rows)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        play(writer, envs, 1500)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong


# --- trajectories -----------------------------------------------------------------------------------------------------


def test_an_env_that_is_reset_begins_a_trajectory() -> None:
    for told in (False, True):
        buffer = buffer_of(64, compact_obs=True)
        writer, envs = buffer.writer_for(2, window=4), Envs(2, lambda env, episode: 100)
        play(writer, envs, 6)
        envs.episode[1], envs.step[1] = 1, 0
        step = envs.next()
        if told:
            writer = buffer_of(64).writer_for(2, window=4)
            for is_init in (True, False):
                init = {"is_init": np.array([is_init, True])}
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    writer.write({**(step if is_init else envs.next()), **init})
            assert writer.read([0, 1], 1)["collector", "traj_ids"].tolist() == [1, 3]
            continue
        with pytest.warns(UserWarning, match="env 1 does not continue from the next observation"):
            writer.write(step)
        play(writer, envs, 3)
        rows: Any = writer.read(torch.arange(10), 1)
        assert rows["collector", "traj_ids"].tolist() == [1] * 6 + [3] * 4
        assert rows["is_init"].flatten().nonzero().flatten().tolist() == [0, 6]
        assert rows["next", "observation"][5].tolist() == [1, 0, 6]


@pytest.mark.parametrize("mistake", ["the reset's observation is next", "the reset is a row"])
def test_the_two_mistakes_at_an_end_are_told(mistake: str) -> None:
    writer, envs = buffer_of(64).writer_for(1, window=4), Envs(1, lambda env, episode: 3)
    with pytest.warns(UserWarning, match="final_obs"):
        for _ in range(4):
            step = envs.next()
            if step["next", "truncated"][0] or step["next", "terminated"][0]:
                if mistake.startswith("the reset's"):
                    step["next", "observation"] = envs.observation()
                else:
                    writer.write(step)
                    reset = {
                        "observation": step["next", "observation"],
                        ("next", "observation"): envs.observation(),
                    }
                    none = np.zeros(1, np.bool_)
                    step = {**step, **reset, ("next", "terminated"): none, ("next", "truncated"): none}
            writer.write(step)


@pytest.mark.parametrize("window", [1, 4, 16])
def test_resets_in_place_of_last_observations_are_told_in_any_window(window: int) -> None:
    writer, envs = buffer_of(960).writer_for(3, window=window), Envs(3)
    with pytest.warns(
        UserWarning, match=r"continues after its episode ended, .* of .* ended episodes so far\)"
    ):
        for _ in range(48):
            step = envs.next()
            ended = step["next", "terminated"] | step["next", "truncated"]
            step["next", "observation"] = np.where(
                ended[:, None], envs.observation(), step["next", "observation"]
            )
            writer.write(step)


@pytest.mark.cover(2)
@pytest.mark.parametrize("places", [2, 3, 1000])
@pytest.mark.parametrize("window", [1, 4, 50])
@pytest.mark.parametrize("seed", range(4))
def test_right_ends_at_the_start_are_not_told_of_where_observations_repeat(
    places: int, window: int, seed: int
) -> None:
    """Walks on a ring of places, whose resets are drawn, too: an end may be where the next episode begins."""
    random = np.random.default_rng(seed)
    writer = buffer_of(1200).writer_for(3, window=window)
    at = random.integers(places, size=3)
    alike = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(200):
            after = (at + random.integers(-1, 2, size=3)) % places
            ended = random.random(3) < 0.2
            writer.write(
                {
                    "observation": at,
                    ("next", "observation"): after,
                    ("next", "reward"): np.zeros(3),
                    ("next", "terminated"): ended,
                }
            )
            resets = random.integers(places, size=3)
            alike += int((resets == after)[ended].sum())
            at = np.where(ended, resets, after)
    assert alike > 20 or places == 1000


def test_what_a_network_says_is_not_compared() -> None:
    writer, envs = buffer_of(64).writer_for(2, window=4), Envs(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(12):
            made = {"hidden": np.random.rand(2, 4), ("next", "hidden"): np.random.rand(2, 4)}
            writer.write({**envs.next(), **made})
        writer = buffer_of(64).writer_for(1, window=4)
        for flag in (True, True, False, False, True):
            made = {"hidden": np.random.rand(1, 4), ("next", "hidden"): np.random.rand(1, 4)}
            writer.write({**made, ("next", "done"): np.array([flag])})


def test_ids_of_the_callers() -> None:
    buffer = buffer_of(64)
    writer, envs = buffer.writer_for(2, window=2), Envs(2, lambda env, episode: 100)
    for t in range(4):
        writer.write({**envs.next(), ("collector", "traj_ids"): np.array([7, 8 + t // 2])})
    rows: Any = writer.read(torch.arange(4), 1)
    assert rows["collector", "traj_ids"].tolist() == [8, 8, 9, 9]
    assert rows["is_init"].flatten().tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("given_flags", "expected"),
    [
        ({"terminated": [True, False]}, {"truncated": [False, False], "done": [True, False]}),
        ({"truncated": [True, False]}, {"terminated": [False, False], "done": [True, False]}),
        ({"terminated": [True, False], "done": [True, True]}, {"truncated": [False, True]}),
        ({"done": [False, True]}, {}),
    ],
)
def test_flags_are_filled_in(given_flags: dict[str, Any], expected: dict[str, Any]) -> None:
    writer = buffer_of(64).writer_for(2)
    step = {"observation": np.zeros((2, 3)), "next": {key: np.array(v) for key, v in given_flags.items()}}
    writer.write(step)
    rows: Any = writer.read(0, [0, 1])["next"]
    assert {key: column.flatten().tolist() for key, column in rows.items()} == given_flags | expected


@examples(25)
@given(data=st.data())
def test_whatever_is_done_the_rows_are_right(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4), "envs")
    window = data.draw(st.integers(1, 6), "window")
    windows = data.draw(st.integers(1, 4), "windows")
    compact = data.draw(st.booleans(), "compact")
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5), "lengths")
    buffer = buffer_of(count * window * windows, compact_obs=compact)
    writer = buffer.writer_for(count, window=window)
    envs = Envs(count, lambda env, episode: lengths[(env + episode) % len(lengths)])
    written: list[dict[Any, Any]] = []
    for act in data.draw(st.lists(st.sampled_from(["few", "many", "flush", "copy"]), max_size=8), "acts"):
        if act == "flush":
            writer.flush()
        elif act == "copy":
            writer = copy.deepcopy(writer)
        else:
            written += play(writer, envs, 2 if act == "few" else 2 * window + 1)
        if written:
            assert_reads(writer, written)


# --- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda writer: pickle.loads(pickle.dumps(writer))])
def test_a_copy_goes_on(copied: Callable[[StepWriter], StepWriter]) -> None:
    buffer = buffer_of(2 * 32, compact_obs=True, sampler=SliceSampler(slice_len=2))
    writer, envs = buffer.writer_for(2, window=8), Envs(2)
    written = play(writer, envs, 21)
    other = copied(writer)
    assert other.buffer is not buffer
    written += play(other, envs, 19)
    assert_reads(other, written)
    assert len(buffer) == 42 and len(writer) == 42


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda parts: pickle.loads(pickle.dumps(parts))])
@pytest.mark.parametrize("buffer_first", [True, False])
def test_a_buffer_and_its_writer_are_copied_together(
    copied: Callable[[Any], Any], buffer_first: bool
) -> None:
    """In any order: the copy of the buffer has the steps that the writer knows."""
    buffer = buffer_of(2 * 32, compact_obs=True)
    writer, envs = buffer.writer_for(2, window=8), Envs(2)
    written = play(writer, envs, 21)
    parts = {"buffer": buffer, "writer": writer} if buffer_first else {"writer": writer, "buffer": buffer}
    for _ in range(2):  # a copy of a copy, too
        parts = copied(parts)
        assert parts["writer"].buffer is parts["buffer"]
        assert_reads(parts["writer"], written)
        written += play(parts["writer"], envs, 3)
    assert len(buffer) == 42 and len(copied(parts["buffer"])) == 54


def test_state() -> None:
    buffer = buffer_of(2 * 32, compact_obs=True)
    writer = buffer.writer_for(2, window=8, writer=3)
    play(writer, Envs(2), 21)
    state = writer.state_dict()
    assert len(buffer) == 42
    ids = buffer[:]["collector", "traj_ids"]
    other = buffer_of(2 * 32, compact_obs=True)
    other.load_state_dict(buffer.state_dict())
    restarted = other.writer_for(2, window=8)
    restarted.load_state_dict(state)
    play(restarted, Envs(2), 8)
    new = restarted.read(torch.arange(8), 0)["collector", "traj_ids"]
    assert int(new.min()) > int(ids.max()) and (new >> 40).unique().tolist() == [3]
    assert len(other) == 58


def test_closing_stores_what_waits() -> None:
    buffer = buffer_of(64)
    with buffer.writer_for(2, window=8) as writer:
        written = play(writer, Envs(2), 3)
    assert len(buffer) == 6
    assert_reads(writer, written)
    with pytest.raises(RuntimeError, match="this step writer is closed"):
        writer.write(written[0])
    with buffer_of().writer_for(2):
        pass


# --- errors -----------------------------------------------------------------------------------------------------------


WRONG: dict[str, tuple[type[Exception], str, Callable[[dict[Any, Any]], Any]]] = {
    "envs": (ValueError, "has rows of 3 envs, this writer takes 2", lambda s: Envs(3).next()),
    "shape": (
        ValueError,
        r"'observation'\] is \[2, 4\]",
        lambda s: s | {"observation": np.zeros((2, 4), "f4")},
    ),
    "dtype": (
        TypeError,
        "is float64, the first step's was torch.float32",
        lambda s: s | {"observation": np.zeros((2, 3))},
    ),
    "more": (ValueError, "an entry 'more' that the first one", lambda s: s | {"more": np.zeros(2)}),
    "a marker": (
        ValueError,
        "an entry 'is_init' that the first one",
        lambda s: s | {"is_init": np.zeros(2, np.bool_)},
    ),
    "less": (ValueError, "lacks the entry 'action'", lambda s: {k: v for k, v in s.items() if k != "action"}),
    "flags": (TypeError, "is float64", lambda s: s | {("next", "terminated"): np.zeros(2)}),
    "no dict": (TypeError, "a step is a dict or a tensordict", lambda s: list(s.values())),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_step_unlike_the_first_one(name: str) -> None:
    error, match, change = WRONG[name]
    buffer = buffer_of(64)
    writer, envs = buffer.writer_for(2, window=4), Envs(2)
    written = play(writer, envs, 2)
    with pytest.raises(error, match=match):
        writer.write(change(Envs(2).next()))
    written += play(writer, envs, 4)
    assert_reads(writer, written)


FIRST: dict[str, tuple[type[Exception], str, dict[Any, Any]]] = {
    "envs": (ValueError, r"one row for each of the 2 envs, \[2, ...\], got \[3\]", {"action": np.zeros(3)}),
    "no flags": (KeyError, "nothing in the step says where episodes end", {"action": np.zeros(2)}),
    "flags": (TypeError, r"must be bool \[2\]", {("next", "done"): np.zeros(2)}),
    "a parent": (
        ValueError,
        "parent",
        {("next", "done"): np.array([True, False]), "a": np.zeros(2), ("a", "b"): np.zeros(2)},
    ),
    "objects": (TypeError, "array of numbers", {"name": ["a", "b"]}),
    "ids": (TypeError, "must be int64", {("collector", "traj_ids"): np.zeros(2)}),
    "contradiction": (
        ValueError,
        "leave it out",
        {
            ("next", "done"): np.array([True, False]),
            ("next", "terminated"): np.array([False, False]),
            ("next", "truncated"): np.array([False, False]),
        },
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_a_first_step_that_cannot_be_stored(name: str) -> None:
    error, match, step = FIRST[name]
    writer = buffer_of(64).writer_for(2)
    with pytest.raises(error, match=match):
        writer.write(step)
    assert writer.steps == 0
    assert_reads(writer, play(writer, Envs(2), 3))


def test_rows_that_the_buffer_refuses() -> None:
    buffer = buffer_of(64)
    buffer.extend(TensorDict({"other": torch.zeros(3)}, [3]))
    writer = buffer.writer_for(2, window=4)
    with pytest.raises(ValueError, match="that the first extend did not have"):
        play(writer, Envs(2), 1)
    assert (len(buffer), len(writer)) == (3, 0)


def test_a_window_that_is_refused_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = buffer_of(64)
    writer, envs = buffer.writer_for(2, window=4), Envs(2)
    full = MemoryError("full")

    def refuse(data: Any) -> Any:
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(buffer, "extend", refuse)
        written = play(writer, envs, 3)
        written.append(envs.next())
        for act in (lambda: writer.write(written[3]), lambda: writer.write(written[0]), writer.flush):
            with pytest.raises(MemoryError):
                act()
        assert (len(buffer), len(writer)) == (0, 8)
        assert_reads(writer, written)
    written += play(writer, envs, 2)
    assert len(buffer) == 8
    assert_reads(writer, written)


def test_arguments() -> None:
    with pytest.raises(ValueError, match="num_envs must be an integer of at least 1"):
        buffer_of().writer_for(0)
    with pytest.raises(ValueError, match="make the storage for 96 or 120 rows, or change window"):
        buffer_of(100).writer_for(3, window=8)
    with pytest.raises(
        ValueError, match="a multiple of the 8192 rows of a window \\(8 steps of 1024 envs\\)"
    ):
        buffer_of(1_000_000).writer_for(1024)
    with pytest.raises(ValueError, match=r"writer must be in \[0, 2\*\*23\)"):
        buffer_of().writer_for(2, writer=-1)
    wrong = [ListStorage(64), LazyTensorStorage(64, ndim=2)]
    for storage in wrong:
        with pytest.raises(TypeError, match="needs a storage of columns"):
            ReplayBuffer(storage=storage).writer_for(2)
    with pytest.raises(TypeError, match="TensorDictMaxValueWriter"):
        buffer_of(writer=TensorDictMaxValueWriter()).writer_for(2)
    writer = buffer_of().writer_for(2)
    with pytest.raises(RuntimeError, match="write a step first"):
        writer.sample(4)
    play(writer, Envs(2), 3)
    with pytest.raises(ValueError, match="batch_size"):
        writer.sample()
    for steps, envs in [(3, 0), (-1, 0), (0, 2), (0, -1)]:
        with pytest.raises(IndexError):
            writer.read(steps, envs)
    with pytest.raises(TypeError, match="integers"):
        writer.read(0.5, 0)
    assert repr(writer) == "StepWriter(3 steps of 2 envs, in windows of 64)"
