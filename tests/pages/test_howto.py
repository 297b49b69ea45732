"""The how-to pages: what their own envs, columns, samplers and transforms store is computed again by hand."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from plain_loop import assert_as_played, assert_equal_but, assert_n_step, per_env, sub_env_of
from tensordict import TensorDict

from flatroll.rollouts import Collector
from flatroll.wrappers.testing import vector_env_problems


def cartpole_rows(frames: int, total: int) -> TensorDict:
    """The rows of these collectors of random actions over four envs, each compared with the bare env's."""
    env = gym.make_vec("CartPole-v1", num_envs=4)
    rows = torch.cat(list(Collector(env, frames_per_batch=frames, total_frames=total, seed=0)))
    assert_as_played(rows, gym.make_vec("CartPole-v1", num_envs=4), seed=0)
    return rows


def in_ring(rows: TensorDict, capacity: int) -> TensorDict:
    """The rows as a full ring holds them: row r in place r modulo the capacity."""
    place = torch.arange(len(rows) - capacity, len(rows)) % capacity
    return rows[-capacity:][place.argsort()]


# own_environment.md


def test_own_environment(until) -> None:
    """The batch is what the simulator reports when it is sailed and launched by hand."""
    space = until("docs/howto/own_environment.md", "class BoatSource(VectorSource):")
    batch = space["batch"]
    streams = per_env(batch, 4)
    boats = space["Boats"](4)
    boats.random = np.random.default_rng(0)
    boats.launch(np.ones(4, bool))
    first = np.ones(4, bool)
    for step in range(50):
        before = boats.place.astype(np.float32)
        course = np.array([stream["action"][step, 0].item() for stream in streams], np.float32)
        report = boats.sail(course)
        for env, stream in enumerate(streams):
            row = stream[step]
            assert row["observation"].tolist() == before[env].tolist()
            assert row["next", "observation"].tolist() == boats.place.astype(np.float32)[env].tolist()
            np.testing.assert_allclose(row["next", "reward"].item(), -report["distance"][env], rtol=1e-6)
            np.testing.assert_allclose(row["next", "distance"].item(), report["distance"][env], rtol=1e-6)
            assert row["next", "terminated"].item() == report["lost"][env]
            assert row["next", "truncated"].item() == report["evening"][env]
            assert row["is_init"].item() == first[env]
            if not first[env]:
                assert row["distance"].item() == stream[step - 1]["next", "distance"].item()
        first = report["lost"] | report["evening"]
        if first.any():
            boats.launch(first)
    assert batch["next", "done"].any()


# own_torch_env.md


def test_own_torch_env(until) -> None:
    """One pendulum after the other in float64, from each row's own observation and action."""
    space = until("docs/howto/own_torch_env.md", 'print(int(batch["next", "truncated"].sum())')
    batch = space["batch"]
    cosine, sine, speed = batch["policy"].double().unbind(1)
    angle = torch.atan2(sine, cosine)
    later = (speed + 0.75 * angle.sin() + 0.3 * batch["action"][:, 0].double()).clamp(-8, 8)
    moved = angle + 0.05 * later
    reward = moved.cos() - 0.1 * later**2
    after = torch.stack([moved.cos(), moved.sin(), later], 1)
    np.testing.assert_allclose(batch["next", "policy"], after, atol=2e-5)
    np.testing.assert_allclose(batch["next", "reward"].flatten(), reward, atol=2e-4)

    for stream in per_env(batch, 256):
        assert len(stream) == 250
        done = stream["next", "done"].flatten().nonzero().flatten().tolist()
        assert done == [199]
        assert stream["is_init"].flatten().nonzero().flatten().tolist() == [0, 200]
        follows = stream["next", "policy"][:-1] == stream["policy"][1:]
        assert follows.all(1).logical_not().nonzero().flatten().tolist() == [199]
        assert not stream["next", "terminated"].any()
    starts = batch["policy"][batch["is_init"].flatten()]
    assert (starts[:, 2] == 0).all()


