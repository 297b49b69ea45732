"""Every space, and other people's wrappers."""

import copy
import inspect

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import (
    ClipAction,
    NormalizeObservation,
    RescaleAction,
    TransformAction,
    TransformReward,
)
from list_collector import GYM_MODES, keys_of, script
from tensordict.nn import TensorDictModule

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.layout import run_ends
from flatroll.layout.inspect.audit import audit
from flatroll.layout.spaces import observation_leaves, widest_space
from flatroll.modules import actor, critic
from flatroll.rollouts import Collector, batch_spec, check_env_specs
from flatroll.specs import as_spec
from flatroll.wrappers import (
    RewardSum,
    StepCounter,
    as_vector_env,
)
from flatroll.wrappers.testing import ScriptedVectorEnv, make_scripted

# --- other people's wrappers --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", GYM_MODES)
def test_rewards_may_be_changed_inside_and_between(mode):
    def double(reward):
        return 2 * reward

    inside = TransformReward(make_scripted(script(), autoreset_mode=mode), double)
    between = TransformReward(as_vector_env(make_scripted(script(), autoreset_mode=mode)), double)
    plain = next(Collector(make_scripted(script(), autoreset_mode=mode), frames_per_batch=20, seed=0))
    for env in (inside, between):
        batch = next(Collector(RewardSum(env), frames_per_batch=20, seed=0))
        assert torch.equal(batch["next", "reward"], 2 * plain["next", "reward"])
        first = batch["is_init"]
        assert torch.equal(batch["next", "episode_reward"][first], batch["next", "reward"][first])


@pytest.mark.filterwarnings("ignore:actions must lie in")  # a wrapper inside is a part of the env
@pytest.mark.parametrize(
    "wrap",
    [
        lambda env: RescaleAction(env, np.float32(0), np.float32(10)),
        ClipAction,
        lambda env: TransformAction(env, lambda action: action.clip(-1, 1)),
    ],
    ids=["rescale", "clip", "transform"],
)
def test_the_stored_action_is_what_the_policy_did(wrap):
    """A log-probability belongs to the policy's action, not to what a wrapper made of it."""
    for inside in (False, True):
        bare = ScriptedVectorEnv(script(action="box"), autoreset_mode="SameStep", record_actions=True)
        env = wrap(bare if inside else as_vector_env(bare))
        collector = Collector(env, lambda obs: torch.full((3, 2), 5.0), frames_per_batch=6)
        assert (next(collector)["action"] == 5).all()
        assert all(np.abs(action).max() <= 1 for action in bare.actions)


@pytest.mark.parametrize("inside", [True, False])
def test_normalized_observations_are_those_that_came(inside):
    """The statistics move at every step: a next observation normalized anew would differ."""
    came = set()

    class Spy(NormalizeObservation):
        def observations(self, observations):
            made = super().observations(observations)
            came.update(map(tuple, made.tolist()))
            return made

    bare = make_scripted(script(), autoreset_mode="NextStep")
    env = Spy(bare if inside else as_vector_env(bare))
    rows = torch.cat(list(Collector(StepCounter(env), frames_per_batch=20, total_frames=60, seed=0)))
    assert set(map(tuple, rows["observation"].tolist())) <= came
    assert set(map(tuple, rows["next", "observation"].tolist())) <= came
    assert len(came) > 60


def test_a_step_limit_outside_of_an_observation_wrapper_is_refused():
    env = NormalizeObservation(as_vector_env(make_scripted(script(), autoreset_mode="NextStep")))
    with pytest.raises(ValueError, match="max_steps=2 with NormalizeObservation around an adapted env"):
        Collector(env, frames_per_batch=6, max_frames_per_traj=2)


# --- spaces -------------------------------------------------------------------------------------------------


