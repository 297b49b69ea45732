"""n-step transitions against a loop over the stored rows."""

import itertools
import math
from typing import Any

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flatroll.buffers import (
    Compose,
    LazyTensorStorage,
    MultiStep,
    MultiStepTransform,
    NextObservationDelta,
    ReplayBuffer,
    SliceSampler,
)
from flatroll.kernels.scan import segmented_scan
from flatroll.layout import encode_delta, run_ends

CAPACITY = 61


def reward_of(step: Any) -> float:
    return math.sin(1 + 37 * step.traj + step.step)


def batch_of(world: Any, steps: list[Any], kind: str = "float32", **options: Any) -> TensorDict:
    batch: TensorDict = world.to_batch(steps, kind, **options)
    batch["next", "reward"] = torch.tensor([[reward_of(s)] for s in steps], dtype=torch.float64)
    return batch


def filled(world: Any, compact: bool, kind: str = "float32", seed: int = 0) -> tuple[ReplayBuffer, Any]:
    """Windows of three interleaved writers in a ring that has wrapped a few times."""
    storage = LazyTensorStorage(CAPACITY, compact_obs=compact)
    buffer = ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=1), batch_size=8)
    model = world.Model(CAPACITY)
    writers = world.writers(3, seed, longest=9)
    for i in range(40):
        steps = world.windows(writers, [(i % 3, i % 5 + 1), ((i + 1) % 3, 2)])
        buffer.extend(batch_of(world, steps, kind))
        model.extend(steps)
    return buffer, model


def columns_of(td: TensorDict) -> dict[Any, Tensor]:
    return dict(td.items(True, True))


def read(transform: MultiStepTransform, buffer: ReplayBuffer, slots: Tensor) -> dict[Any, Tensor]:
    """What a buffer does for a transform that looks ahead."""
    assert buffer.index is not None
    ahead = buffer.index.ahead(slots, transform.look_ahead)

    def get(at: Tensor, keys: Any) -> dict[Any, Tensor]:
        rows = columns_of(buffer[at])
        return {key: rows[key] for key in keys}

    return transform.read(columns_of(buffer[slots]), ahead, get)


def windows(model: Any, n: int) -> dict[int, list[Any]]:
    """The oracle: for each slot the steps of its window, found by walking from row to row."""
    steps, following = model.slots(), model.next_slot()
    found = {}
    for slot in steps:
        window, at = [], slot
        while at >= 0 and len(window) < n:
            window.append(steps[at])
            at = -1 if steps[at].done else following[at]
        found[slot] = window
    return found


def check(world: Any, rows: dict[Any, Tensor], window: list[list[Any]], gamma: float, kind: str) -> None:
    """Every written entry of ``rows`` against the steps of each row's window."""
    last = [w[-1] for w in window]
    expected = batch_of(world, last, kind)
    sums = [sum(gamma**j * reward_of(s) for j, s in enumerate(w)) for w in window]
    k = [len(w) for w in window]
    torch.testing.assert_close(rows["next", "reward"].flatten(), torch.tensor(sums, dtype=torch.float64))
    torch.testing.assert_close(
        rows["gamma"].flatten(), torch.tensor([gamma**i for i in k], dtype=torch.float64)
    )
    assert rows["steps_to_next_obs"].flatten().tolist() == k
    assert rows["nonterminal"].flatten().tolist() == [not s.done for s in last]
    single = batch_of(world, [w[0] for w in window], kind)
    for name in ("reward", "done"):
        assert torch.equal(rows["next", f"original_{name}"], single["next", name])
    for key, column in single.items(True, True):
        if key[0] != "next":
            assert torch.equal(rows[key], column), key
    for key, column in expected["next"].items(True, True):
        names = (key,) if isinstance(key, str) else key
        if key != "reward":
            assert torch.equal(rows["next", *names], column), key


@pytest.mark.parametrize("n", [1, 2, 5])
def test_rows_ahead_are_those_of_the_trajectory(world: Any, n: int) -> None:
    buffer, model = filled(world, compact=False)
    following = model.next_slot()
    slots = torch.randperm(CAPACITY).repeat(2)
    assert buffer.index is not None
    ahead = buffer.index.ahead(slots, n)
    assert ahead.dtype == torch.int64 and ahead.shape == (2 * CAPACITY, n)
    for slot, row in zip(slots.tolist(), ahead.tolist(), strict=True):
        for found in row:
            assert found == slot
            slot = following[slot] if slot >= 0 else -1


