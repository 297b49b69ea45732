"""Collectors, wrappers and policies: rows from a device, and between devices, equal those of the CPU."""

from typing import Any

import chip
import gymnasium as gym
import pytest
import torch
from chip_cases import Cases, Sim, leaves
from gymnasium import spaces
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Categorical

from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.modules import (
    CombinedCategorical,
    GRUModule,
    RunningNorm,
    actor,
    critic,
    q_network,
    set_epsilon,
    update_norms,
)
from flatroll.rollouts import (
    Collector,
    Evaluator,
    GroupCollector,
    MultiSyncCollector,
    RandomPolicy,
    batch_spec,
    check_env_specs,
    evaluate,
    rollout,
)
from flatroll.wrappers import (
    CompactObs,
    InitTracker,
    NextObservationDelta,
    NormalizeObservation,
    PettingZooSource,
    RecurrentPrimer,
    RewardSum,
    StepCounter,
    TrajId,
    as_vector_env,
)
from flatroll.wrappers.testing import (
    Script,
    ScriptedGame,
    ScriptedRslEnv,
    ScriptedTorchEnv,
    ScriptedVectorEnv,
    check_vector_env,
)

# Boxes without a clipping wrapper, and padding, which users are told of
pytestmark = [
    pytest.mark.filterwarnings("ignore:actions must lie in:UserWarning"),
    pytest.mark.filterwarnings("ignore:split_trajs=True pads:UserWarning"),
]
CASES = Cases()
MODES = ["SameStep", "NextStep", "Disabled"]


def linear(device: str) -> Any:
    """A policy without randomness."""
    torch.manual_seed(1)
    weights = torch.randn(3, 4).to(device)

    def act(obs: Any) -> Tensor:
        seen = obs if isinstance(obs, Tensor) else obs["policy"]
        return (seen @ weights).argmax(-1)

    return act


def batches(collector: Any) -> list[Any]:
    """All batches, each followed by the observations that no row of it holds."""
    found = []
    for batch in collector:
        found.append(batch.clone())
        if getattr(collector, "final", None) is not None:
            found.append(collector.final.clone())
    return found


