"""`FlatVecEnv`: any environment as a `VecEnv` of Stable-Baselines3."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from typing_extensions import override

from flatroll.trainers.versions import trainer_imports
from flatroll.wrappers import as_vector_env, find_stream, map_tree
from flatroll.wrappers.source import layers

with trainer_imports("stable-baselines3", "2.7", "3", "sb3"):
    from stable_baselines3.common.env_util import is_wrapped
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import VecEnv

# Both classes are importable from here.
from flatroll.trainers.sb3_buffer import FlatReplayBuffer as FlatReplayBuffer

Indices = None | int | Iterable[int]
# SB3's names of info entries.
_PASSED_APART = {"final_obs", "final_observation", "final_info"}


class FlatVecEnv(VecEnv):
    """Makes any environment a `VecEnv`, so that Stable-Baselines3 trains on it: Gymnasium, envpool, torch.

    The algorithm sees what `DummyVecEnv` shows it, for every autoreset mode. An ended row shows the first observation
    of the next episode, and its info, which shares no memory with anything else, has

    * ``"terminal_observation"``: the true last observation,
    * ``"TimeLimit.truncated"``: whether it was truncated and not terminated,
    * ``"episode"``: return ``"r"``, length ``"l"``, and seconds since this object was made ``"t"``, as `Monitor` writes
      them; the env's own entry, if it has one,
    * what the env said of its last step, if that is known (an env that resets ended rows in the same step must pass
      ``final_info``); what it says of the reset is in ``reset_infos``.

    Args:
        env: anything `as_vector_env` takes; an env that it has adapted must not have been reset yet.
        dtype: floating dtype of the floating observations, such as ``torch.float32`` for envpool's MuJoCo, which SB3
            would store as float64. Default None: as the env gives them.
        **options: further arguments of `as_vector_env`, such as ``autoreset_mode``.

    Raises:
        TypeError: ``env`` is a `VecEnv` already, or see `as_vector_env`.
        ValueError: the env hides its last observations (raised where it does), or cannot reset chosen rows.

    >>> import gymnasium as gym
    >>> from stable_baselines3 import PPO
    >>> env = FlatVecEnv(gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync"))
    >>> model = PPO("MlpPolicy", env, n_steps=16, batch_size=64, device="cpu").learn(64)
    >>> observations, rewards, dones, infos = env.step(np.zeros(4, np.int64))
    >>> observations.shape, rewards.shape, len(infos)
    ((4, 4), (4,), 4)
    """

    def __init__(self, env: Any, *, dtype: torch.dtype | None = None, **options: Any) -> None:
        if isinstance(env, VecEnv):
            raise TypeError(
                f"env is Stable-Baselines3's {type(env).__name__} already: pass it to the algorithm itself"
            )

        self.env = as_vector_env(env, autoreset="same_step", dtype=dtype, **options)
        stream = find_stream(self.env)
        assert stream is not None  # as_vector_env has made or found it
        self._stream = stream

        self._began = time.time()
        self._returns = np.zeros(self.env.num_envs)
        self._lengths = np.zeros(self.env.num_envs, np.int64)
        self._actions: Any = None
        super().__init__(self.env.num_envs, self.env.single_observation_space, self.env.single_action_space)

    # --- steps --------------------------------------------------------------------------------------------------

    @override
    def reset(self) -> Any:
        """Reset all envs, with the seeds of `seed` and the options of `set_options`, which are used once.

        Raises:
            ValueError: the envs were given different options, which a vector env cannot pass on.
        """
        options = self._options[0]
        if any(other != options for other in self._options):
            raise ValueError(
                f"options must be the same for all envs, got {self._options}: a vector env takes one dict of "
                "options"
            )

        # A number s seeds row i with s + i. Passed as a number if possible, because some envs accept no list.
        first = self._seeds[0]
        seeds: Any = list(self._seeds)
        if seeds == [None] * self.num_envs:
            seeds = None
        elif first is not None and seeds == list(range(first, first + self.num_envs)):
            seeds = first
        observations, info = self.env.reset(seed=seeds, options=options or None)

        self._reset_seeds()
        self._reset_options()
        self._returns[:] = 0
        self._lengths[:] = 0
        self.reset_infos = split_info(info, range(self.num_envs))
        return map_tree(_numpy, observations)

    @override
    def step_async(self, actions: Any) -> None:
        """Keep the actions for `step_wait`."""
        self._actions = actions
        if isinstance(self.action_space, spaces.MultiBinary):
            # SB3 samples these actions from a distribution that returns floats.
            self._actions = np.asarray(actions, self.action_space.dtype)

    @override
    def step_wait(self) -> Any:
        """Step all envs: observations, rewards float32 ``[E]``, dones bool ``[E]``, one info dict for each."""
        observations, reward, terminated, truncated, info = self.env.step(self._actions)
        rewards = _numpy(reward)
        terminations = _numpy(terminated)
        truncations = _numpy(truncated)
        dones = terminations | truncations

        self._returns += rewards
        self._lengths += 1

        infos = split_info(info, range(self.num_envs))
        ended = np.flatnonzero(dones).tolist()
        if ended:
            final = map_tree(_numpy, info["final_obs"])
            last = self._last_infos(info, ended)

            for i, row in zip(ended, last, strict=True):
                self.reset_infos[i] = infos[i]

                row = dict(row)
                row["TimeLimit.truncated"] = bool(truncations[i] and not terminations[i])
                row["terminal_observation"] = map_tree(lambda leaf, i=i: np.array(leaf[i]), final)
                statistics = float(self._returns[i]), int(self._lengths[i]), time.time() - self._began
                row.setdefault("episode", dict(zip("rlt", statistics, strict=True)))
                infos[i] = row
            self._returns[ended] = 0
            self._lengths[ended] = 0

        return map_tree(_numpy, observations), rewards, dones, infos

    def _last_infos(self, info: dict[str, Any], ended: list[int]) -> list[dict[str, Any]]:
        """Return what the env said of the last steps of the ended rows; nothing where it is unknown.

        A SAME_STEP env without ``final_info`` may say in ``info`` what belongs to the reset.
        """
        final = info.get("final_info")
        if isinstance(final, dict):
            rows = split_info(final, ended)
            told = info.get("_final_info")
            if told is None:
                return rows
            known = _numpy(told)[ended].tolist()
            return [row if is_known else {} for row, is_known in zip(rows, known, strict=True)]

        if not self._stream.resets_itself:
            return split_info(info, ended)

        # RecordEpisodeStatistics writes the step's entry beside those of the reset.
        around = layers(self._stream.source.env)
        names = [layer._stats_key for layer in around if hasattr(layer, "_stats_key")]
        of_step = {key: info[key] for name in names for key in (name, f"_{name}") if key in info}
        return split_info(of_step, ended)

    @override
    def close(self) -> None:
        """Close the env."""
        self.env.close()

    # --- the envs -----------------------------------------------------------------------------------------------

    @override
    def get_images(self) -> Sequence[np.ndarray[Any, Any] | None]:
        """What the envs render."""
        return list(self._stream.render() or [None] * self.num_envs)

    @override
    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Return an attribute of each env, or that of the env if it steps all rows itself."""
        rows = list(self._get_indices(indices))
        if (envs := self._single_envs()) is not None:
            return [envs[i].get_wrapper_attr(attr_name) for i in rows]

        if attr_name == "render_mode":
            return [self._stream.render_mode] * len(rows)
        self._check_attribute(attr_name)
        values = self._stream.get_attr(attr_name)
        return [values[i] for i in rows]

    @override
    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of each env, or that of the env if it steps all rows itself.

        Raises:
            ValueError: such an env, and ``indices`` are not all.
        """
        rows = list(self._get_indices(indices))
        if (envs := self._single_envs()) is not None:
            for i in rows:
                envs[i].set_wrapper_attr(attr_name, value)
        elif self._is_async():
            values = [value] * self.num_envs
            if len(rows) < self.num_envs:
                values = self.get_attr(attr_name)
                for i in rows:
                    values[i] = value
            self._stream.set_attr(attr_name, values)
        else:
            self._need_all(rows, f"set_attr({attr_name!r})")
            self._stream.set_attr(attr_name, value)

    @override
    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of each env, or once that of the env if it steps all rows itself.

        Raises:
            ValueError: ``indices`` are not all, and the envs cannot be called one by one (as those of
                `SyncVectorEnv` can).
        """
        rows = list(self._get_indices(indices))
        if (envs := self._single_envs()) is not None:
            return [envs[i].get_wrapper_attr(method_name)(*method_args, **method_kwargs) for i in rows]

        self._need_all(rows, f"env_method({method_name!r})")
        self._check_attribute(method_name)
        return list(self._stream.call(method_name, *method_args, **method_kwargs))

    @override
    def env_is_wrapped(self, wrapper_class: Any, indices: Indices = None) -> list[bool]:
        """Whether each env is inside this wrapper; always True for `Monitor`, whose work this object does."""
        rows = list(self._get_indices(indices))
        if issubclass(wrapper_class, Monitor) or (envs := self._single_envs()) is None:
            return [issubclass(wrapper_class, Monitor)] * len(rows)
        return [is_wrapped(envs[i], wrapper_class) for i in rows]

    def _single_envs(self) -> Sequence[Any] | None:
        """The envs of a `SyncVectorEnv`; None for others, whose rows cannot be reached one by one."""
        base = getattr(self._stream.source.env, "unwrapped", None)
        if isinstance(base, SyncVectorEnv):
            return base.envs
        return None

    def _is_async(self) -> bool:
        return isinstance(getattr(self._stream.source.env, "unwrapped", None), AsyncVectorEnv)

    def _check_attribute(self, name: str) -> None:
        """Raise AttributeError where asking a worker process would end it."""
        if self._is_async() and not all(self._stream.call("has_wrapper_attr", name)):
            raise AttributeError(f"the envs have no attribute {name!r}")

    def _need_all(self, rows: list[int], what: str) -> None:
        if rows != list(range(self.num_envs)):
            raise ValueError(
                f"{what} with indices={rows} needs access to single envs, which "
                f"{type(self._stream.source.env).__name__} does not offer: leave indices out, or make it with "
                "vectorization_mode='sync'"
            )


def split_info(info: dict[str, Any], rows: Sequence[int]) -> list[dict[str, Any]]:
    """A vector env's info as one dict for each of ``rows``, without the entries of other rows.

    Args:
        info: arrays ``[E, ...]``, dicts of them, and what is the same for all rows; ``"_name"`` (bool ``[E]``) tells
            which rows ``"name"`` is about.
        rows: numbers of the rows.

    >>> split_info({"speed": np.array([1.0, 2.0]), "_speed": np.array([True, False]), "wind": "calm"}, range(2))
    [{'speed': 1.0, 'wind': 'calm'}, {'wind': 'calm'}]
    """
    split: list[dict[str, Any]] = [{} for _ in rows]
    named = set(map(str, info))  # a key may be a number, as in {0: stock, "_0": mask}
    for key, value in info.items():
        if key in _PASSED_APART or (isinstance(key, str) and key.startswith("_") and key[1:] in named):
            continue

        values: Sequence[Any]
        if isinstance(value, dict):
            values = split_info(value, rows)
        elif isinstance(value, np.ndarray | torch.Tensor) and value.ndim:
            # A copy, so that the entries do not share memory with the env's.
            array = _numpy(value)[list(rows)]
            values = array.tolist() if array.ndim == 1 else list(array)
        else:
            values = [value] * len(rows)

        mask = info.get(f"_{key}")
        if mask is None:
            included = [True] * len(rows)
        else:
            included = _numpy(mask)[list(rows)].tolist()

        for row, one, is_included in zip(split, values, included, strict=True):
            if is_included:
                row[key] = one
    return split


def _numpy(array: Any) -> Any:
    if isinstance(array, torch.Tensor):
        return array.detach().cpu().numpy()
    return array