@examples(12, derandomize=True)
@given(
    n=st.integers(1, 7),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    kind=st.sampled_from(["float32", "uint8", "dict"]),
    compact=st.booleans(),
    seed=st.integers(0, 9),
)
def test_samples_look_ahead_through_the_ring(
    world: Any, n: int, gamma: float, kind: str, compact: bool, seed: int
) -> None:
    """Terminated, truncated, abandoned and newest rows, interleaved writers, the seam of the ring."""
    buffer, model = filled(world, compact, kind, seed)
    window = windows(model, n)
    slots = torch.arange(CAPACITY).flip(0)
    rows = read(MultiStepTransform(n, gamma), buffer, slots)
    check(world, rows, [window[slot] for slot in slots.tolist()], gamma, kind)


@pytest.mark.parametrize("kind", ["float32", "uint8", "uint16", "dict"])
def test_compact_and_full_storages_agree_bit_by_bit(world: Any, kind: str) -> None:
    slots = torch.randint(CAPACITY, (200,))
    full, compact = (
        read(MultiStepTransform(4, 0.97), filled(world, c, kind)[0], slots) for c in (False, True)
    )
    assert full.keys() == compact.keys()
    assert all(torch.equal(full[key], compact[key]) for key in full)


def terminating(length: int = 5) -> TensorDict:
    """Rewards of 1, terminated at the last row; a row of the next episode follows."""
    ended = torch.arange(length + 1)[:, None] == length - 1
    rows = torch.arange(length + 1.0)
    following = {"observation": rows + 1, "reward": torch.ones(length + 1, 1)}
    flags = {"done": ended, "terminated": ended, "truncated": torch.zeros_like(ended)}
    return TensorDict({"observation": rows, "next": following | flags}, [length + 1])


def test_nothing_is_bootstrapped_through_a_terminal_row() -> None:
    """With n=3, gamma=.9, value 100: 2.71, 1.9 and 1 before the terminal row."""
    batch = MultiStep(gamma=0.9, n_steps=3)(terminating())
    value = 100 * (~batch["next", "terminated"]).float()
    target = batch["next", "reward"] + batch["gamma"] * value
    expected = [2.71 + 72.9, 2.71 + 72.9, 2.71, 1.9, 1.0, 1 + 90]
    torch.testing.assert_close(target.flatten(), torch.tensor(expected))
    assert batch["next", "done"].flatten().tolist() == [False, False, True, True, True, False]
    assert batch["next", "observation"].tolist() == [3, 4, 5, 5, 5, 6]
    buffer = ReplayBuffer(storage=LazyTensorStorage(9), sampler=SliceSampler(slice_len=1), batch_size=1)
    buffer.extend(terminating())
    rows = read(MultiStepTransform(3, 0.9), buffer, torch.arange(6))
    assert all(torch.equal(rows[key], column) for key, column in columns_of(batch).items())


def in_windows(world: Any, seed: int) -> list[Any]:
    steps: list[Any] = world.windows(
        world.writers(3, seed, longest=7), [(0, 9), (1, 1), (2, 12), (0, 5), (1, 4)]
    )
    return steps


