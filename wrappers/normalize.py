"""`NormalizeObservation`: running normalisation inside the env, for other libraries' training loops."""

import math
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from torch import Tensor

from flatroll.layout.checks import check_number
from flatroll.layout.moments import Moments
from flatroll.wrappers.arrays import Array, Tree, leaves_at, map_tree, to_torch
from flatroll.wrappers.compact import ObservationDelta
from flatroll.wrappers.markers import MarkerWrapper
from flatroll.wrappers.source import EnvLike, Info, Seed, Step, layers


class NormalizeObservation(MarkerWrapper):
    """Normalises float observations by their running mean and variance.

    Use it with training loops of other libraries that accept only an env. In your own loop put
    `flatroll.modules.RunningNorm` into the policy instead: rows then stay raw, and a replay buffer, workers and a
    restart see the same statistics. Put this wrapper directly around your env, and flatroll's other wrappers outside.

    Each observation is counted once in every autoreset mode: observations of resets, of steps, and the last ones of
    SAME_STEP envs in ``info["final_obs"]``, which are normalised by the same statistics as the other observations of
    the step. Integer and bool entries stay as they are; each entry of a Dict or Tuple has its own statistics.

    Args:
        env: anything `as_vector_env` takes.
        clip: largest absolute value of an observation. Default: 10. None: no limit.
        epsilon: added to the variance. Default: 1e-8.

    Attributes:
        update_running_mean: set to False to freeze the statistics, for example during evaluation.
        statistics: for each floating entry, by its name (``"observation"`` unless the space is a Dict or Tuple; names
            of nested ones are joined by dots), ``count``, ``mean`` and ``var`` in float64.

    Raises:
        ValueError: an argument is out of range, or `NextObservationDelta` is inside. In a step or reset: an
            observation of a NumPy env is NaN or infinite; the statistics are then unchanged.

    >>> import gymnasium as gym
    >>> env = NormalizeObservation(gym.make_vec("CartPole-v1", num_envs=2))
    >>> obs, info = env.reset(seed=0)
    >>> env.statistics["observation"].count.item(), np.abs(obs.mean(0)).max() < 1e-6
    (2.0, np.True_)
    >>> test_env = NormalizeObservation(gym.make_vec("CartPole-v1", num_envs=1))
    >>> test_env.load_state_dict(env.state_dict())
    >>> test_env.update_running_mean = False
    """

    is_column = False
    row_state = ()

    def __init__(self, env: EnvLike, *, clip: float | None = 10.0, epsilon: float = 1e-8) -> None:
        super().__init__(env, "normalized")
        if clip is None:
            self.clip = None
        else:
            self.clip = float(check_number("clip", clip, above=0))
        self.epsilon = float(check_number("epsilon", epsilon, above=0, below=math.inf))

        if any(isinstance(layer, ObservationDelta) for layer in layers(self.env)):
            raise ValueError(
                "NextObservationDelta is inside NormalizeObservation and would compute differences of raw "
                "observations: put NormalizeObservation directly around your env"
            )

        self.update_running_mean = True
        self.statistics: dict[str, Moments] = {}
        self._paths: list[tuple[Any, ...]] = []  # paths of the leaves with statistics, in order

        space, self._moments = self._prepare(self.single_observation_space, ())
        self.single_observation_space = space
        self.observation_space = batch_space(space, self.num_envs)

    def _prepare(self, space: spaces.Space[Any], path: tuple[Any, ...]) -> tuple[spaces.Space[Any], Tree]:
        """Return the normalised observation space and the tree of statistics (None for non-floating leaves)."""
        if isinstance(space, spaces.Dict):
            parts = {key: self._prepare(child, (*path, key)) for key, child in space.spaces.items()}
            children = {key: child for key, (child, _) in parts.items()}
            return spaces.Dict(children), {key: moments for key, (_, moments) in parts.items()}

        if isinstance(space, spaces.Tuple):
            news, trees = zip(
                *(self._prepare(c, (*path, i)) for i, c in enumerate(space.spaces)), strict=True
            )
            return spaces.Tuple(news), tuple(trees)

        if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
            return space, None

        moments = Moments(space.shape, self.stream.capabilities.device)
        self._paths.append(path)
        self.statistics[".".join(map(str, path)) or "observation"] = moments
        limit = math.inf if self.clip is None else float(self.clip)
        return spaces.Box(-limit, limit, space.shape, space.dtype.type), moments

    def state_dict(self) -> dict[str, Tensor]:
        """Return the statistics by entry and name, such as ``"observation.mean"``; for `Checkpoint`."""
        return {
            f"{entry}.{name}": tensor.clone()
            for entry, moments in self.statistics.items()
            for name, tensor in moments.state_dict().items()
        }

    def get_snapshot(self) -> Any:
        """Return the statistics, see `Snapshots`."""
        return self.state_dict()

    def set_snapshot(self, snapshot: Any) -> None:
        """Restore the statistics."""
        self.load_state_dict(snapshot)

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Load the statistics of another wrapper around an env with the same observation space.

        Raises:
            ValueError: entries or shapes differ; nothing is changed.
        """
        shapes, given = (
            {key: tuple(tensor.shape) for key, tensor in state.items()}
            for state in (self.state_dict(), state_dict)
        )
        if shapes != given:
            raise ValueError(
                f"state_dict must hold tensors of shapes {shapes}, got {given}: it belongs to another env"
            )

        for entry, moments in self.statistics.items():
            names = ("count", "mean", "var")
            moments.load_state_dict({name: state_dict[f"{entry}.{name}"] for name in names})

    def reset(self, *, seed: Seed = None, options: Info | None = None) -> tuple[Tree, Info]:
        """Reset all rows or those of ``options["reset_mask"]``; count the reset observations and normalise all."""
        obs, info = super().reset(seed=seed, options=options)
        return self._normalize(obs), info

    def _on_reset(self, obs: Tree, info: Info, rows: Array) -> None:
        self._count([("the observation", obs, rows)])

    def step(self, actions: Tree) -> Step:
        """Step the env; count and normalise its observations, those of ended episodes included."""
        obs, reward, terminated, truncated, info = self.env.step(actions)
        stream = self.stream

        final = stream.read_final(info)
        columns = [("the observation", obs, None)]
        if final is not None and stream.same_step and stream.any_ended is not False:
            if stream.known is None:
                rows = stream.ended
            else:
                rows = stream.ended & stream.known
            columns.append(("info['final_obs']", final, rows))
        self._count(columns)

        normalized = self._normalize(obs)
        if final is not None:
            info["final_obs"] = normalized if stream.any_ended is False else self._normalize(final)
        return normalized, reward, terminated, truncated, info

    def _count(self, columns: list[tuple[str, Tree, Array | None]]) -> None:
        """Update the statistics with each (name for errors, tree, mask of rows; None for all)."""
        if not self.update_running_mean:
            return
        for path, (entry, moments) in zip(self._paths, self.statistics.items(), strict=True):
            of = f" {entry!r}" if path else ""
            parts = []
            for name, tree, rows in columns:
                (leaf,) = leaves_at(tree, [path])
                if rows is not None:
                    rows = to_torch(rows)
                parts.append((name + of, to_torch(leaf), rows))
            moments.add(*parts)

    def _normalize(self, obs: Tree) -> Tree:
        """Return a normalised copy; leaves without statistics are passed through."""

        def leaf(array: Array, moments: Moments | None) -> Array:
            if moments is None:
                return array

            out = moments.normalized(to_torch(array), self.epsilon, self.clip)
            if isinstance(array, Tensor):
                return out
            return out.numpy()

        return map_tree(leaf, obs, self._moments)
