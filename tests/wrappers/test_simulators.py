"""Torch simulators, each by a stub of its own interface: every row of a collected batch, ends included."""

import warnings
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import AutoresetMode
from simulators import (
    GenesisEnv,
    IsaacDirectEnv,
    IsaacManagerEnv,
    LeggedRobot,
    ManiSkillBase,
    ManiSkillVectorEnv,
    MjlabEnv,
    PlaygroundEnv,
    RslVecEnv,
    TimeLimitWrapper,
    check_rows,
)

from flatroll.layout import audit, describe
from flatroll.rollouts import Collector
from flatroll.wrappers import StepCounter, as_vector_env
from flatroll.wrappers.testing import Script, check_vector_env, vector_env_problems

DISABLED = AutoresetMode.DISABLED
#: No episode ends by time, which ManiSkill's base env would not report.
ENDLESS = Script(3, lengths=[[3, 1], [4], [2]], ends="terminated", action="box")


def maniskill() -> ManiSkillVectorEnv:
    return ManiSkillVectorEnv(TimeLimitWrapper(ManiSkillBase()))


# The env, the key of its observations, the arguments it needs, and whether it hides its last observations.
SIMULATORS: dict[str, tuple[Any, str, dict[str, Any], bool]] = {
    "isaac manager": (IsaacManagerEnv, "policy", {}, True),
    "isaac manager final": (lambda: IsaacManagerEnv(final_obs=True), "policy", {}, False),
    "isaac manager disabled": (lambda: IsaacManagerEnv(DISABLED), "policy", {}, False),
    "isaac direct": (IsaacDirectEnv, "policy", {}, True),
    "isaac direct final": (lambda: IsaacDirectEnv(final_obs=True), "policy", {}, False),
    "mjlab same step": (MjlabEnv, "actor", {"autoreset_mode": "SameStep"}, True),
    "mjlab disabled": (lambda: MjlabEnv(False), "actor", {"autoreset_mode": "Disabled"}, False),
    "maniskill": (maniskill, "observation", {}, False),
    "genesis": (GenesisEnv, "observation", {"autoreset_mode": "SameStep"}, True),
    "genesis tensordict": (lambda: GenesisEnv(True), "policy", {"autoreset_mode": "SameStep"}, True),
    "genesis final": (lambda: GenesisEnv(True, True), "policy", {"autoreset_mode": "SameStep"}, False),
    "rsl_rl": (RslVecEnv, "policy", {"autoreset_mode": "SameStep"}, True),
    "legged_gym": (lambda: LeggedRobot(False), "observation", {"autoreset_mode": "SameStep"}, True),
    "legged_gym privileged": (LeggedRobot, "policy", {"autoreset_mode": "SameStep"}, True),
    "playground": (PlaygroundEnv, "state", {"autoreset_mode": "SameStep"}, True),
    "playground asymmetric": (lambda: PlaygroundEnv(True), "state", {"autoreset_mode": "SameStep"}, True),
}


@pytest.mark.parametrize("name", SIMULATORS)
def test_every_row_of_a_simulator(name: str) -> None:
    make, key, arguments, hidden = SIMULATORS[name]
    collector = Collector(as_vector_env(make(), **arguments), frames_per_batch=30, total_frames=90)
    ends = unknown = 0
    seen = []
    for batch in collector:
        assert audit(batch) == []
        unknown += check_rows(batch, key, hidden=hidden)
        ends += int(batch["next", "done"].sum())
        seen += batch[key].tolist()
    assert len({tuple(row) for row in seen}) == len(seen) == 90
    assert ends >= 20
    assert unknown == (ends if hidden else 0)


@pytest.mark.parametrize("name", SIMULATORS)
def test_the_contract_kit_on_a_simulator(name: str) -> None:
    make, _, arguments, _ = SIMULATORS[name]
    if name == "rsl_rl":
        with pytest.warns(UserWarning, match="RslVecEnv has no reset: its running episodes continue"):
            assert vector_env_problems(as_vector_env(make(), **arguments), steps=40) == []
    else:
        check_vector_env(as_vector_env(make(), **arguments), steps=40)


