"""`TeamOptions`: the options that collectors with workers take, processes or actors, beside those of all collectors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from flatroll.rollouts.options import CollectorKeywords, CollectorOptions, Device

OnFailure = Literal["raise", "drop", "replace"]
PolicyFactory = Callable[[], Any] | Sequence[Callable[[], Any]] | None


class TeamKeywords(CollectorKeywords, total=False):
    """The fields of `TeamOptions` as keyword arguments; `MultiCollector` documents them."""

    total_frames: int
    policy_factory: PolicyFactory
    cat_results: Literal[0, "stack"]
    preemptive_threshold: float | None
    update_at_each_batch: bool
    num_threads: int
    seed: int | None
    writer: int
    on_failure: OnFailure
    max_failures: int
    step_timeout: float | None
    replay_buffer: Any
    init_random_frames: int | None
    trajs_per_batch: int | None
    device: Device
    storing_device: Device
    progress: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class TeamOptions(CollectorOptions):
    """How several workers collect together; `MultiCollector` documents the fields."""

    total_frames: int = -1
    policy_factory: PolicyFactory = None
    cat_results: Literal[0, "stack"] = 0
    preemptive_threshold: float | None = None
    update_at_each_batch: bool = False
    num_threads: int = 1
    seed: int | None = None
    writer: int = 0
    on_failure: OnFailure = "raise"
    max_failures: int = 3
    step_timeout: float | None = None
    replay_buffer: Any = None
    init_random_frames: int | None = None
    trajs_per_batch: int | None = None
    device: Device = None
    storing_device: Device = None
    progress: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a collector with workers does: its options, and what it decides itself."""

    workers: int
    frames_per_batch: int
    sync: bool
    slots: int
    start_timeout: float | None
    options: TeamOptions


#: Options that each worker's `Collector` takes.
FOR_WORKERS = frozenset(field.name for field in fields(CollectorOptions))
