"""The marker wrappers, each alone in a plain loop, over every kind of env."""

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import VectorWrapper
from torch.utils._python_dispatch import TorchDispatchMode

from flatroll.wrappers import (
    CompactObs,
    InitTracker,
    NextObservationDelta,
    RewardSum,
    StepCounter,
    TrajId,
    as_vector_env,
)
from flatroll.wrappers.testing import (
    Script,
    ScriptedEnv,
    ScriptedTorchEnv,
    ScriptedVectorEnv,
    decode,
    expected_rows,
    make_scripted,
)
from flatroll.wrappers.testing.check_env import copied

MODES = ("NextStep", "SameStep", "Disabled")
SCRIPT = Script(2, lengths=[[3, 1, 4], [2, 5]], ends=[["terminated", "truncated", "both"], ["truncated"]])
ALL = (InitTracker, StepCounter, TrajId, RewardSum, CompactObs, NextObservationDelta)

ENVS: dict[str, tuple[Callable[[], Any], str]] = {
    f"{backend} {mode}": (lambda b=backend, m=mode: make_scripted(SCRIPT, backend=b, autoreset_mode=m), mode)
    for backend in ("sync", "async", "native")
    for mode in MODES
} | {
    "torch": (lambda: ScriptedTorchEnv(SCRIPT, reuse_obs=True), "SameStep"),
    "adapted": (lambda: as_vector_env(make_scripted(SCRIPT)), "NextStep"),
}


