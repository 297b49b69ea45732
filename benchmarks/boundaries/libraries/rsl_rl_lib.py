"""rsl_rl's row: its runner and PPO over a scripted ``VecEnv``, whose envs reset in the step that ends them.

As its documentation says of ``extras["time_outs"]``, these are the ends by a time limit that are no terminal state.
"""

import contextlib
import importlib
import io
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.boundaries.cells import Cell, Tally
from benchmarks.boundaries.fixtures import (
    GAMMA,
    LAMBDA,
    PLAN,
    STEPS,
    VALUE_BIAS,
    VALUE_WEIGHTS,
    Key,
    Row,
    advantages,
    columns,
    counts_are_right,
    episodes_of,
    key_of,
    one_hot_number,
    one_hot_size,
)

PACKAGE = "rsl-rl-lib"
HIDDEN = 8
MINIBATCHES = 5  # do not divide the 48 rows of a window


def part(module: str, name: str) -> Any:
    """Import an object of the library by name."""
    return getattr(importlib.import_module(f"rsl_rl.{module}".rstrip(".")), name)


def vec_env(one_hot: bool = False) -> Any:
    """Return the plan as a ``VecEnv``."""
    base: Any = part("env", "VecEnv")
    tensordict: Any = importlib.import_module("tensordict").TensorDict

    class Scripted(base):
        num_envs = PLAN.num_envs
        num_actions = 1
        max_episode_length = 8
        device = "cpu"

        def __init__(self) -> None:
            self.cfg: dict[str, Any] = {}
            self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long)
            self.rows = PLAN.rows(STEPS + 1)
            self.now = 0

        def get_observations(self) -> Any:
            frames = torch.from_numpy(columns([self.rows[self.now]])["observation"][0])
            if one_hot:
                numbers = [one_hot_number(PLAN, row.key) for row in self.rows[self.now]]
                frames = torch.eye(one_hot_size(PLAN))[numbers]
            return tensordict({"policy": frames}, batch_size=[self.num_envs])

        def step(self, actions: Any) -> Any:
            found = columns([self.rows[self.now]])
            self.now += 1
            rewards = torch.from_numpy(found["reward"][0])
            dones = torch.from_numpy(found["done"][0])
            time_outs = torch.from_numpy(found["truncated"][0] & ~found["terminated"][0])
            return self.get_observations(), rewards, dones, {"time_outs": time_outs}

    return Scripted()


def learnt(
    critic: Callable[[Any], None] | None = None,
    models: dict[str, Any] | None = None,
    one_hot: bool = False,
    log_dir: str | None = None,
    **settings: Any,
) -> Any:
    """Learn for one iteration of `STEPS` steps; return the runner. ``critic`` sets the weights before."""
    model = {"class_name": "MLPModel", "hidden_dims": [1], "activation": "relu", **(models or {})}
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0}
    algorithm = {"class_name": "PPO", "num_learning_epochs": 1, "num_mini_batches": 1, "gamma": GAMMA}
    cfg = {
        "num_steps_per_env": STEPS,
        "save_interval": 10**6,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "algorithm": {**algorithm, "lam": LAMBDA, "schedule": "fixed", "learning_rate": 0.0, **settings},
        "actor": {**model, "distribution_cfg": gaussian},
        "critic": dict(model),
    }
    with contextlib.redirect_stdout(io.StringIO()):
        runner = part("runners", "OnPolicyRunner")(vec_env(one_hot), cfg, log_dir=log_dir, device="cpu")
        if critic is not None:
            critic(runner.alg.critic)
        runner.learn(1)
    return runner


def value_function(critic: Any) -> None:
    """Set the weights of a critic of one hidden unit to the fixtures' value function, which is positive."""
    first, _, last = critic.mlp
    with torch.no_grad():
        first.weight.copy_(torch.tensor([VALUE_WEIGHTS]))
        first.bias.fill_(VALUE_BIAS)
        last.weight.fill_(1.0)
        last.bias.zero_()


def compare_advantages(lmbda: float, wanted: Callable[[Row], bool]) -> Tally:
    """Count the advantages (unscaled: returns minus values) of the wanted rows."""
    tally = Tally()
    storage = learnt(value_function, lam=lmbda).alg.storage
    gains = storage.returns - storage.values
    rows = PLAN.rows(STEPS)
    right = advantages(rows, lmbda=lmbda)
    for step, both_rows in enumerate(rows):
        for row in both_rows:
            if wanted(row):
                tally.compare(row.key, float(gains[step, row.env]), right[step, row.env])
    return tally


def truncated_end() -> Cell:
    """Returns with lambda 0, which are one-step targets."""
    return compare_advantages(0.0, lambda row: row.truncated and not row.terminated).cell(
        "adds V of the observation before the step",
        note="a VecEnv has no place for the last observation; its author calls this the next best approximation",
        thread="leggedrobotics/rsl_rl#151",
        script="rsl_rl_time_outs.sh",
    )


