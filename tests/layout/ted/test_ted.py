"""Rows to flat, nested and split forms and back, bit by bit: every dtype, every ring, cut runs, n-step data."""

from pathlib import Path
from typing import Any

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from torch.utils._pytree import tree_leaves

from flatroll.layout.ted import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Any bits at all, NaN and -0.0 among them; bools of 0 and 1."""
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    raw = torch.randint(256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def rows_of(lengths: list[int], dtype: torch.dtype, seed: int = 0, *, done_last: bool = False) -> TensorDict:
    """Runs of these lengths, end to end; some end by done, others are cut and known by their ids alone."""
    generator = torch.Generator().manual_seed(seed)
    number = sum(lengths)
    stops = torch.tensor(lengths).cumsum(0) - 1
    done = torch.zeros(number, 1, dtype=torch.bool)
    done[stops] = True if done_last else torch.randint(2, (len(lengths), 1), generator=generator).bool()
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    pixels, later = (random_bits((number, 2), dtype, generator) for _ in range(2))
    speed, faster = (random_bits((number,), dtype, generator) for _ in range(2))
    inner = torch.ones(number, dtype=torch.bool)
    inner[stops] = False
    for now, behind in ((pixels, later), (speed, faster)):
        # As bytes: torch cannot write uint16 by mask.
        target, source = (column.view(number, -1).view(torch.uint8) for column in (behind, now))
        target[inner] = source.roll(-1, 0)[inner]
    return TensorDict(
        {
            "agents": {"pixels": pixels},
            "speed": speed,
            "n_step": random_bits((number, 3), dtype, generator),
            "action": random_bits((number, 2), dtype, generator),
            "done": random_bits((number, 1), torch.bool, generator),
            "reward": random_bits((number, 1), torch.float32, generator),
            "collector": {"traj_ids": ids},
            "next": {
                "agents": {"pixels": later, "reward": random_bits((number, 2), torch.float64, generator)},
                "speed": faster,
                "n_step": random_bits((number, 3), dtype, generator),
                "reward": random_bits((number, 1), torch.float32, generator),
                "terminated": done & random_bits((number, 1), torch.bool, generator),
                "done": done,
            },
        },
        [number],
    )


def check_same(one: TensorDictBase, other: TensorDictBase) -> None:
    assert one.batch_size == other.batch_size
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    for key in one.keys(True, True):
        first, second = one.get(key), other.get(key)
        assert first.dtype == second.dtype and first.shape == second.shape, key
        as_bytes = (column.contiguous().reshape(-1).view(torch.uint8) for column in (first, second))
        assert torch.equal(*as_bytes), key


def through_flat(rows: TensorDictBase, shift: int | None, is_full: bool | None) -> TensorDictBase:
    save = TED2Flat()
    save.shift, save.is_full = shift, is_full
    return Flat2TED()(save(rows))


def through_nested(rows: TensorDictBase, shift: int | None, is_full: bool | None) -> TensorDictBase:
    save = TED2Nested()
    save.shift, save.is_full = shift, is_full
    return Nested2TED()(save(rows))


def through_folders(rows: TensorDictBase, shift: int | None, is_full: bool | None) -> TensorDictBase:
    save = TED2Nested()
    save.shift, save.is_full = shift, is_full
    return Nested2TED()(H5Combine()(H5Split()(save(rows))))


ROUTES = [through_flat, through_nested, through_folders]


@examples(40)
@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    dtype=st.sampled_from(DTYPES),
    lanes=st.sampled_from([(), (1,), (3,), (2, 2)]),
    ring=st.sampled_from(["time order", "full", "filled to its end", "part"]),
    route=st.sampled_from(ROUTES),
    data=st.data(),
)
def test_rows_come_back_bit_by_bit(
    lengths: list[int], dtype: torch.dtype, lanes: tuple[int, ...], ring: str, route: Any, data: Any
) -> None:
    number = torch.Size(lanes).numel()
    parts = [rows_of(lengths, dtype, seed) for seed in range(number)]
    rows = torch.stack(parts, 1).reshape(-1, *lanes) if lanes else parts[0]
    shift, is_full, kept = None, None, rows
    if ring == "full":
        shift, is_full = data.draw(st.integers(0, len(rows))), True
        rows = kept = torch.stack([rows[i - shift] for i in range(len(rows))])  # oldest row in slot `shift`
    elif ring == "filled to its end":
        shift, is_full = data.draw(st.sampled_from([(0, True), (len(rows), True), (len(rows), False)]))
    elif ring == "part":
        shift, is_full = data.draw(st.integers(1, len(rows))), False
        kept = rows[:shift]
    check_same(route(rows, shift, is_full), kept)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype, route: Any) -> None:
    rows = rows_of([3, 1, 2, 1, 1], dtype, 7)
    check_same(route(rows, None, None), rows)


def test_an_observation_is_stored_once_and_data_that_is_no_shift_twice() -> None:
    flat = TED2Flat()(rows_of([3, 1, 2], torch.float32))
    assert len(flat["agents", "pixels"]) == len(flat["speed"]) == 6 + 3
    assert ("next", "speed") not in flat.keys(True)
    assert len(flat["n_step"]) == len(flat["next", "n_step"]) == 6
    assert flat["_lengths"].tolist() == [3, 1, 2]


def test_one_row_that_is_no_shift_keeps_both_columns() -> None:
    """As in n-step data: the root's values are not written over the next ones."""
    rows = rows_of([4, 2], torch.float32)
    rows["next", "speed"][1] = 7
    flat = TED2Flat()(rows)
    assert len(flat["next", "speed"]) == 6
    check_same(Flat2TED()(flat), rows)


