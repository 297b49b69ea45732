"""Rows that were filtered or shuffled are refused where a buffer follows trajectories, and nothing else is."""

import re
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import (
    HindsightTransform,
    LazyMemmapStorage,
    LazyTensorStorage,
    MultiStepTransform,
    ReplayBuffer,
    SliceSampler,
)

KEYS = {"one": "observation", "nested": ("observation", "x"), "other": "x"}


def played(envs: int = 4, steps: int = 64, episode: int = 13, key: Any = "observation") -> TensorDict:
    """Rows whose observation is (env, episode, step), env after env, without step counts."""
    env, t = (
        each.flatten() for each in torch.meshgrid(torch.arange(envs), torch.arange(steps), indexing="ij")
    )
    number, step = t // episode, t % episode
    done = (step == episode - 1)[:, None]
    batch = TensorDict({}, [envs * steps])
    batch[key] = torch.stack([env, number, step], 1).float()
    batch["next", *((key,) if isinstance(key, str) else key)] = torch.stack(
        [env, number, step + 1], 1
    ).float()
    batch["is_init"] = (step == 0)[:, None]
    batch["next", "done"] = batch["next", "terminated"] = done
    batch["next", "reward"] = torch.ones(len(batch), 1)
    batch["collector", "traj_ids"] = 100 * env + number
    return batch


def slices(storage: Any = None, **options: Any) -> ReplayBuffer:
    storage = LazyTensorStorage(1000, **options) if storage is None else storage
    return ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=4), batch_size=16)


BUFFERS: dict[str, Any] = {
    "slices": slices,
    "compact slices": lambda: slices(compact_obs=True),
    "slices in files": lambda: slices(LazyMemmapStorage(1000)),
    "n steps": lambda: ReplayBuffer(
        storage=LazyTensorStorage(1000), transform=MultiStepTransform(n_steps=3, gamma=0.9), batch_size=8
    ),
    "hindsight": lambda: ReplayBuffer(
        storage=LazyTensorStorage(1000),
        transform=HindsightTransform(
            lambda a, b: a[..., :1], goal_key="goal", achieved_goal_key="observation"
        ),
        batch_size=8,
    ),
}


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("key", ["one", "nested"])
def test_filtered_rows_are_refused(kind: str, key: str) -> None:
    if (kind, key) == ("hindsight", "nested"):
        pytest.skip("its goals are those of one key")
    batch, buffer = played(key=KEYS[key]), BUFFERS[kind]()
    if kind == "hindsight":
        batch["goal"] = batch["next", "goal"] = torch.zeros(len(batch), 3)
    text = r"row 1 of the batch does not follow row 0 .* of row 0 is not the .* of row 1\. Extend with"
    for _ in range(2):
        with pytest.raises(ValueError, match=text):
            buffer.extend(batch[::2])
    assert not len(buffer)
    buffer.extend(batch)
    with pytest.raises(ValueError, match=text):
        buffer.extend(batch[::2])
    assert len(buffer) == len(batch)


@pytest.mark.parametrize("kind", ["slices", "compact slices"])
@pytest.mark.parametrize("key", KEYS)
def test_shuffled_rows_are_refused_and_their_source_is_named(kind: str, key: str) -> None:
    """One trajectory in another order; also where no entry is named as an observation."""
    batch, buffer = played(1, 64, 64, KEYS[key]), BUFFERS[kind]()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    shuffled = batch[order]
    shuffled["is_init"][:] = False
    with pytest.raises(ValueError, match="but that of row ") as caught:
        buffer.extend(shuffled)
    numbers = re.findall(r"\d+", str(caught.value))
    row, source = int(numbers[1]), int(numbers[-1])
    assert order[source] == order[row] + 1 != order[row + 1]


def test_one_gap_in_few_rows_is_found_wherever_it_is() -> None:
    batch = played(1, 65, 65)
    for gap in range(1, 64):
        rows = torch.cat([torch.arange(gap), torch.arange(gap + 1, 65)])
        with pytest.raises(ValueError, match=f"row {gap} of the batch does not follow row {gap - 1} "):
            slices().extend(batch[rows])


