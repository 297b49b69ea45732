"""`rollout`: a fixed number of transitions from every env as one flat batch; `check_env_specs`."""

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType

from flatroll.layout.checks import check_seed, check_whole_number
from flatroll.layout.inspect.audit import audit
from flatroll.layout.keys import NestedKey
from flatroll.rollouts.arguments import check_exploration_type, make_devices
from flatroll.rollouts.batch_columns import batch_spec
from flatroll.rollouts.env_facts import read_env
from flatroll.rollouts.policies import Policy
from flatroll.rollouts.pool_runner import make_runner
from flatroll.rollouts.runner import RunnerOptions
from flatroll.wrappers.adapt_env import adapt_env
from flatroll.wrappers.source import EnvLike
from flatroll.wrappers.testing.check_env import ContractError, is_suspicion, vector_env_problems


def rollout(
    env: EnvLike,
    policy: Policy | None = None,
    num_steps: int = 100,
    *,
    seed: int | None = None,
    writer: int = 0,
    info_keys: Sequence[NestedKey] = (),
    policy_device: torch.device | str | None = None,
    exploration_type: InteractionType | str = InteractionType.RANDOM,
    obs_dtype: torch.dtype | None = None,
) -> TensorDict:
    """Reset the env and return ``num_steps`` transitions of every env as one flat batch.

    Ended episodes are followed by the next one. Rows on which an env only resets are not counted, so the batch is the
    same in every autoreset mode; envs ahead of the slowest keep stepping, and rows beyond ``num_steps`` are dropped.

    Args:
        env: anything `flatroll.wrappers.as_vector_env` takes, or wrappers around it.
        policy: a tensordict module, a callable from observation to action, or None for random actions.
        num_steps: transitions per env, at least 1. Default 100.
        seed: seeds the env's reset and the random actions. Default None: neither.
        writer: number of this writer in the trajectory ids, 0 to 2**23 - 1. Default 0. Use different numbers for
            writers into the same buffer.
        info_keys: entries of ``info`` to store, ``("episode", "r")`` for one in a dict.
        policy_device: device of the policy's input. Default: that of the env's arrays.
        exploration_type: how probabilistic modules choose actions. Default: they sample.
        obs_dtype: dtype of the floating observations, as ``dtype`` of `flatroll.wrappers.as_vector_env`. Default: the
            env's.

    Returns:
        A flat batch ``[num_steps * E]``, env after env. It includes next observations even with a CompactObs in the
        stack, because there is no second result for the final ones.

    >>> import gymnasium as gym
    >>> batch = rollout(gym.make("CartPole-v1"), num_steps=5, seed=0)
    >>> batch.batch_size, batch["is_init"].squeeze(-1).tolist()
    (torch.Size([5]), [True, False, False, False, False])
    """
    check_whole_number("num_steps", num_steps)
    if seed is not None:
        seed = check_seed("seed", seed)
    exploration = check_exploration_type(exploration_type)
    env = adapt_env(env, dtype=obs_dtype)
    facts = read_env(env, info_keys, writer=writer)
    devices = make_devices(facts.device, policy_device=policy_device)
    options = RunnerOptions(devices=devices, exploration=exploration, seed=seed)
    runner = make_runner(facts, policy, num_steps, options)

    missing = num_steps
    with torch.no_grad():
        runner.reset(seed)
        while missing > 0:
            for _ in range(missing):
                runner.step()
            missing = num_steps - int(runner.window.valid().sum(axis=0).min())

    mask = runner.window.valid()
    # The first num_steps transitions of each env: bool [steps, E].
    mask &= np.cumsum(mask, axis=0) <= num_steps
    return runner.lay_out(mask, compact=False)[0]


def check_env_specs(env: EnvLike, num_steps: int = 100, *, seed: int = 0) -> None:
    """Step an env with random actions and raise an error that lists all violations of its specs.

    It runs `flatroll.wrappers.testing.check_vector_env` (spaces, shapes, dtypes, ownership, final observations,
    resets, entries of ``info``), then checks each row of a collected batch against `batch_spec` and the rules of
    `flatroll.layout.audit`.

    Args:
        env: anything `flatroll.wrappers.as_vector_env` takes, or wrappers around it. It is reset and stepped.
        num_steps: vector steps per check, default 100; choose enough for several episodes to end.
        seed: seed of the env and the actions, default 0.

    Raises:
        ContractError: an AssertionError with one line per problem.

    >>> import gymnasium as gym
    >>> check_env_specs(gym.make_vec("CartPole-v1", num_envs=2))
    """
    check_whole_number("num_steps", num_steps)
    found = [text for text in vector_env_problems(env, steps=num_steps, seed=seed) if not is_suspicion(text)]
    if not found:
        adapted = adapt_env(env)
        batch = rollout(adapted, num_steps=num_steps, seed=seed)
        problem = batch_spec(adapted).problem(batch)
        found += [] if problem is None else [problem]
        found += [str(finding) for finding in audit(batch) if finding.severity == "error"]

    if found:
        raise ContractError("the env breaks its specs:\n" + "\n".join(f"- {text}" for text in found))
