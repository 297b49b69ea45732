"""Counts what each part of a training loop waits for, on the emulated device: the table of docs/howto/gpu_waits.md.

``python tests/support/chip_waits.py`` writes it into the page; tests/on_chip/test_waits.py compares.
"""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import chip

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2] / folder) for folder in ("src", "")]
    chip.install()

import torch
from chip_cases import Sim
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical

from flatroll.buffers import (
    LazyTensorStorage,
    MultiStepTransform,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
)
from flatroll.estimators import GAE, ClipPPOLoss, DQNLoss, RewardScale, SoftUpdate, VTrace, update_step
from flatroll.layout import audit, describe, explain
from flatroll.modules import GRUModule, LSTMModule, actor, critic, q_network, set_recurrent_mode, update_norms
from flatroll.rollouts import Collector, evaluate
from flatroll.wrappers import InitTracker, RewardSum, StepCounter, TrajId, as_vector_env
from flatroll.wrappers.testing import Script, ScriptedVectorEnv

D = chip.NAME
ENVS = 12
STEPS = 20
FRAMES = ENVS * STEPS

#: Name, unit, number of units in a call, and what makes the call.
Part = tuple[str, str, int, Callable[[], Callable[[], object]]]
PARTS: list[Part] = []


def part(name: str, unit: str = "call", units: int = 1) -> Callable[[Any], Any]:
    """Add a part; the function returns the call that is counted."""

    def register(make: Any) -> Any:
        PARTS.append((name, unit, units, make))
        return make

    return register


def known(mode: str = "SameStep", **options: Any) -> Any:
    """An env that says where its last observations are."""
    given = {"final_obs": "final_obs"} if mode == "SameStep" else {}
    return as_vector_env(Sim(ENVS, D, mode, **options), **given)


def batches(env: Any, policy: Any, **options: Any) -> Callable[[], object]:
    """The next batch of a collector."""
    return iter(Collector(env, policy, frames_per_batch=FRAMES, seed=0, **options)).__next__


@part("env step with `InitTracker`, `StepCounter`, `TrajId`, `RewardSum`", "step")
def _() -> Any:
    env = RewardSum(InitTracker(StepCounter(TrajId(known()))))
    env.reset(seed=0)
    action = torch.zeros(ENVS, dtype=torch.int64, device=D)
    return lambda: env.step(action)


@part("`StepCounter(max_steps=…)`", "step")
def _() -> Any:
    env = StepCounter(known(), max_steps=100)
    env.reset(seed=0)
    action = torch.zeros(ENVS, dtype=torch.int64, device=D)
    return lambda: env.step(action)


def collectors() -> None:
    """Parts that collect."""
    for name, mode, options in (
        ("`Collector`, SAME_STEP", "SameStep", {}),
        ("… with `compact_obs=True`", "SameStep", {"compact_obs": True}),
        ("… NEXT_STEP", "NextStep", {}),
    ):

        @part(name, "batch")
        def _(mode: str = mode, options: Any = options) -> Any:
            env = known(mode)
            return batches(env, actor(env, hidden=(8,), device=D), **options)

    for kind in ("gru", "lstm"):

        @part(f"… with an actor of `recurrent={kind!r}`", "batch")
        def _(kind: Any = kind) -> Any:
            env = known()
            return batches(env, actor(env, hidden=(8,), recurrent=kind, device=D))


collectors()


@part("… with an action mask", "batch")
def _() -> Any:
    env = known(kind="dict", mask=True)
    return batches(env, actor(env, hidden=(8,), device=D))


@part("… with random actions under a mask", "batch")
def _() -> Any:
    return batches(known(kind="dict", mask=True), None)


@part("… with a `Categorical` of your own", "step", STEPS)
def _() -> Any:
    logits = TensorDictModule(nn.Linear(3, 4), ["observation"], ["logits"])
    choose = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
    return batches(known(), ProbabilisticTensorDictSequential(logits, choose).to(D))


def from_numpy() -> None:
    """Parts whose env is on the CPU."""
    for name, options in (
        ("a NumPy env, its policy on the device", {}),
        ("… with a GRU", {"recurrent": "gru"}),
    ):

        @part(name, "step", STEPS)
        def _(options: Any = options) -> Any:
            env = ScriptedVectorEnv(Script(ENVS), autoreset_mode="SameStep")
            return batches(env, actor(env, hidden=(8,), device=D, **options), policy_device=D)