def within_runs(steps: list[Any], n: int) -> list[list[Any]]:
    """The oracle of a batch: windows end where the rows after are no longer those of the trajectory."""
    found = []
    for i, step in enumerate(steps):
        window = [step]
        while len(window) < n and not window[-1].done and i + len(window) < len(steps):
            later = steps[i + len(window)]
            if (later.traj, later.step) != (step.traj, step.step + len(window)):
                break
            window.append(later)
        found.append(window)
    return found


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("ids", ["unique", ""])
@pytest.mark.parametrize("n", [1, 3, 20])
def test_batches_look_ahead_within_their_runs(world: Any, n: int, ids: str, compact: bool) -> None:
    steps = in_windows(world, seed=1)
    batch = batch_of(world, steps, ids=ids)
    window = within_runs(steps, n)
    if not ids:  # a cut run without an id of its own needs is_init behind it
        cut = [a.traj != b.traj or b.step != a.step + 1 for a, b in itertools.pairwise(steps)]
        batch["is_init"][1:] |= torch.tensor(cut)[:, None]
    marked = batch["is_init"].clone()
    given_batch, final = batch, None
    if compact:
        given_batch, final = world.compacted(batch, steps)
        if not ids:
            given_batch["is_init"] = marked
    before = {key: column.clone() for key, column in columns_of(given_batch).items()}
    rows = columns_of(MultiStep(0.9, n).forward(given_batch, final))
    assert columns_of(given_batch).keys() == before.keys()
    assert all(torch.equal(given_batch[key], column) for key, column in before.items())
    if compact:  # the compact batch has no next step count
        rows["next", "step_count"] = torch.tensor([[w[-1].step + 1] for w in window])
    rows["is_init"] = torch.tensor([[s.step == 0] for s in steps])
    if not ids:
        check_ids = torch.tensor([s.traj for s in steps])
        rows["collector", "traj_ids"] = check_ids
    check(world, rows, window, 0.9, "float32")


def test_one_step_changes_nothing(world: Any) -> None:
    batch = batch_of(world, in_windows(world, 2))
    out = MultiStep(0.5, 1)(batch)
    assert all(torch.equal(out[key], column) for key, column in batch.items(True, True))
    assert out["gamma"].unique().tolist() == [0.5]


def test_as_many_steps_as_rows_give_the_discounted_return(world: Any) -> None:
    batch = batch_of(world, in_windows(world, 3))
    out = MultiStep(0.9, len(batch))(batch)
    returns = segmented_scan(0.9, batch["next", "reward"], run_ends(batch))
    torch.testing.assert_close(out["next", "reward"], returns)


def test_each_reward_has_its_original(world: Any) -> None:
    """With several rewards, each has its original."""
    batch = batch_of(world, in_windows(world, 4))
    batch["next", "agents", "reward"] = torch.rand(len(batch), 3)
    batch["next", "cost"] = torch.arange(len(batch))
    transform = MultiStep(0.9, 3, reward_keys=["reward", ("agents", "reward"), ("next", "cost")])
    out = transform(batch)
    for path, name in (((), "reward"), (("agents",), "reward"), ((), "cost")):
        original = out["next", *path, f"original_{name}"]
        assert torch.equal(original, batch["next", *path, name])
        summed = segmented_scan(0.9, original.double(), run_ends(batch))  # of whole runs, for the last rows
        ended = run_ends(batch)
        torch.testing.assert_close(out["next", *path, name][ended].double(), summed[ended])
    assert out["next", "agents", "reward"].shape == (len(batch), 3)
    assert out["next", "cost"].dtype == torch.float32  # integers are summed in float32
    assert MultiStep(0.9, 3, reward_keys="cost").reward_keys == [("next", "cost")]


