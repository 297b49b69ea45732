"""Arguments and methods that scripts written for TorchRL's samplers use."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import (
    LambdaScheduler,
    LazyTensorStorage,
    LinearScheduler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SchedulerList,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StepScheduler,
)


def flags(rows: int, *true: int) -> torch.Tensor:
    return torch.zeros(rows, 1, dtype=torch.bool).index_fill_(0, torch.tensor(true), True)


def batch_of(**ends: torch.Tensor) -> TensorDict:
    return TensorDict({"x": torch.arange(9), **ends}, [9])


# --- slices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [SliceSampler, SliceSamplerWithoutReplacement, PrioritizedSliceSampler])
@pytest.mark.parametrize("compact", [False, True])
def test_any_of_several_end_keys_ends_a_trajectory(cls: Any, compact: bool) -> None:
    first: Any = (9, 0.7, 0.9) if cls is PrioritizedSliceSampler else ()
    sampler = cls(*first, slice_len=9, end_keys=["gone", "won", ("sub", "lost")])
    buffer = ReplayBuffer(storage=LazyTensorStorage(9, compact_obs=compact), sampler=sampler, batch_size=36)
    batch = batch_of(won=flags(9, 1), sub=TensorDict({"lost": flags(9, 4)}, [9]))  # "gone" is not there
    batch["next"] = TensorDict({"x": torch.arange(1, 10)}, [9])
    batch["is_init"] = flags(9, 0)
    buffer.extend(batch)
    assert buffer.index is not None and buffer.index.trajectories == 3
    sample = buffer.sample()
    at = sample["is_init"].flatten().nonzero().flatten()
    assert set(sample["x"][at].tolist()) <= {0, 2, 5}
    with pytest.raises(ValueError, match="the trajectory index depend"):
        buffer[:] = TensorDict({"won": flags(9, 2)}, [9])


@pytest.mark.parametrize("cls", [SliceSampler, SliceSamplerWithoutReplacement, PrioritizedSliceSampler])
def test_a_list_as_end_key_is_end_keys(cls: Any) -> None:
    first: Any = (9, 0.7, 0.9) if cls is PrioritizedSliceSampler else ()
    sampler = cls(*first, slice_len=9, end_key=["won", ("sub", "lost")])
    assert sampler.end_keys == ["won", ("sub", "lost")] and sampler.end_key is None
    buffer = ReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler)
    buffer.extend(batch_of(won=flags(9, 1), sub=TensorDict({"lost": flags(9, 4)}, [9])))
    assert buffer.index is not None and buffer.index.trajectories == 3


@pytest.mark.parametrize("key", ["episode", ("collector", "traj_ids"), "own"])
def test_without_any_of_the_end_keys_ids_tell_trajectories_apart(key: Any) -> None:
    sampler = SliceSampler(slice_len=2, end_keys=["a", "b"], traj_key=key if key == "own" else None)
    buffer = ReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler)
    batch = batch_of()
    batch[key] = torch.arange(9) // 3
    buffer.extend(batch)
    assert buffer.index is not None and buffer.index.trajectories == 3


def test_end_keys_that_cannot_be_used_are_refused() -> None:
    for options in ({"end_keys": []}, {"end_keys": "done"}, {"end_keys": ["a"], "end_key": "b"}):
        with pytest.raises(TypeError, match="end_keys must be a list of"):
            SliceSampler(slice_len=2, **options)  # type: ignore[arg-type]
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(9), sampler=SliceSampler(slice_len=2, end_keys=["a", "b"])
    )
    with pytest.raises(KeyError, match="'a'"):
        buffer.extend(batch_of(done=flags(9, 3)))


def test_a_span_may_be_a_list() -> None:
    assert SliceSampler(slice_len=5, span=[2, True]).span == (2, True)
    assert SliceSampler(slice_len=5, span=3).span == (3, 3)
    sampler = PrioritizedSliceSampler(9, 0.7, 0.9, slice_len=5, span=[False, 3])
    assert sampler.span == (False, 3)
    with pytest.raises(ValueError, match=r"span\[0\] must be False"):
        PrioritizedSliceSampler(9, 0.7, 0.9, slice_len=5, span=[1, False])
    with pytest.raises(ValueError, match="span must be a bool, a number of rows or a pair"):
        SliceSampler(slice_len=5, span=[1, 2, 3])


@pytest.mark.parametrize("cls", [SliceSampler, SliceSamplerWithoutReplacement])
def test_options_without_effect_are_taken(cls: Any) -> None:
    samples = []
    for options in ({}, {"cache_values": True, "compile": {"mode": "default"}, "use_gpu": True}):
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(9),
            sampler=cls(slice_len=3, **options),
            batch_size=6,
            generator=torch.Generator().manual_seed(0),
        )
        buffer.extend(batch_of(episode=torch.arange(9) // 4))
        samples.append(buffer.sample())
    assert (samples[0] == samples[1]).all()


# --- priorities ---------------------------------------------------------------------------------------------


def prioritized(**options: Any) -> ReplayBuffer:
    numbers: dict[str, Any] = {"alpha": 1.0, "beta": 1.0, "eps": 0.0} | options
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(8), sampler=PrioritizedSampler(8, **numbers), batch_size=1000
    )
    buffer.extend(torch.arange(4))
    return buffer


def drawn(buffer: ReplayBuffer) -> set[int]:
    return set(buffer.sample().tolist())


@pytest.mark.parametrize("one", [torch.tensor(0.5), torch.tensor([0.5]), np.float32(0.5), 0.5])
def test_exponents_may_be_tensors(one: Any) -> None:
    sampler = PrioritizedSampler(8, alpha=one, beta=one)
    assert sampler.alpha == sampler.beta == 0.5
    sampler.alpha, sampler.beta = 2 * one, 4 * one
    assert (sampler.alpha, sampler.beta) == (1.0, 2.0)
    for wrong in (torch.tensor(-1.0), torch.tensor([0.1, 0.2]), np.float32("nan"), torch.tensor(1j)):
        for name in ("alpha", "beta"):
            with pytest.raises(ValueError, match=f"{name} must be a number of at least 0"):
                setattr(sampler, name, wrong)
    assert (sampler.alpha, sampler.beta) == (1.0, 2.0)


@pytest.mark.parametrize("reduction", ["max", "min", "mean", "median"])
def test_a_reduction_hides_no_bad_priority(reduction: str) -> None:
    """The highest of 1 and -2 is 1: it was taken."""
    buffer = prioritized(reduction=reduction)
    buffer.update_priority(torch.arange(4), torch.tensor([[1.0, 0], [0, 0], [0, 0], [0, 0]]))
    before = buffer.sampler.state_dict()["priority"]
    for bad in (-2.0, float("nan")):
        priority = torch.tensor([[3.0, 3, 3], [1, bad, 5]])
        with pytest.raises(ValueError, match=r"priority\[1\] is \[1.0, .*, 5.0\]"):
            buffer.update_priority(torch.tensor([0, 1]), priority)
    with pytest.raises(TypeError, match=r"priority must be real numbers, got torch\.complex64"):
        buffer.update_priority(torch.tensor([0]), torch.tensor([1j]))
    assert torch.equal(buffer.sampler.state_dict()["priority"], before)


def test_mark_update_gives_rows_the_priority_of_new_ones() -> None:
    buffer = prioritized()
    buffer.update_priority(torch.arange(4), torch.tensor([0.0, 0, 0, 2]))
    assert drawn(buffer) == {3}
    buffer.mark_update(torch.tensor([1]))
    assert drawn(buffer) == {1, 3}
    assert buffer.sampler.state_dict()["priority"].tolist() == [0, 2, 0, 2]
    plain = ReplayBuffer(storage=LazyTensorStorage(8), sampler=RandomSampler())
    plain.extend(torch.arange(4))
    plain.mark_update(0)  # nothing to do


def test_positions_may_be_tuples() -> None:
    """``info["index"]`` is ``[N, ndim]``; its columns, as TorchRL gives them, do as well."""
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(12, ndim=2), sampler=PrioritizedSampler(12, 1.0, 1.0, 0.0), batch_size=50
    )
    buffer.extend(torch.arange(12).view(3, 4))  # 3 lanes
    sample, info = buffer.sample(return_info=True)
    columns = tuple(info["index"].unbind(-1))
    assert torch.equal(buffer[columns], sample)
    buffer.update_priority(torch.arange(12), 0.0)
    buffer.update_priority((torch.tensor([3, 0]), torch.tensor([1, 2])), torch.tensor([1.0, 2.0]))
    assert drawn(buffer) == {7, 8}
    buffer.update_priority(torch.arange(12), 0.0)
    buffer.mark_update((torch.tensor([2]), torch.tensor([0])))
    assert drawn(buffer) == {2}
    with pytest.raises(IndexError, match="index has 3 in dimension 1, which has 3 lanes"):
        buffer.update_priority(torch.tensor([[0, 3]]), 1.0)  # it was the row [1, 0]
    one = prioritized()
    one.update_priority((torch.tensor([1, 2]),), torch.tensor([0.0, 5.0]))
    assert one.sampler.state_dict()["priority"].tolist() == [1, 0, 5, 1]


# --- schedulers ---------------------------------------------------------------------------------------------


def betas(scheduler: Any, sampler: Any, steps: int) -> list[float]:
    values = []
    for _ in range(steps):
        scheduler.step()
        values.append(round(float(sampler.beta), 6))
    return values


def test_schedulers_change_a_number_of_a_sampler() -> None:
    sampler = PrioritizedSampler(10, alpha=0.7, beta=0.6)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler)
    assert betas(LinearScheduler(buffer, "beta", 1.0, num_steps=4), sampler, 6) == [0.7, 0.8, 0.9, 1, 1, 1]
    sampler.beta = 0.6
    step = StepScheduler(sampler, "beta", gamma=0.3, n_steps=2, mode="additive", max_value=1.0)
    assert betas(step, sampler, 5) == [0.6, 0.9, 0.9, 1.0, 1.0]
    sampler.beta = 0.8
    assert betas(StepScheduler(sampler, "beta", gamma=0.5, min_value=0.3), sampler, 3) == [0.4, 0.3, 0.3]
    sampler.beta = 0.1
    both = SchedulerList(LambdaScheduler(sampler, "beta", lambda n: n + 1.0))
    both.append(LinearScheduler(sampler, "alpha", 0.1, num_steps=1))
    assert betas(both, sampler, 2) == [0.2, 0.3] and sampler.alpha == 0.1


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"min_value": math.inf}, "min_value must be below inf"),
        ({"max_value": -math.inf}, "max_value must be above -inf"),
        ({"min_value": 3, "max_value": 2}, "min_value must be at most max_value, got 3 and 2"),
    ],
)
def test_bounds_that_leave_no_value_are_refused(bounds: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepScheduler(PrioritizedSampler(10, alpha=0.7, beta=0.6), "beta", **bounds)


def test_a_scheduler_goes_on_from_its_state_and_keeps_tensors() -> None:
    class Loss:
        entropy_coeff = torch.tensor(1.0, dtype=torch.float64)

    loss, again = Loss(), Loss()
    scheduler = LinearScheduler(loss, "entropy_coeff", 0.0, num_steps=4)
    scheduler.step()
    again.entropy_coeff = loss.entropy_coeff.clone()
    resumed = LinearScheduler(again, "entropy_coeff", 0.0, num_steps=4)
    resumed.load_state_dict(scheduler.state_dict())
    for each in (scheduler, resumed):
        each.step()
    assert loss.entropy_coeff == again.entropy_coeff == 0.5
    assert again.entropy_coeff.dtype is torch.float64


def test_schedulers_say_what_is_wrong() -> None:
    sampler = PrioritizedSampler(10, alpha=0.7, beta=0.6)
    with pytest.raises(AttributeError, match="gamma"):
        LinearScheduler(sampler, "gamma", 1.0, num_steps=2)
    with pytest.raises(ValueError, match="num_steps must be an integer of at least 1"):
        LinearScheduler(sampler, "beta", 1.0, num_steps=0)
    with pytest.raises(ValueError, match="mode must be 'multiplicative' or 'additive', got 'sum'"):
        StepScheduler(sampler, "beta", mode="sum")  # type: ignore[arg-type]
    scheduler = StepScheduler(sampler, "beta", gamma=-1.0, mode="additive")
    with pytest.raises(ValueError, match=r"beta must be a number of at least 0, got -0\.4"):
        scheduler.step()
