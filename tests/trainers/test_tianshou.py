"""Tianshou reads flat batches and takes no env's rows for another's; its buffers come back as flat batches."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

pytest.importorskip("tianshou", exc_type=ImportError)

import tianshou.data as tianshou

from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.layout import audit, mark_cuts, run_ends
from flatroll.rollouts import Collector, rollout
from flatroll.trainers.tianshou import from_buffer, to_batch, to_buffer
from flatroll.wrappers import StepCounter
from flatroll.wrappers.testing import Script, ScriptedTorchEnv, decode, expected_rows, make_scripted

SCRIPT = Script(2, lengths=[[3, 1, 4], [2, 5]], ends=[["terminated", "truncated", "both"], ["truncated"]])
ONE_STEP = np.array([0, 0, 1])
KINDS = ("float32", "float64", "uint8", "int64", "discrete", "dict")


def scripted(
    steps: int = 10, *, obs: Any = "float32", action: Any = "discrete", mode: Any = "NextStep"
) -> Any:
    script = Script(2, lengths=SCRIPT.lengths, ends=SCRIPT.ends, obs=obs, action=action)
    return rollout(StepCounter(make_scripted(script, autoreset_mode=mode)), num_steps=steps, seed=0)


def observed(rows: Any, kind: str, name: str) -> Any:
    """(env, episode, step) of each row of a Tianshou batch."""
    return decode(kind, rows[name])  # type: ignore[arg-type]  # a Batch is read as a dict is


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_has_its_own_next_observation_and_flags(kind: Any) -> None:
    rows = to_batch(scripted(obs=kind))
    true = np.sort(expected_rows(SCRIPT, 10), order=["env", "vector_step"])
    before = np.stack([true["env"], true["episode"], true["step"]], -1)
    np.testing.assert_array_equal(observed(rows, kind, "obs"), before)
    np.testing.assert_array_equal(observed(rows, kind, "obs_next"), before + ONE_STEP)
    np.testing.assert_array_equal(rows.rew, true["reward"].astype(np.float64))
    assert rows.rew.dtype == np.float64 and rows.done.shape == (20,)
    np.testing.assert_array_equal(rows.terminated, true["terminated"])
    cut = np.array([i in (9, 19) for i in range(20)])
    np.testing.assert_array_equal(rows.truncated, true["truncated"] | cut & ~true["terminated"])
    np.testing.assert_array_equal(rows.done, rows.terminated | rows.truncated)


def test_a_dict_of_actions_and_memory_that_is_shared() -> None:
    batch = scripted(action="dict")
    rows = to_batch(batch)
    assert rows.act.move.shape == (20, 2) and rows.act.press.dtype == np.int64
    batch["observation"][0] = 7
    assert rows.obs[0].tolist() == [7, 7, 7]
    assert not batch["next", "done"][9]  # marked in the copy only


@pytest.mark.parametrize("obs", ["float32", "dict"])
def test_a_compact_batch_with_final_is_the_full_one(obs: Any) -> None:
    full = scripted(20, obs=obs, mode="Disabled")
    script = Script(2, lengths=SCRIPT.lengths, ends=SCRIPT.ends, obs=obs)
    env = StepCounter(make_scripted(script, autoreset_mode="Disabled"))
    compact = Collector(env, frames_per_batch=40, compact_obs=True, seed=0)
    batch = next(iter(compact))
    rows, true = to_batch(batch, final=compact.final), to_batch(full)
    for name in ("obs", "obs_next"):
        np.testing.assert_array_equal(observed(rows, obs, name), observed(true, obs, name))
    if obs == "float32":
        with pytest.raises(KeyError, match=r"pass final=collector\.final"):
            to_batch(batch)
        with pytest.raises(ValueError, match="of the last row of each run, and of no other"):
            to_batch(batch, final=compact.final[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_next_and_previous_rows_stop_at_run_ends(kind: Any) -> None:
    batch = scripted(obs=kind)
    buffer = to_buffer(batch, size=25)
    rows, ends = np.arange(20), run_ends(batch).numpy()
    np.testing.assert_array_equal(buffer.next(rows), np.where(ends, rows, rows + 1))
    starts = np.concatenate([[True], ends[:-1]])
    np.testing.assert_array_equal(buffer.prev(rows), np.where(starts, rows, rows - 1))
    np.testing.assert_array_equal(
        observed(buffer[rows], kind, "obs_next"), observed(buffer[rows], kind, "obs") + ONE_STEP
    )


def test_what_tianshou_does_without_the_marks() -> None:
    """The reason for `to_buffer`: a cut row is followed by the next env's, and the last row by the first."""
    rows = to_batch(scripted())
    rows.truncated[[9, 19]] = rows.done[[9, 19]] = False
    columns = ("obs", "act", "rew", "terminated", "truncated", "done", "obs_next")
    plain = tianshou.ReplayBuffer.from_data(*(rows[name] for name in columns))
    assert plain.next(np.array([0, 9, 19])).tolist() == [0, 10, 0]
    assert len(tianshou.Batch(scripted()).get_keys()) == 0  # silently empty