@pytest.mark.parametrize(
    ("dtype", "gammas"), [(torch.float16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2]
)
def test_rewards_keep_their_dtype_and_shape(world: Any, dtype: torch.dtype, gammas: torch.dtype) -> None:
    batch = batch_of(world, in_windows(world, 5))
    batch["next", "reward"] = batch["next", "reward"].to(dtype).flatten()
    out = MultiStep(0.9, 3)(batch)
    assert out["next", "reward"].dtype == dtype and out["next", "reward"].shape == (len(batch),)
    assert out["gamma"].dtype == gammas and out["steps_to_next_obs"].dtype == torch.int64
    assert {out[key].shape for key in ("gamma", "steps_to_next_obs", "nonterminal")} == {(len(batch), 1)}


def test_a_nan_beyond_the_window_stays_there() -> None:
    batch = terminating()
    batch["next", "reward"][5] = torch.nan
    assert MultiStep(0.9, 3)(batch)["next", "reward"].isnan().flatten().tolist() == [False] * 5 + [True]


def test_deltas_are_decoded(world: Any) -> None:
    steps = in_windows(world, 6)
    batch = batch_of(world, steps)
    delta = encode_delta(batch["observation"], batch["next", "observation"])
    small = batch.exclude(("next", "observation")).set(("next", "delta", "observation"), delta)
    out = MultiStep(0.9, 4)(small)
    assert ("next", "delta") not in out.keys(True)
    assert torch.equal(out["next", "observation"], MultiStep(0.9, 4)(batch)["next", "observation"])


def test_known_next_observations_are_known_where_they_go(world: Any) -> None:
    batch = terminating()
    batch["collector", "next_known"] = torch.tensor([True, True, True, True, False, True])
    known = MultiStep(0.9, 3)(batch)["collector", "next_known"]
    assert known.tolist() == [True, True, False, False, False, True]


def test_padding_is_not_counted(world: Any) -> None:
    batch = batch_of(world, world.episode(0, 0, 4, ""))
    padded = torch.cat([batch, batch[-1:], batch[-1:]])
    padded["is_init"] = torch.zeros(6, 1, dtype=torch.bool)
    padded["collector", "mask"] = torch.arange(6) < 4
    out = MultiStep(0.9, 3)(padded)
    assert out["nonterminal"].flatten().tolist() == [True] * 4 + [False] * 2
    assert torch.equal(out["next", "reward"][:4], MultiStep(0.9, 3)(batch)["next", "reward"])


def test_n_steps_may_change_between_samples(world: Any) -> None:
    buffer, model = filled(world, compact=True)
    transform = MultiStepTransform(2, 0.9)
    for n in (2, 6, 1):
        transform.n_steps = n
        assert transform.look_ahead == n
        rows = read(transform, buffer, torch.arange(CAPACITY))
        check(world, rows, [windows(model, n)[slot] for slot in range(CAPACITY)], 0.9, "float32")


def test_forward_leaves_samples_and_transforms_plain_batches(world: Any) -> None:
    batch = batch_of(world, in_windows(world, 7))
    transform = MultiStepTransform(3, 0.9)
    out = transform(batch)
    expected = MultiStep(0.9, 3)(batch)
    assert all(torch.equal(out[key], column) for key, column in expected.items(True, True))
    assert transform.forward(out) is out


def test_memory_is_linear_in_the_rows() -> None:
    """The rewards are not copied for each trajectory."""
    rows, n = 4000, 5
    ended = torch.arange(rows)[:, None] % 2 == 1
    batch = terminating(rows - 1)
    batch["next", "done"] = batch["next", "terminated"] = ended
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    with Watch():
        MultiStep(0.9, n)(batch)
    assert largest <= 8 * rows * n


def test_errors_name_what_is_wrong(world: Any) -> None:
    batch = batch_of(world, in_windows(world, 8))
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="n_steps must be an integer of at least 1, got"):
            MultiStep(0.9, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="n_steps must be an integer of at least 1, got 0"):
        MultiStepTransform(3, 0.9).n_steps = 0
    for gamma in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\], got"):
            MultiStepTransform(3, gamma)
    with pytest.raises(ValueError, match=r"at least one batch dimension .* got batch size \[\]"):
        MultiStep(0.9, 3)(batch[0])
    with pytest.raises(ValueError, match=r"needs samples of single rows, \[1\], got \[1, 31\]"):
        MultiStepTransform(3, 0.9).forward(batch.unsqueeze(0), torch.ones(1, dtype=torch.bool))
    with pytest.raises(KeyError, match=r"no entry \('next', 'cost'\)"):
        MultiStep(0.9, 3, reward_keys=["cost"])(batch)
    with pytest.raises(TypeError, match=r"\('next', 'done'\)\] must be bool, got torch.int64"):
        MultiStepTransform(3, 0.9)(batch.clone().set(("next", "done"), batch["next", "done"].long()))
    with pytest.raises(ValueError, match="n-step transitions already"):
        MultiStep(0.9, 3)(MultiStep(0.9, 3)(batch))
    with pytest.raises(TypeError, match=r"'note'\)\] is not a tensor"):
        MultiStep(0.9, 3)(batch.clone().set(("next", "note"), NonTensorStack(*map(str, range(31)))))


