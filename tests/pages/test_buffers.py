"""The pages on buffers: stored rows are the collected ones, samples are what loops over these rows give."""

import gymnasium as gym
import numpy as np
import torch
from plain_loop import (
    assert_as_played,
    assert_equal_but,
    assert_n_step,
    assert_slices,
    per_env,
    position_of,
)
from tensordict import TensorDict

from flatroll.rollouts import Collector

BUFFERS = "docs/buffers.md"
SAMPLERS = "docs/buffers/samplers.md"
TRANSFORMS = "docs/buffers/transforms.md"
WRITING = "docs/buffers/writing.md"


def cartpoles(count: int) -> gym.vector.VectorEnv:
    return gym.make_vec("CartPole-v1", num_envs=count)


def played(count: int, frames: int, total: int) -> TensorDict:
    """The rows that these collectors of random actions yield, each compared with the bare env's."""
    collector = Collector(cartpoles(count), frames_per_batch=frames, total_frames=total, seed=0)
    rows = torch.cat(list(collector))
    assert_as_played(rows, cartpoles(count), seed=0)
    return rows


# buffers.md


def test_the_first_buffer(until) -> None:
    buffer = until(BUFFERS, 'stats()["trajectories"], "trajectories;"')["buffer"]
    rows = played(16, 512, 2048)
    assert_equal_but(buffer[:], rows)
    assert buffer.stats()["trajectories"] == len(rows["collector", "traj_ids"].unique())
    for _ in range(5):
        assert_slices(buffer.sample(), rows, 16)


def test_memory_that_is_not_there(until) -> None:
    """A row of the page's images: 3 * 84 * 84 bytes."""
    space = until(BUFFERS, "ReplayBuffer(storage=LazyTensorStorage(10**12))")
    assert space["images"].bytes() == 2 * 21168


def test_pairs_and_anything(until) -> None:
    space = until(BUFFERS, 'anything.extend(["a string", 30, None])')
    numbers, named = space["pairs"][:]
    assert torch.equal(numbers, torch.tensor([[0.0] * 3] * 5 + [[1.0] * 3]))
    assert named["label"].tolist() == [0, 1, 2, 3, 4, 7]
    assert space["anything"][:] == ["a string", 30, None]


def oldest_first(buffer) -> TensorDict:
    """A full ring of 1000 rows after 2048: the oldest is in place 48."""
    rows = buffer[:]
    return torch.cat([rows[48:], rows[:48]])


def test_each_observation_once(until) -> None:
    space = until(BUFFERS, "full, compact = filled(), filled(compact_obs=True)")
    newest = played(16, 256, 2048)[-1000:]
    for name in ("full", "compact"):
        assert_equal_but(oldest_first(space[name]), newest)
    drawn = space["same"]
    assert drawn.batch_size == (500,)
    sample = space["full"].sample(500)
    flags = ("is_init",)  # each row of a sample of single rows is a run of its own
    assert_equal_but(sample, newest[torch.tensor(position_of(newest, sample))], *flags)


def test_a_data_set(until) -> None:
    space = until(BUFFERS, "writer=ImmutableDatasetWriter()")
    data = space["data"].clone()
    data["is_init"] = torch.arange(1000)[:, None] % 100 == 0
    data["collector", "traj_ids"] = torch.arange(1000) // 100
    seen = []
    for sample in space["dataset"]:
        at = [int((data["observation"] == row).all(-1).nonzero()) for row in sample["observation"]]
        assert_n_step(sample, data, at, 3, 0.99)
        seen += at
    assert sorted(seen) == list(range(1000))


def test_on_disk(until) -> None:
    """The folder is gone with the block; its files are those of the last batch of the first block."""
    space = until(BUFFERS, 'scratch_dir=f"{folder}/rows"')
    rows = played(16, 512, 2048)[-512:]
    assert_equal_but(space["batch"], rows)


def test_an_ensemble(until) -> None:
    space = until(BUFFERS, "both[1].extend(batch)")
    rows = played(16, 512, 2048)[-512:]
    sample = space["both"].sample()
    for member, part in enumerate(sample.unbind(0)):
        assert_equal_but(part, rows[torch.tensor(position_of(rows, part))], "is_init")
        assert part["collector", "buffer_ids"].flatten().tolist() == [member] * 32


