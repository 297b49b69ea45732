"""Counts what a trainer gets wrong of scripted episodes: through flatroll's adapter, and in the trainer's own way.

``python -m flatroll bench adapters``. An observation of the scripted envs is (env, episode, step), so every row that a
trainer sees can be checked. A trainer that is not installed has no rows in the table.
"""

import importlib.util
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.measure.timing import table
from flatroll.layout import run_ends
from flatroll.rollouts import Collector, rollout
from flatroll.wrappers import as_vector_env
from flatroll.wrappers.testing import (
    Script,
    ScriptedEnv,
    ScriptedTorchEnv,
    decode,
    expected_rows,
    make_scripted,
)

ENDS: Any = [["terminated", "truncated", "both"], ["truncated"]]
SCRIPT = Script(2, lengths=[[3, 1, 4], [2, 5]], ends=ENDS)
STEPS = 96
MODES: dict[str, Callable[[Script], Any]] = {
    "NextStep": lambda script: make_scripted(script, autoreset_mode="NextStep"),
    "SameStep": lambda script: make_scripted(script, autoreset_mode="SameStep"),
    "Disabled": lambda script: make_scripted(script, autoreset_mode="Disabled"),
    "torch": ScriptedTorchEnv,
}


class Row(NamedTuple):
    """What a trainer learns from: observations as (env, episode, step)."""

    before: list[int]
    after: list[int]  # what it takes for the next observation
    reward: float
    terminated: bool
    truncated: bool  # and not terminated


class Counts(NamedTuple):
    """Of the rows that a trainer has seen."""

    rows: int
    dead: int  # no step of the env: from the last observation of an episode to the first of the next
    wrong_next: int  # rows with a wrong next observation
    wrong_flags: int  # rows with a wrong reward or flag


Play = Callable[[Any, int], Iterator[Row]]  # (env, vector steps)


def count(rows: Iterator[Row]) -> Counts:
    """Compare rows with the script."""
    true = {
        (e, k, t): (r, term, trunc and not term)
        for e, k, t, r, term, trunc in expected_rows(SCRIPT, STEPS)[
            ["env", "episode", "step", "reward", "terminated", "truncated"]
        ].tolist()
    }
    seen, dead, wrong_next, wrong_flags = 0, 0, 0, 0
    for row in rows:
        seen += 1
        e, k, t = row.before
        if t == SCRIPT.length(e, k):  # the last observation, from which no step begins
            dead += 1
            continue
        wrong_next += row.after != [e, k, t + 1]
        wrong_flags += tuple(row[2:]) != true[e, k, t]
    return Counts(seen, dead, wrong_next, wrong_flags)


def rows_of(before: Any, after: Any, reward: Any, terminated: Any, truncated: Any) -> Iterator[Row]:
    """One row for each env of a vector step; observations as they are."""
    columns = (decode("float32", before), decode("float32", after), reward, terminated, truncated)
    for one in zip(*(np.asarray(column).tolist() for column in columns), strict=True):
        yield Row(one[0], one[1], float(one[2]), bool(one[3]), bool(one[4] and not one[3]))


# --- a loop of one's own, as in CleanRL's ppo.py --------------------------------------------------------------------


def plain_loop(env: Any, steps: int) -> Iterator[Row]:
    """Step the bare env, and use its next output as the next observation."""
    before, _ = env.reset(seed=0)
    for _ in range(steps):
        before = np.array(before)
        after, reward, terminated, truncated, _ = env.step(np.zeros(2, np.int64))
        yield from rows_of(before, after, reward, terminated, truncated)
        before = after


def adapted_loop(env: Any, steps: int) -> Iterator[Row]:
    """The same loop, with `as_vector_env(env, autoreset="same_step")`."""
    env = as_vector_env(env, autoreset="same_step", framework="torch")
    before, _ = env.reset(seed=0)
    for _ in range(steps):
        after, reward, terminated, truncated, info = env.step(np.zeros(2, np.int64))
        ended = terminated | truncated
        true = torch.where(ended[:, None], info["final_obs"], after)
        yield from rows_of(before, true, reward, terminated, truncated)
        before = after


def batches(env: Any, steps: int) -> Iterator[Row]:
    """`flatroll.rollouts.rollout`."""
    batch = rollout(env, num_steps=steps, seed=0)
    flags = (batch["next", name].flatten() for name in ("reward", "terminated", "truncated"))
    yield from rows_of(batch["observation"], batch["next", "observation"], *flags)


