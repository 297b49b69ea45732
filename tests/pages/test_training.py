"""The pages on training, losses, trainers and porting: what their blocks store is what the games' own rules give."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from plain_loop import assert_slices, ends_of, plain_gae
from tensordict import TensorDict

TRAINING = "docs/training.md"
OFF_POLICY = "docs/losses/off_policy.md"
TRAINERS = "docs/trainers.md"
OTHERS = "docs/other_trainers.md"
TORCHRL = "docs/porting/torchrl.md"
SB3 = "docs/porting/sb3.md"
TIANSHOU = "docs/porting/tianshou.md"

EARTH, POLE, HALF, FORCE, TAU = 9.8, 0.1, 0.5, 10.0, 0.02  # CartPole's numbers


def cartpole_after(state: np.ndarray[Any, Any], action: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The states ``[N, 4]`` after one step, by the equations of motion (Barto, Sutton and Anderson, 1983)."""
    x, speed, angle, turn = state.astype(np.float64).T
    sine, cosine = np.sin(angle), np.cos(angle)
    push = np.where(action == 1, FORCE, -FORCE)
    pushed = (push + POLE * HALF * turn**2 * sine) / (1.0 + POLE)
    turning = (EARTH * sine - cosine * pushed) / (HALF * (4 / 3 - POLE * cosine**2 / (1.0 + POLE)))
    speeding = pushed - POLE * HALF * turning * cosine / (1.0 + POLE)
    return np.stack([x + TAU * speed, speed + TAU * speeding, angle + TAU * turn, turn + TAU * turning], -1)


