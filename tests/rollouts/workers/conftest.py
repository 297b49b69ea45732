"""One prepared process starts the workers of all tests of this folder, many of which run over both transports."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from process_ray import ProcessRay

from flatroll.rollouts import RayCollector
from flatroll.sharing import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery(preload=("flatroll.rollouts", "worker_envs")) as made:
        yield made


def over_actors(
    create_env_fn: Any, policy: Any = None, *, nursery: Nursery, **arguments: Any
) -> RayCollector:
    """A `RayCollector` with the arguments of a `MultiCollector`; its actors are processes of the nursery."""
    for name, other in (("num_workers", "num_collectors"), ("slots", "max_in_flight")):
        if name in arguments:
            arguments[other] = arguments.pop(name)
    return RayCollector(create_env_fn, policy, calls=ProcessRay(nursery), **{"sync": True, **arguments})


@pytest.fixture(params=["processes", "actors"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets the collectors of a test's file be over processes or over actors."""
    if request.param == "actors":
        kinds = {
            "MultiCollector": over_actors,
            "MultiSyncCollector": partial(over_actors, sync=True),
            "MultiAsyncCollector": partial(over_actors, sync=False),
        }
        for name in kinds.keys() & vars(request.module).keys():
            monkeypatch.setattr(request.module, name, kinds[name])
    return request.param
