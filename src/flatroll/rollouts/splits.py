"""Steps envs in several parts in turn: while the policy acts for one part, the others step."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.layout.keys import require
from flatroll.rollouts.env_facts import EnvFacts, check_overlaps
from flatroll.rollouts.policies import Columns, Policy, refuse_memory
from flatroll.rollouts.pool_runner import PoolRunner, make_runner
from flatroll.rollouts.random_actions import RandomActions
from flatroll.rollouts.runner import Runner, RunnerOptions
from flatroll.rollouts.window import Window
from flatroll.wrappers.arrays import Array, map_tree
from flatroll.wrappers.markers import TrajId, find_wrapper
from flatroll.wrappers.stream import Moves


class SplitRunner:
    """Holds one `Runner` per part of a pool, and offers the interface of a single runner over the whole pool.

    Each vector step visits the parts: wait for the part's pending step, choose its next actions, begin its next step.
    Reading the window waits for all parts first, so nothing is pending between batches.
    """

    def __init__(
        self,
        facts: Sequence[EnvFacts],  # of the parts
        moves: Moves | None,  # of the env that was split
        policy: Policy | None,
        steps: int,
        options: RunnerOptions,
    ) -> None:
        for part_facts in facts:
            check_overlaps(part_facts)
        _check_alike(facts)
        refuse_memory(policy, "with splits=", "leave splits out")

        sizes = [part_facts.num_envs for part_facts in facts]
        #: Index in the pool of each part's first env.
        self._firsts = np.cumsum([0, *sizes])[:-1].tolist()
        self.num_envs = sum(sizes)
        self.envs = [part_facts.env for part_facts in facts]
        self.env = tuple(self.envs)
        self.device = facts[0].device
        self.keys = facts[0].keys

        # Counts moves of the env that was split, so that other collectors over it notice them.
        self._moves = moves
        if moves is None:
            self._at = 0
        else:
            self._at = moves.count

        for env, first in zip(self.envs, self._firsts, strict=True):
            ids = find_wrapper(env, TrajId)
            if ids is not None:
                ids.number_in(first, self.num_envs)

        of_parts = replace(options, seed=0, sends=True)
        self._parts = [Runner(part_facts, policy, steps, of_parts) for part_facts in facts]
        self.random = RandomActions(self._parts[0].random.space, self.num_envs, self.device, options.seed)

        # Actions already drawn for parts that have not had their turn.
        self._drawn: list[list[Any]] = [[] for _ in facts]

        for i, part in enumerate(self._parts):
            part.window.first_env = self._firsts[i]
            part.random = self.random
            part.draw = partial(self._draw, i)
            part.action_range = self._parts[0].action_range  # which warns once
        self.window = JointWindow(self._parts)

    @property
    def started(self) -> bool:
        """Whether the env has been reset."""
        return all(part.started for part in self._parts)

    def reset(self, seed: int | None = None) -> None:
        """Reset all parts, env ``e`` of the pool with ``seed + e``."""
        for part, first in zip(self._parts, self._firsts, strict=True):
            part.settle()
            if seed is None:
                part_seed = None
            else:
                part_seed = seed + first
            part.reset(part_seed)

    def forget(self) -> None:
        """Discard the recorded transitions; the next step needs a reset first."""
        for part, drawn in zip(self._parts, self._drawn, strict=True):
            part.forget()
            drawn.clear()

    def step(self, random: bool = False) -> None:
        """Begin a vector step of each part, in turn."""
        if self._moves is not None:
            if self._moves.count != self._at:
                for part in self._parts:
                    part.stream.moves.count += 1  # the part resets its envs
            self._moves.count = self._at = self._moves.count + 1

        for part in self._parts:
            part.settle()
            part.step(random)

    def lay_out(self, mask: Array, compact: bool) -> tuple[TensorDict, TensorDict | None]:
        """Build a flat batch of the transitions where bool ``mask`` ``[steps, E]`` is True, env after env."""
        batches = []
        finals = []
        rows = 0
        for part, first in zip(self._parts, self._firsts, strict=True):
            batch, final = part.lay_out(mask[:, first : first + part.num_envs], compact)
            if not len(batch):
                continue

            if not self.keys.has_ids:
                require(batch, self.keys.init)[0] = True  # separates it from the rows of the previous part
            if final is not None:
                final.set("row", final.get("row") + rows)
                finals.append(final)

            batches.append(batch)
            rows += len(batch)

        if compact:
            final = _concatenate(finals)
        else:
            final = None
        return _concatenate(batches), final

    def open_ids(self) -> Tensor:
        """Return the ids of trajectories that continue or have transitions not yet in a batch."""
        return torch.cat([part.open_ids() for part in self._parts])

    def prime(self, states: Columns) -> None:
        """Also carry these recurrent states, see `Runner.prime`."""
        for part in self._parts:
            part.prime(states)

    def snapshot_problem(self) -> str | None:
        """Return why the episodes cannot be saved: the parts of a pool step in other processes or threads."""
        return "splits= steps the envs in parts"

    def get_snapshot(self) -> dict[str, Any] | None:
        """Return None, see `snapshot_problem`."""
        return None

    def set_snapshot(self, snapshot: dict[str, Any]) -> None:
        """Refuse: the episodes of parts cannot be set."""
        raise ValueError(f"the episodes cannot be set: {self.snapshot_problem()}")

    def set_version(self, version: int) -> None:
        """Set the version of the policy in the steps that follow."""
        for part in self._parts:
            part.set_version(version)

    def _draw(self, i: int) -> Any:
        """Return the next random actions of part ``i``, drawn for the whole pool at once, as without splits."""
        if not self._drawn[i]:
            actions = self.random()
            for part, first, drawn in zip(self._parts, self._firsts, self._drawn, strict=True):
                drawn.append(map_tree(lambda leaf, a=first, n=part.num_envs: leaf[a : a + n], actions))
        return self._drawn[i].pop(0)


def make_collector_runner(
    facts: Sequence[EnvFacts],  # of the env, or of its parts
    moves: Moves | None,  # of an env that was split
    policy: Policy | None,
    rows: int,  # capacity, rounded up to vector steps
    options: RunnerOptions,
) -> Runner | PoolRunner | SplitRunner:
    """Make the runner of an env, or of the parts of a pool."""
    num_envs = sum(part.num_envs for part in facts)
    steps = -(-rows // num_envs)
    if len(facts) == 1:
        return make_runner(facts[0], policy, steps, options)
    return SplitRunner(facts, moves, policy, steps, options)


class JointWindow(Window):
    """The windows of the parts side by side: bool ``[steps, E]`` of the whole pool."""

    def __init__(self, parts: Sequence[Runner]) -> None:
        self._parts = parts
        self.num_envs = sum(part.num_envs for part in parts)
        self.same_step = False  # matters only to a single window
        self.steps = self.before = 0

    def count(self) -> int:
        """Wait for pending steps; count the transitions not yet in a batch."""
        for part in self._parts:
            part.settle()
        self.steps = self._parts[0].window.steps
        return sum(part.window.count() for part in self._parts)

    def valid(self) -> Array:
        """Return which recorded cells are transitions not yet in a batch."""
        return np.concatenate([part.window.valid() for part in self._parts], 1)

    @property
    def env_steps(self) -> int:
        return max(part.window.env_steps for part in self._parts)

    def skip_env_steps(self, steps: int) -> None:
        for part in self._parts:
            part.window.skip_env_steps(steps)

    def restart(self, surplus_from: int, keep: bool = False) -> None:
        """Keep the last step's cells from env ``surplus_from`` on, in windows of the same number of steps."""
        keep = surplus_from < self.num_envs
        for part in self._parts:
            part.window.restart(min(max(surplus_from, 0), part.num_envs), keep)
            surplus_from -= part.num_envs


