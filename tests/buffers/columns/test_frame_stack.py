"""Frame stacks come back as the env stacked them, however they were written, and cost one frame per row."""

import copy
import pickle
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from flatroll.buffers import DiskStorage, LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.buffers.columns.column import After, differ
from flatroll.buffers.columns.frame_stack import FrameColumn, check_stack, match, match_by_torch
from flatroll.buffers.columns.zstd import ZstdColumn

FRAME = (2, 4)


class Env:
    """Stacks whose frames say (env, episode, step); episodes begin as ``pad`` says and may end with a final stack."""

    def __init__(
        self, number: int, pad: str = "repeat", stack: int = 4, dtype: torch.dtype = torch.uint8
    ) -> None:
        self.number, self.pad, self.stack, self.dtype = number, pad, stack, dtype
        self.episode = self.step = 0
        self.frames: list[Tensor] = []

    def frame(self, step: int) -> Tensor:
        where = torch.tensor([self.number, self.episode % 100, step, 7], dtype=torch.int64)
        return where.expand(FRAME).to(self.dtype)

    def next(self, done: bool = False) -> tuple[Tensor, Tensor]:
        """The stack before a step and the one after it."""
        if not self.frames:
            first = self.frame(0)
            before = {
                "repeat": lambda i: first,
                "zero": lambda i: first * 0,
                "arbitrary": lambda i: self.frame(200 + i),
            }
            self.frames = [before[self.pad](i) for i in range(self.stack - 1)] + [first]
        now = torch.stack(self.frames)
        self.step += 1
        self.frames = [*self.frames[1:], self.frame(self.step)]
        after = torch.stack(self.frames)
        if done:
            self.frames, self.step = [], 0
            self.episode += 1
        return now, after


def column_of(rows: int, stack: int = 4, **options: Any) -> FrameColumn:
    return FrameColumn(rows, stack, torch.Size([stack, *FRAME]), options.pop("dtype", torch.uint8), **options)


def episodes(lengths: list[int], pad: str = "repeat", **options: Any) -> tuple[Tensor, Tensor]:
    """Stacks of whole episodes in order, and the final stack of each."""
    env = Env(1, pad, **options)
    steps = [env.next(done=t == n - 1) for n in lengths for t in range(n)]
    ends = np.cumsum(lengths) - 1
    return torch.stack([now for now, _ in steps]), torch.stack([steps[i][1] for i in ends])


def everything(column: FrameColumn) -> Tensor:
    return column.take(torch.arange(len(column.refs)))


def check_books(column: FrameColumn, *sides: FrameColumn) -> None:
    """Counts, free list and stored numbers agree."""
    named = Counter(int(f) for c in (column, *sides) for f in c.refs.reshape(-1) if f)
    pool = column.frames
    state, high = pool.state[0], int(pool.state[0]["high"])
    assert {f: int(pool.counts[f]) for f in range(high) if pool.counts[f] > 0} == dict(named)
    free, at = [], int(state["free"])
    while at:
        free.append(at)
        at = -1 - int(pool.counts[at])
    assert len(free) == len(set(free)) == state["spare"]
    assert not free or free[-1] == state["last"]
    assert sorted([*free, *named]) == list(range(1, high))
    assert column.frames_in_use == len(named)


# -- what is read is what was written ------------------------------------------------------------------------


@pytest.mark.parametrize("pad", ["repeat", "zero", "arbitrary"])
@pytest.mark.parametrize("make", [None, ZstdColumn], ids=["plain", "zstd"])
def test_rows_come_back_as_the_env_stacked_them(pad: str, make: Any) -> None:
    stacks, _ = episodes([1, 2, 3, 7, 30, 4, 1], pad)
    column = column_of(len(stacks), make=make)
    column.write(0, stacks)
    assert torch.equal(everything(column), stacks)
    order = torch.randperm(len(stacks))
    assert torch.equal(column.take(order), stacks[order])
    check_books(column)


@pytest.mark.parametrize(("pad", "first"), [("repeat", 1), ("zero", 2), ("arbitrary", 4)])
def test_an_episode_costs_a_frame_per_row_and_what_its_first_row_needs(pad: str, first: int) -> None:
    stacks, _ = episodes([20, 30, 10], pad)
    column = column_of(60)
    column.write(0, stacks[:20])
    before = column.frames_in_use
    column.write(20, stacks[20:])
    assert column.frames_in_use - before == 2 * first + 29 + 9