def add_modes(mode: str) -> None:
    """Cases of one autoreset mode."""

    @CASES.add(f"tensors, {mode}", drives="Collector RewardSum StepCounter as_vector_env VectorStream")
    def _(d: str) -> Any:
        # in SAME_STEP mode infos of a step that ends an episode are unknown
        info = mode != "SameStep"
        env = RewardSum(StepCounter(as_vector_env(Sim(5, d, mode, info=info))))
        return batches(
            Collector(
                env,
                linear(d),
                frames_per_batch=37,
                total_frames=111,
                info_keys=["t", ("deep", "e")] if info else [],
                seed=0,
            )
        )

    @CASES.add(f"dicts, compact, {mode}", drives="Collector")
    def _(d: str) -> Any:
        env = RewardSum(StepCounter(as_vector_env(Sim(5, d, mode, "dict"))))
        return batches(
            Collector(env, linear(d), frames_per_batch=37, total_frames=111, compact_obs=True, seed=0)
        )

    @CASES.add(f"rollout and random actions, {mode}", drives="rollout")
    def _(d: str) -> Any:
        rows = rollout(as_vector_env(Sim(5, d, mode)), linear(d), num_steps=12, seed=0)
        collector = Collector(as_vector_env(Sim(5, d, mode)), frames_per_batch=40, total_frames=40, seed=0)
        return rows, batches(collector)

    @CASES.add(f"limits, {mode}", drives="StepCounter")
    def _(d: str) -> Any:
        env = RewardSum(StepCounter(as_vector_env(Sim(5, d, mode, "dict")), max_steps=3))
        first = Collector(env, linear(d), frames_per_batch=37, total_frames=74, seed=0)
        options: dict[str, Any] = {
            "frames_per_batch": 37,
            "total_frames": 74,
            "max_frames_per_traj": 4,
            "seed": 0,
        }
        second = Collector(as_vector_env(Sim(5, d, mode)), linear(d), **options)
        return batches(first), batches(second)

    @CASES.add(f"whole trajectories, {mode}")
    def _(d: str) -> Any:
        options: dict[str, Any] = {
            "frames_per_batch": 30,
            "trajs_per_batch": 3,
            "total_frames": 90,
            "seed": 0,
        }
        return batches(Collector(as_vector_env(Sim(5, d, mode)), linear(d), **options))

    @CASES.add(f"cuts and resets, {mode}")
    def _(d: str) -> Any:
        options: dict[str, Any] = {
            "set_truncated": True,
            "reset_at_each_iter": True,
            "init_random_frames": 45,
        }
        env = as_vector_env(Sim(5, d, mode))
        return batches(Collector(env, linear(d), frames_per_batch=30, total_frames=90, seed=0, **options))

    @CASES.add(f"differences, unknown last observations, {mode}", drives="NextObservationDelta")
    def _(d: str) -> Any:
        env = NextObservationDelta(as_vector_env(Sim(5, d, mode)))
        options = {"final_obs": None} if mode == "SameStep" else {}
        hiding = as_vector_env(Sim(5, d, mode, final="absent"), **options)
        return [
            batches(Collector(e, linear(d), frames_per_batch=37, total_frames=74, seed=0))
            for e in (env, hiding)
        ]

    @CASES.add(f"recurrent, {mode}", drives="actor critic", close=True)
    def _(d: str) -> Any:
        env = as_vector_env(Sim(5, d, mode))
        policy = actor(env, recurrent="gru" if mode == "SameStep" else "lstm", hidden=(8,), device="cpu").to(
            d
        )
        value = critic(env, actor=policy, shared=True, device=d)
        stride = 4 if mode == "NextStep" else 1
        found = batches(
            Collector(env, policy, frames_per_batch=37, total_frames=74, seed=0, state_stride=stride)
        )
        return found, value(found[0].clone())["state_value"]

    @CASES.add(f"evaluation, {mode}", drives="evaluate Evaluation")
    def _(d: str) -> Any:
        found = evaluate(as_vector_env(Sim(5, d, mode)), linear(d), episodes=12, seed=0)
        return found.returns, found.lengths

    @CASES.add(f"a NumPy env with its policy on the device, {mode}", close=True)
    def _(d: str) -> Any:
        env = ScriptedVectorEnv(Script(5), autoreset_mode=mode)
        policy = actor(env, recurrent="gru", hidden=(8,), device="cpu").to(d)
        options: dict[str, Any] = {"policy_device": d, "no_cuda_sync": mode == "NextStep"}
        return batches(Collector(env, policy, frames_per_batch=37, total_frames=74, seed=0, **options))

    @CASES.add(f"a NumPy env moved to the device, {mode}", drives="as_vector_env")
    def _(d: str) -> Any:
        inner = ScriptedVectorEnv(Script(5, obs="dict"), autoreset_mode=mode)
        env = as_vector_env(inner, framework="torch", device=d)
        act = lambda obs: obs["policy"][:, 2].long() % 5  # noqa: E731
        return batches(Collector(env, act, frames_per_batch=37, total_frames=74, seed=0))

    @CASES.add(f"the checks of an env, {mode}", drives="check_vector_env check_env_specs batch_spec")
    def _(d: str) -> Any:
        check_vector_env(as_vector_env(Sim(4, d, mode)), steps=30)
        check_env_specs(as_vector_env(Sim(4, d, mode)))
        return list(batch_spec(as_vector_env(Sim(4, d, mode))).keys(True, True))


for each in MODES:
    add_modes(each)


@CASES.add("markers one by one", drives="InitTracker StepCounter TrajId RewardSum ScriptedTorchEnv")
def _(d: str) -> Any:
    script = Script(5, lengths=[[3, 1], [7], [2, 5, 1], [1], [11]], obs="dict")
    env = RewardSum(InitTracker(StepCounter(TrajId(ScriptedTorchEnv(script, device=d)))))
    act = lambda obs: obs["policy"][:, 2].long() % 5  # noqa: E731
    return batches(Collector(env, act, frames_per_batch=40, total_frames=80, seed=0))


@CASES.add("wrappers by hand", drives="CompactObs NormalizeObservation")
def _(d: str) -> Any:
    found = []
    for wrap in (CompactObs, NormalizeObservation):
        env = wrap(as_vector_env(ScriptedTorchEnv(Script(3), device=d)))
        obs, _ = env.reset(seed=0)
        steps = [env.step(torch.arange(3, device=d) % 5) for _ in range(9)]
        found.append([obs, [step[:4] for step in steps]])
    return found


for obs_kind in ("float64", "uint8", "int64", "discrete", "tuple"):

    @CASES.add(f"observations: {obs_kind}", drives="ScriptedTorchEnv")
    def _(d: str, obs_kind: Any = obs_kind) -> Any:
        env = ScriptedTorchEnv(Script(3, obs=obs_kind), device=d)
        return batches(Collector(env, frames_per_batch=20, total_frames=40, seed=0))


