"""as_vector_env: one contract and one stream of transitions, whatever env goes in."""

import gc
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from flatroll.rollouts import rollout
from flatroll.wrappers import InitTracker, as_vector_env
from flatroll.wrappers.testing import (
    Script,
    ScriptedEnv,
    ScriptedRslEnv,
    ScriptedTorchEnv,
    ScriptedVectorEnv,
    decode,
    expected_rows,
    make_scripted,
)
from flatroll.wrappers.testing.check_env import copied

MODES = ("NextStep", "SameStep", "Disabled")
LENGTHS = [[3, 1, 4], [2, 5]]
ENDS = [["terminated", "truncated", "both"], ["truncated", "terminated"]]
STEPS = 30


def script(**arguments: Any) -> Script:
    return Script(2, **{"lengths": LENGTHS, "ends": ENDS, **arguments})


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict | tuple):
        children = tree.values() if isinstance(tree, dict) else tree
        return [leaf for child in children for leaf in leaves(child)]
    return [tree]


def zeros(env: VectorEnv[Any, Any, Any]) -> Any:
    env.action_space.seed(0)
    return env.action_space.sample()


def transitions(env: VectorEnv[Any, Any, Any], kind: Any, steps: int = STEPS) -> list[tuple[Any, ...]]:
    """(from, to, reward, terminated, truncated) of each transition, by the public contract alone."""
    obs, _ = env.reset(seed=0)
    before = decode(kind, obs)
    pending = np.zeros(env.num_envs, bool)
    same_step = env.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    rows = []
    for _ in range(steps):
        obs, reward, terminated, truncated, info = env.step(zeros(env))
        after, done = decode(kind, obs), np.asarray(terminated | truncated)
        ends = decode(kind, info["final_obs"]) if same_step else after
        for i in range(env.num_envs):
            to = ends[i] if done[i] else after[i]
            if not pending[i]:
                flags = float(reward[i]), bool(terminated[i]), bool(truncated[i])
                rows.append((tuple(before[i].tolist()), tuple(to.tolist()), *flags))
        before, pending = after, done & (not same_step)
    return rows


def true_rows(script: Script, mode: Any, steps: int = STEPS) -> list[tuple[Any, ...]]:
    table = expected_rows(script, steps, autoreset_mode=mode)
    columns = ["env", "episode", "step", "reward", "terminated", "truncated"]
    return [((i, e, t), (i, e, t + 1), r, term, trunc) for i, e, t, r, term, trunc in table[columns].tolist()]


# --- the stream ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float32", "float64", "uint8", "int64", "discrete", "dict", "tuple"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["sync", "native"])
def test_each_transition_once_with_its_true_next_observation(backend: Any, mode: Any, kind: Any) -> None:
    env = as_vector_env(make_scripted(script(obs=kind), backend=backend, autoreset_mode=mode))
    assert transitions(env, kind) == true_rows(script(), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options", [{}, {"shared_memory": False}, {"copy": False}], ids=["plain", "pipe", "no_copy"]
)
def test_async_envs_give_the_same_stream(mode: Any, options: dict[str, bool]) -> None:
    env = as_vector_env(make_scripted(script(obs="dict"), backend="async", autoreset_mode=mode, **options))
    try:
        assert transitions(env, "dict", 12) == true_rows(script(), mode, 12)
    finally:
        env.close()


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
@pytest.mark.parametrize("kind", ["float32", "dict"])
@pytest.mark.parametrize("backend", ["sync", "native"])
def test_envs_that_reuse_their_buffers(backend: Any, mode: Any, kind: Any) -> None:
    env = make_scripted(script(obs=kind), backend=backend, autoreset_mode=mode, reuse_buffer=True, copy=False)
    assert transitions(as_vector_env(env), kind) == true_rows(script(), mode)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_same_step_over_envs_that_reuse_their_buffer_is_refused(backend: Any) -> None:
    env = make_scripted(script(), backend=backend, autoreset_mode="SameStep", reuse_buffer=True)
    try:
        with pytest.raises(ValueError, match=r"writes each observation into the same array.*'NextStep'"):
            transitions(as_vector_env(env), "float32")
    finally:
        env.close()


class ReusesItsImage(ScriptedEnv):
    """Writes every image into one array, as simulators with a frame buffer do; the rest is fresh."""

    frame: Any = None

    def _observe(self) -> Any:
        obs = super()._observe()
        if self.frame is None:
            self.frame = obs["critic"]["image"]
        np.copyto(self.frame, obs["critic"]["image"])
        obs["critic"]["image"] = self.frame
        return obs


def mixed_leaves() -> SyncVectorEnv:
    fns = [lambda i=i: ReusesItsImage(script(obs="dict"), i) for i in range(2)]
    return SyncVectorEnv(fns, autoreset_mode="SameStep")


def mixed_envs() -> SyncVectorEnv:
    fns = [lambda i=i: ScriptedEnv(script(), i, reuse_buffer=i == 0) for i in range(2)]
    return SyncVectorEnv(fns, autoreset_mode="SameStep")


