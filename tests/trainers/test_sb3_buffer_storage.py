"""FlatReplayBuffer: samples of every storage are SB3's bit by bit, how many bytes they take, and what is refused."""

import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

pytest.importorskip("stable_baselines3")

from stable_baselines3 import DQN
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback

from flatroll.buffers import LazyTensorStorage, PrioritizedSampler
from flatroll.trainers.sb3 import FlatVecEnv
from flatroll.trainers.sb3_buffer import FlatReplayBuffer

Step = tuple[Any, Any, Any, Any, Any, list[dict[str, Any]]]
FRAMES = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
BOX = gym.spaces.Box(-1, 1, (3,), np.float32)
TWO = gym.spaces.Discrete(2)


def pong(num_envs: int, steps: int, lengths: tuple[int, int] = (40, 70)) -> Iterator[Step]:
    """Steps of a game of Pong's looks: two bats and a ball on a plain field, four frames a stack, every ``lengths``
    steps the end of a point, by turns terminated and truncated."""
    random = np.random.default_rng(0)

    def frame(env: int, t: int) -> Any:
        picture = np.full((84, 84), 87, np.uint8)
        picture[:12], picture[76:] = 236, 236
        for column, row in ((8, 3 * t + env), (74, 2 * t)):
            picture[14 + row % 50 : 22 + row % 50, column : column + 2] = 147 + column
        picture[14 + (5 * t + 7 * env) % 60, 10 + (3 * t) % 62] = 255
        return picture

    clock = np.zeros(num_envs, np.int64)
    episode = np.zeros(num_envs, np.int64)
    stacks = np.stack([np.stack([frame(e, 0)] * 4) for e in range(num_envs)])
    for _ in range(steps):
        clock += 1
        new = np.stack([frame(e, int(clock[e] + 31 * episode[e])) for e in range(num_envs)])
        later = np.concatenate([stacks[:, 1:], new[:, None]], 1)
        done = np.array([clock[e] == lengths[e % 2] for e in range(num_envs)])
        infos = [{"TimeLimit.truncated": bool(done[e] and episode[e] % 2)} for e in range(num_envs)]
        action = random.integers(0, 6, num_envs)
        yield stacks, later, action, random.normal(size=num_envs).astype(np.float32), done, infos
        stacks = later.copy()
        for e in np.flatnonzero(done):
            episode[e] += 1
            clock[e] = 0
            stacks[e] = frame(int(e), int(31 * episode[e]))


def write(buffers: list[Any], steps: Iterator[Step]) -> None:
    for step in steps:
        for buffer in buffers:
            buffer.add(*step)


def assert_same_samples(ours: Any, theirs: Any, size: int = 64, draws: int = 5) -> None:
    assert (ours.pos, ours.full, ours.size()) == (theirs.pos, theirs.full, theirs.size())
    for seed in range(draws):
        np.random.seed(seed)
        ours_sample = ours.sample(size)
        np.random.seed(seed)
        their_sample = theirs.sample(size)
        for name, mine, other in zip(their_sample._fields, ours_sample, their_sample, strict=True):
            if other is None:
                assert mine is None, name
                continue
            for key in other if isinstance(other, dict) else [None]:
                a, b = (mine, other) if key is None else (mine[key], other[key])
                assert a.dtype is b.dtype, (name, key)
                assert torch.equal(a, b), (name, key)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compact": False},
        {"frame_stack": 4},
        {"frame_stack": 1},
        {"frame_stack": 4, "codec": "zstd"},
        {"codec": "zstd", "compact": False, "window": 7},
        {"frame_stack": 4, "storage": "files"},
        {"storage": partial(LazyTensorStorage, device="cpu"), "window": 1},
    ],
    ids=str,
)
def test_samples_are_those_of_sb3(options: dict[str, Any], tmp_path: Path) -> None:
    if options.get("storage") == "files":
        options = {**options, "storage": tmp_path / "files"}
    if "codec" in options:
        pytest.importorskip("zstandard")
    theirs = ReplayBuffer(101, FRAMES, gym.spaces.Discrete(6), "cpu", 2)
    ours = FlatReplayBuffer(101, FRAMES, gym.spaces.Discrete(6), "cpu", 2, **options)
    game = pong(2, 130, (9, 14))
    for steps in (3, 40, 20, 67):  # a few wait; the ring is nearly full; just wrapped; wrapped twice
        write([ours, theirs], (next(game) for _ in range(steps)))
        assert_same_samples(ours, theirs)
    if "storage" in options and isinstance(options["storage"], Path):
        assert list(options["storage"].glob("*.memmap"))


