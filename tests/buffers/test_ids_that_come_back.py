"""An id that comes back where its trajectory does not go on: two writers with one number."""

import random
import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler, TensorColumn
from flatroll.buffers.storages.storage import Storage


def steps(writer: int, first: int, count: int, **options: Any) -> TensorDict:
    """Steps of the one episode of ``writer``, all under id 7."""
    at = torch.arange(first, first + count)
    now = torch.stack([torch.full_like(at, writer), at], -1).float()
    later = {"observation": now + torch.tensor([0.0, 1.0]), "done": torch.zeros(count, 1, dtype=torch.bool)}
    marks = {"is_init": (at == 0).unsqueeze(-1), "collector": {"traj_ids": torch.full((count,), 7)}}
    counted = {"step_count": at.unsqueeze(-1)} if options.get("step_count", True) else {}
    return TensorDict({"observation": now, **marks, **counted, "next": later}, [count])


def sliced(compact: bool = False, storage: Storage | None = None) -> ReplayBuffer:
    generator = torch.Generator().manual_seed(0)
    storage = LazyTensorStorage(100, compact_obs=compact) if storage is None else storage
    return ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=6), generator=generator)


@pytest.mark.parametrize("step_count", [True, False])
@pytest.mark.parametrize("compact", [False, True])
def test_rows_of_two_writers_are_not_joined(compact: bool, step_count: bool) -> None:
    """Refused, or cut: no slice of six rows is then there."""
    buffer = sliced(compact)
    buffer.extend(steps(0, 0, 3, step_count=step_count))
    try:
        buffer.extend(steps(1, 3, 3, step_count=step_count))
    except ValueError as error:
        assert "writer=" in str(error)
        return
    with pytest.raises(RuntimeError, match="no stored trajectory has 6 consecutive rows"):
        buffer.sample(6)


@pytest.mark.parametrize("compact", [False, True])
def test_rows_of_one_writer_are_joined(compact: bool) -> None:
    buffer = sliced(compact)
    buffer.extend(steps(0, 0, 3))
    buffer.extend(steps(0, 3, 3))
    assert buffer.sample(6)["observation"][:, 1].tolist() == [0, 1, 2, 3, 4, 5]


# --- what is refused, and what is only cut ------------------------------------------------------------------------


def refused(buffer: ReplayBuffer, batch: TensorDict) -> bool:
    """Whether ``extend`` refuses, and that the buffer is then as it was."""
    before, rows = buffer[:], buffer.stats()
    try:
        buffer.extend(batch)
    except ValueError as error:
        assert "writer=" in str(error)
        assert bool((buffer[:] == before).all()) and buffer.stats() == rows
        return True
    return False


def stacked(batch: TensorDict) -> TensorDict:
    """The same with stacks of four frames as observations."""
    for key in ("observation", ("next", "observation")):
        writer, at = batch[key].unbind(-1)
        frames = [(writer * 50 + (at - i).clamp(min=0)).to(torch.uint8) for i in (3, 2, 1, 0)]
        batch[key] = torch.stack(frames, 1)[:, :, None, None].expand(-1, 4, 2, 2).clone()
    return batch


def of_a_dict_space(batch: TensorDict) -> TensorDict:
    """The same with a goal, which two trajectories may have in common, besides the place."""
    return (
        batch.rename_key_("observation", "place")
        .rename_key_(("next", "observation"), ("next", "place"))
        .set("goal", torch.ones(len(batch), 3))
        .set(("next", "goal"), torch.ones(len(batch), 3))
    )


@pytest.mark.parametrize("compact", [False, True], ids=["full", "compact"])
@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({}, lambda batch: batch),
        ({"codec": {"observation": "zstd"}}, lambda batch: batch),
        ({"frame_stack": {"observation": 4}}, stacked),
        ({}, of_a_dict_space),
        ({}, lambda batch: batch.apply(lambda x: x.T.contiguous().T if x.ndim == 2 else x)),  # not contiguous
        (
            {},
            lambda batch: batch.set("observation", batch["observation"].double(), inplace=False).set(
                ("next", "observation"), batch["next", "observation"].double()
            ),
        ),
    ],
    ids=["plain", "zstd", "frame stacks", "Dict space", "strided", "float64"],
)
def test_a_strange_row_is_refused_in_every_form(options: dict[str, Any], change: Any, compact: bool) -> None:
    if "codec" in options:
        pytest.importorskip("zstandard")
    buffer = sliced(storage=LazyTensorStorage(100, compact_obs=compact, **options))
    buffer.extend(change(steps(0, 0, 3)))
    buffer.extend(change(steps(0, 3, 3)))
    assert refused(buffer, change(steps(1, 6, 3)))
    assert not refused(buffer, change(steps(0, 6, 3)))
    assert len(buffer.sample(6)) == 6 and buffer.index is not None and buffer.index.longest == 9


