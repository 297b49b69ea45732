"""The adapters for envpool's sync and async modes."""

import warnings
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from typing_extensions import override

from flatroll.wrappers.arrays import Array, Tree, map_tree
from flatroll.wrappers.source import Capabilities, EnvLike, Info, Seed, Step, VectorSource


class EnvPoolSource(VectorSource):
    """Adapts envpool in sync mode, which returns new arrays at each step and autoresets in NEXT_STEP mode."""

    def __init__(self, env: Any) -> None:
        config: Any = getattr(env, "config", {})
        players = int(config.get("max_num_players", 1)) if config else 1
        if players > 1:
            raise TypeError(
                f"env is an envpool of a game for {players} players ({type(env).__name__}, "
                f"config['max_num_players']={players}), which returns one row for each of them, and pools with more "
                "than one player are not supported: write a flatroll.wrappers.VectorSource with one row per player, or "
                "play a PettingZoo game (flatroll.wrappers.PettingZooSource)"
            )

        if config:
            num_envs = int(config["num_envs"])
            batch = int(config.get("batch_size") or num_envs)
        else:
            num_envs = int(env.num_envs)
            batch = num_envs
        in_step = batch == num_envs
        batch_size = None if in_step else batch

        with warnings.catch_warnings():
            # envpool creates its bounds from float64 numbers, and Gymnasium warns about the cast.
            warnings.filterwarnings("ignore", message=".*precision lowered by casting", category=UserWarning)
            # envpool's observation_space and action_space are those of a single env.
            single = mend_bounds(env.observation_space), mend_bounds(env.action_space)

        capabilities = Capabilities(
            torch.device("cpu"),
            "numpy",
            fork_safe=False,
            both_flags=False,
            seedable=False,
            checks_range=False,
            exact_flags=True,
            partial_reset=in_step,
            overlaps=in_step,
            batch_size=batch_size,
        )
        super().__init__(env, num_envs, *single, capabilities)

        self._sent = False  # whether a step is pending
        self._shown: Tree = None  # last observations, which a partial reset returns for the other rows

    @override
    def reset(self, seed: Seed, options: Info | None, rows: Array | None = None) -> tuple[Tree, Info]:
        _check_reset(self.env, seed, options)
        if self._sent:
            self.step(None)
        if rows is None:
            obs, info = self.env.reset()
            self._shown = _cast_discrete(obs, self.single_observation_space)
            return self._shown, info

        # envpool returns only the rows that it reset, ordered by env id.
        part, info = self.env.reset(options={"reset_mask": rows})
        part = _cast_discrete(part, self.single_observation_space)
        self._shown = map_tree(lambda whole, some: _scatter(some, rows, np.array(whole)), self._shown, part)

        whole: dict[str, Any] = {"env_id": np.arange(self.num_envs)}
        for key, value in info.items():
            if key != "env_id" and isinstance(value, np.ndarray) and value.shape[:1] == (int(rows.sum()),):
                whole[key] = _scatter(value, rows, np.zeros((self.num_envs, *value.shape[1:]), value.dtype))
                whole[f"_{key}"] = np.array(rows)  # Gymnasium's mask of the rows that have the entry
        return self._shown, whole

    @override
    def step(self, actions: Tree) -> Step:
        if not self._sent:
            self.send(actions)
        self._sent = False
        obs, reward, terminated, truncated, info = self.env.recv()
        # No copy: envpool returns new arrays at each step, and a partial reset copies before it writes.
        obs = _cast_discrete(obs, self.single_observation_space)
        self._shown = obs
        return obs, reward, terminated, truncated, info

    @override
    def send(self, actions: Tree) -> None:
        if not (isinstance(actions, np.ndarray) and actions.flags.c_contiguous):
            actions = map_tree(np.ascontiguousarray, actions)
        self.env.send(actions)
        self._sent = True

    @override
    def close(self) -> None:
        if self._sent:
            self.step(None)
        super().close()


