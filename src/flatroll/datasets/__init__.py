"""Offline data sets as replay buffers, and trajectories that are kept on disk."""

from flatroll.datasets.base import BaseDatasetExperienceReplay
from flatroll.datasets.convert import convert
from flatroll.datasets.fetch import fetch_url
from flatroll.datasets.formats.atari import read_atari_dqn
from flatroll.datasets.formats.d4rl import read_d4rl
from flatroll.datasets.formats.gen_dgrl import read_gen_dgrl
from flatroll.datasets.formats.openml import read_openml
from flatroll.datasets.formats.robots import read_rlds, read_roboset
from flatroll.datasets.formats.vd4rl import read_vd4rl
from flatroll.datasets.sets.d4rl import D4RLExperienceReplay, VD4RLExperienceReplay
from flatroll.datasets.sets.games import AtariDQNExperienceReplay, GenDGRLExperienceReplay
from flatroll.datasets.sets.minari import MinariExperienceReplay
from flatroll.datasets.sets.openml import OpenMLExperienceReplay
from flatroll.datasets.sets.robots import (
    LeRobotExperienceReplay,
    OpenXExperienceReplay,
    RobosetExperienceReplay,
)
from flatroll.datasets.trajectories.buffer import TrajectoryReplayBuffer
from flatroll.datasets.trajectories.cache import TrajectoryCache

__all__ = [
    "AtariDQNExperienceReplay",
    "BaseDatasetExperienceReplay",
    "D4RLExperienceReplay",
    "GenDGRLExperienceReplay",
    "LeRobotExperienceReplay",
    "MinariExperienceReplay",
    "OpenMLExperienceReplay",
    "OpenXExperienceReplay",
    "RobosetExperienceReplay",
    "TrajectoryCache",
    "TrajectoryReplayBuffer",
    "VD4RLExperienceReplay",
    "convert",
    "fetch_url",
    "read_atari_dqn",
    "read_d4rl",
    "read_gen_dgrl",
    "read_openml",
    "read_rlds",
    "read_roboset",
    "read_vd4rl",
]