@pytest.mark.parametrize("make", [mixed_leaves, mixed_envs])
def test_same_step_over_envs_of_which_a_part_reuses_its_buffer_is_refused(make: Any) -> None:
    env = as_vector_env(make())
    with pytest.raises(ValueError, match="into the same array"):
        transitions(env, "dict" if make is mixed_leaves else "float32")


def test_a_native_same_step_env_that_reuses_its_buffers() -> None:
    for final_obs in ("object", "dense"):
        env = ScriptedVectorEnv(script(), autoreset_mode="SameStep", final_obs=final_obs, reuse_buffer=True)  # type: ignore[arg-type]
        assert transitions(as_vector_env(env), "float32") == true_rows(script(), "SameStep")


@pytest.mark.parametrize("final_obs", ["dense", "ids"])
@pytest.mark.parametrize("kind", ["float32", "uint8", "dict"])
def test_torch_envs_give_the_same_stream(final_obs: Any, kind: Any) -> None:
    env = as_vector_env(ScriptedTorchEnv(script(obs=kind), final_obs=final_obs, reuse_obs=True))
    assert transitions(env, kind) == true_rows(script(), "SameStep")


def test_torch_envs_without_autoreset() -> None:
    env = as_vector_env(ScriptedTorchEnv(script(), autoreset=False, reuse_obs=True))
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert transitions(env, "float32") == true_rows(script(), "SameStep")


def test_a_plain_env_becomes_a_vector_of_one() -> None:
    one = Script(1, lengths=[[3, 1, 4]], ends="both")
    env = as_vector_env(ScriptedEnv(one, reuse_buffer=True))
    assert env.num_envs == 1
    assert transitions(env, "float32") == true_rows(one, "SameStep")


def test_a_limited_gymnasium_env_is_truncated_with_its_last_observation() -> None:
    env = as_vector_env(gym.make("CartPole-v1", max_episode_steps=2))
    env.reset(seed=0)
    first = env.step(np.array([0]))[0]
    obs, _, terminated, truncated, info = env.step(np.array([0]))
    assert (terminated.tolist(), truncated.tolist()) == ([False], [True])
    twin = gym.make("CartPole-v1")
    twin.reset(seed=0)
    assert np.array_equal(twin.step(0)[0], first[0])
    assert np.array_equal(twin.step(0)[0], info["final_obs"][0])
    assert not np.array_equal(obs, info["final_obs"])


def test_a_reset_while_an_autoreset_is_pending_is_clean() -> None:
    """Workers of AsyncVectorEnv(shared_memory=False) keep their pending autoreset through a reset."""
    for shared in (True, False):
        env = as_vector_env(make_scripted(Script(2, lengths=2), backend="async", shared_memory=shared))
        try:
            env.reset(seed=0)
            for _ in range(2):
                env.step(np.array([0, 0]))
            env.reset(seed=0)
            obs, reward, *_ = env.step(np.array([0, 0]))
            assert obs.tolist() == [[0, 0, 1], [1, 0, 1]]
            assert reward.tolist() == [1, 1]
        finally:
            env.close()


# --- the contract -------------------------------------------------------------------------------------------


@pytest.fixture(params=[f"{b} {m}" for b in ("sync", "native") for m in MODES] + ["torch", "single"])
def adapted(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "torch":
        yield as_vector_env(ScriptedTorchEnv(script(obs="dict")))
    elif request.param == "single":
        yield as_vector_env(ScriptedEnv(script(obs="dict")))
    else:
        backend, mode = request.param.split()
        env = as_vector_env(make_scripted(script(obs="dict"), backend=backend, autoreset_mode=mode))
        yield env
        env.close()


def test_spaces_mode_dtypes_and_shapes(adapted: Any) -> None:
    env, rows = adapted, (adapted.num_envs,)
    assert isinstance(env, VectorEnv)
    assert env.observation_space == batch_space(env.single_observation_space, env.num_envs)
    assert env.action_space == batch_space(env.single_action_space, env.num_envs)
    assert env.metadata["autoreset_mode"] in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)
    obs, _ = env.reset(seed=0)
    for _ in range(8):
        shapes = obs["policy"].shape, obs["critic"]["code"].shape, obs["critic"]["image"].shape
        assert shapes == ((*rows, 3), rows, (*rows, 3, 2, 2))
        obs, reward, terminated, truncated, info = env.step(zeros(env))
        assert str(reward.dtype).endswith("float32")
        assert str(terminated.dtype).endswith("bool")
        assert str(truncated.dtype).endswith("bool")
        assert tuple(reward.shape) == tuple(terminated.shape) == tuple(truncated.shape) == rows
        if env.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP:
            final = leaves(info["final_obs"])
            assert [(f.shape, f.dtype) for f in final] == [(o.shape, o.dtype) for o in leaves(obs)]


def test_declared_modes_and_folding() -> None:
    # All are made before the first is adapted: Gymnasium before 1.4 keeps the last mode for all of them.
    envs = [make_scripted(script(), autoreset_mode=mode) for mode in MODES]  # type: ignore[arg-type]
    before = dict(ScriptedEnv.metadata)
    for env, declared in zip(envs, ("NEXT_STEP", "SAME_STEP", "SAME_STEP"), strict=True):
        assert as_vector_env(env).metadata["autoreset_mode"] is AutoresetMode[declared]
    assert ScriptedEnv.metadata == before
    assert "autoreset_mode" not in VectorEnv.metadata