OBSERVATIONS = {
    "box": spaces.Box(-1, 1, (2, 3)),
    "float64": spaces.Box(-1, 1, (3,), np.float64),
    "float16": spaces.Box(-1, 1, (3,), np.float16),
    "uint8": spaces.Box(0, 255, (4, 4, 3), np.uint8),
    "uint16": spaces.Box(0, 2**16 - 1, (2, 2), np.uint16),
    "int8": spaces.Box(-128, 127, (2,), np.int8),
    "discrete": spaces.Discrete(7, start=-3),
    "multi discrete": spaces.MultiDiscrete([3, 4, 5]),
    "grid": spaces.MultiDiscrete(np.array([[3, 4], [5, 6]])),
    "multi binary": spaces.MultiBinary([2, 3]),
    "scalar": spaces.Box(-1, 1, ()),
    "nested": spaces.Dict(
        {
            "eyes": spaces.Tuple((spaces.Box(0, 255, (2, 2), np.uint8), spaces.Discrete(3))),
            "body": spaces.Dict({"legs": spaces.MultiBinary(4), "pose": spaces.Box(-1, 1, (2,), np.float64)}),
        }
    ),
    "tuple": spaces.Tuple((spaces.Discrete(4), spaces.Dict({"a": spaces.Box(-1, 1, (2,))}))),
    "integer keys": spaces.Dict({0: spaces.Box(-1, 1, (2,)), 7: spaces.Dict({3: spaces.Discrete(5)})}),
    "empty": spaces.Box(-1, 1, (0,)),
    "empty bytes": spaces.Box(0, 255, (3, 0, 2), np.uint8),
    "partly empty": spaces.Dict(a=spaces.Box(-1, 1, (3, 0), np.float64), b=spaces.Box(-1, 1, (2,))),
}
ACTIONS = {
    "discrete": spaces.Discrete(5, start=2),
    "multi discrete": spaces.MultiDiscrete([3, 4], start=[1, -2]),
    "multi binary": spaces.MultiBinary(5),
    "box": spaces.Box(np.array([-1, 0], np.float32), np.array([1, 5], np.float32)),
    "float64": spaces.Box(-1, 1, (2,), np.float64),
    "uint8": spaces.Box(0, 3, (2,), np.uint8),
    "unbounded": spaces.Box(-np.inf, np.inf, (2,)),
    "nested": spaces.Dict(
        {
            "arm": spaces.Box(-1, 1, (3,)),
            "hands": spaces.Tuple((spaces.Discrete(3), spaces.Dict({"grip": spaces.MultiBinary(2)}))),
        }
    ),
    "tuple": spaces.Tuple((spaces.Discrete(4), spaces.Box(-1, 1, (2,)))),
    "integer keys": spaces.Dict({0: spaces.Discrete(3), 7: spaces.Dict({3: spaces.Box(-1, 1, (2,))})}),
    "empty": spaces.Box(-1, 1, (0,)),
}
if "dtype" in inspect.signature(spaces.Discrete).parameters:  # Gymnasium 1.2.2 or newer
    ACTIONS["small"] = spaces.Discrete(3, dtype=np.uint8)


class SpaceEnv(gym.Env):
    """Observations drawn from any space, five steps per episode; it checks the actions it is given."""

    def __init__(self, observation_space, action_space=None):
        self.observation_space = observation_space
        self.action_space = action_space or spaces.Discrete(2)
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), (self.action_space, action)
        self.steps += 1
        return self.observation_space.sample(), 1.0, self.steps == 5, False, {}


def leaves(space, key):
    if isinstance(space, spaces.Dict | spaces.Tuple):
        items = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        return [leaf for name, child in items for leaf in leaves(child, (*key, str(name)))]
    return [(key, space)]