from_numpy()


@part('a batch to the CPU, `storing_device="cpu"`', "batch")
def _() -> Any:
    env = known()
    return batches(env, actor(env, hidden=(8,), device=D), storing_device="cpu")


@part("… with `no_cuda_sync=True`", "batch")
def _() -> Any:
    env = known()
    return batches(env, actor(env, hidden=(8,), device=D), storing_device="cpu", no_cuda_sync=True)


def batch_of(env: Any = None, **options: Any) -> Any:
    """A batch, and the last observations if it is compact."""
    env = known() if env is None else env
    collector = Collector(env, actor(env, hidden=(8,), device=D), frames_per_batch=FRAMES, seed=0, **options)
    return next(collector), collector.final


def estimators() -> None:
    """Advantages."""

    def gae(env: Any, **options: Any) -> Any:
        return GAE(gamma=0.99, lmbda=0.95, value_network=critic(env, hidden=(8,), device=D), **options)

    for name, options in (
        ("`GAE`", {}),
        ("… with `shifted=True`", {"shifted": True}),
        ("… and `shifted_budget=…`", {"shifted": True, "shifted_budget": 60}),
        ("… with `check_finite=True`", {"check_finite": True}),
    ):

        @part(name)
        def _(options: Any = options) -> Any:
            batch, _ = batch_of()
            estimate = gae(known(), **options)
            return lambda: estimate(batch.clone(False))

    @part("… of a compact batch")
    def _() -> Any:
        batch, final = batch_of(compact_obs=True)
        estimate = gae(known(), shifted=True)
        return lambda: estimate(batch.clone(False), final=final)

    @part("… where the env may hide last observations")
    def _() -> Any:
        batch, _ = batch_of(as_vector_env(Sim(ENVS, D)))
        estimate = gae(known())
        return lambda: estimate(batch.clone(False))

    @part("`VTrace`")
    def _() -> Any:
        env = known()
        policy = actor(env, hidden=(8,), device=D)
        value = critic(env, hidden=(8,), device=D)
        estimate = VTrace(gamma=0.99, actor_network=policy, value_network=value)
        batch, _ = batch_of()
        return lambda: estimate(batch.clone(False))


estimators()


def recurrent() -> None:
    """Recurrent modules on batches, forward and backward."""
    for kind in (GRUModule, LSTMModule):
        for burn_in in (0, 2):

            @part(f"`{kind.__name__}` on a batch" + (f", `burn_in={burn_in}`" if burn_in else ""))
            def _(kind: Any = kind, burn_in: int = burn_in) -> Any:
                net = kind(3, 8, in_key="observation", out_key="features").to(D)
                batch, _ = batch_of()
                batch.update(net.make_tensordict_primer().expand(FRAMES).to(D))

                def call() -> None:
                    with set_recurrent_mode(True, burn_in=burn_in):
                        features = net(batch.clone(False))["features"]
                    features.square().sum().backward()

                return call


recurrent()


@part("`update_step`, `step.epochs`")
def _() -> Any:
    env = known()
    policy, value = actor(env, hidden=(8,), device=D), critic(env, hidden=(8,), device=D)
    batch = GAE(gamma=0.99, lmbda=0.95, value_network=value)(batch_of(env)[0])
    loss = ClipPPOLoss(policy, value, normalize_advantage=True, diagnostics=False)
    step = update_step(loss, torch.optim.Adam(loss.parameters()), max_grad_norm=0.5)
    return lambda: step.epochs(batch, epochs=2, minibatch=60)


@part("`DQNLoss`, backward, `SoftUpdate`")
def _() -> Any:
    env = known()
    loss = DQNLoss(q_network(env, hidden=(8,), device=D)).make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss, tau=0.1)
    batch, _ = batch_of(env)

    def call() -> None:
        loss(batch.clone(False))["loss"].backward()
        target.step()

    return call


@part("`update_norms`")
def _() -> Any:
    env = known()
    policy = actor(env, hidden=(8,), device=D)
    batch, _ = batch_of(env)
    return lambda: update_norms(policy, batch)


@part("`RewardScale.update`, after `.to(device)`")
def _() -> Any:
    scale = RewardScale().to(D)
    batch, _ = batch_of()
    return lambda: scale.update(batch)