def test_save_and_resume(until) -> None:
    space = until(BUFFERS, "again.loads(folder)")
    newest = played(16, 256, 2048)[-1000:]
    assert_equal_but(oldest_first(space["again"]), newest)
    assert torch.equal(space["again"].sample(64)["observation"], space["full"].sample(64)["observation"])


def test_a_data_loader(until) -> None:
    space = until(BUFFERS, "collate_fn=collate)  # rows by position")
    newest = played(16, 256, 2048)[-1000:]
    # Place p holds row 1000 + p of those written if p < 48, else row p; the newest 1000 begin with row 48 of 1000.
    in_place = torch.cat([newest[-48:], newest[:-48]])
    for number, batch in enumerate(space["loader"]):
        assert torch.equal(batch["observation"], in_place["observation"][5 * number : 5 * number + 5])
        assert torch.equal(
            batch["next", "observation"], in_place["next", "observation"][5 * number : 5 * number + 5]
        )


# samplers.md


def scripted_stream(env: int, lengths: list[int], count: int) -> list[list[float]]:
    """The first observations (env, episode, step) of one env of a script."""
    found, episode = [], 0
    while len(found) < count:
        found += [[env, episode, step] for step in range(lengths[episode % len(lengths)])]
        episode += 1
    return found[:count]


def assert_scripted(rows: TensorDict, lengths: list[list[int]]) -> None:
    """Rows of a script: each env's observations in order, next observations one step later; rewards and ends."""
    for env, stream in enumerate(per_env(rows, len(lengths))):
        seen = scripted_stream(env, lengths[env], len(stream))
        assert stream["observation"].tolist() == seen
        assert stream["next", "observation"].tolist() == [[e, k, t + 1] for e, k, t in seen]
        assert stream["next", "reward"].flatten().tolist() == [100 * k + t + 1 for _, k, t in seen]
        assert stream["is_init"].flatten().tolist() == [t == 0 for *_, t in seen]
        done = [t + 1 == lengths[env][k % len(lengths[env])] for _, k, t in seen]
        assert stream["next", "done"].flatten().tolist() == done
        kind = ("terminated", "truncated")[env]
        assert stream["next", kind].flatten().tolist() == done


def test_slices(until) -> None:
    space = until(SAMPLERS, 'print("truncated       "')
    buffer = space["buffer"]
    rows = buffer[:]
    assert_scripted(rows, [[9, 3], [7]])
    for _ in range(20):
        sample = buffer.sample()
        assert len(sample) == 10
        assert_slices(sample, rows, 5)
    assert_slices(space["sample"], rows, 5)


def test_rows_of_recent_policies(until) -> None:
    """Batch b of 20 rows has version b; the last two of five are recent."""
    space = until(SAMPLERS, "max_policy_lag=1")
    recent = space["recent"]
    stored = recent[:]
    version = stored["collector", "policy_version"].flatten()
    assert version.sort().values.tolist() == [b for b in range(5) for _ in range(20)]
    allowed = {tuple(row) for row, at in zip(stored["observation"].tolist(), version, strict=True) if at >= 3}
    drawn = {tuple(row) for row in recent.sample(4000)["observation"].tolist()}
    assert drawn == allowed


