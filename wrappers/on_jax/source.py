"""The adapter for environments of pure JAX functions: one compiled call steps and resets all of them."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch.utils.dlpack import from_dlpack
from typing_extensions import override

from flatroll.layout.checks import check_whole_number
from flatroll.layout.spaces import column_name
from flatroll.wrappers.arrays import Array, Tree, map_tree
from flatroll.wrappers.families import Family, Request
from flatroll.wrappers.on_jax.functional import FunctionalEnv, Pytree, as_functional, find_family, gym_space
from flatroll.wrappers.source import Capabilities, Info, Seed, Step, VectorSource

#: Signatures of an env's two functions, for errors.
_SIGNATURES = {
    "reset": "reset(key) -> (observation, state)",
    "step": "step(key, state, action) -> (observation, state, reward, terminated, truncated, info)",
}

#: Below this size in bytes a copy is faster than DLPack, whose Python code takes 4 µs to export and 90 µs to import.
_SMALL = 1 << 17
_SMALL_ACTIONS = 1 << 20

#: A reset of up to this many operations is faster than a branch around it.
_CHEAP = 100


class JaxSource(VectorSource):
    """E copies of a `FunctionalEnv` in SAME_STEP mode with true last observations; states stay on the device.

    Observations, rewards and flags are exported by DLPack and share memory with JAX's arrays; small ones on the CPU
    are copied. Only a masked reset reads that memory again, for the rows that it does not reset. Entries of ``info``
    stay JAX arrays.
    """

    def __init__(self, env: FunctionalEnv, num_envs: int, device: torch.device | None = None) -> None:
        import jax  # pyright: ignore[reportMissingImports]

        self._jax = jax
        self._device = _find_device(jax, device)
        on_cpu = self._device.platform == "cpu"
        self._on_cpu = on_cpu
        #: Converts a JAX array to the caller's.
        self._out: Callable[[Any], Array] = _as_numpy
        framework: Literal["numpy", "torch"] = "numpy"
        where = torch.device("cpu")
        if not on_cpu:
            self._out = from_dlpack
            framework = "torch"
            where = torch.device("cuda", self._device.local_hardware_id)

        action_space = gym_space(env.action_space)
        with jax.default_device(self._device):
            reset, step, observation_space = _check_functions(env, action_space)
        self._start, self._step, self._restart = _compiled(
            reset, step, check_whole_number("num_envs", num_envs), env.max_episode_steps
        )

        self._key: Any = None
        self._state: Pytree = None
        self._obs: Pytree = None  # as last returned
        self._final: Pytree = None  # final observations of the last step

        can = Capabilities(where, framework, exact_flags=True, whole_finals=True, checks_range=False)
        super().__init__(env, num_envs, observation_space, action_space, can)
        self.takes_device = True
        self.stepped = self  # the source itself: its functions keep no state

    @override
    def reset(self, seed: Seed, options: Info | None, rows: Array | None = None) -> tuple[Tree, Info]:
        jax = self._jax
        if rows is not None:
            if isinstance(rows, np.ndarray):
                mask = rows
            else:
                mask = jax.dlpack.from_dlpack(rows)
            self._key, self._state, self._obs = self._restart(self._key, self._state, self._obs, mask)
        else:
            if isinstance(seed, list):
                keys = jax.numpy.stack([jax.random.PRNGKey(_seed_or_random(one)) for one in seed])
                self._key = jax.random.fold_in(keys[0], self.num_envs)
            else:
                if seed is not None or self._key is None:
                    self._key = jax.random.PRNGKey(_seed_or_random(seed))
                self._key, key = jax.random.split(self._key)
                keys = jax.random.split(key, self.num_envs)

            # A first state that does not depend on the key would have no device, and the step would compile twice.
            obs, state = self._start(jax.device_put(keys, self._device))
            self._key, self._obs, self._state = jax.device_put((self._key, obs, state), self._device)

        return map_tree(self._out, self._obs), {}

    @override
    def step(self, actions: Tree) -> Step:
        self._key, self._state, self._obs, self._final, reward, flags, info = self._step(
            self._key, self._state, map_tree(self._take, actions)
        )

        # The caller copies these arrays, so a read-only view is enough and much faster.
        show = np.asarray if self.may_alias and self._on_cpu else self._out
        terminated, truncated = show(flags)
        return map_tree(self._out, self._obs), show(reward), terminated, truncated, info

    @override
    def final_obs(self, info: Info, obs: Tree, ended: Array, given: Tree | None = None) -> Tree | None:
        if given is not None:
            return given
        show = np.asarray if self.may_alias and self._on_cpu else self._out
        return map_tree(show, self._final)

    def _take(self, actions: Array) -> Any:
        """Convert the actions for a compiled function."""
        actions = _narrow(actions)
        if isinstance(actions, np.ndarray) and actions.nbytes < _SMALL_ACTIONS:
            return actions
        return self._jax.dlpack.from_dlpack(actions)

    @override
    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def _seed_or_random(seed: int | None) -> int:
    """Return the seed, or a random one for None."""
    if seed is None:
        return int.from_bytes(os.urandom(4))
    return seed


def _compiled(
    reset: Callable[[Any], tuple[Pytree, Pytree]],
    step: Callable[[Any, Pytree, Any], tuple[Any, ...]],
    num_envs: int,
    limit: int | None,  # maximum steps per episode
) -> tuple[Callable[..., Any], ...]:
    """Compile the source's functions: a full reset, a step and a masked reset."""
    import jax  # pyright: ignore[reportMissingImports]
    from jax import numpy as jnp  # pyright: ignore[reportMissingImports]

    # Each state is paired with its episode's step count. PyTree leaves get fixed dtypes, so that the states of resets
    # and of steps have one type and compile once.
    def start(keys: Any) -> tuple[Pytree, Pytree]:
        obs, state = jax.vmap(reset)(keys)
        return obs, (state, jnp.zeros(num_envs, jnp.int32))

    first_keys = jax.random.split(jax.random.PRNGKey(0), num_envs)
    # A few operations without a loop are faster than the branch around them.
    is_cheap = _count_operations(jax.make_jaxpr(start)(first_keys).jaxpr) <= _CHEAP

    def restart(key: Any, state: Pytree, obs: Pytree, mask: Any) -> tuple[Pytree, Pytree]:
        """Replace states and observations where ``mask`` is True; an expensive reset runs only if any is."""

        def draw() -> tuple[Pytree, Pytree]:
            first, fresh = start(jax.random.split(key, num_envs))

            def put(new: Any, old: Any) -> Any:
                return jnp.where(mask.reshape(num_envs, *(1,) * (new.ndim - 1)), new, old)

            return jax.tree.map(put, fresh, state), jax.tree.map(put, first, obs)

        if is_cheap:
            return draw()
        changed: tuple[Pytree, Pytree] = jax.lax.cond(mask.any(), draw, lambda: (state, obs))
        return changed

    def step_all(key: Any, state: Pytree, actions: Pytree) -> tuple[Any, ...]:
        key, steps, resets = jax.random.split(key, 3)
        inner, elapsed = state
        obs, inner, reward, terminated, truncated, info = jax.vmap(step)(
            jax.random.split(steps, num_envs), inner, actions
        )

        elapsed += 1
        if limit is not None:
            truncated |= elapsed >= limit
        ended = terminated | truncated
        state, shown = restart(resets, (inner, elapsed), obs, ended)

        if info:  # entries of an ended row belong to the step that ended it; its new episode has none yet

            def clear(leaf: Any) -> Any:
                return jnp.where(ended.reshape(num_envs, *(1,) * (leaf.ndim - 1)), jnp.zeros_like(leaf), leaf)

            info = {**jax.tree.map(clear, info), "final_info": info}

        return key, state, shown, obs, reward, jnp.stack([terminated, truncated]), info

    def restart_rows(key: Any, state: Pytree, obs: Pytree, mask: Any) -> tuple[Any, Pytree, Pytree]:
        key, resets = jax.random.split(key)
        return key, *restart(resets, state, obs, mask)

    return jax.jit(start), jax.jit(step_all), jax.jit(restart_rows)