def test_batches_kept_in_a_list_stay_unchanged(adapted: Any) -> None:
    env = adapted
    kept = leaves(env.reset(seed=0)[0])
    were = [copied(array) for array in kept]
    for _ in range(12):
        obs, reward, terminated, truncated, info = env.step(zeros(env))
        new = [*leaves(obs), reward, terminated, truncated, *leaves(info.get("final_obs", ()))]
        kept += new
        were += [copied(array) for array in new]
    assert all(np.array_equal(copied(a), b) for a, b in zip(kept, were, strict=True))


def test_a_dropped_adapter_leaves_the_env_open(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # envs of other tests, which Gymnasium closes before 1.3 when they are collected
    closed: list[int] = []
    monkeypatch.setattr(ScriptedEnv, "close", lambda env: closed.append(env.index))
    single, vector = ScriptedEnv(script(), 1), make_scripted(script())
    for env in (single, vector):
        stack: Any = InitTracker(env)
        stack.reset()
        del stack
        gc.collect()
    assert closed == []
    InitTracker(single).close()
    as_vector_env(vector).close()
    assert closed == [1, 0, 1]


def test_an_adapted_env_comes_back_as_it_is() -> None:
    env = as_vector_env(make_scripted(script()))
    assert as_vector_env(env) is env
    stack = InitTracker(env)
    assert as_vector_env(stack) is stack


def test_info_passes_through() -> None:
    env = as_vector_env(make_scripted(script()))
    _, info = env.reset()
    assert info["t"].tolist() == [0, 0]
    assert env.step(np.array([0, 0]))[4]["t"].tolist() == [1, 1]


def test_step_before_reset() -> None:
    with pytest.raises(RuntimeError, match=r"call env.reset\(\) first"):
        as_vector_env(make_scripted(script())).step(np.array([0, 0]))


def test_an_adapted_env_can_be_shown(adapted: Any) -> None:
    assert "VectorStream" in repr(adapted)


def test_closing_closes_the_env() -> None:
    env = ScriptedTorchEnv(script())
    as_vector_env(env).close()
    assert env.closed


def test_the_number_of_envs_can_be_asked_for() -> None:
    assert as_vector_env(make_scripted(script()), num_envs=2).num_envs == 2
    with pytest.raises(ValueError, match="num_envs=3 was expected, but the env has 2"):
        as_vector_env(make_scripted(script()), num_envs=3)


# --- the autoreset mode is never guessed --------------------------------------------------------------------


@pytest.mark.parametrize(
    "env",
    [
        lambda: ScriptedVectorEnv(script(), autoreset_mode=None),
        lambda: ScriptedTorchEnv(script(), declare=False),
        lambda: ScriptedRslEnv(script(action="box")),
    ],
)
def test_an_env_without_a_mode_is_refused(env: Any) -> None:
    with pytest.raises(TypeError, match=r"autoreset_mode is needed.*autoreset_mode='NextStep'"):
        as_vector_env(env())
    assert (
        as_vector_env(env(), autoreset_mode="SameStep").metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    )


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"autoreset_mode must be .* got 'Sometimes'"):
        as_vector_env(ScriptedVectorEnv(script(), autoreset_mode=None), autoreset_mode="Sometimes")


@pytest.mark.parametrize("wrong", [object(), lambda: ScriptedEnv(script()), "CartPole-v1"])
def test_what_is_no_env_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"env must be a gymnasium\.Env"):
        as_vector_env(wrong)


# --- spaces -------------------------------------------------------------------------------------------------


class AnySpaces(gym.Env[Any, Any]):
    def __init__(self, observation: spaces.Space[Any], action: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = observation, action


UNSUPPORTED = [
    spaces.Text(5),
    spaces.Graph(spaces.Box(-1, 1, (2,)), None),
    spaces.Sequence(spaces.Discrete(2)),
    spaces.OneOf([spaces.Discrete(2), spaces.Discrete(3)]),
]


@pytest.mark.parametrize("space", UNSUPPORTED, ids=lambda space: type(space).__name__)
def test_spaces_that_are_no_arrays_are_refused_by_name(space: spaces.Space[Any]) -> None:
    fine = spaces.Discrete(2)
    nested = spaces.Dict({"a": spaces.Tuple((fine, space))})
    for observation, action, name in ((space, fine, "observation_space"), (fine, space, "action_space")):
        with pytest.raises(TypeError, match=f"{name} .*{type(space).__name__}"):
            as_vector_env(AnySpaces(observation, action))
    with pytest.raises(TypeError, match=f"observation_space\\['a'\\]\\[1\\] .*{type(space).__name__}"):
        as_vector_env(AnySpaces(nested, fine))


# --- actions ------------------------------------------------------------------------------------------------


def received(env: Any) -> Any:
    return env.get_attr("actions")


@pytest.mark.parametrize(
    "action", [np.array([3, 4]), [3, 4], torch.tensor([3, 4]), np.array([3, 4], np.uint8)]
)
def test_discrete_actions_arrive_as_the_space_says(action: Any) -> None:
    base = make_scripted(script(), record_actions=True)
    env = as_vector_env(base)
    env.reset()
    env.step(action)
    assert received(base) == ([3], [4])
    assert received(base)[0][0].dtype == np.int64


def test_continuous_actions_are_cast_to_the_dtype_of_the_space() -> None:
    base = make_scripted(script(action="box"), record_actions=True)
    env = as_vector_env(base)
    env.reset()
    for action in (
        np.full((2, 2), 0.25),
        torch.full((2, 2), 0.25, requires_grad=True),
        np.full((2, 2), 0.25).T,
    ):
        env.step(action)
        sent = received(base)[1][-1]
        assert sent.dtype == np.float32
        assert sent.tolist() == [0.25, 0.25]


def test_nested_actions() -> None:
    base = ScriptedVectorEnv(script(action="dict"), record_actions=True)
    env = as_vector_env(base)
    env.reset()
    env.step({"move": torch.zeros(2, 2), "press": [1, 2]})
    assert base.actions[0]["press"].tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"actions must be a dict with keys \['move', 'press'\]"):
        env.step({"move": torch.zeros(2, 2)})


