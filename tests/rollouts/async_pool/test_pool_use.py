"""envpool's async mode: stops, errors, others at the same pool, and what does not go with it."""

from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from scripted_pool import ScriptedPool

from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.layout.inspect.audit import audit
from flatroll.rollouts import Collector, rollout
from flatroll.wrappers import InitTracker, MarkerWrapper, NextObservationDelta, StepCounter, as_vector_env
from flatroll.wrappers.envpool_source import AsyncPoolSource


def zeros(obs: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(obs), dtype=torch.int64)


def collector(pool: Any, policy: Any = zeros, **options: Any) -> Collector:
    return Collector(pool, policy, **{"frames_per_batch": 10, **options})


def goes_on(before: Any, after: Any, num_envs: int) -> None:
    """The rows of each env go on where the last batch has left it."""
    for env in range(num_envs):
        one, other = (batch[batch["collector", "traj_ids"] % num_envs == env] for batch in (before, after))
        if len(one) and len(other) and not one["next", "done"][-1]:
            assert torch.equal(one["next", "observation"][-1], other["observation"][0])


def test_versions_are_those_of_the_step_that_chose() -> None:
    version = 0

    def policy(obs: torch.Tensor) -> torch.Tensor:
        return torch.full((len(obs),), version % 5)

    made = collector(ScriptedPool(5, 2), policy, frames_per_batch=4, track_policy_version=True)
    older = 0
    for version in range(30):
        made.policy_version = version
        batch = next(made)
        assert torch.equal(batch["collector", "policy_version"] % 5, batch["action"])
        older += int((batch["collector", "policy_version"] < version).sum())
    assert older > 0  # steps that were under way between two batches


def test_random_frames_first() -> None:
    pool = ScriptedPool(5, 3, action="box")
    made = collector(pool, lambda obs: torch.zeros(len(obs), 2), init_random_frames=25, frames_per_batch=1)
    random = [bool(next(made)["action"].any()) for _ in range(40)]
    # Steps of all five envs may have been under way when the 25th row came.
    assert all(random[:25]) and not any(random[30:])


def test_an_interruptor_ends_the_batch_early_and_loses_nothing() -> None:
    class Stop:
        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            return self.asked % 4 == 0

    made, plain = collector(ScriptedPool(5, 2), interruptor=Stop()), collector(ScriptedPool(5, 2))
    batches = [next(made) for _ in range(12)]
    assert len({len(batch) for batch in batches}) > 1
    plain.frames_per_batch = sum(map(len, batches))
    rows, whole = torch.cat([batch["observation"] for batch in batches]), next(plain)["observation"]
    assert sorted(rows.tolist()) == sorted(whole.tolist())
    for before, after in pairwise(batches):
        goes_on(before, after, 5)


def test_resets_in_between() -> None:
    made = collector(ScriptedPool(5, 3), reset_at_each_iter=True, trajs_per_batch=None)
    ids: set[int] = set()
    for _ in range(6):
        batch = next(made)
        assert audit(batch) == []
        # Rows left over come first, under their old ids, with the next observations that they had.
        assert torch.equal(batch["next", "observation"][:, 2], batch["observation"][:, 2] + 1)
        ids |= set(batch["collector", "traj_ids"].tolist())
    for again in (False, True):
        if again:
            assert made.set_seed(3) == 8
            with pytest.warns(UserWarning, match="envpool takes its seed when it is created"):
                batch = next(made)
        else:
            made.reset()
            batch = next(made)
        assert not ids & set(batch["collector", "traj_ids"].tolist())
        assert batch["is_init"][0]
        ids |= set(batch["collector", "traj_ids"].tolist())


def test_saved_and_loaded() -> None:
    made = collector(ScriptedPool(5, 2))
    seen = {i for _ in range(4) for i in next(made)["collector", "traj_ids"].tolist()}
    resumed = collector(ScriptedPool(5, 2))
    resumed.load_state_dict(made.state_dict())
    batch = next(resumed)
    assert resumed.frames == 50 and not seen & set(batch["collector", "traj_ids"].tolist())