@pytest.mark.parametrize("window", [1, 4, 20])
def test_pickles_at_every_step_lose_no_row(window: int) -> None:
    """Each stores the rows that wait, in windows that are not full, while the ring of 20 steps wraps."""
    theirs = ReplayBuffer(40, BOX, TWO, "cpu", 2)
    ours = FlatReplayBuffer(40, BOX, TWO, "cpu", 2, window=window)
    for t in range(55):
        obs = np.array([[t, 0, 0], [t, 1, 0]], np.float32)
        step = (obs, obs + np.float32(1), np.array([0, 1]), np.zeros(2), np.zeros(2, np.bool_), [{}, {}])
        theirs.add(*step)
        ours.add(*step)
        if t % 7 < 5:
            ours = pickle.loads(pickle.dumps(ours))
        assert_same_samples(ours, theirs, draws=2)


@pytest.mark.parametrize("gamma", [0.99, 0.7, 1.0])
@pytest.mark.parametrize("n_steps", [2, 9])
def test_n_step_samples_are_those_of_sb3(n_steps: int, gamma: float) -> None:
    options: dict[str, Any] = {"n_steps": n_steps, "gamma": gamma}
    theirs = NStepReplayBuffer(101, FRAMES, gym.spaces.Discrete(6), "cpu", 2, **options)
    ours = FlatReplayBuffer(101, FRAMES, gym.spaces.Discrete(6), "cpu", 2, frame_stack=4, **options)
    game = pong(2, 120, (9, 14))
    for steps in (30, 90):
        write([ours, theirs], (next(game) for _ in range(steps)))
        assert_same_samples(ours, theirs)


def test_a_dict_with_frames_and_numbers() -> None:
    space = gym.spaces.Dict(camera=FRAMES, joints=BOX, mode=gym.spaces.Discrete(3))
    theirs = DictReplayBuffer(60, space, BOX, "cpu", 2)
    ours = FlatReplayBuffer(60, space, BOX, "cpu", 2, frame_stack={"camera": 4})
    now: dict[str, Any] = {}
    for frames, later, action, reward, done, infos in pong(2, 70, (9, 14)):
        joints, mode = np.random.normal(size=(2, 2, 3)).astype(np.float32), action % 3
        now = {"camera": frames, "joints": joints[0], "mode": mode}
        after = {"camera": later, "joints": joints[1], "mode": (mode + 1) % 3}
        for buffer in (ours, theirs):
            buffer.add(dict(now), dict(after), np.ones((2, 3)), reward, done, infos)
    assert_same_samples(ours, theirs)


def test_spaces_of_every_kind() -> None:
    """What SB3 casts on its way in, we cast: float64 actions, numbers [E], matrices of actions."""
    box64 = gym.spaces.Box(-1, 1, (2, 2), np.float64)
    for space, action_space in (
        (box64, box64),
        (gym.spaces.Discrete(5), TWO),
        (gym.spaces.MultiDiscrete([2, 3]), box64),
        (gym.spaces.MultiBinary(4), BOX),
    ):
        arguments: Any = (20, space, action_space, "cpu", 2)
        theirs, ours = ReplayBuffer(*arguments), FlatReplayBuffer(*arguments, window=4)
        space.seed(0), action_space.seed(0)
        for t in range(15):
            now, later, action = (np.stack([s.sample(), s.sample()]) for s in (space, space, action_space))
            done = np.array([t % 4 == 0, False])
            for buffer in (ours, theirs):
                buffer.add(now, later, action, np.array([t, -0.1]), done, [{}, {}])
        assert_same_samples(ours, theirs)


