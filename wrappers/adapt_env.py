"""Chooses the adapter for an environment, or raises an error if none fits."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from inspect import getattr_static
from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from gymnasium.vector import (
    AsyncVectorEnv,
    AutoresetMode,
    SyncVectorEnv,
    VectorEnv,
    VectorObservationWrapper,
    VectorWrapper,
)
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker

from flatroll.layout.checks import (
    as_text,
    check_choice,
    check_device,
    check_usable_device,
    check_whole_number,
)
from flatroll.wrappers.envpool_source import pool_source
from flatroll.wrappers.families import Family, Request, adapt_by, adapt_registered
from flatroll.wrappers.gym_source import GymSource
from flatroll.wrappers.source import (
    DtypeView,
    EnvLike,
    TorchView,
    VectorSource,
    is_from,
    layers,
    qualified_name,
)
from flatroll.wrappers.stream import ADAPTED, FinalObs, VectorStream
from flatroll.wrappers.torch_source import TorchSource


def adapt_env(
    env: EnvLike,
    num_envs: int | None = None,
    device: torch.device | str | None = None,
    framework: str | None = None,
    autoreset_mode: AutoresetMode | str | None = None,
    final_obs: FinalObs = "auto",
    own_buffers: bool | str = "auto",
    dtype: torch.dtype | None = None,
) -> VectorEnv[Any, Any, Any]:
    """Adapt the env to a `VectorStream`, unless it is one already; arguments: see `as_vector_env`."""
    check_choice("own_buffers", own_buffers, ("auto", True, False))
    if num_envs is not None:
        check_whole_number("num_envs", num_envs)

    adapted: VectorEnv[Any, Any, Any]
    if isinstance(env, VectorEnv) and find_stream(env) is not None:
        if (device, framework, autoreset_mode, final_obs, own_buffers) != (None, None, None, "auto", "auto"):
            raise ValueError(
                "env is adapted already, so device, framework, autoreset_mode, final_obs and own_buffers have no "
                "effect here: pass them where it is adapted first, as_vector_env(bare_env, ...)"
            )
        if dtype is not None:
            _refuse_late_dtype(env, dtype)
        adapted = env
    else:
        where = None if device is None else check_device("device", device)
        request = Request(
            env=env,
            num_envs=num_envs,
            device=where,
            mode=_parse_mode(autoreset_mode),
            own_buffers=own_buffers,
        )
        source, mode = _choose_source(request)

        native = source.capabilities.framework
        if device is not None and native == "numpy" and framework != "torch" and not source.takes_device:
            raise ValueError(
                f"device={str(device)!r} is for tensors, and {type(env).__name__} returns NumPy arrays: add "
                "framework='torch', or pass the device to the collector's policy_device or storing_device"
            )

        if framework == "torch" and native == "numpy":
            if where is not None:
                where = check_usable_device("device", where)
            source = TorchView(source, where)
        elif framework not in (None, native):
            raise ValueError(
                f"framework={framework!r} is not possible here: {type(env).__name__} uses {native}"
            )
        if dtype is not None:
            source = DtypeView(source, dtype)
        adapted = VectorStream(source, mode, final_obs=final_obs)

    if num_envs is not None and num_envs != adapted.num_envs:
        raise ValueError(f"num_envs={num_envs} was expected, but the env has {adapted.num_envs}")
    return adapted


def _refuse_late_dtype(env: VectorEnv[Any, Any, Any], dtype: torch.dtype) -> None:
    """Raise ValueError if an env that is adapted already returns floats of another dtype."""
    others = _float_dtypes(env.single_observation_space) - {str(dtype)[6:]}
    if others:
        raise ValueError(
            f"dtype={dtype} cannot be set here: env is adapted already, and its observations are "
            f"{sorted(others)}. Pass it where the env is adapted first, as_vector_env(bare_env, "
            f"dtype={dtype})"
        )


def find_stream(env: object) -> VectorStream | None:
    """Return the `VectorStream` inside a stack of wrappers, or None."""
    return next((layer for layer in layers(env) if isinstance(layer, VectorStream)), None)


def reset_in_same_step(env: VectorEnv[Any, Any, Any], max_steps: int | None = None) -> None:
    """Call `VectorStream.reset_in_same_step` on the adapted env inside a stack of wrappers.

    Raises:
        ValueError: an observation wrapper surrounds the adapted env, or that method raises it.
    """
    if max_steps is None:
        asked = "autoreset='same_step'"
    else:
        asked = f"max_steps={max_steps}"

    for layer in layers(env):
        if isinstance(layer, VectorStream):
            if max_steps is not None or not layer.same_step:
                _refuse_statistics(layer.source.env, asked)
            layer.reset_in_same_step(max_steps)
        # The last observation of a row that reset in the same step is in info, which observation wrappers do
        # not transform.
        elif isinstance(layer, VectorObservationWrapper):
            name = type(layer).__name__
            raise ValueError(
                f"{asked} with {name} around an adapted env: the last observations of ended episodes would "
                f"bypass {name}. Put {name} directly around your env, and flatroll's wrappers outside"
            )


def scales_by_running_statistics(env: object) -> bool:
    """Return whether a NormalizeObservation around the vector env or a sub-env still updates its statistics.

    The sub-envs of an AsyncVectorEnv are in other processes and are not checked.
    """
    # By name, to match the wrappers of both vector and single envs. Either may be frozen.
    return any(
        _is_known(layer, "NormalizeObservation") and getattr(layer, "update_running_mean", True)
        for layer in wrappers_within(env)
    )


def wrappers_within(env: object) -> Iterator[object]:
    """Return all wrappers of a vector env, outermost first, including those of its adapter and sub-envs."""
    layer: Any = env
    while layer is not None:
        yield layer
        if isinstance(layer, VectorStream):
            layer = layer.source.env
        elif isinstance(layer, SyncVectorEnv):
            for part in layer.envs:
                yield from wrappers_within(part)
            return
        elif isinstance(layer, gymnasium.Wrapper | VectorWrapper):
            layer = layer.env
        else:
            layer = None


def _float_dtypes(space: spaces.Space[Any]) -> set[str]:
    """Return the names of the floating dtypes in a space."""
    children = getattr(space, "spaces", ())
    if children:
        parts = children.values() if isinstance(children, dict) else children
        return set().union(*map(_float_dtypes, parts))

    if space.dtype is not None and space.dtype.kind == "f":
        return {str(space.dtype)}
    return set()


def _choose_source(request: Request) -> tuple[VectorSource, AutoresetMode]:
    """Return the adapter for the env's family and the autoreset mode (that of the request if the user gave one)."""
    env = request.env
    if isinstance(env, VectorSource):
        return env, request.mode or _declared_mode(env)

    _refuse_other_interfaces(env)
    adapted = adapt_registered(request)
    if adapted is not None:
        return adapted

    _refuse_bare_maniskill(request)
    if isinstance(env, gymnasium.Wrapper) and (
        isinstance(request.base, VectorEnv) or _is_batched(request.base)
    ):
        request = replace(request, env=_without_checkers(env))
    adapted = adapt_by(_FAMILIES, request)
    if adapted is not None:
        return adapted

    way_out = ""
    if isinstance(env, str):
        way_out = f": gymnasium.make_vec({env!r}, num_envs=..., vectorization_mode='sync') makes one"
    elif isinstance(env, list | tuple):
        way_out = ": gymnasium.vector.SyncVectorEnv(...) makes one of a list of functions"
    elif callable(env) and not hasattr(env, "step"):
        way_out = ": call the factory first"
    raise TypeError(
        "env must be a gymnasium.Env, a gymnasium.vector.VectorEnv, an envpool or a torch env with num_envs, "
        f"reset and step, got {qualified_name(env)}{way_out}"
    )