def _count_operations(jaxpr: Any) -> float:
    """Count the operations of a function and of those it calls; infinite if there is a loop."""
    count = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("while", "scan"):
            return math.inf

        parts = [getattr(part, "jaxpr", part) for part in equation.params.values()]
        count += 1 + sum(_count_operations(part) for part in parts if hasattr(part, "eqns"))
    return count


def _check_functions(
    env: FunctionalEnv, action_space: spaces.Space[Any]
) -> tuple[Callable[..., Any], Callable[..., Any], spaces.Space[Any]]:
    """Return the env's functions with plain observations and exact dtypes, and the observation space.

    Raises:
        TypeError: a function is not pure or returns the wrong structure.
    """
    import jax  # pyright: ignore[reportMissingImports]
    from jax import numpy as jnp  # pyright: ignore[reportMissingImports]

    key = jax.random.PRNGKey(0)
    action = map_tree(lambda leaf: _narrow(np.asarray(leaf)), action_space.sample())
    first, before = _trace(env, "reset", 2, key)
    last, after, reward, terminated, truncated, info = _trace(env, "step", 6, key, before, action)
    _same_shapes(env, "state", before, after)
    _same_shapes(env, "observation", first, last)

    for name, value in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
        if getattr(value, "shape", None) != ():
            raise TypeError(
                f"{name} of {env.name} must be one number for each env, got {value}: sum or weigh the parts in a "
                "FunctionalEnv of your own"
            )
    if not isinstance(info, Mapping):
        raise TypeError(f"info of {env.name} must be a dict, got {type(info).__name__}")

    space = _make_space(_plain(first))
    if env.observation_space is not None and _leaves(space) != _leaves(env.observation_space):
        raise TypeError(
            f"observation_space of {env.name} must have the shapes and dtypes of its observations, {space}, got "
            f"{env.observation_space}"
        )

    def exact(tree: Pytree, like: Pytree) -> Pytree:
        """Cast leaves to the dtypes of ``like``: the weak dtype of a Python number would change in the next step."""

        def convert(leaf: Any, to: Any) -> Any:
            if jnp.issubdtype(to.dtype, jax.dtypes.extended):  # a key
                return leaf
            return jax.lax.convert_element_type(leaf, to.dtype)

        return jax.tree.map(convert, tree, like)

    def reset(key: Any) -> tuple[Pytree, Pytree]:
        obs, state = env.reset(key)
        return exact(_plain(obs), _plain(last)), exact(state, after)

    def step(key: Any, state: Pytree, action: Any) -> tuple[Any, ...]:
        obs, state, reward, terminated, truncated, info = env.step(key, state, action)
        numbers = (
            jnp.asarray(reward, jnp.float32),
            jnp.asarray(terminated, bool),
            jnp.asarray(truncated, bool),
        )
        return exact(_plain(obs), _plain(last)), exact(state, after), *numbers, dict(info)

    return reset, step, env.observation_space or space