WRONG_ACTIONS = [
    ([0, 0, 0], ValueError, r"actions must have shape \(2,\) .*got \(3,\)"),
    (np.zeros((2, 5), np.int64), ValueError, r"actions must have shape \(2,\) .*argmax.*got \(2, 5\)"),
    (np.zeros((2, 1), np.int64), ValueError, r"squeeze\(-1\).*got \(2, 1\)"),
    (1, ValueError, r"got \(\)"),
    (np.zeros(2), TypeError, r"castable to int64 for Discrete\(5\), got float64"),
    (torch.zeros(2), TypeError, "castable to int64.*float32"),
]


@pytest.mark.parametrize("make", [make_scripted, ScriptedVectorEnv, ScriptedTorchEnv])
@pytest.mark.parametrize(("action", "kind", "text"), WRONG_ACTIONS)
def test_wrong_actions_are_errors_with_what_was_expected_and_what_came(
    make: Any, action: Any, kind: Any, text: str
) -> None:
    env = as_vector_env(make(script()))
    env.reset()
    if make is ScriptedTorchEnv and kind is TypeError:
        text = "castable to .*int64.*Discrete"
    with pytest.raises(kind, match=text):
        env.step(action)


def test_torch_envs_get_tensors_of_their_dtype() -> None:
    base = ScriptedTorchEnv(script(action="box"))
    env = as_vector_env(base)
    env.reset()
    env.step(np.full((2, 2), 0.5))
    assert isinstance(base.actions[0], torch.Tensor)
    assert base.actions[0].dtype is torch.float32


# --- resets -------------------------------------------------------------------------------------------------


def test_a_masked_reset_touches_only_its_rows_and_not_the_options() -> None:
    for base in (make_scripted(script()), ScriptedVectorEnv(script(), autoreset_mode="Disabled")):
        env = as_vector_env(base)
        env.reset(seed=0)
        env.step(np.array([0, 0]))
        for mask in (np.array([False, True]), torch.tensor([False, True])):
            options = {"reset_mask": mask, "gravity": 1}
            obs, _ = env.reset(options=options)
            assert list(options) == ["reset_mask", "gravity"]
        assert obs.tolist() == [[0, 0, 1], [1, 2, 0]]
        assert env.step(np.array([0, 0]))[0].tolist() == [[0, 0, 2], [1, 2, 1]]


def test_a_masked_reset_of_a_torch_env() -> None:
    env = as_vector_env(ScriptedTorchEnv(script(obs="dict")))
    env.reset(seed=0)
    env.step(np.array([0, 0]))
    obs, _ = env.reset(options={"reset_mask": torch.tensor([False, True])})
    assert decode("dict", obs).tolist() == [[0, 0, 1], [1, 1, 0]]


@pytest.mark.parametrize("mask", [np.array([0, 1]), np.array([True]), torch.ones(2), [[True, False]]])
def test_wrong_masks_are_refused(mask: Any) -> None:
    for base in (make_scripted(script()), ScriptedTorchEnv(script())):
        env = as_vector_env(base)
        env.reset()
        with pytest.raises(ValueError, match=r"reset_mask'\] must be bool of shape \(2,\)"):
            env.reset(options={"reset_mask": mask})


def test_an_env_that_ignores_the_mask_refuses_it() -> None:
    env = as_vector_env(gym.make_vec("CartPole-v1", num_envs=2))
    env.reset(seed=0)
    with pytest.raises(ValueError, match="CartPoleVectorEnv cannot reset chosen envs"):
        env.reset(options={"reset_mask": np.array([True, False])})


def test_disabled_needs_masked_resets() -> None:
    with pytest.raises(ValueError, match=r"DISABLED must be able to reset chosen envs.*ScriptedRslEnv"):
        as_vector_env(ScriptedRslEnv(script(action="box")), autoreset_mode="Disabled")


