"""Recipes: what a log knows of its env, and how the env is made again from it."""

import copy
import inspect
import platform
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module, metadata
from typing import Any

import gymnasium
import torch
from gymnasium.envs.registration import EnvSpec, WrapperSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from flatroll.disk.state_tree import pack, unpack
from flatroll.disk.tensor_file import DTYPES, DamagedFileError
from flatroll.layout.checks import check_key_names
from flatroll.layout.keys import NestedKey
from flatroll.rollouts.arguments import make_env
from flatroll.rollouts.env_facts import EnvFacts, read_env
from flatroll.rollouts.row_log import LoggedEnv
from flatroll.wrappers.adapt_env import adapt_env, find_stream
from flatroll.wrappers.compact import CompactObs, ObservationDelta
from flatroll.wrappers.gym_source import GymSource
from flatroll.wrappers.markers import InitTracker, RecurrentPrimer, RewardSum, StepCounter, TrajId
from flatroll.wrappers.on_jax.functional import FunctionalEnv
from flatroll.wrappers.source import DtypeView, SourceView, innermost, layers
from flatroll.wrappers.stream import VectorStream

MakeEnv = Callable[[], Any]

#: Wrappers that a log may name: a file must not choose what code runs.
_WRAPPERS = ("gymnasium.wrappers.", "minigrid.wrappers:", "flatroll.wrappers.")
#: Of these, wrappers that write files or open windows.
_NOT = ("RecordVideo", "HumanRendering", "RenderCollection")
#: Packages that register ids only once they are imported, by what the ids begin with.
_REGISTERS = {"ALE/": "ale_py", "MiniGrid-": "minigrid", "BabyAI-": "minigrid"}
#: Distributions of which an env's package is not one.
_BESIDE = {"mujoco": "mujoco", "box2d": "box2d", "ale_py": "ale-py"}

_PASS_A_FUNCTION = "pass a function that makes it, Collector(make_env, log=...)"


class CannotRemakeError(ValueError):
    """An env cannot be made again."""