def test_own_torch_env_starts_again_from_its_seed(until) -> None:
    space = until("docs/howto/own_torch_env.md", 'print(int(batch["next", "truncated"].sum())')
    again = next(Collector(space["env"], frames_per_batch=256 * 250, seed=0))
    assert torch.equal(again["policy"][0], space["batch"]["policy"][0])


# own_storage_column.md


def test_own_storage_column(until) -> None:
    """Each number is on the nearest of 256 levels from -4 to 4; other columns are exact."""
    space = until("docs/howto/own_storage_column.md", "class ByteColumn(TensorColumn):")
    rows = in_ring(cartpole_rows(300, 1500), 1000)
    observations = ("observation", ("next", "observation"))
    assert_equal_but(space["exact"][:], rows)
    levels = np.arange(256) * (8 / 255) - 4
    for name in ("small", "compact"):
        stored = space[name][:]
        assert_equal_but(stored, rows, *observations)
        for key in observations:
            distance = np.abs(rows[key].double().numpy()[..., None] - levels)
            nearest = levels[distance.argmin(-1)]
            np.testing.assert_allclose(stored[key].numpy(), nearest, atol=1e-6)


# own_sampler.md


def test_own_sampler(until) -> None:
    """Every row's share of many draws, by the rule of the page: each 1 % less likely than the next newer one."""
    space = until("docs/howto/own_sampler.md", "class RecencySampler(RandomSampler):")
    rows = in_ring(cartpole_rows(100, 3000), 1000)
    buffer, info, sample = space["buffer"], space["info"], space["sample"]
    assert_equal_but(sample, rows[info["index"]], "is_init")

    age = torch.arange(1000).flip(0).double()  # place 999 is the newest: 3000 rows in a ring of 1000
    chance = 0.99**age / (0.99**age).sum()
    draws = torch.cat([buffer.sample(return_info=True)[1]["index"] for _ in range(40)])
    share = torch.bincount(draws, minlength=1000).double() / len(draws)
    for group in torch.arange(1000).split(50):
        expected = float(chance[group].sum())
        spread = 5 * math.sqrt(expected / len(draws)) + 1e-5
        assert abs(float(share[group].sum()) - expected) < spread

    counts = torch.bincount(space["drawn"].flatten(), minlength=6).tolist()
    np.testing.assert_allclose(counts, [1000, 0, 0, 2000, 0, 4000], atol=150)


# own_transform.md


def test_own_transform(until) -> None:
    space = until("docs/howto/own_transform.md", "buffer.append_transform(lambda td:")
    batch, buffer, rows = space["batch"], space["buffer"], space["rows"]
    stored = buffer.storage[:]
    for key in ("observation", ("next", "observation")):
        plain = np.round(batch[key].numpy() * 255).astype(np.uint8)
        np.testing.assert_array_equal(stored[key].numpy(), plain)
        np.testing.assert_allclose(rows[key].numpy(), plain / 255 - 0.5, atol=1e-6)
    difference = stored["next", "observation"].double() - stored["observation"].double()
    speed = (difference / 255).square().sum(-1, keepdim=True).sqrt()
    np.testing.assert_allclose(rows["speed"].numpy(), speed.numpy(), atol=1e-6)
    assert torch.equal(buffer[:]["fast"], speed > 1)


# own_loss.md