for action_kind in ("box", "dict"):

    @CASES.add(f"actions: {action_kind}", drives="ScriptedTorchEnv")
    def _(d: str, action_kind: Any = action_kind) -> Any:
        env = ScriptedTorchEnv(Script(3, action=action_kind), device=d)
        return batches(Collector(env, frames_per_batch=20, total_frames=40, seed=0))


@CASES.add("ways to return last observations", drives="ScriptedTorchEnv ScriptedRslEnv as_vector_env")
def _(d: str) -> Any:
    envs = [
        ScriptedTorchEnv(Script(3), device=d, final_obs="ids"),
        ScriptedTorchEnv(Script(3), device=d, autoreset=False),
    ]
    found = [batches(Collector(env, frames_per_batch=20, total_frames=40, seed=0)) for env in envs]
    rsl = as_vector_env(ScriptedRslEnv(Script(3, action="box"), device=d), autoreset_mode="SameStep")
    still = lambda obs: torch.zeros(3, 2, device=d)  # noqa: E731
    return found, batches(Collector(rsl, still, frames_per_batch=20, total_frames=40))


@CASES.add("same-step resets of a NEXT_STEP env", drives="as_vector_env")
def _(d: str) -> Any:
    env = as_vector_env(Sim(4, d, "NextStep"), autoreset="same_step")
    env.reset(seed=0)
    return [env.step(torch.zeros(4, dtype=torch.long, device=d)) for _ in range(12)]


@CASES.add("running norms", drives="actor critic RunningNorm update_norms", close=True)
def _(d: str) -> Any:
    env = as_vector_env(Sim(5, d, kind="dict"))
    policy = actor(env, hidden=(8,), device=d)
    value = critic(env, actor=policy, device=d)
    found: list[Any] = []
    for batch in Collector(env, policy, frames_per_batch=40, total_frames=80, seed=0):
        update_norms(policy, batch)
        found += [batch, value(batch.clone())["state_value"]]
    norm = RunningNorm("observation", shape=(3,), device=d)
    norm.update(rollout(Sim(4, d), linear(d), num_steps=8, seed=0))
    return found, policy.state_dict(), norm.state_dict()


@CASES.add("distributions", drives="SquashedGaussian Gaussian actor", close=True)
def _(d: str) -> Any:
    found = []
    for options in ({}, {"squash": False, "std": "dependent"}):
        env = as_vector_env(Sim(5, d, box=True))
        policy = actor(env, hidden=(8,), device=d, **options)
        found.append(batches(Collector(env, policy, frames_per_batch=40, total_frames=80, seed=0)))
    return found


@CASES.add("action masks", drives="ActionMask q_network EpsilonGreedy set_epsilon", close=True)
def _(d: str) -> Any:
    env = as_vector_env(Sim(5, d, kind="dict", mask=True))
    net = q_network(env, hidden=(8,), epsilon=0.3, device=d)
    set_epsilon(net, 0.5)
    options: dict[str, Any] = {
        "frames_per_batch": 40,
        "total_frames": 80,
        "seed": 0,
        "init_random_frames": 20,
    }
    policies = (actor(env, hidden=(8,), device=d), net, None)
    return [batches(Collector(env, policy, **options)) for policy in policies]


@CASES.add("joint choices", drives="JointCategorical JointBernoulli actor", close=True)
def _(d: str) -> Any:
    found = []
    for action in (spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3), spaces.Discrete(3, start=2)):
        env = Sim(5, d)
        env.single_action_space = action
        policy = actor(as_vector_env(env), hidden=(8,), device=d)
        found.append(
            batches(Collector(as_vector_env(env), policy, frames_per_batch=40, total_frames=40, seed=0))
        )
    return found


@CASES.add("spaces of observations", drives="actor", close=True)
def _(d: str) -> Any:
    found = []
    for obs in ("discrete", "tuple", "int64"):
        env = as_vector_env(ScriptedTorchEnv(Script(3, obs=obs), device=d))
        policy = actor(env, hidden=(8,), device=d)
        found.append(batches(Collector(env, policy, frames_per_batch=20, total_frames=40, seed=0)))
    return found