@pytest.fixture(params=ENVS)
def made(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    make, mode = ENVS[request.param]
    env = make()
    yield env, mode
    env.close()


def loop(env: Any, steps: int = 25) -> Iterator[tuple[int, Any, dict[str, Any], Any]]:
    """(step, observation as (env, episode, step), info, the whole result), the reset being step -1."""
    obs, info = env.reset(seed=0)
    yield -1, decode("float32", obs), info, None
    for k in range(steps):
        result = env.step(np.zeros(env.num_envs, np.int64))
        yield k, decode("float32", result[0]), result[4], result


def as_list(value: Any) -> list[Any]:
    return copied(value).tolist()  # type: ignore[no-any-return]


# --- what each says -----------------------------------------------------------------------------------------


def test_init_tracker(made: Any) -> None:
    for _, shown, info, _ in loop(InitTracker(made[0])):
        assert copied(info["is_init"]).dtype == np.bool_
        assert as_list(info["is_init"]) == (shown[:, 2] == 0).tolist()


def test_step_counter(made: Any) -> None:
    for _, shown, info, _ in loop(StepCounter(made[0])):
        assert copied(info["step_count"]).dtype == np.int64
        assert as_list(info["step_count"]) == shown[:, 2].tolist()


@pytest.mark.parametrize("writer", [0, 3])
def test_traj_id(made: Any, writer: int) -> None:
    for _, shown, info, _ in loop(TrajId(made[0], writer=writer)):
        assert copied(info["traj_ids"]).dtype == np.int64
        assert as_list(info["traj_ids"]) == [(writer << 40) | int(e * 2 + i) for i, e, _ in shown]


def test_reward_sum(made: Any) -> None:
    env, mode = made
    table = expected_rows(SCRIPT, 25, autoreset_mode=mode)
    sums = {}
    for row in table:
        n = int(row["step"]) + 1
        sums[row["vector_step"], row["env"]] = 100 * int(row["episode"]) * n + n * (n + 1) // 2
    for k, _, info, _ in loop(RewardSum(env)):
        assert copied(info["episode_reward"]).dtype == np.float32
        assert as_list(info["episode_reward"]) == [sums.get((k, i), 0) for i in range(2)]


def test_compact_obs(made: Any) -> None:
    env, mode = made
    table = expected_rows(SCRIPT, 25, autoreset_mode=mode)
    ends = table[table["terminated"] | table["truncated"]]
    last = {(r["vector_step"], r["env"]): (r["env"], r["episode"], r["step"] + 1) for r in ends}
    for k, _, info, _ in loop(CompactObs(env)):
        assert as_list(info["_final_obs"]) == [(k, i) in last for i in range(2)]
        if k >= 0:
            final = decode("float32", info["final_obs"])
            assert all(tuple(final[i]) == last[k, i] for i in range(2) if (k, i) in last)


def test_next_observation_delta(made: Any) -> None:
    env, mode = made
    rows = {(r["vector_step"], r["env"]) for r in expected_rows(SCRIPT, 25, autoreset_mode=mode)}
    for k, _, info, _ in loop(NextObservationDelta(env)):
        if k < 0:
            assert "delta" not in info
            continue
        assert copied(info["delta"]).dtype == np.float16
        assert all(as_list(info["delta"])[i] == [0, 0, 1] for i in range(2) if (k, i) in rows)


def test_wrappers_change_nothing_but_info(made: Any) -> None:
    env, mode = made
    twin = as_vector_env(make_scripted(SCRIPT, autoreset_mode=mode))
    stack = InitTracker(StepCounter(TrajId(RewardSum(env))))
    assert stack.single_observation_space == twin.single_observation_space
    for (_, a, _, one), (_, b, _, other) in zip(loop(stack), loop(twin), strict=True):
        assert np.array_equal(a, b)
        assert one is None or all(as_list(x) == as_list(y) for x, y in zip(one[1:4], other[1:4], strict=True))


def test_entries_kept_in_a_list_stay_unchanged(made: Any) -> None:
    keys = ("is_init", "step_count", "traj_ids", "episode_reward", "_final_obs")
    kept: list[tuple[Any, Any]] = []
    for _, _, info, _ in loop(CompactObs(InitTracker(StepCounter(TrajId(RewardSum(made[0])))))):
        kept += [(info[key], copied(info[key])) for key in keys]
    assert all(np.array_equal(copied(value), was) for value, was in kept)


@pytest.mark.parametrize("backend", ["sync", "native"])
@pytest.mark.parametrize("mode", MODES)
def test_three_step_episodes_have_length_three(backend: Any, mode: Any) -> None:
    """Counters that count the reset row, or start one late, give 4 or 2."""
    env = StepCounter(RewardSum(make_scripted(Script(2, lengths=3), backend=backend, autoreset_mode=mode)))
    table = expected_rows(Script(2, lengths=3), 24, autoreset_mode=mode)
    real = {(r["vector_step"], r["env"]) for r in table}
    lengths, before = [], np.zeros(2, np.int64)
    for k, _, info, result in loop(env, 24):
        if result is not None:
            lengths += [int(before[i]) + 1 for i in np.flatnonzero(result[2] | result[3]) if (k, i) in real]
        before = info["step_count"]
    assert lengths == [3] * (2 * (8 if mode != "NextStep" else 6))


# --- stacking -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_order_of_stacking_does_not_matter(mode: Any) -> None:
    def infos(kinds: Any) -> list[Any]:
        env = make_scripted(SCRIPT, backend="native", autoreset_mode=mode)
        for kind in kinds:
            env = kind(env)
        keys = ("is_init", "step_count", "traj_ids", "episode_reward", "final_obs", "_final_obs", "delta")
        return [[as_list(info[key]) for key in keys if key in info] for _, _, info, _ in loop(env, 15)]

    for three in ((InitTracker, StepCounter, TrajId), (RewardSum, CompactObs, NextObservationDelta)):
        first, *others = (infos(order) for order in permutations(three))
        assert all(other == first for other in others)
    assert infos(ALL) == infos(ALL[::-1])


def test_the_limit_holds_wherever_the_counter_stands() -> None:
    def run(*kinds: Any) -> list[Any]:
        env: Any = make_scripted(Script(2, lengths=9))
        for kind in kinds:
            env = StepCounter(env, max_steps=4) if kind is StepCounter else kind(env)
        keys = ("is_init", "step_count", "traj_ids")
        return [
            [[as_list(info[key]) for key in keys], None if r is None else as_list(r[3])]
            for _, _, info, r in loop(env, 15)
        ]

    first, *others = (run(*order) for order in permutations((InitTracker, StepCounter, TrajId)))
    assert all(other == first for other in others)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_a_second_wrapper_of_a_kind_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} is already in this stack"):
        kind(
            InitTracker(kind(make_scripted(SCRIPT)))
            if kind is not InitTracker
            else kind(make_scripted(SCRIPT))
        )


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_wrapper_takes_what_as_vector_env_takes(kind: Any) -> None:
    for env in (ScriptedEnv(SCRIPT), ScriptedTorchEnv(SCRIPT), gym.make("CartPole-v1")):
        wrapped = kind(env)
        wrapped.reset(seed=0)
        wrapped.step(np.zeros(wrapped.num_envs, np.int64))
    with pytest.raises(TypeError, match="autoreset_mode"):
        kind(ScriptedVectorEnv(SCRIPT, autoreset_mode=None))