class AsyncPoolSource(EnvPoolSource):
    """Adapts envpool in async mode: a step returns the first ``batch_size`` of E envs to finish.

    The runner (`flatroll.rollouts.pool_runner.PoolRows`) reads from `ids` which rows these are. It calls `send`,
    waits in `receive`, and the next `step` returns the received rows.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        #: Ids of the envs in the last batch of rows, int64 ``[batch_size]``.
        self.ids: Array = np.zeros(0, np.int64)
        #: Whether the caller separates the rows by env. A hand-written loop does not.
        self.led = False
        self._received: Step | None = None
        if env not in _PLACES:
            _PLACES[env] = _Place(env, self.num_envs)
        self._place = _PLACES[env]

    @override
    def reset(self, seed: Seed, options: Info | None, rows: Array | None = None) -> tuple[Tree, Info]:
        if not self.led:
            raise RuntimeError(_BY_HAND.format(self.capabilities.batch_size, self.num_envs))

        _check_reset(self.env, seed, options)
        self._drain()

        place = self._place
        place.begin(self.env)
        # No env may be running now: after a second reset two threads would step the same env.
        self.env.async_reset()
        place.under_way[:] = True
        place.torn = False

        obs, _, _, _, info = self._receive()
        return obs, info

    @override
    def send(self, actions: Tree) -> None:
        self._send(actions, self.ids)

    def receive(self) -> None:
        """Wait for the next rows; RuntimeError if too few are pending (envpool would abort or hang)."""
        self._received = self._receive()

    @override
    def step(self, actions: Tree) -> Step:
        received = self._received
        self._received = None

        if received is None:
            raise RuntimeError(_BY_HAND.format(self.capabilities.batch_size, self.num_envs))
        return received

    def _send(self, actions: Tree, ids: Array) -> None:
        place = self._place
        if place.under_way[ids].any():
            raise RuntimeError(
                f"got actions for the envs {ids.tolist()}, but some of them are stepping already"
            )

        place.begin(self.env)
        self.env.send(map_tree(np.ascontiguousarray, actions), ids)
        place.under_way[ids] = True
        place.torn = False

    def _receive(self) -> Step:
        place = self._place
        count = self.capabilities.batch_size
        assert count is not None

        pending = np.count_nonzero(place.under_way)
        if pending < count:
            raise RuntimeError(
                f"recv of an envpool returns {count} rows, but the number of stepping envs is {pending}"
            )

        place.begin(self.env)
        obs, reward, terminated, truncated, info = self.env.recv()
        ids = info["env_id"].astype(np.int64)
        if len(ids) != count or not place.under_way[ids].all() or len(reward) != count:
            raise RuntimeError(
                f"the envpool's recv returned {len(reward)} rows of the envs {ids.tolist()}, not {count} of "
                "the expected ones: other code has sent actions to it, or an env has several players. Give "
                "each collector its own pool"
            )

        # Together: an interrupt must not come between.
        place.under_way[ids], place.last, place.torn = False, _trace(self.env), False
        self.ids = ids
        return _cast_discrete(obs, self.single_observation_space), reward, terminated, truncated, info

    def _drain(self) -> None:
        """Receive and drop all pending rows, including those of other adapters of the pool."""
        under_way = self._place.under_way
        count = self.capabilities.batch_size
        assert count is not None

        while pending := np.count_nonzero(under_way):
            if pending < count:  # recv waits for `count` rows: step other envs once more
                idle = np.flatnonzero(~under_way)[: count - pending]
                self._send(batch_space(self.single_action_space, len(idle)).sample(), idle)
            self._receive()


class _Place:
    """The state of an async pool, shared by its adapters: which envs are running."""

    def __init__(self, env: object, num_envs: int) -> None:
        self.under_way = np.zeros(num_envs, bool)
        #: Whether the last send, recv or reset raised an exception.
        self.torn = False
        self.last = _trace(env)
        self._used: bool | None = None  # whether envs were sent before this adapter existed

    def begin(self, env: object) -> None:
        """Mark the pool as in use; RuntimeError if it is unknown which envs are running.

        In that state recv might hang, or return a row that would be matched with another action.
        """
        if self.torn:
            raise RuntimeError(
                "a send, recv or reset of this envpool was interrupted or failed, so it is unknown which envs "
                "are stepping: create a new pool"
            )

        if self._used is None:  # set by the first send, recv or reset of a pool
            self._used = bool({"_all_env_ids", "_check_action_finished", "_state_names"} & set(vars(env)))

        if self._used or self.last is not _trace(env):
            raise RuntimeError(
                "this envpool in async mode was reset, or its rows received, by other code, so it is unknown "
                "which envs are stepping: create a new pool, and let only the collector call send, recv and reset"
            )
        self.torn = True


# A collector may have left this pool with pending steps.
_PLACES: WeakKeyDictionary[Any, _Place] = WeakKeyDictionary()

_BY_HAND = (
    "env is an envpool in async mode (batch_size={} of num_envs={}), which returns different envs at every step: "
    "use Collector or rollout, which tell them apart, or a pool in sync mode (batch_size == num_envs)"
)


def _trace(env: object) -> object:
    """Return an object that envpool replaces at every recv."""
    return vars(env).get("_last_players_env_id")


def pool_source(env: EnvLike) -> EnvPoolSource:
    """Return the adapter for an envpool's mode."""
    source = EnvPoolSource(env)
    if source.capabilities.batch_size is None:
        return source
    return AsyncPoolSource(env)


