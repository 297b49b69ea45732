"""How Ray is started or joined; the module ``ray`` is replaced."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from flatroll.sharing import WorkerDied
from flatroll.sharing.on_ray.calls import RayCalls

NONE = "Could not find any running Ray instance. Please specify the one to connect to"
SILENT = "Failed to connect to 10.0.0.1:6379"


class Ray(ModuleType):
    """Hears how it is started; ``init`` raises what it is told to where a cluster is to be joined."""

    def __init__(self, running=False, joining=None):
        super().__init__("ray")
        self.running, self.joining, self.inits, self.shutdowns = running, joining, [], 0
        self.exceptions = ModuleType("ray.exceptions")
        self.constants = SimpleNamespace(ENABLE_RAY_CLUSTER=True)
        self._private = SimpleNamespace(ray_constants=self.constants)

    def is_initialized(self):
        return self.running

    def init(self, **options):
        self.inits.append(options | {"loopback": not self.constants.ENABLE_RAY_CLUSTER})
        if options["address"] != "local" and self.joining:
            raise ConnectionError(self.joining)

    def shutdown(self):
        self.shutdowns += 1


@pytest.fixture
def ray(monkeypatch):
    def install(**options):
        made = Ray(**options)
        monkeypatch.setitem(sys.modules, "ray", made)
        monkeypatch.setitem(sys.modules, "ray.exceptions", made.exceptions)
        monkeypatch.setitem(sys.modules, "ray._private", made._private)
        return made

    return install


def test_a_local_cluster_is_bounded_and_for_this_machine_only(ray):
    fake = ray(joining=NONE)
    calls = RayCalls({"log_to_driver": False}, cpus=1000.5)
    joined, started = fake.inits
    assert joined["address"] == "auto"
    assert {
        name: started[name] for name in ("address", "include_dashboard", "num_cpus", "log_to_driver")
    } == {
        "address": "local",
        "include_dashboard": False,
        "num_cpus": 1001,
        "log_to_driver": False,
    }
    assert 0 < started["object_store_memory"] <= 2**30
    assert started["loopback"] and fake.constants.ENABLE_RAY_CLUSTER
    calls.close()
    calls.close()
    assert fake.shutdowns == 1


def test_what_the_caller_says_is_taken(ray):
    fake = ray(joining=NONE)
    RayCalls({"object_store_memory": 5, "include_dashboard": True, "num_cpus": 2})
    assert {fake.inits[1][name] for name in ("object_store_memory", "include_dashboard", "num_cpus")} == {
        5,
        True,
        2,
    }
    fake = ray(joining=NONE)
    RayCalls({"address": "local"})
    assert len(fake.inits) == 1


def test_a_cluster_that_is_there_is_joined_and_outlives_the_calls(ray):
    fake = ray()
    calls = RayCalls({"num_cpus": 2, "object_store_memory": 5, "namespace": "mine"})
    assert fake.inits[0]["address"] == "auto" and fake.inits[0]["namespace"] == "mine"
    assert not {"num_cpus", "object_store_memory"} & set(fake.inits[0])
    running = ray(running=True)
    RayCalls().close()
    calls.close()
    assert (running.inits, running.shutdowns, fake.shutdowns) == ([], 0, 0)


@pytest.mark.parametrize(
    ("config", "text"), [({"address": "auto"}, NONE), ({"address": "10.0.0.1:6379"}, SILENT), ({}, SILENT)]
)
def test_a_cluster_that_is_named_and_does_not_answer_is_an_error(ray, config, text):
    fake = ray(joining=text)
    with pytest.raises(ConnectionError):
        RayCalls(config)
    assert len(fake.inits) == 1


DEATHS = [
    "ActorDiedError", "ActorUnschedulableError", "LocalRayletDiedError", "NodeDiedError", "ObjectLostError",
    "OutOfDiskError", "OutOfMemoryError", "RaySystemError", "WorkerCrashedError",
]  # fmt: skip


@pytest.mark.parametrize("name", DEATHS)
def test_what_ray_says_of_deaths_is_a_death(ray, name):
    fake = ray(running=True)
    base = type("RayError", (Exception,), {})
    for known in (*DEATHS, "RayTaskError"):
        setattr(fake.exceptions, known, type(known, (base,), {}))
    fake.exceptions.RayActorError = fake.exceptions.ActorDiedError

    def get(reference):
        raise getattr(fake.exceptions, name)("the node is gone")

    fake.get = get
    with pytest.raises(WorkerDied, match="the actor is gone: the node is gone"):
        RayCalls().get(None)