# --- a final observation that is not there in every step -----------------------------------------------------


@pytest.mark.parametrize(
    ("make", "key", "where"),
    [
        (lambda: IsaacManagerEnv(final_obs=True), "policy", "final_obs"),
        (maniskill, "observation", "final_observation"),
        (maniskill, "observation", lambda info, done: info.get("final_observation")),
    ],
)
def test_a_named_final_observation_that_only_ending_steps_show(make: Any, key: str, where: Any) -> None:
    env = as_vector_env(make(), final_obs=where)
    batch = next(Collector(env, frames_per_batch=30))
    assert check_rows(batch, key) == 0
    assert ("collector", "next_known") not in batch.keys(True)


def test_a_final_observation_that_some_ends_lack_is_a_problem() -> None:
    class Forgets(ManiSkillVectorEnv):
        count = 0

        def step(self, actions: Any) -> Any:
            *result, infos = super().step(actions)
            self.count += "final_observation" in infos
            if self.count == 3:
                infos.pop("final_observation", None)
            return *result, infos

    (problem,) = vector_env_problems(Forgets(TimeLimitWrapper(ManiSkillBase())), steps=20)
    assert "steps that ended episodes: it must be in all of them or in none" in problem


# --- where an env is, and what it is asked -------------------------------------------------------------------


def test_wrapping_playground_s_env_does_not_reset_it() -> None:
    env = PlaygroundEnv()
    adapted = as_vector_env(env, autoreset_mode="SameStep")
    assert env.resets == 0
    assert adapted.single_observation_space["state"].shape == (3,)  # type: ignore[index]


def test_an_env_without_a_device_is_where_its_tensors_are() -> None:
    env = RslVecEnv("meta")
    del env.device
    assert as_vector_env(env, autoreset_mode="SameStep").capabilities.device.type == "meta"  # type: ignore[attr-defined]


def test_tensors_on_another_device_than_expected() -> None:
    env = as_vector_env(RslVecEnv("meta"), autoreset_mode="SameStep", device="cpu")
    with pytest.raises(
        ValueError, match=r"device='cpu' was expected, but RslVecEnv returns tensors on 'meta'.*device='meta'"
    ):
        env.reset()


def test_an_env_without_reset_begins_where_it_stands() -> None:
    env = as_vector_env(RslVecEnv(), autoreset_mode="SameStep")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = env.reset()[0]["policy"].tolist()
    env.step(torch.zeros(3, 2))
    with pytest.warns(UserWarning, match="has no reset"):
        assert env.reset()[0]["policy"].tolist() == [[i, e, t + 1] for i, e, t in first]
    with pytest.raises(ValueError, match="must be able to reset chosen envs"):
        as_vector_env(RslVecEnv(), autoreset_mode="Disabled")


def test_privileged_observations_of_legged_gym() -> None:
    env = as_vector_env(LeggedRobot(), autoreset_mode="SameStep")
    assert env.single_observation_space["critic"].shape == (4,)  # type: ignore[index]
    batch = next(Collector(env, frames_per_batch=30))
    assert torch.equal(batch["critic"][:, :3], batch["policy"])
    assert (batch["critic"][:, 3] == 7).all()


def test_isaac_s_direct_env_cannot_leave_resets_to_others() -> None:
    with pytest.raises(ValueError, match=r"must be able to reset chosen envs.*IsaacDirectEnv cannot"):
        as_vector_env(IsaacDirectEnv(DISABLED))


def test_unknown_ends_are_counted_in_the_summary() -> None:
    batch = next(Collector(as_vector_env(MjlabEnv(), autoreset_mode="SameStep"), frames_per_batch=30))
    ends, truncated = (int(batch["next", name].sum()) for name in ("done", "truncated"))
    assert describe(batch).splitlines()[2] == (
        f"{ends} of these ends have no last observation, {truncated} of them truncated"
    )
    known = next(Collector(as_vector_env(MjlabEnv(False), autoreset_mode="Disabled"), frames_per_batch=30))
    assert "no last observation" not in describe(known)


