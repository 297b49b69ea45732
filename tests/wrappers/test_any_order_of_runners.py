"""Random interleavings of collectors, rollouts, resets and steps on shared envs: every row is a true step.

What goes through flatroll is noticed. Who steps the bare env by hand resets the collectors that share it.

The physical model is the script: a row leads from (env, episode, step) to (env, episode, step + 1), with the reward
that the script pays there, nobody makes a step twice, and rows that a batch joins follow one another.
"""

import random
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.rollouts import Collector, rollout
from flatroll.wrappers import InitTracker, RewardSum, StepCounter, TrajId, as_vector_env
from flatroll.wrappers.testing import Script, ScriptedEnv, ScriptedTorchEnv, make_scripted

TOLD = "ignore:.*was stepped or reset by another collector"
pytestmark = pytest.mark.filterwarnings(TOLD)
BACKENDS = ["sync", "native"]
MODES = ["NextStep", "SameStep", "Disabled"]
KINDS = [f"{backend} {mode}" for backend in BACKENDS for mode in MODES] + ["torch", "one env"]


def make(kind: str, script: Script) -> Any:
    if kind == "torch":
        return ScriptedTorchEnv(script)
    if kind == "one env":
        return ScriptedEnv(script)
    backend, mode = kind.split()
    return make_scripted(script, backend=backend, autoreset_mode=mode)  # type: ignore[arg-type]


def collected(source: Any) -> TensorDict:
    """The next batch, with its next observations."""
    batch = next(source)
    if source.final is not None:
        buffer = ReplayBuffer(storage=LazyTensorStorage(len(batch), compact_obs=True))
        buffer.extend(batch, final=source.final)
        batch = buffer[:]
    return batch


class World:
    """An env, those who share it, and the transitions that they have reported."""

    def __init__(self, kind: str, script: Script) -> None:
        self.kind, self.env = kind, make(kind, script)
        self.handle = as_vector_env(self.env)
        self.marked = StepCounter(self.handle)
        self.told: set[tuple[int, ...]] = set()
        self.sources = [
            Collector(InitTracker(RewardSum(self.env)), frames_per_batch=5),
            Collector(self.handle, frames_per_batch=3, writer=1),
            Collector(self.marked, frames_per_batch=7, writer=2, compact_obs=True, reset_at_each_iter=True),
            Collector(TrajId(self.marked, writer=3), frames_per_batch=4, trajs_per_batch=1, writer=3),
        ]

    def check(self, batch: TensorDict) -> None:
        now, later = batch["observation"].long(), batch["next", "observation"].long()
        assert torch.equal(later - now, torch.tensor([[0, 0, 1]]).expand_as(now)), (now, later)
        paid = 100 * now[:, 1] + now[:, 2] + 1
        assert torch.equal(batch["next", "reward"].squeeze(-1).long(), paid)
        rows = set(map(tuple, now.tolist()))
        assert len(rows) == len(now) and not rows & self.told  # each step was made once
        self.told |= rows
        assert torch.equal(batch["is_init"].squeeze(-1), now[:, 2] == 0)
        ids = batch["collector", "traj_ids"]
        goes_on = (ids[1:] == ids[:-1]) & ~batch["next", "done"][:-1, 0]
        assert torch.equal(now[1:][goes_on], later[:-1][goes_on])
        if "step_count" in batch:
            assert torch.equal(batch["step_count"].squeeze(-1), now[:, 2])

    def play(self, move: str, number: int) -> None:
        env, handle, zero = self.env, self.handle, np.zeros(self.handle.num_envs, np.int64)
        if move == "collect":
            self.check(collected(self.sources[number % 4]))
        elif move == "rollout":
            shared = [env, handle, self.marked][number % 3]
            self.check(rollout(shared, num_steps=1 + number % 4))
        elif move == "reset the handle":
            handle.reset()
        elif move == "step the handle":
            (handle if number % 2 else self.marked).reset()
            handle.step(zero)
        elif move == "reset some":
            handle.reset()
            if not handle.capabilities.partial_reset:  # type: ignore[attr-defined]
                return
            handle.reset(options={"reset_mask": np.arange(len(zero)) % 2 == 0})
        elif move == "resume":
            source = self.sources[number % 3]
            source.load_state_dict(source.state_dict())
        else:
            env.reset()
            if move == "step by hand":
                env.step({"one env": 0, "torch": torch.from_numpy(zero)}.get(self.kind, zero))
            elif move == "reset some by hand" and self.kind not in ("one env", "torch"):
                env.reset(options={"reset_mask": np.arange(len(zero)) % 2 == 0})
            for source in self.sources:
                source.reset()


MOVES = ["collect", "rollout", "reset the handle", "step the handle", "reset some", "resume"]
BY_HAND = ["reset by hand", "step by hand", "reset some by hand"]
#: Batches are what is checked: most moves make one.
move = st.tuples(st.sampled_from(["collect"] * 6 + MOVES + BY_HAND), st.integers(0, 11))
lengths = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=3)


