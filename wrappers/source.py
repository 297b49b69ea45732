"""`VectorSource`, the base class of environment adapters, `Capabilities`, what an env supports, and views of sources.

A view wraps another source: one returns a NumPy env's arrays as tensors, one casts floating observations.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from gymnasium.vector import VectorWrapper
from torch import Tensor
from typing_extensions import override

from flatroll.layout.checks import as_text
from flatroll.wrappers.arrays import ActionCheck, Array, Tree, map_tree, to_torch

#: The seed of a vector env: one number, or one per env.
Seed: TypeAlias = int | list[int | None] | None
#: The info of a reset or step.
Info: TypeAlias = dict[str, Any]
#: What a step returns: observations, rewards ``(E,)``, terminated ``(E,)``, truncated ``(E,)``, info.
Step: TypeAlias = tuple[Tree, Array, Array, Array, Info]


class EnvLike(Protocol):
    """Anything with reset and step; `as_vector_env` documents which of these it accepts."""

    @property
    def reset(self) -> Callable[..., Any]: ...

    @property
    def step(self) -> Callable[..., Any]: ...


@dataclass(frozen=True)
class Capabilities:
    """What an adapted env supports: device, framework, partial resets, seeding and more.

    ``reuses_buffers``, ``fork_safe`` and ``both_flags`` are informative; flatroll does not depend on them.

    Attributes:
        device: device of its arrays.
        framework: ``"numpy"`` or ``"torch"``.
        hides_final_obs: whether a SAME_STEP env may not return an episode's last observation.
        partial_reset: whether chosen rows can be reset alone.
        reuses_buffers: whether the env overwrites the arrays it returned, so that they are copied.
        fork_safe: whether it survives a fork (envpool hangs in a forked child).
        both_flags: whether an env may report terminated and truncated in one step (envpool reports only
            truncated then, so such an end is bootstrapped).
        seedable: whether ``reset(seed=...)`` has an effect.
        checks_range: whether the env itself refuses discrete actions outside its space.
        exact_flags: whether the env already returns reward as float32 and flags as bool, all ``(E,)``.
        whole_finals: whether final observations contain the step's observations in rows that did not end.
        overlaps: whether `VectorSource.send` can begin a step that is awaited later.
        batch_size: number of envs per step if it is not all of them (envpool in async mode).
    """

    device: torch.device
    framework: Literal["numpy", "torch"]
    hides_final_obs: bool = False
    partial_reset: bool = True
    reuses_buffers: bool = False
    fork_safe: bool = True
    both_flags: bool = True
    seedable: bool = True
    checks_range: bool = True
    exact_flags: bool = False
    whole_finals: bool = False
    overlaps: bool = False
    batch_size: int | None = None


class VectorSource(ABC):
    """Base class of the adapters: one subclass per family of vector environments (Gymnasium, envpool, torch).

    A subclass translates its env's interface: it must implement `reset` and `step`, and `final_obs` if the env resets
    ended rows in the same step and returns their last observations. The caller owns all returned arrays: copy those
    that the env overwrites. ``VectorStream(source, mode)`` turns a source into an env with the contract of
    `as_vector_env`; it checks actions, applies the boundary and autoreset rules, and calls `reset` for the ended rows
    of a DISABLED env.

    Args:
        env: the environment.
        num_envs: E, its number of rows.
        observation_space, action_space: the Gymnasium spaces of one row.
        capabilities: see `Capabilities`.

    >>> import numpy as np
    >>> from gymnasium.vector import AutoresetMode
    >>> from flatroll.wrappers import VectorStream
    >>> class Walk(VectorSource):
    ...     def __init__(self, num_envs):
    ...         box, steps = spaces.Box(-9, 9, (1,)), spaces.Discrete(2)
    ...         super().__init__(None, num_envs, box, steps, Capabilities(torch.device("cpu"), "numpy"))
    ...     def reset(self, seed, options, rows=None):
    ...         if rows is None:
    ...             self.at = np.zeros((self.num_envs, 1), np.float32)
    ...         else:
    ...             self.at[rows] = 0
    ...         return self.at.copy(), {}
    ...     def step(self, actions):
    ...         self.at[:, 0] += 2 * actions - 1
    ...         home = np.abs(self.at[:, 0]) == 2
    ...         return self.at.copy(), home, home, np.zeros_like(home), {}
    >>> env = VectorStream(Walk(2), AutoresetMode.DISABLED)
    >>> _ = env.reset(seed=0), env.step([0, 1])
    >>> obs, reward, terminated, truncated, info = env.step([0, 0])
    >>> obs.tolist(), reward, terminated, info["final_obs"].tolist()
    ([[0.0], [0.0]], array([1., 0.], dtype=float32), array([ True, False]), [[-2.0], [0.0]])
    """

    def __init__(
        self,
        env: object,
        num_envs: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        capabilities: Capabilities,
    ) -> None:
        self.env: Any = env
        #: The object whose steps and resets are counted, so that a collector notices if other code steps it.
        self.stepped: object = self if env is None else env
        self.num_envs = num_envs
        #: If each row is an agent of a game: the agent and game indices, int64 ``(E,)``; else None.
        self.agents: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None
        #: Whether the adapter itself puts the env on the device that `as_vector_env` is given.
        self.takes_device = False
        #: Whether the caller copies reward, flags and final observations before the next step, as a collector does.
        #: Then they are not copied here.
        self.may_alias = False

        self.single_observation_space = observation_space
        self.single_action_space = action_space
        self.capabilities = capabilities

    @abstractmethod
    def reset(self, seed: Seed, options: Info | None, rows: Array | None = None) -> tuple[Tree, Info]:
        """Reset all rows, or those where ``rows`` (bool ``(E,)``, in the env's framework) is True.

        Args:
            seed: an int, a list of E ints, or None to keep the random state.
            options: Gymnasium's options without ``"reset_mask"``; None for none.
            rows: mask of the rows to reset; None for all.

        Returns:
            The observations of all E rows (rows that were not reset keep theirs), and info.
        """

    @abstractmethod
    def step(self, actions: Tree) -> Step:
        """Step all sub-envs; actions ``(E, ...)`` have the action space's dtype.

        Returns:
            Observations, reward, terminated, truncated and info. Reward and flags have one entry per env; the stream
            converts them to float32 and bool ``(E,)``.
        """

    def send(self, actions: Tree) -> None:
        """Begin a step without waiting for it; the `step` that follows, with the same actions, only awaits it.

        Called only with ``Capabilities(overlaps=True)``. A reset that follows instead awaits it, too.
        """
        raise NotImplementedError(f"{type(self).__name__} declares overlaps=True, but has no send")

    def final_obs(self, info: Info, obs: Tree, ended: Array, given: Tree | None = None) -> Tree | None:
        """Return the last observations of the episodes that ended in the last step; SAME_STEP mode only.

        Called only for a SAME_STEP env. The default returns ``given``. If the env does not return final observations,
        set ``Capabilities(hides_final_obs=True)``; otherwise the first observation of the next episode is used
        instead.

        Args:
            info: the info of the step.
            obs: the observations that the step returned.
            ended: bool ``(E,)``, the rows that ended.
            given: what the user's ``final_obs=`` found, in the env's form; None: look for it.

        Returns:
            A tree like ``obs``, with meaningful rows where ``ended`` is True; None if the env hides them.
        """
        return given

    def absent(self) -> Array | None:
        """Return the rows whose agent is absent after the last reset or step; called only for a NEXT_STEP env.

        A step from such a row is not a transition, like a step in which the env only resets the row.

        Returns:
            bool ``(E,)``, not overwritten later; None (default): no row is ever absent.
        """
        return None

    def close(self) -> None:
        """Close the env, if it can be closed."""
        if hasattr(self.env, "close"):
            self.env.close()


def layers(env: object) -> list[Any]:
    """The env and everything it wraps, outermost first."""
    stack = [env]
    while isinstance(env, VectorWrapper):
        env = env.env
        stack.append(env)
    return stack


def info_dict(info: object, env: object) -> Info:
    """Return a copy of what an env returned as info; TypeError unless it is a dict."""
    if not isinstance(info, Mapping):
        name = type(getattr(env, "unwrapped", env)).__name__
        if isinstance(info, list | tuple):
            came = f"a {type(info).__name__}"
        else:
            came = as_text(info)
        raise TypeError(
            f"info must be a dict of columns, {{'name': values of all envs}}, got {came} from {name}: for a list with "
            "one dict for each env return one dict"
        )

    return dict(info)


def qualified_name(env: object) -> str:
    """Return the name of an env's class with its module, ``"gym.wrappers.time_limit.TimeLimit"``; for errors."""
    kind = type(env)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def is_from(package: str, env: object) -> bool:
    """Return whether the env's class or one of its bases is from this package."""
    return any(kind.__module__.split(".")[0] == package for kind in type(env).__mro__)


class SourceView(VectorSource):
    """Base class of sources that convert another source's arrays."""

    def __init__(
        self, source: VectorSource, observation_space: spaces.Space[Any], capabilities: Capabilities
    ) -> None:
        #: The source inside.
        self.source = source
        action_space = source.single_action_space
        super().__init__(source.env, source.num_envs, observation_space, action_space, capabilities)
        self.stepped = source.stepped
        self.agents = source.agents

    @override
    def absent(self) -> Array | None:
        return self.source.absent()

    @override
    def send(self, actions: Tree) -> None:
        self.source.send(actions)

    @override
    def close(self) -> None:
        self.source.close()


def innermost(source: VectorSource) -> VectorSource:
    """Return the source that steps the env, inside of the views of it."""
    while isinstance(source, SourceView):
        source = source.source
    return source


class TorchView(SourceView):
    """Adapts a NumPy env so that its arrays are returned as tensors on ``device``."""

    def __init__(self, source: VectorSource, device: torch.device | None) -> None:
        self._device = device or torch.device("cpu")
        space = source.single_action_space
        native = source.capabilities

        self._check_actions = ActionCheck(
            space, source.num_envs, "numpy", check_range=not native.checks_range
        )
        capabilities = replace(native, framework="torch", device=self._device)
        super().__init__(source, source.single_observation_space, capabilities)

    @override
    def reset(self, seed: Seed, options: Info | None, rows: Array | None = None) -> tuple[Tree, Info]:
        mask = None if rows is None else rows.cpu().numpy()
        obs, info = self.source.reset(seed, options, mask)
        return self._tensors(obs), info

    @override
    def step(self, actions: Tree) -> Step:
        obs, reward, terminated, truncated, info = self.source.step(self._check_actions(actions))
        terminated = np.asarray(terminated)
        truncated = np.asarray(truncated)
        self._seen = obs, terminated | truncated  # in NumPy, as the source's final_obs expects
        flags = (self._tensors(np.asarray(x)) for x in (reward, terminated, truncated))
        return self._tensors(obs), *flags, info

    @override
    def send(self, actions: Tree) -> None:
        self.source.send(self._check_actions(actions))

    @override
    def final_obs(self, info: Info, obs: Tree, ended: Array, given: Tree | None = None) -> Tree | None:
        shown, done = self._seen
        # Not read if no episode ended: any tree of the right shapes will do.
        final = shown
        if given is not None or done.any():
            final = self.source.final_obs(info, shown, done, given)

        if final is None:
            return None
        return self._tensors(final)

    @override
    def absent(self) -> Array | None:
        rows = self.source.absent()
        if rows is None:
            return None
        return self._tensors(rows)

    def _tensors(self, tree: Tree) -> Tree:
        return map_tree(lambda leaf: to_torch(leaf, self._device), tree)


class DtypeView(SourceView):
    """Adapts an env so that its floating observations have ``dtype``; all others stay as they are.

    Attributes:
        dtype: of floating observations, float16, float32 or float64.
    """

    def __init__(self, source: VectorSource, dtype: torch.dtype) -> None:
        if not isinstance(dtype, torch.dtype) or dtype not in (torch.float16, torch.float32, torch.float64):
            raise ValueError(
                "dtype (obs_dtype of a collector) must be torch.float16, torch.float32 or torch.float64, got "
                f"{as_text(dtype)}"
            )
        self.dtype = dtype
        self._np_dtype = np.dtype(str(dtype).removeprefix("torch."))

        space = _cast_space(source.single_observation_space, self._np_dtype)
        super().__init__(source, space, source.capabilities)

    @override
    def reset(self, seed: Seed, options: Info | None, rows: Array | None = None) -> tuple[Tree, Info]:
        obs, info = self.source.reset(seed, options, rows)
        return map_tree(self._cast, obs), info

    @override
    def step(self, actions: Tree) -> Step:
        self._seen, reward, terminated, truncated, info = self.source.step(actions)
        return map_tree(self._cast, self._seen), reward, terminated, truncated, info

    @override
    def final_obs(self, info: Info, obs: Tree, ended: Array, given: Tree | None = None) -> Tree | None:
        # The source compares them with its own output.
        final = self.source.final_obs(info, self._seen, ended, given)
        if final is None:
            return None
        return map_tree(self._cast, final)

    def _cast(self, leaf: Array) -> Array:
        if isinstance(leaf, Tensor):
            if leaf.is_floating_point():
                return leaf.to(self.dtype)
            return leaf

        leaf = np.asarray(leaf)
        if leaf.dtype.kind == "f":
            return leaf.astype(self._np_dtype, copy=False)
        return leaf


def _cast_space(space: spaces.Space[Any], dtype: np.dtype[Any]) -> spaces.Space[Any]:
    """Return the observation space after the cast."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _cast_space(child, dtype) for key, child in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple(tuple(_cast_space(child, dtype) for child in space.spaces))

    if not isinstance(space, spaces.Box) or space.dtype.kind != "f" or space.dtype == dtype:
        return space
    with np.errstate(over="ignore"):  # a bound beyond the dtype's range becomes infinite
        return spaces.Box(space.low.astype(dtype), space.high.astype(dtype), dtype=dtype.type)
