"""Our own row: every fixture has a part here, and each must be at zero."""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from benchmarks.boundaries import fixtures as given
from benchmarks.boundaries.cells import Cell, Tally
from benchmarks.boundaries.fixtures import PLAN, STEPS, Key, Row

PACKAGE = "flatroll"
MODES = ("NextStep", "SameStep", "Disabled")
CAPACITY = 20  # of both envs' rows: the write head stands within episodes
Newest: TypeAlias = dict[tuple[int, int], Key]  # by (env, episode): its newest row
WINDOW = 6  # vector steps of a collected batch: windows cut episodes


def fixtures() -> dict[str, Callable[[], Cell]]:
    """Return a function for each fixture."""
    return {
        "truncated_end": lambda: one_step_targets(lambda row: row.truncated and not row.terminated),
        "both_ends": lambda: one_step_targets(lambda row: row.truncated and row.terminated),
        "last_observation": last_observation,
        "dead_rows": dead_rows,
        "n_step": n_step,
        "slices": slices,
        "frame_stacks": frame_stacks,
        "hidden_state": hidden_state,
        "advantages": advantages,
        "episode_statistics": episode_statistics,
        "normaliser": normaliser,
        "saved_buffer": saved_buffer,
        "passes": passes,
        "last_info": last_info,
    }


def batches(env: Any, policy: Any = None, steps: int = STEPS, **options: Any) -> Iterator[Any]:
    """Collect rows of an env in batches of a few vector steps."""
    from flatroll.rollouts import Collector

    rows = WINDOW * PLAN.num_envs
    return iter(Collector(env, policy, frames_per_batch=rows, total_frames=steps * PLAN.num_envs, **options))


def rows_of(batch: Any) -> list[Row]:
    """Return the script's rows for the observations of a batch."""
    return [PLAN.row(given.key_of(observation)) for observation in batch["observation"].reshape(-1, 3)]


def critic() -> Any:
    """Return the scripted value function as a module."""
    import torch
    from tensordict.nn import TensorDictModule

    layer = torch.nn.Linear(3, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([given.VALUE_WEIGHTS]))
        layer.bias.fill_(given.VALUE_BIAS)
    return TensorDictModule(layer, ["observation"], ["state_value"])


def one_step_targets(chosen: Callable[[Row], bool]) -> Cell:
    from flatroll.estimators import TD0Estimator

    estimator = TD0Estimator(gamma=given.GAMMA, value_network=critic())
    tally = Tally()
    for mode in MODES:
        for batch in batches(given.vector_env(mode)):
            targets = estimator(batch)["value_target"].squeeze(-1)
            for row, target in zip(rows_of(batch), targets.tolist(), strict=True):
                if chosen(row):
                    tally.compare((mode, row.key), target, PLAN.target(row))
    return tally.cell("target differs")


def last_observation() -> Cell:
    tally = Tally()
    for mode in MODES:
        for batch in batches(given.vector_env(mode)):
            for row, after in zip(rows_of(batch), batch["next", "observation"], strict=True):
                if row.done:
                    tally.compare((mode, row.key), after, row.next_observation)
    return tally.cell("not the last observation")


def dead_rows() -> Cell:
    tally = Tally()
    for mode in MODES:
        for batch in batches(given.vector_env(mode)):
            for before, after in zip(batch["observation"], batch["next", "observation"], strict=True):
                is_row = PLAN.has_row(given.key_of(before)) and given.follows(before, after)
                tally.check((mode, given.key_of(before)), is_row)
    return tally.cell("no transition")


def filled(env: Any, **options: Any) -> tuple[Any, Newest]:
    """Return a buffer whose ring has been overwritten, and each episode's newest row."""
    from flatroll.buffers import LazyTensorStorage, ReplayBuffer

    buffer = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), **options)
    newest: Newest = {}
    for batch in batches(env):
        buffer.extend(batch)
        newest |= {row.key[:2]: row.key for row in rows_of(batch)}
    return buffer, newest


