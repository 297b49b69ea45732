"""skrl's row: its PPO, DQN and PPO_RNN agents under its sequential trainer, its memory and its scaler.

Two ways of its documentation are run: one env that the trainer resets, and a Gymnasium vector env, which resets itself
in the next step by default. The agents' networks are linear, and the models' rates are zero.
"""

import importlib
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from benchmarks.boundaries.cells import Cell, Tally
from benchmarks.boundaries.fixtures import (
    GAMMA,
    LAMBDA,
    PLAN,
    SLICE,
    STEPS,
    VALUE_BIAS,
    VALUE_WEIGHTS,
    Key,
    Row,
    ScriptedEnv,
    advantages,
    columns,
    counts_are_right,
    key_of,
    unmarked_joint,
    vector_env,
)

PACKAGE = "skrl"
RING = 10
MINIBATCHES = 5  # do not divide the 48 rows of a window


def part(module: str, name: str) -> Any:
    """Import an object of the library by name."""
    return getattr(importlib.import_module(f"skrl.{module}"), name)


class Stored(NamedTuple):
    """A row of a memory, with the place where it lies; `row` is None where no transition begins there."""

    step: int
    env: int
    row: Row | None


def envs_of(kind: str, **options: Any) -> list[Any]:
    """Return the envs of one way: ``"single"``, ``"NextStep"`` or ``"SameStep"``."""
    if kind == "single":
        return [ScriptedEnv(PLAN, env, **options) for env in range(PLAN.num_envs)]
    return [vector_env(kind, **options)]


def linear(mixin: str, outputs: int, value: bool = False) -> Any:
    """Return a class of models of one linear layer; a value model computes the fixtures' value function."""
    base: Any = part("models.torch", "Model")
    mixed: Any = part("models.torch", mixin)

    class Linear(mixed, base):
        def __init__(self, env: Any) -> None:
            spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
            base.__init__(self, device="cpu", **spaces)
            mixed.__init__(self)
            self.net = nn.Linear(env.observation_space.shape[0], outputs)
            if value:
                with torch.no_grad():
                    self.net.weight.copy_(torch.tensor([VALUE_WEIGHTS]))
                    self.net.bias.fill_(VALUE_BIAS)

        def compute(self, inputs: Any, role: str) -> Any:
            return self.net(inputs["observations"]), {}

    return Linear


def memory_of(size: int, num_envs: int) -> Any:
    return part("memories.torch", "RandomMemory")(memory_size=size, num_envs=num_envs, device="cpu")


def train(agent: Any, env: Any, steps: int) -> None:
    settings = {"timesteps": steps, "disable_progressbar": True, "headless": True}
    part("trainers.torch", "SequentialTrainer")(env=env, agents=agent, cfg=settings).train()


def quiet(cfg: Any) -> Any:
    """Switch off the files that an agent writes."""
    cfg.experiment.write_interval = 0
    cfg.experiment.checkpoint_interval = 0
    return cfg


def agent_of(name: str, cfg: Any, env: Any, models: dict[str, Any], memory: Any) -> Any:
    module = f"agents.torch.{name.split('_')[0].lower()}"
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    return part(module, name)(models=models, memory=memory, cfg=cfg, device="cpu", **spaces)


def wrapped(raw: Any) -> Any:
    return part("envs.wrappers.torch", "wrap_env")(raw, wrapper="gymnasium", verbose=False)


def ppo_cfg(name: str, **settings: Any) -> Any:
    given = {
        "rollouts": STEPS,
        "discount_factor": GAMMA,
        "gae_lambda": LAMBDA,
        "learning_epochs": 1,
        "mini_batches": 1,
        "learning_rate": 0.0,
    }
    return quiet(part("agents.torch.ppo", name)(**{**given, **settings}))


