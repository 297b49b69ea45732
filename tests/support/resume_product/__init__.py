"""Every sampler, writer, storage, kind of column and checkpointer: resumed is never stopped, in all combinations.

    PYTHONPATH=src:tests/support python -m resume_product

`test_resume_product` runs a part of it. Combinations that a buffer refuses to be made of, or to fill, are counted.
"""

import itertools
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from flatroll.buffers import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    NestedStorageCheckpointer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    TensorStorage,
    TensorStorageCheckpointer,
)

CAPACITY, LENGTH, LANES = 48, 11, 2
PRIORITIES: dict[str, Any] = {"alpha": 0.7, "beta": 0.5}
FRAMES = torch.randint(0, 255, (500, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "fresh": lambda: RandomSampler(max_policy_lag=2),
    "once": lambda: SamplerWithoutReplacement(drop_last=True),
    "once in order, fresh": lambda: SamplerWithoutReplacement(shuffle=False, max_policy_lag=3),
    "slices": lambda: SliceSampler(slice_len=4),
    "slices from starts": lambda: SliceSampler(slice_len=4, by="start", strict_length=True),
    "fresh slices": lambda: SliceSampler(num_slices=3, cache_values=True, max_policy_lag=3),
    "slices once": lambda: SliceSamplerWithoutReplacement(slice_len=4),
    "whole trajectories once": lambda: SliceSamplerWithoutReplacement(num_slices=2, shuffle=False),
    "prioritized": lambda: PrioritizedSampler(CAPACITY, **PRIORITIES, dtype=torch.double),
    "prioritized, fresh": lambda: PrioritizedSampler(
        CAPACITY, **PRIORITIES, max_priority_within_buffer=True, max_policy_lag=3
    ),
    "prioritized slices": lambda: PrioritizedSliceSampler(CAPACITY, **PRIORITIES, slice_len=4),
    "prioritized slices, sums": lambda: PrioritizedSliceSampler(
        CAPACITY, **PRIORITIES, num_slices=3, reduction="mean"
    ),
}
COLUMNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "frames": {"frame_stack": {"observation": 4}},
    "zstd": {"codec": {"observation": "zstd"}},
    "zstd frames": {"frame_stack": {"observation": 4}, "codec": {"observation": "zstd"}},
    "sparse": {"sparse": ["state"]},
    "zstd, sparse": {"codec": {"observation": "zstd"}, "sparse": ["state"]},
}
STORAGES: dict[str, Callable[[], Any]] = {
    "tensors": lambda: TensorStorage(batch(220, CAPACITY)),
    "list": lambda: ListStorage(CAPACITY),
    "stack": lambda: LazyStackStorage(CAPACITY),
}
for _kind, (_name, _options), _compact, _lanes in itertools.product(
    (LazyTensorStorage, LazyMemmapStorage), COLUMNS.items(), (False, True), (False, True)
):
    if _kind is LazyMemmapStorage and {"codec", "sparse"} & _options.keys():
        continue  # files do not take these
    _words = [_kind.__name__[4:-7], _name, *["compact"] * _compact, *["lanes"] * _lanes]
    STORAGES[" ".join(_words)] = partial(_kind, CAPACITY, compact_obs=_compact, ndim=1 + _lanes, **_options)
WRITERS: dict[str, Callable[[], Any]] = {
    "round robin": lambda: None,
    "tensordict": TensorDictRoundRobinWriter,
    "best": lambda: TensorDictMaxValueWriter(rank_key=("next", "reward")),
}
CHECKPOINTERS: dict[str, Callable[[], Any]] = {
    "default": lambda: None,
    "tensor": TensorStorageCheckpointer,
    "flat": FlatStorageCheckpointer,
    "nested": NestedStorageCheckpointer,
    "h5": H5StorageCheckpointer,
}