def test_frames_take_few_bytes() -> None:
    """Fewer than 220 a row, where SB3's arrays take 56,468; a window of frames waits besides."""
    pytest.importorskip("zstandard")
    buffer = FlatReplayBuffer(
        1920, FRAMES, gym.spaces.Discrete(6), "cpu", 8, frame_stack=4, codec="zstd", window=60
    )
    write([buffer], pong(8, 300, (200, 300)))
    rows = len(buffer.flat)
    assert rows == 1920 + 480  # with the window to spare
    assert buffer.flat.stats()["bytes"] / rows <= 220


def test_a_transform_changes_samples() -> None:
    def double(td: Any) -> Any:
        td["next", "reward"] = td["next", "reward"] * 2
        return td

    theirs, ours = (
        ReplayBuffer(20, BOX, TWO, "cpu", 1),
        FlatReplayBuffer(20, BOX, TWO, "cpu", 1, transform=double),
    )
    for t in range(10):
        now = np.full((1, 3), t, np.float32)
        for buffer, reward in ((theirs, 2.0 * t), (ours, 1.0 * t)):
            buffer.add(now, now + 1, np.zeros(1, np.int64), np.array([reward]), np.zeros(1, bool), [{}])
    assert_same_samples(ours, theirs)


class Priorities(BaseCallback):
    """After the updates of a rollout, the last rows drawn get new priorities."""

    def _on_rollout_start(self) -> None:
        buffer = self.model.replay_buffer
        if buffer.last_info:
            buffer.update_priority(torch.arange(len(buffer.last_info["index"])).float())

    def _on_step(self) -> bool:
        return True


@pytest.mark.parametrize("options", [{}, {"n_steps": 3, "gamma": 0.9}], ids=str)
def test_prioritized_draws(options: dict[str, Any]) -> None:
    sampler = PrioritizedSampler(1000, alpha=1.0, beta=0.5)
    kwargs = {"sampler": sampler, "window": 8, **options}
    model = DQN(
        "MlpPolicy",
        "CartPole-v1",
        learning_starts=4,
        buffer_size=100,
        replay_buffer_class=FlatReplayBuffer,
        replay_buffer_kwargs=kwargs,
        device="cpu",
    ).learn(150, callback=Priorities())
    buffer: Any = model.replay_buffer
    buffer.update_priority(0.0)
    rows = buffer.flat.sample(8)
    buffer.last_info = {"index": torch.arange(len(buffer.flat))}
    buffer.update_priority(0.0)
    buffer.last_info = {"index": torch.tensor([5])}
    buffer.update_priority(100.0)
    batch = buffer.sample(64)
    assert (buffer.last_info["index"] == 5).sum() > 50
    assert buffer.last_info["priority_weight"].min() <= 1
    assert batch.observations.shape == (64, 4) and rows.batch_size == (8,)
    assert (batch.discounts is None) == (not options)


def test_what_is_refused() -> None:
    make = partial(FlatReplayBuffer, 100, BOX, TWO, "cpu")
    with pytest.raises(
        ValueError, match="optimize_memory_usage=True is not needed: FlatReplayBuffer already stores"
    ):
        make(optimize_memory_usage=True)
    with pytest.raises(
        ValueError, match="buffer_size=100 holds 25 steps of 4 envs, less than a window of 30"
    ):
        make(n_envs=4, window=30)
    with pytest.raises(
        ValueError, match=r"frame_stack=4 needs observations \[4, ...\], those of 'observation'"
    ):
        make(frame_stack=4)
    with pytest.raises(ValueError, match=r"codec names \['x'\], the observation space has the keys \[\]"):
        make(codec={"x": "zstd"})
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\]"):
        make(n_steps=2, gamma=1.5)
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\]"):
        make(gamma=1.5)  # also where no reward is summed
    with pytest.raises(ValueError, match="n_steps must be"):
        make(n_steps=0)
    with pytest.raises(ValueError, match="gamma is needed with n_steps=3: it discounts the rewards"):
        make(n_steps=3)
    with pytest.raises(RuntimeError, match="there is no sample whose priorities could be set"):
        make().update_priority(1.0)