def ppo(raw: Any, **settings: Any) -> Any:
    """Train for one window of `STEPS` steps; return the agent's memory."""
    env = wrapped(raw)
    memory = memory_of(STEPS, env.num_envs)
    models = {
        "policy": linear("CategoricalMixin", 2)(env),
        "value": linear("DeterministicMixin", 1, value=True)(env),
    }
    agent = agent_of("PPO", ppo_cfg("PPO_CFG", **settings), env, models, memory)
    train(agent, env, STEPS)
    return memory


def stored(memory: Any) -> list[list[Stored]]:
    """Return the rows of each env of a memory, in order of steps."""
    observations = memory.get_tensor_by_name("observations")
    found: list[list[Stored]] = []
    for env in range(observations.shape[1]):
        rows: list[Stored] = []
        for step in range(observations.shape[0]):
            key = key_of(observations[step, env].numpy())
            row = PLAN.row(key) if PLAN.has_row(key) else None
            rows.append(Stored(step, env, row))
        found.append(rows)
    return found


def compare_advantages(tally: Tally, memory: Any, lmbda: float, wanted: Callable[[Row], bool]) -> None:
    """Count the advantages (unscaled: returns minus values) of the wanted rows."""
    gains = memory.get_tensor_by_name("returns") - memory.get_tensor_by_name("values")
    for rows in stored(memory):
        live = [(at, at.row) for at in rows if at.row is not None]
        right = advantages([[row] for _, row in live], lmbda=lmbda)[:, 0]
        for (at, row), want in zip(live, right, strict=True):
            if wanted(row):
                tally.compare(row.key, float(gains[at.step, at.env]), want)


def ppo_tally(
    lmbda: float,
    wanted: Callable[[Row], bool],
    kinds: tuple[str, ...] = ("single", "NextStep"),
    **settings: Any,
) -> Tally:
    tally = Tally()
    for kind in kinds:
        for raw in envs_of(kind):
            compare_advantages(tally, ppo(raw, gae_lambda=lmbda, **settings), lmbda, wanted)
    return tally


def only_truncated(row: Row) -> bool:
    return row.truncated and not row.terminated


def both(row: Row) -> bool:
    return row.truncated and row.terminated


def truncated_end() -> Cell:
    """PPO's returns with lambda 0, which are one-step targets."""
    option = ppo_tally(0.0, only_truncated, time_limit_bootstrap=True)
    return ppo_tally(0.0, only_truncated).cell(
        "single env: bootstraps from the next episode",
        note=f"PPO's default; with time_limit_bootstrap=True {option.wrong} of {option.of}; the vector env's rows are "
        "right in both, as the row after the end holds the last observation",
        thread="Toni-SM/skrl#449",
        script="skrl_time_limits.sh",
    )


def both_ends() -> Cell:
    option = ppo_tally(0.0, both, time_limit_bootstrap=True)
    return ppo_tally(0.0, both).cell(
        "adds a bootstrap value",
        note=f"PPO's default; with time_limit_bootstrap=True {option.wrong} of {option.of}, which add V(next)",
    )


def gae() -> Cell:
    option = ppo_tally(LAMBDA, lambda row: True, time_limit_bootstrap=True)
    return ppo_tally(LAMBDA, lambda row: True).cell(
        "runs on over truncated ends",
        note=f"PPO's default, dead rows left out of the count; with time_limit_bootstrap=True {option.wrong} of "
        f"{option.of}, through rows that both terminate and truncate",
        thread="Toni-SM/skrl#449",
        script="skrl_time_limits.sh",
    )


def dqn(raw: Any) -> Any:
    """Step with DQN, which stores next observations and does not train; return its memory."""
    env = wrapped(raw)
    memory = memory_of(STEPS, env.num_envs)
    network = linear("DeterministicMixin", 2)
    models = {"q_network": network(env), "target_q_network": network(env)}
    cfg = quiet(part("agents.torch.dqn", "DQN_CFG")(learning_starts=10**6, random_timesteps=10**6))
    train(agent_of("DQN", cfg, env, models, memory), env, STEPS)
    return memory


