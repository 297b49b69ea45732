"""TorchRL: its collector over a SerialEnv and Gymnasium's vector envs, buffers, estimators, LSTM, transforms."""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.boundaries import fixtures as given
from benchmarks.boundaries.cells import Cell, Tally
from benchmarks.boundaries.fixtures import PLAN, STEPS, Key, Row

PACKAGE = "torchrl"
LANE = 10  # rows of each env in a ring: the write head stands within episodes
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


def serial_env(first: int = 0, **options: Any) -> Any:
    """Return a SerialEnv of the scripted envs; their first episode is number ``first``."""
    from torchrl.envs import GymWrapper, SerialEnv

    def make(env: int) -> Any:
        def function() -> Any:
            scripted = given.ScriptedEnv(PLAN, env, **options)
            scripted.episode = first - 1
            return GymWrapper(scripted)

        return function

    return SerialEnv(PLAN.num_envs, [make(env) for env in range(PLAN.num_envs)])


class OneOfTheScript(given.ScriptedEnv):
    """The script's first env, as a registered env is made: with options of the library's own."""

    def __init__(self, **options: Any) -> None:
        super().__init__()


# Worker processes import this file by the name in front of the colon.
REGISTERED = "benchmarks.boundaries.libraries.torchrl:BoundaryScript-v0"
if "BoundaryScript-v0" not in gym.registry:
    gym.register(
        "BoundaryScript-v0", entry_point=OneOfTheScript, disable_env_checker=True, order_enforce=False
    )


def other_envs() -> dict[str, Callable[[], Any]]:
    """Return the ways to use Gymnasium's vector envs; NEXT_STEP ones are refused by the wrapper."""
    from torchrl.envs import GymEnv, GymWrapper

    return {
        "GymEnv(num_envs=2)": lambda: GymEnv(REGISTERED, num_envs=PLAN.num_envs),
        "GymWrapper SameStep": lambda: GymWrapper(given.vector_env("SameStep")),
        "GymWrapper Disabled": lambda: GymWrapper(given.vector_env("Disabled")),
    }


def batches(env: Any, policy: Any = None, window: int = WINDOW) -> Iterator[Any]:
    """Collect ``[envs, window]`` batches."""
    from torchrl.collectors import Collector

    rows = window * PLAN.num_envs
    collector = Collector(env, policy, frames_per_batch=rows, total_frames=STEPS * PLAN.num_envs)
    yield from collector
    collector.shutdown()


def rows_of(batch: Any) -> list[Row]:
    return [PLAN.row(given.key_of(observation)) for observation in batch["observation"].reshape(-1, 3)]


def critic() -> Any:
    import torch
    from tensordict.nn import TensorDictModule

    layer = torch.nn.Linear(3, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([given.VALUE_WEIGHTS]))
        layer.bias.fill_(given.VALUE_BIAS)
    return TensorDictModule(layer, in_keys=["observation"], out_keys=["state_value"])


def one_step_targets(chosen: Callable[[Row], bool]) -> Cell:
    from torchrl.objectives.value import TD0Estimator

    estimator = TD0Estimator(gamma=given.GAMMA, value_network=critic())
    tally = Tally()
    for batch in batches(serial_env()):
        targets = estimator(batch)["value_target"].flatten().tolist()
        for row, target in zip(rows_of(batch), targets, strict=True):
            if chosen(row):
                tally.compare(row.key, target, PLAN.target(row))
    return tally.cell("target differs", note="Over a SerialEnv; see last_observation for GymEnv(num_envs=).")


def last_observation() -> Cell:
    tally = Tally()
    by_way: dict[str, int] = {}
    for name, make in {"SerialEnv": serial_env, **other_envs()}.items():
        before = tally.wrong
        for batch in batches(make()):
            afters = batch["next", "observation"].reshape(-1, 3)
            for row, after in zip(rows_of(batch), afters, strict=True):
                if row.done:
                    tally.compare((name, row.key), after, row.next_observation)
        by_way[name] = tally.wrong - before
    return tally.cell(
        "GymEnv(num_envs=) stores zeros",
        note=f"Wrong by way: {words(by_way)}. GymWrapper refuses NEXT_STEP envs.",
        script="torchrl_last_observations_are_zeros.sh",
    )


def words(numbers: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in numbers.items())