def test_third_party_vector_wrappers_between_ours() -> None:
    clipped = gym.wrappers.vector.ClipReward(InitTracker(make_scripted(SCRIPT)), max_reward=1.0)
    env = RewardSum(StepCounter(clipped))
    for k, shown, info, _ in loop(env, 3):
        assert as_list(info["is_init"]) == (shown[:, 2] == 0).tolist()
        if k == 1:
            assert as_list(info["episode_reward"]) == [2.0, 2.0]  # of rewards 1 and 2, clipped at 1
    with pytest.raises(ValueError, match="InitTracker is already in this stack"):
        InitTracker(env)


# --- StepCounter(max_steps) ---------------------------------------------------------------------------------


def limited(env: Any, max_steps: int, script: Script, steps: int = 24) -> tuple[list[Any], list[Any]]:
    counter = StepCounter(env, max_steps=max_steps)
    rows, before = [], None
    for _, shown, info, result in loop(counter, steps):
        if result is not None:
            _, reward, terminated, truncated, _ = result
            final = decode("float32", info["final_obs"])
            after = np.where(copied(terminated | truncated)[:, None], final, shown)
            for i in range(counter.num_envs):
                flags = bool(terminated[i]), bool(truncated[i])
                rows.append((*before[i].tolist(), *after[i].tolist(), float(reward[i]), *flags))
        before = shown
    table = expected_rows(script, steps, max_steps=max_steps)
    columns = ["env", "episode", "step", "reward", "terminated", "truncated"]
    true = [(i, e, t, i, e, t + 1, r, a, b) for i, e, t, r, a, b in table[columns].tolist()]
    return rows, true


LIMITED = {
    **{f"{b} {m}": ENVS[f"{b} {m}"][0] for b in ("sync", "async") for m in MODES},
    "native Disabled": ENVS["native Disabled"][0],
    "torch": ENVS["torch"][0],
}


@pytest.mark.parametrize("max_steps", [1, 2, 3, 100])
@pytest.mark.parametrize("name", [name for name in LIMITED if "async" not in name])
def test_max_steps_truncates_in_every_mode(name: str, max_steps: int) -> None:
    rows, true = limited(LIMITED[name](), max_steps, SCRIPT)
    assert rows == true


@pytest.mark.parametrize("mode", MODES)
def test_max_steps_over_processes(mode: str) -> None:
    env = LIMITED[f"async {mode}"]()
    try:
        rows, true = limited(env, 2, SCRIPT, 12)
    finally:
        env.close()
    assert rows == true


@pytest.mark.parametrize("max_steps", [0, -1])
def test_a_limit_below_one_is_refused(max_steps: int) -> None:
    with pytest.raises(ValueError, match=f"max_steps must be an integer of at least 1, got {max_steps}"):
        StepCounter(make_scripted(SCRIPT), max_steps=max_steps)


def test_a_limit_over_an_env_that_resets_all_or_nothing_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"max_steps=5 needs an env that can reset chosen envs.*max_episode_steps"
    ):
        StepCounter(gym.make_vec("CartPole-v1", num_envs=2), max_steps=5)


# --- resets -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: make_scripted(SCRIPT), lambda: ScriptedTorchEnv(SCRIPT)])
def test_a_masked_reset_keeps_the_other_rows(make: Any) -> None:
    env = InitTracker(StepCounter(TrajId(RewardSum(make()))))
    env.reset(seed=0)
    env.step(np.zeros(2, np.int64))
    options = {"reset_mask": np.array([False, True])}
    obs, info = env.reset(options=options)
    assert list(options) == ["reset_mask"]
    assert decode("float32", obs).tolist() == [[0, 0, 1], [1, 1, 0]]
    assert as_list(info["is_init"]) == [False, True]
    assert as_list(info["step_count"]) == [1, 0]
    assert as_list(info["traj_ids"]) == [0, 3]
    info = env.step(np.zeros(2, np.int64))[4]
    assert as_list(info["is_init"]) == [False, False]
    assert as_list(info["step_count"]) == [2, 1]
    assert as_list(info["traj_ids"]) == [0, 3]
    assert as_list(info["episode_reward"]) == [1 + 2, 101]