@examples(60)
@given(kind=st.sampled_from(KINDS), lengths=lengths, moves=st.lists(move, min_size=2, max_size=12))
def test_any_order_of_moves_gives_true_rows(kind: str, lengths: Any, moves: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", TOLD.partition(":")[2])
        lengths = lengths[:1] if kind == "one env" else lengths
        world = World(kind, Script(len(lengths), lengths=lengths))
        for name, number in moves:
            world.play(name, number)


def test_threads_with_envs_of_their_own_give_true_rows() -> None:
    def play(seed: int) -> int:
        choose = random.Random(seed)
        world = World(KINDS[seed % len(KINDS)], Script(2, lengths=[[5, 2, 7], [3, 6]]))
        for _ in range(25):
            world.play(choose.choice(MOVES + ["collect"] * 6), choose.randint(0, 11))
        return len(world.told)

    with ThreadPoolExecutor(4) as pool:
        assert all(count > 20 for count in pool.map(play, range(8)))


def cartpole(state: Any, action: Any) -> Any:
    """CartPole's equations of motion, one Euler step."""
    x, v, angle, spin = state.double().unbind(-1)
    force = torch.where(action == 1, 10.0, -10.0)
    push = (force + 0.05 * spin**2 * angle.sin()) / 1.1
    turn = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
    shift = push - 0.05 * turn * angle.cos() / 1.1
    return torch.stack([x + 0.02 * v, v + 0.02 * shift, angle + 0.02 * spin, spin + 0.02 * turn], -1)


def false_rows(batch: TensorDict) -> int:
    expected = cartpole(batch["observation"], batch["action"])
    return int(((batch["next", "observation"] - expected).abs() > 1e-4).any(-1).sum())


def pool_env() -> Any:
    return pytest.importorskip("envpool").make_gymnasium("CartPole-v1", num_envs=3)


CARTPOLES = {
    "one env": lambda: gym.make("CartPole-v1"),
    "native": lambda: gym.make_vec("CartPole-v1", num_envs=3),
    "sync": lambda: gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync"),
    "async": lambda: gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="async"),
    "envpool": pool_env,
}


@pytest.mark.parametrize("kind", CARTPOLES)
def test_a_rollout_for_evaluation_between_two_batches_of_cartpole(kind: str) -> None:
    env = CARTPOLES[kind]()
    collector, other = (Collector(env, frames_per_batch=96, writer=i) for i in range(2))
    try:
        with pytest.warns(UserWarning, match="give each its own env"):
            for _ in range(3):
                batches = [next(collector), rollout(env, num_steps=20), next(other)]
                assert [false_rows(batch) for batch in batches] == [0, 0, 0]
    finally:
        env.close()


@pytest.mark.parametrize("kind", CARTPOLES)
@pytest.mark.parametrize("steps", [0, 1, 30])
def test_after_an_evaluation_loop_by_hand_a_reset_of_the_collector_gives_true_rows(
    kind: str, steps: int
) -> None:
    env = CARTPOLES[kind]()
    collector = Collector(env, frames_per_batch=48)
    actions = 0 if kind == "one env" else np.zeros(3, np.int64)
    try:
        assert false_rows(next(collector)) == 0
        env.reset()
        for _ in range(steps):
            done = env.step(actions)[2]
            if kind == "one env" and done:
                env.reset()
        collector.reset()
        batch = next(collector)  # without a warning, which would be an error
        assert batch["is_init"][0] and false_rows(batch) == 0
    finally:
        env.close()


def test_a_collector_warns_once_of_moves_and_what_is_no_move() -> None:
    env = gym.make("CartPole-v1", render_mode="rgb_array")
    collector = Collector(env, frames_per_batch=5)
    first = next(collector)
    env.unwrapped.gravity = 9.7  # a parameter
    assert env.action_space.sample() in (0, 1) and env.metadata and env.spec
    second = next(collector)  # no warning, which would be an error: the episode continues
    assert torch.equal(second["collector", "traj_ids"][0], first["collector", "traj_ids"][-1])
    handle = as_vector_env(env)
    handle.reset()
    with pytest.warns(UserWarning, match="TimeLimit was stepped or reset") as warned:
        next(collector)
    handle.call("reset")  # a method of the env, called through flatroll
    assert next(collector)["is_init"][0] and len(warned) == 1


def false_steps(batch: TensorDict) -> int:
    step = batch["next", "observation"] - batch["observation"]
    return int((step != torch.tensor([0.0, 0.0, 1.0])).any(-1).sum())


class Engine:
    """Keeps its state where Python cannot see it, as simulators do."""

    __slots__ = ("place",)


class Simulator(gym.Env[Any, Any]):
    """Walks on from where a reset has put it."""

    observation_space, action_space = gym.spaces.Box(-1e9, 1e9, (1,), np.float64), gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.engine = Engine()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.engine.place = 1000 * self.np_random.random()
        return np.array([self.engine.place]), {}

    def step(self, action: Any) -> Any:
        self.engine.place += 1
        return np.array([self.engine.place]), 0.0, False, False, {}