def _refuse_bare_maniskill(request: Request) -> None:
    """Raise TypeError for a ManiSkill env outside its vector env, unless nothing is expected to reset it."""
    env = request.env
    # ManiSkill's base env has neither autoreset nor a time limit.
    left_alone = is_from("mani_skill", request.base) and not isinstance(env, VectorEnv)
    if left_alone and (isinstance(env, gymnasium.Wrapper) or request.mode is not AutoresetMode.DISABLED):
        raise TypeError(
            f"env is ManiSkill's {type(request.base).__name__} without its vector env, which resets it and applies the "
            "time limit of gym.make: pass mani_skill.vector.wrappers.gymnasium.ManiSkillVectorEnv(gym.make(...)), or "
            "gymnasium.vector.SyncVectorEnv([lambda: CPUGymWrapper(gym.make(...))])"
        )


def _pool_in(request: Request) -> Any:
    """An envpool, also one in a wrapper, which is refused."""
    return request.env if is_from("envpool", request.base) else None


def _refuse_unfit_pool(request: Request) -> None:
    """Raise for an envpool with the interface of dm_env, inside a wrapper, or in another autoreset mode."""
    env = request.env
    if not hasattr(type(env), "observation_space"):  # env.observation_space would warn
        raise TypeError(
            f"env is envpool's {type(env).__name__} with the interface of dm_env: make the same task with "
            "envpool.make_gymnasium(...)"
        )
    if env is not request.base:
        raise TypeError(
            f"env is {type(env).__name__} around an envpool, whose spaces are those of a single env: put "
            "as_vector_env(envpool_env) inside, and the wrapper around it"
        )
    if request.mode not in (None, AutoresetMode.NEXT_STEP):
        raise ValueError(
            f"autoreset_mode={request.mode.value!r} is not possible here: an envpool is always 'NextStep'"
        )


