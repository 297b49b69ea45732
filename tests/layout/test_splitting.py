"""Splitting at its edges: ids that come back, slices side by side, nested layouts, many trajectories."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode

from flatroll.layout import join, split_trajectories


def rows(ids, **columns):
    ids = torch.tensor(ids)
    return TensorDict(
        {"x": torch.arange(1, len(ids) + 1), "collector": {"traj_ids": ids}, **columns}, [len(ids)]
    )


def test_an_id_that_comes_back_is_another_piece():
    """Ids 0, 1, 0 are three trajectories."""
    batch = rows([0] * 3 + [1] * 2 + [0] * 4)
    padded = split_trajectories(batch)
    assert padded["collector", "mask"].sum(-1).tolist() == [3, 2, 4]
    assert (join(padded) == batch).all()


def test_slices_of_one_trajectory_side_by_side_stay_apart():
    """Two slices of three rows do not become one of six."""
    start = torch.tensor([True, False, False, True, False, False]).unsqueeze(-1)
    padded = split_trajectories(rows([0] * 6, is_init=start))
    assert padded["x"].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_splitting_by_done_takes_leading_dimensions():
    done = torch.zeros(2, 2, 3, 1, dtype=torch.bool)
    done[0, 1, 0] = True
    batch = TensorDict({"x": torch.arange(12).view(2, 2, 3), "next": {"done": done}}, [2, 2, 3])
    padded = split_trajectories(batch)
    assert padded["collector", "mask"].sum(-1).tolist() == [3, 1, 2, 3, 3]
    assert padded["x"].tolist() == [[0, 1, 2], [3, 0, 0], [4, 5, 0], [6, 7, 8], [9, 10, 11]]


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors:UserWarning"
)  # torch's own, of strided ones
def test_the_nested_layout_that_was_asked_for():
    """Jagged or strided as asked, also for a single trajectory or equal lengths."""
    for ids, time in ([0, 0, 1], -1), ([0, 0, 0], 3), ([0, 1, 2], 1):
        for layout in (torch.jagged, torch.strided):
            parts = split_trajectories(rows(ids), as_nested=layout)
            nested = parts["x"]
            assert nested.is_nested and nested.layout is layout
            assert sum(len(piece) for piece in nested.unbind()) == 3
            assert join(parts).batch_size == (3,)
            # In the strided layout time is a batch dimension, as in the peer's: -1, or the one length of all.
            assert parts.batch_size == (
                (len(set(ids)), time) if layout is torch.strided else (len(set(ids)),)
            )
            if layout is torch.strided and time == -1:
                assert parts.to_padded_tensor(mask_key="mask")["mask"].sum() == 3
    assert split_trajectories(rows([0, 0, 1]), as_nested=True)["x"].layout is torch.jagged


@pytest.mark.parametrize("as_nested", [False, torch.jagged])
def test_splitting_costs_the_same_operations_for_few_and_many_trajectories(as_nested):

    class Count(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.total += 1
            return func(*args, **(kwargs or {}))

    # The first nested tensor of a process takes a few operations more.
    split_trajectories(rows([0, 1]), as_nested=as_nested)

    totals = []
    for n in (2, 2000):
        batch = rows(np.repeat(np.arange(n), 5).tolist())
        with Count() as count:
            split_trajectories(batch, as_nested=as_nested)
        totals.append(count.total)
    assert totals[0] == totals[1]