def last_observation() -> Cell:
    tally = Tally()
    for kind in ("single", "NextStep", "SameStep"):
        for raw in envs_of(kind):
            memory = dqn(raw)
            after = memory.get_tensor_by_name("next_observations")
            for rows in stored(memory):
                for at in rows:
                    if at.row is not None and at.row.done:
                        place = f"{kind} {at.row.key}"
                        tally.compare(place, after[at.step, at.env].numpy(), at.row.next_observation)
    return tally.cell(
        "SAME_STEP: the next episode's first observation",
        note="DQN; right with one env and in the mode NEXT_STEP, the default of Gymnasium's vector envs",
        script="skrl_vector_envs.sh",
    )


def dead_rows() -> Cell:
    tally = Tally()
    for kind in ("single", "NextStep"):
        for raw in envs_of(kind):
            for rows in stored(dqn(raw)):
                for at in rows:
                    tally.check(f"{kind} step {at.step}", at.row is not None, "no transition")
    return tally.cell(
        "stores the reset step of NEXT_STEP envs",
        note="DQN and PPO; with one env there are none, nor in the mode SAME_STEP",
        script="skrl_vector_envs.sh",
    )


def episode_statistics() -> Cell:
    """The returns and lengths that agents track for their log."""
    tally = Tally()
    for kind in ("single", "NextStep", "SameStep"):
        for raw in envs_of(kind):
            env = wrapped(raw)
            models = {
                "policy": linear("CategoricalMixin", 2)(env),
                "value": linear("DeterministicMixin", 1, value=True)(env),
            }
            with tempfile.TemporaryDirectory() as folder:
                cfg = ppo_cfg("PPO_CFG")
                cfg.experiment.directory = folder
                cfg.experiment.write_interval = 10 * STEPS
                agent = agent_of("PPO", cfg, env, models, memory_of(STEPS, env.num_envs))
                train(agent, env, STEPS)

            returns = {
                PLAN.episode_return(env, number) for env in range(PLAN.num_envs) for number in range(16)
            }
            length_of = dict(returns)
            seen = zip(agent._track_rewards, agent._track_timesteps, strict=True)
            for gain, length in seen:
                (total,) = np.atleast_1d(gain)
                tally.compare(f"{kind}: length, return {total}", length, [length_of.get(float(total), -1)])
    return tally.cell(
        "NEXT_STEP: lengths are one too long",
        note="returns are right; the row that only resets counts as a step of the next episode",
        script="skrl_vector_envs.sh",
    )


def filled(size: int, steps: int) -> Any:
    """Return a memory of both envs with the rows of so many steps."""
    memory = memory_of(size, PLAN.num_envs)
    memory.create_tensor(name="observations", size=3, dtype=torch.float32)
    for flag in ("terminated", "truncated"):
        memory.create_tensor(name=flag, size=1, dtype=torch.bool)
    for step in PLAN.rows(steps):
        found = columns([step])
        memory.add_samples(
            observations=torch.from_numpy(found["observation"][0]),
            terminated=torch.from_numpy(found["terminated"][0])[:, None],
            truncated=torch.from_numpy(found["truncated"][0])[:, None],
        )
    return memory


NAMES = ["observations", "terminated", "truncated"]


def slices() -> Cell:
    """Sequences of a memory, not full, full, and wrapped; the flags that are sampled with them mark ends."""
    tally = Tally()
    for steps in range(SLICE, 2 * RING + 1):
        memory = filled(RING, steps)
        drawn = memory.sample(NAMES, batch_size=10**4, sequence_length=SLICE)[0]
        frames = drawn[0].view(-1, SLICE, 3).numpy()
        ends = (drawn[1] | drawn[2]).view(-1, SLICE).numpy()
        for sequence, cuts in zip(frames, ends, strict=True):
            tally.check(f"after {steps} steps", not unmarked_joint(sequence, cuts), f"{sequence.tolist()}")
    return tally.cell(
        "joins the newest row with the oldest, unmarked",
        note="in a memory that has wrapped; sequences never join envs, and ends are marked by the sampled flags",
        script="skrl_memory.sh",
    )


