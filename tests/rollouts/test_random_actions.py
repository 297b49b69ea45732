"""Random actions, their first rows, and seeds."""

import gc
import pickle

import gymnasium as gym
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from list_collector import Counter, cartpole, make
from tensordict import TensorDict

from flatroll.rollouts import Collector, RandomPolicy, SyncDataCollector, rollout
from flatroll.wrappers import StepCounter


def test_a_seed_makes_env_and_random_actions_reproducible():
    one, same, other = (list(cartpole(seed)) for seed in (5, 5, 6))
    assert all((a == b).all() for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0]["observation"], other[0]["observation"])
    assert not torch.equal(one[0]["action"], other[0]["action"])


def test_without_a_seed_torch_reproduces_the_random_actions():
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(next(Collector(make("SameStep"), frames_per_batch=60))["action"])
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    torch.manual_seed(1)
    one, other = (next(Collector(make("SameStep"), frames_per_batch=60))["action"] for _ in range(2))
    assert not torch.equal(one, other)


def test_windows_change_no_random_action():
    runs = []
    for frames in (3, 300):
        collector = Collector(make("SameStep"), frames_per_batch=frames, total_frames=600, seed=1)
        batch = torch.cat(list(collector))
        runs.append(batch["action"][batch["observation"][:, 0] == 1])
    assert torch.equal(*runs)


def test_random_frames_of_a_random_policy_change_nothing():
    one, other = (
        torch.cat(
            list(
                Collector(make("SameStep"), frames_per_batch=9, total_frames=90, seed=1, init_random_frames=n)
            )
        )
        for n in (0, 40)
    )
    assert (one == other).all()


def test_the_policy_sees_the_random_rows_too():
    """Its states go on and its other outputs are recorded, so columns are there from the first row on."""
    module = Counter()
    module.script_action = True
    collector = Collector(make("SameStep"), module, frames_per_batch=30, init_random_frames=15, seed=0)
    batch = next(collector)
    assert torch.equal(batch["state"].squeeze(-1), 7 + batch["observation"][:, 2])


def test_a_random_policy_is_no_policy():
    def rows(policy, seed=0):
        return next(
            Collector(gym.make_vec("CartPole-v1", num_envs=3), policy, frames_per_batch=30, seed=seed)
        )

    space = spaces.Discrete(2)
    for policy in (RandomPolicy(), RandomPolicy(space), RandomPolicy(batch_space(space, 3))):
        assert (rows(policy) == rows(None)).all()
    env = StepCounter(gym.make("CartPole-v1"))
    assert next(
        SyncDataCollector(env, RandomPolicy(env.action_spec), frames_per_batch=10, total_frames=-1)
    ).shape == (10,)
    only_right = rows(RandomPolicy(spaces.Discrete(1, start=1)))
    assert (only_right["action"] == 1).all()
    assert rollout(gym.make("CartPole-v1"), RandomPolicy(space), num_steps=5)["action"].shape == (5,)


def test_a_random_policy_of_its_own():
    space = spaces.Dict(move=spaces.Box(-1, 1, (2,)), say=spaces.Tuple((spaces.Discrete(3),)))
    policy = RandomPolicy(space)
    for shape in ((), (4,), (4, 3)):
        out = policy(TensorDict({}, shape))
        assert out["action", "move"].shape == (*shape, 2)
        assert out["action", "say", "0"].shape == shape
    first, second = (policy(TensorDict({}, [4]))["action", "move"] for _ in range(2))
    assert not torch.equal(first, second)
    assert RandomPolicy(spaces.Discrete(2), "go")(TensorDict({}, [4]))["go"].shape == (4,)
    with pytest.raises(ValueError, match="pass the action space"):
        RandomPolicy()(TensorDict({}, [4]))
    with pytest.raises(TypeError, match="action_spec must be a gymnasium space, got int"):
        RandomPolicy(3)


def test_a_pickled_policy_draws_legal_actions_of_each_part() -> None:
    """What is kept for a part of the space must belong to it in another process, too."""
    names = "abcdefghijkl"
    space = spaces.Dict({name: spaces.Discrete(3, start=10 * i) for i, name in enumerate(names)})
    masks = {"action_mask": {name: torch.ones(4, 3, dtype=torch.bool) for name in names}}
    for _ in range(10):
        policy = RandomPolicy(space)
        policy(TensorDict(masks, [4]))
        packed = pickle.dumps(policy)
        del policy
        gc.collect()

        action = pickle.loads(packed)(TensorDict(masks, [4]))["action"]
        for i, name in enumerate(names):
            assert ((action[name] >= 10 * i) & (action[name] < 10 * i + 3)).all()
