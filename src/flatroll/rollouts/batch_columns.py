"""The columns of a collected batch: their keys, writers and specs."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from gymnasium.vector import VectorEnv

from flatroll.layout.keys import (
    ACTION,
    AGENT,
    DELTA,
    DONE,
    ENV,
    ENV_STEP,
    GAME,
    GAME_STEP,
    IS_INIT,
    NEXT_KNOWN,
    NUM_AGENTS,
    REWARD,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    NestedKey,
    as_tuple,
    next_key,
    plain_key,
)
from flatroll.layout.spaces import find_part, observation_leaves, space_leaves
from flatroll.specs import Categorical, Composite, TensorSpec, Unbounded, as_spec
from flatroll.wrappers.adapt_env import adapt_env, find_stream
from flatroll.wrappers.compact import ObservationDelta
from flatroll.wrappers.markers import (
    InitTracker,
    MarkerWrapper,
    RewardSum,
    StepCounter,
    TrajId,
    find_wrapper,
)
from flatroll.wrappers.source import EnvLike, layers

Marker = TypeVar("Marker", bound=MarkerWrapper)

#: Column that marks rows on which the env only reset; never in a batch.
DEAD = ("collector", "_dead")


class ColumnKeys:
    """The keys of a collected batch, read from the env's wrappers; ensures that each has a single writer.

    Raises:
        ValueError: two components write the same column; the message names both.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        info_keys: Sequence[NestedKey],  # entries of info to store
    ) -> None:
        markers = [layer for layer in layers(env) if isinstance(layer, MarkerWrapper) and layer.is_column]
        # The key and tree path of each observation entry and each part of the action.
        self.obs, self.obs_paths = zip(*observation_leaves(env.single_observation_space), strict=True)
        self.actions, self.action_paths = zip(*space_leaves(env.single_action_space, (ACTION,)), strict=True)

        # The key and info name of markers that describe a row's observation ...
        self.roots: list[NestedKey] = [m.key for m in markers if not m.describes_step]
        self.root_names = [m.info_name for m in markers if not m.describes_step]

        # ... and of markers that describe the step.
        self.nexts: list[NestedKey] = [next_key(m.key) for m in markers if m.describes_step]
        self.next_names = [m.info_name for m in markers if m.describes_step]

        # Step counters: ("next", key) is one more.
        self.counts = [m.key for m in markers if isinstance(m, StepCounter)]
        ids = _first(markers, TrajId)
        self.has_ids = ids is not None
        self.traj: NestedKey = TRAJ_IDS if ids is None else ids.key
        inits = _first(markers, InitTracker)
        self.init: NestedKey = IS_INIT if inits is None else inits.key

        # Columns that are always float32, even if a wrapper changes their dtype.
        self.float32: set[NestedKey] = {REWARD}
        self.returns: NestedKey | None = None  # the sum of an episode's rewards so far
        returns = _first(markers, RewardSum)
        if returns is not None:
            self.returns = next_key(returns.key)
            self.float32.add(self.returns)

        # Observations whose next one is stored as a difference, and the differences' dtype.
        self.deltas: Sequence[NestedKey] = ()
        self.delta_dtype = torch.float16
        delta = find_wrapper(env, ObservationDelta)
        if delta is not None:
            self.deltas = delta.keys
            self.delta_dtype = delta.delta_dtype

        self.infos = tuple(info_keys)
        self.states: list[NestedKey] = []  # recurrent states of the policy, known once it is set
        self.tracks_envs = False  # whether rows name their env
        self.strided = False  # whether only the rows marked by ("collector", "has_state") store them

        # Columns of shape [N, 1] if they hold one number per row.
        flags_and_markers = {REWARD, TERMINATED, TRUNCATED, *self.nexts, *self.roots}
        self.trailing: set[NestedKey] = flags_and_markers - {self.traj}
        self.next_of = {key: next_key(key) for key in (*self.obs, *self.roots)}

        # Columns with the agent, game and game step of each row, if rows are agents.
        stream = find_stream(env)
        self.agents: tuple[NestedKey, ...] = ()
        if stream is not None and stream.source.agents is not None:
            self.agents = (AGENT, GAME, GAME_STEP, NUM_AGENTS)

        self._writers: dict[tuple[str, ...], str] = {}
        self._claim_all(markers)

    def _claim_all(self, markers: Sequence[MarkerWrapper]) -> None:
        """Claim the columns that the env's stack and the collector write."""
        self.claim("the collector", REWARD, TERMINATED, TRUNCATED, DONE, NEXT_KNOWN, DEAD)
        self.claim("the env's agents", *self.agents)
        self.claim("the policy's action", *self.actions)
        self.claim("the observation", *self.obs, *(self.next_of[key] for key in self.obs))

        for marker in markers:
            key = marker.key
            if marker.describes_step:
                key = next_key(key)
            written = [key]
            if isinstance(marker, StepCounter):
                written.append(next_key(key))
            self.claim(type(marker).__name__, *written)

        if self.deltas:
            self.claim("NextObservationDelta", DELTA)
        for name in self.infos:
            self.claim("info_keys", name, next_key(name))

    def claim(self, writer: str, *keys: NestedKey) -> None:
        """Register ``writer`` as the writer of ``keys``; ValueError if one has a writer already."""
        for key in keys:
            claimed = self._claimed(key)
            if claimed is not None:
                raise ValueError(
                    f"two parts write the same column: {self._writers[claimed]} writes {plain_key(claimed)!r}, "
                    f"{writer} writes {plain_key(key)!r}. Rename one: the marker wrappers take a key argument, "
                    "policies out_keys"
                )

        self._writers.update((as_tuple(key), writer) for key in keys)

    def has_writer(self, key: NestedKey) -> bool:
        """Return whether a column, or one that it is nested in, is claimed."""
        return self._claimed(key) is not None

    def _claimed(self, key: NestedKey) -> tuple[str, ...] | None:
        """Return the first key that is equal, or nested inside the other or the other inside it."""
        path = as_tuple(key)
        return next((other for other in self._writers if path[: len(other)] == other[: len(path)]), None)


