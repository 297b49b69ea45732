"""`MultiStep` on batches ``[*B, T]``, padded or not, against a loop in Python's floats."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.buffers import MultiStep, MultiStepTransform
from flatroll.layout import split_trajectories

MASK = ("collector", "mask")


def padded_batch(lead: list[int], time: int, unit: bool, mask: str | None, seed: int) -> TensorDict:
    """Random episodes; ``unit`` gives flags and rewards a last dimension of 1, ``mask`` is the shape of the mask."""
    generator = torch.Generator().manual_seed(seed)
    shape = [*lead, time]
    real = torch.ones(shape, dtype=torch.bool)
    if mask is not None:
        lengths = torch.randint(0, time + 1, lead, generator=generator)
        real = torch.arange(time) < lengths.unsqueeze(-1)
    done = (torch.rand(shape, generator=generator) < 0.3) & real
    reward = torch.randn(shape, generator=generator, dtype=torch.float64)
    reward[~real] = torch.nan  # nothing may read padding
    obs = torch.randn([*shape, 2], generator=generator, dtype=torch.float64)
    last = (lambda flag: flag.unsqueeze(-1)) if unit else (lambda flag: flag)
    batch = TensorDict(
        {"obs": obs, "next": {"obs": obs + 0.5, "reward": last(reward), "done": last(done)}}, shape
    )
    if mask is not None:
        batch[MASK] = real.unsqueeze(-1) if mask == "[B, T, 1]" else real
    return batch


def by_loop(done: list[bool], reward: list[float], real: list[bool], n: int, gamma: float) -> list[Any]:
    """Steps, discounted reward and last row of each row's window, for one row of the leading dimensions."""
    found = []
    for t in range(len(done)):
        total, k = reward[t], 1
        while k < n and not done[t + k - 1] and t + k < len(done) and real[t + k] == real[t]:
            total += gamma**k * reward[t + k]
            k += 1
        found.append((k, total, t + k - 1))
    return found


@pytest.mark.parametrize("mask", [None, "[B, T]", "[B, T, 1]"])
@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize(("lead", "time"), [([5], 11), ([2, 3], 7), ([1], 1), ([4], 2), ([], 9), ([0], 4)])
def test_every_shape_against_a_loop(lead: list[int], time: int, unit: bool, mask: str | None) -> None:
    for n in (1, 3, 20):
        batch = padded_batch(lead, time, unit, mask, seed=n + 10 * time)
        before = batch.clone()
        out = MultiStep(gamma=0.9, n_steps=n)(batch)
        assert out.batch_size == batch.batch_size
        assert batch.bytes() == before.bytes() and set(batch.keys(True, True)) == set(before.keys(True, True))
        real = torch.ones(batch.batch_size, dtype=torch.bool) if mask is None else batch[MASK]

        def rows(column: Tensor) -> Tensor:
            return column.reshape(-1, time)

        done, reward, real = rows(batch["next", "done"]), rows(batch["next", "reward"]), rows(real)
        next_obs = batch["next", "obs"].reshape(-1, time, 2)
        for b in range(len(done)):
            found = by_loop(done[b].tolist(), reward[b].tolist(), real[b].tolist(), n, 0.9)
            for t, (k, total, last) in enumerate(found):
                if not real[b, t]:
                    assert not rows(out["nonterminal"])[b, t]
                    continue
                assert rows(out["steps_to_next_obs"])[b, t] == k
                assert rows(out["next", "reward"])[b, t] == pytest.approx(total, rel=1e-12)
                assert rows(out["gamma"])[b, t] == pytest.approx(0.9**k, rel=1e-12)
                assert torch.equal(out["next", "obs"].reshape(-1, time, 2)[b, t], next_obs[b, last])
                assert rows(out["next", "done"])[b, t] == done[b, last]
                assert rows(out["nonterminal"])[b, t] == (not done[b, last])


def test_split_trajectories_and_flat_rows_give_the_same_transitions() -> None:
    batch = padded_batch([], 40, True, None, seed=3)
    flat = MultiStep(0.9, 4)(batch)
    padded = MultiStep(0.9, 4)(split_trajectories(batch))
    real = padded[MASK]
    for key in flat.keys(True, True):
        assert torch.equal(padded[key][real], flat[key])


def test_the_transform_called_alone_takes_such_batches_too() -> None:
    batch = padded_batch([3], 6, True, "[B, T]", seed=1)
    expected, out = MultiStep(0.9, 2)(batch), MultiStepTransform(2, 0.9)(batch)
    assert all(
        torch.equal(out[key].nan_to_num(), value.nan_to_num()) for key, value in expected.items(True, True)
    )


def test_compact_batches_are_numbered_as_they_are_laid_flat() -> None:
    batch = padded_batch([2], 5, True, None, seed=5)
    flat = batch.reshape(-1)
    done = flat["next", "done"].flatten()
    ends = done.clone()
    ends[[4, 9]] = True  # the ends of the two rows
    rows = ends.nonzero().flatten()
    # Within a run, the next observation is that of the next row.
    flat["next", "obs"][:-1] = torch.where(ends[:-1, None], flat["next", "obs"][:-1], flat["obs"][1:])
    final = TensorDict({"next": {"obs": flat["next", "obs"][rows]}, "row": rows}, [len(rows)])
    expected = MultiStep(0.9, 3)(flat.reshape(2, 5))
    compact = flat.reshape(2, 5).exclude(("next", "obs"))
    out = MultiStep(0.9, 3).forward(compact, final=final)
    assert torch.equal(out["next", "obs"], expected["next", "obs"])


@pytest.mark.parametrize("unit", [True, False])
def test_a_done_flag_for_each_agent(unit: bool) -> None:
    agents = [padded_batch([2], 6, unit, "[B, T, 1]" if unit else "[B, T]", seed=10 + i) for i in range(3)]
    batch = TensorDict.stack(agents, 2)
    batch.batch_size = [2, 6]
    out = MultiStep(0.9, 3)(batch)
    assert out.batch_size == (2, 6)
    for i, agent in enumerate(agents):
        expected = MultiStep(0.9, 3)(agent)
        for key in expected.keys(True, True):
            assert torch.equal(out[key][:, :, i].nan_to_num(), expected[key].nan_to_num())
    with pytest.raises(
        ValueError, match=r"\('next', 'done'\)\] has .* values in a batch \[2, 6\], but 'x' does not have one"
    ):
        MultiStep(0.9, 3)(batch.set("x", torch.zeros(2, 6)))


def test_moves_with_to_like_any_module() -> None:
    assert MultiStep(0.9, 3).to("cpu").n_steps == 3
