"""Stable-Baselines3: A2C's rollouts, DQN's replay buffers, and the VecEnv wrappers."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.boundaries import fixtures as given
from benchmarks.boundaries.cells import Cell, Tally
from benchmarks.boundaries.fixtures import PLAN, STEPS, Key, Row

PACKAGE = "stable-baselines3"
LANE = 10  # rows of each env in a ring: the write head stands within episodes


def fixtures() -> dict[str, Callable[[], Cell]]:
    """Return a function for each fixture; there are no samples of sequences and no recurrent policies here."""
    return {
        "truncated_end": lambda: one_step_targets(lambda row: row.truncated and not row.terminated),
        "both_ends": lambda: one_step_targets(lambda row: row.truncated and row.terminated),
        "last_observation": last_observation,
        "dead_rows": dead_rows,
        "n_step": n_step,
        "frame_stacks": frame_stacks,
        "advantages": advantages,
        "episode_statistics": episode_statistics,
        "normaliser": normaliser,
        "saved_buffer": saved_buffer,
        "passes": passes,
        "last_info": last_info,
    }


def vec_env(**options: Any) -> Any:
    from stable_baselines3.common.vec_env import DummyVecEnv

    return DummyVecEnv(given.scripted_envs(PLAN, **options))


def a2c(lmbda: float) -> Any:
    """Return A2C with the scripted value function, after it has collected one window."""
    import torch
    from stable_baselines3 import A2C

    model = A2C(
        "MlpPolicy",
        vec_env(),
        learning_rate=0.0,  # so that the value function stays the scripted one
        n_steps=STEPS,
        gamma=given.GAMMA,
        gae_lambda=lmbda,
        policy_kwargs={"net_arch": []},
        device="cpu",
    )
    with torch.no_grad():
        model.policy.value_net.weight.copy_(torch.tensor([given.VALUE_WEIGHTS]))
        model.policy.value_net.bias.fill_(given.VALUE_BIAS)
    model.learn(STEPS * PLAN.num_envs)
    return model


def dqn(env: Any, steps: int = STEPS, lane: int = STEPS, **options: Any) -> Any:
    """Return a DQN that has stored rows of an env and never trained."""
    from stable_baselines3 import DQN

    model = DQN(
        "MlpPolicy",
        env,
        learning_starts=10**6,
        buffer_size=lane * PLAN.num_envs,
        gamma=given.GAMMA,
        device="cpu",
        **options,
    )
    model.learn(steps * PLAN.num_envs)
    return model


def rows_of(observations: Any) -> list[Row]:
    return [PLAN.row(given.key_of(observation)) for observation in observations]


def target_of(sample: Any, gamma: Any) -> Any:
    """Return the targets of a sample, as DQN.train computes them, with the scripted values."""
    after = given.value(sample.next_observations.numpy())
    going = 1 - sample.dones.numpy().squeeze(-1)
    return sample.rewards.numpy().squeeze(-1) + going * gamma * after


def one_step_targets(chosen: Callable[[Row], bool]) -> Cell:
    """Of A2C (returns with lambda = 0), and of rows that DQN's buffer samples."""
    tally = Tally()
    rollout = a2c(lmbda=0.0).rollout_buffer
    for row, target in zip(rows_of(rollout.observations), rollout.returns.flatten(), strict=True):
        if chosen(row):
            tally.compare(("A2C", row.key), target, PLAN.target(row))

    np.random.seed(0)
    sample = dqn(vec_env()).replay_buffer.sample(400)
    seen: dict[Key, tuple[Row, float]] = {}
    for row, target in zip(rows_of(sample.observations.numpy()), target_of(sample, given.GAMMA), strict=True):
        if chosen(row):
            seen[row.key] = (row, target)
    for row, target in seen.values():
        tally.compare(("DQN", row.key), target, PLAN.target(row))
    return tally.cell("target differs")