def check_n_step(buffer: Any, newest: Newest, tally: Tally, rows: int = CAPACITY) -> None:
    """Compare the n-step targets of all rows of a buffer, drawn in one pass."""
    from flatroll.estimators import TD0Estimator

    sample = TD0Estimator(gamma=given.GAMMA, value_network=critic())(buffer.sample(rows))
    for row, target in zip(rows_of(sample), sample["value_target"].squeeze(-1).tolist(), strict=True):
        tally.compare(row.key, target, PLAN.n_step_target(row.key, newest=newest[row.key[:2]]))


def n_step_parts() -> dict[str, Any]:
    from flatroll.buffers import MultiStepTransform, SamplerWithoutReplacement

    return {
        "sampler": SamplerWithoutReplacement(),
        "transform": MultiStepTransform(given.N_STEP, given.GAMMA),
    }


def n_step() -> Cell:
    tally = Tally()
    for mode in MODES:
        buffer, newest = filled(given.vector_env(mode), **n_step_parts())
        check_n_step(buffer, newest, tally)
    return tally.cell("n-step target differs")


def check_slices(buffer: Any, tally: Tally, draws: int = 16) -> None:
    """Look for joints in sampled slices that no flag marks."""
    for draw in range(draws):
        sample = buffer.sample(4 * given.SLICE)
        cut_after = sample["next", "done"].squeeze(-1).clone()
        cut_after[:-1] |= sample["is_init"].squeeze(-1)[1:]
        observations = sample["observation"]
        for first in range(0, len(observations), given.SLICE):
            last = first + given.SLICE
            joint = given.unmarked_joint(observations[first:last], cut_after[first:last])
            tally.check((draw, first), not joint)


def slices() -> Cell:
    import torch

    from flatroll.buffers import SliceSampler

    tally = Tally()
    for mode in MODES:
        sampler = SliceSampler(slice_len=given.SLICE)
        generator = torch.Generator().manual_seed(0)
        buffer, _ = filled(given.vector_env(mode), sampler=sampler, generator=generator)
        check_slices(buffer, tally)
    return tally.cell("joins rows unmarked")


def frame_stacks() -> Cell:
    """Stacks made by Gymnasium's wrapper, stored as single frames and stacked again on reading."""
    import gymnasium as gym

    from flatroll.buffers import LazyTensorStorage, ReplayBuffer

    def make(env: int) -> Any:
        return lambda: gym.wrappers.FrameStackObservation(given.ScriptedEnv(PLAN, env), given.STACK)

    tally = Tally()
    for mode in MODES:
        env = gym.vector.SyncVectorEnv(
            [make(env) for env in range(PLAN.num_envs)], autoreset_mode=gym.vector.AutoresetMode(mode)
        )
        storage = LazyTensorStorage(CAPACITY, compact_obs=True, frame_stack={"observation": given.STACK})
        buffer = ReplayBuffer(storage=storage)
        for batch in batches(env):
            buffer.extend(batch)
        held = buffer[:]
        for stack, after in zip(held["observation"], held["next", "observation"], strict=True):
            key = given.key_of(stack[-1])
            tally.compare((mode, key), stack, PLAN.stack(key))
            later = (key[0], key[1], key[2] + 1)
            tally.compare((mode, later), after, PLAN.stack(later))
    return tally.cell("frames of another episode or lap")


def hidden_state() -> Cell:
    import torch
    from tensordict.nn import TensorDictModule, TensorDictSequential

    from flatroll.modules import GRUModule, set_recurrent_mode

    torch.manual_seed(0)
    gru = GRUModule(3, 4, in_key="observation", out_key="features")
    act = TensorDictModule(lambda x: (x[..., 0] > 0).long(), ["features"], ["action"])
    parts: Any = [gru, act]
    tally = Tally()
    for mode in MODES:
        for batch in batches(given.vector_env(mode), TensorDictSequential(*parts)):
            with torch.no_grad(), set_recurrent_mode("recurrent"):
                again = gru(batch.copy().exclude("features"))
            outputs = {"acting": batch["features"], "training": again["features"]}
            for number, row in enumerate(rows_of(batch)):
                right = one_episode_alone(gru.gru, row)
                for part, output in outputs.items():
                    tally.compare((mode, part, row.key), 100 * output[number].detach(), 100 * right)
    return tally.cell("state of another episode")