def batch(first: int, count: int) -> TensorDict:
    """Rows ``first ...`` of one stream: episodes, stacks of 4 frames, a state in some rows, policies that change."""
    row = torch.arange(first, first + count)
    stacks = torch.stack([FRAMES[row + i] for i in range(5)], 1)
    state = torch.where(row[:, None] % 4 == 0, 1.0 + row[:, None].float(), 0.0).expand(-1, 3).contiguous()
    return TensorDict(
        {
            "observation": stacks[:, :4].clone(),
            "state": state,
            "row": row,
            "is_init": (row % LENGTH == 0)[:, None],
            "collector": {"policy_version": row // 20, "traj_ids": row // LENGTH},
            "next": {
                "observation": stacks[:, 1:].clone(),
                "reward": (row * 37 % 101)[:, None].float(),
                "done": (row % LENGTH == LENGTH - 1)[:, None],
            },
        },
        [count],
    )


def extend(buffer: ReplayBuffer, first: int, count: int) -> None:
    if buffer.storage.ndim > 1:
        lanes: Any = [batch(first // LANES + 220 * lane, count // LANES) for lane in range(LANES)]
        buffer.extend(torch.stack(lanes))
    else:
        buffer.extend(batch(first, count))


def draw(buffer: Any, count: int) -> list[Any]:
    """Samples with what is told about them; priorities are updated by each."""
    drawn = []
    for _ in range(count):
        try:
            sample, info = buffer.sample(return_info=True)
        except (RuntimeError, ValueError) as error:  # no fresh rows, or too few for a batch
            drawn.append(str(error))
            continue
        drawn.append((sample, {name: info[name] for name in info}))
        if isinstance(buffer.sampler, PrioritizedSampler):
            buffer.update_priority(
                info["index"], (info["index"] % 5 + 1).float(), info.get("index_generation")
            )
    return drawn


def same(left: Any, right: Any) -> bool:
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, TensorDictBase):
        return left.batch_size == right.batch_size and same(
            dict(left.items(True, True)), dict(right.items(True, True))
        )
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else bool(left == right)


def check(storage: str, sampler: str, writer: str, checkpointer: str, path: Path) -> bool:
    """Whether such a buffer can be; AssertionError unless resumed is never stopped.

    It is saved as it fills, when it is full to its end and as it wraps, and loaded into a new buffer and a used one.
    """

    def new(seed: int) -> ReplayBuffer:
        return ReplayBuffer(
            storage=STORAGES[storage](),
            sampler=SAMPLERS[sampler](),
            writer=WRITERS[writer](),
            checkpointer=CHECKPOINTERS[checkpointer](),
            batch_size=12,
            generator=torch.Generator().manual_seed(seed),
        )

    try:
        probe = new(0)
        extend(probe, 0, 22)
        probe.sample()
    except (ValueError, TypeError, KeyError, RuntimeError):
        return False
    buffer, used, first = new(0), new(1), 0
    extend(used, 4, 30)
    draw(used, 2)
    for count in (2, 22, 24, 4, 30):  # 48 rows fill the ring to its end
        extend(buffer, first, count)
        first += count
        draw(buffer, 2)
        buffer.dumps(path, sync=False)
    for other in (new(2), used):
        state = buffer.state_dict()
        other.loads(path)
        assert same(other[:], buffer[:]), "rows"
        assert same(draw(other, 3), draw(buffer, 3)), "samples"
        # A trajectory that was open is cut by the load: rows that begin one are known to both alike.
        for one in (buffer, other):
            extend(one, 88 if one.storage.ndim == 1 else 88 * LANES, 12)
        assert same(other[:], buffer[:]), "rows written afterwards"
        assert same(draw(other, 3), draw(buffer, 3)), "samples afterwards"
        buffer.load_state_dict(state)
    return True


def main() -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for kinds in itertools.product(STORAGES, SAMPLERS, WRITERS, CHECKPOINTERS):
        storage, _, _, checkpointer = kinds
        if checkpointer != "default" and storage in ("list", "stack"):
            continue  # they have one of their own
        path = Path(tempfile.mkdtemp())
        try:
            counts["resumed" if check(*kinds, path) else "no such buffer"] += 1
        except Exception as error:
            counts["wrong"] += 1
            print(*kinds, f"{type(error).__name__}: {error}", sep=" | ", flush=True)
        finally:
            shutil.rmtree(path)
    print(dict(counts))
    sys.exit(bool(counts["wrong"]))