def test_seeds_restart_the_env() -> None:
    env = as_vector_env(gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync"))
    one, other = env.reset(seed=[3, 4])[0], env.reset(seed=3)[0]
    assert np.array_equal(one, other)


# --- torch envs ---------------------------------------------------------------------------------------------


def test_absent_final_observations_are_said_to_be_unknown() -> None:
    for env in (
        ScriptedTorchEnv(script(), final_obs="absent"),
        ScriptedVectorEnv(script(), autoreset_mode="SameStep", final_obs="absent"),
    ):
        stream: Any = as_vector_env(env)
        stream.reset(seed=0)
        for _ in range(10):
            _, _, terminated, truncated, info = stream.step(np.array([0, 0]))
            assert "final_obs" not in info or not (terminated | truncated).any()
            known = np.ones(2, bool) if stream.known is None else copied(stream.known)
            assert np.array_equal(known, ~copied(terminated | truncated))


def test_final_observations_under_another_name() -> None:
    class Renamed(ScriptedTorchEnv):
        def step(self, action: Any) -> Any:
            *result, extras = super().step(action)
            return *result, {"last": extras["final_obs"]}

    for where in ("last", lambda info, done: info["last"]):
        env = as_vector_env(Renamed(script()), final_obs=where)  # type: ignore[arg-type]
        assert transitions(env, "float32") == true_rows(script(), "SameStep")


def test_rewards_of_shape_e_1_and_integer_flags() -> None:
    class Column(ScriptedTorchEnv):
        def step(self, action: Any) -> Any:
            obs, reward, terminated, truncated, extras = super().step(action)
            return obs, reward[:, None].double(), terminated.int(), truncated[:, None], extras

    assert transitions(as_vector_env(Column(script())), "float32") == true_rows(script(), "SameStep")


@pytest.mark.parametrize("style", ["tensordict", "tensor"])
def test_rsl_envs_split_dones_into_terminated_and_truncated(style: Any) -> None:
    ends = [["terminated", "truncated"], ["truncated", "terminated"]]
    base = ScriptedRslEnv(script(action="box", ends=ends), style=style)
    env = as_vector_env(base, autoreset_mode="SameStep")
    obs, _ = env.reset()
    assert env.single_action_space.shape == (2,)
    first = obs["policy"] if style == "tensordict" else obs
    episode = int(first[0, 1])
    table = expected_rows(base._env.script, 20)
    seen = []
    for _ in range(20):
        obs, reward, terminated, truncated, _ = env.step(torch.zeros(2, 2))
        seen += list(zip(reward.tolist(), terminated.tolist(), truncated.tolist(), strict=True))
    assert episode == 1  # the base had been reset before, so the script is one episode ahead
    shifted = Script(2, lengths=[[1, 4, 3], [5, 2]], ends=[ends[0][::-1], ends[1][::-1]])
    table = expected_rows(shifted, 20)
    want = [(r + 100, a, b) for r, a, b in table[["reward", "terminated", "truncated"]].tolist()]
    assert seen == want


def test_a_seed_that_cannot_be_honoured_is_warned_of() -> None:
    env = as_vector_env(ScriptedRslEnv(script(action="box")), autoreset_mode="SameStep")
    with pytest.warns(UserWarning, match="seed"):
        env.reset(seed=3)


def test_torch_output_of_a_numpy_env() -> None:
    env = as_vector_env(make_scripted(script(obs="dict"), autoreset_mode="SameStep"), framework="torch")
    obs, _ = env.reset(seed=0)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves(obs))
    assert transitions(env, "dict") == true_rows(script(), "SameStep")
    _, reward, terminated, truncated, info = env.step(torch.tensor([0, 0]))
    assert all(
        isinstance(x, torch.Tensor) for x in (reward, terminated, truncated, *leaves(info["final_obs"]))
    )
    with pytest.raises(ValueError, match="framework='numpy' is not possible"):
        as_vector_env(ScriptedTorchEnv(script()), framework="numpy")


@pytest.mark.parametrize("final_obs", ["dense", "absent"])
def test_a_torch_env_on_meta_never_asks_for_a_value(final_obs: Any) -> None:
    env = as_vector_env(ScriptedTorchEnv(script(obs="dict"), device="meta", final_obs=final_obs))
    env.reset(seed=0)
    for _ in range(3):
        obs, reward, *_ = env.step(torch.zeros(2, dtype=torch.int64, device="meta"))
    assert reward.device.type == obs["policy"].device.type == "meta"


# --- known defects of others --------------------------------------------------------------------------------


def test_wrappers_around_functional_jax_envs_are_refused() -> None:
    class FunctionalJaxVectorEnv(ScriptedVectorEnv):
        pass

    FunctionalJaxVectorEnv.__module__ = "gymnasium.envs.functional_jax_env"

    class CartPoleJaxVectorEnv(FunctionalJaxVectorEnv):  # as those that gymnasium registers
        pass

    for kind in (FunctionalJaxVectorEnv, CartPoleJaxVectorEnv):
        with pytest.raises(ValueError, match=r"phys2d.*as_vector_env\(phys2d_env\)"):
            as_vector_env(gym.vector.VectorWrapper(kind(script())))


