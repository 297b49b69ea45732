"""`Collector(splits=...)`: the same batches as without, of any script, mode and arguments."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from split_envs import CountingState, Part, parts, script
from tensordict.nn import TensorDictModule, TensorDictSequential

from flatroll.layout.inspect.audit import audit
from flatroll.modules import GRUModule
from flatroll.rollouts import Collector, RandomPolicy
from flatroll.wrappers import CompactObs, InitTracker, RewardSum, StepCounter, TrajId, as_vector_env
from flatroll.wrappers.testing import Script, make_scripted

MODES = ["NextStep", "SameStep", "Disabled"]


def by_place(obs: torch.Tensor) -> torch.Tensor:
    """A deterministic policy."""
    return (obs.sum(-1) % 5).long()


class InPlace:
    """The same policy, in one and the same memory at every call."""

    def __init__(self) -> None:
        self.memory: dict[int, torch.Tensor] = {}

    def __call__(self, obs: torch.Tensor) -> torch.Tensor:
        # Halves of equal length share it.
        return self.memory.setdefault(len(obs), torch.zeros(len(obs), dtype=torch.int64)).copy_(by_place(obs))


def same(one: Any, other: Any) -> None:
    """Equal keys in the same order, dtypes and values."""
    assert [*one.keys(True)] == [*other.keys(True)]
    for key in one.keys(True, True):
        assert one[key].dtype is other[key].dtype, key
        assert torch.equal(one[key], other[key]), (key, one[key], other[key])


def compare(whole: Collector, split: Collector, batches: int) -> None:
    for _ in range(batches):
        one, other = next(whole), next(split)
        same(one, other)
        assert audit(other) == audit(one)
        assert (whole.final is None) == (split.final is None)
        if whole.final is not None:
            same(whole.final, split.final)
    assert whole.frames == split.frames
    whole.shutdown()
    split.shutdown()


@examples(80)
@given(
    borders=st.lists(st.integers(1, 4), unique=True, min_size=1, max_size=4).map(sorted),
    mode=st.sampled_from(MODES),
    early=st.booleans(),
    frames=st.integers(1, 19),
    policy=st.sampled_from([None, by_place, InPlace()]),
    options=st.fixed_dictionaries(
        {},
        optional={
            "compact_obs": st.booleans(),
            "set_truncated": st.booleans(),
            "track_traj_ids": st.just(False),
            "reset_at_each_iter": st.booleans(),
            "init_random_frames": st.integers(0, 40),
            "info_keys": st.just(["t"]),
            "writer": st.just(0),
            "track_policy_version": st.booleans(),
        },
    ),
    limit=st.sampled_from([None, 3]),
    trajs=st.sampled_from([None, 2]),
)
def test_the_batches_are_those_of_the_whole_pool(
    borders: Any, mode: Any, early: bool, frames: int, policy: Any, options: Any, limit: Any, trajs: Any
) -> None:
    if trajs and "track_traj_ids" not in options and frames > 4:
        options["trajs_per_batch"] = trajs
    borders, limit = [0, *borders], limit if mode == "Disabled" else None
    options |= {"frames_per_batch": frames, "max_frames_per_traj": limit, "seed": 3}

    def stack(env: Any) -> Any:
        return RewardSum(env if limit else StepCounter(env))

    whole = Collector(stack(Part(autoreset_mode=mode)), policy, **options)
    pool = parts(*borders, early=early, autoreset_mode=mode)
    split = Collector([stack(env) for env in pool], policy, splits=len(borders), **options)
    compare(whole, split, 5)
    # Every step that was begun is a step of the whole pool.
    assert len({len(env.actions) for env in pool}) == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options", [{}, {"state_stride": 3}, {"compact_obs": True}, {"state_stride": 2, "compact_obs": True}]
)
@pytest.mark.parametrize("borders", [(0, 2), (0, 3), (0, 1, 3)])
def test_recurrent_states_stay_with_their_envs(mode: Any, options: Any, borders: Any) -> None:
    def stack(env: Any) -> Any:
        return StepCounter(env)

    whole = Collector(stack(Part(autoreset_mode=mode)), CountingState(), frames_per_batch=11, **options)
    pool = [stack(env) for env in parts(*borders, autoreset_mode=mode)]
    split = Collector(pool, CountingState(), frames_per_batch=11, splits=len(borders), **options)
    compare(whole, split, 6)
    pool = [stack(env) for env in parts(*borders, autoreset_mode=mode)]
    batch = next(Collector(pool, CountingState(), frames_per_batch=60, splits=len(borders)))
    assert torch.equal(batch["steps"], batch["step_count"].float())


def test_a_gru_and_a_stack_that_names_compact_obs() -> None:
    torch.manual_seed(0)
    policy = TensorDictSequential(
        GRUModule(3, 4, in_key="observation", out_key="features"),
        TensorDictModule(torch.nn.Linear(4, 5), ["features"], ["logits"]),
        TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"]),
    )
    whole = Collector(CompactObs(Part()), policy, frames_per_batch=13)
    split = Collector([CompactObs(env) for env in parts(0, 2)], policy, frames_per_batch=13, splits=2)
    for _ in range(4):
        one, other = next(whole), next(split)
        # A network's last bits depend on the number of rows.
        assert torch.equal(one["action"], other["action"])
        assert torch.allclose(one["recurrent_state"], other["recurrent_state"], atol=1e-6)
        same(whole.final, split.final)


@pytest.mark.parametrize("mode", MODES)
def test_own_markers_and_torch_views(mode: Any) -> None:
    def stack(env: Any) -> Any:
        return TrajId(InitTracker(as_vector_env(env, framework="torch", dtype=torch.float64)), writer=3)

    whole = Collector(stack(Part(autoreset_mode=mode)), by_place, frames_per_batch=8, writer=3)
    split = Collector(
        [stack(env) for env in parts(0, 2, autoreset_mode=mode)],
        by_place,
        frames_per_batch=8,
        writer=3,
        splits=2,
    )
    compare(whole, split, 6)


def test_policy_and_steps_take_turns() -> None:
    log: list[Any] = []

    def policy(obs: torch.Tensor) -> torch.Tensor:
        log.append(("policy", int(obs[0, 0])))
        return by_place(obs)

    collector = Collector(parts(0, 2, log=log), policy, frames_per_batch=15, splits=2, seed=7)
    next(collector)
    a, b = 0, 2
    turn = [("await", a), ("policy", a), ("begin", a), ("await", b), ("policy", b), ("begin", b)]
    start = [("reset", a, 7), ("reset", b, 9), ("policy", a), ("begin", a), ("policy", b), ("begin", b)]
    assert log[: len(start) + 2 * len(turn)] == [*start, *turn, *turn]
    assert log[-1] == ("await", b)  # nothing is under way between batches


def test_versions_and_interruptions() -> None:
    class Stop:
        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            return self.asked % 4 == 0

    def collect(env: Any, **options: Any) -> list[Any]:
        collector = Collector(
            env,
            by_place,
            frames_per_batch=17,
            interruptor=Stop(),
            track_policy_version=True,
            seed=0,
            **options,
        )
        batches = []
        for version in range(8):
            batches.append(next(collector))
            collector.policy_version = version
        return batches

    for one, other in zip(collect(Part()), collect(parts(0, 3), splits=2), strict=True):
        same(one, other)


def test_saved_and_loaded() -> None:
    def make(split: bool) -> Collector:
        options = {"frames_per_batch": 8, "seed": 1, "init_random_frames": 20}
        return (
            Collector(parts(0, 2), by_place, splits=2, **options)
            if split
            else Collector(Part(), by_place, **options)
        )

    whole, split = make(False), make(True)
    for _ in range(3):
        same(next(whole), next(split))
    state = split.state_dict()
    resumed, other = make(True), make(False)
    resumed.load_state_dict(state)
    other.load_state_dict(whole.state_dict())
    for _ in range(3):
        same(next(other), next(resumed))
    assert resumed.set_seed(5) == other.set_seed(5) == 10
    same(next(other), next(resumed))


@pytest.mark.parametrize(
    "options", [{}, {"shared_memory": False}, {"copy": False}], ids=["plain", "pipe", "no copy"]
)
@pytest.mark.parametrize("mode", MODES)
def test_an_async_vector_env_is_divided(mode: Any, options: Any) -> None:
    own = Script(3, lengths=[[3, 1, 4], [2, 5], [6]], obs="dict")

    def policy(obs: Any) -> torch.Tensor:
        return by_place(obs["policy"])

    def make() -> Any:
        return make_scripted(own, backend="async", autoreset_mode=mode, **options)

    whole = Collector(make_scripted(own, autoreset_mode=mode), policy, frames_per_batch=7, seed=0)
    compare(whole, Collector(make, policy, frames_per_batch=7, seed=0, splits=2), 6)


def test_seeds_of_a_divided_env() -> None:
    def make() -> Any:
        return gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="async")

    options: Any = {"frames_per_batch": 33, "seed": 5}
    compare(
        Collector(
            gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync"), RandomPolicy(), **options
        ),
        Collector(make, RandomPolicy(), splits=2, obs_dtype=torch.float32, **options),
        4,
    )


def test_two_envpools_make_the_rows_of_one() -> None:
    envpool = pytest.importorskip("envpool")

    def pool(num_envs: int, seed: int) -> Any:
        return envpool.make_gymnasium("CartPole-v1", num_envs=num_envs, seed=seed)

    def policy(obs: torch.Tensor) -> torch.Tensor:
        return (obs[:, 2] > 0).long()

    whole = Collector(pool(6, 3), policy, frames_per_batch=50)
    split = Collector(
        [lambda: pool(3, 3), lambda: pool(3, 6)], InPlacePush(policy), frames_per_batch=50, splits=2
    )
    compare(whole, split, 20)
    for a, b in ((0, 0), (0, 2)):
        with pytest.raises(ValueError, match="two envpools of splits= have envs with the same seed"):
            Collector([pool(3, a), pool(3, b)], frames_per_batch=50, splits=2)


class InPlacePush(InPlace):
    """A policy in one memory at every call."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy = policy

    def __call__(self, obs: torch.Tensor) -> torch.Tensor:
        memory = self.memory.setdefault(len(obs), torch.zeros(len(obs), dtype=torch.int64))
        return memory.copy_(self.policy(obs))


def test_the_script_of_the_parts_is_that_of_the_pool() -> None:
    assert script(1, 3).lengths == script().lengths[1:3]  # type: ignore[index]
    shown = [env.reset()[0] for env in parts(0, 2)]
    assert np.array_equal(np.concatenate(shown), Part().reset()[0])
