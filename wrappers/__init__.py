"""Gymnasium vector wrappers that mark episode boundaries, and `as_vector_env`, which adapts any env."""

from flatroll.wrappers.adapt_env import find_stream
from flatroll.wrappers.arrays import map_tree
from flatroll.wrappers.as_vector_env import as_vector_env
from flatroll.wrappers.atari.snapshots import FAMILY as ATARI_SNAPSHOTS
from flatroll.wrappers.atari.source import FAMILY as ATARI
from flatroll.wrappers.compact import CompactObs, NextObservationDelta
from flatroll.wrappers.families import register
from flatroll.wrappers.games.pettingzoo import FAMILY as PETTINGZOO
from flatroll.wrappers.games.pettingzoo import PettingZooSource
from flatroll.wrappers.games.vmas import FAMILY as VMAS
from flatroll.wrappers.games.vmas import VmasSource
from flatroll.wrappers.markers import (
    InitTracker,
    MarkerWrapper,
    RecurrentPrimer,
    RewardSum,
    StepCounter,
    TrajId,
    find_wrapper,
    recurrent_states,
    set_recurrent_primers_from,
)
from flatroll.wrappers.normalize import NormalizeObservation
from flatroll.wrappers.on_jax.functional import FunctionalEnv, as_functional
from flatroll.wrappers.on_jax.source import FAMILY as JAX
from flatroll.wrappers.snapshots.families import SnapshotFamily, Snapshots, register_snapshots
from flatroll.wrappers.snapshots.stack import get_snapshot, set_snapshot, snapshot_problem
from flatroll.wrappers.source import Capabilities, VectorSource
from flatroll.wrappers.stream import VectorStream

# The families of the outer ring: the core asks for them and does not import them.
register(JAX, VMAS, PETTINGZOO, ATARI)
register_snapshots(ATARI_SNAPSHOTS)

__all__ = [
    "Capabilities",
    "CompactObs",
    "FunctionalEnv",
    "InitTracker",
    "MarkerWrapper",
    "NextObservationDelta",
    "NormalizeObservation",
    "PettingZooSource",
    "RecurrentPrimer",
    "RewardSum",
    "SnapshotFamily",
    "Snapshots",
    "StepCounter",
    "TrajId",
    "VectorSource",
    "VectorStream",
    "VmasSource",
    "as_functional",
    "as_vector_env",
    "find_stream",
    "find_wrapper",
    "get_snapshot",
    "map_tree",
    "recurrent_states",
    "register_snapshots",
    "set_recurrent_primers_from",
    "set_snapshot",
    "snapshot_problem",
]