def test_numpy_to_torch_over_same_step_is_refused() -> None:
    pytest.importorskip("array_api_compat")
    from gymnasium.wrappers.vector import NumpyToTorch

    with pytest.raises(ValueError, match="framework='torch'"):
        as_vector_env(NumpyToTorch(make_scripted(script(), autoreset_mode="SameStep")))


def test_gymnasium_s_numpy_to_torch_is_refused_and_a_namesake_is_not() -> None:
    class NumpyToTorch(gym.vector.VectorWrapper):
        pass

    as_vector_env(NumpyToTorch(make_scripted(script(), autoreset_mode="SameStep")))
    NumpyToTorch.__module__ = "gymnasium.wrappers.vector.numpy_to_torch"
    with pytest.raises(ValueError, match="framework='torch'"):
        as_vector_env(NumpyToTorch(make_scripted(script(), autoreset_mode="SameStep")))


def test_episode_statistics_over_disabled_are_refused_and_elsewhere_right() -> None:
    with pytest.raises(ValueError, match="RewardSum and StepCounter"):
        as_vector_env(RecordEpisodeStatistics(make_scripted(script(), autoreset_mode="Disabled")))
    for mode in ("NextStep", "SameStep"):
        env = as_vector_env(RecordEpisodeStatistics(make_scripted(script(), autoreset_mode=mode)))  # type: ignore[arg-type]
        assert transitions(env, "float32") == true_rows(script(), mode)


def test_third_party_wrappers_below_and_above() -> None:
    below = as_vector_env(gym.wrappers.vector.ClipReward(make_scripted(script()), max_reward=2.0))
    assert {row[2] for row in transitions(below, "float32")} == {1.0, 2.0}
    above = gym.wrappers.vector.ClipReward(as_vector_env(make_scripted(script())), max_reward=2.0)
    assert as_vector_env(above) is above


def test_sub_envs_with_their_own_statistics() -> None:
    fns = [lambda i=i: gym.wrappers.RecordEpisodeStatistics(ScriptedEnv(script(), i)) for i in range(2)]
    env = as_vector_env(SyncVectorEnv(fns, autoreset_mode="SameStep"))
    assert transitions(env, "float32") == true_rows(script(), "SameStep")


# --- envpool ------------------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> Any:
    return pytest.importorskip("envpool")


#: envpool warns when it makes its spaces.
quiet = pytest.mark.filterwarnings("ignore:.*precision lowered:UserWarning")


@quiet
@pytest.mark.parametrize("name", ["Go9x9-v1", "IntersectionMultiAgent-v0"])
def test_envpools_of_several_players_are_refused(pool: Any, name: str) -> None:
    if name not in pool.list_all_envs():
        pytest.skip("of a later envpool")
    with pytest.raises(TypeError, match=r"envpool of a game for 2 players .*VectorSource.*PettingZooSource"):
        as_vector_env(pool.make_gymnasium(name, num_envs=2))


@quiet
def test_envpool_s_ports_of_jumanji_have_jumanji_s_columns(pool: Any) -> None:
    name = "Jumanji/Snake-v1"
    if name not in pool.list_all_envs():
        pytest.skip("of a later envpool")
    batch = rollout(pool.make_gymnasium(name, num_envs=2, seed=0), num_steps=5)
    assert batch["step_count_"].flatten().tolist() == [0, 1, 2, 3, 4] * 2
    assert batch["next", "step_count_"].flatten().tolist() == [1, 2, 3, 4, 5] * 2


@quiet
def test_envpool_spaces_are_batched_and_actions_checked(pool: Any) -> None:
    env = as_vector_env(pool.make_gymnasium("CartPole-v1", num_envs=3, seed=1))
    assert env.single_action_space == spaces.Discrete(2)
    assert env.action_space == spaces.MultiDiscrete([2, 2, 2])
    assert env.observation_space.shape == (3, 4)
    env.reset()
    for wrong in (np.zeros(2, np.int64), np.zeros(4, np.int64), np.zeros((3, 1), np.int64)):
        with pytest.raises(ValueError, match=r"actions must have shape \(3,\)"):
            env.step(wrong)
    with pytest.raises(ValueError, match=r"actions must lie in \[0, 1\]"):
        env.step(np.array([0, 1, 2]))
    with pytest.raises(TypeError, match="castable to int64"):
        env.step(np.zeros(3))
    assert env.step(torch.zeros(3, dtype=torch.int64))[0].shape == (3, 4)
    assert env.step([0, 1, 0])[0].shape == (3, 4)


@quiet
def test_envpool_seed_and_options(pool: Any) -> None:
    env = as_vector_env(pool.make_gymnasium("CartPole-v1", num_envs=3, seed=1))
    with pytest.warns(UserWarning, match="envpool takes its seed when it is created"):
        env.reset(seed=0)
    with pytest.raises(ValueError, match=r"no reset options but reset_mask, got \['gravity'\]"):
        env.reset(options={"gravity": 1})