def test_what_a_look_into_it_shows() -> None:
    buffer = FlatReplayBuffer(100, BOX, TWO, "cpu", n_envs=4)
    assert str(buffer).startswith("FlatReplayBuffer(0 of 100 rows, 0 waiting, flat=ReplayBuffer(0 of")
    with pytest.raises(RuntimeError, match=r"steps that wait in a step writer: writer.flush\(\) stores them"):
        buffer.flat[:]
    step = np.zeros((4, *BOX.shape), BOX.dtype)
    for _ in range(3):
        buffer.add(step, step, np.zeros((4, 1), np.int64), np.zeros(4), np.zeros(4), [{}] * 4)
    assert str(buffer).startswith("FlatReplayBuffer(12 of 100 rows, 12 waiting, flat=ReplayBuffer(0 of")


def test_steps_that_do_not_fit() -> None:
    buffer = FlatReplayBuffer(100, BOX, TWO, "cpu", 2)

    def add(obs: Any = None, action: Any = None, count: int = 2) -> None:
        obs = np.zeros((2, 3), np.float32) if obs is None else obs
        action = np.zeros(2, np.int64) if action is None else action
        buffer.add(obs, obs, action, np.zeros(2), np.zeros(2, bool), [{}] * count)

    with pytest.raises(ValueError, match="the step has 3 envs, but this buffer was made for n_envs=2"):
        add(count=3)
    with pytest.raises(ValueError, match=r"obs must be \[2, 3\], envs first, .* got \[2, 4\]"):
        add(np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match=r"action must be \[2\]"):
        add(action=np.zeros((2, 2), np.int64))
    with pytest.raises(TypeError, match="action must be int64, as its space says, got float32"):
        add(action=np.zeros(2, np.float32))
    assert buffer.pos == len(buffer.writer) == 0  # nothing was written
    add()
    assert buffer.pos == 1


def test_a_loaded_buffer_of_other_envs(tmp_path: Path) -> None:
    options: dict[str, Any] = {"replay_buffer_class": FlatReplayBuffer, "buffer_size": 100, "device": "cpu"}
    first = DQN("MlpPolicy", "CartPole-v1", **options).learn(10)
    first.save_replay_buffer(tmp_path / "buffer")
    envs = gym.make_vec("CartPole-v1", 2, "sync")
    model = DQN("MlpPolicy", FlatVecEnv(envs), **options)
    model.load_replay_buffer(tmp_path / "buffer")
    with pytest.raises(ValueError, match="the step has 2 envs, but this buffer was made for n_envs=1"):
        model.learn(10)


def test_windows_are_long_where_that_costs_little() -> None:
    frames = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    kinds: Any = [(BOX, 10_000, {}, 256), (BOX, 1000, {}, 64), (BOX, 40, {}, 40), (frames, 10_000, {}, 64)]
    for space, rows, options, window in [
        *kinds,
        (BOX, 10_000, {"sampler": PrioritizedSampler(10_000, alpha=1.0, beta=0.5)}, 64),
    ]:
        assert FlatReplayBuffer(rows, space, TWO, "cpu", **options).writer.window == window


def test_the_steps_that_wait_take_16_megabytes_at_most() -> None:
    frames = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    for num_envs, window in ((4, 64), (8, 37), (16, 18), (128, 8)):
        ours = FlatReplayBuffer(num_envs * 100, frames, TWO, "cpu", num_envs, frame_stack=4)
        assert ours.writer.window == window


def test_a_window_that_cannot_be_stored_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last step was taken with it: the positions that SB3 draws stay those of the rows."""
    ours, theirs = FlatReplayBuffer(40, BOX, TWO, "cpu", 2, window=4), ReplayBuffer(40, BOX, TWO, "cpu", 2)

    def refuse(data: Any) -> Any:
        raise MemoryError("full")

    for t in range(50):
        obs = np.array([[t, 0, 0], [t, 1, 0]], np.float32)
        step = (obs, obs + np.float32(1), np.array([0, 1]), np.zeros(2), np.zeros(2, np.bool_), [{}, {}])
        theirs.add(*step)
        if t == 11:
            with monkeypatch.context() as patch, pytest.raises(MemoryError, match="full"):
                patch.setattr(ours.flat, "extend", refuse)
                ours.add(*step)
        else:
            ours.add(*step)
        assert (ours.pos, ours.full) == (theirs.pos, theirs.full)
        assert_same_samples(ours, theirs, draws=1)
