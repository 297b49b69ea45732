"""The pages on collecting, workers, environments and evaluation: rows are those of loops on the bare envs."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from plain_loop import assert_as_played, assert_equal_but, ends_of, per_env
from tensordict import TensorDict

COLLECTING = "docs/collecting.md"
OVERLAP = "docs/collecting/overlap.md"
POLICIES = "docs/collecting/policies.md"
ENVIRONMENTS = "docs/environments.md"
RULES = "docs/environments/rules.md"
EVALUATION = "docs/evaluation.md"


def cartpoles(count: int, mode: str = "NextStep") -> gym.vector.VectorEnv:
    options = {"autoreset_mode": AutoresetMode(mode)}
    return gym.make_vec("CartPole-v1", num_envs=count, vectorization_mode="sync", vector_kwargs=options)


def push(observations: np.ndarray) -> np.ndarray:
    return (observations[:, 2] > 0).astype(np.int64)


def chosen_by_push(rows: TensorDict) -> bool:
    return bool((rows["action"] == (rows["observation"][:, 2] > 0).long()).all())


def bare_pool() -> Any:
    envpool = pytest.importorskip("envpool")
    return envpool.make_gymnasium("CartPole-v1", num_envs=4, seed=0)


# A bare pool's spaces have bounds in float64.
of_bare_pools = pytest.mark.filterwarnings("ignore:.*precision lowered by casting")


# collecting.md: env 0 terminates after 3 and 4 steps, env 1 is truncated after 2 and 4; a step between resets.

STREAMS = {
    0: [(0, 0, 0), (0, 0, 1), (0, 0, 2), None, (0, 1, 0), (0, 1, 1), (0, 1, 2), (0, 1, 3), None, (0, 2, 0)],
    1: [(1, 0, 0), (1, 0, 1), None, (1, 1, 0), (1, 1, 1), (1, 1, 2), (1, 1, 3), None, (1, 2, 0), (1, 2, 1)],
}
ORDER = [row for step in zip(STREAMS[0], STREAMS[1], strict=True) for row in step if row]


def test_seven_rows_a_batch(until) -> None:
    space = until(COLLECTING, "print([f")
    second = sorted(ORDER[7:14])
    batch = space["batch"]
    assert [tuple(row) for row in batch["observation"].int().tolist()] == second
    following = [tuple(row) for row in batch["next", "observation"].int().tolist()]
    assert following == [(e, k, t + 1) for e, k, t in second]
    assert batch["next", "reward"].flatten().tolist() == [100 * k + t + 1 for _, k, t in second]
    assert batch["next", "terminated"].flatten().tolist() == [row == (0, 1, 3) for row in second]
    assert batch["next", "truncated"].flatten().tolist() == [row == (1, 1, 3) for row in second]


def test_rows_by_a_mask(until) -> None:
    space = until(COLLECTING, "last_rewards = batch")
    batch = space["batch"]
    assert_as_played(batch, gym.make_vec("CartPole-v1", num_envs=8), seed=0)
    ended = [i for i in range(256) if batch["next", "terminated"][i] or batch["next", "truncated"][i]]
    assert space["last_rewards"].tolist() == [1.0] * len(ended)
    assert_equal_but(space["ended"], batch[ended])


def test_a_compact_batch(until) -> None:
    space = until(COLLECTING, 'collector.final["next", "observation"])')
    batch, final = space["batch"], space["collector"].final
    rows = sorted(ORDER[:6])
    assert [tuple(row) for row in batch["observation"].int().tolist()] == rows
    kept = dict(zip(final["row"].tolist(), final["next", "observation"].int().tolist(), strict=True))
    for i, (e, k, t) in enumerate(rows):
        following = kept[i] if i in kept else batch["observation"][i + 1].int().tolist()
        assert following == [e, k, t + 1]


def test_complete_trajectories(until) -> None:
    space = until(COLLECTING, "trajs_per_batch=2, total_frames=18")
    seen = [tuple(row) for row in space["batch"]["observation"].int().tolist()]
    assert seen == [*((0, 2, t) for t in range(3)), *((1, 2, t) for t in range(2))]


def test_versions_of_the_policy(until) -> None:
    """Before the second batch the policy was updated once; the eighth row was collected before."""
    space = until(COLLECTING, "track_policy_version=True")
    again = space["Collector"](
        space["ScriptedVectorEnv"](space["script"]), frames_per_batch=7, track_policy_version=True
    )
    next(again)
    again.update_policy_weights_()
    batch = next(again)
    early = [row == ORDER[7] for row in sorted(ORDER[7:14])]
    assert batch["collector", "policy_version"].flatten().tolist() == [0 if old else 1 for old in early]


def test_stopping_early(until) -> None:
    space = until(COLLECTING, "interruptor=stop")
    stopped = space["collector"]
    space["stop"].set()
    batch = next(stopped)
    assert len(batch) >= 1
    for stream in per_env(batch, 2):
        for before, after in zip(stream[:-1].unbind(0), stream[1:].unbind(0), strict=True):
            follows = torch.equal(before["next", "observation"], after["observation"])
            assert follows != bool(before["next", "done"])


# overlap.md


def test_split_envs(until) -> None:
    space = until(OVERLAP, "in_turn = Collector(in_processes")
    again = space["Collector"](cartpoles(4), space["push"], frames_per_batch=30, seed=0)
    rows = next(again)
    assert_as_played(rows, cartpoles(4), seed=0)
    assert chosen_by_push(rows)
    split = space["Collector"](space["in_processes"], space["push"], frames_per_batch=30, seed=0, splits=2)
    assert_equal_but(next(split), rows)
    split.shutdown()


@of_bare_pools
def test_two_pools(until) -> None:
    space = until(OVERLAP, "halves = Collector([pool(0), pool(2)]")
    rows = torch.cat([next(space["halves"]) for _ in range(5)])
    skipped = 30  # the first batch was taken by the block
    halves = space["Collector"](
        [space["pool"](0), space["pool"](2)], space["push"], frames_per_batch=30 + 150, splits=2
    )
    both = next(halves)
    assert_as_played(both, bare_pool(), seed=None)
    assert chosen_by_push(both)
    for late, whole in zip(per_env(rows, 4), per_env(both, 4), strict=True):
        count = min(len(late), 20)
        begin = len(whole) - len(late)
        assert 0 <= begin <= skipped
        assert torch.equal(late["observation"][:count], whole["observation"][begin : begin + count])


@of_bare_pools
def test_a_pool_in_its_async_mode(until) -> None:
    space = until(OVERLAP, "in_step, first_come = collect(4), collect(2)")
    for name in ("in_step", "first_come"):
        rows = space[name]
        assert len(rows) == 400
        assert chosen_by_push(rows)
        assert_as_played(rows, bare_pool(), seed=None)


# policies.md, resuming.md


def test_a_recurrent_policy(until) -> None:
    """The states before and after each row, by torch's own cell: zero where an episode begins."""
    space = until(POLICIES, "recurrent = TensorDictSequential(")
    batch, gru, head = space["batch"], space["recurrent"][0].gru, space["recurrent"][1].module
    state = torch.zeros(8)
    for row in batch.unbind(0):
        if row["is_init"]:
            state = torch.zeros(8)
        np.testing.assert_allclose(row["recurrent_state"].flatten(), state, atol=1e-6)
        out, after = gru(row["observation"][None, None], state[None, None])
        np.testing.assert_allclose(
            row["next", "recurrent_state"].flatten(), after.detach().flatten(), atol=1e-6
        )
        assert row["action"] == head(out).argmax()
        state = after.detach().flatten()