def test_n_step_returns_of_tianshou_are_those_of_each_run() -> None:
    batch = scripted()
    buffer = to_buffer(batch)
    reward, ends = batch["next", "reward"].flatten().tolist(), run_ends(batch).tolist()
    for row in range(20):
        index, total, i = row, 0.0, row
        for step in range(3):
            total += 0.5**step * reward[i]
            if ends[i]:
                break
            i += 1
        expected, theirs = total, 0.0
        for step in range(3):
            theirs += 0.5**step * buffer.rew[index]
            following = int(buffer.next(index))
            if following == index:
                break
            index = following
        assert theirs == expected


def test_a_buffer_of_windows_is_put_together() -> None:
    """Each window cuts the trajectories; stored, they go on, and only the newest window's ends are cuts."""
    env = StepCounter(make_scripted(SCRIPT, autoreset_mode="Disabled"))
    collector = Collector(env, frames_per_batch=6, total_frames=60, seed=0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(48, compact_obs=True))
    for batch in collector:
        buffer.extend(batch)
    rows = to_buffer(buffer)[:]
    assert len(rows) == 48
    true = expected_rows(SCRIPT, 30)
    newest = {e: true[true["env"] == e][-24:] for e in (0, 1)}  # the ring dropped two windows
    seen = {tuple(row) for row in observed(rows, "float32", "obs").tolist()}
    assert seen == {(e, int(k), int(t)) for e in (0, 1) for k, t in newest[e][["episode", "step"]].tolist()}
    np.testing.assert_array_equal(
        observed(rows, "float32", "obs_next"), observed(rows, "float32", "obs") + ONE_STEP
    )
    marked = rows.truncated.sum() - sum(newest[e]["truncated"].sum() for e in (0, 1))
    assert marked == sum(not (newest[e]["terminated"] | newest[e]["truncated"])[-1] for e in (0, 1))


def fill(buffer: Any, steps: int, *, obs: Any = "float32") -> Any:
    """Let Tianshou's buffer take what the scripted envs do, one vector step at a time."""
    env = make_scripted(
        Script(2, lengths=SCRIPT.lengths, ends=SCRIPT.ends, obs=obs), autoreset_mode="SameStep"
    )
    before, _ = env.reset(seed=0)
    for _ in range(steps):
        action = np.zeros(2, np.int64)
        after, reward, terminated, truncated, info = env.step(action)
        true = {name: value.copy() for name, value in after.items()} if obs == "dict" else np.array(after)
        for i in np.flatnonzero(terminated | truncated):
            true[i] = info["final_obs"][i]
        buffer.add(
            tianshou.Batch(
                obs=before,
                act=action,
                rew=reward,
                terminated=terminated,
                truncated=truncated,
                obs_next=true,
                info={},
            )
        )
        before = after
    return buffer