def test_priorities(until) -> None:
    """P(i) ~ priority ** alpha, weight ~ (N * P(i)) ** -beta over the largest weight in the sample or the buffer."""
    space = until(SAMPLERS, 'sample["td_error"] = sample["next", "reward"].abs()')
    buffer, sample, rows = space["buffer"], space["sample"], space["batch"]
    assert_scripted(rows, [[9, 3], [7]])
    assert_equal_but(sample, rows[sample["index"]], "is_init")

    alpha, beta, count = 0.7, 0.9, len(rows)
    priority = torch.full((count,), float("nan"), dtype=torch.float64)
    error = sample["next", "reward"].abs().flatten().double()
    priority[sample["index"]] = error + 1e-8
    first = ~priority.isnan()
    draws = torch.cat([buffer.sample(8)["index"] for _ in range(2500)])
    share = torch.bincount(draws, minlength=count).double() / len(draws)
    # Rows never updated keep the priority of new rows: 1 at first. Compare the updated ones with one another.
    expected = (priority[first] ** alpha) / (priority[first] ** alpha).sum()
    found = share[first] / share[first].sum()
    np.testing.assert_allclose(found, expected, atol=0.02)
    untouched = share[~first]
    np.testing.assert_allclose(untouched / untouched.mean(), 1.0, atol=0.45)
    ratio = untouched.mean() / share[first].mean()
    np.testing.assert_allclose(ratio, 1.0 / (priority[first] ** alpha).mean(), rtol=0.1)

    weights = buffer.sample(256)
    chance = torch.where(first, priority, 1.0) ** alpha
    chance = chance / chance.sum()
    plain = (count * chance[weights["index"]]) ** -beta
    weight = weights["priority_weight"].flatten().double()
    np.testing.assert_allclose(weight / weight.max(), plain / plain.max(), rtol=1e-4)


def test_a_schedule(until) -> None:
    space = until(SAMPLERS, "scheduler = LinearScheduler(")
    for step in range(2, 1001):
        space["scheduler"].step()
        np.testing.assert_allclose(space["buffer"].sampler.beta, 0.9 + 0.1 * step / 1000, rtol=1e-6)


def test_slices_with_priorities(until) -> None:
    """The burnt-in sample, its errors and each slice's new priority, by a loop over the slices."""
    space = until(SAMPLERS, "PrioritizedSliceSampler(1000, alpha=0.7, beta=0.9, slice_len=5)")
    slices, sample, rows = space["slices"], space["sample"], space["batch"]
    assert_slices(slices, rows, 5)

    gru, value = space["gru"].gru, space["value"]
    first = slices["is_init"].flatten().tolist()
    starts = [i for i, begins in enumerate(first) if begins]
    errors, kept, priorities = [], [], []
    for begin, end in zip(starts, [*starts[1:], len(first)], strict=True):
        features, _ = gru(slices["observation"][begin:end][None])
        error = value(features[0]).squeeze(1) - slices["next", "reward"][begin:end].squeeze(1)
        errors.append(error[2:].detach())
        kept += range(begin + 2, end)
        priorities.append(errors[-1].abs().max())
    assert torch.equal(sample["observation"], slices["observation"][kept])
    np.testing.assert_allclose(space["error"].detach(), torch.cat(errors), atol=1e-4, rtol=1e-5)
    np.testing.assert_allclose(space["priority"], torch.stack(priorities), atol=1e-4, rtol=1e-5)
    weight = slices["priority_weight"].flatten()[kept]
    plain = (weight * torch.cat(errors) ** 2).mean()
    np.testing.assert_allclose(space["loss"].detach(), plain, rtol=1e-4)


# transforms.md


def test_pictures(until) -> None:
    """Bytes over 255, channels first, resized by torch's own bilinear filter."""
    pictures = until(TRANSFORMS, "pictures.extend(")["pictures"]
    stored = pictures.storage[:]["pixels"]
    assert stored.dtype is torch.uint8 and stored.shape == (10, 64, 64, 3)
    small = stored.movedim(-1, 1).double() / 255
    plain = torch.nn.functional.interpolate(small, (32, 32), mode="bilinear", antialias=True)
    np.testing.assert_allclose(pictures[:]["image"], plain, atol=1e-5)


def test_n_step(until) -> None:
    space = until(TRANSFORMS, 'print("terminated", rows["next", "terminated"]')
    batch = space["batch"]
    assert_scripted(batch, [[9, 3], [7]])
    assert_n_step(space["buffer"][:], batch, list(range(40)), 3, 0.9)
    # By hand: row 6 of the first episode pays 7, 8 and 9.
    row = space["rows"][6]
    np.testing.assert_allclose(row["next", "reward"].item(), 7 + 0.9 * 8 + 0.81 * 9, rtol=1e-6)