def stored(buffer: Any) -> Any:
    """Return observations and next observations of a replay buffer, ``[N, ...]`` each."""
    return [array.reshape(-1, *array.shape[2:]) for array in (buffer.observations, buffer.next_observations)]


def last_observation() -> Cell:
    tally = Tally()
    for before, after in zip(*stored(dqn(vec_env()).replay_buffer), strict=True):
        row = PLAN.row(given.key_of(before))
        if row.done:
            tally.compare(row.key, after, row.next_observation)
    return tally.cell("not the last observation", note=memory_saving_note())


def memory_saving_note() -> str:
    """Say what the option that keeps each observation once does, which is not the default."""
    options: dict[str, Any] = {"replay_buffer_kwargs": {"handle_timeout_termination": False}}
    buffer = dqn(vec_env(), optimize_memory_usage=True, **options).replay_buffer
    tally = Tally()
    for t in range(1, STEPS - 1):  # the newest next observation lies in the first row's place
        for env in range(PLAN.num_envs):
            row = PLAN.row(given.key_of(buffer.observations[t, env]))
            if row.done:
                tally.compare(row.key, buffer.observations[t + 1, env], row.next_observation)
    return (
        f"With optimize_memory_usage=True, which excludes the treatment of time limits, {tally.wrong} of {tally.of} "
        "are the next episode's first ones."
    )


def dead_rows() -> Cell:
    tally = Tally()
    for before, after in zip(*stored(dqn(vec_env()).replay_buffer), strict=True):
        tally.check(given.key_of(before), given.follows(before, after))
    return tally.cell("no transition")


def newest_rows(buffer: Any) -> dict[int, Key]:
    keys = [given.key_of(observation) for observation in buffer.observations[buffer.pos - 1]]
    return {key[0]: key for key in keys}


def check_n_step(buffer: Any, ends: set[Key], tally: Tally) -> None:
    """Compare the targets of all rows that are sampled; ``ends`` are rows that no stored row continues."""
    np.random.seed(0)
    sample = buffer.sample(600)
    targets = target_of(sample, sample.discounts.numpy().squeeze(-1))
    seen = dict(zip(map(given.key_of, sample.observations.numpy()), targets, strict=True))
    for key, target in seen.items():
        newest = next((end for end in ends if end[:2] == key[:2]), None)
        tally.compare(key, target, PLAN.n_step_target(key, newest=newest))


def n_step() -> Cell:
    tally = Tally()
    for steps in (LANE - 3, LANE + 4, 2 * LANE, STEPS):  # a ring that is not full, and heads at three places
        buffer = dqn(vec_env(), steps, LANE, n_steps=given.N_STEP).replay_buffer
        check_n_step(buffer, set(newest_rows(buffer).values()), tally)
    return tally.cell("n-step target differs")


def frame_stacks() -> Cell:
    """VecFrameStack fills with zeros before an episode's first frame, as it documents."""
    from stable_baselines3.common.vec_env import VecFrameStack

    tally = Tally()
    for before, after in zip(*stored(dqn(VecFrameStack(vec_env(), given.STACK)).replay_buffer), strict=True):
        key = given.key_of(before[-3:])
        later = (key[0], key[1], key[2] + 1)
        for name, frames in ((key, before), (later, after)):
            tally.compare(name, frames.reshape(given.STACK, 3), PLAN.stack(name, pad="zero"))
    return tally.cell("frames of another episode")


def advantages() -> Cell:
    rollout = a2c(given.LAMBDA).rollout_buffer
    right = given.advantages(PLAN.rows(STEPS))
    keys = [row.key for step in PLAN.rows(STEPS) for row in step]
    by_key = dict(zip(keys, right.reshape(-1), strict=True))
    tally = Tally()
    for row, gain in zip(rows_of(rollout.observations), rollout.advantages.flatten(), strict=True):
        tally.compare(row.key, gain, by_key[row.key])
    return tally.cell("advantage differs")