def test_a_pool_warns_of_one_seed_and_not_after_a_load() -> None:
    pool, text = ScriptedPool(5, 2), "envpool takes its seed when it is created"
    made = collector(pool, seed=0)
    with pytest.warns(UserWarning, match=text + r".*reset\(seed=0\)"):
        next(made)
    again = collector(pool, seed=1)  # the same pool
    next(again)
    resumed = collector(ScriptedPool(5, 2), seed=0)
    resumed.load_state_dict(made.state_dict())
    next(resumed)


@pytest.mark.parametrize("compact", [False, True])
def test_a_buffer_takes_whole_trajectories(compact: bool) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=16)
    made = collector(
        ScriptedPool(5, 3), trajs_per_batch=3, total_frames=200, replay_buffer=buffer, compact_obs=compact
    )
    assert set(made) == {None}
    rows = buffer[:]
    assert len(rows) > 150 and audit(rows) == []
    assert torch.equal(rows["next", "observation"][:, 2], rows["observation"][:, 2] + 1)


@pytest.mark.parametrize(("num_envs", "size"), [(5, 2), (4, 2), (5, 3), (2, 1)])
def test_after_an_error_of_the_policy_it_goes_on_with_new_episodes(num_envs: int, size: int) -> None:
    fails = iter([0] * 7 + [1] + [0] * 5 + [1] + [0] * 10**4)

    def policy(obs: torch.Tensor) -> torch.Tensor:
        if next(fails):
            raise KeyboardInterrupt
        return zeros(obs)

    made, batches = collector(ScriptedPool(num_envs, size), policy), []
    for _ in range(12):
        try:
            batches.append(next(made))
        except KeyboardInterrupt:
            continue
    assert len(batches) == 10
    for batch in batches:
        assert len(batch) == 10 and audit(batch) == []
        assert torch.equal(batch["next", "observation"][:, 2], batch["observation"][:, 2] + 1)
        assert torch.equal(batch["collector", "traj_ids"] % num_envs, batch["observation"][:, 0].long())


@pytest.mark.parametrize("call", ["send", "recv", "async_reset"])
def test_after_an_interrupt_in_the_pool_nobody_knows_which_envs_are_under_way(call: str) -> None:
    pool = ScriptedPool(5, 2)
    made = collector(pool)
    next(made)

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    setattr(pool, call, interrupted)
    if call == "async_reset":
        made.reset()
    with pytest.raises(KeyboardInterrupt):
        next(made)
    delattr(pool, call)
    for again in (made, collector(pool)):
        with pytest.raises(RuntimeError, match="unknown which envs are stepping: create a new pool"):
            next(again)


def test_recv_with_nothing_under_way_and_a_second_reset() -> None:
    pool = ScriptedPool(4, 3)
    source = as_vector_env(pool).source  # type: ignore[attr-defined]
    assert isinstance(source, AsyncPoolSource)
    with pytest.raises(RuntimeError, match="returns 3 rows, but the number of stepping envs is 0"):
        source.receive()
    source.led = True
    source.reset(None, None)
    assert len(source.ids) == 3
    with pytest.raises(RuntimeError, match="returns 3 rows, but the number of stepping envs is 1"):
        source.receive()
    for _ in range(3):
        source.reset(None, None)  # the pool refuses one of envs at work
        source.send(np.zeros(3, np.int64))
        with pytest.raises(RuntimeError, match="stepping already"):
            source.send(np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="takes no reset options"):
        source.reset(None, {"a": 1})


def test_loops_by_hand_need_a_sync_pool() -> None:
    env: Any = InitTracker(ScriptedPool(4, 2))
    for call in (env.reset, lambda: as_vector_env(ScriptedPool(4, 2)).source.step(None)):  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match=r"batch_size=2 of num_envs=4.*a pool in sync mode"):
            call()