def test_a_function_with_a_memory(until) -> None:
    batch = until(POLICIES, "class SlowPush:")["batch"]
    for stream in per_env(batch, 8):
        mean = 0.0
        for row in stream.unbind(0):
            mean = 0.0 if row["is_init"] else mean
            mean = 0.9 * mean + 0.1 * row["observation"][2].item()
            assert abs(mean) < 1e-7 or row["action"].item() == int(mean > 0)


def test_states_in_few_rows(until) -> None:
    """Kept at the first row of each run and at every 16th row of a trajectory: the state that stepping gives."""
    space = until(POLICIES, "state_stride=16, seed=0)")
    batch, gru = space["batch"], space["recurrent"][0].gru
    assert_as_played(batch, gym.make_vec("CartPole-v1", num_envs=8), seed=0)
    starts = [True, *ends_of(batch)[:-1]]
    count, state = 0, torch.zeros(8)
    for row, start in zip(batch.unbind(0), starts, strict=True):
        if row["is_init"]:
            count, state = 0, torch.zeros(8)
        kept = start or count % 16 == 0
        assert bool(row["collector", "has_state"]) == kept
        expected = state if kept else torch.zeros(8)
        np.testing.assert_allclose(row["recurrent_state"].flatten(), expected, atol=1e-6)
        _, after = gru(row["observation"][None, None], state[None, None])
        state = after.detach().flatten()
        count += 1


def test_resuming(until) -> None:
    """Both collectors' rows are an env's own, and no id comes twice."""
    space = until("docs/collecting/resuming.md", "resumed = Collector(cartpoles")
    assert_as_played(space["batch"], gym.make_vec("CartPole-v1", num_envs=2), seed=0)
    later = next(space["resumed"])
    assert space["resumed"].frames == 192
    assert later["collector", "traj_ids"].min() > space["last_ids"].max()
    for stream in per_env(later, 2):
        for before, after in zip(stream[:-1].unbind(0), stream[1:].unbind(0), strict=True):
            follows = torch.equal(before["next", "observation"], after["observation"])
            assert follows != bool(before["next", "done"])


