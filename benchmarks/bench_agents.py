"""Benchmarks agents as rows against the padded form: bytes, and rows a second of processor time, of the same games.

``python -m flatroll bench agents``; the tables with VMAS and MPE2 need the extra ``agents``, mpe2 and torchrl.
"""

import importlib.util
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.measure.timing import ratio, table, take_turns
from flatroll.rollouts import Collector
from flatroll.wrappers import PettingZooSource
from flatroll.wrappers.testing import ScriptedGame

GAMES, AGENTS, STEPS, TURNS = 8, 8, 200, 9


def coming_and_going(share: float, seed: int) -> list[dict[str, list[Any]]]:
    """Episodes of 40 steps in which each agent but the first is there for one stretch, together this share."""
    random, episodes = np.random.default_rng(seed), []
    for _ in range(5):
        plan: dict[str, list[Any]] = {"agent_0": [(0, 40, "truncated")]}
        for agent in range(1, AGENTS):
            steps = max(1, round(40 * share))
            plan[f"agent_{agent}"] = [(int(random.integers(0, 41 - steps)), steps, "terminated")]
        episodes.append(plan)
    return episodes


class Padded:
    """A hand-written collector of ``[T, G, A, ...]`` arrays with a mask, as padded multi-agent libraries keep them."""

    def __init__(self, games: list[ScriptedGame]) -> None:
        self.games, shape = games, (STEPS, len(games), AGENTS)
        self.place = {name: i for i, name in enumerate(games[0].possible_agents)}
        self.arrays: dict[str, np.ndarray[Any, Any]] = {
            "observation": np.zeros((*shape, 4), np.float32),
            "next_observation": np.zeros((*shape, 4), np.float32),
            "action": np.zeros(shape, np.int64),
            "reward": np.zeros((*shape, 1), np.float32),
            **{name: np.zeros((*shape, 1), bool) for name in ("terminated", "truncated", "done", "is_init")},
            "mask": np.zeros(shape, bool),
            "traj_ids": np.zeros(shape, np.int64),
        }
        self.seen = [game.reset()[0] for game in games]
        self.random, self.lives = np.random.default_rng(0), 0
        self.ids = [dict.fromkeys(seen, 0) for seen in self.seen]

    def collect(self) -> int:
        """Make `STEPS` steps; return how many rows are real."""
        arrays, place = self.arrays, self.place
        for array in arrays.values():
            array[...] = 0
        for t in range(STEPS):
            actions = self.random.integers(0, 5, (len(self.games), AGENTS))
            for g, game in enumerate(self.games):
                if not game.agents:
                    self.seen[g], _ = game.reset()
                    self.ids[g] = {}
                seen = self.seen[g]
                acting = list(game.agents)
                after, paid, over, cut, _ = game.step({name: actions[g, place[name]] for name in acting})
                for name in acting:
                    at = t, g, place[name]
                    if name not in self.ids[g]:
                        self.lives += 1
                        self.ids[g][name] = self.lives
                        arrays["is_init"][at] = True
                    arrays["observation"][at], arrays["next_observation"][at] = seen[name], after[name]
                    arrays["action"][at], arrays["reward"][at] = actions[at[1:]], paid[name]
                    arrays["terminated"][at], arrays["truncated"][at] = over[name], cut[name]
                    arrays["done"][at], arrays["mask"][at] = over[name] or cut[name], True
                    arrays["traj_ids"][at] = self.ids[g][name]
                    if over[name] or cut[name]:
                        del self.ids[g][name]
                self.seen[g] = after
        return int(arrays["mask"].sum())


def scripted(share: float) -> list[str]:
    games = [
        [ScriptedGame(number, coming_and_going(share, number)) for number in range(GAMES)] for _ in range(2)
    ]
    padded = Padded(games[0])
    real = padded.collect()
    collector = Collector(games[1], frames_per_batch=real)
    batch = collector.rollout()
    assert batch is not None
    times = take_turns({"flat": collector.rollout, "padded": padded.collect}, TURNS, clock=time.process_time)
    flat, wide = batch.bytes(), sum(array.nbytes for array in padded.arrays.values())
    return [
        f"{real / (STEPS * GAMES * AGENTS):.0%}",
        f"{real / times['flat'].median:,.0f}",
        f"{real / times['padded'].median:,.0f}",
        f"{ratio(times['padded'], times['flat']):.2f}",
        f"{flat / real:.0f}",
        f"{wide / real:.0f}",
    ]


def peers() -> dict[str, tuple[Callable[[], Any], Callable[[], Any], int]]:
    """By game: our env, torchrl's of the same, and rows of a batch."""
    import vmas  # type: ignore[import-not-found]
    from mpe2 import simple_spread_v3  # type: ignore[import-not-found]
    from torchrl.envs import PettingZooWrapper, VmasWrapper

    balance: Any = partial(
        vmas.make_env, "balance", num_envs=64, n_agents=3, max_steps=100, terminated_truncated=True, seed=0
    )
    spread: Any = partial(simple_spread_v3.parallel_env, max_cycles=25)
    return {
        "VMAS balance, 64 games": (
            balance,
            lambda: VmasWrapper(balance(terminated_truncated=False)),
            64 * 3 * 50,
        ),
        "MPE2 simple_spread, 1 game": (
            lambda: PettingZooSource(spread()),
            lambda: PettingZooWrapper(spread(), return_state=False),
            3 * 300,
        ),
    }


def beside_torchrl() -> list[list[str]]:
    from torchrl.collectors import Collector as Theirs

    rows = []
    for name, (ours, theirs, count) in peers().items():
        collector = Collector(ours(), frames_per_batch=count)
        env = theirs()
        other = iter(
            Theirs(env, None, frames_per_batch=count // 3, total_frames=-1)
        )  # counts games, not agents
        batch, padded = collector.rollout(), next(other)
        assert batch is not None
        times = take_turns(
            {"flat": collector.rollout, "padded": partial(next, other)}, TURNS, clock=time.process_time
        )
        rows.append(
            [
                name,
                f"{count / times['flat'].median:,.0f}",
                f"{count / times['padded'].median:,.0f}",
                f"{ratio(times['padded'], times['flat']):.2f}",
                f"{batch.bytes() / count:.0f}",
                f"{padded.bytes() / count:.0f}",
            ]
        )
    return rows


def main() -> None:
    head = ["flat, rows/s", "padded, rows/s", "ratio", "flat, bytes a row", "padded, bytes a row"]
    print(
        f"**Agents that come and go: {GAMES} games of up to {AGENTS}, against a hand-written padded loop**\n"
    )
    print(table(["agents there", *head], [scripted(share) for share in (1.0, 0.5, 0.2)]))
    if all(map(importlib.util.find_spec, ("vmas", "mpe2", "torchrl"))):
        warnings.simplefilter("ignore")
        print("\n**All agents there: against torchrl's wrappers and collector, random actions**\n")
        print(table(["game", *head], beside_torchrl()))


if __name__ == "__main__":
    main()
