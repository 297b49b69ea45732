"""What games must keep to be rows, and the errors of those that do not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from flatroll.rollouts import Collector
from flatroll.wrappers import PettingZooSource, StepCounter, VectorStream, as_vector_env
from flatroll.wrappers.testing import ScriptedGame


class AecGame(ScriptedGame):
    def agent_iter(self) -> None: ...


class Changed(ScriptedGame):
    """A game whose results a function changes."""

    def __init__(self, change: Callable[..., Any]) -> None:
        super().__init__()
        self.change = change

    def step(self, actions: Any) -> Any:
        result = super().step(actions)
        self.change(self, *result)
        return result


def test_aec_envs_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"a PettingZoo AEC env.*\n?.*aec_to_parallel\(env\) makes a ParallelEnv"
    ):
        as_vector_env(AecGame())


def test_an_env_a_function_and_lists() -> None:
    for given in (ScriptedGame(), ScriptedGame, [ScriptedGame], [ScriptedGame(), lambda: ScriptedGame()]):
        env: Any = as_vector_env(given)  # type: ignore[arg-type]
        assert isinstance(env, VectorStream) and env.num_envs % 3 == 0
        assert len(Collector(given, frames_per_batch=5).rollout()) == 5  # type: ignore[arg-type]
    closed = []

    class Closes(ScriptedGame):
        def close(self) -> None:
            closed.append(self)

    as_vector_env([Closes, Closes]).close()  # type: ignore[arg-type]
    assert len(closed) == 2
    with pytest.raises(TypeError, match="call the factory first"):
        as_vector_env(lambda: 3)  # type: ignore[arg-type]


def test_games_must_be_alike() -> None:
    small = ScriptedGame(episodes=[{"a0": [(0, 2, "terminated")]}])
    with pytest.raises(ValueError, match=r"same possible_agents, got .* in game 0 and \['a0'\] in game 1"):
        as_vector_env([ScriptedGame(), small])  # type: ignore[arg-type]
    game = ScriptedGame()
    with pytest.raises(ValueError, match="envs must be different games, got one of them twice"):
        as_vector_env([game, game])  # type: ignore[arg-type]
    game.possible_agents = []
    with pytest.raises(
        ValueError, match="must have possible_agents, the names of all agents that it may ever have"
    ):
        as_vector_env(game)


def test_agents_must_have_one_space_or_groups() -> None:
    class Differ(ScriptedGame):
        def action_space(self, agent: str) -> spaces.Space[Any]:
            return spaces.Discrete(2 if agent == "a2" else 5)

    with pytest.raises(
        ValueError, match=r"same action_space, got Discrete\(5\) for 'a0' and Discrete\(2\) for 'a2'"
    ):
        as_vector_env(Differ())
    with pytest.raises(ValueError, match=r"'one': all agents .*PettingZooSource.groups"):
        PettingZooSource.groups(Differ(), {"one": ["a0", "a2"], "two": ["a1"]})
    for groups in ({"one": ["a0"]}, {"one": ["a0", "a1", "a2"], "two": ["a2"]}):
        with pytest.raises(ValueError, match=r"groups must hold each agent of .* once"):
            PettingZooSource.groups(Differ(), groups)
    parts = PettingZooSource.groups(Differ(), {"one": ["a0", "a1"], "two": ["a2"]})
    assert [source.single_action_space.n for source in parts.values()] == [5, 2]  # type: ignore[attr-defined]


def test_what_a_game_returns_is_checked() -> None:
    def step(change: Callable[..., Any]) -> None:
        env = as_vector_env(Changed(change))
        env.reset()
        for _ in range(6):
            env.step(np.zeros(3, np.int64))

    def shape(game: Any, obs: Any, *results: Any) -> None:
        obs["a1"] = np.zeros(3, np.float32)

    def dtype(game: Any, obs: Any, *results: Any) -> None:
        obs["a1"] = np.zeros(4, complex)

    def acts_on(game: Any, *results: Any) -> None:
        results[2]["a0"] = True

    def leaves(game: Any, *results: Any) -> None:
        game.agents.remove("a0")

    def joins(game: Any, *results: Any) -> None:
        game.agents.append("a9")

    def unpaid(game: Any, obs: Any, rewards: Any, *results: Any) -> None:
        del rewards["a1"]

    def unseen(game: Any, obs: Any, *results: Any) -> None:
        del obs["a2"]

    for change, text in (
        (
            shape,
            r"the observation of agent 'a1' must be float32 of shape \(4,\), as observation_space says, got",
        ),
        (dtype, r"the observation of agent 'a1' must be float32 .* got complex128"),
        (acts_on, r"agents \['a0'\] were terminated or truncated and are still in env.agents"),
        (leaves, r"agents \['a0'\] left env.agents and were neither terminated nor truncated"),
        (joins, r"env.agents has \['a9'\], which possible_agents .* lacks"),
        (unpaid, r"the env's rewards must have an entry for each agent .* but 'a1' is not in \['a0'\]"),
        (unseen, r"the env's observations must have an entry .* but 'a2' is not in"),
    ):
        with pytest.raises(ValueError, match=text):
            step(change)


def test_a_game_begins_with_somebody() -> None:
    class Empty(ScriptedGame):
        def _join(self) -> None: ...

    with pytest.raises(ValueError, match="Empty has no agents after reset"):
        as_vector_env(Empty()).reset()


def test_state_needs_its_space() -> None:
    game = ScriptedGame()
    del game.state_space
    with pytest.raises(ValueError, match=r"state=True adds the entry 'state'.* lacks state_space"):
        PettingZooSource(game, state=True)
    wrong = ScriptedGame()
    wrong.state_space = spaces.Box(0, 1, (7,))
    with pytest.raises(
        ValueError, match=r"env.state\(\) must have shape \(7,\), as state_space says, got \(3,\)"
    ):
        as_vector_env(PettingZooSource(wrong, state=True)).reset()


def test_what_agents_cannot_have() -> None:
    with pytest.raises(ValueError, match="max_steps=3 needs an env that can reset chosen envs"):
        StepCounter(ScriptedGame(), max_steps=3)
    with pytest.raises(ValueError, match="autoreset='same_step' needs an env"):
        as_vector_env(ScriptedGame(), autoreset="same_step")
    env = as_vector_env(ScriptedGame())
    with pytest.raises(ValueError, match="seed must be one number, or one for each of 1 games, got 3"):
        env.reset(seed=[1, 2, 3])  # type: ignore[arg-type]
    env.reset()
    with pytest.raises(ValueError, match="reset_mask"):
        env.reset(options={"reset_mask": np.ones(3, bool)})


def test_seeds_and_calls_reach_each_game() -> None:
    seeds = []

    class Seeded(ScriptedGame):
        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            seeds.append((self.game, seed))
            return super().reset(seed, options)

    env: Any = as_vector_env([Seeded(0), Seeded(1)])  # type: ignore[arg-type]
    env.reset(seed=7)
    env.reset(seed=[3, 9])
    assert seeds == [(0, 7), (1, 8), (0, 3), (1, 9)]
    assert env.get_attr("game") == (0, 0, 0, 1, 1, 1) and env.render() == (None, None)


def test_infos_and_masks_of_infos() -> None:
    class Tells(ScriptedGame):
        def step(self, actions: Any) -> Any:
            *results, infos = super().step(actions)
            infos["a0"] = {"score": 2.5, "action_mask": np.array([0, 0, 1, 0, 0], np.int8)}
            return (*results, infos)

        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            obs, infos = super().reset(seed, options)
            infos["a0"] = {"action_mask": np.array([0, 0, 1, 0, 0], np.int8)}
            return obs, infos

    batch: Any = Collector(Tells(), frames_per_batch=40, info_keys=["action_mask"]).rollout()
    first = batch["collector", "agent"] == 0
    assert (batch["action"][first] == 2).all() and len(batch["action"][~first].unique()) > 2
    assert (batch["action_mask"][~first] == 1).all()


def test_as_tensors_and_in_another_dtype() -> None:
    for kwargs in (
        {"framework": "torch"},
        {"dtype": torch.float64},
        {"framework": "torch", "dtype": torch.float16},
    ):
        env = as_vector_env([ScriptedGame(), ScriptedGame(1)], **kwargs)  # type: ignore[arg-type]
        batch: Any = Collector(env, frames_per_batch=60, seed=0).rollout()
        plain: Any = Collector([ScriptedGame(), ScriptedGame(1)], frames_per_batch=60, seed=0).rollout()
        assert batch["observation"].dtype is kwargs.get("dtype", torch.float32)
        batch = batch.apply(lambda x: x.float() if x.is_floating_point() else x)
        assert (batch == plain).all()


def test_groups_step_together() -> None:
    groups = {"front": ["a0"], "rear": ["a1", "a2"]}
    parts = PettingZooSource.groups([ScriptedGame(), ScriptedGame(1)], groups, state=True)
    envs: Any = {name: as_vector_env(source) for name, source in parts.items()}
    whole: Any = as_vector_env(PettingZooSource([ScriptedGame(), ScriptedGame(1)], state=True))
    rows = {"front": [0, 3], "rear": [1, 2, 4, 5]}
    expected, _ = whole.reset(seed=0)
    for name, env in envs.items():
        obs, _ = env.reset(seed=0)
        assert np.array_equal(obs["observation"], expected["observation"][rows[name]])
    for step in range(30):
        actions = np.arange(6) * step % 5
        expected, reward, terminated, truncated, _ = whole.step(actions)
        sent = {name: env.send(actions[rows[name]]) for name, env in envs.items()}
        for name, env in envs.items():
            obs, *results, _ = env.step(sent[name])
            for one, other in zip(results, (reward, terminated, truncated), strict=True):
                assert np.array_equal(one, other[rows[name]])
            assert all(np.array_equal(obs[key], expected[key][rows[name]]) for key in obs)
            assert np.array_equal(env.first, whole.first[rows[name]])
    front, rear = envs.values()
    with pytest.raises(RuntimeError, match="1 of 2 groups have no actions yet"):
        front.step(actions[:2])
    front.reset()
    with pytest.raises(RuntimeError, match="another group was stepped without this one: reset all groups"):
        rear.step(actions[:4])
