"""envpool itself in async mode."""

from typing import Any

import pytest
import torch
from scripted_pool import same_streams, take
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential

from flatroll.layout.inspect.audit import audit
from flatroll.modules import GRUModule, actor
from flatroll.rollouts import Collector, rollout
from flatroll.wrappers import StepCounter


@pytest.fixture(scope="module")
def pool() -> Any:
    envpool: Any = pytest.importorskip("envpool")
    return lambda name, size, num_envs=6: envpool.make_gymnasium(
        name, num_envs=num_envs, batch_size=size, num_threads=2, seed=3
    )


def push(obs: torch.Tensor) -> torch.Tensor:
    return (obs[:, 2] > 0).long()


pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting")


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("policy", [push, None])
def test_cartpoles(pool: Any, size: int, policy: Any) -> None:
    def collect(size: int) -> list[Any]:
        collector = Collector(StepCounter(pool("CartPole-v1", size)), policy, frames_per_batch=90)
        collector._runner.random.seed(1)
        return take(collector, 8)

    rows = collect(size)
    same_streams(collect(6), rows, 6)
    assert all(audit(batch) == [] and len(batch) == 90 for batch in rows)


def test_images_of_atari(pool: Any) -> None:
    def paddle(obs: torch.Tensor) -> torch.Tensor:
        return obs.flatten(1).sum(-1, dtype=torch.int64) % 6

    def collect(size: int) -> Any:
        collector = Collector(pool("Pong-v5", size, 3), paddle, frames_per_batch=24, compact_obs=True)
        return take(collector, 2)

    same_streams(collect(3), collect(2), 3)


def test_float64_of_mujoco(pool: Any) -> None:
    def collect(size: int) -> list[Any]:
        made = Collector(
            pool("HalfCheetah-v4", size, 3),
            lambda obs: obs[:, :6].clamp(-1, 1),
            frames_per_batch=60,
            obs_dtype=torch.float32,
        )
        return take(made, 2)

    rows = collect(2)
    assert rows[0]["observation"].dtype is torch.float32
    same_streams(collect(3), rows, 3)


def test_a_recurrent_policy(pool: Any) -> None:
    torch.manual_seed(0)
    policy = TensorDictSequential(
        GRUModule(3, 4, in_key="observation", out_key="features"),
        TensorDictModule(torch.nn.Linear(4, 1), ["features"], ["action"]),
    )
    one, other = (rollout(StepCounter(pool("Pendulum-v1", size, 4)), policy, 30) for size in (4, 2))
    # A network's last bits depend on the number of rows.
    for key in ("observation", "recurrent_state", "action"):
        assert torch.allclose(one[key], other[key], atol=1e-3), key
    assert torch.equal(one["collector", "traj_ids"], other["collector", "traj_ids"])


def test_steps_by_hand_are_noticed(pool: Any) -> None:
    used = pool("CartPole-v1", 2)
    used.async_reset()
    with pytest.raises(RuntimeError, match="was reset, or its rows received, by other code"):
        rollout(used, push, 3)
    used = pool("CartPole-v1", 2)
    collector = Collector(used, push, frames_per_batch=20)
    next(collector)
    used.recv()
    with pytest.raises(RuntimeError, match="was reset, or its rows received, by other code"):
        next(collector)


@pytest.mark.parametrize(("num_envs", "size"), [(5, 2), (5, 4), (8, 2)])
def test_resets_while_steps_are_under_way_do_not_abort(pool: Any, num_envs: int, size: int) -> None:
    used = pool("CartPole-v1", size, num_envs)
    collector = Collector(used, push, frames_per_batch=17)
    for _ in range(20):
        assert audit(next(collector)) == []
        collector.reset()
    assert len(rollout(used, None, 10)) == 10 * num_envs


def test_the_joined_rows_make_whole_episodes(pool: Any) -> None:
    batches = take(Collector(pool("CartPole-v1", 2), push, frames_per_batch=50, trajs_per_batch=4), 6)
    rows: Any = TensorDict.cat(batches)
    assert len(rows["collector", "traj_ids"].unique()) == 24 == int(rows["next", "done"].sum())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("name", "combined"), [("JobShop-v0", False), ("MultiCVRP-v0", False), ("BinPack-v2", True)]
)
def test_masks_of_several_dims_and_actions_of_few_integers(
    pool: Any, name: str, combined: bool, size: int
) -> None:
    policy = actor(pool(name, 3, 3), hidden=(8,))
    for plays in (None, policy):
        batch = next(Collector(pool(name, size, 3), plays, frames_per_batch=300))
        assert batch["next", "done"].any()
        mask = batch["action_mask"].bool()
        action = batch["action"].long()
        if combined:
            assert mask[torch.arange(300), action[:, 0], action[:, 1]].all()
        else:
            assert mask.gather(2, action.unsqueeze(2)).all()
        assert not mask.all()