@pytest.mark.parametrize("mode", GYM_MODES)
@pytest.mark.parametrize("name", OBSERVATIONS)
def test_observations_of_every_space(name, mode):
    def run(**options):
        own = [lambda: SpaceEnv(copy.deepcopy(OBSERVATIONS[name])) for _ in range(2)]
        collector = Collector(
            SyncVectorEnv(own, autoreset_mode=AutoresetMode(mode)), frames_per_batch=16, seed=1, **options
        )
        return next(collector), collector.final

    (batch, _), (compact, final) = run(), run(compact_obs=True)
    ends = run_ends(batch)
    root = () if isinstance(OBSERVATIONS[name], spaces.Dict) else ("observation",)
    for key, space in leaves(OBSERVATIONS[name], root):
        column, following = batch[key], batch[("next", *key)]
        assert column.shape == following.shape == (16, *space.shape)
        expected = torch.from_numpy(np.zeros(0, space.dtype)).dtype
        assert column.dtype is following.dtype is expected
        assert all(space.contains(np.asarray(row)) for row in column.numpy())
        inner = (~ends[:-1]).numpy()
        np.testing.assert_array_equal(following.numpy()[:-1][inner], column.numpy()[1:][inner])
        np.testing.assert_array_equal(compact[key].numpy(), column.numpy())
        np.testing.assert_array_equal(final[("next", *key)].numpy(), following.numpy()[final["row"].numpy()])


@pytest.mark.parametrize("name", ACTIONS)
def test_random_actions_of_every_space(name):
    """The env itself asserts that it gets members of its space."""
    own = [lambda: SpaceEnv(spaces.Box(-1, 1, (1,)), ACTIONS[name]) for _ in range(2)]
    batch = next(Collector(SyncVectorEnv(own), frames_per_batch=50, seed=0))
    for key, space in leaves(ACTIONS[name], ("action",)):
        assert batch[key].shape == (50, *space.shape)
        assert batch[key].dtype is torch.from_numpy(np.zeros(0, space.dtype)).dtype


@pytest.mark.parametrize("name", ["nested", "tuple"])
def test_nested_actions_of_a_module(name):
    space = ACTIONS[name]
    keys = [key for key, _ in leaves(space, ("action",))]

    def act(obs):
        return tuple(
            torch.zeros((len(obs), *leaf.shape), dtype=torch.from_numpy(np.zeros(0, leaf.dtype)).dtype)
            for _, leaf in leaves(space, ("action",))
        )

    module = TensorDictModule(act, in_keys=["observation"], out_keys=keys)
    own = [lambda: SpaceEnv(spaces.Box(-1, 1, (1,)), space) for _ in range(2)]
    batch = next(Collector(SyncVectorEnv(own), module, frames_per_batch=10))
    assert all((batch[key] == 0).all() for key in keys)
    assert set(keys) == {key for key in keys_of(batch) if key[0] == "action"}


@pytest.mark.parametrize("name", ["empty", "empty bytes", "partly empty", "integer keys"])
def test_checks_and_buffers_of_unusual_spaces(name):
    def make():
        return SyncVectorEnv([lambda: SpaceEnv(copy.deepcopy(OBSERVATIONS[name])) for _ in range(2)])

    check_env_specs(make())
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(50, compact_obs=True), sampler=SliceSampler(slice_len=3), batch_size=12
    )
    for batch in Collector(make(), frames_per_batch=20, total_frames=80, seed=0):
        assert audit(batch) == []
        buffer.extend(batch)
    sample = buffer.sample()
    root = () if isinstance(OBSERVATIONS[name], spaces.Dict) else ("observation",)
    for key, space in leaves(OBSERVATIONS[name], root):
        assert sample[key].shape == sample[("next", *key)].shape == (12, *space.shape)


def test_integer_keys_and_their_texts_in_one_space_are_refused():
    both = spaces.Dict({"0": spaces.Box(-1, 1, (2,)), "1": spaces.Discrete(2)})
    both.spaces[0] = both.spaces["0"]
    with pytest.raises(ValueError, match=r"observation entries \['0', '1', 0\]"):
        observation_leaves(both)
    with pytest.raises(
        TypeError, match=r"keys of a Dict space must be different strings or integers, got \['0', '1', 0\]"
    ):
        as_spec(both)


