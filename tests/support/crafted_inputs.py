"""Indices, tensors and numbers that nobody should hand in: the script of `test_crafted_inputs`, in its own process.

    python crafted_inputs.py [CALLS PER KIND] [SEED]

Each call raises a Python error, and then nothing has changed, or its answer is that of plain torch.
"""

import faulthandler
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from crafted_states import CAPACITY, KINDS, NUMBERS, batch, filled, same
from tensordict import TensorDict

from flatroll.buffers import ListStorage, PrioritizedSampler, ReplayBuffer, TensorDictMaxValueWriter
from flatroll.kernels.rows.gather import HostBlock
from flatroll.kernels.trees.sum_tree import SumTree

#: Tensors without readable memory: a write that meets one must not have dropped rows before.
UNREADABLE: list[Callable[[Any], Any]] = [lambda t: t.to("meta"), lambda t: t.to_sparse()]
#: Tensors with the same values in another form, which is as good, or with other values.
FORMS: list[Callable[[Any], Any]] = [
    lambda t: t.repeat_interleave(2, 0)[::2],
    lambda t: t[:1].expand(t.shape),
    lambda t: t.unsqueeze(-1).repeat_interleave(3, -1)[..., 1],
    lambda t: t.clone().requires_grad_() if t.is_floating_point() else t,
    lambda t: torch.nn.Parameter(t.clone(), requires_grad=False),
    lambda t: t.to(torch.int16),
    lambda t: t.double(),
    lambda t: t.to(torch.complex64),
    lambda t: t[:0],
    lambda t: t.unsqueeze(-1),
    lambda t: t.unsqueeze(-1).expand(*t.shape, 0) if t.ndim == 1 else t[..., :0],
    lambda t: torch.full_like(t, True if t.dtype is torch.bool else -1),
    lambda t: torch.complex(t.float(), t.float()).imag if t.is_floating_point() else t,
    lambda t: (t.to(torch.complex64).conj().imag * 0 + t).to(t.dtype),
    lambda t: t.flip(0),
]


def unchanged(buffer: ReplayBuffer, call: Callable[[], Any]) -> tuple[bool, Any]:
    """Make a call; (True, its answer), or (False, None) if it raised, having changed nothing."""
    before = buffer.state_dict()
    try:
        return True, call()
    except Exception as error:
        assert same(buffer.state_dict(), before), f"{type(error).__name__} changed the buffer: {error}"
        return False, None


def index(draw: random.Random) -> Any:
    """Something to index 40 rows by."""
    numbers = [*NUMBERS, -40, -41, 39, 40]
    few = [draw.choice([-40, -1, 0, 3, 39]) for _ in range(draw.randrange(6))]
    wild = [draw.choice(numbers) for _ in range(draw.randrange(4))]
    mask = torch.rand(draw.choice([39, 40, 40, 40, 41])) < 0.5
    return draw.choice(
        [
            draw.choice(numbers),
            slice(
                draw.choice([None, *numbers]),
                draw.choice([None, *numbers]),
                draw.choice([None, 1, 2, -1, 0, 50]),
            ),
            few,
            wild,
            torch.tensor(few, dtype=torch.int64),
            torch.tensor(wild, dtype=torch.int64),
            torch.tensor(few, dtype=torch.int32),
            torch.tensor(few, dtype=torch.float32),
            torch.tensor([3]).expand(4),
            torch.arange(40)[::3],
            torch.tensor(few, dtype=torch.int64, device="meta"),
            torch.tensor([1, 2]).to_sparse(),
            mask,
            mask[:, None],
            torch.tensor([[0, 1], [2, 3]]),
            2.5,
            None,
            ...,
            True,
            "nothing",
            (),
            (0, 1),
        ]
    )