def test_compact_batches_need_their_final_observations(world: Any) -> None:
    steps = in_windows(world, 9)
    compact, _ = world.compacted(batch_of(world, steps), steps)
    with pytest.raises(ValueError, match=r"need \('next', 'observation'\).*compact_obs=True.*final=\.\.\."):
        MultiStep(0.9, 3)(compact)
    with pytest.raises(ValueError, match=r"need \('next', '<observation>'\)"):
        MultiStep(0.9, 3)(compact.exclude("observation", ("next", "step_count")))
    buffer = ReplayBuffer(storage=LazyTensorStorage(50), sampler=SliceSampler(slice_len=1), batch_size=1)
    buffer.extend(compact)
    with pytest.raises(ValueError, match=r"need \('next', 'observation'\)"):
        read(MultiStepTransform(3, 0.9), buffer, torch.arange(5))


@pytest.mark.cover(2)
@pytest.mark.parametrize("sampler", ["random", "slices"])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("kind", ["float32", "dict"])
def test_buffers_sample_n_step_transitions(world: Any, kind: str, compact: bool, sampler: str) -> None:
    """Through the buffer: what a sample says of each row is what the loop over the stored rows says."""
    n, gamma = 4, 0.9
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY, compact_obs=compact),
        sampler=SliceSampler(slice_len=6) if sampler == "slices" else None,
        transform=MultiStepTransform(n, gamma),
        batch_size=48,
        generator=torch.Generator().manual_seed(0),
    )
    model = world.Model(CAPACITY)
    writers = world.writers(3, 11, longest=9)
    for i in range(60):
        steps = world.windows(writers, [(i % 3, i % 5 + 1), ((i + 1) % 3, 2)])
        buffer.extend(batch_of(world, steps, kind))
        model.extend(steps)
        sample, info = buffer.sample(return_info=True)
        rows = columns_of(sample)
        window = [windows(model, n)[slot] for slot in info["index"].tolist()]
        single = batch_of(world, [w[0] for w in window], kind)
        rows["is_init"] = single["is_init"]
        if sampler == "slices":  # the sampler's marks come last
            ends = batch_of(world, [w[-1] for w in window], kind)["next"]
            marked = rows["next", "done"] & ~ends["done"]
            assert torch.equal(marked, rows["next", "truncated"] & ~ends["truncated"] & ~ends["terminated"])
            rows["next", "done"], rows["next", "truncated"] = ends["done"], ends["truncated"]
        check(world, rows, window, gamma, kind)


def test_rows_read_by_position_look_no_further_than_they_may(world: Any) -> None:
    """One trajectory that fills the ring: the newest row stands before the oldest."""
    transform = MultiStepTransform(3, 1.0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), transform=transform, batch_size=4)
    steps = world.episode(0, 0, 14, "")
    for i in range(0, 14, 2):
        buffer.extend(batch_of(world, steps[i : i + 2]))
    rows = buffer[:]
    last = rows["step_count"] + rows["steps_to_next_obs"]
    assert torch.equal(last, rows["next", "step_count"])
    assert int(last.max()) == 14
    assert rows["steps_to_next_obs"][:4].flatten().tolist() == [3, 3, 2, 1]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("in_keys", [None, ["observation"]])
def test_deltas_may_be_restored_before_or_after(world: Any, first: bool, in_keys: list[str] | None) -> None:
    """The same n-step transitions as of full rows."""
    steps = [s for e in range(4) for s in world.episode(0, e, 6)]
    batch = batch_of(world, steps)
    delta = encode_delta(batch["observation"], batch["next", "observation"])
    small = batch.exclude(("next", "observation"))
    small["next", "delta", "observation"] = delta
    restore = NextObservationDelta(in_keys=in_keys)
    both = [restore, MultiStepTransform(n_steps=3, gamma=0.9)]
    samples = []
    for rows, transform in (
        (batch, MultiStepTransform(n_steps=3, gamma=0.9)),
        (small, Compose(*both) if first else Compose(*both[::-1])),
    ):
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(24),
            sampler=SliceSampler(slice_len=4),
            batch_size=8,
            transform=transform,
            generator=torch.Generator().manual_seed(0),
        )
        buffer.extend(rows)
        samples.append(buffer.sample())
    assert set(samples[0].keys(True, True)) == set(samples[1].keys(True, True))
    assert torch.equal(samples[0]["next", "observation"], samples[1]["next", "observation"])