def passes() -> Cell:
    """The rows of ``sample_all(mini_batches=)``, which PPO draws its minibatches with."""
    tally = Tally()
    memory = filled(STEPS, STEPS)
    for minibatches in (2, MINIBATCHES):
        batches = memory.sample_all(NAMES, mini_batches=minibatches)
        drawn = [key_of(frame.numpy()) for batch in batches for frame in batch[0]]
        for row in (row for step in PLAN.rows(STEPS) for row in step):
            tally.check(f"{minibatches} minibatches: {row.key}", drawn.count(row.key) == 1)
    return tally.cell(
        "the last rows are left out, every time",
        note=f"48 rows in {MINIBATCHES} minibatches; none where the minibatches divide the rows",
        script="skrl_memory.sh",
    )


def saved_buffer() -> Cell:
    tally = Tally()
    memory = filled(STEPS, STEPS)
    for kind in ("pt", "npz"):
        loaded = filled(STEPS, 0)
        with tempfile.TemporaryDirectory() as folder:
            memory.save(folder, format=kind)
            (file,) = Path(folder).rglob(f"*.{kind}")
            loaded.load(str(file))
        seen = loaded.sample_all(["observations"])[0][0].numpy()
        for number, want in enumerate(memory.sample_all(["observations"])[0][0].numpy()):
            tally.compare(f"{kind}: row {number}", seen[number], want)
    return tally.cell(
        "sampled rows stay NaN after load",
        note="load() sets attributes that neither sample nor get_tensor_by_name reads, and len() stays 0",
        script="skrl_memory.sh",
    )


def normaliser() -> Cell:
    """RunningStandardScaler as PPO's ``observation_preprocessor``, over one window."""
    tally = Tally()
    for kind in ("single", "NextStep"):
        for number, raw in enumerate(envs_of(kind, one_hot=True)):
            env = wrapped(raw)
            scaler = part("resources.preprocessors.torch", "RunningStandardScaler")
            cfg = ppo_cfg("PPO_CFG", observation_preprocessor=scaler)
            cfg.observation_preprocessor_kwargs = {"size": env.observation_space, "device": "cpu"}
            memory = memory_of(STEPS, env.num_envs)
            models = {
                "policy": linear("CategoricalMixin", 2)(env),
                "value": linear("DeterministicMixin", 1)(env),
            }
            agent = agent_of("PPO", cfg, env, models, memory)
            train(agent, env, STEPS)

            found = agent._observation_preprocessor
            counted = (found.running_mean * found.current_count).numpy()
            acted, seen = observations_of(kind, number)
            for key, right in counts_are_right(PLAN, counted, acted, seen):
                tally.check(f"{kind} {key}", right, "not counted once")
    return tally.cell("not counted once")


def observations_of(kind: str, number: int) -> tuple[list[Key], list[Key]]:
    """Return the observations acted on in `STEPS` steps of one way's env, and the last ones of episodes."""
    acted: list[Key] = []
    seen: list[Key] = []
    for env in range(PLAN.num_envs):
        if kind == "single" and env != number:
            continue
        step = 0
        for rows in PLAN.rows(STEPS):
            row = rows[env]
            if step >= STEPS:
                break
            acted.append(row.key)
            step += 1
            if row.done:
                seen.append((row.env, row.episode, row.step + 1))
                step += kind == "NextStep"
    return acted, seen


