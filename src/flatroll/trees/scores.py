"""Scores of edges for tree search, and the update of a path: functions of flat tensors, one entry per edge.

Edges are numbered as in `MCTSForest.edges`. Their numbers do not change when the forest grows, so a search can keep
statistics by edge. Each edge has a *parent*, the number of the state that it leaves; edges of several parents may be
mixed.
"""

import torch
from torch import Tensor

from flatroll.kernels import return_scan
from flatroll.layout.checks import as_text, check_number, check_tensors

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def puct(
    value: Tensor,
    count: Tensor,
    prior: Tensor,
    parent: Tensor,
    c: float = 1.25,
    unvisited: float = float("inf"),
) -> Tensor:
    """Compute AlphaZero's score, ``value + c * prior * sqrt(visits of the parent) / (1 + count)``.

    Silver et al., "Mastering chess and shogi by self-play" (2017). A parent's visits are the sum over its edges here.

    Args:
        value: mean value of each edge, float ``[E]``; it is not read where ``count`` is 0.
        count: visits of each edge, ``[E]``.
        prior: probability of each edge's action, float ``[E]``.
        parent: number of the state that each edge leaves, int64 ``[E]``.
        c: weight of the second term. Default 1.25.
        unvisited: value of edges with ``count`` 0. Default inf, so that each edge is visited once before any twice;
            AlphaZero uses 0.

    Returns:
        float ``[E]``.

    >>> nothing = float("nan")
    >>> values, counts = torch.tensor([0.5, nothing]), torch.tensor([3, 0])
    >>> puct(values, counts, torch.tensor([0.4, 0.6]), torch.tensor([7, 7]), c=1.0, unvisited=0.0)
    tensor([0.6732, 1.0392])
    """
    _need_edges(value=value, count=count, prior=prior, parent=parent)
    c = float(check_number("c", c))
    unvisited = float(check_number("unvisited", unvisited))
    visits = _visits(count, parent).to(prior.dtype)
    mean = torch.where(count > 0, value, unvisited)
    return mean + c * prior * visits.sqrt() / (1 + count)


def ucb(value: Tensor, count: Tensor, parent: Tensor, c: float = 2**0.5) -> Tensor:
    """Compute the upper confidence bound, ``value + c * sqrt(log(visits of the parent) / count)``.

    Kocsis and Szepesvári, "Bandit based Monte-Carlo planning" (2006).

    Args:
        value: mean value of each edge, float ``[E]``; it is not read where ``count`` is 0.
        count: visits of each edge, ``[E]``.
        parent: number of the state that each edge leaves, int64 ``[E]``.
        c: weight of the second term. Default the square root of 2.

    Returns:
        float ``[E]``; inf where ``count`` is 0.

    >>> ucb(torch.tensor([0.5, 0.0, 0.1]), torch.tensor([3, 0, 1]), torch.tensor([7, 7, 9]), c=1.0)
    tensor([1.1051,    inf, 0.1000])
    """
    _need_edges(value=value, count=count, parent=parent)
    c = float(check_number("c", c))
    visits = _visits(count, parent).to(value.dtype).clamp(min=1)
    bound = value + c * (visits.log() / count.clamp(min=1)).sqrt()
    return torch.where(count > 0, bound, float("inf"))


def _need_edges(**columns: Tensor) -> None:
    """Raise unless all columns, including ``parent``, are real tensors ``[E]`` on one device."""
    check_tensors(**columns)
    parent = columns["parent"]
    if parent.ndim != 1 or parent.dtype not in _INTEGERS or parent.is_sparse:
        raise ValueError(f"parent must be an integer tensor [E], got {as_text(parent)}")

    for name, column in columns.items():
        like = column.shape == parent.shape and column.device == parent.device
        if not like or column.is_complex() or column.is_sparse:
            raise ValueError(
                f"{name} must be a real tensor of the shape and device of parent, got {as_text(column)} with "
                f"parent {as_text(parent)}"
            )


def _visits(count: Tensor, parent: Tensor) -> Tensor:
    """Return the sum of the counts of all edges with the same parent, ``[E]``."""
    number = torch.unique(parent, return_inverse=True)[1]
    return torch.zeros_like(count).index_add_(0, number, count)[number]


def best_edges(score: Tensor, parent: Tensor) -> tuple[Tensor, Tensor]:
    """Find each parent's edge with the highest score, the first of several equal ones.

    Args:
        score: float ``[E]`` without NaN.
        parent: int64 ``[E]``.

    Returns:
        the parents, ascending, int64 ``[P]``, and the position of the best edge of each, int64 ``[P]``.

    Raises:
        ValueError: a score is NaN.

    >>> best_edges(torch.tensor([0.1, 3.0, 2.0, 3.0]), torch.tensor([5, 5, 4, 5]))
    (tensor([4, 5]), tensor([2, 1]))
    """
    _need_edges(score=score, parent=parent)
    if not score.is_floating_point():
        raise TypeError(f"score must be a floating tensor, got {as_text(score)}")
    if bool(score.isnan().any()):
        raise ValueError(f"score must not be NaN, got NaN at edge {int(score.isnan().nonzero()[0, 0])}")

    parents, number = torch.unique(parent, return_inverse=True)
    most = score.new_full((len(parents),), -torch.inf).scatter_reduce_(0, number, score, "amax")
    edges = torch.arange(len(score), device=score.device)
    first = torch.where(score == most[number], edges, len(score))
    return parents, torch.full_like(parents, len(score)).scatter_reduce_(0, number, first, "amin")


def backup(
    path: Tensor,
    value: Tensor | float,
    *,
    count: Tensor,
    total: Tensor,
    reward: Tensor | None = None,
    gamma: float = 1.0,
) -> Tensor:
    """Add the return of a simulation to the edges of its path, in place.

    The return of edge i of the path is ``G[i] = reward[i] + gamma * G[i + 1]``, and after the last edge it is
    ``value``. An edge that occurs twice is counted twice.

    Args:
        path: numbers of the edges from the root on, int64 ``[L]``.
        value: value of the state after the last edge; 0 if the episode terminated there.
        count: visits of all edges ``[E]``, changed in place.
        total: sums of returns of all edges, float ``[E]``, changed in place; ``total / count`` is the mean value.
        reward: rewards of the path's edges, ``[L]``. Default: zeros.
        gamma: discount per step. Default 1.0.

    Returns:
        the returns, ``[L]`` of the dtype of ``total``.

    >>> count, total = torch.zeros(4, dtype=torch.int64), torch.zeros(4)
    >>> backup(torch.tensor([2, 0]), 8.0, count=count, total=total, reward=torch.tensor([1.0, 2.0]), gamma=0.5)
    tensor([4., 6.])
    >>> count, total
    (tensor([1, 0, 1, 0]), tensor([6., 0., 4., 0.]))
    """
    no = torch.zeros(len(path), dtype=torch.bool)
    if reward is None:
        rewards = no.to(total.dtype)
    else:
        rewards = reward.to("cpu", total.dtype).reshape(len(path))
    next_value = torch.full_like(rewards, float(value))  # read only after the last edge
    returns = return_scan(gamma, 1.0, rewards, next_value, no, no).to(total.device)

    count.index_add_(0, path, torch.ones_like(path, dtype=count.dtype))
    total.index_add_(0, path, returns)
    return returns
