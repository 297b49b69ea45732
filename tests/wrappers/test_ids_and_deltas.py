"""Trajectory ids and deltas at their edges: wide ids, overflow, integers, what a step costs."""

import io

import gymnasium as gym
import numpy as np
import pytest
import torch
from counting import Ops
from gymnasium import spaces
from scripted_batches import IDS, collect, make, true_next
from tensordict import TensorDict

from flatroll.layout import audit, decode_delta, join, run_ends, split_trajectories
from flatroll.wrappers import NextObservationDelta, StepCounter, TrajId, as_vector_env
from flatroll.wrappers.testing import Script, ScriptedTorchEnv, check_vector_env


@pytest.mark.parametrize("which", ["SameStep", "torch"])
def test_ids_go_on_beyond_two_to_the_31(which):
    """Ids are 64 bits wide and stay positive."""
    env = TrajId(make(which))
    env.load_state_dict({"writer": 0, "episode": 2**31 // 3 - 1})
    batch, _ = collect(StepCounter(env), 60)
    ids = batch[IDS]
    assert ids.dtype is torch.int64
    assert ids.min() < 2**31 < ids.max()
    assert audit(batch) == []
    assert len(ids.unique()) == int(batch["is_init"].sum())


def test_ids_of_writers_and_restarts_never_meet():
    """The number of the writer is in the high bits of an id."""
    ids = [collect(TrajId(make(), writer=writer), 30)[0][IDS] for writer in (0, 1, 2**23 - 1)]
    assert all(not torch.isin(a, b).any() for a, b in zip(ids, ids[1:] + ids[:1], strict=True))
    assert all((a >= 0).all() for a in ids)


def test_a_step_in_which_no_episode_ends_draws_no_ids():
    """The ids of running episodes stay."""
    env = TrajId(make(lengths=100))
    _, info = env.reset()
    for _ in range(10):
        after = env.step(np.zeros(3, np.int64))[-1]
        assert after["traj_ids"].tolist() == info["traj_ids"].tolist() == [0, 1, 2]


def test_ids_cost_the_same_few_operations_at_every_step():
    """No step waits for a device, and the number of operations depends on neither envs nor ends."""
    counts = set()
    for num_envs, length in ((2, 1), (2, 100), (512, 1), (512, 100)):
        own = Script(num_envs, lengths=length)
        action = torch.zeros(num_envs, dtype=torch.int64)
        bare, with_ids = as_vector_env(ScriptedTorchEnv(own)), TrajId(ScriptedTorchEnv(own))
        totals = []
        for env in (bare, with_ids):
            env.reset()
            with Ops() as ops:
                for _ in range(5):
                    env.step(action)
            totals.append(sum(ops.count.values()))
        counts.add(totals[1] - totals[0])
    assert len(counts) == 1
    assert counts.pop() <= 5 * 4


class Jumps(gym.Env):
    """Shows the numbers it is given, one after the other."""

    def __init__(self, values, dtype=np.float32):
        self.values = np.asarray(values, dtype)
        low, high = (-np.inf, np.inf) if self.values.dtype.kind == "f" else (0, np.iinfo(dtype).max)
        self.observation_space = spaces.Box(low, high, (1,), dtype)
        self.action_space = spaces.Discrete(2)
        self.time = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.values[:1], {}

    def step(self, action):
        self.time += 1
        ended = self.time == len(self.values) - 1
        return self.values[self.time : self.time + 1], 0.0, ended, False, {}


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_delta_that_does_not_fit_is_an_error(framework):
    """A difference of 1e5 does not become infinity in float16."""
    env = as_vector_env(Jumps([0, 1, 1e5, 2]), framework=framework)
    with pytest.raises(
        OverflowError, match=r"the delta of 'observation' does not fit torch.float16: .* 99999"
    ):
        collect(NextObservationDelta(env), 6)
    wide = as_vector_env(Jumps([0, 1, 1e5, 2]), framework=framework)
    batch, _ = collect(NextObservationDelta(wide, delta_dtype=torch.float32), 6)
    restored = decode_delta(batch["observation"], batch["next", "delta", "observation"])
    assert restored.squeeze(-1).tolist() == [1, 1e5, 2] * 2


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_deltas_in_bfloat16(framework):
    """NumPy has no such dtype: the wrapper gives tensors."""
    env = as_vector_env(Jumps([0, 1, 1e5, 2]), framework=framework)
    batch, _ = collect(NextObservationDelta(env, delta_dtype=torch.bfloat16), 6)
    delta = batch["next", "delta", "observation"]
    assert torch.equal(delta.flatten(), torch.tensor([1, 1e5 - 1, 2 - 1e5] * 2).bfloat16())


def test_small_deltas_are_lost_only_below_what_is_documented():
    """The error is at most 3e-8, or 2**-11 of the difference, as the docstring says."""
    values = np.cumsum([0, 1e-9, 1e-7, 1e-3, 1, 100]).astype(np.float64)
    batch, _ = collect(NextObservationDelta(Jumps(values, np.float64)), 5)
    restored = decode_delta(batch["observation"], batch["next", "delta", "observation"]).squeeze(-1)
    true = torch.from_numpy(values[1:])
    difference = (true - batch["observation"].squeeze(-1)).abs()
    assert ((restored - true).abs() <= torch.clamp(difference * 2**-11, min=3.1e-8)).all()


def test_deltas_are_finite_at_every_row_ends_included():
    """The delta at an end leads to the final observation."""
    for which in ("NextStep", "SameStep", "Disabled", "torch"):
        batch, _ = collect(NextObservationDelta(make(which)), 40)
        assert torch.equal(
            decode_delta(batch["observation"], batch["next", "delta", "observation"]), true_next(batch)
        )


def test_an_env_with_deltas_keeps_the_env_contract():
    check_vector_env(NextObservationDelta(make()))
    check_vector_env(NextObservationDelta(make("torch")))


def test_rows_with_a_key_only_under_next_go_through_every_tool(tmp_path):
    """The entry ("next", "delta") has no partner at the root."""
    batch, _ = collect(StepCounter(NextObservationDelta(make())), 30)
    assert audit(batch) == []
    assert (join(split_trajectories(batch)) == batch).all()
    assert (join(split_trajectories(batch, as_nested=True)) == batch).all()
    file = io.BytesIO()
    torch.save(batch.to_dict(), file)
    file.seek(0)
    assert (TensorDict(torch.load(file, weights_only=True), [30]) == batch).all()
    assert (TensorDict.load_memmap(batch.memmap(tmp_path).saved_path) == batch).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int8, np.int64])
def test_integers_have_an_exact_delta_modulo_their_width(dtype):
    """Integer observations have deltas of their own dtype."""
    top = np.iinfo(dtype).max
    batch, _ = collect(NextObservationDelta(Jumps([0, top, 1, top - 3, 0], dtype)), 4)
    delta = batch["next", "delta", "observation"]
    assert delta.dtype is batch["observation"].dtype
    assert decode_delta(batch["observation"], delta).squeeze(-1).tolist() == [top, 1, top - 3, 0]
    assert ("next", "observation") not in batch.keys(True, True)


def test_one_final_observation_per_end_instead_of_a_delta_per_row():
    """A compact batch stores one observation more for each end, and nothing for other rows."""
    full, _ = collect(make(), 300)
    compact, final = collect(make(), 300, compact_obs=True)
    row = full["observation"][0].numel() * full["observation"].element_size()
    ends = int(run_ends(full).sum())
    assert full.bytes() - compact.bytes() == 300 * row
    assert final["next"].bytes() == ends * row
    following = compact["observation"].roll(-1, 0)
    following[final["row"]] = final["next", "observation"]
    assert torch.equal(following, full["next", "observation"])