def _trace(env: FunctionalEnv, name: str, length: int, *args: Any) -> tuple[Any, ...]:
    """Return the shapes and dtypes that a function of the env returns."""
    import jax  # pyright: ignore[reportMissingImports]

    must = f"{name} of {env.name} must be a pure JAX function, {_SIGNATURES[name]}"
    function: Callable[..., Any] = getattr(env, name)
    # Simulators' functions are assumed pure.
    own = getattr(function, "__module__", "") != FunctionalEnv.__module__
    keeps: dict[str, Any] = {}
    if own:
        keeps = getattr(getattr(function, "__self__", None), "__dict__", {})
    kept = dict(keeps)

    try:
        result = jax.eval_shape(lambda *given: function(*given), *args)
        changed = [key for key, value in kept.items() if keeps.get(key) is not value]
        if own and not changed:
            one, other = (jax.make_jaxpr(lambda *given: function(*given))(*args) for _ in range(2))
            same = str(one) == str(other) and all(map(np.array_equal, one.consts, other.consts))
            if not same:
                changed = ["result"]
    except (TypeError, jax.errors.JAXIndexError) as error:
        first_line = (str(error).splitlines() or [""])[0]
        came = f"{must}, and tracing it raised {type(error).__name__}: {first_line}"
        # JAX's own errors: the function needs the value of a traced array. Another TypeError may be anything.
        if isinstance(error, jax.errors.JAXTypeError | jax.errors.JAXIndexError):
            came += "\nWrite it with jax.numpy, and jax.lax.cond or jnp.where in place of if"
        raise TypeError(came) from error

    if changed:
        raise TypeError(
            f"{must}, got one whose {changed[0]} changes with each call: keep what changes in the state, and draw "
            "random numbers from the key"
        )

    if not isinstance(result, tuple) or len(result) != length:
        came = type(result).__name__
        if isinstance(result, tuple):
            came = f"{len(result)} values"
        raise TypeError(f"{must}, got {came}")

    return result