def _refuse_unfit_vector_env(request: Request) -> None:
    """Raise for a vector env without the spaces of one env, or of envs that are vector envs themselves."""
    env = request.env
    lacks = [name for name in ("single_observation_space", "single_action_space") if not hasattr(env, name)]
    if lacks:
        raise TypeError(
            f"env must have {' and '.join(lacks)} (Gymnasium spaces of one env), which the vector env "
            f"{type(env).__name__} lacks: set them on it, or write a flatroll.wrappers.VectorSource"
        )

    base = request.base
    if isinstance(base, AsyncVectorEnv | SyncVectorEnv) and ADAPTED in base.metadata:
        raise ValueError(
            f"the envs inside {type(base).__name__} are vector envs, as flatroll's wrappers (NextObservationDelta, "
            "StepCounter, ...) make them: put these wrappers around the whole, wrapper(AsyncVectorEnv([...]))"
        )


def _adapt_vector_env(request: Request, env: VectorEnv[Any, Any, Any]) -> tuple[VectorSource, AutoresetMode]:
    """A vector env with a device is a simulator that derives from Gymnasium's class."""
    if getattr(request.base, "device", None) is not None:
        return _adapt_simulator(request, env)

    mode = own_mode(env, request.mode)
    refuse_known_defects(env, mode)
    return GymSource(env, mode, request.own_buffers), mode


def _adapt_simulator(request: Request, env: Any) -> tuple[VectorSource, AutoresetMode]:
    mode = own_mode(env, request.mode)
    return TorchSource(env, mode, request.device, request.own_buffers), mode


def _adapt_single_env(request: Request, env: gymnasium.Env[Any, Any]) -> tuple[VectorSource, AutoresetMode]:
    # A SyncVectorEnv returns copies.
    source = GymSource(OneEnv(env), AutoresetMode.DISABLED, request.own_buffers is True)
    source.stepped = env
    return source, AutoresetMode.DISABLED


#: The families of the core, in the order in which they are asked.
_FAMILIES = (
    Family(
        name="envpool",
        recognises=_pool_in,
        refuse=_refuse_unfit_pool,
        adapt=lambda request, pool: (pool_source(pool), AutoresetMode.NEXT_STEP),
    ),
    Family(
        name="Gymnasium's vector envs",
        recognises=lambda request: request.env if isinstance(request.env, VectorEnv) else None,
        refuse=_refuse_unfit_vector_env,
        adapt=_adapt_vector_env,
    ),
    Family(
        name="simulators in torch",
        recognises=lambda request: request.env if _is_batched(request.env) else None,
        adapt=_adapt_simulator,
    ),
    Family(
        name="single envs of Gymnasium",
        recognises=lambda request: request.env if isinstance(request.env, gymnasium.Env) else None,
        adapt=_adapt_single_env,
    ),
)


class OneEnv(SyncVectorEnv):
    """A single env as a vector env of one."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        given: gymnasium.Env[Any, Any] = env if isinstance(env.metadata, Mapping) else _WithMetadata(env)
        super().__init__([lambda: given], autoreset_mode=AutoresetMode.DISABLED)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the env; without options of the user it is given None, not an empty dict, after a mask, too."""
        if options and "reset_mask" in options and options["reset_mask"].any():
            options = {key: value for key, value in options.items() if key != "reset_mask"} or None
        return super().reset(seed=seed, options=options)

    def __del__(self) -> None:
        """Gymnasium before 1.3 closes a vector env on deletion; this env belongs to the caller."""


