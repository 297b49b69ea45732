"""Offline data sets as replay buffers, and trajectories on disk."""

from flatroll.datasets.experience_replay import BaseDatasetExperienceReplay
from flatroll.datasets.fetch import fetch_url
from flatroll.datasets.folders import convert
from flatroll.datasets.formats.atari import AtariDQNExperienceReplay, read_atari_dqn
from flatroll.datasets.formats.d4rl import D4RLExperienceReplay, read_d4rl
from flatroll.datasets.formats.gen_dgrl import GenDGRLExperienceReplay, read_gen_dgrl
from flatroll.datasets.formats.lerobot import LeRobotExperienceReplay
from flatroll.datasets.formats.minari import MinariExperienceReplay
from flatroll.datasets.formats.openml import OpenMLExperienceReplay, read_openml
from flatroll.datasets.formats.openx import OpenXExperienceReplay, read_rlds
from flatroll.datasets.formats.roboset import RobosetExperienceReplay, read_roboset
from flatroll.datasets.formats.vd4rl import VD4RLExperienceReplay, read_vd4rl
from flatroll.datasets.replay_log.log import ReplayLog
from flatroll.datasets.replay_log.recorder import open_recorder
from flatroll.datasets.replay_log.replay import ReplayMismatchError
from flatroll.datasets.replay_log.storage import ReplayLogStorage
from flatroll.datasets.trajectories.buffer import TrajectoryCache, TrajectoryReplayBuffer
from flatroll.rollouts.row_log import register_log

register_log(open_recorder)

__all__ = [
    "AtariDQNExperienceReplay",
    "BaseDatasetExperienceReplay",
    "D4RLExperienceReplay",
    "GenDGRLExperienceReplay",
    "LeRobotExperienceReplay",
    "MinariExperienceReplay",
    "OpenMLExperienceReplay",
    "OpenXExperienceReplay",
    "ReplayLog",
    "ReplayLogStorage",
    "ReplayMismatchError",
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
