"""`as_vector_env`, which adapts any environment to a single vector-env interface."""

from typing import Any, Literal

import torch
from gymnasium.vector import AutoresetMode, VectorEnv

from flatroll.layout.checks import as_text
from flatroll.wrappers.adapt_env import adapt_env, reset_in_same_step
from flatroll.wrappers.markers import set_recurrent_primers_from
from flatroll.wrappers.source import EnvLike
from flatroll.wrappers.stream import FinalObs


def as_vector_env(
    env: EnvLike,
    *,
    num_envs: int | None = None,
    device: torch.device | str | None = None,
    framework: str | None = None,
    autoreset_mode: AutoresetMode | str | None = None,
    final_obs: FinalObs = "auto",
    own_buffers: bool | str = "auto",
    dtype: torch.dtype | None = None,
    policy: object = None,
    autoreset: Literal["same_step"] | None = None,
) -> VectorEnv[Any, Any, Any]:
    """Adapt any environment to one vector-env interface; wrappers and collectors call it for you.

    The adapted env keeps this contract:

    * Gymnasium spaces, batched and single, with corrected bounds; leaves are Box, Discrete, MultiDiscrete or
      MultiBinary.
    * ``metadata["autoreset_mode"]`` is NEXT_STEP or SAME_STEP. A DISABLED env becomes SAME_STEP: its ended rows are
      reset right after the step.
    * Reward is float32 ``(E,)``, flags are bool ``(E,)``, on the env's device. The caller owns all returned arrays.
    * SAME_STEP: ``info["final_obs"]`` is dense, with the tree and shapes of the observation, at every step that ends
      an episode; only the rows of ended episodes are meaningful. If the env hides it, ``final_obs`` is missing, and
      the stream's ``known`` is False in the rows whose next observation is lost.
    * ``reset(options={"reset_mask": mask})`` resets the masked rows, returns all rows, and does not modify
      ``options``.
    * Actions may be NumPy or torch; a wrong row count, shape or dtype raises an exception.

    Args:
        env: a `gymnasium.Env`, a `gymnasium.vector.VectorEnv` (envpool's are), or a torch-native vector env
            with ``num_envs`` (Isaac Lab, mjlab, Genesis, rsl_rl's ``VecEnv``, legged_gym); or a JAX env of pure
            functions: gymnax, craftax, brax, MuJoCo playground, jumanji, navix, Gymnasium's ``FuncEnv`` and ``phys2d``,
            a `FunctionalEnv`; or a multi-agent game with one row per agent: a PettingZoo ``ParallelEnv``, a function
            that makes one, a list of either (see `PettingZooSource`), or VMAS (see `VmasSource`). An adapted env is
            returned unchanged. For any other simulator write a `VectorSource`.
        num_envs: the number of rows of a JAX env. For other envs the expected number, which is only checked. Default:
            the env's own.
        device: the device of a torch env (default: its ``device``, or that of its tensors), of a JAX env (default:
            JAX's own), or the target device of a converted env.
        framework: ``"numpy"`` or ``"torch"``; None keeps the env's own (a JAX env's is NumPy on the CPU, torch
            on a GPU). ``"torch"`` turns NumPy observations into tensors.
        autoreset_mode: the mode of an env that declares none, or a wrong one, in an attribute ``autoreset_mode`` or in
            its metadata. It is never guessed. A plain `gymnasium.Env` needs none.
        final_obs: where a SAME_STEP env puts its final observations: ``"auto"`` (the usual keys), a key of ``info``,
            a callable ``(info, done) -> dense tree``, or None (the env hides them).
        own_buffers: ``"auto"`` copies returned arrays unless the env is known to return new ones, True always copies,
            False never does.
        dtype: dtype of the floating observations, such as ``torch.float32`` for MuJoCo's float64; spaces and final
            observations follow, integers and bools stay. Default None: the env's own.
        policy: for a recurrent policy, add the wrappers it needs, see `set_recurrent_primers_from`; other policies
            change nothing. Collectors do this themselves.

        autoreset: ``"same_step"`` resets ended rows in the step that ends them and puts their true last observations
            into ``info["final_obs"]``. flatroll then resets a NEXT_STEP env (envpool) itself, so every row is a
            transition; a SAME_STEP env that hides its last observations is an error. Use it for trainers that step
            the env themselves. It also accepts an adapted env that was not reset yet. Default None: the env's own
            mode.

    Returns:
        The adapted env, a `VectorStream`; with a recurrent ``policy``, wrappers around it.

    Raises:
        TypeError: the env declares no autoreset mode, has an unsupported space, or is of an unknown kind.
        ValueError: a combination that is known to give wrong data (the message names a fix); an env that declares two
            autoreset modes.

    >>> import gymnasium
    >>> env = as_vector_env(gymnasium.make("CartPole-v1"))
    >>> obs, info = env.reset(seed=0)
    >>> obs.shape, env.metadata["autoreset_mode"].value
    ((1, 4), 'SameStep')
    """
    if autoreset is not None and not (isinstance(autoreset, str) and autoreset == "same_step"):
        raise ValueError(
            f"autoreset must be 'same_step' or None, got {as_text(autoreset)}: use autoreset_mode= to say what "
            "the env itself does"
        )

    adapted = adapt_env(env, num_envs, device, framework, autoreset_mode, final_obs, own_buffers, dtype)
    if autoreset is not None:
        reset_in_same_step(adapted)

    if policy is None:
        return adapted
    return set_recurrent_primers_from(adapted, policy)
