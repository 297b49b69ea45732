"""Divides what a collector with workers is to do into the jobs of its workers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flatroll.rollouts.workers.gather import shares
from flatroll.rollouts.workers.options import Plan
from flatroll.rollouts.workers.transport import Job


def make_jobs(
    plan: Plan,
    functions: Sequence[Callable[[], Any]],  # makes the env, for each worker
    factories: Sequence[Callable[[], Any] | None],  # makes the policy, for each worker
    policy: Any,
    for_workers: Mapping[str, Any],  # given options of each worker's `Collector`
) -> list[Job]:
    """Return the job of each worker; with ``sync`` each collects a share of a batch."""
    count = plan.workers
    options = plan.options
    rows: Sequence[int] = [plan.frames_per_batch] * count
    trajectories: Sequence[int | None] = [options.trajs_per_batch] * count
    if plan.sync:
        rows = shares(plan.frames_per_batch, count)
        if options.trajs_per_batch is not None:
            trajectories = shares(options.trajs_per_batch, count)

    shared = {"policy_device": options.device, **for_workers}  # one object, which a transport sends once
    jobs = []
    for place in range(count):
        factory = factories[place]
        own_policy = policy
        if factory is not None:
            own_policy = None
        jobs.append(
            Job(
                place=place,
                create_env_fn=functions[place],
                policy=own_policy,
                policy_factory=factory,
                frames_per_batch=rows[place],
                trajs_per_batch=trajectories[place],
                sync=plan.sync,
                slots=plan.slots,
                timed=options.step_timeout is not None,
                options=shared,
            )
        )
    return jobs
