"""Actions outside the action space: an error for whole numbers, one warning for a Box; masks of random actions."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from flatroll.rollouts import Collector, RandomPolicy, rollout
from flatroll.rollouts.policies import ActionRange
from flatroll.rollouts.random_actions import RandomActions


class Takes(gym.Env[Any, Any]):
    """Takes any action of any size, without a look; episodes of 3 steps."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, action_space: spaces.Space[Any], mask: Any = None, in_obs: bool = False) -> None:
        self.action_space, self.mask, self.in_obs, self.given = action_space, mask, in_obs, []
        if in_obs:
            box = spaces.Box(0, 1, np.shape(mask(0)), np.int8)
            self.observation_space = spaces.Dict(obs=spaces.Box(-1, 1, (2,), np.float32), action_mask=box)

    def seen(self) -> tuple[Any, dict[str, Any]]:
        obs = np.zeros(2, np.float32)
        if self.mask is None:
            return obs, {}
        mask = self.mask(self.count)
        return ({"obs": obs, "action_mask": mask}, {}) if self.in_obs else (obs, {"action_mask": mask})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count = 0
        return self.seen()

    def step(self, action: Any) -> Any:
        self.given.append(action)
        self.count += 1
        obs, info = self.seen()
        return obs, 0.0, self.count == 3, False, info


def collects(space: spaces.Space[Any], action: Any, **options: Any) -> TensorDict:
    env = gym.vector.SyncVectorEnv([lambda: Takes(space)] * 2)
    batch: TensorDict = next(Collector(env, lambda obs: action, frames_per_batch=6, **options))
    return batch


@pytest.mark.parametrize(
    ("space", "action", "text"),
    [
        (spaces.Discrete(3, start=5), [5, 8], r"actions must lie in \[5, 7\] for Discrete\(3, start=5\), got 5 to 8"),
        (spaces.Discrete(3), [-1, 0], r"actions must lie in \[0, 2\] for Discrete\(3\), got -1 to 0"),
        (spaces.MultiDiscrete([3, 2]), [[2, 1], [2, 2]], r"in \[0, 1\] in place 1 for MultiDiscrete.*got 1 to 2"),
        (spaces.MultiBinary(2), np.array([[0, 1], [2, 0]], np.int8), r"in \[0, 1\] in place 0 for MultiBinary"),
        (
            spaces.Dict(go=spaces.Discrete(2), arm=spaces.Box(-1, 1, (1,))),
            {"go": [0, 2], "arm": np.zeros((2, 1))},
            r"actions\['go'\] must lie in \[0, 1\] for Discrete\(2\), got 0 to 2",
        ),
        (
            spaces.Tuple((spaces.Box(-1, 1, (1,)), spaces.MultiDiscrete([2, 2]))),
            (np.zeros((2, 1)), [[0, 1], [0, 3]]),
            r"actions\[1\] must lie in \[0, 1\] in place 1",
        ),
    ],
)  # fmt: skip
def test_whole_numbers_outside_the_space_are_an_error(space: Any, action: Any, text: str) -> None:
    """Of an env that does not look: once for each batch."""
    with pytest.raises(ValueError, match=text):
        collects(space, action)


def test_an_env_that_looks_is_heard_as_the_cause() -> None:
    with pytest.raises(
        ValueError, match=r"actions must lie in \[0, 1\] for Discrete\(2\), got 0 to 7"
    ) as caught:
        rollout(gym.make_vec("CartPole-v1", num_envs=2), lambda obs: [0, 7], num_steps=3)
    assert isinstance(caught.value.__cause__, AssertionError)
    own = gym.vector.SyncVectorEnv([lambda: Takes(spaces.Discrete(2))])
    own.envs[0].step = lambda action: 1 // 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):  # an error of the env's own stays what it is
        rollout(own, lambda obs: [0], num_steps=3)


@pytest.mark.parametrize("value", [5.0, float("nan")])
def test_numbers_outside_a_box_are_a_warning_once(value: float) -> None:
    space = spaces.Dict(arm=spaces.Box(-1, 1, (2,)), leg=spaces.Box(-np.inf, np.inf, (1,)))
    env = Takes(space)
    action = {"arm": np.array([[0.5, value]]), "leg": np.array([[99.0]])}
    collector = Collector(env, lambda obs: action, frames_per_batch=4)
    with pytest.warns(UserWarning) as caught:
        batch = next(collector)
    (one,) = caught
    text = str(one.message)
    assert (
        "actions['arm'] must lie in [-1.0, 1.0] in place 1 for Box" in text
        and f"got {value} to {value}" in text
    )
    assert "the env received them unchanged" in text and "ClipAction or RescaleAction" in text
    assert torch.equal(batch["action", "arm"], torch.tensor([[0.5, value]] * 4)) or value != value
    assert env.given[0]["arm"][1] == value or value != value
    next(collector)  # nothing more


