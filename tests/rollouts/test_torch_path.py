"""Collecting from envs that reset in the same step: the batch is the window's memory, and little is copied."""

from typing import Any

import gymnasium as gym
import pytest
import torch
from forms import examples
from gymnasium.vector import AutoresetMode
from hypothesis import given
from hypothesis import strategies as st
from scripted_rows import ENDS, LENGTHS, rows_of, table
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential

from benchmarks.bench_torch_path import ACTION, CASES, STEPS, Simulator
from benchmarks.measure.operations import CountOperations
from flatroll.modules import GRUModule
from flatroll.rollouts import Collector, window
from flatroll.wrappers import RewardSum, StepCounter
from flatroll.wrappers.testing import Script, ScriptedTorchEnv, ScriptedVectorEnv


def spoil(batch: TensorDict) -> None:
    """Write nonsense into all that a batch has."""
    for leaf in batch.values(True, True):
        leaf.fill_(True) if leaf.dtype is torch.bool else leaf.fill_(77)


class Clearing(ScriptedTorchEnv):
    """A reset of some envs writes into what the step before it has returned."""

    def reset(self, seed: Any = None, env_ids: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        for buffer in (self.reward_buf, self.terminated_buf, self.truncated_buf):
            buffer.zero_()
        return super().reset(seed, env_ids, options)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory has nonsense in it."""
    empty = window._empty

    def full(like: torch.Tensor, *shape: int) -> torch.Tensor:
        memory = empty(like, *shape)
        return memory.fill_(True) if memory.dtype is torch.bool else memory.fill_(99)

    monkeypatch.setattr(window, "_empty", full)


def collected(env: Any, frames: int, batches: int, look: bool = True, **arguments: Any) -> list[TensorDict]:
    """Copies of the batches, each of which must stay as it is, and is spoiled, while later ones are collected."""
    collector = Collector(env, frames_per_batch=frames, total_frames=frames * batches, seed=0, **arguments)
    assert isinstance(collector._runner.window, window.Window)
    collector._runner.window._on_cpu = look  # else as on a device
    copies: list[TensorDict] = []
    before: TensorDict | None = None
    for batch in collector:
        if before is not None:
            assert all(
                torch.equal(before[key].nan_to_num(5), copies[-1][key].nan_to_num(5))
                for key in before.keys(True, True)
            )
            spoil(before)
        copies.append(batch.clone())
        before = batch
    return copies


@pytest.mark.parametrize("few", [0, 1024])
@pytest.mark.parametrize("wide", [1, 64])
@pytest.mark.usefixtures("poisoned")
def test_any_window_of_any_env(wide: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row is that of the script, wherever the columns stand, however the stream is cut."""
    monkeypatch.setattr(window, "_WIDE", wide)
    monkeypatch.setattr(window, "_FEW_ROWS", few)

    @examples(30)
    @given(
        lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=4),
        frames=st.integers(1, 16),
        in_steps=st.booleans(),
        batches=st.integers(1, 5),
        kind=st.sampled_from(["float32", "uint8", "dict"]),
        env=st.sampled_from(["dense", "ids", "disabled", "numpy"]),
        look=st.booleans(),
    )
    def check(
        lengths: Any, frames: int, in_steps: bool, batches: int, kind: Any, env: Any, look: bool
    ) -> None:
        script = Script(len(lengths), lengths=lengths, ends=ENDS[0], obs=kind)  # type: ignore[arg-type]
        if in_steps:  # whole vector steps in each batch
            frames *= len(lengths)
        made: Any
        if env == "numpy":
            made = ScriptedVectorEnv(script, autoreset_mode="SameStep")
        elif env == "disabled":
            made = Clearing(script, autoreset=False, reuse_obs=True)
        else:
            made = ScriptedTorchEnv(script, final_obs=env, reuse_obs=True)
        out = collected(StepCounter(made), frames, batches, look)
        assert [rows_of(batch, kind) for batch in out] == table(script, "SameStep", frames, batches)

    check()


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("frames", [6, 7])
@pytest.mark.usefixtures("poisoned")
def test_hidden_ends_are_marked_in_the_windows_that_have_them(frames: int, kind: str) -> None:
    script = Script(3, lengths=[[9, 2], [9, 2], [9, 2]], ends="terminated")
    env: Any = ScriptedTorchEnv(script, final_obs="absent", reuse_obs=True)
    if kind == "numpy":  # in steps without an end it says that all is known
        env = ScriptedVectorEnv(script, autoreset_mode="SameStep", final_obs="absent")
    for batch in collected(RewardSum(StepCounter(env)), frames, 16):
        known, done = batch["collector", "next_known"], batch["next", "done"].squeeze(-1)
        assert torch.equal(known, ~done)
        true = batch["observation"] + torch.tensor([0.0, 0.0, 1.0])
        assert torch.equal(batch["next", "observation"][known], true[known])
        assert batch["next", "observation"][done].isnan().all()


