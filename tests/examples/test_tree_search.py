"""The example of a tree search: it solves mazes, and equals a search on plain dicts."""

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatroll.examples import tree_search
from flatroll.examples.tree_search import EXPLORATION, GAMMA, Maze, Search, play_at_random


class DictSearch:
    """The same search without tensors: edges by state, each a list [action, count, total]."""

    def __init__(self, seed: int) -> None:
        self.edges: dict[tuple[int, ...], list[list[Any]]] = {}
        self.random = np.random.default_rng(seed)

    def simulate(self, env: Maze, seen: Any) -> None:
        env, path, over, new = copy.copy(env), [], False, False
        while not over and not new:
            edges = self.edges.setdefault(tuple(seen.tolist()), [])
            new = len(edges) < 4
            if new:
                edges.append([len(edges), 0, 0.0])
                edge = edges[-1]
            else:
                visits = sum(count for _, count, _ in edges)
                edge = max(
                    edges, key=lambda e: e[2] / e[1] + EXPLORATION * math.sqrt(math.log(visits) / e[1])
                )
            seen, reward, terminated, truncated, _ = env.step(edge[0])
            path.append((edge, reward))
            over = terminated or truncated
        value = 0.0 if over else play_at_random(env, self.random)
        for edge, reward in reversed(path):
            value = reward + GAMMA * value
            edge[1] += 1
            edge[2] += value

    def act(self, env: Maze, seen: Any, simulations: int) -> int:
        for _ in range(simulations):
            self.simulate(env, seen)
        return int(max(self.edges[tuple(seen.tolist())], key=lambda e: e[2] / max(e[1], 1))[0])


def test_it_equals_a_search_on_dicts() -> None:
    maze = 4
    search, plain = Search(maze), DictSearch(maze)
    env = Maze()
    seen, _ = env.reset(seed=maze)
    for _ in range(4):  # moves, with what is known kept between them
        action = search.act(env, seen, 15)
        assert action == plain.act(env, seen, 15)
        seen, *_ = env.step(action)
    edges = search.forest.edges
    actions = search.forest.rows(edges.source.new_tensor(range(len(edges.source))))
    found: dict[tuple[int, ...], list[list[Any]]] = {}
    for row, (action, count, total) in zip(
        actions["observation"].tolist(),
        zip(actions["action"].tolist(), search.count.tolist(), search.total.tolist(), strict=True),
        strict=True,
    ):
        found.setdefault(tuple(row), []).append([action, count, pytest.approx(total)])
    assert found == {state: edges for state, edges in plain.edges.items() if edges}


def test_it_beats_random_play(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    solved = tree_search.main(
        ["--mazes", "2", "--simulations", "12", "--picture", str(tmp_path / "tree.png")]
    )
    assert solved["search"] >= solved["random"] + 0.6
    assert "solved by search" in capsys.readouterr().out and (tmp_path / "tree.png").stat().st_size > 5000
