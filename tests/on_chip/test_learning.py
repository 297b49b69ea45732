"""Estimators, losses, updates and recurrent modules: numbers and gradients of a device equal the CPU's."""

import tempfile
from typing import Any

import gymnasium as gym
import pytest
import torch
from chip_cases import Cases, Sim
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from benchmarks.bench_gae import Data, call_of, module
from flatroll import estimators, modules
from flatroll.buffers import LazyTensorStorage
from flatroll.deploy import export_policy
from flatroll.estimators import (
    GAE,
    A2CLoss,
    ClipPPOLoss,
    DiscreteSACLoss,
    DQNLoss,
    GroupAdvantage,
    HardUpdate,
    KLPENPPOLoss,
    PPOLoss,
    ReinforceLoss,
    RewardScale,
    SACLoss,
    SoftUpdate,
    critic_ensemble,
    target_copy,
    update_step,
)
from flatroll.layout import audit, run_starts
from flatroll.modules import (
    GRU,
    LSTM,
    RND,
    BurnIn,
    DeltaNetModule,
    FFMModule,
    GRUCell,
    GRUModule,
    LinearRecurrentModule,
    LRUModule,
    LSTMCell,
    LSTMModule,
    MinGRUModule,
    S6Module,
    TensorDictPrimer,
    TransformerModule,
    actor,
    critic,
    q_network,
    set_recurrent_mode,
)
from flatroll.rollouts import Collector, rollout
from flatroll.wrappers import as_vector_env

CASES = Cases()


@CASES.add("ExportedPolicy", drives="ExportedPolicy")
def _(d: str) -> Any:
    """A policy and rows on the device: both are copied to the host, where the file is compared."""
    torch.manual_seed(0)
    policy = modules.actor(gym.make_vec("CartPole-v1", num_envs=2), hidden=(8,), recurrent="gru", device=d)
    is_init = torch.arange(12, device=d).remainder(4).eq(0).unsqueeze(1)
    rows = TensorDict({"observation": torch.rand(12, 4, device=d), "is_init": is_init}, [12])
    with tempfile.TemporaryDirectory() as folder:
        exported = export_policy(policy, f"{folder}/policy.pt2", batch=rows)
    return exported.inputs, exported.outputs, exported.rows, exported.largest_difference


def collected(device: str, env: Any, policy: Any) -> TensorDict:
    """A batch of a policy that lies on the device."""
    batch = next(Collector(env, policy, frames_per_batch=60, seed=0))
    return batch


def gradients(losses: Any, *networks: nn.Module) -> Any:
    """The losses, and the gradients of their sum."""
    total = sum(value for key, value in losses.items() if key.startswith("loss"))
    assert isinstance(total, Tensor)
    total.backward()  # type: ignore[no-untyped-call]
    given = [parameter.grad for network in networks for parameter in network.parameters()]
    return dict(losses.items()), [grad for grad in given if grad is not None]


for function in (
    "generalized_advantage_estimate",
    "td_lambda_return_estimate",
    "td1_return_estimate",
    "td0_return_estimate",
    "vtrace_advantage_estimate",
    "reward2go",
):

    @CASES.add(function, drives=function, close=True)
    def _(d: str, function: str = function) -> Any:
        return call_of(function, Data.of(600, 40).to(d))()


for estimator in ("GAE", "TD0Estimator", "TD1Estimator", "TDLambdaEstimator", "VTrace"):

    @CASES.add(estimator, drives=estimator, close=True)
    def _(d: str, estimator: str = estimator) -> Any:
        batch = Data.of(600, 40).to(d).batch()
        found = [module(estimator)(batch.clone())]
        if estimator != "VTrace":
            found.append(module(estimator, shifted=True)(batch.clone()))
        return [(one["advantage"], one["value_target"]) for one in found]


@CASES.add("GroupAdvantage", drives="GroupAdvantage", close=True)
def _(d: str) -> Any:
    batch = Data.of(600, 40).to(d).batch()
    run = run_starts(batch).cumsum(0)
    batch["group"] = run % 3
    return [GroupAdvantage(std=std, leave_one_out=std)(batch.clone())["advantage"] for std in (False, True)]