@pytest.mark.parametrize("stack", [2, 3, 5])
def test_any_number_of_frames(stack: int) -> None:
    stacks, _ = episodes([9, 4], stack=stack)
    column = column_of(13, stack)
    column.write(0, stacks)
    assert torch.equal(everything(column), stacks)
    assert column.frames_in_use == 13


@pytest.mark.parametrize(
    ("dtype", "frame"),
    [
        (torch.uint8, (84, 84)),
        (torch.uint8, (3,)),
        (torch.uint8, ()),
        (torch.bool, (5, 2)),
        (torch.float32, (3, 3)),
        (torch.float64, (2,)),
        (torch.float16, (3,)),
        (torch.bfloat16, (7,)),
        (torch.uint16, (3,)),
        (torch.int64, ()),
        (torch.complex64, (3,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [None, ZstdColumn], ids=["plain", "zstd"])
def test_every_dtype_and_frame_shape(dtype: torch.dtype, frame: tuple[int, ...], make: Any) -> None:
    size = max(1, int(np.prod(frame))) * dtype.itemsize
    seeded = torch.Generator().manual_seed(0)  # two frames that are equal by chance would be kept once
    most = 2 if dtype is torch.bool else 256
    data = torch.randint(0, most, (23, size), dtype=torch.uint8, generator=seeded)
    frames = data.view(-1).view(dtype).view(23, *frame)
    stacks = frames[torch.arange(20)[:, None] + torch.arange(4)]
    column = FrameColumn(20, 4, stacks.shape[1:], dtype, make=make)
    column.write(0, stacks)
    back = everything(column)
    assert back.dtype is dtype and back.shape == stacks.shape
    assert not differ(back, stacks).any()
    if size > 4:
        assert column.frames_in_use == 23


def test_what_differs_in_one_bit_is_not_shared() -> None:
    stacks, _ = episodes([8], dtype=torch.float32)
    stacks[4, 1, 0, 0] = -0.0
    stacks[5, 0, 0, 0] = 0.0
    stacks[6, 3, 0, 0] = torch.nan
    column = column_of(8, dtype=torch.float32)
    column.write(0, stacks)
    assert not differ(everything(column), stacks).any()


def test_values_that_are_no_block_of_aligned_memory() -> None:
    stacks, _ = episodes([40])
    packed = torch.zeros(stacks.numel() + 3, dtype=torch.uint8)
    packed[3:] = stacks.view(-1)
    column = column_of(40)
    column.write(0, packed[3:].view(stacks.shape)[:10])
    column.write(10, stacks.repeat_interleave(2, 0)[::2][10:20])
    column.write(
        20,
        torch.from_numpy(np.frombuffer(b"123" + stacks.numpy().tobytes(), np.uint8)[3:].copy()).view(
            -1, 4, *FRAME
        )[20:],
    )
    assert torch.equal(everything(column), stacks)
    assert column.frames_in_use == 40


def test_rows_never_written_are_zeros_and_own_nothing() -> None:
    for make in (None, ZstdColumn):
        column = column_of(5, make=make)
        column.write(1, episodes([2])[0])
        assert not everything(column)[[0, 3, 4]].any()
        column.write(3, torch.zeros((2, 4, *FRAME), dtype=torch.uint8))
        check_books(column)


@pytest.mark.parametrize("make", [None, ZstdColumn], ids=["plain", "zstd"])
def test_no_rows_at_all(make: Any) -> None:
    column = column_of(5, make=make)
    column.write(2, torch.zeros((0, 4, *FRAME), dtype=torch.uint8))
    column.put(torch.zeros(0, dtype=torch.int64), torch.zeros((0, 4, *FRAME), dtype=torch.uint8))
    assert column.take(torch.zeros(0, dtype=torch.int64)).shape == (0, 4, *FRAME)
    assert column.pool().take(torch.zeros(0, dtype=torch.int64)).shape == (0, 4, *FRAME)


# -- the ring ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 7, 20])
@pytest.mark.parametrize("make", [None, ZstdColumn], ids=["plain", "zstd"])
def test_laps_around_a_ring_keep_one_frame_per_row(batch: int, make: Any) -> None:
    """Rows whose head was dropped keep their frames; the others are given up."""
    stacks, _ = episodes([200])
    column = column_of(20, make=make)
    expected = torch.zeros((20, 4, *FRAME), dtype=torch.uint8)
    slot = 0
    for first in range(0, 200, batch):
        values = stacks[first : first + batch]
        fit = min(len(values), 20 - slot)
        column.write(slot, values[:fit])
        if fit < len(values):
            column.write(0, values[fit:])
        for i, value in enumerate(values):
            expected[(slot + i) % 20] = value
        slot = (slot + len(values)) % 20
        assert torch.equal(everything(column), expected)
        assert column.frames_in_use <= 20 + 2 * 3
        check_books(column)


def test_interleaved_envs_share_through_the_hint() -> None:
    envs = [Env(i) for i in range(5)]
    column = column_of(50)
    expected: dict[int, Tensor] = {}
    for t in range(25):
        slots = torch.arange(5) + t * 5 % 50
        values = torch.stack([env.next(done=t % 9 == env.number)[0] for env in envs])
        column.write(int(slots[0]), values, None if t == 0 else After(torch.arange(5), (slots - 5) % 50))
        expected |= dict(zip(slots.tolist(), values, strict=True))
        assert torch.equal(column.take(torch.tensor(list(expected))), torch.stack(list(expected.values())))
    check_books(column)
    assert column.frames_in_use <= 50 + 3 * 5


def test_a_wrong_hint_changes_nothing() -> None:
    stacks, _ = episodes([10, 10, 10])
    column = column_of(30)
    column.write(0, stacks[:10])
    column.write(10, stacks[10:20], After(torch.tensor([0, 4]), torch.tensor([3, 29])))
    column.write(20, stacks[20:], After(torch.tensor([0]), torch.tensor([20])))
    assert torch.equal(everything(column), stacks)
    check_books(column)


def test_a_row_may_continue_one_that_the_same_write_replaces() -> None:
    stacks, _ = episodes([12])
    column = column_of(4)
    column.write(0, stacks[:4])
    column.write(0, stacks[4:8], After(torch.tensor([0]), torch.tensor([3])))
    assert torch.equal(everything(column), stacks[4:8])
    assert column.frames_in_use == 7
    check_books(column)


def test_the_seam_of_the_ring_is_shared_without_a_hint() -> None:
    stacks, _ = episodes([12])
    column = column_of(8)
    column.write(0, stacks[:8])
    column.write(0, stacks[8:])
    assert column.frames_in_use == 8 + 3  # rows 4 ... 11, and the 3 frames before the newest of row 4
    column.put(torch.arange(8), torch.zeros((8, 4, *FRAME), dtype=torch.uint8))
    assert column.frames_in_use == 1
    check_books(column)


def test_neighbours_stay_neighbours_lap_after_lap() -> None:
    stacks, _ = episodes([640])
    column = column_of(64)
    for first in range(0, 640, 16):
        column.write(first % 64, stacks[first : first + 16])
    steps = np.diff(column.refs[:, -1])
    assert (steps == 1).mean() > 0.9


@pytest.mark.parametrize("threads", [1, 2])
def test_one_thread_or_several_read_the_same(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stacks, _ = episodes([40])
    column = column_of(40)
    column.write(0, stacks)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    slots = torch.randint(40, (100,))
    assert torch.equal(column.take(slots), stacks[slots])


def test_scattered_rows() -> None:
    stacks, _ = episodes([10, 30])
    column = column_of(60)
    column.put(torch.arange(59, 19, -1), stacks)
    column.put(torch.tensor([0, 59, 30]), stacks[[5, 17, 17]])
    expected = torch.zeros((60, 4, *FRAME), dtype=torch.uint8)
    expected[range(59, 19, -1)] = stacks
    expected[[0, 59, 30]] = stacks[[5, 17, 17]]
    assert torch.equal(everything(column), expected)
    check_books(column)


# -- the pool of next observations ---------------------------------------------------------------------------


def test_a_final_stack_costs_one_frame() -> None:
    stacks, finals = episodes([5, 8, 4])
    column, ends = column_of(17), torch.tensor([4, 12, 16])
    side = column.pool()
    column.write(0, stacks)
    side.grow(3)
    side.put(torch.tensor([2, 0, 1]), finals, After(torch.arange(3), ends))
    assert torch.equal(side.take(torch.tensor([2, 0, 1])), finals)
    assert column.frames_in_use == 17 + 3
    check_books(column, side)
    column.write(0, stacks.flip(0))  # the frames of the finals outlive the rows
    assert torch.equal(side.take(torch.tensor([2, 0, 1])), finals)
    side.put(torch.arange(3), torch.zeros_like(finals))
    check_books(column, side)


def test_a_side_column_counts_its_numbers_only() -> None:
    column = column_of(1000)
    side = column.pool()
    assert side.nbytes == 0
    side.grow(10)
    assert side.nbytes == 160
    assert side.row_bytes == column.row_bytes == 8 + 4 + 16


# -- growing, memory, saving ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [None, ZstdColumn], ids=["plain", "zstd"])
def test_stacks_that_share_nothing_make_the_pool_grow(make: Any) -> None:
    values = torch.randint(0, 256, (900, 4, *FRAME), dtype=torch.uint8)
    column = column_of(900, make=make)
    side = column.pool()
    side.grow(2)
    for first in range(0, 900, 100):
        column.write(first, values[first : first + 100])
    side.put(torch.tensor([1]), values[:1])
    assert torch.equal(everything(column), values)
    assert torch.equal(side.take(torch.tensor([1])), values[:1])
    assert column.frames_in_use == 3600 + 4
    assert len(column.frames.counts) < 1.1 * 3605
    stacks, _ = episodes([100])
    column.write(50, stacks, After(torch.tensor([0, 7]), torch.tensor([49, 56])))
    assert torch.equal(column.take(torch.arange(50, 150)), stacks)
    assert torch.equal(column.take(torch.arange(850, 900)), values[850:])
    check_books(column, side)


def test_a_column_that_cannot_grow_stays_as_it_was() -> None:
    made: list[int] = []

    def make(frames: int, shape: tuple[int, ...], word: torch.dtype) -> Any:
        if made:
            raise MemoryError
        made.append(frames)
        return ZstdColumn(frames, shape, word)

    values = torch.randint(0, 256, (300, 4, *FRAME), dtype=torch.uint8)
    column = column_of(300, make=make)
    column.write(0, values[:80])
    with pytest.raises(MemoryError):
        column.write(80, values[80:])
    assert torch.equal(column.take(torch.arange(80)), values[:80])
    check_books(column)
    column.write(80, values[:10])
    assert torch.equal(column.take(torch.arange(90)), values[[*range(80), *range(10)]])
    check_books(column)


def test_atari_like_rows_cost_at_most_1_05_frames_and_40_bytes() -> None:
    frame, rows, length = 7056, 6000, 600
    steps = torch.arange(rows)
    frames = torch.randint(0, 256, (rows + 64, frame), dtype=torch.uint8)
    at = (steps[:, None] + torch.arange(-3, 1)).maximum(steps[:, None] // length * length)
    column = FrameColumn(rows, 4, torch.Size([4, frame]), torch.uint8)
    side = column.pool()
    side.grow(rows // length)
    for first in range(0, rows, 1000):
        column.write(first, frames[at[first : first + 1000]])
    ends = torch.arange(length - 1, rows, length)
    finals = torch.cat([frames[at[ends, 1:]], frames[rows : rows + len(ends), None]], 1)
    side.put(torch.arange(len(ends)), finals, After(torch.arange(len(ends)), ends))
    assert column.frames_in_use == rows + len(ends)
    assert column.nbytes + side.nbytes <= (1.05 * frame + 40) * rows
    assert column.row_bytes == frame + 20


@pytest.mark.parametrize("make", [None, ZstdColumn], ids=["plain", "zstd"])
@pytest.mark.parametrize(
    "by", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["copy", "pickle"]
)
def test_a_copy_goes_on_by_itself(make: Any, by: Any) -> None:
    stacks, finals = episodes([10, 10])
    column = column_of(20, make=make)
    side = column.pool()
    side.grow(1)
    column.write(0, stacks)
    side.put(torch.tensor([0]), finals[:1], After(torch.tensor([0]), torch.tensor([9])))
    column2, side2 = by((column, side))
    column.write(0, stacks.flip(0))
    assert torch.equal(everything(column2), stacks)
    assert torch.equal(side2.take(torch.tensor([0])), finals[:1])
    column2.write(5, stacks[:5])
    check_books(column2, side2)
    assert torch.equal(everything(column), stacks.flip(0))


@pytest.mark.parametrize("make", [None, ZstdColumn], ids=["plain", "zstd"])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("grown", [False, True])
def test_a_state_restores_rows_and_finals_and_shares_on(make: Any, used: bool, grown: bool) -> None:
    stacks, finals = episodes([30, 30])
    other = torch.randint(1, 256, (150, 4, *FRAME), dtype=torch.uint8)
    column, restored = column_of(150, make=make), column_of(150, make=make)
    side = column.pool()
    side.grow(3)
    if grown:
        column.write(0, other)
    column.write(0, stacks)
    side.put(torch.tensor([2]), finals[:1], After(torch.tensor([0]), torch.tensor([29])))
    if used:
        restored.write(20, other[:100])
    restored.load_state_dict(column.state_dict(60))
    side2 = restored.pool()
    side2.load_state_dict(side.state_dict(3))
    assert torch.equal(restored.take(torch.arange(60)), stacks)
    assert torch.equal(side2.take(torch.tensor([2])), finals[:1])
    check_books(restored, side2)
    assert (
        restored.frames_in_use == 60 + 4 + 1
    )  # the final stack in full, and zeros in the entries never written
    restored.write(60, stacks[:30])
    assert torch.equal(restored.take(torch.arange(90)), torch.cat([stacks, stacks[:30]]))
    check_books(restored, side2)


# -- readers -------------------------------------------------------------------------------------------------


def test_a_reader_without_a_lock_never_fails() -> None:
    """Writers overwrite and make the pool grow; rows that stay put stay right."""
    kept, _ = episodes([50])
    column = column_of(400)
    column.write(350, kept)
    stop, failed = threading.Event(), []

    def read() -> None:
        generator = np.random.default_rng(0)
        while not stop.is_set():
            slots = torch.from_numpy(np.concatenate([generator.integers(0, 400, 30), np.arange(350, 400)]))
            try:
                if not torch.equal(column.take(slots)[30:], kept):
                    failed.append("other frames")
            except Exception as error:  # whatever it is, it must not happen
                failed.append(repr(error))

    reader = threading.Thread(target=read)
    reader.start()
    for seed in range(30):
        torch.manual_seed(seed)
        column.write(0, torch.randint(0, 256, (350, 4, *FRAME), dtype=torch.uint8))
        column.write(0, episodes([350])[0])
    stop.set()
    reader.join()
    assert not failed
    check_books(column)


# -- two routes, one answer ----------------------------------------------------------------------------------


@examples(40, derandomize=True)
@given(st.data())
def test_the_torch_form_finds_what_the_compiled_one_finds(data: st.DataObject) -> None:
    rows, stack, words = (
        data.draw(st.integers(1, 6)),
        data.draw(st.integers(2, 4)),
        data.draw(st.sampled_from([1, 3, 70])),
    )
    number = st.integers(0, 1)
    values = torch.tensor(data.draw(st.lists(number, min_size=rows * stack, max_size=rows * stack)))
    stored = torch.tensor([0, 1])[:, None].expand(2, words).contiguous()
    held = np.array(
        data.draw(st.lists(st.lists(number, min_size=stack, max_size=stack), min_size=1, max_size=3)),
        np.int32,
    )
    hint = np.array(data.draw(st.lists(st.integers(-1, len(held) - 1), min_size=rows, max_size=rows)))
    stacks = values.view(rows, stack, 1).expand(rows, stack, words).contiguous()
    for left, right in zip(
        match(stacks, stored, held, hint), match_by_torch(stacks, stored, held, hint), strict=True
    ):
        np.testing.assert_array_equal(left, right)


@examples(25, derandomize=True)
@given(st.integers(0, 10**6), st.integers(2, 4), st.sampled_from([None, ZstdColumn]), st.integers(5, 40))
def test_any_history_reads_like_a_list(seed: int, stack: int, make: Any, rows: int) -> None:
    chance = random.Random(seed)
    column = column_of(rows, stack, make=make)
    side = column.pool()
    blank = torch.zeros((stack, *FRAME), dtype=torch.uint8)
    main_list, side_list = [blank] * rows, [blank] * 6
    side.grow(6)
    envs = [Env(i, chance.choice(["repeat", "zero", "arbitrary"]), stack) for i in range(3)]
    last: dict[int, int] = {}  # slot of each env's last row
    slot = 0
    for _ in range(12):
        kind = chance.choice(["steps", "steps", "window", "put", "final"])
        if kind in ("steps", "window"):
            count = min(rows - slot, chance.randint(1, 6 if kind == "steps" else rows))
            values, hints = [], []
            for i in range(count):
                env = envs[i % 3 if kind == "steps" else 0]
                done = chance.random() < 0.2
                values.append(env.next(done)[0])
                if env.number in last and (last[env.number] < slot or last[env.number] >= slot + count):
                    hints.append((i, last[env.number]))
                last.pop(env.number, None)
                if not done:
                    last[env.number] = slot + i
            hints = [
                (i, s if chance.random() < 0.8 else chance.randrange(rows)) for i, s in dict(hints).items()
            ]
            after = After(
                torch.tensor([i for i, _ in hints]).long(), torch.tensor([s for _, s in hints]).long()
            )
            column.write(slot, torch.stack(values), after if chance.random() < 0.8 else None)
            main_list[slot : slot + count] = values
            slot = (slot + count) % rows
        elif kind == "put":
            slots = chance.sample(range(rows), chance.randint(1, min(5, rows)))
            values = [chance.choice([*main_list, *side_list]) for _ in slots]
            column.put(torch.tensor(slots), torch.stack(values))
            for at, value in zip(slots, values, strict=True):
                main_list[at] = value
        else:
            at, of = chance.randrange(6), chance.randrange(rows)
            final = torch.cat([main_list[of][1:], torch.randint(0, 256, (1, *FRAME), dtype=torch.uint8)])
            side.put(torch.tensor([at]), final[None], After(torch.tensor([0]), torch.tensor([of])))
            side_list[at] = final
        assert torch.equal(everything(column), torch.stack(main_list))
        assert torch.equal(everything(side), torch.stack(side_list))
        check_books(column, side)


# -- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stack", "shape", "text"),
    [
        (4, (84, 84, 4), r"frame_stack=4 needs rows \[4, \*frame\], oldest frame first, got \[84, 84, 4\]"),
        (4, (), r"got \[\]"),
        (1, (1, 3), "frame_stack must be an integer of at least 2, got 1"),
        (True, (1, 3), "got True"),
        (2.0, (2, 3), "got 2.0"),
    ],
)
def test_what_is_no_stack_is_refused(stack: Any, shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FrameColumn(10, stack, torch.Size(shape), torch.uint8)


def test_the_error_names_the_key() -> None:
    with pytest.raises(ValueError, match="frame_stack=4 of 'pixels' needs rows"):
        check_stack(4, torch.Size([3, 84, 84]), "pixels")


@pytest.mark.parametrize("kind", ["memory", "compact", "zstd", "files", "disk"])
@pytest.mark.parametrize("shape", [(1, 4, 4), (4, 4)], ids=str)
def test_a_stack_of_one_frame_is_the_plain_buffer(kind: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Pipelines have the number of frames as a setting; observations may lack the dim of one."""

    def storage(name: str, **options: Any) -> Any:
        match kind:
            case "files":
                return LazyMemmapStorage(50, **options)
            case "disk":
                return DiskStorage(50, tmp_path / name, **options)
            case "zstd":
                return LazyTensorStorage(50, codec={"observation": "zstd"}, **options)
        return LazyTensorStorage(50, compact_obs=kind == "compact", **options)

    one, plain = storage("one", frame_stack={"observation": 1}), storage("plain")
    frames = torch.randint(256, (31, *shape), dtype=torch.uint8)
    done = torch.arange(30)[:, None] == 29
    batch = TensorDict({"observation": frames[:-1], "next": {"observation": frames[1:], "done": done}}, [30])
    rows = []
    for each in (one, plain):
        buffer = ReplayBuffer(storage=each, sampler=SliceSampler(slice_len=3), batch_size=6)
        buffer.extend(batch)
        rows.append(buffer[:])
    assert bool((rows[0] == rows[1]).all()) and bool((rows[0] == batch).all())
    assert type(one.columns["observation"]) is type(plain.columns["observation"]) and not one.frame_stack
    other = storage("other", frame_stack={"pixels": 1})
    with pytest.raises(ValueError, match="frame_stack names 'pixels', which the batch lacks"):
        ReplayBuffer(storage=other, batch_size=6).extend(batch)
