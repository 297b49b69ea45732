"""The format of flat batches: keys, the boundary rule, and tools to inspect and check a batch."""

from flatroll.layout.agents import agents_of
from flatroll.layout.boundaries import run_ends, run_starts
from flatroll.layout.delta import NextObservationDelta, check_delta, decode_delta, encode_delta
from flatroll.layout.explained import explain_errors
from flatroll.layout.inspect.audit import Finding, audit
from flatroll.layout.inspect.describe import describe
from flatroll.layout.inspect.explain import explain
from flatroll.layout.inspect.timeline import timeline
from flatroll.layout.inspect.timeline_svg import timeline_svg
from flatroll.layout.keys import (
    ACTION,
    AGENT,
    DELTA,
    DONE,
    EPISODE_REWARD,
    GAME,
    GAME_STEP,
    IS_INIT,
    MASK,
    NEXT,
    NEXT_KNOWN,
    NUM_AGENTS,
    OBSERVATION,
    POLICY_VERSION,
    RESERVED,
    REWARD,
    STEP_COUNT,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    NestedKey,
    as_tuple,
    flat_column,
    marker,
    missing_marker,
    next_key,
    observation_keys,
    require,
)
from flatroll.layout.step_mdp import step_mdp
from flatroll.layout.ted import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested
from flatroll.layout.trajectories import join, mark_cuts, split_trajectories

__all__ = [
    "ACTION",
    "AGENT",
    "DELTA",
    "DONE",
    "EPISODE_REWARD",
    "GAME",
    "GAME_STEP",
    "IS_INIT",
    "MASK",
    "NEXT",
    "NEXT_KNOWN",
    "NUM_AGENTS",
    "OBSERVATION",
    "POLICY_VERSION",
    "RESERVED",
    "REWARD",
    "STEP_COUNT",
    "TERMINATED",
    "TRAJ_IDS",
    "TRUNCATED",
    "Finding",
    "Flat2TED",
    "H5Combine",
    "H5Split",
    "Nested2TED",
    "NestedKey",
    "NextObservationDelta",
    "TED2Flat",
    "TED2Nested",
    "agents_of",
    "as_tuple",
    "audit",
    "check_delta",
    "decode_delta",
    "describe",
    "encode_delta",
    "explain",
    "flat_column",
    "join",
    "mark_cuts",
    "marker",
    "missing_marker",
    "next_key",
    "observation_keys",
    "require",
    "run_ends",
    "run_starts",
    "split_trajectories",
    "step_mdp",
    "timeline",
    "timeline_svg",
]

explain_errors(__all__, globals())
