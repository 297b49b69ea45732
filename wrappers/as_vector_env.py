"""`as_vector_env`, which adapts any environment to a single vector-env interface."""

from typing import Any, Literal

import torch
from gymnasium.vector import AutoresetMode, VectorEnv

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

    What comes out keeps to this, whatever went in:

    * Gymnasium spaces, batched and single, with mended bounds; leaves Box, Discrete, MultiDiscrete, MultiBinary.
    * ``metadata["autoreset_mode"]`` is NEXT_STEP or SAME_STEP. DISABLED is folded: ended rows are reset right
      after the step, which is then SAME_STEP.
    * Reward is float32 ``(E,)``, flags are bool ``(E,)``, on the env's device. Arrays are yours to keep.
    * SAME_STEP: ``info["final_obs"]`` is dense, with the tree and shapes of the observation, at every step that ends
      an episode, its rows meaningful where one ended. An env that hides it gives none in such a step, and the
      stream's ``known`` says which rows have lost their next observation.
    * ``reset(options={"reset_mask": mask})`` resets the masked rows, returns all, and leaves ``options`` alone.
    * Actions may be NumPy or torch; a wrong row count, shape or kind of dtype is a Python exception.

    Args:
        env: a `gymnasium.Env`, a `gymnasium.vector.VectorEnv` (envpool's are), or a torch-native vector env
            with ``num_envs`` (Isaac Lab, mjlab, Genesis, rsl_rl's ``VecEnv``, legged_gym); or a JAX env of pure
            functions: gymnax, craftax, brax, MuJoCo playground, jumanji, navix, Gymnasium's ``FuncEnv`` and ``phys2d``,
            a `FunctionalEnv`; or a game of several agents,
            each of which is a row: a PettingZoo ``ParallelEnv``, a function that makes one, a list of either (see
            `PettingZooSource`), or VMAS (see `VmasSource`). An adapted env comes back as it is.
            For any other simulator write a `VectorSource`.
        num_envs: how many rows a JAX env is to have. For others it is for checking only: how many rows the env is
            expected to have. Default: whatever it has.
        device: where a torch env lives (default: its ``device``, or where its tensors are), where a JAX env is to be
            (default: JAX's own), or where a converted one is to be.
        framework: ``"numpy"`` or ``"torch"``; None keeps the env's own (a JAX env's is NumPy on the CPU, torch
            on a GPU). ``"torch"`` turns NumPy observations into tensors.
        autoreset_mode: for an env that declares none in its metadata, or declares the wrong one. It is never
            guessed. A plain `gymnasium.Env` needs none.
        final_obs: where a SAME_STEP env leaves its final observations: ``"auto"`` (the keys in use), a key of
            ``info``, a callable ``(info, done) -> dense tree``, or None (it hides them).
        own_buffers: ``"auto"`` copies what the env returns unless it is known to be fresh, True always
            copies, False never does.
        dtype: floating dtype of the floating observations, such as ``torch.float32`` for MuJoCo's float64; spaces and
            final observations follow, integers and bools stay. Default None: as the env gives them.
        policy: a recurrent policy gets what it needs, as `set_recurrent_primers_from` says; any other changes
            nothing. A collector needs no such word.

        autoreset: ``"same_step"`` makes every env one that resets ended rows in the step that ended them, with their
            true last observations in ``info["final_obs"]``: a NEXT_STEP env (envpool) is reset by flatroll, and has no
            rows without a transition then; a SAME_STEP env that hides them is an error. Trainers that step envs
            themselves want this. Also for an adapted env that has not been reset yet. Default None: as the env does.

    Returns:
        The adapted env, a `VectorStream`; with a recurrent ``policy``, wrappers around it.

    Raises:
        TypeError: the env declares no autoreset mode, has an unsupported space, or is nothing we know.
        ValueError: a combination that is known to give wrong data (the text names the way out).

    >>> import gymnasium
    >>> env = as_vector_env(gymnasium.make("CartPole-v1"))
    >>> obs, info = env.reset(seed=0)
    >>> obs.shape, env.metadata["autoreset_mode"].value
    ((1, 4), 'SameStep')
    """
    if autoreset not in (None, "same_step"):
        raise ValueError(
            f"autoreset must be 'same_step' or None, got {autoreset!r}: what the env itself does is autoreset_mode="
        )
    adapted = adapt_env(env, num_envs, device, framework, autoreset_mode, final_obs, own_buffers, dtype)
    if autoreset is not None:
        reset_in_same_step(adapted)
    return adapted if policy is None else set_recurrent_primers_from(adapted, policy)
