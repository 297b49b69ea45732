"""`FlatReplayBuffer`: Stable-Baselines3 keeps its transitions in a replay buffer of flatroll."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from flatroll.buffers import LazyMemmapStorage, LazyTensorStorage, Sampler, Storage
from flatroll.buffers import ReplayBuffer as FlatBuffer
from flatroll.buffers.columns.base import Columns
from flatroll.buffers.step_rows import window_of
from flatroll.buffers.transforms.base import TransformLike
from flatroll.buffers.transforms.n_step import Get
from flatroll.layout.checks import whole_number
from flatroll.layout.keys import (
    ACTION,
    IS_INIT,
    NEXT,
    OBSERVATION,
    REWARD,
    TERMINATED,
    TRUNCATED,
    NestedKey,
    as_tuple,
    next_key,
)

try:
    import stable_baselines3

    if not (2, 7) <= tuple(map(int, stable_baselines3.__version__.split(".")[:2])) < (3, 0):
        raise ImportError(
            f"version {stable_baselines3.__version__} is installed, 2.7 or a later 2.x is needed"
        )
    from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
    from stable_baselines3.common.preprocessing import get_obs_shape
    from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
    from stable_baselines3.common.vec_env import VecNormalize
except ImportError as error:
    raise ImportError(
        f"flatroll.trainers.sb3_buffer needs Stable-Baselines3 ({error}): pip install --upgrade 'flatroll[sb3]'"
    ) from error

Array: TypeAlias = np.ndarray[Any, Any]

_DISCOUNTS = "discounts"


class Entry(NamedTuple):
    """What is stored of one space, observations or actions, of E envs.

    Attributes:
        name: for errors.
        given: shape of a step's values, ``[E, ...]``.
        stored: their shape in the buffer.
        dtype: their dtype there.
    """

    name: str
    given: tuple[int, ...]
    stored: tuple[int, ...]
    dtype: np.dtype[Any]

    def checked(self, value: Any) -> Array:
        """Return a step's values as they are stored; ValueError or TypeError if the space has no such values."""
        array = np.asarray(value)
        if array.shape != self.stored or array.dtype != self.dtype:
            if array.shape not in (self.given, self.stored):
                raise ValueError(
                    f"{self.name} must be {list(self.given)}, envs first, as the model's spaces say, got "
                    f"{list(array.shape)}"
                )
            if not np.can_cast(array.dtype, self.dtype, "same_kind"):
                raise TypeError(f"{self.name} must be {self.dtype}, as its space says, got {array.dtype}")
            array = array.astype(self.dtype, copy=False).reshape(self.stored)
        return array


