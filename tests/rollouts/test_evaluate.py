"""`evaluate` plays whole episodes, the same number in each sub-env, and lets nothing learn."""

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.wrappers.vector import NormalizeObservation
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Categorical

from flatroll.modules import GRUModule
from flatroll.rollouts import Evaluation, Evaluator, bootstrap_mean, evaluate, interquartile_mean, rollout
from flatroll.wrappers import MarkerWrapper, RewardSum, StepCounter, TrajId, as_vector_env
from flatroll.wrappers.testing import Script, ScriptedTorchEnv, ScriptedVectorEnv, make_scripted

MODES = ("NextStep", "SameStep", "Disabled")
#: Episodes of 2 steps and of 20: their mean length is 11, that of the first ones to end is less.
UNEQUAL = Script(2, lengths=[[2], [20]])


class OneAStep(gym.vector.VectorRewardWrapper):
    """Pays 1 for each step, so that a return is a length."""

    def rewards(self, reward: Any) -> Any:
        return reward * 0 + 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["sync", "native"])
def test_short_episodes_count_as_often_as_long_ones(mode: Any, backend: Any) -> None:
    env = OneAStep(as_vector_env(make_scripted(UNEQUAL, backend=backend, autoreset_mode=mode)))
    found = evaluate(env, episodes=10, seed=0)
    assert found.mean == 11.0 and found.lengths.double().mean() == 11.0
    assert found.envs.tolist() == [0] * 5 + [1] * 5
    assert found.returns.dtype is torch.float64 and found.lengths.dtype is torch.int64
    batch = rollout(env, num_steps=60, seed=0)
    ends = batch["next", "done"].squeeze(-1)
    assert ends.sum() == 33  # of which the first ten would have a mean length below 4
    assert len(found) == 10 and found.seconds > 0 and str(found).startswith("return 11 [")


def test_episodes_that_do_not_divide_go_to_the_last_envs() -> None:
    env = ScriptedVectorEnv(Script(3, lengths=[[1, 2, 3], [4], [5, 6]]))
    found = evaluate(env, episodes=5, seed=0)
    assert found.envs.tolist() == [0, 1, 1, 2, 2]
    assert found.lengths.tolist() == [1, 4, 4, 5, 6]
    # the reward of step t of episode e is 100 e + t + 1
    assert found.returns.tolist() == [1.0, 10.0, 410.0, 15.0, 621.0]
    assert evaluate(env, episodes=1, seed=0).envs.tolist() == [2]


def test_a_torch_env_is_looked_at_now_and_then() -> None:
    script = Script(3, lengths=[[1, 2, 3], [4], [5, 6]])
    env = ScriptedTorchEnv(script)
    found = evaluate(env, lambda obs: torch.zeros(3, dtype=torch.int64), episodes=9, seed=0)
    same = evaluate(ScriptedVectorEnv(script), episodes=9, seed=0)
    assert torch.equal(found.returns, same.returns) and torch.equal(found.lengths, same.lengths)