def test_two_collectors_and_a_rollout_over_one_pool() -> None:
    pool = ScriptedPool(5, 2)
    one = collector(pool)
    next(one)
    assert len(rollout(pool, zeros, 6)) == 30
    with pytest.warns(UserWarning, match="was stepped or reset by another collector"):
        batch = next(one)
    assert audit(batch) == [] and len(batch) == 10
    other = collector(pool)
    del one
    assert len(next(other)) == 10  # the first one has left steps under way


@pytest.mark.parametrize("mark", ["_all_env_ids", "_state_names", "_check_action_finished"])
def test_pools_that_were_used_by_hand_are_refused(mark: str) -> None:
    pool = ScriptedPool(5, 2)
    made = collector(pool)
    setattr(pool, mark, 0)  # what envpool leaves there
    for _ in range(2):
        with pytest.raises(RuntimeError, match="by other code, so it is unknown which envs are stepping"):
            next(made)


def test_rows_that_somebody_takes_or_makes_are_noticed() -> None:
    pool: Any = ScriptedPool(5, 2)
    made = collector(pool)
    next(made)
    pool._last_players_env_id = np.arange(2)  # a recv has replaced it
    with pytest.raises(RuntimeError, match="its rows received, by other code"):
        next(made)
    pool = ScriptedPool(5, 2)
    source: Any = as_vector_env(pool).source  # type: ignore[attr-defined]
    source.led = True
    source.reset(None, None)
    first = source.ids
    pool.send(np.zeros(2, np.int64), first)
    for env in first:
        pool.under_way[int(env)] = (-1.0, pool.under_way[int(env)][1])  # done first
    with pytest.raises(RuntimeError, match="other code has sent actions to it"):
        source.receive()


class Parity(MarkerWrapper):
    row_state = ("steps",)

    def __init__(self, env: Any) -> None:
        super().__init__(env, "parity")
        self.steps: Any = None

    def _on_reset(self, obs: Any, info: Any, rows: Any) -> None:
        self.steps = np.zeros(self.num_envs, np.int64) if self.steps is None else self.steps * ~rows
        info["parity"] = self.steps % 2

    def step(self, actions: Any) -> Any:
        result = self.env.step(actions)
        self.steps = np.where(self.stream.first, 0, self.steps + 1)
        result[4]["parity"] = self.steps % 2
        return result


class Silent(Parity):
    row_state = None


def test_own_markers_that_say_what_they_keep() -> None:
    for batch in (next(collector(Parity(ScriptedPool(5, 2)))), rollout(Parity(ScriptedPool(5, 4)), zeros, 9)):
        assert torch.equal(batch["parity"].squeeze(-1), batch["observation"][:, 2].long() % 2)


def remember(obs: torch.Tensor, is_init: torch.Tensor) -> torch.Tensor:
    return zeros(obs)


def four() -> Any:
    return ScriptedPool(4, 2)


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: collector(Silent(four())), ValueError, "Silent does not work with an envpool in async mode"),
        (
            lambda: collector(NextObservationDelta(four())),
            ValueError,
            "does not work with an envpool in async mode",
        ),
        (
            lambda: collector(gym.wrappers.vector.ClipReward(as_vector_env(four()), 0, 1)),
            ValueError,
            "ClipReward does not work with an envpool in async mode",
        ),
        (lambda: collector(StepCounter(four(), max_steps=3)), ValueError, "envpool: max_episode_steps="),
        (lambda: collector(four(), max_frames_per_traj=3), ValueError, "envpool: max_episode_steps="),
        (
            lambda: as_vector_env(four(), autoreset="same_step"),
            ValueError,
            "needs an env that can reset chosen envs",
        ),
        (lambda: collector(as_vector_env(four(), framework="torch")), ValueError, "stays in NumPy"),
        (
            lambda: collector([four(), four()], splits=2),
            ValueError,
            "splits= needs envs whose steps can be started",
        ),
        (
            lambda: collector(four(), remember),
            ValueError,
            "with an envpool in async mode it is called for only some",
        ),
        (lambda: next(collector(four(), lambda obs: zeros(obs)[:1])), ValueError, r"must have shape \(2,\)"),
    ],
)
def test_what_does_not_go_with_it_is_refused(make: Any, kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text):
        make()