@pytest.mark.parametrize("kind", ["VectorReplayBuffer", "PrioritizedVectorReplayBuffer"])
@pytest.mark.parametrize("steps", [7, 12, 31])
def test_a_vector_buffer_becomes_a_batch_run_after_run(kind: str, steps: int) -> None:
    options = {} if kind == "VectorReplayBuffer" else {"alpha": 0.6, "beta": 0.4}
    batch = from_buffer(fill(getattr(tianshou, kind)(24, 2, **options), steps))
    assert audit(batch) == []
    kept = min(steps, 12)
    true = expected_rows(SCRIPT, steps)
    true = np.concatenate([true[true["env"] == e][-kept:] for e in (0, 1)])
    before = np.stack([true["env"], true["episode"], true["step"]], -1)
    np.testing.assert_array_equal(decode("float32", batch["observation"]), before)
    np.testing.assert_array_equal(decode("float32", batch["next", "observation"]), before + ONE_STEP)
    for name in ("terminated", "truncated"):
        np.testing.assert_array_equal(batch["next", name].flatten(), true[name])
    np.testing.assert_array_equal(batch["next", "reward"].flatten(), true["reward"])
    # One id for each episode of each env, and is_init where its first row is there.
    episodes = {pair: i for i, pair in enumerate(dict.fromkeys(map(tuple, before[:, :2].tolist())))}
    assert batch["collector", "traj_ids"].tolist() == [episodes[e, k] for e, k, _ in before.tolist()]
    first_is_known = np.ones(len(true), np.bool_)
    first_is_known[[0, kept]] = kept < 12  # a full ring may have lost the rows before
    np.testing.assert_array_equal(batch["is_init"].flatten(), (true["step"] == 0) & first_is_known)


def test_the_rows_of_a_ring_can_be_stored_and_sampled_beside_others() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, compact_obs=True), batch_size=8)
    rows = from_buffer(fill(tianshou.VectorReplayBuffer(24, 2), 31), writer=3)
    buffer.extend(rows)
    assert rows["collector", "traj_ids"][0] == 3 * 2**40
    torch.testing.assert_close(buffer[:].select(*rows.keys(True, True)), rows)


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind: Any) -> None:
    batch = scripted(obs=kind)
    back = from_buffer(to_buffer(batch, size=30))
    marked = mark_cuts(batch)
    for key in back.keys(True, True):
        if key != ("collector", "traj_ids"):
            assert torch.equal(back[key], marked[key]), key


def test_stacked_frames_and_missing_next_observations() -> None:
    buffer = tianshou.ReplayBuffer(12, ignore_obs_next=True, stack_num=2)
    for step in range(20):
        row = {
            "obs": np.array([step % 6]),
            "act": 0,
            "rew": 1.0,
            "terminated": False,
            "truncated": step % 6 == 5,
        }
        buffer.add(tianshou.Batch(**row, obs_next=np.array([step % 6 + 1]), info={}))
    batch = from_buffer(buffer)
    steps = [t % 6 for t in range(8, 20)]
    assert batch["observation"].squeeze(-1).tolist() == [
        [t - 1 if t and i else t, t] for i, t in enumerate(steps)
    ]
    ends = run_ends(batch)
    assert torch.equal(batch["collector", "next_known"], ~ends)
    assert torch.equal(batch["next", "observation"][~ends], batch["observation"][1:][~ends[:-1]])


def test_an_offline_algorithm_of_tianshou_trains_on_it() -> None:
    from tianshou.algorithm import DQN
    from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.utils.net.common import Net

    env = gym.make("CartPole-v1")
    buffer = to_buffer(rollout(gym.make_vec("CartPole-v1", 4), num_steps=50, seed=0))
    policy = DiscreteQLearningPolicy(
        model=Net(state_shape=4, action_shape=2, hidden_sizes=[16]),
        action_space=env.action_space,
        observation_space=env.observation_space,
    )
    algorithm = DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-3), n_step_return_horizon=3)
    before = [parameter.clone() for parameter in policy.model.parameters()]
    with tianshou_training(policy):
        algorithm.update(buffer, sample_size=32)
    assert any((new != old).any() for new, old in zip(policy.model.parameters(), before, strict=True))


