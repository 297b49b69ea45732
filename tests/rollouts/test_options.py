"""The options of the three collectors: one list of names, types and defaults, seen by `help` and by type checkers."""

import inspect
import re
from dataclasses import fields
from typing import Any, get_type_hints

import gymnasium as gym
import pytest
from fake_ray import FakeRay
from tensordict.nn import InteractionType

from flatroll.rollouts import Collector, MultiCollector, RayCollector
from flatroll.rollouts.options import CollectorKeywords, CollectorOptions
from flatroll.rollouts.workers.options import TeamKeywords, TeamOptions

REQUIRED = inspect.Parameter.empty

#: Of all three collectors.
SHARED: dict[str, Any] = {
    "env_device": None,
    "policy_device": None,
    "no_cuda_sync": False,
    "obs_dtype": None,
    "compact_obs": False,
    "track_traj_ids": True,
    "set_truncated": False,
    "max_frames_per_traj": None,
    "reset_at_each_iter": False,
    "split_trajs": False,
    "postproc": None,
    "pre_collect_hook": None,
    "post_collect_hook": None,
    "auto_register_policy_transforms": True,
    "state_stride": 1,
    "info_keys": (),
    "exploration_type": InteractionType.RANDOM,
    "splits": 1,
    "track_policy_version": False,
    "track_envs": False,
}
#: Of the two with workers.
OF_TEAMS: dict[str, Any] = {
    "total_frames": -1,
    "policy_factory": None,
    "cat_results": 0,
    "preemptive_threshold": None,
    "update_at_each_batch": False,
    "num_threads": 1,
    "seed": None,
    "writer": 0,
    "on_failure": "raise",
    "max_failures": 3,
    "step_timeout": None,
    "replay_buffer": None,
    "init_random_frames": None,
    "trajs_per_batch": None,
    "device": None,
    "storing_device": None,
    "progress": False,
}
#: The names that each constructor spells out itself.
OWN: dict[Any, dict[str, Any]] = {
    Collector: {
        "create_env_fn": REQUIRED,
        "policy": None,
        "frames_per_batch": REQUIRED,
        "total_frames": -1,
        "device": None,
        "storing_device": None,
        "trajs_per_batch": None,
        "init_random_frames": 0,
        "replay_buffer": None,
        "seed": None,
        "writer": 0,
        "interruptor": None,
        "progress": False,
        "log": None,
    },
    MultiCollector: {
        "create_env_fn": REQUIRED,
        "policy": None,
        "num_workers": None,
        "sync": True,
        "frames_per_batch": REQUIRED,
        "slots": 2,
        "start_timeout": None,
        "start_method": None,
        "nursery": None,
        "transport": None,
    },
    RayCollector: {
        "create_env_fn": REQUIRED,
        "policy": None,
        "num_collectors": None,
        "sync": False,
        "remote_configs": None,
        "ray_init_config": None,
        "max_in_flight": 2,
        "frames_per_batch": REQUIRED,
        "workers_per_actor": 1,
        "start_timeout": 300.0,
        "calls": None,
    },
}


@pytest.mark.parametrize("collector", OWN, ids=lambda collector: collector.__name__)
def test_a_signature_shows_every_argument_with_its_default(collector: Any) -> None:
    wanted = OWN[collector] | SHARED
    if collector is not Collector:
        wanted |= OF_TEAMS
    parameters = inspect.signature(collector).parameters
    assert {name: one.default for name, one in parameters.items()} == wanted
    assert all(one.annotation is not REQUIRED for one in parameters.values())
    by_place = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert by_place == ["create_env_fn", "policy"]


@pytest.mark.parametrize(
    ("keywords", "options"), [(CollectorKeywords, CollectorOptions), (TeamKeywords, TeamOptions)]
)
def test_type_checkers_see_the_types_of_the_fields(keywords: Any, options: Any) -> None:
    assert get_type_hints(keywords) == get_type_hints(options)


def test_every_option_is_documented() -> None:
    of_all = documented(Collector)
    assert not (OWN[Collector] | SHARED).keys() - of_all
    assert not (OWN[MultiCollector] | OF_TEAMS).keys() - documented(MultiCollector)
    assert not (OWN[RayCollector] | OF_TEAMS).keys() - documented(RayCollector)


def documented(collector: Any) -> set[str]:
    """The names of the entries under ``Args:``."""
    entries = re.findall(r"^    (\w+(?:, \w+)*):", inspect.getdoc(collector) or "", re.M)
    return {name for entry in entries for name in entry.split(", ")}


def test_an_unknown_argument_is_refused_before_an_env_is_made() -> None:
    def make() -> gym.Env[Any, Any]:
        raise AssertionError("an env was made")

    with pytest.raises(
        TypeError, match=r"^Collector\(\) got an unexpected keyword argument 'frame_per_batch'"
    ):
        Collector(make, frames_per_batch=4, frame_per_batch=4)  # type: ignore[call-arg]
    others: list[tuple[Any, dict[str, Any]]] = [(MultiCollector, {}), (RayCollector, {"calls": FakeRay()})]
    for collector, more in others:
        with pytest.raises(TypeError, match=r"^unknown arguments frame_per_batch: of Collector's arguments"):
            collector(make, frames_per_batch=4, frame_per_batch=4, **more)


def test_options_are_fixed() -> None:
    options = CollectorOptions(state_stride=2)
    with pytest.raises(AttributeError):
        options.state_stride = 3  # type: ignore[misc]
    assert {field.name: field.default for field in fields(CollectorOptions)} == SHARED