@CASES.add("modules of tensordict", drives="GRUModule", close=True)
def _(d: str) -> Any:
    gru = GRUModule(3, 8, in_key="observation", out_key="features")
    logits = TensorDictModule(nn.Linear(8, 4), ["features"], ["logits"])
    choose = ProbabilisticTensorDictModule(
        ["logits"],
        ["action"],
        distribution_class=Categorical,
        distribution_kwargs={"validate_args": False},
        return_log_prob=True,
    )
    policy = ProbabilisticTensorDictSequential(gru, logits, choose).to(d)
    return batches(Collector(as_vector_env(Sim(5, d)), policy, frames_per_batch=40, total_frames=80, seed=0))


@CASES.add("a callable with is_init")
def _(d: str) -> Any:
    seen = []

    def policy(obs: Tensor, is_init: Tensor) -> Tensor:
        seen.append(is_init.clone())
        return obs[:, 2].long() % 4

    found = batches(Collector(as_vector_env(Sim(5, d)), policy, frames_per_batch=40, total_frames=80, seed=0))
    return found, seen


@CASES.add("into a buffer, with policy versions", drives="Collector ReplayBuffer LazyTensorStorage")
def _(d: str) -> Any:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, device=d, compact_obs=True), batch_size=10)
    options: dict[str, Any] = {"compact_obs": True, "replay_buffer": buffer, "track_policy_version": True}
    collector = Collector(
        as_vector_env(Sim(5, d)), linear(d), frames_per_batch=40, total_frames=120, seed=0, **options
    )
    for _ in collector:
        collector.update_policy_weights_()
    return buffer[:]


@CASES.add("a resumed collector", drives="Collector")
def _(d: str) -> Any:
    def made() -> Any:
        return Collector(as_vector_env(Sim(5, d)), linear(d), frames_per_batch=37, total_frames=148, seed=0)

    first = made()
    next(first)
    second = made()
    second.load_state_dict(first.state_dict())
    return next(second)


@CASES.add("an evaluator beside the collector", drives="Evaluator")
def _(d: str) -> Any:
    policy = actor(as_vector_env(Sim(5, d)), hidden=(8,), device=d)
    evaluator = Evaluator(as_vector_env(Sim(5, d)), policy, episodes=6, every=1, seed=0)
    return evaluator(1), evaluator.best_frames


def add_places(env_on: str, policy_on: str | None, storing: str | None, no_sync: bool) -> None:
    """A case of an env, a policy and batches on these devices, "chip" or "cpu"."""

    @CASES.add(f"env on {env_on}, policy on {policy_on}, storing on {storing}, {no_sync}", close=True)
    def _(d: str) -> Any:
        def place(name: str | None) -> str | None:
            return d if name == chip.NAME else name

        env = as_vector_env(Sim(5, str(place(env_on))))
        policy = actor(env, hidden=(8,), device="cpu").to(str(place(policy_on) or place(env_on)))
        options: dict[str, Any] = {"policy_device": place(policy_on), "storing_device": place(storing)}
        collector = Collector(
            env, policy, frames_per_batch=37, total_frames=74, no_cuda_sync=no_sync, seed=0, **options
        )
        found = list(collector)
        chip.synchronize()  # as the user must before reading
        return found


for env_on in ("cpu", chip.NAME):
    for policy_on in ("cpu", chip.NAME):
        for storing in (None, "cpu", chip.NAME):
            add_places(env_on, policy_on, storing, no_sync=storing != "cpu")
add_places(chip.NAME, None, "cpu", no_sync=True)


@CASES.add("envs in two halves, policy on the device", close=True)
def _(d: str) -> Any:
    env = gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="async")
    policy = actor(env, hidden=(8,), recurrent="gru", device="cpu").to(d)
    collector = Collector(
        env, policy, frames_per_batch=40, total_frames=80, splits=2, policy_device=d, seed=0
    )
    found = batches(collector)
    collector.shutdown()
    return found


@CASES.add("choices that are masked in combination", drives="CombinedCategorical", close=True)
def _(d: str) -> Any:
    dist = CombinedCategorical(torch.linspace(-1, 1, 12, device=d).view(2, 6), nvec=(2, 3))
    drawn = dist.sample()
    return dist.mode, drawn, dist.log_prob(drawn), dist.entropy()


@CASES.add("a policy of random actions", drives="RandomPolicy")
def _(d: str) -> Any:
    env = as_vector_env(Sim(5, d))
    policy = RandomPolicy(env.single_action_space)
    return batches(Collector(env, policy, frames_per_batch=40, total_frames=40, seed=0))