@dataclass(frozen=True)
class Recipe:
    """How the env of a log is made.

    Attributes:
        kind: ``"single"``, ``"sync"`` or ``"async"`` (envs of Gymnasium's registry), ``"vector"`` (a vector env of
            it), or ``"function"``: the reader passes the function.
        num_envs: E.
        mode: value of the autoreset mode of a sync or async env; else None.
        envs: the description of each env of the registry; one for all if they are equal.
        framework: ``"numpy"`` or ``"torch"``.
        dtype: of floating observations, if they are cast.
        markers: name and arguments of each marker, innermost first.
        alone: whether each env can be made and stepped without the others.
        max_frames: ``max_frames_per_traj`` of the collector.
        info_keys: of the collector.
        name: of the env, for people.
    """

    kind: str
    num_envs: int
    mode: str | None
    envs: list[dict[str, Any]]
    framework: str
    dtype: str | None
    markers: list[tuple[str, dict[str, Any]]]
    alone: bool
    max_frames: int | None
    info_keys: list[NestedKey]
    name: str

    def to_tree(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_tree(cls, value: Any) -> "Recipe":
        """Invert `to_tree`; DamagedFileError for anything else."""
        try:
            recipe = cls(**{field.name: value[field.name] for field in fields(cls)})
            recipe._check()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedFileError(f"its description of the env cannot be read: {str(error)[:300]}") from None
        return recipe

    def _check(self) -> None:
        """Raise ValueError or TypeError if it was not made by `describe`."""
        texts = (self.kind, self.framework, self.name)
        if not all(isinstance(text, str) for text in texts) or not isinstance(self.alone, bool):
            raise TypeError("kind, framework, name or alone")
        if self.dtype is not None and not DTYPES[self.dtype].is_floating_point:
            raise ValueError(f"dtype is {self.dtype!r}")
        if self.max_frames is not None and (type(self.max_frames) is not int or self.max_frames < 1):
            raise ValueError(f"max_frames is {self.max_frames!r}")
        if self.kind not in ("single", "sync", "async", "vector", "function"):
            raise ValueError(f"unknown kind {self.kind!r}")
        if type(self.num_envs) is not int or not 1 <= self.num_envs <= 2**24:
            raise ValueError(f"num_envs is {self.num_envs!r}")
        if self.framework not in ("numpy", "torch"):
            raise ValueError(f"unknown framework {self.framework!r}")
        if self.mode is not None or self.kind in ("sync", "async"):
            AutoresetMode(self.mode)
        for name, arguments in self.markers:
            if name not in _MARKERS or not isinstance(arguments, dict):
                raise ValueError(f"unknown marker {name!r}")
        if not isinstance(self.info_keys, list):
            raise TypeError("info_keys")
        check_key_names("info_keys", self.info_keys)

        most = self.num_envs if self.alone else 1
        described = len(self.envs) in (1, most)
        if self.kind == "function":
            described = not self.envs
        if not described or (self.kind == "single" and self.num_envs != 1):
            raise ValueError(
                f"{len(self.envs)} envs of kind {self.kind} are described, it has {self.num_envs}"
            )
        if self.alone and self.kind == "vector":
            raise ValueError("a vector env whose envs can be made alone")
        for env in self.envs:
            _check_description(env, whole=self.kind == "vector")


def _check_description(env: Any, *, whole: bool) -> None:
    """Raise ValueError, KeyError or TypeError unless this describes an env, or a ``whole`` vector env."""
    if not isinstance(env, dict) or not isinstance(env["id"], str):
        raise TypeError("the description of an env")
    _check_arguments(env["kwargs"])
    if whole:
        if chosen := {"id", "num_envs", "vectorization_mode", "vector_kwargs", "wrappers"} & set(
            env["kwargs"]
        ):
            raise ValueError(f"the arguments of a vector env have {sorted(chosen)}")
        return

    steps = env["max_episode_steps"]
    if steps is not None and (type(steps) is not int or not 1 <= steps < 2**63):
        raise ValueError(f"max_episode_steps is {steps!r}")
    if not isinstance(env["order_enforce"], bool) or env["disable_env_checker"] not in (None, False, True):
        raise TypeError("order_enforce or disable_env_checker")
    for name, entry_point, arguments in env["wrappers"]:
        if not isinstance(name, str) or not isinstance(entry_point, str):
            raise TypeError("the description of a wrapper")
        _check_arguments(arguments)


def _check_arguments(arguments: Any) -> None:
    """Raise TypeError unless these are arguments by name."""
    if not isinstance(arguments, dict) or not all(isinstance(name, str) for name in arguments):
        raise TypeError("arguments that are no dict by name")


#: The markers that a recipe can hold, with their arguments.
_MARKERS: dict[str, tuple[Any, Callable[[Any], dict[str, Any]]]] = {
    "InitTracker": (InitTracker, lambda marker: {"init_key": marker.key}),
    "StepCounter": (
        StepCounter,
        lambda marker: {"max_steps": marker.max_steps, "step_count_key": marker.key},
    ),
    "TrajId": (TrajId, lambda marker: {"writer": marker.writer, "traj_key": marker.key}),
    "RewardSum": (RewardSum, lambda marker: {"out_key": marker.key}),
}
#: Markers that change no column, or only how the collector yields them.
_NO_COLUMN = (CompactObs, RecurrentPrimer)


def describe(logged: LoggedEnv) -> Recipe:
    """Return the recipe of a collector's env.

    Raises:
        CannotRemakeError: the env is not one of Gymnasium's registry, and no function makes it.
    """
    facts = logged.facts
    stream = facts.stream
    source: Any = stream.source
    dtype = None
    framework = stream.capabilities.framework

    while isinstance(source, SourceView):
        if isinstance(source, DtypeView):
            dtype = str(source.dtype).removeprefix("torch.")
        source = source.source

    if source.agents is not None:
        raise CannotRemakeError("log= cannot record games of several agents yet")
    if stream.capabilities.device.type != "cpu" and logged.make is None:
        raise CannotRemakeError(
            f"log= needs a function for an env on {stream.capabilities.device}: {_PASS_A_FUNCTION}"
        )

    markers = _describe_markers(facts)
    kind = "function"
    envs: list[dict[str, Any]] = []
    mode = None
    problem = f"{type(source.env or source).__name__} is not made by gymnasium.make or make_vec"
    parts = _parts_of(source)

    # The stack can be put around a single env if nothing but markers is in it.
    alone = parts is not None and markers is not None and stream.final_obs == "auto"
    if parts is not None and alone:
        mode = parts.mode
        try:
            envs = _describe_parts(parts)
            kind = parts.kind
        except CannotRemakeError as error:
            problem = str(error)
    elif markers is not None and stream.final_obs == "auto":
        try:
            kind, envs = _describe_whole(source)
        except CannotRemakeError as error:
            problem = str(error)
    elif markers is None:
        problem = "its stack has wrappers that a log does not know"

    if kind == "function" and logged.make is None:
        raise CannotRemakeError(
            f"log= needs an env that can be made again, and {problem}: {_PASS_A_FUNCTION}"
        )

    return Recipe(
        kind=kind,
        num_envs=facts.num_envs,
        mode=mode,
        envs=envs,
        framework=framework,
        dtype=dtype,
        markers=markers or [],
        alone=alone,
        max_frames=logged.max_frames_per_traj,
        info_keys=list(logged.info_keys),
        name=_name_of(source, envs),
    )


@dataclass(frozen=True)
class _Parts:
    """The single envs of a vector env: functions that make them, or the envs themselves."""

    kind: str
    mode: str | None
    envs: list[Any]
    make: list[MakeEnv]


def _parts_of(source: Any) -> _Parts | None:
    """Return the single envs in a source; None if it has none, or wrappers are around the vector env."""
    if type(source) is not GymSource:
        return None

    base = source.env
    if isinstance(base, SyncVectorEnv) and type(base) is not SyncVectorEnv:  # a single env, see adapt_env
        return _Parts("single", None, list(base.envs), [])
    if type(base) is SyncVectorEnv:
        return _Parts("sync", _mode_of(base), list(base.envs), list(base.env_fns))
    if type(base) is AsyncVectorEnv:
        return _Parts("async", _mode_of(base), [], list(base.env_fns))
    return None


def _mode_of(env: Any) -> str:
    return str(AutoresetMode(env.metadata["autoreset_mode"]).value)


def _describe_parts(parts: _Parts) -> list[dict[str, Any]]:
    """Return the descriptions of the single envs, one if they are equal."""
    found: list[dict[str, Any]] = []
    if parts.envs:
        found = [_describe_env(env) for env in parts.envs]
    else:
        # The envs are in other processes: make one of each kind here.
        known: dict[int, dict[str, Any]] = {}
        for make in parts.make:
            if id(make) not in known:
                env = make()
                known[id(make)] = _describe_env(env)
                env.close()
            found.append(known[id(make)])

    if all(one == found[0] for one in found):
        return found[:1]
    return found


def _describe_env(env: Any) -> dict[str, Any]:
    """Return how an env of Gymnasium's registry is made; CannotRemakeError if it is not in it."""
    spec = getattr(env, "spec", None)
    if not isinstance(spec, EnvSpec):
        name = type(getattr(env, "unwrapped", env)).__name__
        raise CannotRemakeError(f"{name} has no spec of Gymnasium's registry")

    wrappers = []
    for wrapper in spec.additional_wrappers:
        _check_wrapper(wrapper.entry_point)
        arguments = wrapper.kwargs
        if arguments is None and _takes_only_env(_load_wrapper(wrapper.entry_point)):
            arguments = {}
        if arguments is None:
            raise CannotRemakeError(f"the wrapper {wrapper.name} does not record its arguments")
        wrappers.append((wrapper.name, wrapper.entry_point, dict(arguments)))

    return _plain(
        {
            "id": spec.id,
            "kwargs": dict(spec.kwargs),
            "max_episode_steps": spec.max_episode_steps,
            "order_enforce": spec.order_enforce,
            "disable_env_checker": spec.disable_env_checker,
            "wrappers": wrappers,
        }
    )


def _describe_whole(source: Any) -> tuple[str, list[dict[str, Any]]]:
    """Return the kind and description of a vector env that is no collection of single envs."""
    env = source.env
    spec = getattr(env, "spec", None)
    unwrapped = env is not None and env is getattr(env, "unwrapped", None)
    if type(source) is GymSource and unwrapped and isinstance(spec, EnvSpec):
        kwargs = dict(spec.kwargs)
        if kwargs.pop("vectorization_mode", None) == "vector_entry_point":
            kwargs.pop("num_envs", None)
            return "vector", [_plain({"id": spec.id, "kwargs": kwargs})]
    raise CannotRemakeError(f"{type(env or source).__name__} is not made by gymnasium.make or make_vec")


def _plain(description: dict[str, Any]) -> dict[str, Any]:
    """Return a description after its way through JSON; CannotRemakeError if an argument is no plain value."""
    try:
        copied: dict[str, Any] = unpack(*pack(description))
    except (TypeError, ValueError) as error:
        raise CannotRemakeError(
            f"the arguments of {description['id']} are no plain values ({error})"
        ) from None
    return copied


def _describe_markers(facts: EnvFacts) -> list[tuple[str, dict[str, Any]]] | None:
    """Return the markers around the adapted env, innermost first; None if other wrappers are there."""
    found: list[tuple[str, dict[str, Any]]] = []
    for layer in layers(facts.env):
        if isinstance(layer, VectorStream):
            break
        if isinstance(layer, ObservationDelta):
            return None
        if isinstance(layer, _NO_COLUMN):
            continue

        known = _MARKERS.get(type(layer).__name__)
        if known is None or type(layer) is not known[0]:
            return None
        found.append((type(layer).__name__, known[1](layer)))
    return found[::-1]


def _name_of(source: Any, envs: list[dict[str, Any]]) -> str:
    if envs:
        return ", ".join(sorted({str(env["id"]) for env in envs}))
    env = source.env if source.env is not None else source
    if isinstance(env, SyncVectorEnv):
        env = env.envs[0]
    if isinstance(env, FunctionalEnv):
        return env.name
    return type(getattr(env, "unwrapped", env)).__name__


def _check_wrapper(entry_point: Any) -> None:
    """Raise CannotRemakeError for a wrapper that a log must not name."""
    allowed = (
        isinstance(entry_point, str) and entry_point.startswith(_WRAPPERS) and entry_point.count(":") == 1
    )
    if not allowed or entry_point.endswith(_NOT):
        raise CannotRemakeError(f"the wrapper {str(entry_point)[:100]!r} is not one that a log may name")


def _load_wrapper(entry_point: Any) -> type:
    """Return the class of a wrapper that a log may name."""
    _check_wrapper(entry_point)
    module, _, attribute = entry_point.partition(":")
    found = getattr(import_module(module), attribute, None)
    if not isinstance(found, type) or not issubclass(found, gymnasium.Wrapper):
        raise CannotRemakeError(f"{entry_point!r} is no wrapper of Gymnasium")
    return found


def _takes_only_env(wrapper: type) -> bool:
    """Return whether a wrapper has no argument but the env."""
    return [*inspect.signature(wrapper).parameters] == ["env"]


class EnvMaker:
    """Makes the env of a recipe: all of it, or one of its envs alone.

    Args:
        recipe: of the env.
        function: makes the env in place of the recipe; needed if its kind is ``"function"``.
        other_than: an env that the function must not return again.
        check: called with each env that was made; raises CannotRemakeError for one of other columns.
    """

    def __init__(
        self,
        recipe: Recipe,
        function: MakeEnv | None,
        other_than: object = None,
        check: Callable[[EnvFacts], None] | None = None,
    ) -> None:
        if recipe.kind == "function" and function is None:
            raise CannotRemakeError(
                f"the log's env, {recipe.name}, was made by a function that is not in the log: pass it, "
                "ReplayLog(path, create_env_fn=make_env)"
            )
        self.recipe = recipe
        self._function = function
        self._other_than = other_than
        self._check = check
        self._made: _Parts | None = None
        self._closing = ExitStack()

    def close(self) -> None:
        """Close what was made to get at single envs."""
        self._closing.close()

    def whole(self) -> EnvFacts:
        """Make the env with all its rows; the caller closes ``facts.env``."""
        recipe = self.recipe
        if self._function is not None:
            dtype = None if recipe.dtype is None else DTYPES[recipe.dtype]
            with ExitStack() as undo:
                env, _ = make_env(self._function, None, None, None, undo)
                env = adapt_env(env)
                self._check_new(env)
                self._check_number(env)
                if dtype is not None and recipe.kind == "function":
                    env = _cast(env, dtype)
                if recipe.max_frames is not None:
                    env = StepCounter(env, max_steps=recipe.max_frames)
                undo.pop_all()
            return self._facts(env)

        made: Any
        if recipe.kind == "single":
            made = _make_one(recipe.envs[0])
        elif recipe.kind in ("sync", "async"):
            functions = [partial(_make_one, self._described(i)) for i in range(recipe.num_envs)]
            kind = SyncVectorEnv if recipe.kind == "sync" else AsyncVectorEnv
            made = kind(functions, autoreset_mode=AutoresetMode(recipe.mode))
        else:
            described = recipe.envs[0]
            _check_id(described["id"])
            made = gymnasium.make_vec(
                described["id"],
                num_envs=recipe.num_envs,
                vectorization_mode="vector_entry_point",
                **described["kwargs"],
            )
        return self._facts(self._wrap(made))

    def alone(self, env: int) -> EnvFacts:
        """Make one of the envs, with the markers around it; the caller closes ``facts.env``."""
        recipe = self.recipe
        made: Any
        if self._function is None:
            made = _make_one(self._described(env))
        else:
            made = self._part_of_function(env)

        if recipe.mode is not None:
            one = made
            made = SyncVectorEnv([lambda: one], autoreset_mode=AutoresetMode(recipe.mode))
        return self._facts(self._wrap(made))

    def _part_of_function(self, env: int) -> Any:
        """Return one env of those that the function makes."""
        assert self._function is not None
        if self._made is None or self.recipe.kind == "single":
            adapted = adapt_env(self._function())
            self._check_new(adapted)
            try:
                self._check_number(adapted)
            except CannotRemakeError:
                adapted.close()
                raise
            stream = find_stream(adapted)
            assert stream is not None
            parts = _parts_of(innermost(stream.source))
            if parts is None:
                raise CannotRemakeError("create_env_fn makes another kind of env than that of the log")
            if parts.kind == "single":
                return parts.envs[0]
            self._closing.callback(adapted.close)
            self._made = parts
        made = self._made.make[env]()
        self._check_none_of(_all_in(made))
        return made

    def _check_new(self, env: Any) -> None:
        """Raise CannotRemakeError if the function has returned the env of the collector."""
        stream = find_stream(env)
        if stream is not None:
            self._check_none_of(_all_in(stream.source.env))

    def _check_number(self, env: Any) -> None:
        """Raise CannotRemakeError if the function has made another number of envs, or of another autoreset mode."""
        recipe = self.recipe
        text = f"create_env_fn must make the env that was collected, {recipe.name}, with"
        if env.num_envs != recipe.num_envs:
            raise CannotRemakeError(f"{text} num_envs={recipe.num_envs}, got num_envs={env.num_envs}")

        stream = find_stream(env)
        assert stream is not None
        parts = _parts_of(innermost(stream.source))
        if recipe.alone and parts is not None and parts.mode != recipe.mode:
            raise CannotRemakeError(f"{text} autoreset mode {recipe.mode}, got {parts.mode}")

    def _check_none_of(self, envs: list[Any]) -> None:
        """Raise CannotRemakeError if one of these is, or is in, the env of the collector."""
        others = {id(env) for env in _all_in(self._other_than)}
        if any(id(env) in others for env in envs):
            raise CannotRemakeError("create_env_fn returned the same env twice: it must make a new one")

    def _described(self, env: int) -> dict[str, Any]:
        envs = self.recipe.envs
        return envs[env] if len(envs) > 1 else envs[0]

    def _wrap(self, env: Any) -> Any:
        """Put the adapter and the markers around an env."""
        recipe = self.recipe
        dtype = None if recipe.dtype is None else DTYPES[recipe.dtype]
        stack: Any = adapt_env(env, framework=recipe.framework, dtype=dtype)
        for name, arguments in recipe.markers:
            try:
                stack = _MARKERS[name][0](stack, **arguments)
            except (TypeError, ValueError) as error:
                raise DamagedFileError(f"the log's {name} cannot be made: {str(error)[:200]}") from None
        return stack

    def _facts(self, env: Any) -> EnvFacts:
        facts = read_env(env, self.recipe.info_keys)
        if self._check is None:
            return facts
        try:
            self._check(facts)
        except CannotRemakeError:
            facts.env.close()
            raise
        return facts


def _all_in(env: Any) -> list[Any]:
    """Return an env, the single envs in it, and what is in their wrappers; empty for None."""
    if env is None:
        return []
    found = [env]
    if isinstance(env, SyncVectorEnv):
        found += env.envs
    return found + [getattr(one, "unwrapped", one) for one in found]


def _cast(env: Any, dtype: torch.dtype) -> Any:
    """Cast the observations of an env that a function made, unless it has done so itself."""
    stream = find_stream(env)
    if stream is not None and isinstance(stream.source, DtypeView):
        return env
    return adapt_env(stream.source if stream is not None else env, dtype=dtype)


def _make_one(described: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    """Make an env of Gymnasium's registry."""
    _check_id(described["id"])
    spec = copy.deepcopy(gymnasium.spec(described["id"]))
    kwargs = dict(described["kwargs"])
    if kwargs.get("render_mode") == "human":
        del kwargs["render_mode"]

    wrappers = []
    for name, entry_point, arguments in described["wrappers"]:
        _load_wrapper(entry_point)
        wrappers.append(WrapperSpec(name, entry_point, arguments))

    spec.kwargs = kwargs
    spec.max_episode_steps = described["max_episode_steps"]
    spec.order_enforce = described["order_enforce"]
    spec.disable_env_checker = described["disable_env_checker"]
    spec.additional_wrappers = tuple(wrappers)
    return gymnasium.make(spec)


def _check_id(name: str) -> None:
    """Raise CannotRemakeError unless the id is one of the registry; import the package that registers it if known."""
    if ":" in name or name.startswith("GymV2"):
        raise CannotRemakeError(f"the id {name[:100]!r} is not one that a log may name")
    if name not in gymnasium.registry:
        for start, package in _REGISTERS.items():
            if name.startswith(start):
                _import_registering(package, name)
    if name not in gymnasium.registry:
        raise CannotRemakeError(
            f"{name[:100]!r} is not in Gymnasium's registry: import the package that registers it before the log is "
            "read, or pass a function that makes the env, ReplayLog(path, create_env_fn=make_env)"
        )


def _import_registering(package: str, name: str) -> None:
    try:
        import_module(package)
    except ImportError as error:
        distribution = _BESIDE.get(package, package)
        raise ImportError(
            f"the log's env, {name[:100]}, needs {package}: pip install {distribution}"
        ) from error


def versions_here(facts: EnvFacts) -> dict[str, str]:
    """Return the versions of the packages that the rows of an env depend on."""
    names = {"flatroll", "gymnasium", "numpy", "torch"}
    found = {"python": platform.python_version(), "machine": platform.machine()}
    names.update(_packages_of(facts.stream.source.env))

    for name in sorted(names - {""}):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _packages_of(env: Any) -> Iterable[str]:
    """Return the distributions of an env's classes."""
    parts = [env]
    if isinstance(env, SyncVectorEnv):
        parts += env.envs[:1]
    if isinstance(env, FunctionalEnv):
        yield from ("jax", "jaxlib")
        parts += _held_by(env.reset) + _held_by(env.step)
    for part in parts:
        spec = getattr(part, "spec", None)
        bases = type(getattr(part, "unwrapped", part)).__mro__
        modules = [kind.__module__ for kind in bases]
        modules += [str(getattr(part, "__module__", "")), str(getattr(spec, "entry_point", ""))]
        for module in modules:
            yield _BESIDE.get(module.split(".")[0], module.split(".")[0])
            for word, distribution in _BESIDE.items():
                if word in module:
                    yield distribution


def _held_by(function: Any) -> list[Any]:
    """Return a function, and what it refers to: the env whose methods it calls."""
    held = [function, getattr(function, "__self__", None)]
    with suppress(ValueError):  # a variable without a value
        held += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return held


def differing_versions(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Describe the packages whose versions differ."""
    return [
        f"{name} {version} then, {now.get(name, 'none')} now"
        for name, version in sorted(then.items())
        if now.get(name) != version
    ]


#: What people call the fields of a recipe.
_SETTINGS = {
    "mode": "the autoreset mode",
    "envs": "the env's arguments",
    "dtype": "obs_dtype",
    "max_frames": "max_frames_per_traj",
}


def differing_settings(then: Recipe, now: Recipe) -> list[str]:
    """Describe the fields of two recipes that differ."""
    found = []
    for field in fields(Recipe):
        before = getattr(then, field.name)
        after = getattr(now, field.name)
        if before != after:
            name = _SETTINGS.get(field.name, field.name)
            found.append(f"{name} was {before!r:.200} and is {after!r:.200}")
    return found
