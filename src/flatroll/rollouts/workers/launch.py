"""`Launcher`: starts the workers of a collector, and those that replace them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np

from flatroll.rollouts.workers.messages import Signals
from flatroll.sharing.nursery import Nursery, Worker
from flatroll.sharing.weights import SharedWeights


@dataclass(kw_only=True)
class Launcher:
    """All that workers need; called with a place, a writer number and signals, it starts one.

    Attributes:
        work: what runs in the worker.
        functions, factories: env function and policy function of each place.
        policy: what each worker gets a copy of, unless a function makes it there.
        weights, first_version: see `work`.
        seed_sequence: of which each worker takes the next child.
        rows: of the windows of each place.
        trajs: complete trajectories of each worker's batch; None: any rows.
        random_frames: rows with random actions, of all.
        options: further arguments of `work` and of `Collector`.
    """

    work: Callable[..., Any]
    nursery: Nursery
    functions: Sequence[Any]
    factories: Sequence[Any]
    policy: Any
    weights: SharedWeights
    first_version: int
    seed_sequence: np.random.SeedSequence
    rows: Sequence[int]
    trajs: Sequence[int | None]
    random_frames: int
    options: dict[str, Any]
    #: The seed of the last worker at each place.
    seeds: list[int] = field(default_factory=list)
    #: Gives the rows collected so far.
    collected: Callable[[], int] = int

    def __post_init__(self) -> None:
        self.seeds = self.seeds or [0] * len(self.functions)

    def __call__(self, place: int, writer: int, signals: Signals) -> Worker:
        (child,) = self.seed_sequence.spawn(1)
        self.seeds[place] = int(child.generate_state(1)[0] >> 1)
        count, factory = len(self.functions), self.factories[place]
        return self.nursery.start(
            self.work,
            name=f"worker {place}",
            create_env_fn=self.functions[place],
            policy=None if factory is not None else self.policy,
            policy_factory=factory,
            weights=self.weights,
            first_version=self.first_version,
            signals=signals,
            seed=self.seeds[place],
            writer=writer,
            frames_per_batch=self.rows[place],
            trajs_per_batch=self.trajs[place],
            # the share of what is left, rounded up
            init_random_frames=ceil(max(0, self.random_frames - self.collected()) / count),
            **self.options,
        )
