"""PettingZoo's classic games, whose players move in turn, as one env of the player to move: every move is legal.

``python tests/simulators/test_agents_classic.py MOVES SEED`` plays so many moves of each game with each policy.
"""

import importlib
import sys
from typing import Any

import gymnasium as gym
import pytest
import torch

pytest.importorskip("pettingzoo")

from flatroll.layout import audit
from flatroll.modules import actor, q_network
from flatroll.rollouts import Collector

GAMES = ("tictactoe_v3", "connect_four_v3", "chess_v6", "leduc_holdem_v4", "texas_holdem_no_limit_v6")
POLICIES = ("random", "actor", "values")


class ToMove(gym.Env[Any, Any]):
    """A game as the player sees it whose turn it is; the reward is the mover's."""

    def __init__(self, name: str) -> None:
        self.game = importlib.import_module(f"pettingzoo.classic.{name}").raw_env()
        self.game.reset(seed=0)
        player = self.game.possible_agents[0]
        self.observation_space = self.game.observation_space(player)
        self.action_space = self.game.action_space(player)
        self.moves = self.illegal = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.game.reset(seed=seed)
        return self.look(), {}

    def look(self) -> Any:
        self.seen = self.game.observe(self.game.agent_selection)
        return self.seen

    def step(self, action: Any) -> Any:
        mover = self.game.agent_selection
        self.moves += 1
        self.illegal += not self.seen["action_mask"][action]
        self.game.step(int(action))
        ended = [any(flags.values()) for flags in (self.game.terminations, self.game.truncations)]
        return self.look(), float(self.game.rewards[mover]), *ended, {}


def play(name: str, kind: str, moves: int, seed: int) -> tuple[int, int, Any]:
    """Moves, illegal moves, and the last batch of a policy in four games."""
    torch.manual_seed(seed)
    env = gym.vector.SyncVectorEnv([lambda: ToMove(name)] * 4)
    policy = None if kind == "random" else {"actor": actor, "values": q_network}[kind](env, hidden=(16,))
    if kind == "values":
        policy[-1].module.epsilon.fill_(0.3)
    first = 0 if policy is None else moves // 4
    options: dict[str, Any] = {"init_random_frames": first, "seed": seed}
    *_, batch = Collector(env, policy, frames_per_batch=256, total_frames=moves, **options)
    return sum(one.moves for one in env.envs), sum(one.illegal for one in env.envs), batch


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("name", GAMES)
def test_every_move_is_legal(name: str, kind: str) -> None:
    moves, illegal, batch = play(name, kind, 512, 0)
    assert moves >= 512 and illegal == 0
    assert batch["action_mask"].gather(1, batch["action"].unsqueeze(1)).bool().all()
    assert batch["action_mask"].bool().all(-1).logical_not().any(), "every move was legal anyway"
    assert not audit(batch)


if __name__ == "__main__":
    for game in GAMES:
        for policy in POLICIES:
            moves, illegal, _ = play(game, policy, *(int(text) for text in sys.argv[1:]))
            print(f"{game}, {policy}: {moves:,} moves, {illegal} of them illegal", flush=True)
