"""Monte Carlo tree search (Kocsis and Szepesvári 2006) in a maze, with a forest that is kept between moves.

``python -m flatroll.examples.tree_search`` plays some mazes by search and by random actions. Each simulation follows
known transitions by their upper confidence bounds, tries one new action in a copy of the env, and adds its rows to an
`MCTSForest`. Paths to the same cell share their statistics, and the next move reuses them.
"""

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict

from flatroll.trees import MCTSForest, Tree, backup, best_edges, ucb

GAMMA, EXPLORATION, LOOK_AHEAD = 0.95, 0.7, 20
MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))


class Maze(gym.Env[Any, Any]):
    """A square of cells, some of them walls, and a goal that is worth 1; ``copy.copy`` copies it.

    Args:
        size: cells of a side. Default 7.
        max_steps: truncate episodes after this many steps. Default 40.
    """

    def __init__(self, size: int = 7, max_steps: int = 40) -> None:
        self.observation_space = gym.spaces.Box(0, size - 1, (2,), np.int64)
        self.action_space = gym.spaces.Discrete(4)
        self.size, self.max_steps = size, max_steps

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.walls = self.np_random.random((self.size, self.size)) < 0.2
        self.at, self.goal, self.steps = (0, 0), (self.size - 1, self.size - 1), 0
        for i in range(self.size):  # keeps a path open along two sides
            self.walls[i, 0] = self.walls[-1, i] = False
        return np.array(self.at), {}

    def step(self, action: Any) -> Any:
        row, column = (a + b for a, b in zip(self.at, MOVES[int(action)], strict=True))
        if 0 <= row < self.size and 0 <= column < self.size and not self.walls[row, column]:
            self.at = (row, column)
        self.steps += 1
        done = self.at == self.goal
        return np.array(self.at), float(done), done, self.steps >= self.max_steps, {}


def as_batch(steps: list[tuple[Any, int, Any]]) -> TensorDict:
    """Convert steps of the env, each (observation, action, result), to a flat batch."""
    seen, actions, outcomes = zip(*steps, strict=True)
    then, rewards, terminated, truncated, _ = zip(*outcomes, strict=True)
    after = {
        "observation": torch.tensor(np.stack(then)),
        "reward": torch.tensor(rewards).unsqueeze(-1),
        "terminated": torch.tensor(terminated).unsqueeze(-1),
        "done": torch.tensor(np.logical_or(terminated, truncated)).unsqueeze(-1),
    }
    root = {"observation": torch.tensor(np.stack(seen)), "action": torch.tensor(actions)}
    return TensorDict(root | {"next": after}, [len(steps)])


class Search:
    """The search: a forest, with visit counts and returns of its edges."""

    def __init__(self, seed: int = 0) -> None:
        self.forest, self.random = MCTSForest(), np.random.default_rng(seed)
        self.count, self.total = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64)

    def simulate(self, env: Maze, seen: Any) -> None:
        """Descend from the env's state, try one new action, play on at random, and update the visited edges."""
        edge: int | None = None
        env, path, steps, over = copy.copy(env), list[int](), list[tuple[Any, int, Any]](), False
        while not over:
            edge, action = self.choose(seen)
            steps.append((seen, action, env.step(action)))
            seen, _, terminated, truncated, _ = steps[-1][2]
            over = terminated or truncated
            if edge is None:
                break
            path.append(edge)
        batch = as_batch(steps)
        self.forest.extend(batch)
        if edge is None:
            path.append(len(self.forest) - 1)  # the newest edge
            self.count = torch.cat([self.count, self.count.new_zeros(1)])
            self.total = torch.cat([self.total, self.total.new_zeros(1)])
        value = 0.0 if over else play_at_random(env, self.random)
        reward = batch["next", "reward"].flatten()
        backup(torch.tensor(path), value, count=self.count, total=self.total, reward=reward, gamma=GAMMA)

    def choose(self, seen: Any) -> tuple[int | None, int]:
        """Return the edge to follow and its action; None and the first untried action if there is one."""
        state = int(self.forest.states(observation(seen))) if len(self.forest) else -1
        edges = self.forest.children(state) if state >= 0 else torch.empty(0, dtype=torch.int64)
        tried = self.forest.rows(edges)["action"].tolist() if len(edges) else []
        untried = [action for action in range(4) if action not in tried]
        if untried:
            return None, untried[0]
        parent, count = torch.zeros_like(edges), self.count[edges]
        best = int(best_edges(ucb(self.total[edges] / count, count, parent, EXPLORATION), parent)[1])
        return int(edges[best]), tried[best]

    def act(self, env: Maze, seen: Any, simulations: int) -> int:
        """Search from the env's state, and return the action with the highest mean return (the first if equal)."""
        for _ in range(simulations):
            self.simulate(env, seen)
        edges = self.forest.children(int(self.forest.states(observation(seen))))
        best = int((self.total[edges] / self.count[edges].clamp(min=1)).argmax())
        return int(self.forest.rows(edges)["action"][best])


def observation(seen: Any) -> TensorDict:
    return TensorDict({"observation": torch.as_tensor(seen)})


def play_at_random(env: Maze, random: np.random.Generator) -> float:
    """Return the discounted return of up to LOOK_AHEAD random actions; 0.0 if the episode does not end."""
    for step in range(LOOK_AHEAD):
        _, reward, terminated, truncated, _ = env.step(random.integers(4))
        if terminated or truncated:
            return float(reward) * GAMMA**step
    return 0.0


def play(act: Callable[[Maze, Any], int], maze: int) -> tuple[float, int]:
    """Return and length of an episode."""
    env, total, over = Maze(), 0.0, False
    seen, _ = env.reset(seed=maze)
    while not over:
        seen, reward, terminated, truncated, _ = env.step(act(env, seen))
        total, over = total + float(reward), terminated or truncated
    return total, env.steps


def tree_of_first_move(maze: int, simulations: int) -> Tree:
    """The tree of a search for the first move, for a picture."""
    search, env = Search(), Maze()
    seen, _ = env.reset(seed=maze)
    search.act(env, seen, simulations)
    return search.forest.get_tree(observation(seen))


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Play, and return the share of mazes solved by search and at random."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mazes", type=int, default=10)
    parser.add_argument("--simulations", type=int, default=30, help="simulations per move")
    parser.add_argument("--picture", type=Path, help="draw the tree of a search for the first move")
    args = parser.parse_args(arguments)
    solved = {"search": 0.0, "random": 0.0}
    for maze in range(args.mazes):
        search, random = Search(maze), np.random.default_rng(maze)
        reached, steps = play(lambda env, seen, s=search: s.act(env, seen, args.simulations), maze)  # type: ignore[misc]
        solved["search"] += reached / args.mazes
        solved["random"] += play(lambda env, seen, r=random: int(r.integers(4)), maze)[0] / args.mazes  # type: ignore[misc]
        known = f"{search.forest.num_states} states and {len(search.forest)} transitions known"
        print(f"maze {maze}: {'solved' if reached else 'not solved'} in {steps} steps, {known}")
    print(f"solved by search {solved['search']:.0%}, at random {solved['random']:.0%}")
    if args.picture is not None:
        from matplotlib.figure import Figure

        figure = tree_of_first_move(0, args.simulations).plot().figure
        assert isinstance(figure, Figure)
        figure.savefig(args.picture, dpi=110)
    return solved


if __name__ == "__main__":
    main()
