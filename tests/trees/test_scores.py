"""Scores and updates of edges, against loops in Python."""

import math

import pytest
import torch

from flatroll.trees import backup, best_edges, puct, ucb


def test_scores_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    count = torch.randint(4, (50,), generator=generator)
    value, prior = torch.rand(2, 50, generator=generator, dtype=torch.float64)
    parent = torch.randint(8, (50,), generator=generator) * 1000
    bounds, scores = ucb(value, count, parent, 1.3), puct(value, count, prior, parent, 1.3, unvisited=0.25)
    for i in range(50):
        visits = sum(int(n) for n, p in zip(count, parent, strict=True) if p == parent[i])
        n = int(count[i])
        bound = float(value[i]) + 1.3 * math.sqrt(math.log(max(visits, 1)) / n) if n else math.inf
        score = (float(value[i]) if n else 0.25) + 1.3 * float(prior[i]) * math.sqrt(visits) / (1 + n)
        assert float(bounds[i]) == pytest.approx(bound) and float(scores[i]) == pytest.approx(score)
    for chosen, at in zip(*best_edges(scores, parent), strict=True):
        own = [i for i in range(50) if parent[i] == chosen]
        assert int(at) == max(own, key=lambda i: (float(scores[i]), -i))


def test_unvisited_edges_come_first_and_are_never_nan() -> None:
    value = torch.full((3,), float("nan"))  # 0 / 0
    none, same = torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64)
    for score in (ucb(value, none, same), puct(value, none, torch.rand(3), same)):
        assert score.tolist() == [math.inf] * 3
        assert best_edges(score, same)[1].tolist() == [0]
    with pytest.raises(ValueError, match="must not be NaN, got NaN at edge 0"):
        best_edges(value, same)
    nothing = torch.empty(0)
    assert (
        best_edges(nothing, nothing.long())[0].shape
        == ucb(nothing, nothing.long(), nothing.long()).shape
        == (0,)
    )


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_backup_against_a_loop(gamma: float) -> None:
    path, reward = torch.tensor([3, 1, 3, 0]), torch.tensor([1.0, -2.0, 4.0, 0.5])
    count, total = torch.tensor([5, 0, 0, 1]), torch.tensor([1.0, 0.0, 0.0, 2.0], dtype=torch.float64)
    expected_count, expected = count.tolist(), total.tolist()
    returns, left = [], 10.0
    for edge, r in zip(reversed(path.tolist()), reversed(reward.tolist()), strict=True):
        left = r + gamma * left
        returns.insert(0, left)
        expected_count[edge] += 1
        expected[edge] += left
    assert backup(path, 10.0, count=count, total=total, reward=reward, gamma=gamma).tolist() == pytest.approx(
        returns
    )
    assert count.tolist() == expected_count and total.tolist() == pytest.approx(expected)


def test_backup_without_rewards_or_edges() -> None:
    count, total = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    assert backup(torch.tensor([1]), torch.tensor(3.0), count=count, total=total, gamma=0.5).tolist() == [1.5]
    backup(torch.empty(0, dtype=torch.int64), 3.0, count=count, total=total)
    assert count.tolist() == [0, 1] and total.tolist() == [0.0, 1.5]