@quiet
def test_envpool_masked_reset_returns_the_full_batch(pool: Any) -> None:
    env = as_vector_env(pool.make_gymnasium("CartPole-v1", num_envs=3, seed=1))
    env.reset()
    before = env.step(np.zeros(3, np.int64))[0].copy()
    mask = np.array([False, True, False])
    obs, info = env.reset(options={"reset_mask": mask})
    assert obs.shape == (3, 4)
    assert np.array_equal(obs[~mask], before[~mask])
    assert not np.array_equal(obs[mask], before[mask])
    assert info["env_id"].tolist() == [0, 1, 2]


@quiet
def test_envpool_bounds_are_mended(pool: Any) -> None:
    for name in ("LunarLander-v3", "CartpoleBalance-v1"):
        env = as_vector_env(pool.make_gymnasium(name, num_envs=2, seed=1))
        obs, _ = env.reset()
        assert env.observation_space.contains(obs)
        assert all(np.isneginf(box.low).all() for box in leaves_of_space(env.single_observation_space))


def leaves_of_space(space: spaces.Space[Any]) -> list[Any]:
    return list(space.spaces.values()) if isinstance(space, spaces.Dict) else [space]


@quiet
def test_envpool_discrete_observations_have_the_dtype_of_their_space(pool: Any) -> None:
    env = as_vector_env(pool.make_gymnasium("FrozenLake-v1", num_envs=2, seed=1))
    assert "VectorStream" in repr(env)
    obs, _ = env.reset()
    assert obs.dtype == env.observation_space.dtype == np.int64
    assert env.step(np.array([1, 1]))[0].dtype == np.int64


@quiet
def test_loops_over_async_pools_and_single_env_wrappers_are_refused(pool: Any) -> None:
    with pytest.raises(RuntimeError, match=r"batch_size=2 of num_envs=4.* a pool in sync mode"):
        as_vector_env(pool.make_gymnasium("CartPole-v1", num_envs=4, batch_size=2)).reset()
    wrapped: Any = gym.Wrapper(pool.make_gymnasium("CartPole-v1", num_envs=2))
    with pytest.raises(TypeError, match=r"gymnasium\.Wrapper"):
        as_vector_env(wrapped)
    vector = RecordEpisodeStatistics(pool.make_gymnasium("CartPole-v1", num_envs=2))
    with pytest.raises(TypeError, match="envpool"):
        as_vector_env(vector)


class GymTorchEnv(gym.Env[Any, Any]):
    """A torch simulator of many envs that says it is a gymnasium.Env, as Isaac Lab's do."""

    is_vector_env = True

    def __init__(self) -> None:
        self.inner = ScriptedTorchEnv(script(), final_obs="dense")
        self.num_envs, self.device = self.inner.num_envs, self.inner.device
        self.single_observation_space = self.observation_space = self.inner.single_observation_space
        self.single_action_space = self.action_space = self.inner.single_action_space

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.inner.reset()

    def step(self, action: Any) -> Any:
        return self.inner.step(action)


def test_a_simulator_under_the_checkers_of_gymnasium_make() -> None:
    checked = gym.wrappers.OrderEnforcing(gym.wrappers.PassiveEnvChecker(GymTorchEnv()))
    env = as_vector_env(checked, autoreset_mode="SameStep")
    assert env.num_envs == 2
    obs, _ = env.reset()
    assert isinstance(obs, torch.Tensor)
    with pytest.raises(
        TypeError, match=r"gymnasium\.Wrapper \(TimeLimit\) around a vector env.*env\.unwrapped"
    ):
        as_vector_env(gym.wrappers.TimeLimit(GymTorchEnv(), 5), autoreset_mode="SameStep")


@pytest.fixture
def shared_metadata() -> Iterator[dict[str, Any]]:
    """The dict that all vector envs without metadata of their own share; restored afterwards."""
    before = dict(VectorEnv.metadata)
    yield VectorEnv.metadata
    VectorEnv.metadata.clear()
    VectorEnv.metadata.update(before)


class WritesShared(ScriptedVectorEnv):
    """Writes its mode into the metadata of all vector envs, as ale-py 0.12's AtariVectorEnv does."""

    def __init__(self, mode: str, tells: bool = True) -> None:
        super().__init__(script(), autoreset_mode=AutoresetMode(mode))
        del self.metadata
        if tells:
            self.autoreset_mode = AutoresetMode(mode)
        self.metadata["autoreset_mode"] = AutoresetMode(mode)


class Outer(VectorWrapper[Any, Any, Any, Any, Any]):
    """A wrapper that changes nothing."""