class Wins(gym.Wrapper[Any, Any, Any, Any]):
    """Says in ``info`` of an episode's last step whether it was won, and the position at each step."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        info |= {"position": np.array([reward, 0.5])}
        if terminated or truncated:
            info["is_success"] = terminated
        return obs, reward, terminated, truncated, info


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_entries_of_info_are_those_of_the_last_step(mode: str) -> None:
    single = [partial(make_single, 0, (2, 3)), partial(make_single, 1, (4, 1))]
    env = gym.vector.SyncVectorEnv(single, autoreset_mode=gym.vector.AutoresetMode(mode))
    found = evaluate(env, episodes=4, seed=0, info_keys=["is_success", "position"])
    assert found.info["is_success"].tolist() == [True, False, True, False]
    assert found.info["position"][:, 0].tolist() == [2.0, 103.0, 4.0, 101.0]
    with pytest.raises(KeyError, match="info_keys has 'nothing', which was in no step's info"):
        evaluate(env, episodes=2, info_keys=["nothing"])


def make_single(index: int, lengths: tuple[int, ...]) -> gym.Env[Any, Any]:
    from flatroll.wrappers.testing import ScriptedEnv

    return Wins(ScriptedEnv(Script(2, lengths=[list(lengths)] * 2), index))


def test_probabilistic_modules_give_their_modes() -> None:
    seen: list[Tensor] = []

    def note(obs: Tensor) -> Tensor:
        return torch.tensor([[0.0, 0.1, 0.2, 0.3, 0.25]]).expand(len(obs), 5)

    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(note, ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical),
        TensorDictModule(seen.append, ["action"], []),
    )
    env = ScriptedVectorEnv(Script(2, lengths=4))
    evaluate(env, actor, episodes=2)
    assert set(torch.cat(seen).tolist()) == {3}
    seen.clear()
    state = torch.get_rng_state()
    evaluate(env, actor, episodes=20, seed=1, exploration_type="random")
    first = torch.cat(seen)
    assert len(set(first.tolist())) > 1 and torch.equal(torch.get_rng_state(), state)
    seen.clear()
    evaluate(env, actor, episodes=20, seed=1, exploration_type="random")
    assert torch.equal(torch.cat(seen), first)


class Counts(nn.Module):
    """A normalisation that would learn from what it sees, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.frozen = nn.BatchNorm1d(3), nn.Dropout(0.5), nn.BatchNorm1d(3).eval()

    def forward(self, obs: Tensor) -> Tensor:
        self.drop(self.frozen(self.norm(obs)))
        return torch.zeros(len(obs), dtype=torch.int64)


def test_nothing_learns() -> None:
    policy = TensorDictModule(Counts(), ["observation"], ["action"])
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    env = NormalizeObservation(as_vector_env(ScriptedVectorEnv(UNEQUAL)))
    inside = NormalizeObservation(ScriptedVectorEnv(UNEQUAL))
    for each in (env, inside):
        each.reset(seed=0)
        mean = each.obs_rms.mean.copy()
        evaluate(each, policy, episodes=4)
        assert (each.obs_rms.mean == mean).all() and each.update_running_mean
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    modes = [policy.module.training, policy.module.norm.training, policy.module.frozen.training]
    assert modes == [True, True, False]


def test_recurrent_states_are_carried() -> None:
    states: list[Tensor] = []
    policy = TensorDictSequential(
        GRUModule(3, 4, in_key="observation", out_key="features"),
        TensorDictModule(lambda x, s: states.append(s.clone()), ["features", "recurrent_state"], []),
        TensorDictModule(lambda x: torch.zeros(len(x), dtype=torch.int64), ["features"], ["action"]),
    )
    evaluate(ScriptedVectorEnv(Script(1, lengths=3)), policy, episodes=2, seed=0)
    moved = [bool(state.any()) for state in states]
    assert moved[:3] == [False, True, True]  # and again from zeros in the second episode
    assert moved.count(False) >= 2


def pole(mode: str | None = None) -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1", render_mode=mode)


@pytest.mark.parametrize("choice", ["best", "worst", "first"])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_the_film_is_that_of_one_episode(choice: Any, mode: str) -> None:
    script = Script(2, lengths=[[2, 4], [3, 1]])
    env = ScriptedVectorEnv(script, autoreset_mode=mode)  # type: ignore[arg-type]

    def render() -> Any:
        env_, episode, step = env.clock.observe().T.astype(np.uint8)
        return [np.full((2, 2, 3), (e, k, t)) for e, k, t in zip(env_, episode, step, strict=True)]

    env.render = render  # type: ignore[method-assign]
    found = evaluate(env, episodes=4, seed=0, film=choice)
    assert found.film is not None and found.film.dtype is torch.uint8
    shown = found.film[:, 0, 0].tolist()
    # returns 3, 410, 6, 101; the last frame of an episode is not there where the env resets in the same step
    at, length = {"best": ((0, 1), 4), "worst": ((0, 0), 2), "first": ((0, 0), 2)}[choice]
    assert shown == [[*at, t] for t in range(length + (mode == "NextStep"))]