def _check_alike(parts: Sequence[EnvFacts]) -> None:
    """Raise ValueError if the parts cannot form one batch, or would produce the same rows."""
    if len({id(part.stream.moves) for part in parts}) < len(parts):
        raise ValueError("the parts of splits= must be different envs, got one of them twice")

    for name, facts in (
        ("observation space", [part.env.single_observation_space for part in parts]),
        ("action space", [part.env.single_action_space for part in parts]),
        ("autoreset mode", [(part.stream.same_step, part.stream.hides_final_obs) for part in parts]),
        ("wrappers", [(part.keys.roots, part.keys.nexts, part.asks_compact) for part in parts]),
        ("device", [part.device for part in parts]),
    ):
        if any(fact != facts[0] for fact in facts):
            raise ValueError(f"the parts of splits= must have the same {name}, got {facts}")

    _check_pool_seeds(parts)


def _check_pool_seeds(parts: Sequence[EnvFacts]) -> None:
    """Raise ValueError if envs of two envpools have the same seed."""
    seeds: list[int] = []  # seeds of all envs of envpools
    for part in parts:
        config = getattr(part.stream.source.env, "config", None)
        if isinstance(config, dict) and {"seed", "env_seed", "num_envs"} <= set(config):
            seeds += config["env_seed"] or range(config["seed"], config["seed"] + config["num_envs"])

    if len(set(seeds)) < len(seeds):
        raise ValueError(
            "two envpools of splits= have envs with the same seed, which would produce the same rows: env i of a "
            "pool has "
            "the pool's seed + i (42 + i by default). Give each pool its own seed: seed=0 and, after 4 envs, seed=4"
        )


def _concatenate(batches: list[TensorDict]) -> TensorDict:
    result: Any = TensorDict.cat(batches)
    return result