@pytest.mark.parametrize("compact", [False, True], ids=["full", "compact"])
def test_rows_of_two_writers_in_one_batch_are_not_joined(compact: bool) -> None:
    buffer = sliced(compact)
    buffer.extend(steps(0, 0, 3))
    between = steps(5, 0, 2)
    between["collector", "traj_ids"] += 1
    assert refused(buffer, TensorDict.cat([steps(0, 3, 2), between, steps(1, 5, 2)]))


def test_one_step_at_a_time() -> None:
    """No row tells whether next values are those of the row after: the first rows are cut, later ones refused."""
    buffer = sliced()
    buffer.extend(steps(0, 0, 1))
    assert not refused(buffer, steps(1, 1, 1))
    assert buffer.index is not None and buffer.index.longest == 1
    assert not refused(buffer, steps(1, 2, 1))
    assert buffer.index.longest == 2
    assert refused(buffer, steps(0, 3, 1))


def test_without_ids_the_trajectory_is_cut() -> None:
    buffer = sliced()
    for batch in (steps(0, 0, 4), steps(1, 4, 4)):
        buffer.extend(batch.exclude(("collector", "traj_ids")))
    assert buffer.index is not None and buffer.index.longest == 4


def test_an_id_that_comes_back_after_its_end_begins_a_trajectory() -> None:
    buffer = sliced()
    ended = steps(0, 0, 3)
    ended["next", "done"][-1] = True
    buffer.extend(ended)
    assert not refused(buffer, steps(1, 3, 3))
    assert buffer.index is not None and (buffer.index.longest, buffer.index.trajectories) == (3, 2)


def test_a_trajectory_that_the_batch_overwrites_is_not_compared() -> None:
    buffer = sliced(storage=LazyTensorStorage(4))
    buffer.extend(steps(0, 0, 4))
    assert not refused(buffer, steps(1, 4, 4))


# --- what is honest, and joined -----------------------------------------------------------------------------------


def normalised(batch: TensorDict) -> TensorDict:
    """With statistics that move on."""
    for key in ("observation", ("next", "observation")):
        batch[key] = batch[key] / (1 + batch["observation"].mean())
    return batch


class Normalise:
    """A transform that normalises what is stored."""

    def forward(self, td: TensorDict) -> TensorDict:
        return td

    def inv(self, td: TensorDict) -> TensorDict:
        return normalised(td)


def test_observations_that_an_inv_changes_are_not_compared() -> None:
    buffer = sliced()
    buffer.append_transform(Normalise())  # type: ignore[arg-type]
    for first in (0, 3, 6):
        buffer.extend(steps(0, first, 3))
    assert buffer.index is not None and buffer.index.longest == 9


def test_what_an_inv_leaves_alone_is_compared() -> None:
    buffer = sliced()
    buffer.append_transform(Normalise())  # type: ignore[arg-type]
    buffer.transforms[0].inv = lambda td: td.set("reward", torch.ones(len(td)))  # type: ignore[union-attr]
    buffer.extend(steps(0, 0, 3))
    assert refused(buffer, steps(1, 3, 3))


def valued(batch: TensorDict) -> TensorDict:
    """With values, of a network that changes from batch to batch, and states that are not stored at every row."""
    batch["state_value"], batch["next", "state_value"] = torch.rand(2, len(batch), 1).unbind(0)
    batch["state"], batch["next", "state"] = torch.rand(2, len(batch), 4).unbind(0)
    return batch


def unknown(batch: TensorDict) -> TensorDict:
    batch["next", "observation"][-1] = torch.nan
    return batch


def no_next(batch: TensorDict) -> TensorDict:
    return batch.exclude(("next", "observation"))


def unrelated(batch: TensorDict) -> TensorDict:
    """Made-up observations, as in tests."""
    batch["next", "observation"] = torch.rand(len(batch), 2)
    return batch


class Halves(TensorColumn):
    """A column that gives back other numbers than it was given."""

    def __init__(self, rows: int, shape: torch.Size) -> None:
        super().__init__(torch.zeros(rows, *shape, dtype=torch.float16))
        self.dtype = torch.float32

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        return super().take(slots).float() / 2

    def put(self, slots: torch.Tensor, values: torch.Tensor, after: Any = None) -> None:
        super().put(slots, values.half())

    def pool(self) -> "Halves":
        return Halves(0, self.shape)


class OwnStorage(LazyTensorStorage):
    def make_column(self, key: Any, dtype: torch.dtype, shape: torch.Size) -> Any:
        return Halves(self.capacity, shape) if "observation" in key else None


