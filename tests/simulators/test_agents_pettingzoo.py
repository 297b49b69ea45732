"""PettingZoo's test envs, its knights and zombies, and MPE2: every row against what the games themselves returned."""

import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from traces import Counts, assert_same

pytest.importorskip("pettingzoo")
pytest.importorskip("mpe2")
from mpe2 import simple_adversary_v3, simple_speaker_listener_v4, simple_spread_v3
from pettingzoo.classic import rps_v2
from pettingzoo.test.example_envs import generated_agents_parallel_v0
from pettingzoo.utils import aec_to_parallel

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pettingzoo.butterfly import knights_archers_zombies_v11

from flatroll.layout import agents_of, audit
from flatroll.rollouts import Collector
from flatroll.wrappers import PettingZooSource, as_vector_env
from flatroll.wrappers.testing import check_vector_env


class Recorder:
    """A game that keeps what it was given and what it returned."""

    def __init__(self, game: Any) -> None:
        self.game = game
        self.moves: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.game, name)

    def observation_space(self, agent: Any) -> Any:
        return self.game.observation_space(agent)

    def action_space(self, agent: Any) -> Any:
        return self.game.action_space(agent)

    def _kept(self, tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: self._kept(value) for key, value in tree.items()}
        return np.array(tree)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        obs, infos = self.game.reset(seed=seed, options=options)
        self.moves.append(("reset", (self._kept(obs), self.state(), list(self.game.agents))))
        return obs, infos

    def state(self) -> Any:
        try:
            return np.array(self.game.state())
        except (NotImplementedError, TypeError):  # rps has a dict of this name
            return None

    def step(self, actions: Any) -> Any:
        result = self.game.step(actions)
        kept = [self._kept(part) for part in result[:4]]
        self.moves.append(("step", (self._kept(actions), *kept, self.state(), list(self.game.agents))))
        return result

    def rows(self) -> dict[Any, list[tuple[Any, ...]]]:
        """What each agent did, in order: observation, action, reward, next observation, flags, first, states."""
        rows: dict[Any, list[tuple[Any, ...]]] = defaultdict(list)
        seen: dict[Any, Any] = {}
        state, new = None, set()
        for kind, entry in self.moves:
            if kind == "reset":
                obs, state, there = entry
                seen, new = {name: obs[name] for name in there}, set(there)
                continue
            actions, obs, rewards, terminated, truncated, after, there = entry
            for name in actions:
                flags = bool(terminated[name]), bool(truncated[name])
                row = (seen[name], actions[name], float(rewards[name]), obs[name], *flags, name in new)
                rows[name].append((*row, state, after))
            new = {name for name in there if name not in actions}
            seen, state = {name: obs[name] for name in there}, after
        return rows


GAMES: dict[str, tuple[Callable[[], Any], int, bool]] = {
    "MPE2, simple_spread": (lambda: simple_spread_v3.parallel_env(max_cycles=10), 3, True),
    "PettingZoo, knights_archers_zombies": (
        lambda: knights_archers_zombies_v11.parallel_env(max_cycles=400, max_zombies=40, spawn_delay=2),
        2,
        False,
    ),
    "PettingZoo, rps (AEC, converted)": (lambda: aec_to_parallel(rps_v2.env(max_cycles=7)), 2, False),
}


@pytest.mark.parametrize("name", GAMES)
def test_rows_are_what_the_games_returned(name: str, report: Any) -> None:
    make, count, state = GAMES[name]
    games = [Recorder(make()) for _ in range(count)]
    env = report.start(lambda: PettingZooSource(games, state=state))
    for game in games:
        game.moves.clear()
    collector = Collector(env, frames_per_batch=333, seed=3)
    batches: list[Any] = [collector.rollout() for _ in range(4)]
    batch: Any = torch.cat(batches)
    false = ends = 0
    left = 0  # steps that no batch has taken yet
    for number, game in enumerate(games):
        for agent, expected in game.rows().items():
            place = game.possible_agents.index(agent)
            mine = batch[(batch["collector", "game"] == number) & (batch["collector", "agent"] == place)]
            assert 0 <= len(expected) - len(mine) <= 1
            left += len(expected) - len(mine)
            for i, (seen, action, reward, after, over, cut, first, state_now, state_next) in enumerate(
                expected[: len(mine)]
            ):
                row = mine[i]
                right = (
                    np.array_equal(row["observation"], seen)
                    and np.array_equal(row["action"], action)
                    and np.float32(reward) == row["next", "reward"].item()
                    and np.array_equal(row["next", "observation"], after)
                    and (over, cut) == (row["next", "terminated"].item(), row["next", "truncated"].item())
                    and first == row["is_init"].item()
                )
                if state:
                    right = right and np.array_equal(row["state"], state_now.astype(np.float32))
                    right = right and np.array_equal(row["next", "state"], state_next.astype(np.float32))
                false += not right
                ends += over or cut
    assert len(batch) == 4 * 333
    report.add(name, "mpe2" if "MPE" in name else "pettingzoo", "NextStep", Counts(len(batch), false, ends))
    assert false == 0 and ends > 5
    assert not any(audit(part) for part in batches)
    for line in agents_of(batch):
        there = line[line >= 0]
        assert len(there) == int(batch["collector", "num_agents"][there[0]])
    # Two runs from one seed; knights_archers_zombies is another game after its first reset, whatever the seed.
    afresh = [PettingZooSource([make() for _ in games], state=state) for _ in range(2)]
    one, two = (Collector(source, frames_per_batch=333, seed=3).rollout() for source in afresh)
    assert one is not None and two is not None
    assert_same(one, two)


def test_agents_die_in_the_midst_of_a_game() -> None:
    """Zombies reach the knights before the game ends."""
    make = GAMES["PettingZoo, knights_archers_zombies"][0]
    batch: Any = Collector([make, make], frames_per_batch=1500, seed=0).rollout()
    numbers = batch["collector", "num_agents"]
    assert numbers.unique().numel() > 1 and int(numbers.max()) == 4


@pytest.mark.parametrize("name", GAMES)
def test_the_contract_kit(name: str) -> None:
    make, count, state = GAMES[name]
    check_vector_env(PettingZooSource([make() for _ in range(count)], state=state), steps=60)


def test_aec_envs_and_unlike_agents_are_refused() -> None:
    with pytest.raises(TypeError, match="aec_to_parallel"):
        as_vector_env(rps_v2.env())
    for make in (simple_adversary_v3, simple_speaker_listener_v4):
        with pytest.raises(ValueError, match=r"PettingZooSource\.groups"):
            as_vector_env(make.parallel_env())


def test_groups_of_speaker_and_listener() -> None:
    games = [simple_speaker_listener_v4.parallel_env(max_cycles=9) for _ in range(2)]
    parts = PettingZooSource.groups(games, {"speaker": ["speaker_0"], "listener": ["listener_0"]})
    envs: Any = {name: as_vector_env(source) for name, source in parts.items()}
    assert {name: env.single_observation_space.shape for name, env in envs.items()} == {
        "speaker": (3,),
        "listener": (11,),
    }
    for env in envs.values():
        env.reset(seed=0)
    for step in range(30):
        sent = {name: env.send(env.action_space.sample()) for name, env in envs.items()}
        for name, env in envs.items():
            _, _, _, truncated, _ = env.step(sent[name])
            assert truncated.all() == (step % 10 == 8)


def test_born_agents_need_to_be_possible() -> None:
    game = generated_agents_parallel_v0.parallel_env()
    with pytest.raises(ValueError, match="possible_agents"):
        collector = Collector(game, frames_per_batch=500, seed=0)
        collector.rollout()