def test_resuming_in_the_middle_of_an_episode(until) -> None:
    """Both go on with the same rows, none of which begins an episode of a reset."""
    space = until("docs/collecting/resuming.md", "collector.state_dict(episodes=True)")
    rows, again = next(space["collector"]), next(space["resumed"])
    assert (rows == again).all()
    assert not rows["is_init"][0]


# workers.md


def test_two_workers(until) -> None:
    """Each worker's rows are those of an env with some seed of its own, env after env; the policy's own actions."""
    space = until("docs/workers.md", "with MultiSyncCollector(")
    batch, policy = space["batch"], space["policy"]
    with torch.no_grad():
        expected = policy[0].module(batch["observation"]).argmax(-1)
    assert torch.equal(batch["action"], expected)
    writers = batch["collector", "traj_ids"] >> 40
    for writer in range(2):
        own = batch[writers == writer]
        assert len(own) == (51, 50)[writer]
        state = own["observation"].double()
        x, x_dot, angle, angle_dot = state.unbind(1)
        force = torch.where(own["action"] == 1, 10.0, -10.0).double()
        inner = (force + 0.05 * angle_dot**2 * angle.sin()) / 1.1
        angle_acc = (9.8 * angle.sin() - angle.cos() * inner) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        x_acc = inner - 0.05 * angle_acc * angle.cos() / 1.1
        after = torch.stack(
            [x + 0.02 * x_dot, x_dot + 0.02 * x_acc, angle + 0.02 * angle_dot, angle_dot + 0.02 * angle_acc],
            1,
        )
        np.testing.assert_allclose(own["next", "observation"], after, atol=1e-5)
        fell = (after[:, 0].abs() > 2.4) | (after[:, 2].abs() > 12 * 2 * np.pi / 360)
        assert torch.equal(own["next", "terminated"].flatten(), fell)


# environments.md


def test_three_modes(until) -> None:
    space = until(ENVIRONMENTS, "next_step, same_step, disabled = (")
    for name, mode in (("next_step", "NextStep"), ("same_step", "SameStep"), ("disabled", "Disabled")):
        assert_as_played(space[name], cartpoles(4, mode), seed=0, mode=AutoresetMode(mode))
        assert chosen_by_push(space[name])


def test_a_dict_observation(until) -> None:
    space = until(ENVIRONMENTS, "class Walk(gym.Env):")
    assert_as_played(space["rows"], gym.vector.SyncVectorEnv([space["Walk"]] * 4), seed=0)


def test_a_simulator_without_a_mode(until) -> None:
    batch = until(ENVIRONMENTS, 'as_vector_env(simulator, autoreset_mode="SameStep")')["batch"]
    seen = [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]
    assert [tuple(row) for row in batch["observation"].int().tolist()] == seen
    following = [tuple(row) for row in batch["next", "observation"].int().tolist()]
    assert following == [(e, k, t + 1) for e, k, t in seen]
    assert batch["next", "truncated"].flatten().nonzero().flatten().tolist() == [2]
    assert batch["next", "terminated"].flatten().nonzero().flatten().tolist() == [5, 7]


def test_hidden_last_observations(until) -> None:
    hidden = until(ENVIRONMENTS, 'hidden = rollout(ScriptedTorchEnv(script, final_obs="absent")')["hidden"]
    lost = hidden["next", "done"].flatten()
    assert torch.equal(hidden["collector", "next_known"].flatten(), ~lost)
    assert hidden["next", "observation"][lost].isnan().all()
    known = hidden[~lost]
    assert torch.equal(
        known["next", "observation"] - known["observation"], torch.tensor([[0.0, 0.0, 1.0]] * 5)
    )


@of_bare_pools
def test_a_pool(until) -> None:
    space = until(ENVIRONMENTS, "rollout(pool, policy, num_steps=50)")
    rows = space["rollout"](bare_pool(), space["policy"], num_steps=50)
    assert_as_played(rows, bare_pool(), seed=None)
    assert chosen_by_push(rows)


def test_a_wrapper_in_between(until) -> None:
    space = until(ENVIRONMENTS, "TimeAwareObservation(")
    rows = space["rollout"](space["single"], num_steps=60, seed=3)
    bare = gym.wrappers.TimeAwareObservation(gym.make("CartPole-v1"))
    assert_as_played(rows, bare, seed=3)
    assert rows["observation"][:, 4].tolist() == [
        float(t) for stream in per_env(rows, 1) for t in steps_in(stream)
    ]