# --- Stable-Baselines3 ----------------------------------------------------------------------------------------------


def sb3(env: Any, steps: int) -> Iterator[Row]:
    """`FlatVecEnv`."""
    yield from vec_env(import_module("flatroll.trainers.sb3").FlatVecEnv(env), steps)


def sb3_own(env: Any, steps: int) -> Iterator[Row]:
    """`DummyVecEnv`, which makes the envs itself."""
    dummy = import_module("stable_baselines3.common.vec_env").DummyVecEnv
    yield from vec_env(dummy([lambda i=i: ScriptedEnv(SCRIPT, i) for i in range(2)]), steps)


def vec_env(env: Any, steps: int) -> Iterator[Row]:
    """What off-policy algorithms of SB3 store."""
    before = env.reset()
    for _ in range(steps):
        after, reward, dones, infos = env.step(np.zeros(2, np.int64))
        true = np.array(
            [info.get("terminal_observation", row) for info, row in zip(infos, after, strict=True)]
        )
        truncated = np.array([info.get("TimeLimit.truncated", False) for info in infos])
        yield from rows_of(before, true, reward, dones & ~truncated, truncated)
        before = after


# --- skrl -----------------------------------------------------------------------------------------------------------


def skrl(env: Any, steps: int) -> Iterator[Row]:
    """`wrap_env` and `FinalObservations`."""
    ours = import_module("flatroll.trainers.skrl")
    yield from recorded(ours.wrap_env(env), steps, (ours.FinalObservations,))


def skrl_own(env: Any, steps: int) -> Iterator[Row]:
    """skrl's own wrapper of Gymnasium's vector envs."""
    wrap = import_module("skrl.envs.wrappers.torch").wrap_env
    yield from recorded(wrap(env, wrapper="gymnasium", verbose=False), steps, ())


def recorded(env: Any, steps: int, bases: tuple[type, ...]) -> Iterator[Row]:
    """What skrl's trainer tells an agent to record."""
    base = import_module("skrl.agents.torch.base")
    rows: list[Row] = []

    class Recorder(base.Agent):  # type: ignore[name-defined]  # of skrl, which has no types
        def act(self, observations: Any, states: Any, **others: Any) -> Any:
            return torch.zeros(len(observations), 1, dtype=torch.int64), {}

        def record_transition(self, **given: Any) -> None:
            names = ("rewards", "terminated", "truncated")
            flat = (given[name].view(-1) for name in names)
            rows.extend(rows_of(given["observations"], given["next_observations"], *flat))

        def pre_interaction(self, **others: Any) -> None: ...

        def post_interaction(self, **others: Any) -> None: ...

        def update(self, **others: Any) -> None: ...

    cfg = base.AgentCfg()
    cfg.experiment.write_interval = cfg.experiment.checkpoint_interval = 0
    agent = type("Agent", (*bases, Recorder), {})(
        cfg=cfg,
        models={},
        observation_space=env.observation_space,
        action_space=env.action_space,
        device="cpu",
    )
    settings = {
        "timesteps": steps,
        "headless": True,
        "disable_progressbar": True,
        "close_environment_at_exit": False,
    }
    import_module("skrl.trainers.torch").SequentialTrainer(env=env, agents=agent, cfg=settings).train()
    yield from rows


# --- rsl_rl, rl_games -----------------------------------------------------------------------------------------------


def rsl_rl(env: Any, steps: int) -> Iterator[Row]:
    """`FlatVecEnv`, whose `extras` have the last observations."""
    env = import_module("flatroll.trainers.rsl_rl").FlatVecEnv(env, max_episode_length=10**6, seed=0)
    before = env.get_observations()["policy"]
    for _ in range(steps):
        shown, reward, dones, extras = env.step(torch.zeros(2, 2))
        time_outs = extras["time_outs"] > 0
        true = torch.where(dones[:, None] > 0, extras["final_obs"]["policy"], shown["policy"])
        yield from rows_of(before, true, reward, (dones > 0) & ~time_outs, time_outs)
        before = shown["policy"]