def test_a_full_reset_starts_new_trajectories() -> None:
    env = TrajId(StepCounter(make_scripted(SCRIPT)))
    seen = []
    for _ in range(3):
        _, info = env.reset()
        seen += as_list(info["traj_ids"])
        info = env.step(np.zeros(2, np.int64))[4]
        assert as_list(info["step_count"]) == [1, 1]
    assert seen == [0, 1, 2, 3, 4, 5]


def test_ids_are_unique_over_envs_writers_and_restarts() -> None:
    """32-bit counters overflow, and shared ones interleave; these are 64 bit and need no sharing."""
    seen: list[int] = []
    states: dict[int, Any] = {}
    for _ in range(2):  # a run, and its continuation
        for writer in range(8):
            env = TrajId(ScriptedVectorEnv(Script(3, lengths=2), autoreset_mode="Disabled"), writer=writer)
            if writer in states:
                env.load_state_dict(states[writer])
            ids = {i for _, _, info, _ in loop(env, 9) for i in as_list(info["traj_ids"])}
            seen += ids
            states[writer] = env.state_dict()
    assert len(seen) == len(set(seen))
    assert max(seen) > 2**40


@pytest.mark.parametrize("writer", [-1, 2**23])
def test_a_writer_number_that_does_not_fit_is_refused(writer: int) -> None:
    with pytest.raises(ValueError, match="writer must be in"):
        TrajId(make_scripted(SCRIPT), writer=writer)


# --- NextObservationDelta -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["uint8", "int64", "discrete", "float64", "dict", "tuple"])
@pytest.mark.parametrize("mode", MODES)
def test_deltas_of_all_kinds_give_the_true_next_observation(kind: Any, mode: Any) -> None:
    """Integers differ exactly, modulo their range; floats here are small integers, exact in float16."""
    script = Script(2, lengths=[[3, 1, 4], [2, 5]], obs=kind)
    env = NextObservationDelta(make_scripted(script, backend="native", autoreset_mode=mode))
    real = {(r["vector_step"], r["env"]) for r in expected_rows(script, 20, autoreset_mode=mode)}
    env.reset(seed=0)
    for k in range(20):
        delta = env.step(np.zeros(2, np.int64))[4]["delta"]
        for i in (i for i in range(2) if (k, i) in real):
            if kind != "discrete":
                assert decode(kind, delta)[i].tolist() == [0, 0, 1]
            if kind in ("discrete", "dict"):
                code = delta if kind == "discrete" else delta["critic"]["code"]
                assert (code.dtype, code[i]) == (np.int64, 1)


def test_delta_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="delta_dtype must be a floating dtype"):
        NextObservationDelta(make_scripted(SCRIPT), delta_dtype=torch.int8)
    env = NextObservationDelta(make_scripted(SCRIPT), delta_dtype=torch.float32, in_keys=["observation"])
    env.reset(seed=0)
    assert env.step(np.zeros(2, np.int64))[4]["delta"].dtype == np.float32
    with pytest.raises(ValueError, match="velocity"):
        NextObservationDelta(make_scripted(SCRIPT), in_keys=["velocity"])


class Growing(ScriptedEnv):
    def _observe(self) -> Any:
        return super()._observe() * np.float32(1e5)


def test_a_delta_that_does_not_fit_is_an_error_and_not_infinity() -> None:
    env = NextObservationDelta(Growing(Script(1, lengths=5)))
    env.reset(seed=0)
    with pytest.raises(OverflowError, match="float16"):
        env.step(np.array([0]))


# --- no host sync -------------------------------------------------------------------------------------------


def stack_all(env: Any) -> Any:
    return InitTracker(StepCounter(TrajId(RewardSum(NextObservationDelta(CompactObs(env))))))