@CASES.add("states that the env's wrapper declares", drives="RecurrentPrimer", close=True)
def _(d: str) -> Any:
    gru = GRUModule(3, 8, in_key="observation", out_key="features")
    logits = TensorDictModule(nn.Linear(8, 4), ["features"], ["logits"])
    choose = TensorDictModule(lambda x: x.argmax(-1), ["logits"], ["action"])
    policy = TensorDictSequential(gru, logits, choose).to(d)
    env = RecurrentPrimer(as_vector_env(Sim(5, d)), policy)
    return batches(Collector(env, policy, frames_per_batch=40, total_frames=40, seed=0))


@CASES.add("groups of agents", drives="GroupCollector PettingZooSource ScriptedGame", close=True)
def _(d: str) -> Any:
    groups = PettingZooSource.groups(ScriptedGame(), {"front": ["a0"], "rear": ["a1", "a2"]})
    return GroupCollector(groups, steps_per_batch=4, seed=0).rollout()


def make_cartpole() -> Any:
    """An env of a worker process."""
    return gym.make("CartPole-v1")


@CASES.add("workers, storing on the device", drives="MultiSyncCollector MultiCollector")
def _(d: str) -> Any:
    options: dict[str, Any] = {"num_workers": 2, "frames_per_batch": 6, "total_frames": 6, "seed": 0}
    with MultiSyncCollector(make_cartpole, storing_device=d, **options) as collector:
        batch = next(collector)
        return batch.batch_size, str(batch["observation"].device.type == torch.device(d).type)


@CASES.parametrized
def test_equal(name: str) -> None:
    CASES.check(name)


@pytest.mark.parametrize("how", ["buffer", "compact", "postproc", "split_trajs", "hook"])
def test_what_reads_rows_at_once_gets_finished_ones(how: str) -> None:
    """Without waiting for copies to the CPU, which only the caller can do later."""

    def collect(device: str, wait: bool) -> Any:
        options: dict[str, Any] = {}
        seen: list[Any] = []
        buffer = ReplayBuffer(storage=LazyTensorStorage(100, compact_obs=how == "compact"), batch_size=10)
        if how in ("buffer", "compact"):
            options = {"replay_buffer": buffer, "compact_obs": how == "compact"}
        if how == "postproc":
            options = {"postproc": lambda batch: batch.set("double", batch["next", "reward"] * 2)}
        if how == "hook":
            options = {"post_collect_hook": lambda batch: seen.append(batch["observation"].clone())}
        if how == "split_trajs":
            options = {"split_trajs": True}
        collector = Collector(
            as_vector_env(Sim(5, device)),
            linear(device),
            frames_per_batch=40,
            total_frames=80,
            storing_device="cpu",
            no_cuda_sync=not wait,
            seed=0,
            **options,
        )
        found = list(collector)
        chip.synchronize()
        return buffer[:] if "replay_buffer" in options else (found, seen)

    expected, found = (dict(leaves(each)) for each in (collect("cpu", True), collect(chip.NAME, False)))
    assert len(expected) > 1
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_last_observation_without_numbers_is_waited_for() -> None:
    """A copy of an empty tensor would not wait for the others."""

    class Empty(Sim):
        def observe(self) -> Any:
            return {"policy": super().observe(), "z": torch.zeros(self.num_envs, 0, device=self.device)}

    env = Empty(4, chip.NAME)
    vector = env.single_observation_space
    env.single_observation_space = spaces.Dict({"policy": vector, "z": spaces.Box(-1.0, 1.0, (0,))})
    seen: list[bool] = []

    def policy(obs: Any) -> Tensor:
        seen.append(bool(obs["policy"].isfinite().all()))
        return obs["policy"][:, 2].nan_to_num(0).long() % 4

    next(Collector(env, policy, frames_per_batch=40, policy_device="cpu", seed=0))
    assert all(seen) and seen


def test_a_policy_sees_finished_observations() -> None:
    seen: list[bool] = []

    def policy(obs: Tensor) -> Tensor:
        seen.append(bool(obs.isfinite().all()))
        return obs[:, 2].long() % 4

    options: dict[str, Any] = {"policy_device": "cpu", "no_cuda_sync": True, "seed": 0}
    next(Collector(Sim(4, chip.NAME), policy, frames_per_batch=40, **options))
    assert all(seen) and seen


def test_actions_outside_the_space_are_refused() -> None:
    collector = Collector(
        as_vector_env(Sim(5, chip.NAME)),
        lambda o: o[:, 2].long() + 9,
        frames_per_batch=40,
        total_frames=400,
        seed=0,
    )
    with pytest.raises(ValueError, match="action"):
        list(collector)