@pytest.mark.parametrize("last", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.usefixtures("shared_metadata")
def test_an_env_made_later_does_not_change_the_mode(last: str) -> None:
    envs = {mode: WritesShared(mode) for mode in MODES}
    WritesShared(last)
    assert VectorEnv.metadata["autoreset_mode"] is AutoresetMode(last)
    for mode, env in envs.items():
        right = rollout(ScriptedVectorEnv(script(), autoreset_mode=AutoresetMode(mode)), num_steps=9, seed=0)
        assert (rollout(env, num_steps=9, seed=0) == right).all()
    outer = Outer(envs["SameStep"])
    assert as_vector_env(outer).source.env is outer  # type: ignore[attr-defined]
    assert as_vector_env(outer).metadata["autoreset_mode"] is AutoresetMode.SAME_STEP


@pytest.mark.usefixtures("shared_metadata")
def test_a_mode_in_shared_metadata_is_nobody_s(monkeypatch: pytest.MonkeyPatch) -> None:
    env = WritesShared("SameStep", tells=False)
    for one in (env, Outer(env)):
        with pytest.raises(TypeError, match="autoreset_mode is needed: WritesShared declares none"):
            as_vector_env(one)
    # Gymnasium before 1.4 writes it there; an env that declares no metadata of its own inherits it.
    monkeypatch.setitem(gym.Env.metadata, "autoreset_mode", AutoresetMode.DISABLED)
    with pytest.raises(TypeError, match="autoreset_mode is needed: GymTorchEnv"):
        as_vector_env(GymTorchEnv())


def test_an_env_that_declares_two_modes_is_refused() -> None:
    env: Any = ScriptedVectorEnv(script(), autoreset_mode="NextStep")
    env.autoreset_mode = "same_step"
    with pytest.raises(ValueError, match=r"autoreset_mode is unclear: ScriptedVectorEnv.*SameStep.*NextStep"):
        as_vector_env(env)
    assert as_vector_env(env, autoreset_mode="NextStep").metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    env.autoreset_mode = True  # of another meaning
    assert as_vector_env(env).metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP


class Speedy(gym.Env[Any, Any]):
    """Steps tell a speed, resets do not; episodes of two steps."""

    observation_space, action_space = gym.spaces.Box(0, 9, (1,)), gym.spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.t = 0
        return np.zeros(1, np.float32), {"x": 1}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.full(1, self.t, np.float32), 0.0, self.t == 2, False, {"x": 2, "speed": 5.0}


def test_info_of_a_restarted_row_is_the_reset_s_alone() -> None:
    env = as_vector_env(Speedy())
    env.reset()
    assert env.step([0])[4]["speed"].tolist() == [5.0]
    info = env.step([0])[4]
    assert (info["x"].tolist(), info["speed"].tolist(), info["_speed"].tolist()) == ([1], [0.0], [False])
    assert info["final_info"]["speed"].tolist() == [5.0]


@pytest.mark.parametrize("where", ["typo", lambda info, done: None])
def test_a_final_obs_that_is_not_there_is_refused(where: Any) -> None:
    for bare in (
        ScriptedVectorEnv(script(), autoreset_mode="SameStep", final_obs="dense"),
        ScriptedTorchEnv(script(), final_obs="dense"),
    ):
        env = as_vector_env(bare, final_obs=where)
        env.reset()
        with pytest.raises(ValueError, match=r"found no final observations.*final_obs='auto'.*or None"):
            for _ in range(20):
                env.step(zeros(env))


def test_a_named_final_obs_is_dense_and_owned() -> None:
    env = as_vector_env(ScriptedVectorEnv(script(), autoreset_mode="SameStep"), final_obs="final_obs")
    assert transitions(env, "float32") == true_rows(script(), "SameStep")
    env = as_vector_env(ScriptedTorchEnv(script(), final_obs="dense", reuse_obs=True), final_obs="final_obs")
    env.reset()
    kept = [env.step(zeros(env))[4]["final_obs"] for _ in range(4)]
    assert len({final.data_ptr() for final in kept}) == 4


def test_final_obs_is_for_same_step_envs_only() -> None:
    with pytest.raises(ValueError, match=r"final_obs='last' is for envs with autoreset_mode=SAME_STEP"):
        as_vector_env(make_scripted(script(), autoreset_mode="NextStep"), final_obs="last")


def test_arguments_that_would_have_no_effect_are_refused() -> None:
    adapted = InitTracker(make_scripted(script()))
    with pytest.raises(ValueError, match="adapted already"):
        as_vector_env(adapted, framework="torch")
    with pytest.raises(ValueError, match="num_envs=99 was expected, but the env has 2"):
        as_vector_env(adapted, num_envs=99)
    assert as_vector_env(adapted, num_envs=2) is adapted
    with pytest.raises(ValueError, match=r"device='cpu' is for tensors.*framework='torch'"):
        as_vector_env(make_scripted(script()), device="cpu")
    with pytest.raises(ValueError, match="own_buffers must be 'auto', True or False, got 'no'"):
        as_vector_env(make_scripted(script()), own_buffers="no")


def test_a_masked_reset_heeds_its_seed() -> None:
    def first_rows(env: Any) -> Any:
        env.reset(seed=0)
        return env.reset(seed=5, options={"reset_mask": np.array([True, False])})[0]

    def make() -> Any:
        return gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")

    np.testing.assert_array_equal(first_rows(as_vector_env(make())), first_rows(make()))


def test_the_range_of_actions_is_checked_behind_a_torch_view_too() -> None:
    envpool = pytest.importorskip("envpool")
    env = as_vector_env(envpool.make_gymnasium("CartPole-v1", num_envs=2), framework="torch")
    env.reset()
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        env.step(torch.tensor([0, 9]))
    with pytest.raises(ValueError, match="an envpool is always 'NextStep'"):
        as_vector_env(envpool.make_gymnasium("CartPole-v1", num_envs=2), autoreset_mode="SameStep")
