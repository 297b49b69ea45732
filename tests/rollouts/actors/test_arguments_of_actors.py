"""Wrong arguments are refused before anything is collected; what is right closes as it should."""

import sys
import threading
from functools import partial

import pytest
import torch
from fake_ray import FakeRay
from list_collector import always_four, make

from flatroll.buffers import LazyTensorStorage, RayReplayBuffer
from flatroll.rollouts import RayCollector

make_env = partial(make, "SameStep")

WRONG = [
    ({"create_env_fn": make_env()}, TypeError, "create_env_fn must be a function that makes an env"),
    ({"create_env_fn": []}, ValueError, "a function or a list of functions, got an empty list"),
    ({"num_collectors": 0}, ValueError, "num_collectors must be"),
    (
        {"create_env_fn": [make_env], "num_collectors": 2},
        ValueError,
        "num_collectors must be the number of functions, 1, got 2",
    ),
    (
        {"num_collectors": 3, "sync": True, "frames_per_batch": 2},
        ValueError,
        "frames_per_batch=2 is less than",
    ),
    (
        {"num_collectors": 3, "sync": True, "trajs_per_batch": 2},
        ValueError,
        "trajs_per_batch=2 is less than",
    ),
    ({"frames_per_batch": 0}, ValueError, "frames_per_batch must be at least 1, got 0"),
    ({"total_frames": 0}, ValueError, "total_frames must be positive, or -1 for no limit, got 0"),
    ({"max_in_flight": 0}, ValueError, "max_in_flight must be an integer of at least 1, got 0"),
    ({"on_failure": "ignore"}, ValueError, "on_failure must be .*, got 'ignore'"),
    ({"max_failures": -1}, ValueError, "max_failures must be an integer of at least 0, got -1"),
    ({"workers_per_actor": 0}, ValueError, "workers_per_actor must be an integer of at least 1, got 0"),
    ({"seed": -1}, ValueError, "seed must be an integer of at least 0, or None, got -1"),
    ({"writer": 2**23}, ValueError, r"writer must be in \[0, 2\*\*23\), got 8388608"),
    ({"compact_observations": True}, TypeError, "compact_observations"),
    (
        {"split_trajs": True},
        ValueError,
        "split_trajs=True is not supported, because actors deliver flat batches",
    ),
    ({"policy_factory": lambda: None}, ValueError, "pass a policy or a policy_factory, not both"),
    (
        {"on_failure": "drop", "workers_per_actor": 2},
        ValueError,
        "needs workers_per_actor=1, got 2: an actor cannot take over",
    ),
    ({"interruptor": threading.Event()}, TypeError, "interruptor works only in the process that collects"),
    ({"remote_configs": [{}, {}]}, ValueError, "remote_configs has 2 entries for 1 collectors"),
    (
        {"remote_configs": {"max_restarts": 3}},
        ValueError,
        "must leave max_restarts and max_task_retries at 0",
    ),
    (
        {"post_collect_hook": threading.Lock().acquire},
        TypeError,
        "^post_collect_hook cannot be sent to an actor",
    ),
    (
        {"trajs_per_batch": 2, "track_traj_ids": False},
        ValueError,
        "trajs_per_batch needs track_traj_ids=True",
    ),
    ({"calls": FakeRay(store=100)}, MemoryError, "1 collectors x max_in_flight=2 windows of .* bytes"),
]


@pytest.mark.parametrize(("wrong", "error", "text"), WRONG, ids=[" ".join(wrong) for wrong, _, _ in WRONG])
def test_wrong_arguments_are_refused(wrong, error, text):
    fake = FakeRay()
    given = {"create_env_fn": make_env, "policy": always_four, "frames_per_batch": 6, "calls": fake, **wrong}
    with pytest.raises(error, match=text):
        RayCollector(**given)
    assert all(actor.dead for actor in given["calls"].actors)


def test_a_window_that_is_larger_than_its_spec_says_is_measured_when_it_comes():
    store = 2 * 6 * 200
    actors = RayCollector(make_env, always_four, frames_per_batch=6, postproc=widened, calls=FakeRay(store))
    with pytest.raises(
        MemoryError, match=r"object store, which has 2,400: use a smaller frames_per_batch, .*store"
    ):
        next(actors)


def widened(batch):
    batch["wide"] = torch.zeros(len(batch), 100)
    return batch


def test_weights_that_change_their_shape_are_refused_and_nothing_is_sent():
    policy = torch.nn.Linear(3, 5)
    fake = FakeRay()
    with RayCollector(make_env, policy, frames_per_batch=6, calls=fake) as actors:
        puts = fake.puts
        policy.weight = torch.nn.Parameter(torch.zeros(4, 3))
        with pytest.raises(ValueError, match=r"'weight' was .*shape=\(5, 3\)\), got .*shape=\(4, 3\)"):
            actors.update_policy_weights_()
        assert (fake.puts, actors.policy_version) == (puts, 0)


def test_a_function_as_policy_has_no_weights():
    with RayCollector(make_env, always_four, frames_per_batch=6, calls=FakeRay()) as actors:
        actors.update_policy_weights_()
        assert actors.policy_version == 1
        with pytest.raises(TypeError, match=r"is not an nn\.Module: it has no weights to update"):
            actors.update_policy_weights_({})
    randomly = RayCollector(make_env, frames_per_batch=6, calls=FakeRay())
    with pytest.raises(TypeError, match="NoneType"):
        randomly.update_policy_weights_({})


def test_weights_that_an_update_would_not_reach():
    net = torch.nn.Linear(3, 5)
    with RayCollector(
        make_env, lambda observation: net(observation), frames_per_batch=6, calls=FakeRay()
    ) as actors:
        with pytest.raises(TypeError, match=r"uses the module 'net' \(Linear\) but is not an nn\.Module"):
            actors.update_policy_weights_()
        assert actors.policy_version == 0


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for make_one in (
        partial(RayCollector, make_env, always_four, frames_per_batch=6),
        partial(RayReplayBuffer, storage=partial(LazyTensorStorage, 10)),
    ):
        with pytest.raises(ImportError, match=r"need Ray \(.*\): pip install 'flatroll\[ray\]'"):
            make_one()


def test_shutdown_ends_actors_and_what_was_started_once():
    fake = FakeRay()
    closed = []
    with RayCollector(make_env, always_four, num_collectors=2, frames_per_batch=6, calls=fake) as actors:
        next(actors)
        for actor in fake.actors:
            actor.instance._collector.shutdown = lambda: closed.append(1)
    assert closed == [1, 1]  # envs were closed before
    actors.shutdown()
    assert fake.closed == 1 and all(actor.dead for actor in fake.actors)
    assert "closed" in repr(actors)
    for call in (actors.__iter__, actors.update_policy_weights_, actors.__next__):
        with pytest.raises(RuntimeError, match="the collector is closed"):
            list(call() or ())


def test_actors_are_made_with_what_was_asked_for():
    fake = FakeRay()
    configs = [{"num_cpus": 2}, {"resources": {"robot": 1}, "max_restarts": 0}]
    RayCollector([make_env] * 2, always_four, frames_per_batch=6, remote_configs=configs, calls=fake)
    assert [actor.options for actor in fake.actors] == [
        {"num_cpus": 2},
        {"num_cpus": 1, "resources": {"robot": 1}},
    ]