def both_ends() -> Cell:
    return compare_advantages(0.0, lambda row: row.truncated and row.terminated).cell(
        "adds a bootstrap value",
        note="time_outs is False there, as the documentation defines it",
    )


def gae() -> Cell:
    return compare_advantages(LAMBDA, lambda row: True).cell(
        "truncated rows add V of their own observation",
        note="no advantage crosses an end; the rows before a truncated end inherit its error",
        thread="leggedrobotics/rsl_rl#151",
        script="rsl_rl_time_outs.sh",
    )


def hidden_state() -> Cell:
    """GRU and LSTM: acting, and training over its padded trajectories, against the same cell over each episode."""
    tally = Tally()
    for kind in ("gru", "lstm"):
        seen: dict[bool, list[torch.Tensor]] = {False: [], True: []}

        def record(module: Any, inputs: Any, output: Any, seen: Any = seen) -> None:
            training = len(inputs) > 1 and inputs[1] is not None
            seen[training].append(output.detach().clone())

        def watch(critic: Any, record: Any = record) -> None:
            critic.rnn.register_forward_hook(record)

        model = {"class_name": "RNNModel", "rnn_type": kind, "rnn_hidden_dim": HIDDEN}
        alg = learnt(watch, model, learning_rate=0.0).alg
        acted = torch.cat(seen[False][:STEPS])
        (trained,) = seen[True]
        right = outputs_by_episode(alg.critic.rnn.rnn)
        for step, rows in enumerate(PLAN.rows(STEPS)):
            for row in rows:
                want = right[row.key]
                near = torch.allclose(acted[step, row.env], want, atol=1e-5)
                tally.check(f"{kind} acting {row.key}", near)
                near = torch.allclose(trained.view(STEPS, -1, HIDDEN)[step, row.env], want, atol=1e-5)
                tally.check(f"{kind} training {row.key}", near)
    return tally.cell("other output than from a fresh state")


def outputs_by_episode(cell: nn.Module) -> dict[Key, torch.Tensor]:
    """Return the outputs of a recurrent cell that runs over each episode from zero."""
    found: dict[Key, torch.Tensor] = {}
    rows = [row for step in PLAN.rows(STEPS) for row in step]
    for episode in episodes_of(rows):
        frames = torch.tensor([row.key for row in episode], dtype=torch.float32)
        with torch.no_grad():
            outputs, _ = cell(frames[:, None])
        found.update(zip((row.key for row in episode), outputs[:, 0], strict=True))
    return found


def normaliser() -> Cell:
    """``obs_normalization`` of the critic, after one iteration."""
    runner = learnt(models={"obs_normalization": True}, one_hot=True)
    found = runner.alg.critic.obs_normalizer
    counted = found.mean * found.count
    rows = [row for step in PLAN.rows(STEPS) for row in step]
    last = [(row.env, row.episode, row.step + 1) for row in rows if row.done]
    tally = Tally()
    for key, right in counts_are_right(PLAN, counted.numpy(), [row.key for row in rows], last):
        tally.check(key, right, "not counted once")
    return tally.cell("not counted once")


def passes() -> Cell:
    """The rows of the storage's ``mini_batch_generator``, one epoch."""
    tally = Tally()
    storage = learnt(value_function).alg.storage
    for minibatches in (2, MINIBATCHES):
        batches = storage.mini_batch_generator(minibatches, 1)
        drawn = [key_of(frame.numpy()) for batch in batches for frame in batch.observations["policy"]]
        for row in (row for step in PLAN.rows(STEPS) for row in step):
            tally.check(f"{minibatches} minibatches: {row.key}", drawn.count(row.key) == 1)
    return tally.cell(
        "the last rows are left out, every time",
        note=f"48 rows in {MINIBATCHES} minibatches; none where the minibatches divide the rows",
        script="rsl_rl_time_outs.sh",
    )


def episode_statistics() -> Cell:
    """The returns and lengths that the runner's logger keeps."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        logger = learnt(value_function, log_dir=folder).logger
    ended = [row for step in PLAN.rows(STEPS) for row in step if row.done]
    seen = zip(logger.rewbuffer, logger.lenbuffer, strict=True)
    for row, found in zip(ended, seen, strict=True):
        tally.compare(row.key, found, PLAN.episode_return(row.env, row.episode))
    return tally.cell("another return or length")


def fixtures() -> dict[str, Callable[[], Cell]]:
    """Return the fixtures that rsl_rl has parts for."""
    return {
        "truncated_end": truncated_end,
        "both_ends": both_ends,
        "hidden_state": hidden_state,
        "advantages": gae,
        "episode_statistics": episode_statistics,
        "normaliser": normaliser,
        "passes": passes,
    }