def test_negative_zero_and_nan_are_told_apart() -> None:
    speed = torch.tensor([0.0, float("nan"), 3.0])
    rows = TensorDict(
        {
            "speed": speed,
            "next": {
                "speed": torch.tensor([float("nan"), 3.0, 4.0]),
                "done": torch.zeros(3, dtype=torch.bool),
            },
        },
        [3],
    )
    assert len(TED2Flat()(rows)["speed"]) == 4
    rows["speed"][1] = 0.0
    rows["next", "speed"][0] = -0.0
    flat = TED2Flat()(rows)
    assert len(flat["speed"]) == 3
    check_same(Flat2TED()(flat), rows)


def test_the_seam_of_a_ring_is_no_run_end_and_its_ends_are_kept() -> None:
    """The newest row stands before the oldest: they are of two episodes, which the flat form lays at its two ends."""
    rows = rows_of([5, 3], torch.float32, done_last=True).exclude("collector")
    done = rows["next", "done"]
    done[-1] = False  # the newest episode continues
    ring = torch.stack([rows[i - 3] for i in range(8)])  # slots 3... hold the oldest rows
    save = TED2Flat()
    save.shift, save.is_full = 3, True
    flat = save(ring)
    assert flat["_lengths"].tolist() == [5, 3]
    assert torch.equal(flat["action"].view(torch.uint8), rows["action"].view(torch.uint8))
    check_same(Flat2TED()(flat), ring)


def test_the_root_s_flags_come_back_into_used_memory() -> None:
    rows = rows_of([3, 4], torch.float32)
    rows["done"] = torch.zeros(7, 1, dtype=torch.bool)
    used = rows.clone()
    used["done"].fill_(True)
    used["next", "done"].fill_(True)
    assert Flat2TED()(TED2Flat()(rows), out=used) is used
    check_same(used, rows)


def test_memory_may_be_larger_than_what_is_loaded() -> None:
    rows, memory = rows_of([3, 4], torch.float32), rows_of([10], torch.float32, 3)
    save = TED2Flat()
    save.shift, save.is_full = 5, False
    behind = memory[5:].clone()
    Flat2TED()(save(rows), out=memory)
    check_same(memory[:5].clone(), rows[:5])
    check_same(memory[5:].clone(), behind)


@pytest.mark.parametrize("kind", [TED2Flat, TED2Nested])
def test_the_flat_form_on_disk(kind: type[TED2Flat], tmp_path: Path) -> None:
    rows = torch.stack([rows_of([3, 4], torch.float64, seed) for seed in range(2)], 1)
    save = kind()
    save.shift, save.is_full = 2, True
    made = save(rows, path=tmp_path)
    loaded = TensorDict.load_memmap(tmp_path)
    assert not list(tmp_path.rglob("*.pickle"))
    check_same(Flat2TED()(loaded), rows)
    check_same(Nested2TED()(made), rows)


def test_no_rows() -> None:
    for route in (through_flat, through_nested):
        rows = rows_of([2], torch.float32)[:0]
        check_same(route(rows, None, None), rows)


def test_other_names() -> None:
    rows = TensorDict({"next": {"over": torch.tensor([True, False]), "score": torch.ones(2)}}, [2])
    names: dict[str, Any] = {
        "shift_key": "cursor",
        "is_full_key": "full",
        "done_keys": ["over"],
        "reward_keys": ["score"],
    }
    flat = TED2Flat(("next", "over"), **names)(rows)
    assert set(flat.keys()) >= {"cursor", "full", "over", "score"}
    check_same(Flat2TED("over", **names)(flat), rows)


def test_runs_in_order_in_folders() -> None:
    rows = rows_of([1] * 12, torch.int64)
    split = H5Split()(TED2Nested()(rows))
    assert list(split.keys())[:2] == ["traj_00", "traj_01"]
    backwards = TensorDict({key: split.get(key) for key in reversed(list(split.keys()))}, [])
    check_same(Nested2TED()(H5Combine()(backwards)), rows)


