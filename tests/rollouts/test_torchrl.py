"""Flat batches feed torchrl's own estimator, loss and modules, and give what a loop over trajectories gives."""

import warnings
from types import SimpleNamespace

import gymnasium as gym
import pytest
import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Categorical

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.layout import run_ends
from flatroll.rollouts import Collector
from flatroll.wrappers import StepCounter
from flatroll.wrappers.testing import Script, ScriptedVectorEnv

GAMMA, LAMBDA = 0.97, 0.9


@pytest.fixture(scope="module")
def torchrl():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing it warns about packages that are not there
        root = pytest.importorskip("torchrl")
        import torchrl.modules
        import torchrl.objectives
        import torchrl.objectives.value  # noqa: F401
    return SimpleNamespace(modules=root.modules, objectives=root.objectives, GAE=root.objectives.value.GAE)


@pytest.fixture
def actor():
    torch.manual_seed(0)
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
        ),
    )


@pytest.fixture
def critic():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return TensorDictModule(net, in_keys=["observation"], out_keys=["state_value"])


def cartpole(mode="NextStep"):
    return gym.make_vec(
        "CartPole-v1",
        num_envs=3,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": mode},
        max_episode_steps=25,
    )


def pieces(batch):
    """The rows of each run, as lists of row numbers."""
    out, run = [], []
    for i, end in enumerate(run_ends(batch).tolist()):
        run.append(i)
        if end:
            out.append(run)
            run = []
    return out


def loop_gae(batch, critic):
    """Advantages of one trajectory after the other, row by row in float64."""
    net = critic.module
    with torch.no_grad():
        value = net(batch["observation"]).double().squeeze(-1).tolist()
        after = net(batch["next", "observation"]).double().squeeze(-1).tolist()
    reward = batch["next", "reward"].double().squeeze(-1).tolist()
    terminated = batch["next", "terminated"].squeeze(-1).tolist()
    advantage = [0.0] * len(batch)
    for run in pieces(batch):
        running = 0.0
        for i in reversed(run):
            bootstrap = 0.0 if terminated[i] else after[i]
            running = reward[i] + GAMMA * bootstrap - value[i] + GAMMA * LAMBDA * running
            advantage[i] = running
    advantage = torch.tensor(advantage).unsqueeze(-1)
    return advantage, advantage + torch.tensor(value).unsqueeze(-1)


def loop_ppo(batch, actor, critic, epsilon=0.2):
    """The clipped objective, row by row."""
    logits, value = actor[0].module(batch["observation"]), critic.module(batch["observation"])
    new = Categorical(logits=logits).log_prob(batch["action"])
    terms = []
    for i in range(len(batch)):
        ratio = (new[i] - batch["action_log_prob"][i]).exp()
        gain = batch["advantage"][i, 0]
        terms.append(torch.minimum(ratio * gain, ratio.clamp(1 - epsilon, 1 + epsilon) * gain))
    return -torch.stack(terms).mean(), nn.functional.smooth_l1_loss(value, batch["value_target"])


