"""RLlib's row (package ray): its learner connectors and advantages, and its episode replay buffers.

Rows are given as its own ``SingleAgentEpisode``, which holds the last observation of an episode.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.boundaries.cells import Cell, Tally
from benchmarks.boundaries.fixtures import (
    GAMMA,
    LAMBDA,
    N_STEP,
    PLAN,
    SLICE,
    STEPS,
    Key,
    Row,
    advantages,
    columns,
    episodes_of,
    key_of,
    unmarked_joint,
    value,
)

PACKAGE = "ray"
DRAWS = 4000


def part(module: str, name: str) -> Any:
    """Import an object of the library by name."""
    return getattr(importlib.import_module(f"ray.rllib.{module}"), name)


def rows() -> list[Row]:
    return [step[env] for env in range(PLAN.num_envs) for step in PLAN.rows(STEPS)]


def episode_of(part_rows: list[Row]) -> Any:
    """Return rows of one episode, from its first one on, as the library's episode."""
    found = columns([[row] for row in part_rows])
    last = part_rows[-1]
    return part("env.single_agent_episode", "SingleAgentEpisode")(
        observations=[*found["observation"][:, 0], last.next_observation],
        actions=list(found["action"][:, 0]),
        rewards=[float(number) for number in found["reward"][:, 0]],
        terminated=last.terminated,
        truncated=last.truncated,
        len_lookback_buffer=0,
    )


def all_episodes() -> list[Any]:
    return [episode_of(found) for found in episodes_of(rows())]


def targets(lmbda: float) -> Iterator[tuple[Row, float]]:
    """Yield each row with its value target, from ``compute_value_targets`` over what PPO's connector prepares.

    The connector adds to each episode one step, whose observation is the episode's last one.
    """
    episodes = all_episodes()
    batch: dict[str, Any] = {}
    module = "connectors.learner.add_one_ts_to_episodes_and_truncate"
    connector = part(module, "AddOneTsToEpisodesAndTruncate")()
    connector(rl_module=None, episodes=episodes, batch=batch, shared_data={})

    observations = np.concatenate([longer.get_observations(slice(0, len(longer))) for longer in episodes])
    flags = {name: np.concatenate(list(batch[name].values())) for name in ("terminateds", "truncateds")}
    found = part("utils.postprocessing.value_predictions", "compute_value_targets")(
        values=value(observations),
        rewards=np.concatenate([longer.get_rewards() for longer in episodes]),
        gamma=GAMMA,
        lambda_=lmbda,
        **{name: array.astype(np.float32) for name, array in flags.items()},
    )
    counted = np.concatenate(list(batch["loss_mask"].values()))
    for observation, target in zip(observations[counted], found[counted], strict=True):
        yield PLAN.row(key_of(observation)), float(target)


def compare_targets(lmbda: float, wanted: Callable[[Row], bool]) -> Tally:
    """Count the advantages (target minus value) of the wanted rows."""
    tally = Tally()
    seen = {row.key: target for row, target in targets(lmbda)}
    for env in range(PLAN.num_envs):
        window = [[step[env]] for step in PLAN.rows(STEPS)]
        for (row,), want in zip(window, advantages(window, lmbda=lmbda)[:, 0], strict=True):
            if wanted(row):
                tally.compare(row.key, seen[row.key] - float(value(row.observation)), want)
    return tally


def truncated_end() -> Cell:
    return compare_targets(0.0, lambda row: row.truncated and not row.terminated).cell("another value")


def both_ends() -> Cell:
    return compare_targets(0.0, lambda row: row.truncated and row.terminated).cell("adds a bootstrap value")


def gae() -> Cell:
    return compare_targets(LAMBDA, lambda row: True).cell("another advantage")


def filled(name: str, capacity: int = 10**4) -> Any:
    """Return a replay buffer with all episodes; with less capacity it evicts the oldest ones."""
    module = "utils.replay_buffers." + {
        "EpisodeReplayBuffer": "episode_replay_buffer",
        "PrioritizedEpisodeReplayBuffer": "prioritized_episode_buffer",
    }.get(name, "")
    buffer = part(module, name)(capacity=capacity, batch_size_B=1, batch_length_T=SLICE)
    buffer.rng = np.random.default_rng(0)
    buffer.add(all_episodes())
    return buffer


def n_step_samples(name: str, n: int) -> dict[Key, Any]:
    """Return one sampled transition for each row that the buffer ever draws, over `DRAWS` draws."""
    drawn = filled(name).sample(DRAWS, n_step=n, gamma=GAMMA, sample_episodes=True)
    return {key_of(sample.get_observations(0)): sample for sample in drawn}


def n_step() -> Cell:
    """The target of its DQN: reward + gamma**n_step * V(new_obs), the last without the value where it terminated."""
    tally = Tally()
    absent: dict[str, int] = {}
    for name in ("EpisodeReplayBuffer", "PrioritizedEpisodeReplayBuffer"):
        samples = n_step_samples(name, N_STEP)
        absent[name] = len(rows()) - len(samples)
        newest = {row.env: row.key for row in rows()}
        for key, sample in sorted(samples.items()):
            n = int(np.ravel(sample.get_extra_model_outputs("n_step"))[0])
            after = float(value(sample.get_observations(-1)))
            seen = float(sample.get_rewards(0)) + (1 - sample.is_terminated) * GAMMA**n * after
            tally.compare(f"{name} {key}", seen, PLAN.n_step_target(key, N_STEP, newest[key[0]]))
    never = absent["PrioritizedEpisodeReplayBuffer"]
    return tally.cell(
        "EpisodeReplayBuffer: tails lose their flags, keep gamma**n",
        note="PrioritizedEpisodeReplayBuffer, DQN's default, is right in what it draws, and never draws the last "
        f"n - 1 rows of an episode ({never} of {len(rows())} rows here)",
        script="rllib_n_step_tails.sh",
    )


def last_observation() -> Cell:
    """The new observation of each sampled transition, one step each, of both buffers."""
    tally = Tally()
    for name in ("EpisodeReplayBuffer", "PrioritizedEpisodeReplayBuffer"):
        for key, sample in sorted(n_step_samples(name, 1).items()):
            row = PLAN.row(key)
            if row.done:
                tally.compare(f"{name} {key}", sample.get_observations(-1), row.next_observation)
    return tally.cell("another observation")


def slices() -> Cell:
    """Rows of ``EpisodeReplayBuffer.sample``: pieces of episodes, which ``is_last`` marks; also after evictions."""
    tally = Tally()
    for capacity in (20, 10**4):
        batch = filled("EpisodeReplayBuffer", capacity).sample(num_items=DRAWS // 4, batch_length_T=SLICE)
        found = {
            frames.tobytes(): (frames, ends)
            for frames, ends in zip(batch["obs"], batch["is_last"], strict=True)
        }
        for frames, ends in found.values():
            tally.check(f"capacity {capacity}", not unmarked_joint(frames, ends), f"{frames.tolist()}")
    return tally.cell("joins episodes")


def fixtures() -> dict[str, Callable[[], Cell]]:
    """Return the fixtures that RLlib has parts for."""
    return {
        "truncated_end": truncated_end,
        "both_ends": both_ends,
        "last_observation": last_observation,
        "n_step": n_step,
        "slices": slices,
        "advantages": gae,
    }