def buffer_of(sampler: Any, compact: bool, **options: Any) -> Any:
    """A buffer on the device, filled."""
    storage = LazyTensorStorage(1_000, device=D, compact_obs=compact)
    buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=60, **options)
    batch, final = batch_of(compact_obs=compact)
    buffer.extend(batch, **({} if final is None else {"final": final}))
    return buffer


def buffers() -> None:
    """Replay buffers whose storage is on the device."""
    for compact in (False, True):
        end = ", compact" if compact else ""

        @part(f"`buffer.extend`, with slices{end}")
        def _(compact: bool = compact) -> Any:
            buffer = buffer_of(SliceSampler(slice_len=4, strict_length=False), compact)
            batch, final = batch_of(compact_obs=compact)
            more = {} if final is None else {"final": final}
            return lambda: buffer.extend(batch, **more)

        for name, sampler, options in (
            ("single rows", RandomSampler, {}),
            ("slices", lambda: SliceSampler(slice_len=4, strict_length=False), {}),
            ("n-step returns", RandomSampler, {"transform": MultiStepTransform(n_steps=3, gamma=0.99)}),
        ):

            @part(f"`buffer.sample`, {name}{end}")
            def _(compact: bool = compact, sampler: Any = sampler, options: Any = options) -> Any:
                return buffer_of(sampler(), compact, **options).sample


buffers()


@part("`buffer.update_priority`")
def _() -> Any:
    buffer = buffer_of(PrioritizedSampler(1_000, 0.7, 0.5), False)
    _, info = buffer.sample(return_info=True)
    priority = torch.ones(60, device=D)
    return lambda: buffer.update_priority(info["index"], priority)


@part("the loop of [On a GPU](gpu.md#a-loop)", "batch")
def _() -> Any:
    env = known()
    policy = actor(env, hidden=(8,), device=D)
    value = critic(env, actor=policy, hidden=(8,), device=D)
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=value)
    loss = ClipPPOLoss(policy, value, normalize_advantage=True, diagnostics=False)
    step = update_step(loss, torch.optim.Adam(loss.parameters()), max_grad_norm=0.5)
    collector = iter(Collector(env, policy, frames_per_batch=FRAMES, seed=0))
    rewards = []

    def call() -> None:
        batch = next(collector)
        rewards.append(batch["next", "reward"].mean())
        step.epochs(gae(batch), epochs=2, minibatch=60)
        update_norms(policy, batch)

    return call


@part("`evaluate`, 8 episodes in 12 envs")
def _() -> Any:
    env = known()
    policy = actor(env, hidden=(8,), device=D)
    return lambda: evaluate(env, policy, episodes=8, seed=0)


@part("`describe`, `explain`, `audit`")
def _() -> Any:
    batch, _ = batch_of()
    return lambda: (describe(batch), explain(batch, 7), audit(batch))


CALLS = 3
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "gpu_waits.md"
HEADER = ["| part | in each | waits | blocking uploads |", "|---|---|---|---|"]


@cache
def count(name: str) -> tuple[float, float]:
    """Return the waits and blocking uploads of a part per unit, after a first call."""
    _, _, units, make = next(one for one in PARTS if one[0] == name)
    torch.manual_seed(0)
    call = make()
    call()

    with chip.watch() as seen:
        for _ in range(CALLS):
            call()
    waits = len(seen.waits(uploads=False))
    uploads = len(seen.waits()) - waits
    return waits / (CALLS * units), uploads / (CALLS * units)


def line(one: Part) -> str:
    """A row of the table."""
    name, unit, _, _ = one
    waits, uploads = count(name)
    return f"| {name} | {unit} | {waits:.3g} | {uploads:.3g} |"


def lines_in_page() -> list[str]:
    """The rows of the page's table."""
    text = PAGE.read_text()
    rest = text[text.index("\n".join(HEADER)) :].splitlines()[2:]
    end = next(number for number, row in enumerate(rest) if not row.startswith("|"))
    return rest[:end]


def write() -> None:
    """Write the table into the page."""
    text = PAGE.read_text()
    made = [line(one) for one in PARTS]
    before = "\n".join([*HEADER, *lines_in_page()])
    PAGE.write_text(text.replace(before, "\n".join([*HEADER, *made])))


if __name__ == "__main__":
    write()