def check_loss(torchrl, batch, actor, critic):
    loss = torchrl.objectives.ClipPPOLoss(actor, critic, clip_epsilon=0.2)
    with torch.no_grad():  # off the collecting policy, or every ratio is one
        actor[0].module.weight.add_(0.3)
    out = loss(batch)
    objective, value = loop_ppo(batch, actor, critic)
    torch.testing.assert_close(out["loss_objective"], objective)
    torch.testing.assert_close(out["loss_critic"], value)
    (out["loss_objective"] + out["loss_critic"] + out["loss_entropy"]).backward()
    assert all(parameter.grad is not None for parameter in actor.parameters())


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_collected_batches(torchrl, actor, critic, mode):
    """With ``set_truncated`` torchrl, which knows only ``done``, sees where a window cuts."""
    collector = Collector(
        StepCounter(cartpole(mode)), actor, frames_per_batch=100, total_frames=200, set_truncated=True, seed=0
    )
    first, batch = collector
    ends = torch.cat([first, batch])["next"]
    assert ends["truncated"].any() and ends["terminated"].any() and len(pieces(batch)) > 5
    for piece in (first, batch):
        expected = loop_gae(piece, critic)
        torchrl.GAE(gamma=GAMMA, lmbda=LAMBDA, value_network=critic)(piece)
        torch.testing.assert_close(piece["advantage"], expected[0].float(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(piece["value_target"], expected[1].float(), rtol=1e-4, atol=1e-4)
    check_loss(torchrl, batch, actor, critic)


def test_complete_trajectories_need_no_marks(torchrl, actor, critic):
    collector = Collector(cartpole(), actor, frames_per_batch=60, trajs_per_batch=6, seed=0)
    batch = next(collector)
    expected = loop_gae(batch, critic)
    torchrl.GAE(gamma=GAMMA, lmbda=LAMBDA, value_network=critic)(batch)
    torch.testing.assert_close(batch["advantage"], expected[0].float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compact", [False, True])
def test_samples_of_slices(torchrl, actor, critic, compact):
    """The sampler marks the ends of slices; a compact storage has the next observations of cut rows too."""
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(1000, compact_obs=compact),
        sampler=SliceSampler(slice_len=8),
        batch_size=64,
        generator=torch.Generator().manual_seed(0),
    )
    collector = Collector(
        cartpole(),
        actor,
        frames_per_batch=100,
        total_frames=400,
        compact_obs=compact,
        replay_buffer=buffer,
        seed=0,
    )
    list(collector)
    sample = buffer.sample()
    assert torch.equal(run_ends(sample), sample["next", "done"].squeeze(-1))
    expected = loop_gae(sample, critic)
    torchrl.GAE(gamma=GAMMA, lmbda=LAMBDA, value_network=critic)(sample)
    torch.testing.assert_close(sample["advantage"], expected[0].float(), rtol=1e-4, atol=1e-4)
    check_loss(torchrl, sample, actor, critic)


def test_torchrls_own_actor_is_a_policy(torchrl, critic):
    torch.manual_seed(0)
    actor = torchrl.modules.ProbabilisticActor(
        TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    batch = next(Collector(cartpole(), actor, frames_per_batch=100, set_truncated=True, seed=0))
    log_prob = Categorical(logits=actor[0].module(batch["observation"])).log_prob(batch["action"])
    torch.testing.assert_close(batch["action_log_prob"], log_prob)
    torchrl.GAE(gamma=GAMMA, lmbda=LAMBDA, value_network=critic)(batch)
    check_loss(torchrl, batch, actor, critic)


@pytest.mark.parametrize("kind", ["GRUModule", "LSTMModule"])
def test_torchrls_own_recurrent_modules_get_their_states(torchrl, kind):
    """Its primers have specs where ours have defaults."""
    torch.manual_seed(0)
    module = getattr(torchrl.modules, kind)
    net = module(input_size=3, hidden_size=4, in_key="observation", out_key="features")
    policy = TensorDictSequential(
        net, TensorDictModule(lambda x: x.argmax(-1), in_keys=["features"], out_keys=["action"])
    )
    env = ScriptedVectorEnv(Script(3, lengths=[[3, 1, 4], [2, 5], [6]]))
    rows = torch.cat(list(Collector(env, policy, frames_per_batch=11, total_frames=55, seed=0)))
    states = [key for key in rows.keys() if key.startswith("recurrent_state")]  # noqa: SIM118
    assert len(states) == (1 if kind == "GRUModule" else 2)
    for key in states:
        assert rows[key].shape == rows["next", key].shape == (55, 1, 4)
        assert (rows[key][rows["is_init"].squeeze(-1)] == 0).all()
        for i in rows["collector", "traj_ids"].unique():
            own = rows["collector", "traj_ids"] == i
            assert torch.equal(rows[key][own][1:], rows["next", key][own][:-1])


def test_a_state_that_is_drawn_is_refused(torchrl):
    class Drawn(TensorDictModule):
        def make_tensordict_primer(self):
            spec = SimpleNamespace(shape=(2,), dtype=torch.float32)
            return SimpleNamespace(primers=Specs(state=spec), default_value=None, random=True)

    class Specs(dict):
        def keys(self, *nested):
            return super().keys()

    policy = Drawn(lambda obs: obs, in_keys=["observation"], out_keys=["action"])
    with pytest.raises(TypeError, match="the recurrent state 'state' must start from fixed values"):
        Collector(cartpole(), policy, frames_per_batch=10)
