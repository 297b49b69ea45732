"""`as_vector_env`: anything a user already has, under one contract."""

from typing import Any

import gymnasium
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker

from flatroll.wrappers.sources import EnvPoolSource, GymSource, layers
from flatroll.wrappers.stream import FinalObs, Source, VectorStream
from flatroll.wrappers.torch_source import TorchSource, TorchView


def as_vector_env(
    env: Any,
    *,
    num_envs: int | None = None,
    device: torch.device | str | None = None,
    framework: str | None = None,
    autoreset_mode: AutoresetMode | str | None = None,
    final_obs: FinalObs = "auto",
    own_buffers: bool | str = "auto",
    policy: Any = None,
) -> VectorEnv[Any, Any, Any]:
    """Put any environment under one vector-env contract; the wrappers and collectors call it by themselves.

    What comes out keeps to this, whatever went in:

    * Gymnasium spaces, batched and single, with mended bounds; leaves Box, Discrete, MultiDiscrete, MultiBinary.
    * ``metadata["autoreset_mode"]`` is NEXT_STEP or SAME_STEP. DISABLED is folded: ended rows are reset right
      after the step, which is then SAME_STEP.
    * Reward is float32 ``(E,)``, flags are bool ``(E,)``, on the env's device. Arrays are yours to keep.
    * SAME_STEP: ``info["final_obs"]`` is dense, with the tree and shapes of the observation, at every step, its
      rows meaningful where the episode ended. An env that hides it gives none in a step that ends an episode,
      and the stream's ``known`` says which rows have lost their next observation.
    * ``reset(options={"reset_mask": mask})`` resets the masked rows, returns all, and leaves ``options`` alone.
    * Actions may be NumPy or torch; a wrong row count, shape or kind of dtype is a Python exception.

    Args:
        env: a `gymnasium.Env`, a `gymnasium.vector.VectorEnv` (envpool's are), or a torch-native vector env
            with ``num_envs`` (Isaac Lab, mjlab, rsl_rl's ``VecEnv``). An adapted env comes back as it is.
        num_envs: for checking only: how many rows the env is expected to have. Default: whatever it has.
        device: where a torch env lives (default: its ``device``), or where a converted one is to be.
        framework: ``"numpy"`` or ``"torch"``; None keeps the env's own. ``"torch"`` turns NumPy observations
            into tensors.
        autoreset_mode: for an env that declares none in its metadata, or declares the wrong one. It is never
            guessed. A plain `gymnasium.Env` needs none.
        final_obs: where a SAME_STEP env leaves its final observations: ``"auto"`` (the keys in use), a key of
            ``info``, a callable ``(info, done) -> dense tree``, or None (it hides them).
        own_buffers: ``"auto"`` copies what the env returns unless it is known to be fresh, True always
            copies, False never does.
        policy: a recurrent policy gets what it needs, as `set_recurrent_primers_from` says; any other changes
            nothing. A collector needs no such word.

    Returns:
        The adapted env, a `VectorStream`; with a recurrent ``policy``, wrappers around it.

    Raises:
        TypeError: the env declares no autoreset mode, has an unsupported space, or is nothing we know.
        ValueError: a combination that is known to give wrong data (the text names the way out).

    >>> env = as_vector_env(gymnasium.make("CartPole-v1"))
    >>> obs, info = env.reset(seed=0)
    >>> obs.shape, env.metadata["autoreset_mode"].value
    ((1, 4), 'SameStep')
    """
    if own_buffers not in ("auto", True, False):
        raise ValueError(f"own_buffers must be 'auto', True or False, got {own_buffers!r}")
    if find_stream(env) is not None:
        if (device, framework, autoreset_mode, final_obs, own_buffers) != (None, None, None, "auto", "auto"):
            raise ValueError(
                "env is adapted already, so device, framework, autoreset_mode, final_obs and own_buffers have no "
                "effect here: give them where it is adapted first, as_vector_env(bare_env, ...)"
            )
        _check_size(num_envs, env.num_envs)
        return _primed(env, policy)
    source, mode = _source(env, _device(device), _mode(autoreset_mode), own_buffers)
    _check_size(num_envs, source.num_envs)
    native = source.capabilities.framework
    if device is not None and native == "numpy" and framework != "torch":
        raise ValueError(
            f"device={str(device)!r} is for tensors, and {type(env).__name__} returns NumPy arrays: add "
            "framework='torch', or give the device to the collector's policy_device or storing_device"
        )
    if framework == "torch" and native == "numpy":
        source = TorchView(source, _device(device))
    elif framework not in (None, native):
        raise ValueError(
            f"framework={framework!r} is not possible here: {type(env).__name__} speaks {native}"
        )
    return _primed(VectorStream(source, mode, final_obs=final_obs), policy)


def _primed(env: VectorEnv[Any, Any, Any], policy: Any) -> VectorEnv[Any, Any, Any]:
    """The adapted env with what ``policy`` needs."""
    if policy is None:
        return env
    from flatroll.wrappers.primers import set_recurrent_primers_from  # it wraps what this module adapts

    return set_recurrent_primers_from(env, policy)


def _check_size(expected: int | None, found: int) -> None:
    if expected is not None and expected != found:
        raise ValueError(f"num_envs={expected} was expected, and the env has {found}")


def find_stream(env: Any) -> VectorStream | None:
    """The adapted env inside a stack of vector wrappers, if there is one."""
    return next((layer for layer in layers(env) if isinstance(layer, VectorStream)), None)