def rl_games(env: Any, steps: int) -> Iterator[Row]:
    """`FlatVecEnv`, the same."""
    env = import_module("flatroll.trainers.rl_games").FlatVecEnv(env, seed=0)
    before = env.reset()
    for _ in range(steps):
        shown, reward, dones, infos = env.step(torch.zeros(2, dtype=torch.int64))
        true = torch.where(dones[:, None] > 0, infos["final_obs"], shown)
        yield from rows_of(before, true, reward, (dones > 0) & ~infos["time_outs"], infos["time_outs"])
        before = shown


# --- Tianshou -------------------------------------------------------------------------------------------------------


def windows(env: Any, steps: int) -> Any:
    """Create a data set of eight windows, each of which cuts the trajectories."""
    collector = Collector(env, frames_per_batch=2 * steps // 8, total_frames=2 * steps, seed=0)
    return torch.cat(list(collector))


def tianshou(env: Any, steps: int) -> Iterator[Row]:
    """`to_buffer`: what its `next` leads to."""
    batch = windows(env, steps)
    yield from followed(import_module("flatroll.trainers.tianshou").to_buffer(batch), batch)


def tianshou_own(env: Any, steps: int) -> Iterator[Row]:
    """`ReplayBuffer.from_data` of the batch's own columns."""
    batch = windows(env, steps)
    flags = [batch["next", name].flatten().numpy() for name in ("reward", "terminated", "truncated", "done")]
    columns = (
        batch["observation"].numpy(),
        batch["action"].numpy(),
        *flags,
        batch["next", "observation"].numpy(),
    )
    yield from followed(import_module("tianshou.data").ReplayBuffer.from_data(*columns), batch)


def followed(buffer: Any, batch: Any) -> Iterator[Row]:
    """Rows whose next observation is that of the row which n-step returns go on to, where they go on."""
    index = np.arange(len(buffer))
    rows, following = buffer[index], buffer.next(index)
    after = np.where((following == index)[:, None], rows.obs_next, rows.obs[following])
    # A cut that is marked as truncated is right: its returns stop there and go on from the next observation.
    cut = (run_ends(batch) & ~batch["next", "done"].flatten()).numpy()
    yield from rows_of(rows.obs, after, rows.rew, rows.terminated, rows.truncated & ~cut)


class Way(NamedTuple):
    """How a trainer gets its rows."""

    package: str  # that it needs; "" for none
    name: str
    ours: bool
    play: Play
    modes: tuple[str, ...] = tuple(MODES)


GYMNASIUM = ("NextStep", "SameStep", "Disabled")
WAYS = (
    Way("", "plain loop, as in CleanRL's ppo.py", False, plain_loop, ("NextStep", "SameStep")),
    Way("", "the loop on as_vector_env", True, adapted_loop),
    Way("", "flatroll's batches", True, batches),
    Way("stable_baselines3", "SB3, DummyVecEnv", False, sb3_own, ("Disabled",)),
    Way("stable_baselines3", "SB3, FlatVecEnv", True, sb3),
    Way("skrl", "skrl, its wrap_env", False, skrl_own, ("NextStep", "SameStep")),
    Way("skrl", "skrl, our wrap_env, FinalObservations", True, skrl, GYMNASIUM),
    Way("rsl_rl", "rsl_rl, FlatVecEnv", True, rsl_rl),
    Way("rl_games", "rl_games, FlatVecEnv", True, rl_games),
    Way("tianshou", "Tianshou, ReplayBuffer.from_data", False, tianshou_own, ("Disabled",)),
    Way("tianshou", "Tianshou, to_buffer", True, tianshou, ("Disabled",)),
)


def installed(way: Way) -> bool:
    """Whether the trainer is there."""
    return not way.package or importlib.util.find_spec(way.package) is not None


def counts_of(way: Way, mode: str) -> Counts:
    """Let a trainer see the scripted envs and count."""
    # rsl_rl takes actions that are one Box only; the script's observations are the same.
    script = Script(2, SCRIPT.lengths, SCRIPT.ends, action="box") if way.package == "rsl_rl" else SCRIPT
    return count(way.play(MODES[mode](script), STEPS))


def main() -> None:
    """Print the table."""
    rows = []
    for way in WAYS:
        if installed(way):
            for mode in way.modes:
                rows.append([way.name, mode, *map(str, counts_of(way, mode))])
        else:
            rows.append([way.name, "not installed", *"----"])
    print(table(["", "env", "rows", "dead rows", "wrong next observations", "wrong rewards or flags"], rows))


if __name__ == "__main__":
    main()
