"""The same flat batches whatever env they come from, however the stream is cut into windows."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from scripted_rows import ENDS, rows_of, script, shown, table
from tensordict import TensorDict

from flatroll.layout.inspect.audit import audit
from flatroll.rollouts import Collector, rollout
from flatroll.wrappers import CompactObs, NextObservationDelta, RewardSum, StepCounter, as_vector_env
from flatroll.wrappers.testing import (
    Script,
    ScriptedEnv,
    ScriptedTorchEnv,
    ScriptedVectorEnv,
    expected_rows,
    make_scripted,
)

MODES = ("NextStep", "SameStep", "Disabled")
KINDS = ("float32", "float64", "uint8", "int64", "discrete", "dict", "tuple")


def collect(env: Any, frames: int, batches: int, policy: Any = None, **arguments: Any) -> list[TensorDict]:
    collector = Collector(
        env, policy, frames_per_batch=frames, total_frames=frames * batches, seed=0, **arguments
    )
    try:
        return list(collector)
    finally:
        collector.shutdown()


# --- scripted envs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["sync", "native"])
def test_every_batch_is_a_piece_of_the_table(backend: Any, mode: Any, kind: Any) -> None:
    env = make_scripted(script(obs=kind), backend=backend, autoreset_mode=mode)
    batches = collect(StepCounter(env), 10, 6)
    assert [rows_of(batch, kind) for batch in batches] == table(script(), mode, 10, 6)


@pytest.mark.parametrize("kind", ["float32", "uint8", "dict"])
@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
@pytest.mark.parametrize("backend", ["sync", "native"])
def test_envs_that_reuse_their_buffers(backend: Any, mode: Any, kind: Any) -> None:
    env = make_scripted(script(obs=kind), backend=backend, autoreset_mode=mode, reuse_buffer=True, copy=False)
    batches = collect(StepCounter(env), 10, 6)
    assert [rows_of(batch, kind) for batch in batches] == table(script(), mode, 10, 6)


@pytest.mark.parametrize(
    "options", [{}, {"shared_memory": False}, {"copy": False}], ids=["plain", "pipe", "no copy"]
)
@pytest.mark.parametrize("mode", MODES)
def test_envs_in_processes(mode: Any, options: dict[str, bool]) -> None:
    env = make_scripted(script(obs="dict"), backend="async", autoreset_mode=mode, **options)
    batches = collect(StepCounter(env), 10, 3)
    assert [rows_of(batch, "dict") for batch in batches] == table(script(), mode, 10, 3)


@pytest.mark.parametrize("kind", ["float32", "uint8"])
@pytest.mark.parametrize("mode", MODES)
def test_envs_in_processes_of_other_kinds(mode: Any, kind: Any) -> None:
    """Each env of the modes that allow it writes all its observations into one array."""
    env = make_scripted(
        script(obs=kind), backend="async", autoreset_mode=mode, reuse_buffer=mode != "SameStep"
    )
    batches = collect(StepCounter(env), 10, 3)
    assert [rows_of(batch, kind) for batch in batches] == table(script(), mode, 10, 3)


@pytest.mark.parametrize("final_obs", ["dense", "ids"])
@pytest.mark.parametrize("kind", ["float32", "uint8", "dict"])
def test_torch_envs(kind: Any, final_obs: Any) -> None:
    env = ScriptedTorchEnv(script(obs=kind), final_obs=final_obs, reuse_obs=True)
    batches = collect(StepCounter(env), 10, 6)
    assert [rows_of(batch, kind) for batch in batches] == table(script(), "SameStep", 10, 6)


def test_torch_envs_without_autoreset() -> None:
    batches = collect(StepCounter(ScriptedTorchEnv(script(), autoreset=False)), 10, 6)
    assert [rows_of(batch) for batch in batches] == table(script(), "SameStep", 10, 6)


@pytest.mark.parametrize("mode", MODES)
def test_numpy_envs_seen_as_torch(mode: Any) -> None:
    env = as_vector_env(make_scripted(script(obs="dict"), autoreset_mode=mode), framework="torch")
    batches = collect(StepCounter(env), 10, 6)
    assert [rows_of(batch, "dict") for batch in batches] == table(script(), mode, 10, 6)


def test_single_envs() -> None:
    one = Script(1, lengths=[[3, 1, 4]], ends="both")
    batches = collect(StepCounter(ScriptedEnv(one, reuse_buffer=True)), 7, 4)
    assert [rows_of(batch) for batch in batches] == table(one, "SameStep", 7, 4)


@examples(60)
@given(
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=5),
    frames=st.integers(1, 25),
    batches=st.integers(1, 6),
    mode=st.sampled_from(MODES),
)
def test_any_lengths_and_any_windows(lengths: Any, frames: int, batches: int, mode: Any) -> None:
    own = Script(len(lengths), lengths=lengths, ends=ENDS[0])  # type: ignore[arg-type]
    out = collect(StepCounter(ScriptedVectorEnv(own, autoreset_mode=mode)), frames, batches)
    assert [rows_of(batch) for batch in out] == table(own, mode, frames, batches)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_limit_of_the_collector(mode: Any) -> None:
    """The counter ends episodes itself, so no mode has dead rows."""
    batches = collect(make_scripted(script(), autoreset_mode=mode), 10, 6, max_frames_per_traj=2)
    assert [rows_of(batch) for batch in batches] == table(script(), "SameStep", 10, 6, max_steps=2)


def test_a_step_limit_tells_what_an_env_that_hides_its_ends_does_not() -> None:
    batches = collect(ScriptedTorchEnv(script(), final_obs="absent"), 40, 1, max_frames_per_traj=2)
    known, done = batches[0]["collector", "next_known"], batches[0]["next", "done"].squeeze(-1)
    assert (known & done).any()
    true = batches[0]["observation"] + torch.tensor([0.0, 0.0, 1.0])
    assert torch.equal(batches[0]["next", "observation"][known], true[known])
    assert batches[0]["next", "observation"][~known].isnan().all()


def test_rows_say_which_next_observations_an_env_hides() -> None:
    for env in (
        ScriptedTorchEnv(script(), final_obs="absent"),
        ScriptedVectorEnv(script(), autoreset_mode="SameStep", final_obs="absent"),
    ):
        (batch,) = collect(env, 60, 1)
        known, done = batch["collector", "next_known"], batch["next", "done"].squeeze(-1)
        assert torch.equal(known, ~done)
        assert batch["next", "observation"][done].isnan().all()
        true = batch["observation"] + torch.tensor([0.0, 0.0, 1.0])
        assert torch.equal(batch["next", "observation"][known], true[known])


@pytest.mark.parametrize("mode", MODES)
def test_actions_and_returns_stand_in_their_rows(mode: Any) -> None:
    env = make_scripted(script(), backend="native", autoreset_mode=mode, record_actions=True)
    batch = torch.cat(collect(RewardSum(env), 20, 3))
    steps = expected_rows(script(), 60, autoreset_mode=mode)[:60]
    sent = {(r["env"], r["episode"], r["step"]): env.actions[r["vector_step"]][r["env"]] for r in steps}
    assert batch["action"].shape == (60,)
    for i, seen in enumerate(shown(batch, "float32")):
        _, episode, step = seen[:3]
        n = step + 1
        assert batch["action"][i] == sent[seen[:3]]
        assert batch["next", "episode_reward"][i] == 100 * episode * n + n * (n + 1) // 2


@pytest.mark.parametrize("mode", MODES)
def test_rollout_gives_so_many_rows_of_each_env(mode: Any) -> None:
    batch = rollout(StepCounter(make_scripted(script(), autoreset_mode=mode)), num_steps=11, seed=0)
    true = expected_rows(script(), 30)
    rows = [r for i in range(3) for r in true[true["env"] == i][["env", "episode", "step"]].tolist()[:11]]
    assert [row[:3] for row in rows_of(batch)] == rows
    assert [row[3:6] for row in rows_of(batch)] == [(i, e, t + 1) for i, e, t in rows]


# --- windows ------------------------------------------------------------------------------------------------


def streams(batches: list[TensorDict], num_envs: int) -> list[TensorDict]:
    """The rows of each env in order, over all batches. Ids tell the env: ``episode * E + env``."""
    rows = torch.cat(batches)
    env = rows["collector", "traj_ids"] % num_envs
    return [rows[env == i] for i in range(num_envs)]


def assert_same_streams(one: list[TensorDict], other: list[TensorDict]) -> None:
    for a, b in zip(one, other, strict=True):
        n = min(len(a), len(b))
        assert n > 0
        assert set(a.keys(True, True)) == set(b.keys(True, True))
        for key in a.keys(True, True):
            left, right = a[key][:n], b[key][:n]
            assert left.dtype is right.dtype
            assert left.numpy().tobytes() == right.numpy().tobytes(), key


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "wrap", [StepCounter, lambda env: RewardSum(NextObservationDelta(env))], ids=["full", "delta"]
)
def test_windows_of_7_100_and_1000_frames_hold_the_same_streams(mode: Any, wrap: Any) -> None:
    def run(frames: int) -> list[TensorDict]:
        env = ScriptedVectorEnv(script(), autoreset_mode=mode)
        return streams(collect(wrap(env), frames, 2000 // frames), 3)

    whole = run(1000)
    assert_same_streams(run(100), whole)
    assert_same_streams(run(7), whole)


def balance(obs: torch.Tensor) -> torch.Tensor:
    return (obs[:, 2] + 0.5 * obs[:, 3] > 0).long()


@pytest.mark.parametrize("mode", MODES)
def test_cutting_cartpole_changes_nothing(mode: Any) -> None:
    def run(frames: int) -> list[TensorDict]:
        env = gym.make_vec(
            "CartPole-v1", num_envs=3, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode}
        )
        return streams(collect(StepCounter(env), frames, 700 // frames, lambda obs: balance(-obs)), 3)

    assert_same_streams(run(7), run(700))


@pytest.mark.parametrize("windows", [2, 5])
def test_k_windows_are_one_window_of_their_length(windows: int) -> None:
    """A second window that forgets that its first row continues an episode marks it done or first."""
    for mode in MODES:
        parts = collect(StepCounter(make_scripted(script(), autoreset_mode=mode)), 30, windows)  # type: ignore[arg-type]
        (whole,) = collect(StepCounter(make_scripted(script(), autoreset_mode=mode)), 30 * windows, 1)  # type: ignore[arg-type]
        assert_same_streams(streams(parts, 3), streams([whole], 3))


def test_row_counts_are_exact_and_nothing_is_lost_or_doubled() -> None:
    for mode in MODES:
        batches = collect(StepCounter(make_scripted(script(), autoreset_mode=mode)), 7, 30)  # type: ignore[arg-type]
        assert [len(batch) for batch in batches] == [7] * 30
        seen = [tuple(row[:3]) for batch in batches for row in rows_of(batch)]
        assert len(set(seen)) == 7 * 30


def test_batches_kept_in_a_list_stay_unchanged() -> None:
    for make in (
        lambda: make_scripted(script(obs="dict"), copy=False),
        lambda: ScriptedTorchEnv(script(obs="dict")),
    ):
        collector = Collector(make(), frames_per_batch=7, total_frames=140)
        kept = [(batch, batch.clone()) for batch in collector]
        assert all((batch == copy).all() for batch, copy in kept)


@pytest.mark.parametrize("mode", MODES)
def test_a_reset_before_each_window_keeps_the_true_next_observations(mode: Any) -> None:
    env = StepCounter(make_scripted(script(), autoreset_mode=mode))
    for batch in collect(env, 7, 12, reset_at_each_iter=True):
        assert all(row[3:6] == (row[0], row[1], row[2] + 1) for row in rows_of(batch))
        assert [row[10] for row in rows_of(batch)] == [row[2] == 0 for row in rows_of(batch)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["float32", "uint8", "dict"])
def test_compact_batches_lose_nothing(mode: Any, kind: Any) -> None:
    full = collect(make_scripted(script(obs=kind), autoreset_mode=mode), 10, 6)
    collector = Collector(
        CompactObs(make_scripted(script(obs=kind), autoreset_mode=mode)),
        frames_per_batch=10,
        total_frames=60,
        seed=0,
    )
    names: list[Any] = (
        ["observation"] if kind != "dict" else ["policy", ("critic", "code"), ("critic", "image")]
    )
    for whole, batch in zip(full, collector, strict=True):
        assert collector.final is not None
        for name in names:
            key = ("next", *((name,) if isinstance(name, str) else name))
            assert key not in batch.keys(True, True)
            following = batch[name].roll(-1, 0)
            following[collector.final["row"]] = collector.final[key]
            assert torch.equal(following, whole[key])


# --- real envs ----------------------------------------------------------------------------------------------


def cartpole(mode: str, backend: str = "sync") -> Any:
    return gym.make_vec(
        "CartPole-v1",
        num_envs=3,
        vectorization_mode=backend,
        vector_kwargs={"autoreset_mode": mode},
        max_episode_steps=40,
    )


def test_cartpole_streams_are_byte_identical_over_all_modes() -> None:
    """The policy depends on the observation, so one wrong row would change all that follow."""
    runs = [cartpole(mode) for mode in MODES] + [cartpole("Disabled", "async")]
    first, *others = (streams(collect(StepCounter(env), 150, 4, balance), 3) for env in runs)
    assert sum(int(stream["next", "truncated"].sum()) for stream in first) > 3
    for other in others:
        assert_same_streams(first, other)


@pytest.mark.filterwarnings("ignore:.*precision lowered:UserWarning")  # envpool's own
def test_envpool_cartpole_is_its_own_raw_stream() -> None:
    """A hand-written loop over envpool: the row after an end only resets, its action is ignored."""
    envpool = pytest.importorskip("envpool")
    pool = envpool.make_gymnasium("CartPole-v1", num_envs=4, seed=3, max_episode_steps=60)
    obs, _ = pool.reset()
    rows: list[list[Any]] = [[] for _ in range(4)]
    pending = np.zeros(4, bool)
    for _ in range(200):
        action = balance(torch.from_numpy(obs)).numpy()
        after, reward, terminated, truncated, _ = pool.step(action)
        for i in np.flatnonzero(~pending):
            rows[i].append((obs[i], action[i], after[i], reward[i], terminated[i], truncated[i]))
        obs, pending = after, terminated | truncated
    env = envpool.make_gymnasium("CartPole-v1", num_envs=4, seed=3, max_episode_steps=60)
    collector = Collector(StepCounter(env), balance, frames_per_batch=100, total_frames=700)
    keys: list[Any] = [
        "observation",
        "action",
        *(("next", k) for k in ("observation", "reward", "terminated", "truncated")),
    ]
    done = 0
    for stream, raw in zip(streams(list(collector), 4), rows, strict=True):
        n = min(len(stream), len(raw))
        assert n > 120
        for key, column in zip(keys, zip(*raw, strict=True), strict=True):
            assert stream[key][:n].squeeze(-1).numpy().tobytes() == np.stack(column[:n]).tobytes(), key
        done += int(stream["next", "done"][:n].sum())
    assert done > 4


# --- audit --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_auditor_finds_nothing(mode: Any) -> None:
    for frames in (7, 50):
        for batch in collect(StepCounter(make_scripted(script(), autoreset_mode=mode)), frames, 8):
            assert audit(batch) == []
    for batch in collect(StepCounter(cartpole(mode)), 100, 3):
        assert audit(batch) == []