@pytest.mark.parametrize("through_flatroll", [False, True])
def test_a_reset_and_just_as_many_steps_of_an_env_that_hides_its_state(through_flatroll: bool) -> None:
    """TimeLimit's counter is then what it was, and nothing else in Python shows that the env has moved."""
    env = gym.wrappers.TimeLimit(Simulator(), 100)
    collector = Collector(env, frames_per_batch=5)
    last = next(collector)
    if through_flatroll:
        rollout(env, num_steps=5)
        with pytest.warns(UserWarning, match="was stepped or reset by another collector"):
            batch = next(collector)
    else:
        env.reset()
        for _ in range(5):
            env.step(0)
        collector.reset()
        batch = next(collector)
    assert (batch["next", "observation"] - batch["observation"] - 1).abs().max() < 1e-9
    assert batch["is_init"][0] and not batch["is_init"][1:].any()
    ids = torch.cat([last["collector", "traj_ids"], batch["collector", "traj_ids"]])
    assert ids[:5].unique() != ids[5:].unique()  # no slice joins them


def test_a_limit_of_steps_after_another_collector_was_made_is_refused() -> None:
    """It changes the autoreset mode that the other one has its columns for."""
    handle = as_vector_env(make("sync NextStep", Script(2, lengths=9)))
    one, two = (
        Collector(handle, frames_per_batch=4),
        Collector(handle, frames_per_batch=4, max_frames_per_traj=3),
    )
    next(two)
    with pytest.raises(RuntimeError, match=r"was given a limit of steps .* set the limit first"):
        next(one)


def test_ids_that_one_collector_loads_are_no_crash_of_the_other() -> None:
    handle = TrajId(make("native SameStep", Script(2, lengths=9)))
    one, two = Collector(handle, frames_per_batch=4), Collector(handle, frames_per_batch=4)
    next(one)
    next(two)
    one.load_state_dict(one.state_dict())
    batch = next(two)
    assert batch["is_init"][0] and not false_steps(batch)


def test_an_adapted_env_says_that_another_has_moved_the_env() -> None:
    env = make("sync SameStep", Script(2))
    one, two = as_vector_env(env), as_vector_env(env)
    one.reset()
    two.reset()
    with pytest.raises(RuntimeError, match=r"through another adapted env.*call env.reset\(\) first"):
        one.step([0, 0])
    with pytest.raises(RuntimeError, match=r"through another adapted env"):
        one.reset(options={"reset_mask": np.array([True, False])})
    one.reset()
    one.step([0, 0])


def test_envs_that_cannot_be_hashed_or_weakly_referred_to_are_known_too() -> None:
    class Slotted:
        """A torch env without ``__dict__``, weak references or a hash."""

        __slots__ = ("_env",)
        __hash__ = None  # type: ignore[assignment]

        def __init__(self) -> None:
            self._env = ScriptedTorchEnv(Script(2, lengths=9))

        def __eq__(self, other: object) -> bool:
            return True

        def __getattr__(self, name: str) -> Any:
            if name == "unwrapped":
                return self
            return getattr(self._env, name)

        def reset(self, seed: Any = None, env_ids: Any = None, options: Any = None) -> Any:
            return self._env.reset(seed, env_ids, options)

        def step(self, action: Any) -> Any:
            return self._env.step(action)

    env, another = Slotted(), Slotted()
    collectors = [Collector(e, frames_per_batch=4) for e in (env, env, another)]
    batches = [next(collectors[i]) for i in (0, 1, 2, 0, 2, 1)]
    jumps = [
        (b["next", "observation"] - b["observation"] != torch.tensor([0.0, 0, 1])).sum() for b in batches
    ]
    assert not any(jumps)
    assert batches[4]["observation"][0, 2] == 2  # nobody else has moved this one


def test_trajectories_that_a_stranger_has_cut_are_not_waited_for() -> None:
    env = make("native SameStep", Script(2, lengths=[[4], [50]]))
    collector = Collector(env, frames_per_batch=6, trajs_per_batch=1)
    for _ in range(5):
        assert next(collector)["next", "done"][-1]
        rollout(env, num_steps=1)
    assert collector.rows_held <= 12  # not those of all five rounds


@pytest.mark.parametrize("handle", [lambda env: env, lambda env: as_vector_env(env.unwrapped)])
def test_a_policy_that_moves_the_env_is_refused(handle: Any) -> None:
    env = as_vector_env(make("native NextStep", Script(2, lengths=9)))
    calls: list[int] = []

    def policy(obs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            env.reset()
        return torch.zeros(2, dtype=torch.int64)

    collector = Collector(handle(env), policy, frames_per_batch=12)
    with pytest.raises(RuntimeError, match="was stepped or reset"):
        next(collector)