def dead_rows() -> Cell:
    """A row begins where one of the script does, and its flags are that row's."""
    tally = Tally()
    for name, make in {"SerialEnv": serial_env, **other_envs()}.items():
        for batch in batches(make()):
            befores = batch["observation"].reshape(-1, 3)
            rewards = batch["next", "reward"].flatten().tolist()
            dones = batch["next", "done"].flatten().tolist()
            for before, reward, done in zip(befores, rewards, dones, strict=True):
                key = given.key_of(before)
                right = PLAN.has_row(key) and PLAN.row(key).reward == reward and PLAN.row(key).done == done
                tally.check((name, key), right)
    return tally.cell("no transition")


def filled(**options: Any) -> tuple[Any, dict[int, Key]]:
    """Return a buffer of ``[envs, time]`` rows whose ring has been overwritten, and each env's newest row."""
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(LANE * PLAN.num_envs, ndim=2), **options)
    newest: dict[int, Key] = {}
    for batch in batches(serial_env()):
        newest |= {
            row.env: row.key for row in rows_of(batch)
        }  # before the buffer's transform changes the batch
        buffer.extend(batch)
    return buffer, newest


def check_n_step(sample: Any, newest: dict[int, Key], tally: Tally) -> None:
    """Compare the targets of n-step rows, made by the estimator that reads ``steps_to_next_obs``."""
    from torchrl.objectives.value import TD0Estimator

    sample = TD0Estimator(gamma=given.GAMMA, value_network=critic())(sample.reshape(-1))
    for row, target in zip(rows_of(sample), sample["value_target"].flatten().tolist(), strict=True):
        tally.compare(row.key, target, PLAN.n_step_target(row.key, newest=newest[row.env]))


def n_step() -> Cell:
    from torchrl.data import MultiStep
    from torchrl.envs import MultiStepTransform

    tally = Tally()
    buffer, newest = filled(transform=MultiStepTransform(given.N_STEP, given.GAMMA))
    # The transform holds back the newest rows until later ones come, so no stored row is cut.
    check_n_step(buffer[:], {env: (env, 99, 0) for env in newest}, tally)
    of_transform = tally.wrong

    # The collector's postproc, the second way, cuts at the end of each batch.
    for batch in batches(serial_env()):
        last = {row.env: row.key for row in rows_of(batch)}
        check_n_step(MultiStep(gamma=given.GAMMA, n_steps=given.N_STEP)(batch), last, tally)
    return tally.cell(
        "bootstraps rows whose sum reaches the end",
        documented="MultiStepTransform, done_keys: these entries are left untouched",
        note=f"MultiStepTransform {of_transform}, MultiStep (the second way) {tally.wrong - of_transform}: terminated "
        "stays that of the first row, and losses and estimators read it.",
        script="torchrl_multi_step_terminated.sh",
    )


def check_slices(buffer: Any, tally: Tally, name: str) -> None:
    """Look for adjacent rows of samples that do not follow one another, without done, truncated or is_init between."""
    for draw in range(16):
        sample = buffer.sample()
        cut_after = (sample["next", "done"] | sample["next", "truncated"]).squeeze(-1)
        frames = sample["observation"]
        for i in range(len(frames) - 1):
            joint = given.unmarked_joint(frames[i : i + 2], cut_after[i : i + 1])
            tally.check((name, draw, given.key_of(frames[i]), given.key_of(frames[i + 1])), not joint)


def slices() -> Cell:
    """By trajectory ids, which the collector writes, and by ends in a storage that keeps the envs apart."""
    import torch
    from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

    ids: dict[str, Any] = {"traj_key": ("collector", "traj_ids")}
    ends: dict[str, Any] = {"end_key": ("next", "done")}

    def check(keys: dict[str, Any], ndim: int, tally: Tally) -> None:
        torch.manual_seed(0)
        sampler = SliceSampler(slice_len=given.SLICE, strict_length=False, **keys)
        storage = LazyTensorStorage(LANE * PLAN.num_envs, ndim=ndim)
        buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=4 * given.SLICE)
        for batch in batches(serial_env()):
            if ndim == 1:
                batch = batch.reshape(-1)
            buffer.extend(batch)
        check_slices(buffer, tally, f"{keys}, {ndim} dims")

    tally = Tally()
    check(ids, 2, tally)
    check(ids, 1, tally)
    check(ends, 2, tally)
    other = Tally()
    check(ends, 1, other)
    return tally.cell(
        "joins rows unmarked",
        note=f"By ends in a flat storage, where only windows keep envs apart: {other.wrong} of {other.of}. A plain "
        "ReplayBuffer does not write the marks of slices into the sample, a TensorDictReplayBuffer does.",
    )