# The pools that a seed was given to.
_SEEDED: WeakSet[Any] = WeakSet()


def _check_reset(env: EnvLike, seed: Seed, options: Info | None) -> None:
    """Warn about the first seed given to a pool, which has no effect; refuse options."""
    if seed is not None and env not in _SEEDED:
        _SEEDED.add(env)
        warnings.warn(
            "envpool takes its seed when it is created (envpool.make_gymnasium(..., seed=...)): "
            f"reset(seed={seed!r}) has no effect",
            stacklevel=5,
        )

    if options:
        raise ValueError(f"envpool takes no reset options but reset_mask, got {sorted(options)}")


def _scatter(some: Array, rows: Array, whole: Array) -> Array:
    """Return a copy of ``whole`` ``[E, ...]`` with ``some`` ``[k, ...]`` in the k rows where ``rows`` is True."""
    whole[rows] = some
    return whole


def _cast_discrete(obs: Tree, space: spaces.Space[Any]) -> Tree:
    """Cast discrete observations, which arrive as int32, to the int64 of the space."""
    if isinstance(space, spaces.Box):  # the common case first
        return obs
    if isinstance(space, spaces.Dict):
        return {key: _cast_discrete(obs[key], child) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_cast_discrete(obs[i], child) for i, child in enumerate(space.spaces))
    if isinstance(space, spaces.Discrete):
        return obs.astype(space.dtype, copy=False)
    return obs


def mend_bounds(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Replace the bounds that envpool gives to unbounded Box spaces with infinite ones.

    Several envpool families declare ``low = finfo.tiny`` (the smallest *positive* number) and ``high = finfo.max``
    for unbounded spaces, so negative observations fall outside.
    """
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: mend_bounds(child) for key, child in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple(tuple(mend_bounds(child) for child in space.spaces))
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        return space

    info = np.finfo(space.dtype)
    # The bounds are float32 numbers even if the space is float64.
    tiny = np.isin(space.low, (info.tiny, np.finfo(np.float32).tiny))
    if not tiny.any():
        return space

    low = np.where(tiny, -np.inf, space.low).astype(space.dtype)
    huge = np.isin(space.high, (info.max, np.finfo(np.float32).max))
    high = np.where(huge, np.inf, space.high).astype(space.dtype)
    return spaces.Box(low, high, dtype=space.dtype.type)