@pytest.mark.parametrize("final_obs", ["dense", "absent"])
@pytest.mark.parametrize("kind", ["float32", "dict"])
def test_the_whole_stack_runs_on_meta(kind: Any, final_obs: Any) -> None:
    """On meta, whatever would read a value on the host raises."""
    env = stack_all(ScriptedTorchEnv(Script(4, obs=kind), device="meta", final_obs=final_obs))
    env.reset(seed=0)
    for _ in range(5):
        *_, info = env.step(torch.zeros(4, dtype=torch.int64, device="meta"))
    keys = ("is_init", "step_count", "traj_ids", "episode_reward", "_final_obs")
    assert {info[key].device.type for key in keys} == {"meta"}
    assert {tuple(info[key].shape) for key in keys} == {(4,)}


class ForbidsHostSync(TorchDispatchMode):
    """Raises where an operation's result depends on values, so that a GPU would have to be waited for."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "item", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name.startswith("index") and any(
            isinstance(i, torch.Tensor) and i.dtype is torch.bool for i in _flat(args[1:2])
        )
        if name in self.WAITS or (masks and name == "index"):
            raise AssertionError(f"{name} would wait for the device")
        return func(*args, **(kwargs or {}))


def _flat(values: Any) -> list[Any]:
    return [item for value in values for item in (value if isinstance(value, list | tuple) else [value])]


def test_the_whole_stack_asks_for_no_value() -> None:
    env = stack_all(ScriptedTorchEnv(Script(4), final_obs="dense"))
    env.reset(seed=0)
    action = torch.zeros(4, dtype=torch.int64)
    with ForbidsHostSync():
        for _ in range(8):
            env.step(action)
        with pytest.raises(AssertionError, match="would wait"):
            action.sum().item()


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_gpu_is_never_waited_for() -> None:
    env = stack_all(ScriptedTorchEnv(Script(4096), device="cuda"))
    env.reset(seed=0)
    action = torch.zeros(4096, dtype=torch.int64, device="cuda")
    env.step(action)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):
            env.step(action)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_sum_of_a_float64_reward_is_float32() -> None:
    inside = gym.wrappers.vector.TransformReward(as_vector_env(make_scripted(SCRIPT)), np.float64)
    env = RewardSum(inside)
    env.reset(seed=0)
    assert env.step(np.zeros(2, np.int64))[4]["episode_reward"].dtype == np.float32


def test_the_delta_to_a_hidden_observation_is_nan() -> None:
    script = Script(1, lengths=3)
    for bare in (
        ScriptedTorchEnv(script, final_obs="absent"),
        ScriptedVectorEnv(script, autoreset_mode="SameStep", final_obs="absent"),
    ):
        env = NextObservationDelta(bare)
        env.reset()
        deltas = [torch.as_tensor(env.step(np.zeros(1, np.int64))[4]["delta"]) for _ in range(4)]
        assert [bool(delta.isnan().all()) for delta in deltas] == [False, False, True, False]


class OwnInfo(VectorWrapper):
    """Returns an info of its own, without the entries of the env below."""

    def step(self, actions: Any) -> Any:
        obs, reward, terminated, truncated, _ = self.env.step(actions)
        return obs, reward, terminated, truncated, {}


def test_a_wrapper_that_drops_the_final_observations_is_found_out() -> None:
    env = CompactObs(
        NextObservationDelta(OwnInfo(as_vector_env(make_scripted(SCRIPT, autoreset_mode="SameStep"))))
    )
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"dropped info\['final_obs'\]"):
        for _ in range(10):
            env.step(np.zeros(2, np.int64))


def test_a_notebook_shows_the_stack_and_its_columns() -> None:
    page = RewardSum(
        CompactObs(StepCounter(gym.make_vec("CartPole-v1", 3, vectorization_mode="sync")))
    )._repr_html_()
    cells = page.replace("</td>", "").split('<td style="text-align:left">')[1:]
    assert [cell.removesuffix("</tr>").removesuffix("<tr>").removesuffix("</tr>") for cell in cells[:-1]] == [
        "RewardSum",
        "(&#x27;next&#x27;, &#x27;episode_reward&#x27;)",
        "CompactObs",
        "",
        "StepCounter",
        "&#x27;step_count&#x27;",
        "VectorStream(SyncVectorEnv, num_envs=3, NextStep)",
    ]
