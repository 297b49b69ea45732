"""The tables of the trajectory index grow without long copies, and hold what a plain list of rows says."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import TrajectoryIndex
from flatroll.buffers.index import trajectory_index
from flatroll.buffers.index.fragments import BoundaryKeys, Fragments
from flatroll.kernels.rows.records import STATE


def write(index: TrajectoryIndex, traj: list[int], done: list[bool]) -> None:
    batch = TensorDict(
        {"next": {"done": torch.tensor(done)[:, None]}, "collector": {"traj_ids": torch.tensor(traj)}},
        [len(traj)],
    )
    index.write(Fragments.read(batch, BoundaryKeys.probe(batch)))


def assert_rows(index: TrajectoryIndex, rows: list[tuple[int, bool]]) -> None:
    """Compare the index with the trajectory of each row that was ever written."""
    stored = range(len(rows) - len(index), len(rows))
    by_traj: dict[int, list[int]] = {}
    for row in stored:
        by_traj.setdefault(rows[row][0], []).append(row % index.capacity)

    following = dict.fromkeys((row % index.capacity for row in stored), -1)
    for slots in by_traj.values():
        following.update(itertools.pairwise(slots))

    assert index.trajectories == len(by_traj)
    assert index.longest == max(map(len, by_traj.values()))
    slots = torch.tensor(list(following))
    assert index.next_row(slots).tolist() == list(following.values())
    for traj in random.Random(0).sample(list(by_traj), min(5, len(by_traj))):
        assert index.find_rows(traj).tolist() == by_traj[traj]

    draw = index.draw(20, 4, generator=torch.Generator().manual_seed(0))
    assert draw.firsts is not None and draw.lasts is not None
    for first, last in zip(draw.firsts.tolist(), draw.lasts.tolist(), strict=True):
        walked = draw.slots[first : last + 1].tolist()
        assert [following[slot] for slot in walked[:-1]] == walked[1:]


@pytest.mark.parametrize("large", [64, 2**18])
@pytest.mark.parametrize("capacity", [1, 70, 100, 333])
def test_tables_of_any_length_hold_the_rows(
    capacity: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Episodes get shorter and longer, several envs interleave, and the tables grow on any lap of their rings."""
    monkeypatch.setattr(trajectory_index, "_LARGE", large)
    choose = random.Random(capacity)
    index = TrajectoryIndex(capacity)
    rows: list[tuple[int, bool]] = []
    ids = list(range(3))
    created = 3

    for turn in range(120):
        longest = (30, 1, 6)[turn // 20 % 3]
        new = []
        for _ in range(choose.randint(1, min(capacity, 40))):
            env = choose.randrange(3)
            done = choose.random() < 1 / longest
            new.append((ids[env], done))
            if done:
                ids[env] = created
                created += 1
        write(index, [traj for traj, _ in new], [done for _, done in new])
        rows += new
        if turn % 5 == 0:
            assert_rows(index, rows)

        if turn % 40 == 39:
            state = index.state_dict()
            loaded = TrajectoryIndex(capacity)
            loaded.load_state_dict(state)
            assert_rows(loaded, rows)
            # In files, a fragment's place is its number modulo a power of two, as it has always been.
            size = len(state["fragments"])
            assert size & (size - 1) == 0 and "base" not in (state["state"].dtype.names or ())
            first = int(state["state"]["first"][0])
            numbers = np.arange(first, int(state["state"]["end"][0])) & (size - 1)
            assert (np.diff(state["fragments"]["first"][numbers]) > 0).all()


def test_kernels_count_in_the_memory_to_which_an_index_was_moved() -> None:
    index = TrajectoryIndex(100)
    memory = np.zeros(STATE.itemsize, np.uint8)
    index.move(memory)

    rows = [(row // 30, row % 30 == 29) for row in range(250)]
    for first in range(0, 250, 50):
        part = rows[first : first + 50]
        write(index, [traj for traj, _ in part], [done for _, done in part])

    assert memory.view(STATE)["written"][0] == 250
    assert_rows(index, rows)


def test_one_row_episodes_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a few fragments on, the tables are reserved for all rows: no later call copies them."""
    monkeypatch.setattr(trajectory_index, "_LARGE", 256)
    sizes: list[tuple[int, int]] = []
    index = TrajectoryIndex(100_000)
    for first in range(0, 250_000, 100):
        write(index, list(range(first, first + 100)), [True] * 100)
        tables: Any = index.tables
        size = len(tables[2]), len(tables[3])
        if not sizes or sizes[-1] != size:
            sizes.append(size)

    assert sizes == [(128, 128), (256, 256), (100_000, 100_000)]
    assert index.nbytes <= 96 * 100_000
    assert index.next_row(torch.arange(100_000)).eq(-1).all()


def test_long_episodes_take_no_more_memory_than_their_fragments_need() -> None:
    """Each write of 100 rows has two fragments; the tables are as long as a power of two says."""
    index = TrajectoryIndex(10_000)
    for first in range(0, 30_000, 100):
        rows = range(first, first + 100)
        write(index, [row // 150 for row in rows], [row % 150 == 149 for row in rows])
    tables: Any = index.tables
    assert index.fragments < 120
    assert (len(tables[2]), len(tables[3])) == (128, 128)
