"""Copies and pickles of a buffer that other threads extend and sample: each holds the rows of one moment.

In a process of its own, since what is wrong here ends it, or never ends. Run this file with a number for as many
copies of each kind.
"""

import copy
import faulthandler
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from flatroll.buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
)

CAPACITY, LENGTH = 1000, 7


def batch(first: int, rows: int) -> TensorDict:
    """Rows that are their own numbers, in trajectories of ``LENGTH`` rows."""
    number = torch.arange(first, first + rows)
    step = number % LENGTH
    return TensorDict(
        {
            "observation": number[:, None].expand(-1, 16).contiguous(),
            "number": number,
            "is_init": step[:, None] == 0,
            "collector": {"traj_ids": number // LENGTH},
            "next": {
                "observation": number[:, None].expand(-1, 16) + 1,
                "done": step[:, None] == LENGTH - 1,
            },
        },
        [rows],
    )


def memory(**options: Any) -> LazyTensorStorage:
    return LazyTensorStorage(CAPACITY, **options)


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {"storage": memory()},
    "slices": lambda: {"storage": memory(), "sampler": SliceSampler(slice_len=4)},
    "compact": lambda: {"storage": memory(compact_obs=True), "sampler": SliceSampler(slice_len=4)},
    "prioritized": lambda: {"storage": memory(), "sampler": PrioritizedSampler(CAPACITY, 0.7, 0.5)},
    "prioritized slices": lambda: {
        "storage": memory(compact_obs=True),
        "sampler": PrioritizedSliceSampler(CAPACITY, 0.7, 0.5, slice_len=4),
    },
    "passes": lambda: {"storage": memory(), "sampler": SamplerWithoutReplacement()},
    "sparse": lambda: {"storage": memory(sparse=["observation"])},
    "items": lambda: {"storage": ListStorage(CAPACITY)},
}


def check(rows: Any, stretch: bool) -> None:
    """Every row is whole; ``stretch``: they are consecutive numbers, in some order."""
    number = rows["number"]
    assert bool((rows["observation"] == number[:, None]).all())
    assert bool((rows["next", "observation"] == number[:, None] + 1).all())
    assert torch.equal(rows["collector", "traj_ids"], number // LENGTH)
    if stretch:
        ordered = number.sort().values
        assert torch.equal(ordered, torch.arange(int(ordered[0]), int(ordered[0]) + len(ordered)))


def check_copy(buffer: ReplayBuffer) -> None:
    """Its rows, what it draws, and both again when more rows came."""
    for first in (None, 10**6, 2 * 10**6):
        if first is not None:
            buffer.extend(batch(first, CAPACITY // 2))
        listed = isinstance(buffer.storage, ListStorage)
        rows = buffer[:]
        check(torch.stack(rows) if listed else rows, stretch=first is None)
        for _ in range(2):
            sample = buffer.sample()
            check(sample, stretch=False)
            if isinstance(buffer.sampler, SliceSampler):
                inside = ~sample["is_init"][1:, 0]
                step = sample["number"][1:] - sample["number"][:-1]
                assert bool((step == 1)[inside].all())


def run(kind: str, copies: int) -> None:
    members = [ReplayBuffer(batch_size=32, **KINDS[name]()) for name in kind.split(" + ")]
    made: Any = members[0]
    if len(members) > 1:
        made = ReplayBufferEnsemble(*members, batch_size=64, sample_from_all=True, stack=False)
    for member in members:
        member.extend(batch(0, 100))
    stop, failed = threading.Event(), list[BaseException]()

    def extend() -> None:
        first = 100
        while not stop.is_set():
            rows = 1 + first % 97
            for member in members:
                member.extend(batch(first, rows))
            first += rows

    def sample() -> None:
        while not stop.is_set():
            rows, info = made.sample(return_info=True)
            check(rows.reshape(-1), stretch=False)
            if kind.startswith("prioritized"):
                made.update_priority(info["index"], torch.rand(len(rows)), info["index_generation"])

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in (extend, sample)]
    for thread in threads:
        thread.start()
    try:
        for i in range(copies):
            other = copy.deepcopy(made) if i % 2 else pickle.loads(pickle.dumps(made))
            for member in other[:] if len(members) > 1 else [other]:
                check_copy(member)
            assert not failed, failed
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed, failed


def shared() -> None:
    """Rows in files: a pickle names them, so the copy sees what is written later; a deep copy has its own."""
    buffer = ReplayBuffer(storage=LazyMemmapStorage(50))
    buffer.extend(batch(0, 10))
    other, own = pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer)
    buffer.extend(batch(10, 10))
    assert (len(other), len(own)) == (20, 10)
    other.extend(batch(20, 5))
    assert len(buffer) == 25 and torch.equal(buffer["number"], torch.arange(25))


def test_copies_of_a_buffer_under_load_hold_the_rows_of_one_moment() -> None:
    # neither is known to the process that runs this file
    import interpreters
    from forms import scaled

    copies = scaled(quick="2", long="10")  # a deep copy and a pickle
    found = interpreters.run([sys.executable, __file__, copies], timeout=600)
    assert found.returncode == 0, found.stderr[-3000:]


if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-4)
    for kind in (*KINDS, "slices + compact"):
        run(kind, int(sys.argv[1]))
        print(kind, "right", flush=True)
    shared()