@pytest.mark.parametrize("frames", [32, 40, 50])
def test_windows_of_wide_columns_and_states_give_the_rows_of_single_steps(frames: int) -> None:
    """A Dict of slices of one reused buffer, a recurrent policy, returns; against batches of one vector step."""
    torch.manual_seed(0)
    gru = GRUModule(32, 16, in_key="joints", out_key="embed")
    actor = TensorDictModule(torch.nn.Linear(16, ACTION), in_keys=["embed"], out_keys=["action"])
    policy, entries = TensorDictSequential(gru, actor), {"joints": 32, "height": 12, "command": 4}

    def rows(frames: int) -> TensorDict:
        env = RewardSum(StepCounter(Simulator(8, entries)))
        out = collected(env, frames, 1600 // frames, policy=policy)
        batch: Any = torch.cat(out)
        order = batch["step_count"].squeeze(-1) + 1000 * batch["collector", "traj_ids"]
        return batch[order.argsort()]

    one, other = rows(8), rows(frames)
    assert one["next", "done"].any() and set(one.keys(True, True)) == set(other.keys(True, True))
    for key in one.keys(True, True):
        assert torch.equal(one[key], other[key]), key


def test_large_numpy_batches_have_the_rows_of_small_ones() -> None:
    """Four floats are moved as one number of sixteen bytes, flags and counts by torch, wide rows by their numbers."""

    def rows(frames: int) -> TensorDict:
        env = gym.make_vec(
            "CartPole-v1",
            32,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
        )
        out = collected(StepCounter(env), frames, 1280 // frames)
        batch: Any = torch.cat(out)
        order = batch["step_count"].squeeze(-1) + 1000 * batch["collector", "traj_ids"]
        return batch[order.argsort()]

    one, other = rows(32), rows(1280)
    for key in one.keys(True, True):
        assert torch.equal(one[key], other[key]), key


def test_a_full_window_is_the_batch() -> None:
    """The rows stand in the memory that the steps wrote, and the next window has other memory."""
    collector = Collector(Simulator(8), lambda obs: torch.zeros(8, ACTION), frames_per_batch=8 * 4)
    memory = []
    for _ in range(3):
        column = collector._runner.window.columns.get("observation")
        batch = next(collector)
        memory.append(batch["observation"].data_ptr())
        assert column is None or column.data_ptr() == memory[-1]
    assert len(set(memory)) > 1


@pytest.mark.parametrize("case", CASES)
def test_operations_of_a_step(case: str) -> None:
    """Against a hand-written loop that makes the same flat batch; a count sees no noise."""
    counts = {}
    for name, run in CASES[case](64).items():
        run(), run()
        with CountOperations() as counted:
            run()
        counts[name] = counted
    loop, ours = counts["loop"], counts["collector"]
    assert ours.operations <= 1.15 * loop.operations
    # What the policy may keep is copied once more, as are recurrent states; all else is written where it stays.
    assert ours.written <= 1.2 * loop.written
    assert ours.allocations <= loop.allocations + 7 * STEPS


def test_what_a_policy_or_layer_keeps_stays_as_it_was() -> None:
    """Only what nobody else can see is the env's own memory."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def policy(obs: torch.Tensor) -> torch.Tensor:
        seen.append((obs, obs.clone()))
        return obs[:, 2].long() % 5

    class Keeps(gym.vector.VectorWrapper):
        def step(self, actions: Any) -> Any:
            result = self.env.step(actions)
            seen.extend((leaf, leaf.clone()) for leaf in (*result[:4], result[4]["final_obs"]))
            return result

    env = ScriptedTorchEnv(Script(3, lengths=LENGTHS, ends=ENDS[0]), reuse_obs=True)  # type: ignore[arg-type]
    for stack in (StepCounter(env), Keeps(StepCounter(env))):
        batch = next(Collector(stack, policy, frames_per_batch=12))
        assert all(torch.equal(kept, copy) for kept, copy in seen)
        assert torch.equal(batch["action"], batch["observation"][:, 2].long() % 5)
        assert batch["next", "reward"].unique().numel() > 1
    assert len(seen) == 4 + 4 + 5 * 4
