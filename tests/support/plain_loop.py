"""What a plain loop on the bare env returns for the actions of stored rows, and slow sums over rows."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict

COUNTER_BITS = 40  # the writer stands above them in a trajectory id


def sub_env_of(rows: TensorDict, num_envs: int) -> torch.Tensor:
    """The sub-env of each row, ``[N]``: a collector counts the first ids 0 to E - 1, the next E to 2 E - 1, …"""
    return (rows["collector", "traj_ids"] & (2**COUNTER_BITS - 1)) % num_envs


def per_env(rows: TensorDict, num_envs: int) -> list[TensorDict]:
    """The rows of each sub-env, in the order in which they stand."""
    env = sub_env_of(rows, num_envs)
    return [rows[env == e] for e in range(num_envs)]


Entries = dict[str, Any]


def entries_of(obs: Any, env: int) -> Entries:
    """One sub-env's observation as named arrays."""
    named = obs if isinstance(obs, dict) else {"observation": obs}
    return {name: np.array(value[env]) for name, value in named.items()}


def play(
    env: Any, actions: list[np.ndarray[Any, Any]], seed: int | None, mode: AutoresetMode
) -> list[list[Entries]]:
    """Step a bare vector env with each sub-env's actions; return the transitions of each sub-env.

    Under NEXT_STEP the step after an end only resets, and is no transition. Under SAME_STEP the last observation is
    ``info["final_obs"]``. Under DISABLED the loop resets the ended sub-envs.
    """
    obs, _ = env.reset(seed=seed)
    count = len(actions)
    rows: list[list[Entries]] = [[] for _ in range(count)]
    first = np.ones(count, bool)
    only_resets = np.zeros(count, bool)
    while any(len(rows[e]) < len(actions[e]) for e in range(count)):
        chosen = np.stack([actions[e][min(len(rows[e]), len(actions[e]) - 1)] for e in range(count)])
        after, reward, terminated, truncated, info = env.step(chosen)
        done = np.asarray(terminated) | np.asarray(truncated)

        for e in range(count):
            if only_resets[e] or len(rows[e]) == len(actions[e]):
                continue
            row: Entries = {"first": bool(first[e]), "reward": float(reward[e])}
            row |= {"terminated": bool(terminated[e]), "truncated": bool(truncated[e])}
            row["before"] = entries_of(obs, e)
            row["after"] = entries_of(after, e)
            if mode == AutoresetMode.SAME_STEP and done[e]:
                last = info["final_obs"][e]
                named = last if isinstance(last, dict) else {"observation": last}
                row["after"] = {name: np.array(value) for name, value in named.items()}
            rows[e].append(row)

        if mode == AutoresetMode.NEXT_STEP:
            first = only_resets
            only_resets = done & ~only_resets
        else:
            first = done
        if mode == AutoresetMode.DISABLED and done.any():
            after, _ = env.reset(options={"reset_mask": done})
        obs = after
    return rows


def assert_as_played(
    rows: TensorDict,
    env: Any,
    seed: int | None,
    *,
    mode: AutoresetMode = AutoresetMode.NEXT_STEP,
    markers: bool = True,
) -> None:
    """The rows, in order of time in each sub-env from the first step on, are what the bare env returns.

    Args:
        rows: batches of a collector, one behind the other.
        env: a bare vector env, or a single env.
        seed: of its first reset.
        mode: its autoreset mode.
        markers: also compare ``is_init``, ``("next", "done")`` and the trajectory ids.
    """
    if isinstance(env, gym.Env) and not hasattr(env, "num_envs"):
        single = env
        env = gym.vector.SyncVectorEnv([lambda: single], autoreset_mode=AutoresetMode.NEXT_STEP)
    count = env.num_envs
    streams = per_env(rows, count)
    played = play(env, [stream["action"].numpy() for stream in streams], seed, mode)
    assert sum(map(len, played)) == len(rows)

    for e, (stream, plain) in enumerate(zip(streams, played, strict=True)):
        for name in plain[0]["before"]:
            before = np.stack([row["before"][name] for row in plain])
            after = np.stack([row["after"][name] for row in plain])
            np.testing.assert_array_equal(stream[name].numpy(), before, f"{name} of sub-env {e}")
            np.testing.assert_array_equal(stream["next", name].numpy(), after, f"next {name} of sub-env {e}")
        reward = np.array([row["reward"] for row in plain], np.float32)
        np.testing.assert_array_equal(stream["next", "reward"].squeeze(-1).numpy(), reward)
        for name in ("terminated", "truncated"):
            assert stream["next", name].squeeze(-1).tolist() == [row[name] for row in plain]
        if not markers:
            continue
        assert stream["is_init"].squeeze(-1).tolist() == [row["first"] for row in plain]
        ended = [row["terminated"] or row["truncated"] for row in plain]
        assert stream["next", "done"].squeeze(-1).tolist() == ended
        episode = np.cumsum([row["first"] for row in plain]) - 1
        ids = (stream["collector", "traj_ids"] & (2**COUNTER_BITS - 1)).numpy()
        assert len(set(zip(episode, ids, strict=True))) == len(set(ids)) == episode[-1] + 1