def extend(buffer: ReplayBuffer, draw: random.Random, ways: list[Callable[[Any], Any]]) -> None:
    data: Any = batch(1000, draw.choice([0, 1, 13, 90]))
    key = draw.choice([*data.keys(True, True)])
    storage = buffer.storage
    if ways is UNREADABLE and draw.random() < 0.2 and "number" in storage.columns:  # the storage's own memory
        data = batch(1000, 13)
        data["number"] = storage.columns["number"].data[5:18]  # type: ignore[attr-defined]
    elif draw.random() < 0.1:
        data = draw.choice([None, 5, torch.zeros(()), [], [3], {}, data.unsqueeze(0), [data, 5], "rows"])
    elif draw.random() < 0.1:
        data = data.exclude(key)
    else:
        changed = draw.choice(ways)(data[key])
        rows = data.to_dict()  # without the checks of a tensordict
        where = rows
        for name in key[:-1] if isinstance(key, tuple) else ():
            where = where[name]
        where[key[-1] if isinstance(key, tuple) else key] = changed
        try:
            data = TensorDict(rows, [len(data)])
        except Exception:
            return  # tensordict refuses it
    want: Any = (
        data.clone()
        if isinstance(data, TensorDict)
        and not any(value.is_meta or value.layout is not torch.strided for _, value in data.items(True, True))
        else None
    )
    accepted, slots = unchanged(buffer, lambda: buffer.extend(data))
    if not accepted or want is None or isinstance(storage, ListStorage) or not len(slots):
        return
    if not isinstance(buffer.writer, TensorDictMaxValueWriter):
        rows, last = buffer[slots[-CAPACITY:]], want[-CAPACITY:]
        for name in last.keys(True, True):
            assert same(rows[name].contiguous(), last[name].detach().contiguous().clone()), name


def get(buffer: ReplayBuffer, draw: random.Random) -> None:
    where, full = index(draw), buffer["number"]
    accepted, rows = unchanged(buffer, lambda: buffer[where])
    try:
        want = full[where] if not isinstance(where, slice) or (where.step or 1) > 0 else None
    except Exception:
        assert not accepted or where in ("number",), f"{where!r} gave rows"
        return
    plain = isinstance(where, int | slice | list) or (
        isinstance(where, torch.Tensor) and where.device.type == "cpu"
    )
    if accepted and want is not None and plain and not (isinstance(where, torch.Tensor) and where.is_sparse):
        assert same(rows["number"], want), where


def put(buffer: ReplayBuffer, draw: random.Random, ways: list[Callable[[Any], Any]]) -> None:
    where, full = index(draw), buffer["number"]
    try:
        count = full[where].shape
        value = draw.choice([lambda t: t, *ways])(torch.arange(7000, 7000 + count.numel()).view(count))
        data = TensorDict({"number": value}, count)
    except Exception:
        return
    accepted, _ = unchanged(buffer, lambda: buffer.__setitem__(where, data))
    if accepted and value.layout is torch.strided and not value.is_meta:
        want = full.clone()
        want[where] = value
        unique = torch.arange(len(full))[where]
        if isinstance(unique, torch.Tensor) and len(unique.unique()) == unique.numel():
            assert same(buffer["number"], want), where


def sample(buffer: ReplayBuffer, draw: random.Random) -> None:
    size: Any = draw.choice([1, 3, 8, 0, -5, 2.5, True, None, "x", 100, torch.tensor(4), np.int64(8)])
    try:
        rows = buffer.sample(size)
    except Exception:
        return
    assert len(rows) <= 100


def prioritize(buffer: ReplayBuffer, draw: random.Random) -> None:
    wild = torch.tensor([draw.choice([-1, 0, 3, 39, 39, *NUMBERS]) for _ in range(4)])
    slots: Any = draw.choice(
        [wild, wild[:2], wild.clamp(0, 39), wild.float(), wild.to("meta"), wild[:1].expand(4), 3]
    )
    value: Any = draw.choice(
        [
            1.0,
            -1.0,
            float("nan"),
            float("inf"),
            torch.rand(4),
            torch.rand(3),
            torch.rand(4, 2),
            torch.rand(4).to_sparse(),
            torch.rand(8)[::2],
            torch.full((4,), 1e30),
            torch.zeros(4),
            torch.zeros(0),
            torch.rand(4).to("meta"),
        ]
    )
    generation: Any = draw.choice(
        [None, None, torch.zeros(4), torch.zeros(4, dtype=torch.int64), torch.zeros(2).long()]
    )
    unchanged(buffer, lambda: buffer.update_priority(slots, value, generation))