def play(env: Any) -> list[tuple[Any, Any, Any, Any]]:
    """Step a VecEnv without an agent; return what each step returned."""
    env.reset()
    actions = np.zeros(PLAN.num_envs, np.int64)
    return [env.step(actions) for _ in range(STEPS)]


def episode_statistics() -> Cell:
    """VecEnvs reset in the step that ends an episode; there are no resets by a mask."""
    from stable_baselines3.common.vec_env import VecMonitor

    tally = Tally()
    for step, played in zip(PLAN.rows(STEPS), play(VecMonitor(vec_env())), strict=True):
        for row, info in zip(step, played[3], strict=True):
            if row.done:
                told = info["episode"]
                tally.compare(row.key, (told["r"], told["l"]), PLAN.episode_return(row.env, row.episode))
    return tally.cell("return or length differs")


def normaliser() -> Cell:
    """VecNormalize counts what the policy acts on; it scales last observations by it, and does not count them."""
    from stable_baselines3.common.vec_env import VecNormalize

    rows = PLAN.rows(STEPS)
    env = VecNormalize(vec_env(one_hot=True), gamma=given.GAMMA, clip_reward=1e6)
    rewards = np.array([step[1] for step in play(env)])
    tally = Tally()
    acted_on = [row.key for step in rows for row in step]
    also_seen = [(row.env, row.episode, row.step + 1) for step in rows for row in step if row.done]
    statistics: Any = env.obs_rms
    counted = statistics.count * statistics.mean
    for key, right in given.counts_are_right(PLAN, counted, acted_on, also_seen):
        tally.check(key, right)
    tally.compare_all(acted_on, rewards.reshape(-1), given.scaled_rewards(rows).reshape(-1))
    return tally.cell("counted twice or never")


def saved_buffer() -> Cell:
    """A buffer of n-step rows saved within episodes, loaded by a new model that learns on: envs are reset there."""
    from stable_baselines3 import DQN

    # Nine vector steps: both envs stand within an episode.
    first = dqn(vec_env(), 9, 3 * LANE, n_steps=given.N_STEP)
    ends = set(newest_rows(first.replay_buffer).values())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "buffer.pkl"
        first.save_replay_buffer(file)
        env = vec_env()
        for scripted in env.envs:  # a new process would begin anew: later episodes keep names apart
            scripted.unwrapped.episode = 7
        options: dict[str, Any] = {
            "buffer_size": 3 * LANE * PLAN.num_envs,
            "gamma": given.GAMMA,
            "device": "cpu",
        }
        second = DQN("MlpPolicy", env, learning_starts=10**6, n_steps=given.N_STEP, **options)
        second.load_replay_buffer(file)
    second.learn(9 * PLAN.num_envs, reset_num_timesteps=False)

    tally = Tally()
    check_n_step(second.replay_buffer, ends | set(newest_rows(second.replay_buffer).values()), tally)
    return tally.cell(
        "n-step sums run over the seam",
        note="One-step rows are right: only the n-step buffer looks past the row where the first run stopped.",
        script="sb3_n_step_seam.sh",
    )


def passes() -> Cell:
    rollout = a2c(given.LAMBDA).rollout_buffer
    tally = Tally()
    held = [row.key for step in PLAN.rows(STEPS) for row in step]
    for size in (7, 16):
        drawn = [given.key_of(row) for batch in rollout.get(size) for row in batch.observations.numpy()]
        for key in held:
            tally.check((size, key), drawn.count(key) == 1)
    return tally.cell("not once in a pass")


def last_info() -> Cell:
    tally = Tally()
    for step, played in zip(PLAN.rows(STEPS), play(vec_env()), strict=True):
        for row, info in zip(step, played[3], strict=True):
            if row.done:
                tally.compare(row.key, info["row"], row.reward)
    return tally.cell("not the last step's")