def test_through_an_hdf5_file(tmp_path: Path) -> None:
    """`TensorDict.to_h5` of the split form, as torchrl's checkpointer writes it."""
    pytest.importorskip("h5py")
    rows = rows_of([2, 3], torch.float32)
    split = H5Split()(TED2Nested()(rows))
    ring = {key for key in map(str, split.keys()) if not key.startswith("traj_")}
    split.exclude(*ring).to_h5(str(tmp_path / "rows.h5"))
    loaded = TensorDict.from_h5(str(tmp_path / "rows.h5")).to_tensordict()
    for name in ring:
        loaded.set_non_tensor(name, split.get_non_tensor(name))
    check_same(Nested2TED()(H5Combine()(loaded)), rows)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("is_full", [True, False])
def test_torchrl_s_flat_form_can_be_read(lanes: int, is_full: bool) -> None:
    """Without what it loses: flags of the root, data that is no shift."""
    torchrl = pytest.importorskip("torchrl.data")
    parts = [rows_of([3, 2, 3], torch.float32, seed, done_last=True) for seed in range(lanes)]
    rows = torch.stack(parts, 1) if lanes > 1 else parts[0]
    rows = rows.exclude("n_step", ("next", "n_step"), "reward", ("next", "agents", "reward"))
    rows["done"] = torch.zeros_like(rows["done"])
    rows["terminated"] = torch.zeros_like(rows["done"])
    save = torchrl.TED2Flat()
    save.shift, save.is_full = 5, is_full
    loaded = Flat2TED()(save(rows))
    check_same(loaded, rows if is_full else rows[:5])


def test_what_cannot_be_converted_is_refused() -> None:
    rows = rows_of([2, 2], torch.float32)
    save = TED2Flat()
    with pytest.raises(KeyError, match="is_init"):
        save(rows.select("speed"))
    with pytest.raises(ValueError, match="'shift'"):
        save(rows.copy().set("shift", torch.zeros(4)))
    with pytest.raises(TypeError, match="not a dense tensor"):
        save(rows.copy().set("name", "an episode"))
    with pytest.raises(ValueError, match=r"batch size \[N\]"):
        save(rows[0])
    save.shift = 5
    with pytest.raises(ValueError, match="shift must be a slot from 0 to 4"):
        save(rows)
    agents = rows.exclude("collector")
    agents["next", "done"] = torch.zeros(4, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="must have shape"):
        TED2Flat()(agents)


def test_a_flat_form_that_does_not_fit_is_refused() -> None:
    rows = rows_of([2, 2], torch.float32)
    flat = TED2Flat()(rows)
    with pytest.raises(KeyError, match="TED2Flat returned"):
        Flat2TED()(rows)
    with pytest.raises(KeyError, match="lacks"):
        Flat2TED()(flat.exclude("speed"))
    with pytest.raises(ValueError, match="sum to 4"):
        Flat2TED()(flat.copy().set("_lengths", torch.tensor([2, 3])))
    with pytest.raises(ValueError, match="sum to 4"):
        Flat2TED()(flat.copy().set("_lengths", torch.tensor([5, -1])))
    with pytest.raises(ValueError, match=r"'speed',\) has 5 rows"):
        Flat2TED()(flat.copy().set("speed", torch.zeros(5)))
    with pytest.raises(ValueError, match=r"'action',\) has 3 rows"):
        Flat2TED()(flat.copy().set("action", torch.zeros(3)))
    with pytest.raises(ValueError, match="shift must be a slot"):
        Flat2TED()(flat.copy().set_non_tensor("shift", 9))
    with pytest.raises(ValueError, match="or more rows"):
        Flat2TED()(flat, out=rows[:3])
    with pytest.raises(KeyError, match="out has no entry 'action'"):
        Flat2TED()(flat, out=rows.exclude("action"))
    with pytest.raises(ValueError, match=r"out\['action'\] is torch.int64"):
        Flat2TED()(flat, out=rows.clone().set("action", torch.zeros(4, 2, dtype=torch.int64)))
    with pytest.raises(ValueError, match="folders traj_0"):
        H5Combine()(rows)
    split = H5Split()(TED2Nested()(rows))
    split.get("traj_1").del_("speed")
    with pytest.raises(ValueError, match="traj_1 holds other entries"):
        H5Combine()(split)


@pytest.mark.parametrize("split", [False, True])
def test_a_state_of_nested_tensors_is_plain(split: bool, tmp_path: Path) -> None:
    """`torch.load` with its default, ``weights_only=True``, refuses nested tensors from torch 2.15 on."""
    rows, other = rows_of([3, 4], torch.float64), rows_of([2], torch.float64, 1)
    save = TED2Nested()
    save.shift, save.is_full = 2, True
    nested = save(rows)
    if split:
        nested = H5Combine()(H5Split()(nested))
    state = nested.state_dict()
    tensors = [value for value in tree_leaves(state) if isinstance(value, torch.Tensor)]
    assert tensors and not any(value.is_nested for value in tensors)
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt")
    check_same(Nested2TED()(TensorDict(loaded, [])), rows)
    into = save(other)
    into.load_state_dict(loaded)
    assert into.batch_size == nested.batch_size and set(into.keys()) == set(nested.keys())
    check_same(Nested2TED()(into), rows)