def one_episode_alone(network: Any, row: Row) -> Any:
    """Return a stock network's output at a row, run from zeros over the row's episode up to it."""
    import torch

    keys = [(row.env, row.episode, step) for step in range(row.step + 1)]
    with torch.no_grad():
        output, _ = network(torch.tensor([keys], dtype=torch.float32))
    return output[0, -1]


def advantages() -> Cell:
    tally = Tally()
    check_gae(tally)
    check_vtrace(tally)
    return tally.cell("advantage differs")


def whole_window(mode: str) -> tuple[Any, Any]:
    """Return one batch of the first vector steps, and its rows as ``[T][E]``."""
    from flatroll.rollouts import Collector

    (batch,) = Collector(
        given.vector_env(mode), frames_per_batch=STEPS * PLAN.num_envs, total_frames=STEPS * PLAN.num_envs
    )
    return batch, rows_of(batch)


def right_by_key(rows: Iterable[Row], estimate: Callable[[list[list[Row]]], Any]) -> dict[Key, Any]:
    """Return what an estimator of a window ``[T][1]`` gives for the rows of each env, by the rows' keys."""
    lanes: dict[int, list[Row]] = {}
    for row in rows:
        lanes.setdefault(row.env, []).append(row)
    found: dict[Key, Any] = {}
    for lane in lanes.values():
        values = estimate([[row] for row in lane])
        found |= {row.key: values[t, 0] for t, row in enumerate(lane)}
    return found


def check_gae(tally: Tally) -> None:
    from flatroll.estimators import GAE

    gae = GAE(gamma=given.GAMMA, lmbda=given.LAMBDA, value_network=critic())
    for mode in MODES:
        batch, rows = whole_window(mode)
        right = right_by_key(rows, given.advantages)
        for row, gain in zip(rows, gae(batch)["advantage"].squeeze(-1).tolist(), strict=True):
            tally.compare(("GAE", mode, row.key), gain, right[row.key])


def check_vtrace(tally: Tally) -> None:
    import numpy as np
    import torch
    from tensordict.nn import (
        ProbabilisticTensorDictModule,
        ProbabilisticTensorDictSequential,
        TensorDictModule,
    )
    from torch.distributions import Categorical

    from flatroll.estimators import VTrace

    even = TensorDictModule(lambda x: torch.zeros(*x.shape[:-1], 2), ["observation"], ["logits"])
    head = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
    parts: Any = [even, head]
    actor = ProbabilisticTensorDictSequential(*parts)
    vtrace = VTrace(gamma=given.GAMMA, actor_network=actor, value_network=critic())

    def ratio(row: Row) -> float:  # the behaviour's probability was 1/2, or 1
        return 0.0 if row.step % 2 else float(np.log(0.5))

    def estimate(window: list[list[Row]]) -> Any:
        return given.vtrace(window, np.array([[ratio(row) for row in step] for step in window]))[1]

    for mode in MODES:
        batch, rows = whole_window(mode)
        behaviour = [[float(np.log(0.5)) - ratio(row)] for row in rows]
        batch["action_log_prob"] = torch.tensor(behaviour).squeeze(-1)
        right = right_by_key(rows, estimate)
        for row, gain in zip(rows, vtrace(batch)["advantage"].squeeze(-1).tolist(), strict=True):
            tally.compare(("V-trace", mode, row.key), gain, right[row.key])


def episode_statistics() -> Cell:
    from flatroll.wrappers import RewardSum, StepCounter

    tally = Tally()
    for mode in MODES:
        for batch in batches(StepCounter(RewardSum(given.vector_env(mode)))):
            gains = batch["next", "episode_reward"].squeeze(-1).tolist()
            lengths = batch["next", "step_count"].squeeze(-1).tolist()
            for row, gain, length in zip(rows_of(batch), gains, lengths, strict=True):
                if row.done:
                    right = PLAN.episode_return(row.env, row.episode)
                    tally.compare((mode, row.key), (gain, length), right)
    return tally.cell("return or length differs")


def normaliser() -> Cell:
    tally = Tally()
    for mode in MODES:
        check_observation_counts(mode, tally)
        check_reward_scale(mode, tally)
    return tally.cell("counted twice or never")