def frame_stacks() -> Cell:
    from torchrl.envs import CatFrames, Compose, TransformedEnv, UnsqueezeTransform

    stacks: Any = [
        UnsqueezeTransform(-2, in_keys=["observation"], out_keys=["frames"]),
        CatFrames(given.STACK, dim=-2, in_keys=["frames"]),
    ]
    stacking = Compose(*stacks)
    tally = Tally()
    for batch in batches(TransformedEnv(serial_env(), stacking)):
        stacks = batch["frames"].reshape(-1, given.STACK, 3)
        afters = batch["next", "frames"].reshape(-1, given.STACK, 3)
        for row, before, after in zip(rows_of(batch), stacks, afters, strict=True):
            tally.compare(row.key, before, PLAN.stack(row.key))
            later = (row.env, row.episode, row.step + 1)
            tally.compare(later, after, PLAN.stack(later))
    return tally.cell("frames of another episode")


def hidden_state() -> Cell:
    import torch
    from tensordict.nn import TensorDictModule, TensorDictSequential
    from torchrl.envs import InitTracker, TransformedEnv
    from torchrl.modules import LSTMModule, set_recurrent_mode

    torch.manual_seed(0)
    lstm = LSTMModule(3, 4, in_key="observation", out_key="features")
    act = TensorDictModule(lambda x: torch.zeros(*x.shape[:-1], 2), in_keys=["features"], out_keys=["action"])
    env = TransformedEnv(serial_env(), InitTracker())
    env.append_transform(lstm.make_tensordict_primer())
    tally = Tally()
    by_part = {"acting": 0, "training": 0}
    parts: Any = [lstm, act]
    for batch in batches(env, TensorDictSequential(*parts)):
        with torch.no_grad(), set_recurrent_mode(True):
            again = lstm(batch.clone().exclude("features"))
        for part, output in (("acting", batch["features"]), ("training", again["features"])):
            before = tally.wrong
            for row, seen in zip(rows_of(batch), output.reshape(-1, 4), strict=True):
                tally.compare((part, row.key), 100 * seen.detach(), 100 * one_episode_alone(lstm.lstm, row))
            by_part[part] += tally.wrong - before
    return tally.cell("state of another episode", note=f"Wrong by part: {words(by_part)}.")


def one_episode_alone(network: Any, row: Row) -> Any:
    """Return a stock network's output at a row, run from zeros over the row's episode up to it."""
    import torch

    keys = [(row.env, row.episode, step) for step in range(row.step + 1)]
    with torch.no_grad():
        output, _ = network(torch.tensor([keys], dtype=torch.float32))
    return output[0, -1]


def by_key(batch: Any, estimate: Callable[[list[list[Row]]], Any]) -> dict[Key, Any]:
    """Return what an estimator of a window gives for the rows of each env, by the rows' keys."""
    found: dict[Key, Any] = {}
    for lane in batch:
        rows = rows_of(lane)
        values = estimate([[row] for row in rows])
        found |= {row.key: values[t, 0] for t, row in enumerate(rows)}
    return found


def advantages() -> Cell:
    import torch
    from tensordict.nn import (
        ProbabilisticTensorDictModule,
        ProbabilisticTensorDictSequential,
        TensorDictModule,
    )
    from torchrl.objectives.value import GAE, VTrace

    gae = GAE(gamma=given.GAMMA, lmbda=given.LAMBDA, value_network=critic())
    even = TensorDictModule(
        lambda x: torch.zeros(*x.shape[:-1], 2), in_keys=["observation"], out_keys=["logits"]
    )
    head = ProbabilisticTensorDictModule(
        in_keys=["logits"], out_keys=["action"], distribution_class=torch.distributions.OneHotCategorical
    )
    parts: Any = [even, head]
    actor = ProbabilisticTensorDictSequential(*parts)
    vtrace = VTrace(gamma=given.GAMMA, actor_network=actor, value_network=critic())

    def ratio(row: Row) -> float:  # the behaviour's probability was 1/2, or 1
        return 0.0 if row.step % 2 else float(np.log(0.5))

    def right_vtrace(window: Iterable[list[Row]]) -> Any:
        steps = list(window)
        return given.vtrace(steps, np.array([[ratio(row) for row in step] for step in steps]))[1]

    tally = Tally()
    for batch in batches(serial_env(), window=STEPS):
        rows = rows_of(batch)
        right = by_key(batch, given.advantages)
        for row, gain in zip(rows, gae(batch.clone())["advantage"].flatten().tolist(), strict=True):
            tally.compare(("GAE", row.key), gain, right[row.key])

        right = by_key(batch, right_vtrace)
        behaviour = torch.tensor([float(np.log(0.5)) - ratio(row) for row in rows])
        batch["action_log_prob"] = batch["sample_log_prob"] = behaviour.reshape(batch.shape)
        for row, gain in zip(rows, vtrace(batch)["advantage"].flatten().tolist(), strict=True):
            tally.compare(("V-trace", row.key), gain, right[row.key])
    return tally.cell("advantage differs")