def test_gymnasiums_wrappers_and_random_actions_are_quiet() -> None:
    space = spaces.Box(-1, 1, (1,))
    for env in (
        gym.wrappers.ClipAction(Takes(space)),
        gym.wrappers.vector.ClipAction(gym.vector.SyncVectorEnv([lambda: Takes(space)])),
    ):
        next(Collector(env, lambda obs: np.full((1, 1), 3.0), frames_per_batch=4))
    rollout(Takes(space), num_steps=9)


def test_a_device_is_not_waited_for() -> None:
    """The ends of a batch's actions are looked at with a later one, and none is forgotten meanwhile."""
    for space, value in ((spaces.Box(-1, 1, (2,)), 7.0), (spaces.MultiDiscrete([3, 3]), 4)):
        looks = ActionRange(space, ["action"], [()], torch.device("cuda"))

        def batch(value: float, looks: Any = looks, space: Any = space) -> TensorDict:
            action = torch.zeros((3, 2), dtype=getattr(torch, str(space.dtype)))
            action[1, 1] = value
            return TensorDict({"action": action}, [3])

        looks.look(batch(0))
        looks.look(batch(value))
        if isinstance(space, spaces.Box):
            with pytest.warns(UserWarning, match="got 0.0 to 7.0: the env received"):
                looks.look(batch(0))
        else:
            with pytest.raises(ValueError, match=r"in \[0, 2\] in place 1 .*, got 0 to 4"):
                looks.look(batch(0))


def only_odd(count: int) -> Any:
    return np.array([0, 1, 0, 1], np.int8) if count % 2 else np.array([0, 0, 1, 0], np.int8)


@pytest.mark.parametrize("in_obs", [True, False], ids=["observation", "info"])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_random_actions_are_legal(in_obs: bool, mode: str) -> None:
    env = gym.vector.SyncVectorEnv(
        [lambda: Takes(spaces.Discrete(4), only_odd, in_obs)] * 3,
        autoreset_mode=gym.vector.AutoresetMode(mode),
    )
    keys = {} if in_obs else {"info_keys": ["action_mask"]}
    for policy, options in (
        (None, {}),
        (RandomPolicy(), {}),
        (lambda obs: [0] * 3, {"init_random_frames": 300}),
    ):
        batch = next(Collector(env, policy, frames_per_batch=300, seed=1, **keys, **options))
        legal = batch["action_mask"].gather(1, batch["action"].unsqueeze(1)).bool()
        assert legal.all()
        assert {1, 2, 3} == set(batch["action"].tolist())
    again = next(Collector(env, None, frames_per_batch=300, seed=1, **keys))
    other = next(Collector(env, None, frames_per_batch=300, seed=1, **keys))
    assert torch.equal(again["action"], other["action"])


def test_masks_of_every_space_and_wrong_ones() -> None:
    space = spaces.Dict(
        go=spaces.Discrete(3), arm=spaces.MultiDiscrete([2, 3], start=[0, 5]), push=spaces.Box(-1, 1, (1,))
    )
    draws = RandomActions(space, 500, torch.device("cpu"), seed=0)
    drawn = draws()
    masks = {"arm": torch.tensor([0, 1, 1, 0, 1]).expand(500, -1)}
    legal = draws.legal(drawn, masks)
    assert torch.equal(legal["go"], drawn["go"]) and torch.equal(legal["push"], drawn["push"])
    assert legal["arm"][:, 0].unique().tolist() == [1] and legal["arm"][:, 1].unique().tolist() == [5, 7]
    assert 200 < (legal["arm"][:, 1] == 5).sum() < 300  # uniform: 250, and 4.5 standard deviations
    with pytest.raises(ValueError, match=r"leave at least one action in each env, got none in envs \[0, 1"):
        draws.legal(drawn, {"go": np.zeros((500, 3), np.int8)})
    with pytest.raises(ValueError, match=r"action_mask must have one mask for each part"):
        draws.legal(drawn, torch.ones(500, 3))
    with pytest.raises(
        ValueError, match=r"action_mask must have shape \(500, 5\) for MultiDiscrete.*, got \(500, 4\)"
    ):
        draws.legal(drawn, {"arm": torch.ones(500, 4)})
    policy = RandomPolicy(spaces.Discrete(4))
    rows = TensorDict({"action_mask": torch.tensor([[0, 0, 1, 0]]).expand(6, 2, -1).reshape(3, 4, 4)}, [3, 4])
    assert (policy(rows)["action"] == 2).all() and rows["action"].shape == (3, 4)