def test_own_loss(until) -> None:
    """TD3's two losses on a fixed batch, with the noise set to 0, in float64 by hand."""
    space = until("docs/howto/own_loss.md", "class TD3Loss(OffPolicyLoss):")
    loss, buffer = space["loss"], space["buffer"]
    rows = buffer[:]
    bare = gym.make_vec("Pendulum-v1", num_envs=4)
    assert_as_played(rows, bare, seed=0)

    loss.noise = 0.0
    sample = rows[:64]
    # Some rows terminate, which Pendulum's never do.
    sample["next", "terminated"] = torch.arange(64)[:, None] % 5 == 0
    found = loss(sample.clone())

    def act(network, observation):
        inner = (observation @ network[0].weight.double().T + network[0].bias.double()).relu()
        return 2 * (inner @ network[2].weight.double().T + network[2].bias.double()).tanh()

    def judge(network, observation, action):
        inner = torch.cat([observation, action], -1) @ network[0].weight.double().T
        inner = (inner + network[0].bias.double()).relu()
        return (inner @ network[2].weight.double().T + network[2].bias.double()).squeeze(-1)

    before, after = sample["observation"].double(), sample["next", "observation"].double()
    with torch.no_grad():
        chosen = act(loss.target_actor_network.module, after).clamp(-2, 2)
        following = torch.minimum(*(judge(each.module, after, chosen) for each in loss.target_qvalue_network))
        goes_on = 1 - sample["next", "terminated"].flatten().double()
        target = sample["next", "reward"].flatten().double() + 0.99 * goes_on * following
        critics = [judge(each.module, before, sample["action"].double()) for each in loss.qvalue_network]
        plain_critic = sum((critic - target).square() for critic in critics).mean()
        own = act(loss.actor_network.module, before)
        plain_actor = -judge(loss.qvalue_network[0].module, before, own).mean()
    np.testing.assert_allclose(found["loss_qvalue"].item(), plain_critic.item(), rtol=1e-4)
    np.testing.assert_allclose(found["loss_actor"].item(), plain_actor.item(), rtol=1e-4)


def test_own_policy_gradient_loss(until) -> None:
    space = until("docs/howto/own_loss.md", "class SquaredAdvantageLoss(PolicyGradientLoss):")
    log_prob = torch.tensor([-1.0, -2.0, -3.0])
    advantage = torch.tensor([2.0, -5.0, 0.5])
    found, _ = space["SquaredAdvantageLoss"].objective(None, None, None, log_prob, advantage)
    assert found.tolist() == [4.0, 0.0, 0.75]


# gpu.md


def test_a_loop_on_a_gpu(until) -> None:
    """The last batch, from each row's own observation and action, in float64; ends by the walk's rule."""
    space = until("docs/howto/gpu.md", "class Walk:")
    batch = space["batch"]
    position, speed = batch["observation"].double().unbind(1)
    speed = 0.9 * speed + 0.2 * (2 * batch["action"].double() - 1)
    position = position + 0.1 * speed
    np.testing.assert_allclose(batch["next", "observation"], torch.stack([position, speed], 1), atol=1e-5)
    np.testing.assert_allclose(batch["next", "reward"].flatten(), -position.abs(), atol=1e-5)
    far = batch["next", "observation"][:, 0].abs() > 3
    assert torch.equal(batch["next", "terminated"].flatten(), far)
    for stream in per_env(batch, 256):
        for before, after in zip(stream[:-1].unbind(0), stream[1:].unbind(0), strict=True):
            follows = torch.equal(before["next", "observation"], after["observation"])
            assert follows != bool(before["next", "done"])
            assert bool(after["is_init"]) != follows


def test_the_walk_of_the_gpu_page_follows_its_seed(until) -> None:
    space = until("docs/howto/gpu.md", "class Walk:")
    env = space["as_vector_env"](space["Walk"](4, "cpu"), own_buffers=False)
    assert vector_env_problems(env, steps=300) == []


# atari.md


def test_atari(until) -> None:
    """What is stored as frames, compressed, is what a second pool shows for the same actions; n-step sums by hand."""
    pytest.importorskip("zstandard")
    space = until("docs/howto/atari.md", "collector = Collector(env, net, frames_per_batch=256")
    envpool = pytest.importorskip("envpool")

    buffer = space["buffer"]
    summed = buffer[:]
    (transform,) = buffer.transforms
    buffer.transforms.clear()
    rows = buffer[:]
    buffer.append_transform(transform)
    assert len(rows) == 1024
    pool = envpool.make_gymnasium("Breakout-v5", num_envs=8, seed=0, episodic_life=True, reward_clip=True)
    assert_as_played(rows, pool, seed=None)

    # A trajectory goes on in later batches: put each env's rows next to one another.
    order = sub_env_of(rows, 8).argsort(stable=True)
    assert_n_step(summed[order], rows[order], list(range(1024)), 3, 0.99)