class _WithMetadata(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Gives an env whose ``metadata`` is None an empty dict, which a SyncVectorEnv copies."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.metadata = {}


def _is_batched(env: object) -> bool:
    """Return whether an env that is no `VectorEnv` steps several rows at once, as simulators do.

    A `gymnasium.Env` is a single env, whatever it has that is called ``num_envs``, unless it also has the spaces of
    one row, or rsl_rl's ``get_observations``. What its ``__getattr__`` passes on from another env does not count.
    """
    if not isinstance(env, gymnasium.Env):
        return hasattr(env, "num_envs") and hasattr(env, "step")

    rows = ("single_observation_space", "single_action_space", "get_observations")
    own = [name for name in ("num_envs", *rows) if getattr_static(env, name, None) is not None]
    return own[:1] == ["num_envs"] and len(own) > 1


def _without_checkers(env: gymnasium.Wrapper[Any, Any, Any, Any]) -> Any:
    """Return the batched simulator inside the single-env checkers that `gymnasium.make` adds."""
    inner: Any = env
    while isinstance(inner, gymnasium.Wrapper):
        if not isinstance(inner, OrderEnforcing | PassiveEnvChecker):
            name = type(inner).__name__
            if "TimeLimit" in name:
                limit = ", which has no time limit: StepCounter(env, max_steps=...)"
            else:
                limit = ""
            raise TypeError(
                f"env is a gymnasium.Wrapper ({name}) around a vector env: single-env wrappers do not understand "
                f"batches; use the one in gymnasium.wrappers.vector, or wrap env.unwrapped{limit}"
            )
        inner = inner.env
    return inner


def own_mode(env: Any, mode: AutoresetMode | None) -> AutoresetMode:
    """Return the user's or the declared mode, checked against the auto-reset option of mjlab or ManiSkill.

    ManiSkill declares SAME_STEP even with ``auto_reset=False``.
    """
    base = getattr(env, "unwrapped", env)
    for owner in (env, getattr(base, "cfg", None)):
        resets = getattr(owner, "auto_reset", None)
        if not isinstance(resets, bool):
            continue

        if mode is None and not resets:
            return AutoresetMode.DISABLED
        if mode is None and is_from("mani_skill", env):
            return AutoresetMode.SAME_STEP

        mode = mode or _declared_mode(env)
        if resets == (mode is AutoresetMode.DISABLED):
            if resets:
                fitting = "SameStep"
            else:
                fitting = "Disabled"
            raise ValueError(
                f"autoreset_mode={mode.value!r} is not what {type(env).__name__} does: its auto_reset is {resets}. "
                f"Pass autoreset_mode={fitting!r}, or make it with auto_reset={not resets}"
            )

    return mode or _declared_mode(env)


def _declared_mode(env: object) -> AutoresetMode:
    """Return the autoreset mode that the env declares; TypeError if it declares none, ValueError if it declares two."""
    for layer in layers(env):
        own = _own_attribute(layer)
        told = _own_metadata(layer)
        if own is not None and told not in (None, own):
            raise ValueError(
                f"autoreset_mode is unclear: {type(layer).__name__}.autoreset_mode is {own.value!r} and its "
                f"metadata['autoreset_mode'] is {told.value!r}. Pass the right one, as_vector_env(env, "
                f"autoreset_mode={own.value!r})"
            )

        declared = own or told
        if declared is not None:
            return declared

    declared = _parse_mode(getattr(getattr(env, "cfg", None), "autoreset_mode", None))
    if declared is None:
        name = type(getattr(env, "unwrapped", env)).__name__
        raise TypeError(
            f"autoreset_mode is needed: {name} declares none in metadata['autoreset_mode'] (its own, not gymnasium's) "
            "or in an attribute autoreset_mode. Pass as_vector_env(env, autoreset_mode='NextStep' | 'SameStep' | "
            "'Disabled') (most GPU simulators: 'SameStep')"
        )
    return declared


def _own_attribute(layer: object) -> AutoresetMode | None:
    """Return the ``autoreset_mode`` of the env or wrapper itself; None if it has none of Gymnasium's modes."""
    # Static: a wrapper's __getattr__ would answer for the env inside.
    if getattr_static(layer, "autoreset_mode", None) is None:
        return None

    mode = getattr(layer, "autoreset_mode", None)
    if isinstance(mode, AutoresetMode | str):
        return _parse_mode(mode)
    return None


def _own_metadata(layer: object) -> AutoresetMode | None:
    """Return the mode in the metadata of the env or wrapper itself, or None.

    A dict that a class of Gymnasium owns counts for nothing: all envs without metadata of their own share it, and
    some write their mode into it, so it may hold the mode of another env.
    """
    metadata = getattr(layer, "metadata", None)
    if isinstance(layer, VectorWrapper):
        inner = getattr(layer.env, "metadata", None)
    else:
        inner = None
    if not isinstance(metadata, Mapping) or metadata is inner:
        return None

    # Gymnasium before 1.4 gives Sync and Async envs the metadata of their sub-envs' class.
    if isinstance(layer, SyncVectorEnv | AsyncVectorEnv):
        return None
    if any(vars(kind).get("metadata") is metadata for kind in (gymnasium.Env, VectorEnv)):
        return None
    return _parse_mode(metadata.get("autoreset_mode"))


def _parse_mode(mode: AutoresetMode | str | None) -> AutoresetMode | None:
    """Parse an autoreset mode's name, in any spelling: ``"SameStep"``, ``"same_step"``."""
    if mode is None or isinstance(mode, AutoresetMode):
        return mode

    plain = str(getattr(mode, "value", mode)).replace("_", "").lower()
    for known in AutoresetMode:
        if known.value.lower() == plain:
            return known
    raise ValueError(f"autoreset_mode must be 'NextStep', 'SameStep' or 'Disabled', got {as_text(mode)}")


def refuse_known_defects(env: VectorEnv[Any, Any, Any], mode: AutoresetMode) -> None:
    """Raise for combinations in Gymnasium 1.1 to 1.4 that give wrong data or an unrelated error."""
    if _is_known(env.unwrapped, "FunctionalJaxVectorEnv"):
        raise ValueError(
            "gymnasium's FunctionalJaxVectorEnv (phys2d/*) discards the step of all other envs when one env "
            "resets, even inside a wrapper: adapt the env first, wrapper(as_vector_env(phys2d_env))"
        )

    for layer in layers(env):
        converts = _is_known(layer, "NumpyToTorch", "ArrayConversion")
        if converts and mode is AutoresetMode.SAME_STEP:
            raise ValueError(
                "NumpyToTorch fails on the first episode end of a SAME_STEP env: leave it out and pass "
                "framework='torch' to as_vector_env"
            )

    if mode is AutoresetMode.DISABLED:
        _refuse_statistics(env, "a DISABLED env")


def _refuse_other_interfaces(env: object) -> None:
    """Raise TypeError for envs of packages with another interface, and name the package and the way out."""
    if is_from("torchrl", env):
        raise TypeError(
            f"env is torchrl's {type(env).__name__}, and torchrl envs are not supported: pass the Gymnasium env "
            "itself, gymnasium.make(...) or gymnasium.make_vec(...); flatroll's wrappers do what its transforms do"
        )
    if isinstance(env, gymnasium.Env):
        return  # an env that derives from Gymnasium's in such a package is Gymnasium's, too
    if is_from("stable_baselines3", env):
        raise TypeError(
            f"env is a VecEnv of Stable-Baselines3, {type(env).__name__}, and hides how it resets: pass the "
            "envs inside it with gymnasium.vector.SyncVectorEnv(functions) or gymnasium.make_vec(...), or the env "
            "that FlatVecEnv was made from"
        )

    steps = hasattr(env, "step")
    way_out = None
    if is_from("pufferlib", env):
        way_out = (
            "which is not a Gymnasium vector env: pass the Gymnasium envs inside it, "
            "gymnasium.vector.SyncVectorEnv(functions)"
        )
    elif is_from("supersuit", env) and hasattr(env, "num_envs"):
        way_out = (
            "whose infos are a list with one dict for each agent: pass the PettingZoo game itself, as_vector_env(game) "
            "or as_vector_env([game, another])"
        )
    elif is_from("pgx", env) and steps:
        way_out = "a game of players that move in turn, and pgx's games are not supported"
    elif is_from("gym", env) and steps:
        way_out = "which has the interface of gym, not of Gymnasium: shimmy.GymV26CompatibilityV0(env=env) converts it"
        way_out += " (GymV21CompatibilityV0 if its step returns 4 values)"
    elif is_from("dm_env", env) and steps and not is_from("envpool", env):
        way_out = (
            "which has the interface of dm_env: shimmy.DmControlCompatibilityV0(env) converts dm_control's, other "
            "classes of shimmy those of bsuite and dm_lab"
        )

    if way_out is not None:
        raise TypeError(f"env is {qualified_name(env)}, {way_out}")


def _is_known(layer: object, *names: str) -> bool:
    """Return whether a layer is of one of these classes of Gymnasium (or flatroll), or of a subclass.

    By name, since importing some of them imports JAX, or needs one of Gymnasium's extras.
    """
    return any(
        kind.__name__ in names and kind.__module__.split(".")[0] in ("gymnasium", "flatroll")
        for kind in type(layer).__mro__
    )


def _refuse_statistics(env: object, who: str) -> None:
    """Refuse RecordEpisodeStatistics around a vector env: it clears the statistics of all envs when one resets."""
    if any(_is_known(layer, "RecordEpisodeStatistics") for layer in layers(env)):
        raise ValueError(
            f"RecordEpisodeStatistics forgets the statistics of all envs at a masked reset, which {who} "
            "needs: use flatroll.wrappers.RewardSum and StepCounter instead"
        )