# --- what is refused, and the way out ------------------------------------------------------------------------


def test_maniskill_s_base_env_is_sent_to_its_vector_env() -> None:
    made = TimeLimitWrapper(ManiSkillBase())

    class MyTask(ManiSkillBase):
        """A task of a user, in another module."""

    for env, mode in ((made, None), (made, "Disabled"), (made.unwrapped, "SameStep"), (MyTask(), "SameStep")):
        with pytest.raises(TypeError, match=r"gymnasium\.ManiSkillVectorEnv\(gym\.make\(\.\.\.\)\)"):
            as_vector_env(env, autoreset_mode=mode)
    batch = next(Collector(as_vector_env(MyTask(ENDLESS), autoreset_mode="Disabled"), frames_per_batch=30))
    assert check_rows(batch, "observation", ENDLESS) == 0


def test_a_time_limit_around_a_simulator_is_not_lost_in_silence() -> None:
    env = gym.wrappers.TimeLimit(IsaacManagerEnv(DISABLED), 5)
    with pytest.raises(TypeError, match=r"\(TimeLimit\) around a vector env.*no time limit: StepCounter"):
        as_vector_env(env)
    batch = next(Collector(StepCounter(IsaacManagerEnv(DISABLED), max_steps=2), frames_per_batch=30))
    assert int(batch["step_count"].max()) == 1


def test_an_env_that_declares_no_mode() -> None:
    for env in (MjlabEnv(), RslVecEnv(), LeggedRobot(), GenesisEnv(), PlaygroundEnv()):
        with pytest.raises(TypeError, match=r"autoreset_mode is needed.*most GPU simulators: 'SameStep'"):
            as_vector_env(env)  # type: ignore[arg-type]


def test_a_mode_that_contradicts_the_simulator_s_own_switch() -> None:
    for env, wrong, right in (
        (MjlabEnv(), "Disabled", "SameStep"),
        (MjlabEnv(False), "SameStep", "Disabled"),
    ):
        with pytest.raises(
            ValueError, match=rf"autoreset_mode='{wrong}' is not what MjlabEnv does.*'{right}'"
        ):
            as_vector_env(env, autoreset_mode=wrong)
    quiet = ManiSkillVectorEnv(TimeLimitWrapper(ManiSkillBase()), auto_reset=False)
    for env in (quiet, MjlabEnv(False)):  # the first declares SAME_STEP all the same
        key = "observation" if env is quiet else "actor"
        batch = next(Collector(as_vector_env(env), frames_per_batch=30))
        assert check_rows(batch, key) == 0


def test_a_simulator_that_steps_other_rows_than_it_says() -> None:
    env = GenesisEnv()
    env.num_envs = 4
    env.reset = lambda: (env.get_observations(), None)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"one row for each of num_envs=4 envs, got 3 from GenesisEnv"):
        as_vector_env(env, autoreset_mode="SameStep").reset()
    with pytest.raises(ValueError, match="num_envs=4 was expected, but the env has 3"):
        as_vector_env(MjlabEnv(), autoreset_mode="SameStep", num_envs=4)


def test_entries_that_the_declared_space_lacks_or_has_alone() -> None:
    env = IsaacManagerEnv()
    env.single_observation_space = gym.spaces.Dict(policy=env.single_observation_space["policy"])
    adapted = as_vector_env(env)
    text = r"observation of IsaacManagerEnv has entries .* left out: \['critic'\]. Declare them"
    with pytest.warns(UserWarning, match=text):
        adapted.reset()
    adapted.reset()  # warns once
    env.single_observation_space = gym.spaces.Dict(
        policy=env.single_observation_space["policy"], depth=gym.spaces.Box(0, 1, (2,))
    )
    with pytest.raises(ValueError, match=r"must have all entries .* and lacks \['depth'\]: return them"):
        as_vector_env(env).reset()