def test_rows_left_out_of_a_long_batch_are_counted() -> None:
    batch = played(1, 200, 200)[::2]
    buffer = slices(LazyTensorStorage(50))
    with pytest.warns(UserWarning, match="not stored"), pytest.raises(ValueError, match=r"row 51 .* row 50 "):
        buffer.extend(batch)


def test_a_random_part_of_a_long_batch_is_refused() -> None:
    batch = played(8, 2000, 500)
    keep = torch.rand(len(batch), generator=torch.Generator().manual_seed(0)) < 0.8
    with pytest.raises(ValueError, match="does not follow"):
        slices().extend(batch[keep][:1000])


# -- what is right ---------------------------------------------------------------------------------------------------


def of_one_row(batch: TensorDict) -> TensorDict:
    return batch[batch["is_init"][:, 0]]


def unknown(batch: TensorDict) -> TensorDict:
    half = batch[::2].clone()
    half["next", "observation"][:] = torch.nan
    return half


def not_known(batch: TensorDict) -> TensorDict:
    half = batch[::2].clone()
    half["collector", "next_known"] = torch.zeros(len(half), dtype=torch.bool)
    return half


def marked(batch: TensorDict) -> TensorDict:
    half = batch[::2].clone()
    half["is_init"][:] = True
    return half


def with_new_ids(batch: TensorDict) -> TensorDict:
    half = batch[::2].clone()
    half["collector", "traj_ids"] = torch.arange(len(half))
    return half


def of_n_steps(batch: TensorDict) -> TensorDict:
    half = batch[::2].clone()
    half["steps_to_next_obs"] = torch.full((len(half), 1), 3)
    return half


def rounded(batch: TensorDict) -> TensorDict:
    """As a float16 difference gives it."""
    batch = batch.clone()
    batch["observation"] += 0.1
    delta = (batch["next", "observation"] + 0.1 - batch["observation"]).half()
    batch["next", "observation"] = batch["observation"] + delta.float()
    return batch


def constant(batch: TensorDict) -> TensorDict:
    half = batch[::2].clone()
    half["observation"][:] = half["next", "observation"][:] = 1
    return half


def no_next(batch: TensorDict) -> TensorDict:
    return batch[::2].exclude(("next", "observation"))


def strided(batch: TensorDict) -> TensorDict:
    batch = batch.clone()
    for key in ("observation", ("next", "observation")):
        batch[key] = batch[key].T.contiguous().T
    return batch


RIGHT = [of_one_row, unknown, not_known, marked, with_new_ids, of_n_steps, rounded, constant, strided]


@pytest.mark.parametrize("kind", ["slices", "compact slices"])
@pytest.mark.parametrize("change", RIGHT, ids=lambda change: change.__name__)
def test_rows_that_are_right_are_stored(kind: str, change: Any) -> None:
    buffer = BUFFERS[kind]()
    batch = change(played())
    buffer.extend(batch)
    assert len(buffer) == len(batch)
    buffer.extend(change(played()).apply(lambda x: x))
    assert len(buffer) == 2 * len(batch)


def test_rows_without_next_observations_are_not_compared() -> None:
    slices().extend(no_next(played()))


@pytest.mark.parametrize("kind", ["slices", "compact slices"])
def test_step_counts_decide_where_they_are(kind: str) -> None:
    """Counted rows follow one another, whatever their next observations: augmented ones, for example."""
    batch, buffer = played(), BUFFERS[kind]()
    batch["step_count"] = batch["observation"][:, 2:].long()
    batch["next", "observation"] += torch.randn(len(batch), 3)
    buffer.extend(batch)
    with pytest.raises(ValueError, match="'step_count' is 2 after 0"):
        buffer.extend(batch[::2])


def test_a_buffer_of_single_rows_takes_any_order() -> None:
    for options in ({}, {"compact_obs": True}):
        ReplayBuffer(storage=LazyTensorStorage(1000, **options), batch_size=4).extend(played()[::2])


def test_outputs_of_a_network_are_not_taken_for_observations() -> None:
    """Values of both observations agree nowhere; without an entry named as observation nothing is proved."""
    batch = played().exclude("observation", ("next", "observation"))
    batch["feature"], batch["next", "feature"] = torch.randn(2, len(batch), 5)
    slices().extend(batch)