def kernels(draw: random.Random) -> None:
    """The classes that hold memory by its address."""
    tree, weights = SumTree(40), np.ones(40)
    tree.set(np.arange(40), weights)
    places = np.array([draw.choice([0, 3, 39, *NUMBERS]) for _ in range(draw.randrange(4))], np.int64)
    values = np.array(
        [draw.choice([0.0, 2.0, -1.0, np.nan, np.inf]) for _ in range(draw.choice([len(places), 2]))]
    )
    calls: list[Callable[[], Any]] = [
        lambda: tree.set(places, values),
        lambda: tree.set(places, np.ones(len(places))),
        lambda: tree.fill(
            draw.choice([0, *NUMBERS]), draw.choice([0, 5, *NUMBERS]), draw.choice([1.0, np.nan, -1.0])
        ),
    ]
    before = tree.leaves.copy()
    try:
        draw.choice(calls)()
    except (IndexError, ValueError, OverflowError):
        assert same(tree.leaves, before)
    assert 0 <= tree.total == tree.leaves.sum()
    try:
        found = tree.sample(np.array([draw.choice([0.0, 0.5, 0.999, 1.0, -1.0, np.nan]) for _ in range(3)]))
        assert bool((tree.leaves[found] > 0).all())
    except ValueError as error:
        assert "shares" in str(error)
    columns = [torch.arange(10), torch.arange(20.0).view(10, 2)]
    block = HostBlock(columns)
    slots = torch.tensor([draw.choice([0, 9, 10, *NUMBERS]) for _ in range(3)])
    try:
        assert same(block.take(slots)[0], columns[0][slots])
    except IndexError:
        assert bool(((slots < 0) | (slots > 9)).any())
    try:
        block.write(
            draw.choice([0, 8, *NUMBERS]),
            [torch.zeros(3).long(), torch.zeros(3, 2)],
            0,
            draw.choice([1, 3, -1]),
        )
    except (IndexError, OverflowError):
        assert same(columns[0], torch.arange(10))


def ranks() -> None:
    """An age that no row has is an IndexError, of every ring."""
    for kind in ("plain", "slices", "best"):
        ring = filled(kind, 60).ring
        assert len(ring.slots_by_age(torch.arange(len(ring)))) == len(ring)
        for rank in (-1, len(ring), 2**62):
            try:
                ring.slots_by_age(torch.tensor([0, rank]))
                raise AssertionError(f"age {rank} has a slot")
            except IndexError:
                pass


def main(count: int = 60, seed: int = 0, unreadable: int = 0) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    ways = UNREADABLE if unreadable else FORMS
    for kind in KINDS:
        draw, buffer = random.Random(f"{kind} {seed}"), filled(kind, 60)
        torch.manual_seed(seed)
        calls: list[Callable[[ReplayBuffer, random.Random], None]] = [
            lambda buffer, draw: extend(buffer, draw, ways),
            lambda buffer, draw: put(buffer, draw, ways),
        ]
        if not unreadable:
            calls += [get, sample]
        if isinstance(buffer.storage, ListStorage):
            calls = [sample]
        if isinstance(buffer.sampler, PrioritizedSampler) and not unreadable:
            calls.append(prioritize)
        for i in range(count):
            if i % 20 == 19:
                buffer = filled(kind, 60)
            print(kind, seed, i, file=sys.stderr, flush=True)  # of the one that ends the process
            draw.choice(calls)(buffer, draw)
    draw = random.Random(seed)
    for _ in range(count if not unreadable else 0):
        kernels(draw)
    ranks()
    print("all right")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