#: Spaces of two envs, and the one that holds the values of both.
DIFFERENT = {
    "box": (spaces.Box(0, 1, (2,)), spaces.Box(-5, np.inf, (2,)), spaces.Box(-5, np.inf, (2,))),
    "bytes": (
        spaces.Box(5, 9, (2, 2), np.uint8),
        spaces.Box(0, 7, (2, 2), np.uint8),
        spaces.Box(0, 9, (2, 2), np.uint8),
    ),
    "discrete": (spaces.Discrete(2), spaces.Discrete(9, start=-1), spaces.Discrete(9, start=-1)),
    "disjoint": (spaces.Discrete(2, start=7), spaces.Discrete(2), spaces.Discrete(9)),
    "multi discrete": (
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiDiscrete([5, 2], start=[0, -1]),
        spaces.MultiDiscrete([5, 4], start=[0, -1]),
    ),
    "alike": (spaces.MultiBinary(3), spaces.MultiBinary(3), spaces.MultiBinary(3)),
    "nested": (
        spaces.Dict(a=spaces.Discrete(2), b=spaces.Tuple((spaces.Box(0, 1), spaces.MultiBinary(2)))),
        spaces.Dict(a=spaces.Discrete(4), b=spaces.Tuple((spaces.Box(-1, 0), spaces.MultiBinary(2)))),
        spaces.Dict(a=spaces.Discrete(4), b=spaces.Tuple((spaces.Box(-1, 1), spaces.MultiBinary(2)))),
    ),
}


@pytest.mark.parametrize("mode", GYM_MODES)
@pytest.mark.parametrize("name", DIFFERENT)
def test_envs_of_different_bounds_have_the_space_of_all(name, mode):
    *own, widest = DIFFERENT[name]

    def make(kind=SyncVectorEnv):
        # the narrow env first: its space is Gymnasium's single space
        fns = [lambda space=space: SpaceEnv(copy.deepcopy(space)) for space in own]
        return kind(fns, observation_mode="different", autoreset_mode=AutoresetMode(mode))

    env = make()
    assert as_vector_env(env).single_observation_space == widest
    check_env_specs(make())
    policy = actor(env, hidden=(4,))
    batch = next(Collector(env, policy, frames_per_batch=40, seed=0))
    batch_spec(env).assert_is_in(batch)
    critic(env, hidden=(4,))(batch)
    for key, space in leaves(widest, () if isinstance(widest, spaces.Dict) else ("observation",)):
        assert all(space.contains(np.asarray(row)) for row in batch[key].numpy())
    if mode == "NextStep" and name in ("discrete", "nested"):
        split = make(AsyncVectorEnv)
        collector = Collector(split, policy, frames_per_batch=40, splits=2, seed=0)
        assert len(next(collector)) == 40
        collector.spec.assert_is_in(next(collector))
        split.close()


def test_a_space_of_all_rows_of_another_form_is_ignored():
    for single, batched in (
        (spaces.Discrete(2), spaces.Discrete(9)),
        (spaces.Box(0, 1, (2,)), spaces.Box(-9, 9, (2,))),
        (spaces.Box(0, 1, (2,)), spaces.Box(-9, 9, (4, 3))),
        (spaces.Dict(a=spaces.Discrete(2)), spaces.Dict(b=spaces.MultiDiscrete([2, 9]))),
        (spaces.Tuple((spaces.Discrete(2),)), spaces.Tuple((spaces.MultiDiscrete([2, 9]),) * 2)),
        (spaces.Box(0, 1, (0,)), spaces.Box(0, 1, (3, 0))),
        (spaces.Text(3), spaces.Tuple((spaces.Text(3),) * 2)),
    ):
        assert widest_space(single, batched) is single