def tianshou_training(policy: Any) -> Any:
    from tianshou.utils.torch_utils import policy_within_training_step

    return policy_within_training_step(policy)


def test_bad_batches_are_refused() -> None:
    batch = scripted()
    with pytest.raises(
        ValueError, match="2 runs of the batch are cut, the first at row 9, and Tianshou would"
    ):
        to_batch(batch, cuts="refuse")
    whole = batch[:8]  # whole episodes of the first env only
    assert run_ends(whole)[-1] == whole["next", "done"][-1]
    to_batch(whole, cuts="refuse")
    with pytest.raises(ValueError, match="cuts must be 'mark' or 'refuse', got 'keep'"):
        to_batch(batch, cuts="keep")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"batch must have batch size \[N\], got \[2, 10\]"):
        to_batch(batch.reshape(2, 10))
    with pytest.raises(KeyError, match="action"):
        to_batch(batch.exclude("action"))
    with pytest.raises(TypeError, match=r"'observation' is torch\.bfloat16, which NumPy does not have"):
        to_batch(batch.apply(lambda leaf: leaf.bfloat16() if leaf.is_floating_point() else leaf))
    with pytest.raises(ValueError, match=r"batch\[\('next', 'reward'\)\] must have shape"):
        two = batch.clone()
        two["next", "reward"] = torch.zeros(20, 2)
        to_batch(two)
    hidden = rollout(ScriptedTorchEnv(SCRIPT, final_obs="absent"), num_steps=10)
    with pytest.raises(ValueError, match="its next observation is unknown, as the env hides it"):
        to_batch(hidden)
    with pytest.raises(ValueError, match="got 20 rows, size=19"):
        to_buffer(batch, size=19)
    with pytest.raises(ValueError, match="got 0 rows"):
        to_buffer(batch[:0])
    plain = ReplayBuffer(storage=LazyTensorStorage(50))
    plain.extend(batch.exclude("step_count", ("next", "step_count")))
    with pytest.raises(KeyError, match="the buffer's rows need 'step_count'"):
        to_buffer(plain)


def test_bad_buffers_are_refused() -> None:
    with pytest.raises(TypeError, match="buffer must be a Tianshou buffer, got TensorDict"):
        from_buffer(TensorDict({}, [0]))
    hindsight = tianshou.HERReplayBuffer(8, lambda a, b: a, horizon=4)
    with pytest.raises(TypeError, match="HERReplayBuffer rewrites goals"):
        from_buffer(hindsight)
    with pytest.raises(ValueError, match="buffer returns 0 of its 0 rows"):
        from_buffer(tianshou.ReplayBuffer(3))
    with pytest.raises(ValueError, match=r"writer must be in \[0, 2\*\*23\), got -1"):
        from_buffer(fill(tianshou.VectorReplayBuffer(8, 2), 3), writer=-1)

    def one(**changes: Any) -> Any:
        buffer = tianshou.ReplayBuffer(2)
        row: dict[str, Any] = {
            "obs": 1,
            "act": 0,
            "rew": 1.0,
            "terminated": False,
            "truncated": False,
            "obs_next": 2,
        }
        buffer.add(tianshou.Batch(**row | changes, info={}))
        return buffer

    with pytest.raises(ValueError, match=r"one reward for each row, got shape \(2,\) a row"):
        from_buffer(one(rew=np.ones(2)))
    with pytest.raises(ValueError, match=r"the observation's entry \('action',\) has a name"):
        from_buffer(one(obs={"action": 1}, obs_next={"action": 1}))
    with pytest.raises(TypeError, match=r"obs\.name must hold numbers or bools, got object"):
        from_buffer(one(obs={"name": "x"}, obs_next={"name": "y"}))