def test_results_of_other_shapes_than_the_reset_s() -> None:
    class Changes(MjlabEnv):
        def __init__(self, change: Any) -> None:
            super().__init__()
            self.change = change

        def step(self, action: Any) -> Any:
            obs, *results = super().step(action)
            return self.change(obs, *results)

    def part(obs: Any, *results: Any) -> Any:
        return {key: leaf[:1] for key, leaf in obs.items()}, *results

    def narrow(obs: Any, *results: Any) -> Any:  # one column would fill all of them
        return {key: leaf[:, :1] for key, leaf in obs.items()}, *results

    def lacks(obs: Any, *results: Any) -> Any:
        return {"actor": obs["actor"]}, *results

    def one_flag(obs: Any, reward: Any, terminated: Any, *results: Any) -> Any:
        return obs, reward, terminated[:1], *results

    for change, text in (
        (
            part,
            r"step's observations must have .* from reset, \{'actor': \(3, 3\).*got \{'actor': \(1, 3\).* Changes",
        ),
        (narrow, r"step's observations must have .* got \{'actor': \(3, 1\)"),
        (lacks, r"step's observations must have .* got \{'actor': \(3, 3\)\} from"),
        (one_flag, r"terminated must be one flag for each of 3 envs, got shape \(1,\) from Changes"),
    ):
        with pytest.raises(ValueError, match=text):
            next(Collector(as_vector_env(Changes(change), autoreset_mode="SameStep"), frames_per_batch=30))

    class OneFinal(IsaacManagerEnv):  # one row would fill all of them
        def step(self, action: Any) -> Any:
            result = super().step(action)
            if "final_obs" in self.extras:
                self.extras["final_obs"] = {key: leaf[:1] for key, leaf in self.extras["final_obs"].items()}
            return result

    with pytest.raises(ValueError, match=r"the final observations must have .* got \{'policy': \(1, 3\)"):
        next(Collector(OneFinal(final_obs=True), frames_per_batch=30))


def test_final_observations_that_the_reset_overwrites() -> None:
    class Genesis(GenesisEnv):
        def step(self, action: Any) -> Any:
            obs, *results, extras = super().step(action)
            return obs, *results, {**extras, "final_obs": self.obs_buf}

    class Isaac(IsaacDirectEnv):  # whose _get_observations returns a buffer
        def step(self, action: Any) -> Any:
            obs, *results, extras = super().step(action)
            return obs, *results, {**extras, "final_obs": self._obs()} if "final_obs" in extras else extras

    for env in (Genesis(), Isaac(final_obs=True)):
        with pytest.raises(
            ValueError, match=r"are in the same memory .* the reset has overwritten them: clone them"
        ):
            next(Collector(as_vector_env(env, autoreset_mode="SameStep"), frames_per_batch=30))


def test_float_dones_of_any_shape() -> None:
    class Columns(PlaygroundEnv):
        def step(self, action: Any) -> Any:
            obs, reward, done, extras = super().step(action)
            return obs, reward[:, None], done[:, None], extras

    batch = next(Collector(as_vector_env(Columns(), autoreset_mode="SameStep"), frames_per_batch=30))
    assert check_rows(batch, "state", hidden=True) > 0


def test_a_step_of_another_number_of_values() -> None:
    class Six(MjlabEnv):
        def step(self, action: Any) -> Any:
            return *super().step(action), None

    env = as_vector_env(Six(), autoreset_mode="SameStep")
    env.reset()
    with pytest.raises(TypeError, match="got 6 values from Six: write a flatroll"):
        env.step(torch.zeros(3, 2))


def test_observations_that_are_not_finite() -> None:
    class Explodes(MjlabEnv):
        def step(self, action: Any) -> Any:
            obs, *rest = super().step(action)
            obs["actor"][obs["actor"][:, 2] == 3] = torch.nan
            return obs, *rest

    env = as_vector_env(Explodes(), autoreset_mode="SameStep")
    assert any("has NaN: end the episode" in text for text in vector_env_problems(env, steps=20))
    assert {finding.rule for finding in audit(next(Collector(env, frames_per_batch=30)))} == {"nan"}