def test_hindsight_goals(until) -> None:
    """A relabelled row has a goal that its own later rows reached, and that goal's reward."""
    space = until(TRANSFORMS, "HindsightTransform(reward, goal_selection_strategy")
    walk = space["walk"]
    relabelled, count = 0, 0
    for _ in range(50):
        sample = walk.sample()
        for row in sample.unbind(0):
            place, goal = int(row["achieved_goal"]), int(row["desired_goal"])
            count += 1
            assert int(row["next", "achieved_goal"]) == place + 1
            assert int(row["next", "desired_goal"]) == goal
            assert row["next", "reward"].item() == (0.0 if goal == place + 1 else -1.0)
            if row["relabelled"]:
                relabelled += 1
                assert place + 1 <= goal <= 6
            else:
                assert goal == 99
    assert abs(relabelled / count - 0.8) < 0.03
    assert walk.storage[:]["desired_goal"].unique().tolist() == [99]


def test_images(until) -> None:
    """Each stored stack, from the rule that moves the dots."""
    space = until(TRANSFORMS, "def pong_like(**options):")
    for name in ("full", "small"):
        rows = space[name][:]
        for episode in range(2):
            for step in range(100):
                row = rows[100 * episode + step]
                for shift, observation in enumerate((row["observation"], row["next", "observation"])):
                    for place, frame in enumerate(observation):
                        at = max(0, step + shift + place - 3)
                        plain = torch.zeros(84, 84, dtype=torch.uint8)
                        plain[at % 84, (at * 7 + episode) % 84] = 255
                        assert torch.equal(frame, plain)
        assert rows["next", "done"].flatten().nonzero().flatten().tolist() == [99, 199]


# writing.md


def test_several_collectors(until) -> None:
    space = until(WRITING, "for collector in (first, second):")
    rows = space["buffer"][:]
    writers = rows["collector", "traj_ids"] >> 40
    for writer in (1, 2):
        own = rows[writers == writer]
        assert len(own) == 192
        stream = torch.cat([own[64 * b : 64 * b + 64] for b in range(3)])
        ids = stream["collector", "traj_ids"]
        for env in range(2):
            one = stream[(ids & (2**40 - 1)) % 2 == env]
            for before, after in zip(one[:-1].unbind(0), one[1:].unbind(0), strict=True):
                follows = torch.equal(before["next", "observation"], after["observation"])
                assert follows != bool(before["next", "done"])
                assert follows == (before["collector", "traj_ids"] == after["collector", "traj_ids"])
                assert bool(after["is_init"]) != follows


def test_writing_step_by_step(until) -> None:
    """What the loop stored is what a second env returns for the same actions, env after env in each window."""
    space = until(WRITING, "with buffer.writer_for(4) as writer:")
    rows, envs = space["buffer"][:], space["envs"]
    streams: list[list[TensorDict]] = [[] for _ in range(4)]
    # Windows of 64 and 36 steps.
    for begin, length in ((0, 64), (256, 36)):
        for env in range(4):
            streams[env].append(rows[begin + env * length : begin + (env + 1) * length])
    joined = [torch.cat(parts) for parts in streams]
    ordered = torch.cat(joined)
    assert [stream["observation"].shape[0] for stream in joined] == [100] * 4

    bare = gym.make_vec(
        "CartPole-v1",
        num_envs=4,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": envs.metadata["autoreset_mode"]},
    )
    obs, _ = bare.reset(seed=0)
    first = np.ones(4, bool)
    for step in range(100):
        actions = np.array([int(stream["action"][step]) for stream in joined])
        after, reward, terminated, truncated, info = bare.step(actions)
        for env, stream in enumerate(joined):
            row = stream[step]
            ended = terminated[env] or truncated[env]
            last = info["final_obs"][env] if ended else after[env]
            assert row["observation"].tolist() == obs[env].tolist()
            assert row["next", "observation"].tolist() == last.tolist()
            assert row["next", "reward"].item() == reward[env]
            assert row["next", "terminated"].item() == terminated[env]
            assert row["next", "done"].item() == ended
            assert row["is_init"].item() == first[env]
        first = terminated | truncated
        obs = after

    seen = space["sample"]
    assert {tuple(row) for row in seen["observation"].tolist()} <= {
        tuple(row) for row in ordered["observation"].tolist()
    }
    assert space["writer"].read(99, [0, 3])["action"].tolist() == [
        int(joined[e]["action"][99]) for e in (0, 3)
    ]
