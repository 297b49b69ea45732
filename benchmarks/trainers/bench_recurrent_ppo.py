"""Benchmarks a whole recurrent PPO round, beside sb3-contrib's RecurrentPPO, in frames per second.

``python -m flatroll bench recurrent_ppo``. The peer is not a dependency: without it the table only has our half.
"""

import importlib.util
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias

import gymnasium as gym
import torch
from tensordict.nn import ProbabilisticTensorDictModule as Sampler
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical

from benchmarks.measure.timing import Timing, ratio, table, take_turns
from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.estimators import GAE, ClipPPOLoss
from flatroll.examples.recurrent_ppo import HideVelocities
from flatroll.layout import run_starts
from flatroll.modules import LSTMModule
from flatroll.rollouts import Collector

ENVS, STEPS, HIDDEN, EPOCHS, MINIBATCHES = 64, 128, 64, 4, 4
FRAMES = ENVS * STEPS
TURNS = 5

Run: TypeAlias = Callable[[], object]


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())


def ours(how: str) -> Run:
    """Return one PPO round: collect, estimate, store, 4 x 4 minibatches; ``how``: vectorization mode."""
    lstm = LSTMModule(2, HIDDEN, in_key="observation", out_key="features")
    policy = TensorDictModule(nn.Sequential(layer(), nn.Linear(HIDDEN, 2)), ["features"], ["logits"])
    unchecked: Any = {"validate_args": False}  # as the peer has it
    choose = Sampler(
        ["logits"],
        ["action"],
        distribution_class=Categorical,
        distribution_kwargs=unchecked,
        return_log_prob=True,
    )
    head = TensorDictModule(nn.Sequential(layer(), nn.Linear(HIDDEN, 1)), ["features"], ["state_value"])
    act: list[Any] = [lstm, policy, choose]
    judge: list[Any] = [lstm, head]
    actor = ProbabilisticTensorDictSequential(*act)
    states = [("next", key) for key in lstm.make_tensordict_primer().defaults]
    env = HideVelocities(gym.make_vec("CartPole-v1", num_envs=ENVS, vectorization_mode=how))
    acting = actor.select_out_keys("action", "action_log_prob", *states)
    collector = Collector(env, acting, frames_per_batch=FRAMES, compact_obs=True, seed=0)
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=TensorDictSequential(*judge), shifted=True)
    loss = ClipPPOLoss(actor, head, critic_coeff=0.5, loss_critic_type="l2", normalize_advantage=True)
    weights = [*actor.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(weights, lr=3e-4, eps=1e-5, fused=True)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(FRAMES), sampler=SliceSampler(slice_len=STEPS, fill=False)
    )

    def run() -> None:
        batch = next(collector)
        gae(batch, final=collector.final)
        buffer.extend(batch)
        part = max(1, int(run_starts(batch).sum()) // MINIBATCHES)
        for _ in range(EPOCHS * MINIBATCHES):
            losses = loss(buffer.sample(STEPS * part))
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
            nn.utils.clip_grad_norm_(weights, 0.5)
            optimizer.step()

    return run


def peer_model(flat: bool = False) -> Any:
    """A model of sb3-contrib with one LSTM for actor and critic; ``flat``: `unpadded`. None if not installed."""
    if not importlib.util.find_spec("sb3_contrib"):
        return None
    dummy: Any = import_module("stable_baselines3.common.vec_env").DummyVecEnv

    def make() -> Any:
        env = gym.make("CartPole-v1")
        space = gym.spaces.Box(-10, 10, (2,))
        return gym.wrappers.TransformObservation(env, lambda obs: obs[::2], space)

    model: Any = import_module("sb3_contrib").RecurrentPPO(
        "MlpLstmPolicy",
        dummy([make] * ENVS),
        n_steps=STEPS,
        batch_size=FRAMES // MINIBATCHES,
        n_epochs=EPOCHS,
        policy_kwargs={
            "lstm_hidden_size": HIDDEN,
            "shared_lstm": True,
            "enable_critic_lstm": False,
            "net_arch": {"pi": [HIDDEN], "vf": [HIDDEN]},
        },
        seed=0,
        device="cpu",
    )
    return import_module("flatroll.trainers.sb3_recurrent").unpadded(model) if flat else model


def round_of(model: Any) -> Run:
    """The same round as `ours`, of sb3-contrib's model."""
    return lambda: model.learn(FRAMES, reset_num_timesteps=False)


def rate(timing: Timing) -> str:
    return f"{FRAMES / timing.median:,.0f}"


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    runs = {"ours, one vectorised env": ours("vector_entry_point"), "ours, 64 single envs": ours("sync")}
    theirs, flat = peer_model(), peer_model(flat=True)
    if theirs is not None:
        runs |= {"sb3-contrib": round_of(theirs), "sb3-contrib, unpadded": round_of(flat)}
    result = take_turns(runs, turns=TURNS)
    print(
        f"Recurrent PPO on CartPole without velocities: {ENVS} envs, {STEPS} steps, LSTM of {HIDDEN}, "
        f"{EPOCHS} epochs of {MINIBATCHES} minibatches, one thread\n"
    )
    rows = []
    for name, timing in result.items():
        times = "-" if theirs is None else f"{ratio(result['sb3-contrib'], timing):.2f} x"
        rows.append([name, rate(timing), times])
    if theirs is None:
        rows.append(["sb3-contrib", "not installed", "-"])
    print(table(["", "frames/s", "as fast as sb3-contrib"], rows))
    if theirs is not None:
        # The rollouts that the rounds have left, trained on once more.
        trained = take_turns({"padded": theirs.train, "unpadded": flat.train}, turns=TURNS)
        faster = ratio(trained["padded"], trained["unpadded"])
        print(f"\nTraining alone: unpadded is {faster:.2f} x as fast as sb3-contrib padded")


if __name__ == "__main__":
    main()