def _same_shapes(env: FunctionalEnv, what: str, before: Pytree, after: Pytree) -> None:
    """Raise TypeError unless step and reset return the same tree and shapes, with compatible dtypes."""
    import jax  # pyright: ignore[reportMissingImports]

    wanted, came = (
        {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (before, after)
    )
    if wanted != came or jax.tree.structure(before) != jax.tree.structure(after):
        old: Any = wanted
        new: Any = came
        where = ""
        differing = [path for path in wanted | came if wanted.get(path) != came.get(path)]
        if differing:
            path = differing[0]
            old = wanted.get(path, "none")
            new = came.get(path, "none")
            if path:
                where = f" at {path}"
        raise TypeError(
            f"step of {env.name} must return a {what} of the structure and shapes that reset returns, "
            f"{old}{where}, got {new}"
        )

    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if (
            old.dtype != new.dtype
            and not old.weak_type
            and jax.numpy.promote_types(old.dtype, new.dtype) != new.dtype
        ):
            raise TypeError(
                f"step of {env.name} must return a {what} of the dtypes that reset returns, {old.dtype}, "
                f"got {new.dtype}: cast it, .astype(...)"
            )


def _plain(obs: Pytree, root: bool = True) -> Tree:
    """Convert mappings, named tuples and dataclasses to dicts, lists to tuples; rename ``step_count``."""
    if is_dataclass(obs):
        obs = {field.name: getattr(obs, field.name) for field in fields(obs)}
    elif hasattr(obs, "_asdict"):
        obs = obs._asdict()
    if isinstance(obs, Mapping):
        if root:  # the names become columns, some of which are reserved
            obs = {column_name(key): value for key, value in obs.items()}
        return {key: _plain(value, root=False) for key, value in obs.items()}

    if isinstance(obs, tuple | list):
        return tuple(_plain(value, root=False) for value in obs)
    return obs


def _make_space(tree: Tree) -> spaces.Space[Any]:
    """Return the unbounded space of a tree of shapes and dtypes."""
    if isinstance(tree, dict):
        return spaces.Dict({key: _make_space(value) for key, value in tree.items()})
    if isinstance(tree, tuple):
        return spaces.Tuple([_make_space(value) for value in tree])

    dtype: np.dtype[Any] = np.dtype(tree.dtype)
    low: float = -np.inf
    high: float = np.inf
    if dtype.kind == "b":
        low = 0.0
        high = 1.0
    elif dtype.kind in "iu":
        low = np.iinfo(dtype).min
        high = np.iinfo(dtype).max
    return spaces.Box(low, high, tree.shape, dtype.type)


def _leaves(space: spaces.Space[Any]) -> Any:
    """Return the shapes and dtypes of a space, nested as the space is."""
    if isinstance(space, spaces.Dict):
        return {key: _leaves(part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map(_leaves, space.spaces))
    return space.shape, space.dtype


def _find_device(jax: Any, device: torch.device | None) -> Any:
    """Return the JAX device for a torch device; JAX's default for None."""
    if device is None:
        found = jax.numpy.zeros(()).device
    else:
        platform = "cpu" if device.type == "cpu" else "gpu"
        found = jax.devices(platform)[device.index or 0]

    if found.platform not in ("cpu", "gpu"):
        raise ValueError(
            f"torch cannot read arrays on JAX's device {found}: pass as_vector_env(env, device='cpu')"
        )
    return found


def _as_numpy(array: Any) -> Array:
    """Convert a JAX array on the CPU to a writable NumPy array: the same memory, or a copy where that is faster."""
    view: Array = np.asarray(array)  # read-only; its nbytes is much faster than the JAX array's
    if view.nbytes < _SMALL:
        return view.copy()
    return from_dlpack(array.__dlpack__()).numpy()


def _narrow(array: Array) -> Array:
    """Cast int64 to int32, JAX's integer type; keep other dtypes."""
    if isinstance(array, torch.Tensor):
        if array.dtype is torch.int64:
            return array.int()
        return array
    if array.dtype == np.int64:
        return array.astype(np.int32)
    return array


def _functional_env(request: Request) -> FunctionalEnv | None:
    """The env as pure functions, if it is one of JAX."""
    if isinstance(request.env, FunctionalEnv):
        return request.env
    if find_family(request.env):
        return as_functional(request.env)
    return None


def _adapt(request: Request, env: FunctionalEnv) -> tuple[VectorSource, AutoresetMode]:
    mode = request.mode
    if mode not in (None, AutoresetMode.SAME_STEP):
        raise ValueError(
            f"autoreset_mode={mode.value!r} is not possible here: functional JAX envs are always 'SameStep'"
        )

    count = getattr(request.env, "num_envs", request.num_envs)
    if count is None:
        raise TypeError(
            f"num_envs is needed: {env.name} is a single env made of pure functions, which must be "
            "batched: call as_vector_env(env, num_envs=...) before you pass it to a collector or wrapper"
        )
    return JaxSource(env, count, request.device), AutoresetMode.SAME_STEP


FAMILY = Family(name="pure functions in JAX", recognises=_functional_env, adapt=_adapt)
