"""Wrappers that store next observations as differences, or only where no later row holds them."""

from typing import Any

import torch

from flatroll.layout.checks import check_floating_dtype, check_key_names
from flatroll.layout.delta import RestoreNextObservation, check_delta, encode_delta
from flatroll.layout.keys import OBSERVATION, NestedKey, plain_key
from flatroll.layout.spaces import column_name, observation_leaves
from flatroll.wrappers.arrays import Array, Tree, copy_array, full_for, map_tree, select, to_torch
from flatroll.wrappers.markers import MarkerWrapper
from flatroll.wrappers.plain_state import copy_plain
from flatroll.wrappers.source import EnvLike, Step


class CompactObs(MarkerWrapper):
    """Adds ``info["final_obs"]`` and ``info["_final_obs"]``: next observations that no later row will hold.

    In every autoreset mode, ``final_obs`` is dense (the tree and shapes of the observation) and ``_final_obs`` is
    bool ``(E,)``, True where the last step ended an episode whose last observation is known. A store that keeps each
    observation once needs only these in addition. In a collector's stack it means ``compact_obs=True``: no ``("next",
    observation)`` columns, and `Collector.final` instead.

    Args:
        env: anything `as_vector_env` takes.

    >>> import gymnasium as gym
    >>> env = CompactObs(gym.make_vec("CartPole-v1", num_envs=2))
    >>> obs, info = env.reset(seed=0)
    >>> obs, reward, terminated, truncated, info = env.step([0, 1])
    >>> info["final_obs"].shape, info["_final_obs"]
    ((2, 4), array([False, False]))
    """

    is_column = False
    row_state = ()

    def __init__(self, env: EnvLike) -> None:
        super().__init__(env, "final_obs")

    def _on_reset(self, obs: Tree, info: dict[str, Any], rows: Array) -> None:
        info["_final_obs"] = full_for(self.stream.first, self.num_envs, False, torch.bool)

    def step(self, actions: Tree) -> Step:
        """Step the env; mark the sub-envs whose last observation is in ``info["final_obs"]``."""
        result = self.env.step(actions)
        info = result[4]
        stream = self.stream

        # NEXT_STEP returns the final observation as the observation. The mask is copied because the caller keeps it.
        info.setdefault("final_obs", result[0])
        if stream.known is None:
            mask = copy_array(stream.ended)
        else:
            mask = stream.ended & stream.known
        info["_final_obs"] = mask
        return result


class ObservationDelta(MarkerWrapper):
    """Implements `NextObservationDelta`, which documents the arguments: adds ``info["delta"]``."""

    is_column = False

    def __init__(
        self,
        env: EnvLike,
        *,
        in_keys: list[NestedKey] | None = None,
        delta_dtype: torch.dtype = torch.float16,
    ) -> None:
        check_floating_dtype("delta_dtype", delta_dtype)
        if in_keys is not None:
            in_keys = check_key_names("in_keys", in_keys)
        super().__init__(env, "delta")

        entries = [key for key, _ in observation_leaves(self.single_observation_space)]
        #: The observation entries that get a delta.
        self.keys = entries
        if in_keys is not None:
            unknown = [key for key in in_keys if key not in entries]
            if unknown:
                raise ValueError(f"in_keys has {unknown}, but the observation's entries are {entries}")
            self.keys = [key for key in entries if key in in_keys]

        self.delta_dtype = delta_dtype
        self._obs: Tree = None

    def _on_reset(self, obs: Tree, info: dict[str, Any], rows: Array) -> None:
        self._obs = obs

    def get_snapshot(self) -> Any:
        """Return the last observation, see `Snapshots`."""
        return copy_plain(self._obs)

    def set_snapshot(self, snapshot: Any) -> None:
        """Restore the last observation."""
        self._obs = copy_plain(snapshot, self.stream.capabilities.device)

    def step(self, actions: Tree) -> Step:
        """Step the env; add the difference between next and current observation."""
        result = self.env.step(actions)
        obs = result[0]
        info = result[4]
        stream = self.stream

        next_obs = stream.true_next(obs, info)
        if not stream.same_step and stream.any_first is not False:
            # Rows on which the env only reset are not transitions: their delta is 0.
            next_obs = map_tree(lambda n, o: select(stream.first, o, n), next_obs, self._obs)
        if stream.known is not None:  # the env hides the last observation: NaN, or 0 for dtypes without NaN
            lost = map_tree(lambda o: o * float("nan") if "float" in str(o.dtype) else o, self._obs)
            next_obs = map_tree(lambda n, o: select(stream.known, n, o), next_obs, lost)

        root = (OBSERVATION,) if isinstance(obs, tuple) else ()
        info["delta"] = self._delta(root, self._obs, next_obs)
        self._obs = obs
        return result

    def _delta(self, path: tuple[str, ...], obs: Tree, next_obs: Tree) -> Tree:
        """Return the differences of the chosen leaves as a tree; None for other leaves."""
        if isinstance(obs, tuple):
            return tuple(self._delta((*path, str(i)), leaf, next_obs[i]) for i, leaf in enumerate(obs))
        if isinstance(obs, dict):
            deltas = {}
            for name, leaf in obs.items():
                part = str(name) if path else column_name(name)
                delta = self._delta((*path, part), leaf, next_obs[name])
                if delta is not None:
                    deltas[name] = delta
            return deltas

        key = plain_key(path) if path else OBSERVATION
        if key not in self.keys:
            return None

        before = to_torch(obs)
        after = to_torch(next_obs)
        delta = encode_delta(before, after, self.delta_dtype)
        if isinstance(obs, torch.Tensor):
            return delta  # on a device check_delta would sync: a collector calls it once per batch

        check_delta(delta, before, after, key)

        # NumPy has no bfloat16.
        if delta.dtype is torch.bfloat16:
            return delta
        return delta.numpy()


class NextObservationDelta(ObservationDelta):
    """Adds ``info["delta"]``: the true next observation minus the one before, in low precision.

    Floating leaves are subtracted in their own dtype and cast once to ``delta_dtype``; integer and bool leaves get an
    exact modular difference in their own dtype. In a collector's stack it replaces the columns ``("next", obs)`` by
    ``("next", "delta", obs)``. `flatroll.buffers.NextObservationDelta` restores them in samples; calling this class
    without an env creates that transform.

    Args:
        env: anything `as_vector_env` takes.
        in_keys: the observation entries to replace (``"observation"``, or keys of a Dict space). Default: all.
        delta_dtype: a floating dtype. Default ``torch.float16``. With ``torch.bfloat16``, which NumPy does not have,
            ``info["delta"]`` holds tensors.

    Raises:
        ValueError: ``delta_dtype`` is not floating, or a key is not an observation entry.
        OverflowError: a difference does not fit ``delta_dtype`` (in the step for NumPy envs; otherwise when a
            collector checks the batch).

    >>> import gymnasium as gym
    >>> env = NextObservationDelta(gym.make("CartPole-v1"))
    >>> obs, info = env.reset(seed=0)
    >>> info = env.step([0])[4]
    >>> info["delta"].dtype, info["delta"].shape
    (dtype('float16'), (1, 4))
    """

    def __new__(cls, env: EnvLike | None = None, *args: Any, **kwargs: Any) -> Any:
        """Create the wrapper around ``env``, or without an env the buffer transform of the same name."""
        if env is None:
            return RestoreNextObservation(**kwargs)
        return super().__new__(cls)