def _first(markers: Sequence[MarkerWrapper], kind: type[Marker]) -> Marker | None:
    """Return the first marker of this class, or None."""
    return next((marker for marker in markers if isinstance(marker, kind)), None)


def batch_spec(env: EnvLike) -> Composite:
    """Return the spec of the batches that a collector with random actions yields from an env.

    Its shape is ``(-1,)``: it accepts batches with any number of rows. Columns that it does not list, such as a
    policy's outputs and your own markers, may have any values.

    Args:
        env: anything `flatroll.wrappers.as_vector_env` accepts, or wrappers around it. It is not stepped.

    >>> import gymnasium as gym
    >>> from flatroll.wrappers import InitTracker
    >>> spec = batch_spec(InitTracker(gym.make_vec("CartPole-v1", num_envs=2)))
    >>> spec["next", "reward"], sorted(spec.keys())
    (UnboundedContinuous(shape=(-1, 1), dtype=torch.float32), ['action', 'is_init', 'next', 'observation'])
    """
    adapted = adapt_env(env)
    return spec_of_columns(ColumnKeys(adapted, ()), adapted)


def spec_of_columns(keys: ColumnKeys, env: VectorEnv[Any, Any, Any], compact: bool = False) -> Composite:
    """Return the spec of batches with these columns; ``compact`` ones have no next observations."""
    rows: list[tuple[Any, TensorSpec]] = []  # key, spec of one row
    stream = find_stream(env)
    unknown = stream is not None and stream.hides_final_obs  # its hidden last observations are filled in

    for key, path in zip(keys.obs, keys.obs_paths, strict=True):
        spec = as_spec(find_part(env.single_observation_space, path))
        rows.append((key, spec))
        if key in keys.deltas:
            rows.append(((*DELTA, *as_tuple(key)), Unbounded(spec.shape, dtype=keys.delta_dtype)))
        elif not compact and not unknown:
            rows.append((next_key(key), spec))

    for key, path in zip(keys.actions, keys.action_paths, strict=True):
        rows.append((key, as_spec(find_part(env.single_action_space, path))))
    flag = Categorical(2, (1,), dtype=torch.bool)
    count = Unbounded((1,), dtype=torch.int64)
    rows += [(REWARD, Unbounded((1,), dtype=torch.float32))]
    rows += [(key, flag) for key in (TERMINATED, TRUNCATED, DONE)]
    rows += [(keys.init, flag)] if keys.init in keys.roots else []
    rows += [(key, count) for own in keys.counts for key in (own, next_key(own))]
    rows += [(keys.traj, Unbounded((), dtype=torch.int64))] if keys.has_ids else []
    rows += [(key, Unbounded((), dtype=torch.int64)) for key in keys.agents]
    rows += [(key, Unbounded((), dtype=torch.int64)) for key in (ENV, ENV_STEP) if keys.tracks_envs]
    rows += [(keys.returns, Unbounded((1,), dtype=torch.float32))] if keys.returns is not None else []
    batch = Composite(shape=(-1,))
    for key, spec in rows:
        batch[key] = spec.expand(-1, *spec.shape)
    return batch