@pytest.mark.parametrize("compact", [False, True], ids=["full", "compact"])
@pytest.mark.parametrize("change", [valued, unknown, no_next, unrelated], ids=lambda change: change.__name__)
@pytest.mark.parametrize("kind", [LazyTensorStorage, OwnStorage])
def test_honest_rows_are_joined(kind: Any, change: Any, compact: bool) -> None:
    if compact and change is no_next:
        pytest.skip("a compact storage needs next observations")
    torch.manual_seed(0)
    buffer = sliced(storage=kind(100, compact_obs=compact))
    for first in (0, 3, 6):
        buffer.extend(change(steps(0, first, 3)))
    assert buffer.index is not None and buffer.index.longest == 9


def test_rows_changed_in_place_are_not_compared() -> None:
    buffer = sliced()
    buffer.extend(steps(0, 0, 3))
    buffer[2] = buffer[2].set(("next", "observation"), torch.zeros(2))
    assert not refused(buffer, steps(0, 3, 3))


# --- the property -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compact", [False, True], ids=["full", "compact"])
@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_writers_and_threads_gives_an_impossible_slice(seed: int, compact: bool) -> None:
    """Of five writers two share their ids: what they write is refused or cut, what the others write is taken."""
    choose = random.Random(seed)
    buffer = sliced(storage=LazyTensorStorage(choose.choice([60, 400]), compact_obs=compact))
    failed: list[str] = []

    def write(writer: int, ids: int, seed: int) -> None:
        choose, step, episode, refusals = random.Random(seed), 0, 0, 0
        for _ in range(40):
            count = choose.randint(1, 8)
            batch = steps(writer + 10 * episode, step, count, step_count=True)
            batch["collector", "traj_ids"] = torch.full((count,), 1000 * ids + episode)
            step += count
            if choose.random() < 0.1:
                batch["next", "done"][-1] = True
                step, episode = 0, episode + 1
            try:
                buffer.extend(batch)
            except ValueError as error:
                refusals += 1
                if "writer=" not in str(error):
                    failed.append(str(error))
        if refusals and ids != 0:
            failed.append(f"writer {writer} was refused {refusals} times")

    threads = [
        threading.Thread(target=write, args=(writer, max(0, writer - 1), choose.random()))
        for writer in range(5)
    ]
    for thread in threads:
        thread.start()
    for _ in range(60):
        if len(buffer):
            sample = buffer.sample(48)
            seen, first = sample["observation"], sample["is_init"].squeeze(-1)
            jumps = (seen[1:] - seen[:-1] != torch.tensor([0.0, 1.0])).any(-1)
            assert not bool((jumps & ~first[1:]).any())
    for thread in threads:
        thread.join()
    assert not failed


# --- rows of one batch that do not follow one another ----------------------------------------------------------------


@pytest.mark.parametrize("compact", [False, True])
def test_rows_left_out_of_a_batch_are_not_joined(compact: bool) -> None:
    def buffer_of(sampler: Any) -> ReplayBuffer:
        return ReplayBuffer(storage=LazyTensorStorage(100, compact_obs=compact), sampler=sampler)

    buffer = buffer_of(SliceSampler(slice_len=2))
    batch = steps(7, 0, 9, step_count=True)
    buffer.extend(batch[:3])
    before = buffer.state_dict()
    for wrong, row, count, last in (
        (batch[3:][::2], 1, 5, 3),
        (batch[[3, 4, 6]], 2, 6, 4),
        (batch[[4, 3]], 1, 3, 4),
        (batch[[3, 3]], 1, 3, 3),
    ):
        text = f"row {row} of the batch does not follow row {row - 1} in its trajectory: 'step_count' is {count} after"
        with pytest.raises(ValueError, match=f"{text} {last}.*is_init.*a new id"):
            buffer.extend(wrong)
        assert len(buffer) == 3
    after = buffer.state_dict()
    assert all(
        torch.equal(after["storage"]["columns"][key]["values"], value["values"])
        for key, value in before["storage"]["columns"].items()
    )
    buffer.extend(batch[3:])
    assert buffer.index is not None and buffer.index.longest == 9
    # With is_init or ids of their own they are trajectories; and without slices any rows will do.
    gap = batch[::2].clone()
    gap["is_init"] = torch.ones(5, 1, dtype=torch.bool)
    buffer_of(SliceSampler(slice_len=1)).extend(gap)
    gap = batch[::2].clone()
    gap["collector", "traj_ids"] = torch.arange(5)
    buffer_of(SliceSampler(slice_len=1)).extend(gap)
    single = buffer_of(None)
    single.extend(batch[torch.randperm(9)])
    assert len(single.sample(4)) == 4