def summing(kind: str, at_truncations: bool) -> Any:
    """Return the recurrent model of its documentation, whose cell adds the observation to its state.

    In training that model resets its state after terminated rows; ``at_truncations`` adds truncated ones.
    """
    base: Any = part("models.torch", "Model")
    mixed: Any = part("models.torch", kind)

    class Summing(mixed, base):
        def __init__(self, env: Any) -> None:
            spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
            base.__init__(self, device="cpu", **spaces)
            mixed.__init__(self)
            self.num_envs = env.num_envs
            cell: Any = nn.RNN(3, 3, nonlinearity="relu", bias=False, batch_first=True)
            self.net = nn.Linear(3, 2 if kind == "CategoricalMixin" else 1)
            self.acted: list[torch.Tensor] = []
            self.trained: list[torch.Tensor] = []
            with torch.no_grad():
                cell.weight_ih_l0.copy_(torch.eye(3))
                cell.weight_hh_l0.copy_(torch.eye(3))
            self.rnn = cell

        def get_specification(self) -> Any:
            return {"rnn": {"sequence_length": SLICE, "sizes": [(1, self.num_envs, 3)]}}

        def compute(self, inputs: Any, role: str) -> Any:
            frames = inputs["observations"]
            state = inputs["rnn"][0]
            if not self.training:
                out, state = self.rnn(frames[:, None], state)
                self.acted.append(out[:, 0].detach())
                return self.net(out[:, 0]), {"rnn": [state]}

            frames = frames.view(-1, SLICE, 3)
            state = state.view(1, -1, SLICE, 3)[:, :, 0].contiguous()
            ends = inputs["terminated"]
            if at_truncations:
                ends = ends | inputs["truncated"]
            ends = ends.view(-1, SLICE)
            bounds = [0, *(ends[:, :-1].any(0).nonzero()[:, 0] + 1).tolist(), SLICE]
            outs: list[torch.Tensor] = []
            for begin, end in itertools.pairwise(bounds):
                out, state = self.rnn(frames[:, begin:end], state)
                state = state * ~ends[:, end - 1, None]
                outs.append(out)
            joined = torch.cat(outs, 1).flatten(0, 1)
            self.trained.append(joined.detach())
            return self.net(joined), {"rnn": [state]}

    return Summing


def recurrent_tallies(at_truncations: bool) -> tuple[Tally, Tally]:
    """Count the outputs of PPO_RNN's policy: those of acting, and those of training."""
    acting = Tally()
    training = Tally()
    for kind in ("single", "NextStep"):
        for raw in envs_of(kind):
            env = wrapped(raw)
            memory = memory_of(STEPS, env.num_envs)
            policy = summing("CategoricalMixin", at_truncations)(env)
            models = {"policy": policy, "value": summing("DeterministicMixin", at_truncations)(env)}
            train(agent_of("PPO_RNN", ppo_cfg("PPO_CFG"), env, models, memory), env, STEPS)

            # Training reads env after env, in order of steps.
            trained = policy.trained[0].view(env.num_envs, STEPS, 3)
            for rows in stored(memory):
                for at in rows:
                    if at.row is None:
                        continue
                    want = sum_of(at.row)
                    acting.compare(f"{kind} {at.row.key}", policy.acted[at.step][at.env], want)
                    training.compare(f"{kind} {at.row.key}", trained[at.env, at.step], want)
    return acting, training


def hidden_state() -> Cell:
    """PPO_RNN with the documentation's recurrent model; the output of a row is the sum of its episode so far."""
    acting, training = recurrent_tallies(at_truncations=False)
    _, other = recurrent_tallies(at_truncations=True)
    return Cell(
        acting.wrong + training.wrong,
        acting.of + training.of,
        "training starts from states one row late",
        note=f"acting {acting.wrong} of {acting.of}, all of the mode NEXT_STEP, where the row that only resets has "
        f"changed the state; training {training.wrong} of {training.of}, {other.wrong} with a model that resets at "
        "truncated rows too, which the documentation's does not",
        script="skrl_stored_states.sh",
    )


def sum_of(row: Row) -> list[float]:
    """Return the sum of the observations of an episode up to a row."""
    count = row.step + 1
    return [float(row.env * count), float(row.episode * count), row.step * count / 2]


def fixtures() -> dict[str, Callable[[], Cell]]:
    """Return the fixtures that skrl has parts for."""
    return {
        "truncated_end": truncated_end,
        "both_ends": both_ends,
        "last_observation": last_observation,
        "dead_rows": dead_rows,
        "slices": slices,
        "hidden_state": hidden_state,
        "advantages": gae,
        "episode_statistics": episode_statistics,
        "normaliser": normaliser,
        "saved_buffer": saved_buffer,
        "passes": passes,
    }
