"""sb3-contrib: RecurrentPPO's rollouts. Its other agents use Stable-Baselines3's buffers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.boundaries import fixtures as given
from benchmarks.boundaries.cells import Cell, Tally
from benchmarks.boundaries.fixtures import PLAN, Key, Row

PACKAGE = "sb3-contrib"
WINDOW = 8  # vector steps of a rollout: windows cut episodes


def fixtures() -> dict[str, Callable[[], Cell]]:
    """Return a function for each fixture."""
    return {
        "truncated_end": lambda: one_step_targets(lambda row: row.truncated and not row.terminated),
        "both_ends": lambda: one_step_targets(lambda row: row.truncated and row.terminated),
        "dead_rows": dead_rows,
        "hidden_state": hidden_state,
        "advantages": advantages,
        "passes": passes,
    }


def rollouts(lmbda: float, look: Callable[[Any], None]) -> None:
    """Let a RecurrentPPO that never changes collect three windows; ``look`` at the model after each."""
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            look(self.model)

    model = RecurrentPPO(
        "MlpLstmPolicy",
        DummyVecEnv(given.scripted_envs(PLAN)),
        learning_rate=0.0,
        n_steps=WINDOW,
        batch_size=WINDOW,
        n_epochs=1,
        gamma=given.GAMMA,
        gae_lambda=lmbda,
        policy_kwargs={"net_arch": [], "lstm_hidden_size": 4},
        seed=0,
        device="cpu",
    )
    model.learn(3 * WINDOW * PLAN.num_envs, callback=Look())


def value_alone(policy: Any, key: Key) -> float:
    """Return 100 times the critic's value at (env, episode, step), run from zeros over that episode alone."""
    import torch

    frames = torch.tensor(
        [[(*key[:2], step)] for step in range(key[2] + 1)], dtype=torch.float32
    )  # [T, 1, 3]
    with torch.no_grad():
        output, _ = policy.lstm_critic(frames)
        return 100 * float(policy.value_net(policy.mlp_extractor.forward_critic(output[-1])))


def keys_of(buffer: Any) -> list[list[Key]]:
    """Return the keys of a rollout ``[T][E]`` whose arrays were not flattened yet."""
    return [[given.key_of(observation) for observation in step] for step in buffer.observations]


def one_step_targets(chosen: Callable[[Row], bool]) -> Cell:
    """Returns with lambda = 0; V of the last observation is the critic's own, over that episode alone."""
    tally = Tally()

    def look(model: Any) -> None:
        buffer = model.rollout_buffer
        for t, step in enumerate(keys_of(buffer)):
            for env, key in enumerate(step):
                row = PLAN.row(key)
                if not chosen(row):
                    continue
                right = 100 * row.reward
                if not row.terminated:
                    right += given.GAMMA * value_alone(model.policy, (*key[:2], key[2] + 1))
                tally.compare(key, 100 * buffer.returns[t, env], right)

    rollouts(0.0, look)
    return tally.cell("target differs")


def dead_rows() -> Cell:
    tally = Tally()
    expected = iter(PLAN.rows(3 * WINDOW))

    def look(model: Any) -> None:
        for step in keys_of(model.rollout_buffer):
            for key, row in zip(step, next(expected), strict=True):
                tally.check(key, key == row.key)

    rollouts(given.LAMBDA, look)
    return tally.cell("no transition")


def hidden_state() -> Cell:
    tally = Tally()

    def look(model: Any) -> None:
        import torch

        policy = model.policy
        buffer = model.rollout_buffer
        for t, step in enumerate(keys_of(buffer)):
            for env, key in enumerate(step):
                tally.compare(("acting", key), 100 * buffer.values[t, env], value_alone(policy, key))

        for batch in buffer.get(WINDOW):
            with torch.no_grad():
                actions = batch.actions.long().flatten()
                values, _, _ = policy.evaluate_actions(
                    batch.observations, actions, batch.lstm_states, batch.episode_starts
                )
            real = batch.mask > 1e-8
            observations = batch.observations[real].numpy()
            for observation, seen in zip(observations, values.flatten()[real].tolist(), strict=True):
                key = given.key_of(observation)
                tally.compare(("training", key), 100 * seen, value_alone(policy, key))

    rollouts(given.LAMBDA, look)
    return tally.cell("state of another episode")


def advantages() -> Cell:
    """GAE with the values that the rollout stores, which `hidden_state` looks at."""
    tally = Tally()

    def look(model: Any) -> None:
        buffer = model.rollout_buffer
        window = keys_of(buffer)
        for env in range(PLAN.num_envs):
            later = 0.0
            for t in reversed(range(WINDOW)):
                row = PLAN.row(window[t][env])
                after = 0.0
                if not row.terminated:
                    after = given.GAMMA * value_alone(model.policy, (*row.key[:2], row.step + 1)) / 100
                if row.done:
                    later = 0.0
                delta = row.reward + after - value_alone(model.policy, row.key) / 100
                later = delta + given.GAMMA * given.LAMBDA * later
                tally.compare(row.key, buffer.advantages[t, env], later)

    rollouts(given.LAMBDA, look)
    return tally.cell("advantage differs")


def passes() -> Cell:
    tally = Tally()

    def look(model: Any) -> None:
        buffer = model.rollout_buffer
        held = [key for step in keys_of(buffer) for key in step]
        drawn: list[Key] = []
        for batch in buffer.get(5):
            real = np.asarray(batch.mask) > 1e-8
            drawn += [given.key_of(observation) for observation in batch.observations.numpy()[real]]
        for key in held:
            tally.check(key, drawn.count(key) == 1)

    rollouts(given.LAMBDA, look)
    return tally.cell("not once in a pass")