@CASES.add("RewardScale of rows [B, T]", drives="RewardScale", close=True)
def _(d: str) -> Any:
    """As many trajectories stay open as the batch has rows, not as its first dim has."""
    rewards = torch.arange(12.0, device=d).view(4, 3)
    ids = torch.arange(12, device=d).view(4, 3)
    done = torch.zeros(4, 3, dtype=torch.bool, device=d)
    batch = TensorDict({"next": {"reward": rewards, "done": done}, "collector": {"traj_ids": ids}}, [4, 3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flatroll.modules.reward_scale._PLACES", 2)
        scale = RewardScale(gamma=0.5).to(d)
        scale.update(batch)
        scale.update(batch)
    return [scale.statistics.var, scale.open_ids.sort().values, scale.open_returns.sort().values]


@CASES.add("RND, and a return over the ends of episodes", drives="RND GAE", close=True)
def _(d: str) -> Any:
    torch.manual_seed(0)
    env = as_vector_env(Sim(5, d))
    rnd = RND(env, hidden=(8,)).to(d)
    value = critic(env, hidden=(8,), device=d)
    collector = Collector(env, lambda obs: obs[:, 2].long() % 4, frames_per_batch=60, track_envs=True, seed=0)
    batch = next(collector)

    reward = rnd.update(batch)["next", "intrinsic_reward"]
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=value, episodic=False)
    gae.set_keys(reward="intrinsic_reward")
    return [reward, rnd.loss(batch).detach(), gae(batch)["advantage"]]


@CASES.add("GAE of compact and hidden rows", drives="GAE RewardScale", close=True)
def _(d: str) -> Any:
    found = []
    for options in ({}, {"final_obs": None}):
        env = as_vector_env(Sim(5, d, final="absent" if options else "dense"), **options)
        value = critic(env, hidden=(8,), device=d)
        collector = Collector(
            env, lambda obs: obs[:, 2].long() % 4, frames_per_batch=60, compact_obs=not options, seed=0
        )
        batch = next(collector)
        scale = RewardScale(gamma=0.9).to(d)
        scale.update(batch)
        gae = GAE(
            gamma=0.9,
            lmbda=0.8,
            value_network=value,
            reward_scale=scale,
            shifted=not options,
            bootstrap_missing="current",
        )
        if options:
            found.append(gae(batch)["advantage"])
        else:
            found.append(gae(batch, final=collector.final)["advantage"])
    return found


for loss_kind in (PPOLoss, ClipPPOLoss, KLPENPPOLoss, A2CLoss):

    @CASES.add(loss_kind.__name__, drives=f"{loss_kind.__name__} UpdateStep update_step", close=True)
    def _(d: str, loss_kind: Any = loss_kind) -> Any:
        env = as_vector_env(Sim(5, d, box=loss_kind is PPOLoss))
        policy, value = actor(env, hidden=(8,), device=d), critic(env, hidden=(8,), device=d)
        batch = GAE(gamma=0.9, lmbda=0.8, value_network=value)(collected(d, env, policy))
        loss = loss_kind(policy, value)
        found = gradients(loss(batch.clone()), policy, value)
        step = update_step(loss, torch.optim.SGD(loss.parameters(), lr=1e-3), max_grad_norm=0.5)
        return found, dict(step(batch).items()), loss.state_dict()


@CASES.add("ReinforceLoss", drives="ReinforceLoss reward2go", close=True)
def _(d: str) -> Any:
    env = as_vector_env(Sim(5, d))
    policy = actor(env, hidden=(8,), device=d)
    batch = collected(d, env, policy)
    batch["advantage"] = estimators.reward2go(batch["next", "reward"], batch["next", "done"], 0.9)
    return gradients(ReinforceLoss(policy)(batch), policy)


@CASES.add("DQNLoss", drives="DQNLoss SoftUpdate HardUpdate target_copy q_network", close=True)
def _(d: str) -> Any:
    env = as_vector_env(Sim(5, d))
    network = q_network(env, hidden=(8,), epsilon=0.1, device=d)
    batch = rollout(env, lambda obs: obs[:, 2].long() % 4, num_steps=12, seed=0)
    loss = DQNLoss(network, double_dqn=True).make_value_estimator(gamma=0.9)
    found = gradients(loss(batch), network)
    soft, hard = SoftUpdate(loss, tau=0.1), HardUpdate(loss, value_network_update_interval=1)
    soft.step()
    first = {key: value.clone() for key, value in loss.state_dict().items()}
    hard.step()
    return found, first, loss.state_dict(), [*target_copy(network).parameters()]


@CASES.add("DiscreteSACLoss", drives="DiscreteSACLoss", close=True)
def _(d: str) -> Any:
    env = as_vector_env(Sim(5, d))
    policy = actor(env, hidden=(8,), device=d)
    values = q_network(env, hidden=(8,), device=d)
    batch = rollout(env, lambda obs: obs[:, 2].long() % 4, num_steps=12, seed=0)
    loss = DiscreteSACLoss(policy, values, num_actions=4, num_qvalue_nets=2).make_value_estimator(gamma=0.9)
    return gradients(loss(batch), policy)


@CASES.add("SACLoss", drives="SACLoss", close=True)
def _(d: str) -> Any:
    env = as_vector_env(Sim(5, d, box=True))
    policy = actor(env, hidden=(8,), device=d)
    batch = rollout(env, lambda obs: obs[:, :2].tanh(), num_steps=12, seed=0)
    net = Joined(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))).to(d)
    value = TensorDictModule(net, ["observation", "action"], ["state_action_value"])
    loss = SACLoss(policy, value, num_qvalue_nets=2).make_value_estimator(gamma=0.9)
    return gradients(loss(batch), policy)