def episode_statistics() -> Cell:
    from torchrl.envs import Compose, RewardSum, StepCounter, TransformedEnv

    sums: Any = [RewardSum(), StepCounter()]
    tally = Tally()
    for batch in batches(TransformedEnv(serial_env(), Compose(*sums))):
        gains = batch["next", "episode_reward"].flatten().tolist()
        lengths = batch["next", "step_count"].flatten().tolist()
        for row, gain, length in zip(rows_of(batch), gains, lengths, strict=True):
            if row.done:
                tally.compare(row.key, (gain, length), PLAN.episode_return(row.env, row.episode))
    return tally.cell("return or length differs")


def normaliser() -> Cell:
    """VecNorm without decay, which weighs each item the same; its rewards are centred, another formula than here."""
    from torchrl.envs import TransformedEnv, VecNormV2

    norm: Any = VecNormV2(in_keys=["observation"], out_keys=["normed"], decay=1.0, reduce_batch_dims=True)
    env = TransformedEnv(serial_env(one_hot=True), norm)
    for _ in batches(env):
        pass
    counted = (norm._count["observation"] * norm._loc["observation"]).numpy()
    plain = [row for batch in batches(serial_env()) for row in rows_of(batch)]
    acted_on = [row.key for row in plain]
    also_seen = {(row.env, row.episode, row.step + 1) for row in plain} - set(acted_on)
    tally = Tally()
    for key, right in given.counts_are_right(PLAN, counted, acted_on, sorted(also_seen)):
        tally.check(key, right)
    return tally.cell(
        "running envs' first observations counted again", script="torchrl_vec_norm_counts_resets.sh"
    )


def saved_buffer() -> Cell:
    """A buffer saved within episodes, loaded by a new one and continued by a new collector: slices over the seam."""
    from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

    def make() -> Any:
        sampler = SliceSampler(slice_len=given.SLICE, traj_key=("collector", "traj_ids"), strict_length=False)
        storage = LazyTensorStorage(6 * LANE * PLAN.num_envs, ndim=2)
        return TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=4 * given.SLICE)

    one = make()
    for _, batch in zip(range(3), batches(serial_env()), strict=False):
        one.extend(batch)
    two = make()
    with tempfile.TemporaryDirectory() as folder:
        one.dumps(folder)
        two.loads(folder)
    held = two[:]
    tally = Tally()
    afters = held["next", "observation"].reshape(-1, 3)
    for row, after in zip(rows_of(held), afters, strict=True):
        tally.compare(row.key, after, row.next_observation)

    for batch in batches(serial_env(first=20)):
        two.extend(batch)
    check_slices(two, tally, "by ids")
    return tally.cell("joins rows over the seam")


def passes() -> Cell:
    from torchrl.data import SamplerWithoutReplacement

    buffer, _ = filled(sampler=SamplerWithoutReplacement(), batch_size=6)
    held = [row.key for row in rows_of(buffer[:])]
    tally = Tally()
    for _ in range(2):
        drawn = [row.key for sample in buffer for row in rows_of(sample)]
        for key in held:
            tally.check(key, drawn.count(key) == 1)
    return tally.cell("not once in a pass")


def last_info() -> Cell:
    from torchrl.envs import GymWrapper, SerialEnv

    def make(env: int) -> Any:
        return lambda: GymWrapper(given.ScriptedEnv(PLAN, env)).auto_register_info_dict()

    tally = Tally()
    for batch in batches(SerialEnv(PLAN.num_envs, [make(env) for env in range(PLAN.num_envs)])):
        for row, seen in zip(rows_of(batch), batch["next", "row"].flatten().tolist(), strict=True):
            if row.done:
                tally.compare(row.key, seen, row.reward)
    return tally.cell("not the last step's")