def test_a_film_needs_pictures() -> None:
    with pytest.raises(ValueError, match="film='best' needs an env that renders one picture"):
        evaluate(ScriptedVectorEnv(UNEQUAL), episodes=2, film="best")
    with pytest.raises(ValueError, match="film must be 'best', 'worst' or 'first', got 'last'"):
        evaluate(ScriptedVectorEnv(UNEQUAL), episodes=2, film="last")  # type: ignore[arg-type]


@pytest.mark.parametrize("episodes", [0, -1, 2.5, None])
def test_bad_numbers_of_episodes(episodes: Any) -> None:
    with pytest.raises(ValueError, match="episodes must be an integer of at least 1, got"):
        evaluate(ScriptedVectorEnv(UNEQUAL), episodes=episodes)


def test_an_env_made_by_a_function_is_closed_and_one_of_the_caller_is_not() -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(ScriptedVectorEnv(UNEQUAL))
        return made[-1]

    evaluate(make, episodes=2)
    assert made[0].closed
    env = ScriptedVectorEnv(UNEQUAL)
    evaluate(env, episodes=2)
    assert not env.closed


def test_max_steps_ends_episodes_that_never_would() -> None:
    env = as_vector_env(ScriptedVectorEnv(Script(2, lengths=10**6), autoreset_mode="Disabled"))
    for _ in range(2):  # in one env, as during a training
        assert evaluate(env, episodes=4, max_steps=7).lengths.tolist() == [7] * 4


def test_deterministic_results_are_those_of_stable_baselines3() -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.evaluation import evaluate_policy

    from flatroll.trainers.sb3 import FlatVecEnv

    model = sb3.PPO("MlpPolicy", FlatVecEnv(gym.make_vec("Pendulum-v1", 3, "sync")), seed=0, device="cpu")
    theirs = FlatVecEnv(gym.make_vec("Pendulum-v1", 3, "sync"))
    theirs.seed(5)
    theirs_of: Any = evaluate_policy(model, theirs, n_eval_episodes=7, return_episode_rewards=True)
    returns, lengths = theirs_of

    def act(obs: Tensor) -> Tensor:
        return torch.from_numpy(model.predict(obs.numpy(), deterministic=True)[0])

    ours = evaluate(gym.make_vec("Pendulum-v1", 3, "sync"), act, episodes=7, seed=5)
    assert sorted(ours.returns.tolist()) == sorted(map(float, returns))
    assert sorted(ours.lengths.tolist()) == sorted(lengths)


def test_the_interval_covers_the_true_mean_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.empty(300, 60).exponential_(generator=generator)
    inside = 0
    for values in draws:
        found = bootstrap_mean(values, resamples=400)
        inside += found.low <= 1.0 <= found.high
    assert 0.90 <= inside / 300 <= 0.97  # 95 % but for the skew of so few numbers
    many = torch.randn(4000, generator=generator, dtype=torch.float64)
    found = bootstrap_mean(many)
    error = float(many.std()) / 4000**0.5
    assert found.value == pytest.approx(float(many.mean()))
    assert found.high - found.value == pytest.approx(1.96 * error, rel=0.08)
    assert found.value - found.low == pytest.approx(1.96 * error, rel=0.08)
    assert bootstrap_mean(many) == found


def test_the_interquartile_mean_is_that_of_rliable() -> None:
    """A mean without a quarter (rounded down) of all scores at either end; seeds are drawn within tasks."""
    scores = torch.tensor([[3.0, 30.0], [1.0, 10.0], [2.0, 20.0], [5.0, 50.0], [4.0, 40.0]])
    ordered = scores.flatten().sort().values[2:-2]
    found = interquartile_mean(scores)
    assert found.value == pytest.approx(float(ordered.mean()))
    assert 3.0 < found.low < found.value < found.high < 50.0
    tied = interquartile_mean(torch.tensor([[1.0, 5.0]] * 4))  # equal seeds: no spread, though tasks differ
    assert tied == (3.0, 3.0, 3.0)
    runs = [
        Evaluation(torch.full((2,), x), torch.ones(2), torch.ones(2), {}, 0.0) for x in (1.0, 2.0, 4.0, 9.0)
    ]
    assert interquartile_mean(runs).value == 3.0
    with pytest.raises(ValueError, match=r"scores must have shape \[seeds\] or \[seeds, tasks\]"):
        interquartile_mean(torch.zeros(2, 2, 2))
    with pytest.raises(ValueError, match="at least one number"):
        interquartile_mean([])
    with pytest.raises(ValueError, match=r"confidence must lie in \(0, 1\), got 95"):
        bootstrap_mean(torch.ones(3), confidence=95)