class Joined(nn.Module):
    """A network of the observation and the action."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        out: Tensor = self.net(torch.cat([obs, action], -1))
        return out


@CASES.add("RewardScale over batches", drives="RewardScale", close=True)
def _(d: str) -> Any:
    scale = RewardScale(gamma=0.9).to(d)
    found = []
    collector = Collector(
        as_vector_env(Sim(5, d)),
        lambda obs: obs[:, 2].long() % 4,
        frames_per_batch=37,
        total_frames=148,
        seed=0,
    )
    for batch in collector:
        scale.update(batch)
        found.append((scale(batch)["next", "reward_scaled"], scale.statistics.mean, scale.statistics.var))
    used = scale.open_ids.cpu() > -(2**62)
    on_host = RewardScale(gamma=0.9)
    on_host.load_state_dict(scale.state_dict())
    on_host.update(batch.cpu())
    return (
        found,
        scale.open_ids.cpu()[used],
        scale.open_returns.cpu()[used],
        on_host.statistics.mean,
        on_host.open_ids,
    )


def add_recurrent() -> None:
    """Cases of recurrent modules, with and without rows to burn in."""
    kinds: dict[str, Any] = {
        "GRUModule": GRUModule,
        "LSTMModule": LSTMModule,
        "MinGRUModule": MinGRUModule,
        "LinearRecurrentModule": LinearRecurrentModule,
        "LRUModule": LRUModule,
        "S6Module": S6Module,
        "FFMModule": FFMModule,
        "DeltaNetModule": DeltaNetModule,
    }
    for name, kind in kinds.items():
        for burn_in in (0, 2):
            for backend in ("auto", "packed", "pad") if name == "GRUModule" else ("auto",):

                @CASES.add(f"{name}, burn_in={burn_in}, {backend}", drives=name, close=True)
                def _(d: str, kind: Any = kind, burn_in: int = burn_in, backend: str = backend) -> Any:
                    options = {} if backend == "auto" else {"recurrent_backend": backend}
                    net = kind(6, 8, in_key="observation", out_key="features", **options)
                    starts = torch.rand(60, 1) < 0.15
                    batch = TensorDict({"observation": torch.randn(60, 6), "is_init": starts}, [60])
                    for key, zero in net.make_tensordict_primer().defaults.items():
                        batch[key] = torch.randn(60, *zero.shape)
                    net.to(d)
                    with set_recurrent_mode(True, burn_in=burn_in):
                        features = net(batch.to(d))["features"]
                    features.square().sum().backward()
                    return features, [parameter.grad for parameter in net.parameters()]


add_recurrent()


def add_transformers() -> None:
    """Cases of whole runs, and of steps with a cache."""
    for context, position in ((None, "rotary"), (4, "rotary"), (4, "learned")):
        for burn_in in (0, 2):

            @CASES.add(
                f"TransformerModule, {context}, {position}, {burn_in}", drives="TransformerModule", close=True
            )
            def _(d: str, context: Any = context, position: Any = position, burn_in: int = burn_in) -> Any:
                net = TransformerModule(
                    6, 8, 2, context=context, position=position, in_key="observation", out_key="features"
                )
                starts = torch.rand(60, 1) < 0.15
                starts[0] = True
                batch = TensorDict({"observation": torch.randn(60, 6), "is_init": starts}, [60]).to(d)
                net.to(d)
                with set_recurrent_mode(True, burn_in=burn_in):
                    features = net(batch)["features"]
                features.square().mean().backward()

                batch["next", "done"] = torch.cat([starts[1:], starts[:1]]).to(d)
                windows = []
                caches = None
                with set_recurrent_mode(True), torch.no_grad():
                    for window in batch.split(25):
                        with net.begin_from(caches) as after:
                            windows.append(net(window)["features"])
                        caches = after
                batch = batch.select("observation", "is_init")

                step = net.make_tensordict_primer().expand(1, device=d)
                steps = []
                with torch.no_grad():
                    for row in batch.split(1):
                        step = net(step.update(row))
                        steps.append(step["features"])
                        for key in ("_cache", "_cache_steps"):
                            step[key] = step["next", key]
                grads = [parameter.grad for parameter in net.parameters()]
                return features, grads, torch.cat(windows), torch.cat(steps)


add_transformers()


@CASES.add("BurnIn", drives="BurnIn")
def _(d: str) -> Any:
    net = GRUModule(3, 8, in_key="observation", out_key="features").to(d)
    batch = rollout(as_vector_env(Sim(4, d)), lambda obs: obs[:, 2].long() % 4, num_steps=8, seed=0)
    batch.update(net.make_tensordict_primer().expand(len(batch)).to(d))
    return sorted(BurnIn([net], burn_in=2)(batch).keys(True, True), key=str)


@CASES.add("networks", drives="GRU LSTM GRUCell LSTMCell TensorDictPrimer", close=True)
def _(d: str) -> Any:
    found: list[Any] = []
    for network, cell in ((GRU(3, 8), GRUCell(3, 8)), (LSTM(3, 8), LSTMCell(3, 8))):
        out, state = network.to(d)(torch.ones(2, 5, 3, device=d))
        begins = torch.tensor([True, False], device=d)
        before = torch.ones(2, 8, device=d)
        states = before if isinstance(cell, GRUCell) else (before, before)
        found += [out, state, cell.to(d)(torch.ones(2, 3, device=d), states, begins)]
    primer = TensorDictPrimer({"recurrent_state": torch.zeros(1, 8)})
    return found, primer.expand(3, device=d)


@CASES.add(
    "critic_ensemble and other estimates", drives="critic_ensemble ValueEstimators LossModule", close=True
)
def _(d: str) -> Any:
    value = TensorDictModule(nn.Linear(3, 1), ["observation"], ["state_action_value"]).to(d)
    first, second = critic_ensemble(value)
    batch = rollout(as_vector_env(Sim(4, d)), lambda obs: obs[:, 2].long() % 4, num_steps=8, seed=0)
    data = Data.of(600, 40).to(d)
    after = (data.next_value, data.reward, data.done, data.terminated)
    td = estimators.td_lambda_advantage_estimate(0.9, 0.8, data.value, *after)
    return first(batch.clone())["state_action_value"], second(batch)["state_action_value"].shape, td


@CASES.add("recurrent values of a compact batch", drives="GAE", close=True)
def _(d: str) -> Any:
    env = as_vector_env(Sim(5, d))
    policy = actor(env, hidden=(8,), recurrent="gru", device=d)
    value = critic(env, hidden=(8,), recurrent="gru", device=d)
    collector = Collector(env, policy, frames_per_batch=60, compact_obs=True, seed=0)
    batch = next(collector)
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=value, shifted=True)
    return gae(batch, final=collector.final)["advantage"]


def stream_of_six(device: str, *, final_rows: list[int]) -> tuple[TensorDict, TensorDict]:
    """A compact run of six rows, and a final with the observations 30, 31, ... for these rows."""
    done = torch.zeros(6, 1, dtype=torch.bool)
    columns = {
        "observation": torch.arange(6.0)[:, None],
        "is_init": torch.arange(6)[:, None] == 0,
        "next": {"reward": torch.ones(6, 1), "done": done, "terminated": done},
    }
    after = 30 + torch.arange(float(len(final_rows)))[:, None]
    final = {"row": torch.tensor(final_rows), "next": {"observation": after}}
    return TensorDict(columns, [6]).to(device), TensorDict(final, [len(final_rows)]).to(device)


def add_finals() -> None:
    """Cases of a ``final`` that holds more than the ends of runs."""
    for name, rows in {"inside a run": [2, 5], "behind the batch": [5, 9], "of both": [1, 5, 7, 8]}.items():
        for kind in ("plain", "batch norm", "gru"):

            @CASES.add(f"final rows {name}, {kind}", drives="GAE", close=True)
            def _(d: str, rows: list[int] = rows, kind: str = kind) -> Any:
                batch, final = stream_of_six(d, final_rows=rows)
                module: Any = TensorDictModule(nn.Linear(1, 1), ["observation"], ["state_value"])
                if kind == "batch norm":
                    layers = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
                    module = TensorDictModule(layers, ["observation"], ["state_value"])
                if kind == "gru":
                    gru = GRUModule(1, 4, in_key="observation", out_key="features", state="zero")
                    module = TensorDictSequential(
                        gru, TensorDictModule(nn.Linear(4, 1), ["features"], ["state_value"])
                    )
                gae = GAE(gamma=0.9, lmbda=0.8, value_network=module.to(d), shifted=True)
                return gae(batch, final=final)["value_target"]


add_finals()


@CASES.add("RewardScale of padded rows", drives="RewardScale", close=True)
def _(d: str) -> Any:
    scale = RewardScale(gamma=0.9).to(d)
    for turn in range(3):
        columns = {
            "collector": {
                "traj_ids": torch.tensor([0, 0, 1, turn + 2], dtype=torch.int32),
                "mask": torch.tensor([True, True, False, True]),
            },
            "next": {
                "reward": torch.ones(4, 1),
                "done": torch.tensor([[False], [turn == 1], [False], [True]]),
            },
        }
        scale.update(TensorDict(columns, [4]).to(d))
    used = scale.open_ids.cpu() > -(2**62)
    unused = scale.open_returns.cpu()[~used]
    return scale.statistics.mean, scale.statistics.var, scale.open_ids.cpu()[used], bool((unused == 0).all())


@CASES.parametrized
def test_equal(name: str) -> None:
    CASES.check(name)


def test_a_final_that_lacks_a_row_gives_nan_on_a_device() -> None:
    """On the CPU it is an error, for which a device would be waited for."""

    def estimate(device: str) -> Any:
        env = as_vector_env(Sim(5, device), final_obs="final_obs")
        value = critic(env, hidden=(8,), device=device)
        collector = Collector(
            env, lambda obs: obs[:, 2].long() % 4, frames_per_batch=60, compact_obs=True, seed=0
        )
        batch = next(collector)
        done = batch["next", "terminated"].squeeze(-1)[collector.final["row"]]
        kept = collector.final[~done][1:]
        gae = GAE(gamma=0.9, lmbda=0.8, value_network=value, shifted=True)
        return gae(batch, final=kept)["value_target"].isnan()

    with pytest.raises(ValueError, match="final has no next observation"):
        estimate("cpu")
    lost = estimate("chip")
    assert lost.any() and not lost.all()


def test_networks_elsewhere_are_refused_with_both_devices() -> None:
    env = as_vector_env(Sim(5, "chip"))
    policy = actor(env, hidden=(8,), device="cpu")
    with pytest.raises(RuntimeError, match=r"chip.*cpu|cpu.*chip") as caught:
        next(Collector(env, policy, frames_per_batch=20))
    assert "parameters are on cpu, its input is on chip:0" in str(caught.value.__notes__)

    net = GRUModule(3, 8, in_key="observation", out_key="features")
    batch = rollout(env, lambda obs: obs[:, 2].long() % 4, num_steps=4, seed=0)
    with pytest.raises(ValueError, match="is on chip:0, the weights are on cpu"):
        net(batch)


def test_a_batch_on_two_devices_is_found() -> None:
    batch = rollout(as_vector_env(Sim(4, "chip")), lambda obs: obs[:, 2].long() % 4, num_steps=4, seed=0)
    batch["next", "done"] = batch["next", "done"].cpu()
    (finding,) = audit(batch)
    assert finding.rule == "device" and "on cpu" in finding.text and "on chip:0" in finding.text


def test_a_device_that_torch_cannot_use_is_refused_by_name() -> None:
    cartpole = gym.make_vec("CartPole-v1", num_envs=2)
    calls = [
        lambda: LazyTensorStorage(10, device="cuda"),
        lambda: actor(cartpole, device="cuda"),
        lambda: as_vector_env(cartpole, framework="torch", device="cuda"),
        lambda: Collector(cartpole, None, frames_per_batch=4, storing_device="cuda"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="device='cuda' cannot be used here"):
            call()


def test_an_env_on_another_device_names_both() -> None:
    env = as_vector_env(Sim(4, "cpu"), device="chip")
    with pytest.raises(ValueError, match="'chip' was expected, but Sim returns tensors on 'cpu'"):
        env.reset(seed=0)
    with pytest.raises(ValueError, match="env_device='chip', but the env's arrays are on cpu"):
        Collector(as_vector_env(Sim(4, "cpu")), None, frames_per_batch=4, env_device="chip")