def steps_in(stream: TensorDict) -> list[int]:
    """The number of each row in its episode."""
    counted, step = [], 0
    for first in stream["is_init"].flatten().tolist():
        step = 0 if first else step + 1
        counted.append(step)
    return counted


def test_markers_without_a_collector(until) -> None:
    """The infos of 100 steps, against counters of their own."""
    env = until(ENVIRONMENTS, "env = RewardSum(InitTracker(StepCounter(")["env"]
    _, info = env.reset(seed=1)
    first, count, total = np.ones(2, bool), np.zeros(2, int), np.zeros(2)
    ids = info["traj_ids"].copy()
    assert info["is_init"].tolist() == [True, True]
    over = np.zeros(2, bool)
    for _ in range(100):
        _, reward, terminated, truncated, info = env.step(np.array([0, 1]))
        # The step after an end resets: it begins an episode, and its reward is no reward.
        count = np.where(over, 0, count + 1)
        total = np.where(over, 0.0, total + reward)
        first = over
        assert info["is_init"].tolist() == first.tolist()
        assert info["step_count"].tolist() == count.tolist()
        assert info["episode_reward"][~over].tolist() == total[~over].tolist()
        assert ((info["traj_ids"] != ids) == over).all()
        ids = info["traj_ids"].copy()
        over = terminated | truncated


# rules.md


def test_an_env_of_several_users(until) -> None:
    space = until(RULES, "rollout(shared, policy, num_steps=20)")
    for batch in (space["first"], space["second"]):
        assert chosen_by_push(batch)
        inside = torch.tensor([not end for end in ends_of(batch)])[:-1]
        same = (batch["next", "observation"][:-1] == batch["observation"][1:]).all(1)
        assert same[inside].all()
    assert not torch.equal(space["first"]["next", "observation"][-1], space["second"]["observation"][0])


def test_a_bare_step_between_batches(until) -> None:
    space = until(RULES, "obs, info = shared.reset()")
    batch = next(space["collector"])
    assert chosen_by_push(batch)
    inside = torch.tensor([not end for end in ends_of(batch)])[:-1]
    assert (batch["next", "observation"][:-1] == batch["observation"][1:]).all(1)[inside].all()


# evaluation.md


def test_evaluation(until) -> None:
    """Five episodes of each of four native CartPoles, by a loop."""
    found = until(EVALUATION, "found = evaluate(")["found"]
    env = gym.make_vec("CartPole-v1", num_envs=4)
    obs, _ = env.reset(seed=0)
    total, over = np.zeros(4), np.zeros(4, bool)
    returns: list[list[float]] = [[] for _ in range(4)]
    while min(map(len, returns)) < 5:
        obs, reward, terminated, truncated, _ = env.step(push(obs))
        total = np.where(over, 0.0, total + reward)
        over = (terminated | truncated) & ~over
        for e in over.nonzero()[0]:
            returns[e].append(float(total[e]))
    plain = [value for own in returns for value in own[:5]]
    assert found.returns.tolist() == plain
    assert found.lengths.tolist() == plain
    assert found.envs.tolist() == [e for e in range(4) for _ in range(5)]
    np.testing.assert_allclose(found.interval.value, np.mean(plain), rtol=1e-6)


def test_a_film_of_the_best_episode(until) -> None:
    space = until(EVALUATION, 'film="best"')
    best = space["evaluate"](cartpoles(2), push_tensor, episodes=4, seed=0)
    assert len(space["film"]) in (int(best.lengths.max()), int(best.lengths.max()) + 1)


def push_tensor(observation: torch.Tensor) -> torch.Tensor:
    return (observation[:, 2] > 0).long()


def test_evaluations_during_training(until) -> None:
    """The policy never changes here: both evaluations play the same episodes, those of a loop."""
    space = until(EVALUATION, "check = Evaluator(")
    first, second = (found.returns.tolist() for _, found in space["check"].history)
    assert first == second
    layer = space["policy"].net
    env = gym.make_vec("CartPole-v1", num_envs=4)
    obs, _ = env.reset(seed=1)
    total, over = np.zeros(4), np.zeros(4, bool)
    returns: list[list[float]] = [[] for _ in range(4)]
    while min(map(len, returns)) < 5:
        with torch.no_grad():
            action = layer(torch.as_tensor(obs)).argmax(-1).numpy()
        obs, reward, terminated, truncated, _ = env.step(action)
        total = np.where(over, 0.0, total + reward)
        over = (terminated | truncated) & ~over
        for e in over.nonzero()[0]:
            returns[e].append(float(total[e]))
    assert first == [value for own in returns for value in own[:5]]