def check_observation_counts(mode: str, tally: Tally) -> None:
    """Every observation of the batches once, the last ones of episodes too."""
    import torch

    from flatroll.modules import RunningNorm

    norm = RunningNorm("observation", shape=(given.one_hot_size(PLAN),))
    for batch in batches(given.vector_env(mode, one_hot=True)):
        norm.update(batch)

    counted = (norm.statistics.count * norm.statistics.mean).numpy()
    plain = torch.cat([batch["observation"] for batch in batches(given.vector_env(mode))])
    rows = [PLAN.row(given.key_of(observation)) for observation in plain]
    acted_on = [row.key for row in rows]
    also_seen = {(row.env, row.episode, row.step + 1) for row in rows} - set(acted_on)
    for key, right in given.counts_are_right(PLAN, counted, acted_on, sorted(also_seen)):
        tally.check((mode, key), right)


def check_reward_scale(mode: str, tally: Tally) -> None:
    """Rewards over the deviation of the returns of all rows of a batch."""
    from flatroll.estimators import RewardScale

    batch, rows = whole_window(mode)
    scale = RewardScale(gamma=given.GAMMA, clip=None)
    scale.update(batch)
    scaled = scale(batch)["next", "reward_scaled"].squeeze(-1).tolist()
    deviation = float(given.discounted_returns(rows).std())
    for row, seen in zip(rows, scaled, strict=True):
        tally.compare((mode, row.key), 100 * seen, 100 * row.reward / deviation)


def saved_buffer() -> Cell:
    """A buffer that was saved within episodes, loaded by a new one and written on: its rows, and n-step targets."""
    tally = Tally()
    for mode in MODES:
        buffer, _ = saved_and_continued(mode, dict)
        held = buffer[:]
        rewards = held["next", "reward"].squeeze(-1).tolist()
        for before, after, reward in zip(
            held["observation"], held["next", "observation"].tolist(), rewards, strict=True
        ):
            row = PLAN.row(given.key_of(before))
            tally.compare((mode, row.key), [*after, reward], [*row.next_observation, row.reward])

        check_n_step(*saved_and_continued(mode, n_step_parts), tally, 6 * WINDOW * PLAN.num_envs)
    return tally.cell("rows at the seam differ")


def saved_and_continued(mode: str, parts: Callable[[], dict[str, Any]]) -> tuple[Any, Newest]:
    """Return a buffer that was saved within episodes, loaded and continued, and each episode's newest row.

    A new collector continues it over new envs, which begin with episode 8 and are reset, as in a new process.
    """
    from flatroll.buffers import LazyTensorStorage, ReplayBuffer

    def make() -> Any:
        return ReplayBuffer(storage=LazyTensorStorage(3 * CAPACITY, compact_obs=True), **parts())

    buffer = make()
    newest: Newest = {}
    env = given.vector_env(mode)
    for run in range(2):
        for batch in batches(env, steps=3 * WINDOW):
            buffer.extend(batch)
            newest |= {row.key[:2]: row.key for row in rows_of(batch)}
        if run == 1:
            break

        loaded = make()
        with tempfile.TemporaryDirectory() as folder:
            buffer.dumps(folder)
            loaded.loads(folder)
        buffer = loaded
        env = given.vector_env(mode)
        for one in env.envs:
            scripted: Any = one.unwrapped
            scripted.episode = 7
    return buffer, newest


def passes() -> Cell:
    from flatroll.buffers import SamplerWithoutReplacement

    tally = Tally()
    for mode in MODES:
        buffer, _ = filled(given.vector_env(mode), sampler=SamplerWithoutReplacement(), batch_size=6)
        held = [given.key_of(observation) for observation in buffer[:]["observation"]]
        for _ in range(2):
            drawn = [given.key_of(row) for sample in buffer for row in sample["observation"]]
            for key in held:
                tally.check((mode, key), drawn.count(key) == 1)
    return tally.cell("not once in a pass")


def last_info() -> Cell:
    tally = Tally()
    for mode in MODES:
        for batch in batches(given.vector_env(mode), info_keys=["row"]):
            for row, seen in zip(rows_of(batch), batch["next", "row"].flatten().tolist(), strict=True):
                if row.done:
                    tally.compare((mode, row.key), seen, row.reward)
    return tally.cell("not the last step's")