def _source(
    env: Any, device: torch.device | None, mode: AutoresetMode | None, own_buffers: bool | str
) -> tuple[Source, AutoresetMode]:
    base = getattr(env, "unwrapped", env)
    if isinstance(env, gymnasium.Wrapper) and (isinstance(base, VectorEnv) or hasattr(base, "num_envs")):
        env = _without_checkers(env)
    if _is_envpool(base):
        if env is not base:
            raise TypeError(
                f"env is {type(env).__name__} around an envpool, whose batched spaces are the single ones: put "
                "as_vector_env(envpool_env) inside, and the wrapper around it"
            )
        if mode not in (None, AutoresetMode.NEXT_STEP):
            raise ValueError(
                f"autoreset_mode={mode.value!r} is not possible here: an envpool is always 'NextStep'"
            )
        return EnvPoolSource(env), AutoresetMode.NEXT_STEP
    if isinstance(env, VectorEnv):
        mode = mode or _declared(env)
        if getattr(base, "device", None) is not None:
            return TorchSource(env, mode, device, own_buffers), mode
        _refuse_known_defects(env, mode)
        return GymSource(env, mode, own_buffers), mode
    if hasattr(env, "num_envs") and hasattr(env, "step"):
        mode = mode or _declared(env)
        return TorchSource(env, mode, device, own_buffers), mode
    if isinstance(env, gymnasium.Env):
        vector = _OneEnv([lambda: env], autoreset_mode=AutoresetMode.DISABLED)
        # Its arrays are copies already, as those of any SyncVectorEnv are.
        return GymSource(vector, AutoresetMode.DISABLED, own_buffers is True), AutoresetMode.DISABLED
    raise TypeError(
        "env must be a gymnasium.Env, a gymnasium.vector.VectorEnv, an envpool or a torch env with num_envs, "
        f"reset and step, got {type(env).__name__}" + (": call the factory first" if callable(env) else "")
    )


class _OneEnv(SyncVectorEnv):
    """A single env as a vector env of one."""

    def __del__(self) -> None:
        """Before 1.3 Gymnasium closes a dropped vector env; this one's env is the caller's."""


def _without_checkers(env: gymnasium.Wrapper[Any, Any, Any, Any]) -> Any:
    """What `gymnasium.make` wrapped: a simulator of many envs under wrappers that only check single ones."""
    inner: Any = env
    while isinstance(inner, gymnasium.Wrapper):
        if not isinstance(inner, OrderEnforcing | PassiveEnvChecker):
            raise TypeError(
                f"env is a gymnasium.Wrapper ({type(inner).__name__}) around a vector env: single-env wrappers do "
                "not understand batches; use the one in gymnasium.wrappers.vector, or wrap env.unwrapped"
            )
        inner = inner.env
    return inner


def _declared(env: Any) -> AutoresetMode:
    base = getattr(env, "unwrapped", env)
    metadata = getattr(env, "metadata", None) or {}
    # Before 1.4 Gymnasium writes the mode of a Sync or Async env into the metadata of the class of its envs,
    # often that of gymnasium.Env, where the vector env made last overwrites those of the others.
    if isinstance(base, SyncVectorEnv | AsyncVectorEnv) and metadata is base.metadata:
        return base.autoreset_mode
    declared = None if metadata is gymnasium.Env.metadata else metadata.get("autoreset_mode")
    if declared is None:
        declared = getattr(getattr(env, "cfg", None), "autoreset_mode", None)
    if declared is None:
        raise TypeError(
            f"autoreset_mode is needed: {type(base).__name__} declares none in "
            "metadata['autoreset_mode'], and a wrong guess would mix episodes. Pass "
            "as_vector_env(env, autoreset_mode='NextStep' | 'SameStep' | 'Disabled'); most GPU simulators "
            "reset in the same step"
        )
    mode = _mode(declared)
    assert mode is not None
    return mode


def _mode(mode: AutoresetMode | str | None) -> AutoresetMode | None:
    if mode is None or isinstance(mode, AutoresetMode):
        return mode
    plain = str(getattr(mode, "value", mode)).replace("_", "").lower()
    for known in AutoresetMode:
        if known.value.lower() == plain:
            return known
    raise ValueError(f"autoreset_mode must be 'NextStep', 'SameStep' or 'Disabled', got {mode!r}")


def _device(device: torch.device | str | None) -> torch.device | None:
    return None if device is None else torch.device(device)


def _is_envpool(env: Any) -> bool:
    return type(env).__module__.split(".")[0] == "envpool" or any(
        kind.__module__.split(".")[0] == "envpool" for kind in type(env).__mro__
    )


def _refuse_known_defects(env: VectorEnv[Any, Any, Any], mode: AutoresetMode) -> None:
    """Combinations in Gymnasium (1.1 to 1.4) that give wrong data or an unrelated error deep inside."""
    if type(env.unwrapped).__name__ == "FunctionalJaxVectorEnv":
        raise ValueError(
            "gymnasium's FunctionalJaxVectorEnv (phys2d/*) throws away the step of every other row when one row "
            "resets: use the ordinary env of the same name"
        )
    for layer in layers(env):
        # By name: importing NumpyToTorch needs one of gymnasium's extras.
        kinds = {kind.__name__ for kind in type(layer).__mro__}
        if kinds & {"NumpyToTorch", "ArrayConversion"} and mode is AutoresetMode.SAME_STEP:
            raise ValueError(
                "NumpyToTorch fails on the first episode end of a SAME_STEP env: leave it out and pass "
                "framework='torch' to as_vector_env"
            )
        if "RecordEpisodeStatistics" in kinds and mode is AutoresetMode.DISABLED:
            raise ValueError(
                "RecordEpisodeStatistics forgets the statistics of all rows at a masked reset, which a DISABLED "
                "env needs: use flatroll.wrappers.RewardSum and StepCounter instead"
            )
