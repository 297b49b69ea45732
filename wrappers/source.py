"""`VectorSource`, the base class of environment adapters, `Capabilities`, what an env supports, and views of sources.

A view is a source around a source: one gives a NumPy env's arrays as tensors, one its floating observations in another
dtype.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from gymnasium.vector import VectorWrapper
from torch import Tensor
from typing_extensions import override

from flatroll.wrappers.arrays import ActionCheck, Array, Tree, map_tree, to_torch

#: What the envs of a vector env can be seeded with: one number for all, or one for each.
Seed: TypeAlias = int | list[int | None] | None
#: Further facts of a reset or step, by name.
Info: TypeAlias = dict[str, Any]
#: What a step returns: observations, rewards ``(E,)``, terminated ``(E,)``, truncated ``(E,)``, info.
Step: TypeAlias = tuple[Tree, Array, Array, Array, Info]


class EnvLike(Protocol):
    """Anything that can be reset and stepped; `as_vector_env` says which of these it takes."""

    @property
    def reset(self) -> Callable[..., Any]: ...

    @property
    def step(self) -> Callable[..., Any]: ...


@dataclass(frozen=True)
class Capabilities:
    """What an adapted env supports: device, framework, partial resets, seeding and more.

    ``reuses_buffers``, ``fork_safe`` and ``both_flags`` are for you to read; nothing here depends on them.

    Attributes:
        device: where its arrays live.
        framework: ``"numpy"`` or ``"torch"``.
        hides_final_obs: whether a SAME_STEP env may keep the last observation of an episode to itself.
        partial_reset: whether chosen rows can be reset alone.
        reuses_buffers: whether its arrays had to be copied because the env writes into them again.
        fork_safe: whether it survives a fork (envpool hangs in a forked child).
        both_flags: whether an env may report terminated and truncated in one step (envpool reports only
            truncated then, so such an end is bootstrapped).
        seedable: whether ``reset(seed=...)`` has an effect.
        checks_range: whether the env itself refuses discrete actions outside its space.
        exact_flags: whether reward is float32 and flags are bool, all ``(E,)``, as they come.
        whole_finals: whether final observations hold, in the rows that did not end, the observations of the step.
        overlaps: whether a step can be begun with `VectorSource.send` and awaited later.
        batch_size: how many envs a step takes actions for and returns, if not all (envpool in async mode).
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
    """Base of the adapters: one subclass for each family of vector environments (Gymnasium, envpool, torch).

    A subclass speaks its env's own dialect: it must implement `reset` and `step`, and `final_obs` if the env resets
    ended rows in the same step and shows their last observations. All arrays it returns belong to the caller: an
    array that the env writes into again is copied here. ``VectorStream(source, mode)`` makes of it an env under the
    contract of `as_vector_env`; it checks the actions, keeps to the one rule for boundaries and autoreset, and calls
    `reset` for the ended rows of a DISABLED env.

    Args:
        env: the environment.
        num_envs: E, its number of rows.
        observation_space, action_space: the Gymnasium spaces of one row.
        capabilities: what it can do.

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
        #: What else a caller may step or reset: then the rows of a collector that goes on would be false.
        self.stepped: object = self if env is None else env
        self.num_envs = num_envs
        #: Where each row is an agent of a game: the numbers of its agent and of its game, int64 ``(E,)``; else None.
        self.agents: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None
        #: Whether the caller of a step copies its reward, flags and final observations before the next one, as a
        #: collector does. Then they need not be copied here.
        self.lends = False
        self.single_observation_space = observation_space
        self.single_action_space = action_space
        self.capabilities = capabilities

    @abstractmethod
    def reset(self, seed: Seed, options: Info | None, rows: Array | None = None) -> tuple[Tree, Info]:
        """Reset all rows, or those where ``rows`` (bool ``(E,)``, in the env's framework) is True.

        Args:
            seed: an int, a list of E of them, or None: go on with the random numbers.
            options: as Gymnasium's, without ``"reset_mask"``; None for none.
            rows: which ones; None for all.

        Returns:
            The observations of all E rows (those not reset show what they showed before), and info.
        """

    @abstractmethod
    def step(self, actions: Tree) -> Step:
        """Step all sub-envs; actions ``(E, ...)`` have the action space's dtype.

        Returns:
            Observations, reward, terminated, truncated and info. Reward and flags have one entry for each env; the
            stream makes them float32 and bool ``(E,)``.
        """

    def send(self, actions: Tree) -> None:
        """Begin a step without waiting for it; the `step` that follows, with the same actions, only awaits it.

        Only asked of a source with ``Capabilities(overlaps=True)``. A reset that comes instead awaits it, too.
        """
        raise NotImplementedError(f"{type(self).__name__} says overlaps=True, and has no send")

    def final_obs(self, info: Info, obs: Tree, ended: Array, given: Tree | None = None) -> Tree | None:
        """Return the last observations of the episodes that ended in the last step; SAME_STEP mode only.

        Only asked of a SAME_STEP env. The default: ``given``, or else none is shown: then set
        ``Capabilities(hides_final_obs=True)``, or the first observation of the next episode is taken for it.

        Args:
            info: the info of the step.
            obs: the observations that the step returned.
            ended: bool ``(E,)``, the rows that ended.
            given: what the user's ``final_obs=`` has found, in the env's dialect; None: look for it.

        Returns:
            A tree like ``obs``, its rows meaningful where ``ended`` is True; None where the env hides them.
        """
        return given

    def absent(self) -> Array | None:
        """Return the rows in which there is nobody after the last reset or step; only asked of a NEXT_STEP env.

        A step from such a row is no transition, like one on which the env only resets the row.

        Returns:
            bool ``(E,)``, not written into again; None: somebody is in every row, always. The default.
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


def is_from(package: str, env: object) -> bool:
    """Whether the env's class or a base of it is of this package."""
    return any(kind.__module__.split(".")[0] == package for kind in type(env).__mro__)


class SourceView(VectorSource):
    """Base of sources that show another source's env in another form."""

    def __init__(
        self, source: VectorSource, observation_space: spaces.Space[Any], capabilities: Capabilities
    ) -> None:
        #: The source inside.
        self.source = source
        action_space = source.single_action_space
        super().__init__(source.env, source.num_envs, observation_space, action_space, capabilities)
        self.stepped, self.agents = source.stepped, source.agents

    @override
    def absent(self) -> Array | None:
        return self.source.absent()

    @override
    def send(self, actions: Tree) -> None:
        self.source.send(actions)

    @override
    def close(self) -> None:
        self.source.close()


class TorchView(SourceView):
    """Adapts a NumPy env so that its arrays are returned as tensors on ``device``."""

    def __init__(self, source: VectorSource, device: torch.device | None) -> None:
        self._device = device or torch.device("cpu")
        space, native = source.single_action_space, source.capabilities
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
        terminated, truncated = np.asarray(terminated), np.asarray(truncated)
        self._seen = obs, terminated | truncated  # in NumPy, as the source's final_obs wants them
        flags = (self._tensors(np.asarray(x)) for x in (reward, terminated, truncated))
        return self._tensors(obs), *flags, info

    @override
    def send(self, actions: Tree) -> None:
        self.source.send(self._check_actions(actions))

    @override
    def final_obs(self, info: Info, obs: Tree, ended: Array, given: Tree | None = None) -> Tree | None:
        shown, done = self._seen
        # Where no episode ended nobody reads them: any tree of the right shapes will do.
        needed = given is not None or done.any()
        final = self.source.final_obs(info, shown, done, given) if needed else shown
        return None if final is None else self._tensors(final)

    @override
    def absent(self) -> Array | None:
        rows = self.source.absent()
        return None if rows is None else self._tensors(rows)

    def _tensors(self, tree: Tree) -> Tree:
        return map_tree(lambda leaf: to_torch(leaf, self._device), tree)


class DtypeView(SourceView):
    """Adapts an env so that its floating observations have ``dtype``; all others stay as they are."""

    def __init__(self, source: VectorSource, dtype: torch.dtype) -> None:
        if dtype not in (torch.float16, torch.float32, torch.float64):
            raise ValueError(
                f"dtype must be torch.float16, torch.float32 or torch.float64 (of floating observations), got {dtype!r}"
            )
        self._dtype = dtype
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
        # The source compares them with what it returned itself.
        final = self.source.final_obs(info, self._seen, ended, given)
        return None if final is None else map_tree(self._cast, final)

    def _cast(self, leaf: Array) -> Array:
        if isinstance(leaf, Tensor):
            return leaf.to(self._dtype) if leaf.is_floating_point() else leaf
        leaf = np.asarray(leaf)
        return leaf.astype(self._np_dtype, copy=False) if leaf.dtype.kind == "f" else leaf


def _cast_space(space: spaces.Space[Any], dtype: np.dtype[Any]) -> spaces.Space[Any]:
    """The space of the observations after the cast."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _cast_space(child, dtype) for key, child in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple(tuple(_cast_space(child, dtype) for child in space.spaces))
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f" or space.dtype == dtype:
        return space
    with np.errstate(over="ignore"):  # a bound beyond the dtype's range is none: infinite
        return spaces.Box(space.low.astype(dtype), space.high.astype(dtype), dtype=dtype.type)