class NStepReturns:
    """A transform that makes n-step transitions by the same float32 operations as SB3's ``NStepReplayBuffer``.

    `MultiStepTransform` computes the same with discounts in float64, so that the last bits may differ.
    """

    def __init__(self, n_steps: int, gamma: float) -> None:
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma must lie in [0, 1], got {gamma}")
        self.look_ahead, self.gamma = n_steps, gamma
        self.env: VecNormalize | None = None  # by which rewards are normalized, before they are summed

    def read(self, columns: Columns, ahead: Tensor, get: Get) -> Columns:
        """The columns of N rows as n-step transitions; ``ahead``, ``[N, n]``: the rows of each, -1 from its end on."""
        used = ahead >= 0
        device = columns[REWARD].device
        rewards = get(torch.where(used, ahead, ahead[:, :1]).flatten(), [REWARD])[REWARD]
        each = BaseBuffer._normalize_reward(rewards.view(used.shape).cpu().numpy(), self.env)
        mask = used.cpu().numpy()
        steps = mask.sum(1, keepdims=True)
        sums = (each * self.gamma ** np.arange(self.look_ahead, dtype=np.float32) * mask).sum(
            1, keepdims=True
        )
        last = ahead.gather(1, torch.from_numpy(steps - 1).to(ahead.device)).squeeze(1)
        changed = {**columns, **get(last, [key for key in columns if as_tuple(key)[0] == NEXT])}
        changed[REWARD] = torch.from_numpy(sums).to(device)
        changed[_DISCOUNTS] = torch.from_numpy(self.gamma ** steps.astype(np.float32)).to(device)
        return changed

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Return the sample: :meth:`read` has done it."""
        return td


class FlatReplayBuffer(ReplayBuffer):
    """A ``replay_buffer_class`` that keeps observations once, and stacked frames once, in a `flatroll` buffer.

    It takes what SB3's own buffers take, draws the same rows by the same random numbers, and gives the same bits: a
    model has the same weights with either. In place of SB3's arrays it has

    Attributes:
        flat: the `flatroll.buffers.ReplayBuffer`; ``flat.stats()["bytes"]`` is its size.
        writer: its `StepWriter`, which holds up to a window of steps that wait to be stored.
        last_info: with a ``sampler``, the info of the last sample: ``"index"``, and what the sampler adds.

    Args:
        buffer_size, observation_space, action_space, device, n_envs: given by SB3's model.
        optimize_memory_usage: must stay False.
        handle_timeout_termination: rows that end by ``"TimeLimit.truncated"`` in their info are not terminal.
        compact: keep observations once (see `LazyTensorStorage`); False keeps next observations apart.
        frame_stack: frames per stack, for observations ``[frames, ...]`` whose frames are to be kept once; a dict by
            key for Dict spaces.
        codec: ``"zstd"`` compresses observations; a dict by key for Dict spaces.
        memmap: folder of files that hold the rows, instead of memory; a pickle then names the files.
        storage: what makes the storage, given the rows and options: ``partial(LazyTensorStorage, device="cuda")``.
        n_steps, gamma: steps whose rewards are summed, and their discount. Give both: SB3's ``n_steps=`` is for its own
            buffer, and has to stay 1 here.
        window: steps that are stored at a time, default up to 64.
        sampler: draws the rows, such as `PrioritizedSampler`, instead of SB3's uniform draws; it sees stored rows.
        transform: changes sampled rows, a tensordict ``[N]`` (see `Transform`), before they are normalized.

    Raises:
        ValueError: ``optimize_memory_usage``, a ``buffer_size`` below a window, a ``frame_stack`` that is not the
            observation's first dimension, or a key that the space does not have.

    >>> from stable_baselines3 import DQN
    >>> model = DQN("MlpPolicy", "CartPole-v1", replay_buffer_class=FlatReplayBuffer, buffer_size=1000, device="cpu",
    ...     replay_buffer_kwargs={"n_steps": 3, "gamma": 0.99})
    >>> model.learn(200).replay_buffer.sample(32).discounts.shape
    torch.Size([32, 1])
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        compact: bool = True,
        frame_stack: int | Mapping[str, int] | None = None,
        codec: str | Mapping[str, str] | None = None,
        memmap: str | os.PathLike[str] | None = None,
        storage: Callable[..., Storage] | None = None,
        n_steps: int = 1,
        gamma: float = 0.99,
        window: int | None = None,
        sampler: Sampler | None = None,
        transform: TransformLike | None = None,
    ) -> None:
        if optimize_memory_usage:
            raise ValueError(
                "optimize_memory_usage=True is not needed: FlatReplayBuffer keeps each observation once already, and "
                "the last ones of episodes, too, which SB3's option loses. Leave it out"
            )
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs)
        self.buffer_size = steps = max(buffer_size // whole_number("n_envs", n_envs), 1)
        self.optimize_memory_usage = False
        self.handle_timeout_termination = handle_timeout_termination
        window = min(steps, window_of(64 * n_envs, n_envs, None)) if window is None else window
        if steps < whole_number("window", window):
            raise ValueError(
                f"buffer_size={buffer_size} holds {steps} steps of {n_envs} envs, less than a window of {window}: "
                f"make it {window * n_envs} or more, or give a smaller window"
            )
        nested = isinstance(observation_space, spaces.Dict)
        parts = {(OBSERVATION, key): space for key, space in observation_space.items()} if nested else {}
        self._observations = {
            key: self._entry(key, space) for key, space in (parts or {OBSERVATION: observation_space}).items()
        }
        dtype = self._maybe_cast_dtype(action_space.dtype)
        shape = action_space.shape or ()
        self._action = Entry("action", (n_envs, *shape), (n_envs, self.action_dim), np.dtype(dtype))
        options = {
            name: self._by_entry(name, value)
            for name, value in (("frame_stack", frame_stack), ("codec", codec))
            if value is not None
        }
        for key, frames in options.get("frame_stack", {}).items():
            if (shape := self._observations[key].stored[1:])[:1] != (frames,):
                raise ValueError(
                    f"frame_stack={frames} needs observations [{frames}, ...], those of {key!r} are {list(shape)}: "
                    "stack frames in front (SB3's VecTransposeImage moves them there)"
                )
        if storage is not None and memmap is not None:
            raise ValueError("give storage or memmap, not both: partial(LazyMemmapStorage, scratch_dir=...)")
        if storage is None:
            storage = LazyTensorStorage if memmap is None else partial(LazyMemmapStorage, scratch_dir=memmap)
        # A pickle stores a window that is not full, for which the ring gives up a whole one: that must be to spare.
        windows = -(-(steps + window - 1) // window)
        self.flat = FlatBuffer(
            storage=storage(windows * window * n_envs, compact_obs=compact, **options), sampler=sampler
        )
        self._n_step = NStepReturns(n_steps, gamma) if whole_number("n_steps", n_steps) > 1 else None
        for each in (self._n_step, transform):
            if each is not None:
                self.flat.append_transform(each)
        self.writer = self.flat.writer_for(n_envs, window=window)
        self.last_info: dict[str, Tensor] | None = None if sampler is None else {}
        self._fresh: Array | None = np.zeros(n_envs, np.bool_)

    def _entry(self, key: NestedKey, space: spaces.Space[Any]) -> Entry:
        """What is stored of an observation, or of one in a Dict space."""
        shape: Any = get_obs_shape(space)
        name = "obs" if isinstance(key, str) else f"obs[{key[1]!r}]"
        return Entry(name, (self.n_envs, *(space.shape or ())), (self.n_envs, *shape), np.dtype(space.dtype))

    def _by_entry(self, name: str, value: Any) -> dict[NestedKey, Any]:
        """An option by entry: given by key of a Dict space, or once for all observations."""
        if not isinstance(value, Mapping):
            return dict.fromkeys(self._observations, value)
        chosen: dict[NestedKey, Any] = {(OBSERVATION, key): one for key, one in value.items()}
        if unknown := [key[1] for key in chosen if key not in self._observations]:
            names = [key[1] for key in self._observations if not isinstance(key, str)]
            raise ValueError(
                f"{name} names {unknown}, which the observation space does not have: it has {names}"
            )
        return chosen

    # --- writing --------------------------------------------------------------------------------------------------

    @override
    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Sequence[Any]) -> None:
        """Write one step of all envs, as SB3 hands it over: ``next_obs`` has the true last observations of episodes.

        Raises:
            ValueError: another number of envs, or observations or actions of other shapes than the spaces say.
            TypeError: values that the dtype of their space cannot hold.
        """
        if len(infos) != self.n_envs:
            raise ValueError(
                f"the step is one of {len(infos)} envs, this buffer was made for n_envs={self.n_envs}: use it with a "
                "model of as many"
            )
        step: dict[NestedKey, Any] = {}
        for key, entry in self._observations.items():
            now, later = (obs, next_obs) if isinstance(key, str) else (obs[key[1]], next_obs[key[1]])
            step[key], step[next_key(key)] = entry.checked(now), entry.checked(later)
        step[ACTION], step[REWARD] = self._action.checked(action), reward
        ended = np.asarray(done, np.bool_)
        timeouts = np.zeros_like(ended)
        if self.handle_timeout_termination:
            timeouts[:] = [info.get("TimeLimit.truncated", False) for info in infos]
        step[TERMINATED], step[TRUNCATED] = ended & ~timeouts, timeouts
        # A row that does not go on from the one before, as after an early reset, begins a trajectory. The writer finds
        # it, but for the first row after a load.
        step[IS_INIT] = self._left(step) if self._fresh is None else self._fresh
        self.writer.write(step)
        self.pos += 1
        if self.pos == self.buffer_size:
            self.full, self.pos = True, 0

    def _left(self, step: Mapping[NestedKey, Any]) -> Array:
        """Which envs do not go on from the last row stored, bool ``[E]``."""
        self._fresh = np.zeros(self.n_envs, np.bool_)
        left = np.zeros(self.n_envs, np.bool_)
        if self.writer.steps > self.writer.oldest:
            last = self.writer.read([self.writer.steps - 1] * self.n_envs, range(self.n_envs))
            for key in self._observations:
                differs = last.get(next_key(key)).cpu().numpy() != step[key]
                left |= differs.reshape(self.n_envs, -1).any(1)
        return left

    @override
    def reset(self) -> None:
        """Remove all rows."""
        self.writer.flush()
        self.flat.empty()
        super().reset()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _fresh=None)

    # --- reading --------------------------------------------------------------------------------------------------

    @override
    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw rows as SB3 does, or by the ``sampler``; ``env`` normalizes them.

        Returns:
            ``ReplayBufferSamples``, or for Dict spaces ``DictReplayBufferSamples``; ``discounts`` float32 ``[B, 1]``
            with n-step returns, else None.
        """
        if self.last_info is None:
            return super().sample(batch_size, env)
        if not len(self.flat):
            self.writer.flush()
        rows, self.last_info = self._with(env, partial(self.flat.sample, batch_size, return_info=True))
        return self._samples(rows, env)

    @override
    def _get_samples(self, batch_inds: Array, env: VecNormalize | None = None) -> Any:
        """The rows at these positions of SB3's ring, each of a random env."""
        envs = np.random.randint(0, high=self.n_envs, size=(len(batch_inds),))
        # Position p was written in the present lap of the ring, or if it is pos or above, in the one before.
        steps = batch_inds + (self.writer.steps - self.pos)
        steps[batch_inds >= self.pos] -= self.buffer_size
        return self._samples(self._with(env, partial(self.writer.read, steps, envs)), env)

    def _with(self, env: VecNormalize | None, read: Callable[[], Any]) -> Any:
        """``read()``, in which n-step returns are of rewards that ``env`` normalizes."""
        if self._n_step is None:
            return read()
        self._n_step.env = env
        try:
            return read()
        finally:
            self._n_step.env = None  # a pickle would hold it

    def _samples(self, rows: TensorDictBase, env: VecNormalize | None) -> Any:
        """Rows as SB3's algorithms read them."""
        now, later, rewards = rows.get(OBSERVATION), rows.get((NEXT, OBSERVATION)), rows.get(REWARD)
        discounts = rows.get(_DISCOUNTS, None)
        if env is not None:
            now, later = self._normalized(now, env), self._normalized(later, env)
            if discounts is None:
                rewards = torch.from_numpy(self._normalize_reward(rewards.cpu().numpy(), env))
        dones = rows.get(TERMINATED).float()
        parts = [part.to(self.device) for part in (now, rows.get(ACTION), later, dones, rewards)]
        if discounts is not None:
            parts.append(discounts.to(self.device))
        if isinstance(self.observation_space, spaces.Dict):
            parts[0], parts[2] = (dict(part.items()) for part in (parts[0], parts[2]))
            return DictReplayBufferSamples(*parts)
        return ReplayBufferSamples(*parts)

    def _normalized(self, observations: Any, env: VecNormalize) -> Any:
        """Observations as ``env`` normalizes them: a tensor, or a tensordict of a Dict space."""
        if isinstance(observations, Tensor):
            return torch.from_numpy(self._normalize_obs(observations.cpu().numpy(), env))
        arrays: Any = {key: values.cpu().numpy() for key, values in observations.items()}
        arrays = self._normalize_obs(arrays, env)
        return TensorDict(
            {key: torch.from_numpy(array) for key, array in arrays.items()}, observations.batch_size
        )

    def update_priority(self, priority: Tensor | float) -> None:
        """Set the priorities of the rows of the last sample, with a ``sampler`` that has some.

        SB3 hands out no errors of rows: a callback or a subclass's ``train`` has to compute them. Its losses do not
        weigh rows either; ``last_info["priority_weight"]`` has the weights.

        Args:
            priority: one value for all rows or one per row, not negative.

        Raises:
            RuntimeError: nothing was sampled, or there is no ``sampler``.
        """
        if not self.last_info:
            raise RuntimeError(
                "there is no sample whose priorities could be set: give the buffer a sampler "
                "(replay_buffer_kwargs={'sampler': PrioritizedSampler(...)}), and sample first"
            )
        self.flat.update_priority(self.last_info["index"], priority, self.last_info.get("index_generation"))