class Presses(nn.Module):
    """Presses one button, whose number is its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.button = nn.Parameter(torch.tensor(0.0))

    def forward(self, obs: Tensor) -> Tensor:
        return self.button.long().expand(len(obs))


class PaysTheButton(gym.vector.VectorWrapper):
    def step(self, actions: Any) -> Any:
        obs, _, *rest = self.env.step(actions)
        return obs, np.asarray(actions, np.float32), *rest


def test_the_callback_keeps_the_best_weights_and_stops() -> None:
    policy = Presses()
    make: Callable[[], Any] = lambda: PaysTheButton(as_vector_env(ScriptedVectorEnv(Script(2, lengths=2))))  # noqa: E731
    check = Evaluator(make(), policy, episodes=4, every=100, stop_at=8.0, seed=0)
    stops: list[bool] = []
    state: dict[str, Any] = {}
    for frames, button in ((50, 4.0), (100, 2.0), (150, 4.0), (200, 1.0), (310, 3.0), (410, 4.0)):
        with torch.no_grad():
            policy.button.fill_(button)
        stops.append(check(frames))
        if frames == 310:
            state = check.state_dict()
    assert stops == [False, False, False, False, False, True]
    assert [(frames, found.mean) for frames, found in check.history] == [
        (100, 4.0), (200, 2.0), (310, 6.0), (410, 8.0),
    ]  # fmt: skip
    assert (check.best_frames, check.best_mean) == (410, 8.0)
    resumed = Evaluator(make(), policy, episodes=4, every=100, seed=0)
    resumed.load_state_dict(state)
    assert (resumed.best_frames, resumed.best_mean) == (310, 6.0) and resumed.best_weights is not None
    assert resumed.best_weights["button"] == 3.0  # a copy: the policy has gone on
    assert not resumed(400) and not resumed.history and not resumed(411) and len(resumed.history) == 1
    policy.load_state_dict(resumed.best_weights)
    with pytest.raises(TypeError, match=r"policy must be an nn.Module, whose weights are kept, got function"):
        Evaluator(make(), lambda obs: obs, episodes=1, every=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every must be an integer of at least 1, got 0"):
        Evaluator(make(), policy, episodes=1, every=0)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_info_keys_may_name_the_columns_of_markers(mode: str, framework: str) -> None:
    class Twice(MarkerWrapper):
        """Twice the number of the returned observation's step."""

        def __init__(self, env: Any) -> None:
            super().__init__(env, "twice")

        def _on_reset(self, obs: Any, info: Any, rows: Any) -> None:
            info["twice"] = obs[:, 2] * 2

        def step(self, actions: Any) -> Any:
            result = self.env.step(actions)
            result[4]["twice"] = result[0][:, 2] * 2
            return result

    lengths = [[3, 1, 4], [2, 5]]
    bare = as_vector_env(make_scripted(Script(2, lengths=lengths), autoreset_mode=mode), framework=framework)
    env = RewardSum(StepCounter(TrajId(Twice(bare))), out_key=("my", "sum"))
    names = [("my", "sum"), "sum", "step_count", ("collector", "traj_ids"), "twice"]
    found = evaluate(env, episodes=4, info_keys=names)
    assert found.lengths.tolist() == [3, 1, 2, 5]
    assert found.info["my", "sum"].tolist() == found.info["sum"].tolist() == found.returns.tolist()
    assert found.info["step_count"].tolist() == [3, 1, 2, 5]
    # of the row's own observation, which is the one before the last
    assert found.info["twice"].tolist() == [4, 0, 2, 8]
    assert len(set(found.info["collector", "traj_ids"].tolist())) == 4
    ours = evaluate(gym.make("CartPole-v1"), episodes=2, seed=0, max_steps=9, info_keys=["step_count"])
    assert ours.info["step_count"].tolist() == [9, 9]