def ends_of(rows: TensorDict) -> list[bool]:
    """Whether each row ends a run, by the rule of docs/layout.md."""
    done = rows["next", "done"].flatten().tolist()
    first = rows["is_init"].flatten().tolist()
    ids = rows["collector", "traj_ids"].flatten().tolist()
    last = len(ids) - 1
    return [i == last or done[i] or first[i + 1] or ids[i + 1] != ids[i] for i in range(len(ids))]


def plain_gae(
    rows: TensorDict, value: torch.Tensor, next_value: torch.Tensor, gamma: float, lmbda: float
) -> torch.Tensor:
    """The advantages, float64 ``[N]``, one row after the other from the last on."""
    reward = rows["next", "reward"].flatten().double()
    terminated = rows["next", "terminated"].flatten()
    ends = ends_of(rows)
    advantage = torch.zeros(len(reward), dtype=torch.float64)
    trace = 0.0
    for i in reversed(range(len(reward))):
        if ends[i]:
            trace = 0.0
        after = 0.0 if terminated[i] else float(next_value[i])
        error = float(reward[i]) + gamma * after - float(value[i])
        trace = error + gamma * lmbda * trace
        advantage[i] = trace
    return advantage


def plain_n_step(
    rows: TensorDict, ends: list[bool], i: int, n_steps: int, gamma: float
) -> tuple[float, float, int, int]:
    """Reward, discount, steps and last row of row ``i``: sums that stop at the end of its run.

    ``ends`` is `ends_of` of the rows.
    """
    reward = 0.0
    at = i
    for steps in range(1, n_steps + 1):
        reward += gamma ** (steps - 1) * float(rows["next", "reward"][at])
        if ends[at] or steps == n_steps:
            break
        at += 1
    return reward, gamma**steps, steps, at


def _as_seen(rows: TensorDict) -> list[bytes]:
    """The bytes of each row's observation and next observation: what tells rows apart."""
    both = torch.cat([rows["observation"], rows["next", "observation"]], -1).contiguous()
    return [row.numpy().tobytes() for row in both]


def position_of(rows: TensorDict, sample: TensorDict) -> list[int]:
    """Where in ``rows`` each row of the sample stands: the only row with its observation and next observation."""
    seen = _as_seen(rows)
    places = {row: i for i, row in enumerate(seen)}
    assert len(places) == len(rows), "two rows look alike"
    return [places[row] for row in _as_seen(sample)]


def assert_equal_but(sample: TensorDict, rows: TensorDict, *changed: Any) -> None:
    """Every entry of the rows is in the sample, bit for bit, except these."""
    for key in rows.keys(True, True):
        if key not in changed:
            assert torch.equal(sample[key], rows[key]), key


def assert_slices(sample: TensorDict, rows: TensorDict, slice_len: int) -> int:
    """The sample consists of stretches of consecutive rows of one trajectory, marked as such; how many."""
    at = position_of(rows, sample)
    first = sample["is_init"].flatten().tolist()
    done = sample["next", "done"].flatten()
    starts = [i for i, begins in enumerate(first) if begins]
    assert starts[0] == 0
    ids = rows["collector", "traj_ids"]
    flags = ("is_init", ("next", "done"), ("next", "truncated"))
    assert_equal_but(sample, rows[torch.tensor(at)], *flags)
    for begin, end in zip(starts, [*starts[1:], len(first)], strict=True):
        assert end - begin <= slice_len
        assert done[end - 1]
        terminated = sample["next", "terminated"][end - 1]
        assert sample["next", "truncated"][end - 1] or terminated
        for i in range(begin, end - 1):
            assert not done[i]
            assert ids[at[i]] == ids[at[i + 1]]
            assert torch.equal(sample["next", "observation"][i], sample["observation"][i + 1])
    return len(starts)


def assert_n_step(sample: TensorDict, rows: TensorDict, at: list[int], n_steps: int, gamma: float) -> None:
    """Row k of the sample holds the n-step sums of row ``at[k]``, and the flags and observation after its last step."""
    ends = ends_of(rows)
    for k, i in enumerate(at):
        reward, discount, steps, last = plain_n_step(rows, ends, i, n_steps, gamma)
        assert sample["steps_to_next_obs"][k].item() == steps
        np.testing.assert_allclose(sample["next", "reward"][k].item(), reward, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(sample["gamma"][k].item(), discount, rtol=1e-6)
        for name in ("terminated", "done", "observation"):
            assert torch.equal(sample["next", name][k], rows["next", name][last]), name
        assert torch.equal(sample["observation"][k], rows["observation"][i])
        assert torch.equal(sample["action"][k], rows["action"][i])