def assert_cartpole(rows: TensorDict) -> None:
    """Each row is a step of CartPole, and the rows of an episode follow one another.

    Of rows without next observations, those that another row shows are compared.
    """
    now = rows["observation"].numpy()
    action = rows["action"].reshape(len(rows)).numpy()
    moved = cartpole_after(now, action)
    fallen = (np.abs(moved[:, 0]) > 2.4) | (np.abs(moved[:, 2]) > 12 * 2 * np.pi / 360)
    assert rows["next", "terminated"].flatten().tolist() == fallen.tolist()
    assert (rows["next", "reward"] == 1).all()
    first = rows["is_init"].flatten().numpy()
    assert (np.abs(now[first]) <= 0.05).all()  # where CartPole's episodes begin
    inside = ~np.array(ends_of(rows))[:-1]
    np.testing.assert_allclose(now[1:][inside], moved[:-1][inside], rtol=1e-4, atol=1e-5)
    after = rows.get(("next", "observation"), None)
    if after is not None:
        np.testing.assert_allclose(after.numpy(), moved, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(after[:-1][inside].numpy(), now[1:][inside])


# training.md


def test_recurrent_ppo_on_a_memory_task(until: Any) -> None:
    space = until(TRAINING, "the return rises:")
    rows, env = space["buffer"][:], space["env"].unwrapped
    assert len(rows) == 1536
    for episode in rows.reshape(32, 48):  # 16 envs, two whole episodes each
        suit = episode["observation"].argmax(-1)
        assert episode["is_init"].flatten().tolist() == [True] + 47 * [False]
        assert episode["next", "terminated"].flatten().tolist() == 47 * [False] + [True]
        assert torch.equal(episode["next", "observation"][:-1], episode["observation"][1:])
        right = episode["action"][env.k :] == suit[: -env.k]
        expected = torch.where(right, 1.0, -1.0) / (env.steps - env.k)
        torch.testing.assert_close(
            episode["next", "reward"].flatten(), torch.cat([torch.zeros(env.k), expected])
        )
        total = episode["next", "reward"].flatten().cumsum(0)
        torch.testing.assert_close(episode["next", "episode_reward"].flatten(), total)
        assert not episode["recurrent_state"][0].any()
    advantage = plain_gae(rows, rows["state_value"], rows["next", "state_value"], 0.95, 0.9)
    torch.testing.assert_close(rows["advantage"].flatten().double(), advantage, rtol=1e-4, atol=1e-5)
    whole = space["returns"][-1]
    last = rows["next", "episode_reward"].flatten()[rows["next", "done"].flatten()]
    torch.testing.assert_close(whole, last.mean())


def test_recurrent_ppo_with_modules_of_your_own(until: Any) -> None:
    space = until(TRAINING, 'print(collector.frames, "frames,"')
    rows, batch = space["buffer"][:], space["batch"]
    assert_cartpole(rows)
    assert len(rows) == 1024 and torch.equal(rows["observation"], batch["observation"])
    value, after = rows["state_value"], rows["next", "state_value"]
    ends = torch.tensor(ends_of(rows))
    torch.testing.assert_close(after[:-1][~ends[:-1]], value[1:][~ends[:-1]], rtol=1e-4, atol=1e-5)
    advantage = plain_gae(rows, value, after, 0.99, 0.95)
    torch.testing.assert_close(rows["advantage"].flatten().double(), advantage, rtol=1e-4, atol=1e-4)
    target = rows["advantage"] + value
    torch.testing.assert_close(rows["value_target"], target, rtol=1e-4, atol=1e-4)
    starts = rows["is_init"].flatten()
    assert not rows["recurrent_state"][starts].any()


# losses/off_policy.md


def test_prioritized_dqn_with_three_step_returns(until: Any) -> None:
    space = until(OFF_POLICY, "buffer.update_tensordict_priority(sample)")
    rows, sample = space["buffer"].storage[:], space["sample"]
    assert len(rows) == 1024
    rows = rows[rows["collector", "traj_ids"].argsort(stable=True)]  # episodes across the collector's windows
    assert_cartpole(rows)
    place = {row.numpy().tobytes(): i for i, row in enumerate(rows["observation"])}
    assert len(place) == len(rows)
    ends = ends_of(rows)
    for row in sample.unbind(0):
        first = place[row["observation"].numpy().tobytes()]
        last = first
        while last < first + 2 and not ends[last]:
            last += 1
        steps = last - first + 1
        assert row["next", "reward"].item() == pytest.approx(sum(0.99**k for k in range(steps)), rel=1e-5)
        assert row["gamma"].item() == pytest.approx(0.99**steps, rel=1e-5)
        assert row["steps_to_next_obs"].item() == steps
        assert torch.equal(row["next", "observation"], rows["next", "observation"][last])
        assert torch.equal(row["next", "terminated"], rows["next", "terminated"][last])


def test_recurrent_dqn(until: Any) -> None:
    space = until(OFF_POLICY, "loss = DQNLoss(network, double_dqn=True, burn_in=4)")
    rows = space["buffer"][:]
    assert len(rows) == 512
    assert_cartpole(rows)
    assert assert_slices(space["buffer"].sample(), rows, 16) >= 16


# normalisation.md


def test_statistics_that_are_copied(until: Any) -> None:
    space = until("docs/normalisation.md", "test_env.load_state_dict(env.state_dict())")
    shown, _ = gym.make_vec("CartPole-v1", num_envs=8).reset(seed=0)
    for name in ("env", "test_env"):
        state = space[name].state_dict()
        assert state["observation.count"].item() == 8
        np.testing.assert_allclose(state["observation.mean"], shown.mean(0, np.float64), rtol=1e-6)
        np.testing.assert_allclose(state["observation.var"], shown.var(0, np.float64), rtol=1e-6)
    expected = (shown - shown.mean(0)) / np.sqrt(shown.var(0) + 1e-8)
    np.testing.assert_allclose(space["obs"], expected, atol=2e-3)


# trainers.md


def test_the_buffer_of_a_dqn(until: Any) -> None:
    space = until(TRAINERS, "slices.extend(rows)")
    rows = space["rows"]
    assert len(rows) == 500
    assert_cartpole(rows)
    stored = space["slices"]
    assert torch.equal(stored[:]["observation"], rows["observation"])
    sample = stored.sample()
    assert len(sample) == 64
    ends = ends_of(sample)
    for i in range(63):
        assert ends[i] or torch.equal(sample["next", "observation"][i], sample["observation"][i + 1])


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The steps that SB3 passes to FlatReplayBuffer, copied as they come."""
    from flatroll.trainers.sb3_buffer import FlatReplayBuffer

    steps: list[tuple[Any, ...]] = []
    add = FlatReplayBuffer.add

    def add_and_record(
        buffer: Any, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any
    ) -> None:
        cut = np.array([info.get("TimeLimit.truncated", False) for info in infos])
        steps.append(tuple(np.array(x) for x in (obs, next_obs, action, reward, done & ~cut)))
        add(buffer, obs, next_obs, action, reward, done, infos)

    monkeypatch.setattr(FlatReplayBuffer, "add", add_and_record)
    return steps


def assert_as_recorded(buffer: Any, steps: list[tuple[Any, ...]]) -> None:
    """Every row of the buffer is the one that was passed to it, bit for bit; float64 actions as float32, as in SB3."""
    count = len(steps)
    assert buffer.pos == count
    envs = steps[0][0].shape[0]
    at = np.repeat(np.arange(count), envs)
    env = np.tile(np.arange(envs), count)
    rows = buffer.writer.read(at, env)
    names = ("observation", ("next", "observation"), "action", ("next", "reward"), ("next", "terminated"))
    for position, name in enumerate(names):
        given = np.stack([step[position] for step in steps]).reshape(count * envs, -1)
        kept = rows[name].reshape(count * envs, -1).numpy()
        np.testing.assert_array_equal(kept, given.astype(np.float32) if name == "action" else given)


def test_the_buffer_of_a_sac_on_a_pool(until: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("stable_baselines3")
    steps = recorded(monkeypatch)
    space = until(TRAINERS, "pool = envpool.make_gymnasium")
    steps = [step for step in steps if len(step[0]) == 4]  # without those of the page's other models
    assert len(steps) == 100
    assert_as_recorded(space["model"].replay_buffer, steps)


def test_the_buffer_of_stacked_frames(until: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block's names come from the other blocks of its page."""
    for package in ("stable_baselines3", "envpool", "zstandard"):
        pytest.importorskip(package)
    steps = recorded(monkeypatch)
    import page_blocks

    page = page_blocks.ROOT / TRAINERS
    blocks = page_blocks.blocks_of(page.read_text())
    code = blocks[page_blocks.block_with(page, 'options = {"frame_stack": 4')].text
    names: dict[str, Any] = {}
    exec(
        "import envpool\n"
        "from stable_baselines3 import DQN\n"
        "from flatroll.trainers.sb3 import FlatReplayBuffer, FlatVecEnv\n"
        + code.replace(
            "replay_buffer_kwargs=options", 'replay_buffer_kwargs=options, buffer_size=4096, device="cpu"'
        ),
        names,
    )
    names["model"].learn(8 * 40)
    assert_as_recorded(names["model"].replay_buffer, steps)


def test_hindsight_goals(until: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("stable_baselines3")
    space = until(TRAINERS, "hindsight = HindsightTransform(")
    rows = space["model"].replay_buffer.writer
    rows.flush()
    stored = space["model"].replay_buffer.flat[:]
    assert len(stored) == 300
    bits = stored["observation", "achieved_goal"]
    flipped = bits.clone()
    at = torch.arange(300)
    chosen = stored["action"].flatten()
    flipped[at, chosen] = 1 - flipped[at, chosen]
    assert torch.equal(stored["next", "observation", "achieved_goal"], flipped)
    reached = (flipped == stored["observation", "desired_goal"]).all(-1)
    assert torch.equal(stored["next", "terminated"].flatten(), reached)
    assert torch.equal(stored["next", "reward"].flatten(), reached.float() - 1)


# other_trainers.md and porting/


def test_rows_for_tianshou_and_back(until: Any) -> None:
    pytest.importorskip("tianshou", exc_type=ImportError)
    space = until(OTHERS, "again = from_buffer(buffer)")
    batch, buffer, again = space["batch"], space["buffer"], space["again"]
    assert_cartpole(batch)
    assert len(buffer) == len(again) == len(batch) == 400
    pairs = {"obs": "observation", "obs_next": ("next", "observation"), "act": "action"}
    for theirs, ours in pairs.items():
        np.testing.assert_array_equal(buffer[:400][theirs], batch[ours].numpy())
        assert torch.equal(again[ours], batch[ours])
    ends = np.array(ends_of(batch))
    assert (buffer.next(np.arange(400)) == np.where(ends, np.arange(400), np.arange(400) + 1)).all()


def test_tianshou_s_forms(until: Any) -> None:
    pytest.importorskip("tianshou", exc_type=ImportError)
    import page_blocks

    from flatroll.buffers import LazyTensorStorage, ReplayBuffer
    from flatroll.rollouts import rollout
    from flatroll.wrappers import StepCounter

    env = StepCounter(gym.make_vec("CartPole-v1", num_envs=2))
    batch = rollout(env, num_steps=50, seed=0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    buffer.extend(batch)
    page = page_blocks.ROOT / TIANSHOU
    code = page_blocks.blocks_of(page.read_text())[
        page_blocks.block_with(page, "theirs = to_batch(batch)")
    ].text
    names: dict[str, Any] = {"batch": batch, "buffer": buffer}
    exec(code, names)
    assert_cartpole(batch)
    np.testing.assert_array_equal(names["theirs"].obs, batch["observation"].numpy())
    grouped = batch[
        batch["collector", "traj_ids"].argsort(stable=True)
    ]  # a buffer's rows, trajectory by trajectory
    np.testing.assert_array_equal(names["stored"][:100].obs_next, grouped["next", "observation"].numpy())
    for key in ("observation", "action", ("next", "observation"), ("next", "reward"), ("next", "terminated")):
        assert torch.equal(names["rows"][key], grouped[key]), key


def test_rows_of_a_torchrl_buffer(until: Any) -> None:
    from flatroll.buffers import LazyTensorStorage, ReplayBuffer

    space = until(TORCHRL, "theirs = TensorDictReplayBuffer(")
    rows, theirs, ours = space["rows"], space["theirs"], space["ours"]
    assert len(rows) == 60
    whole = TensorDict({key: rows[key] for key in ("observation", "next", "is_init")}, [60])
    whole["collector", "traj_ids"] = torch.arange(60) // 20  # three rollouts
    whole["action"] = rows["action"].argmax(-1)  # TorchRL's CartPole has one-hot actions
    assert_cartpole(whole)
    again = ReplayBuffer(storage=LazyTensorStorage(100, compact_obs=True), batch_size=8)
    again.loads(Path(space["folder"]) / "buffer")
    for key in ("observation", "action", "advantage", ("next", "observation"), ("next", "reward")):
        assert torch.equal(theirs[:][key], rows[key]), key
        assert torch.equal(ours[:][key], rows[key]), key
        assert torch.equal(again[:][key], rows[key]), key


def test_a_dqn_with_sb3_s_settings(until: Any) -> None:
    rows = until(SB3, "target = HardUpdate(loss, value_network_update_interval=50)")["buffer"][:]
    assert len(rows) == 2048
    assert_cartpole(rows)
