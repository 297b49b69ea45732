"""`FlatReplayBuffer`: a flatroll replay buffer for Stable-Baselines3."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from flatroll import buffers
from flatroll.buffers.columns.column import Columns
from flatroll.buffers.steps.staging import choose_window
from flatroll.buffers.transforms.transform import TransformLike
from flatroll.layout.checks import (
    check_device,
    check_flags,
    check_number,
    check_path,
    check_type,
    check_whole_number,
)
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
from flatroll.trainers.versions import trainer_imports

with trainer_imports("stable-baselines3", "2.7", "3", "sb3"):
    from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
    from stable_baselines3.common.preprocessing import get_obs_shape
    from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
    from stable_baselines3.common.vec_env import VecNormalize

Array: TypeAlias = np.ndarray[Any, Any]
DISCOUNTS = "discounts"  # entry of n-step rows
_WAITING_BYTES = 2**24  # observations of the steps that wait to be stored, by default
_FEWEST_STEPS = 8  # of a window, by default


class StoredSpace(NamedTuple):
    """How the observations or actions of E envs are stored."""

    name: str  # for error messages
    given: tuple[int, ...]  # shape of the values of a step, [E, ...]
    stored: tuple[int, ...]  # shape of the values in the buffer
    dtype: np.dtype[Any]  # dtype of the values in the buffer

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
        self.look_ahead = n_steps
        self.gamma = gamma
        self.env: Any = None  # SB3's VecNormalize, which normalizes rewards before they are summed

    def read(self, columns: Columns, ahead: Tensor, get: Callable[..., Columns]) -> Columns:
        """Return the columns of N rows as n-step transitions; ``ahead`` ``[N, n]`` has the rows of each, then -1."""
        used = ahead >= 0
        column = get(torch.where(used, ahead, ahead[:, :1]).flatten(), [REWARD])[REWARD]
        rewards = column.view(used.shape).numpy(force=True)
        if self.env is not None:
            rewards = self.env.normalize_reward(rewards)

        powers = self.gamma ** np.arange(self.look_ahead, dtype=np.float32)
        sums = (rewards * powers * used.numpy(force=True)).sum(1, keepdims=True)

        steps = used.sum(1, keepdim=True)
        last = ahead.gather(1, steps - 1).squeeze(1)
        changed = {**columns, **get(last, [key for key in columns if as_tuple(key)[0] == NEXT])}

        discounts = self.gamma ** steps.numpy(force=True).astype(np.float32)
        changed[REWARD] = torch.from_numpy(sums).to(column.device)
        changed[DISCOUNTS] = torch.from_numpy(discounts).to(column.device)
        return changed

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Return the sample unchanged: :meth:`read` has made the transitions."""
        return td

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "env": None}


def n_step_returns(n_steps: int, gamma: float | None) -> NStepReturns | None:
    """Return the transform that makes n-step transitions; None for one step, which needs no discount.

    Raises:
        TypeError, ValueError: ``n_steps`` or ``gamma`` is out of range, or ``gamma`` is missing.
    """
    check_whole_number("n_steps", n_steps)
    if gamma is not None:
        check_number("gamma", gamma, least=0, most=1)

    if n_steps == 1:
        return None
    if gamma is None:
        raise ValueError(
            f"gamma is needed with n_steps={n_steps}: it discounts the rewards that are summed, and SB3 does not pass "
            f"the model's gamma to its buffer. Give both the same number: gamma=0.99, "
            f"replay_buffer_kwargs={{'n_steps': {n_steps}, 'gamma': 0.99}}"
        )
    return NStepReturns(n_steps, gamma)


class FlatReplayBuffer(ReplayBuffer):
    """A ``replay_buffer_class`` that keeps observations once, and stacked frames once, in a `flatroll` buffer.

    It takes what SB3's own buffers take, draws the same rows by the same random numbers, and gives the same bits: a
    model has the same weights with either. In place of SB3's arrays it has

    Attributes:
        flat: the `flatroll.buffers.ReplayBuffer`; ``flat.stats()["bytes"]`` is its size.
        writer: its `StepWriter`, which holds up to a window of steps that wait to be stored.
        last_info: with a ``sampler``, the info of the last sample: ``"index"``, and what the sampler adds.

    Args:
        buffer_size: rows of all envs together; this and the next four are given by SB3's model.
        observation_space: of one env; a Dict space, too.
        action_space: of one env.
        device: of the samples.
        n_envs: number of envs E.
        optimize_memory_usage: must stay False.
        handle_timeout_termination: rows that end by ``"TimeLimit.truncated"`` in their info are not terminal.
        compact: store observations once (see `LazyTensorStorage`); False stores next observations separately.
        frame_stack: frames per stack, for observations ``[frames, ...]`` whose frames are to be kept once; a dict by
            key for Dict spaces. 1 stores observations as they are.
        codec: ``"zstd"`` compresses observations; a dict by key for Dict spaces.
        storage: folder of files that hold the rows (a pickle then names them), or what makes the storage, such as
            ``partial(LazyTensorStorage, device="cuda")``. Default: in memory.
        n_steps: steps whose rewards are summed. SB3's own ``n_steps=`` is for its own buffer, and stays 1.
        gamma: discount of those rewards, needed if ``n_steps`` is above 1. SB3 does not pass the model's ``gamma`` to
            its buffer, so give the same number to both.
        window: steps that are stored at a time; default 64, fewer if these would take more than 16 MB, and 256 with
            small observations and no ``sampler``.
        sampler: draws the rows, such as `PrioritizedSampler`, instead of SB3's uniform draws; it sees stored rows.
        transform: changes sampled rows, a tensordict ``[N]`` (see `Transform`), before they are normalized.

    Raises:
        ValueError: ``optimize_memory_usage``, a ``buffer_size`` below a window, ``n_steps`` above 1 without ``gamma``,
            a ``frame_stack`` that is not the observation's first dimension, or a key that the space does not have.

    >>> from stable_baselines3 import DQN
    >>> model = DQN("MlpPolicy", "CartPole-v1", replay_buffer_class=FlatReplayBuffer, buffer_size=1000, device="cpu",
    ...     gamma=0.9, replay_buffer_kwargs={"n_steps": 3, "gamma": 0.9})
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
        storage: str | os.PathLike[str] | Callable[..., buffers.Storage] = buffers.LazyTensorStorage,
        n_steps: int = 1,
        gamma: float | None = None,
        window: int | None = None,
        sampler: buffers.Sampler | None = None,
        transform: TransformLike | None = None,
    ) -> None:
        check_flags(optimize_memory_usage=optimize_memory_usage)
        if optimize_memory_usage:
            raise ValueError(
                "optimize_memory_usage=True is not needed: FlatReplayBuffer already stores each observation "
                "once, including the last ones of episodes, which SB3's option loses. Leave it out"
            )

        for name, space in (("observation_space", observation_space), ("action_space", action_space)):
            check_type(name, space, spaces.Space, "a space of Gymnasium")

        if not (isinstance(device, str) and device == "auto"):
            check_device("device", device)
        check_flags(compact=compact, handle_timeout_termination=handle_timeout_termination)
        if not callable(storage):
            check_path("storage", storage)
            storage = partial(buffers.LazyMemmapStorage, scratch_dir=storage)
        check_whole_number("buffer_size", buffer_size)

        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs)
        steps = max(buffer_size // check_whole_number("n_envs", n_envs), 1)
        self.buffer_size = steps
        self.optimize_memory_usage = False
        self.handle_timeout_termination = handle_timeout_termination

        parts: dict[NestedKey, spaces.Space[Any]] = {OBSERVATION: observation_space}
        self._names: list[str] = []  # names of the observations of a Dict space
        if isinstance(observation_space, spaces.Dict):
            self._names = list(observation_space)
            parts = {(OBSERVATION, name): observation_space[name] for name in self._names}
        self._observations = {key: self._entry(key, space) for key, space in parts.items()}
        self._later = {key: next_key(key) for key in self._observations}

        if window is None:
            # Longer windows cost less: 64 steps, or 256 if rows are small and the buffer holds many.
            row = sum(
                math.prod(entry.stored[1:]) * entry.dtype.itemsize for entry in self._observations.values()
            )
            window = min(steps, choose_window(64 * n_envs, n_envs, None))
            if sampler is None and row * n_envs <= 2048 and steps >= 16 * 256:
                window = 256
            most = _WAITING_BYTES // max(1, 2 * row * n_envs)  # a row waits with its next observation
            window = min(window, max(_FEWEST_STEPS, most))
        if steps < check_whole_number("window", window):
            raise ValueError(
                f"buffer_size={buffer_size} holds {steps} steps of {n_envs} envs, less than a window of {window}: "
                f"make it {window * n_envs} or more, or pass a smaller window"
            )

        dtype = np.dtype(self._maybe_cast_dtype(action_space.dtype))
        self._action = StoredSpace(
            "action", (n_envs, *(action_space.shape or ())), (n_envs, self.action_dim), dtype
        )
        self._n_step = n_step_returns(n_steps, gamma)
        discounts = [] if self._n_step is None else [DISCOUNTS]
        self._keys = (*self._observations, *self._later.values(), ACTION, REWARD, TERMINATED, *discounts)

        # A pickle stores an incomplete window, for which the ring drops a whole one: leave room for that.
        rows = -(-(steps + window - 1) // window) * window * n_envs
        options = self._encodings(frame_stack, codec)
        self.flat = buffers.ReplayBuffer(
            storage=storage(rows, compact_obs=compact, **options), sampler=sampler
        )
        for each in (self._n_step, transform):
            if each is not None:
                self.flat.append_transform(each)
        self.writer = self.flat.writer_for(n_envs, window=window)

        self.last_info: dict[str, Tensor] | None = None if sampler is None else {}
        self._none = np.zeros(n_envs, np.bool_)
        self._loaded = False

    def _entry(self, key: NestedKey, space: spaces.Space[Any]) -> StoredSpace:
        """What is stored of an observation, or of one in a Dict space."""
        name = "obs" if isinstance(key, str) else f"obs[{key[1]!r}]"
        shape = space.shape or ()
        stored: Any = get_obs_shape(space)
        return StoredSpace(name, (self.n_envs, *shape), (self.n_envs, *stored), np.dtype(space.dtype))

    def _encodings(self, frame_stack: Any, codec: Any) -> dict[str, Any]:
        """The options of the storage, by entry; given by key of a Dict space, or once for all observations."""
        options: dict[str, Any] = {}
        for name, value in (("frame_stack", frame_stack), ("codec", codec)):
            if isinstance(value, Mapping):
                if unknown := [key for key in dict(value) if key not in self._names]:
                    raise ValueError(
                        f"{name} names {unknown}, the observation space has the keys {self._names}"
                    )
                options[name] = {(OBSERVATION, key): one for key, one in value.items()}
            elif value is not None:
                options[name] = dict.fromkeys(self._observations, value)

        for key, frames in options.get("frame_stack", {}).items():
            check_whole_number("frame_stack", frames)
            shape = self._observations[key].stored[1:]
            if frames > 1 and shape[:1] != (frames,):
                raise ValueError(
                    f"frame_stack={frames} needs observations [{frames}, ...], those of {key!r} are {list(shape)}: "
                    "stack frames in front (SB3's VecTransposeImage moves them there)"
                )
        return options

    # --- writing --------------------------------------------------------------------------------------------------

    @override
    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Sequence[Any]) -> None:
        """Write one step of all envs, as SB3 passes it: ``next_obs`` has the true last observations of episodes.

        Raises:
            ValueError: another number of envs, or observations or actions of other shapes than the spaces say.
            TypeError: values that the dtype of their space cannot hold.
        """
        if len(infos) != self.n_envs:
            raise ValueError(
                f"the step has {len(infos)} envs, but this buffer was made for n_envs={self.n_envs}: use it "
                "with a model that has the same number of envs"
            )

        step: dict[NestedKey, Any] = {}
        for key, entry in self._observations.items():
            now = obs
            later = next_obs
            if not isinstance(key, str):
                now = obs[key[1]]
                later = next_obs[key[1]]
            step[key] = entry.checked(now)
            step[self._later[key]] = entry.checked(later)
        step[ACTION] = self._action.checked(action)
        step[REWARD] = reward

        ended = np.asarray(done, np.bool_)
        timeouts = self._none
        if self.handle_timeout_termination:
            flags = [info.get("TimeLimit.truncated", False) for info in infos]
            if any(flags):
                timeouts = np.array(flags, np.bool_)
                ended = ended & ~timeouts
        step[TERMINATED] = ended
        step[TRUNCATED] = timeouts

        # Rows that do not continue the previous row, as after an early reset, begin a trajectory. The writer
        # detects them, except for the first row after a load.
        step[IS_INIT] = self._none
        if self._loaded:
            step[IS_INIT] = self._find_abandoned(step)

        steps = self.writer.steps
        try:
            self.writer.write(step)
        finally:  # if a window cannot be stored, it waits with its last step included
            if self.writer.steps > steps:
                self._loaded = False
                self.pos += 1
                if self.pos == self.buffer_size:
                    self.full = True
                    self.pos = 0

    def _find_abandoned(self, step: Mapping[NestedKey, Any]) -> Array:
        """Which envs do not continue from the last row written, bool ``[E]``."""
        left = self._none.copy()
        if len(self.writer):
            at = [self.writer.steps - 1] * self.n_envs
            last = self.writer.read_columns(at, range(self.n_envs), self._later.values())
            for key, later in self._later.items():
                differs = last[later].numpy(force=True) != step[key]
                left |= differs.reshape(self.n_envs, -1).any(1)
        return left

    def __repr__(self) -> str:
        rows = self.size() * self.n_envs
        room = self.buffer_size * self.n_envs
        return f"FlatReplayBuffer({rows} of {room} rows, {self.writer.waiting} waiting, flat={self.flat})"

    @override
    def reset(self) -> None:
        """Remove all rows."""
        self.writer.flush()
        self.flat.empty()
        super().reset()

    def __getstate__(self) -> dict[str, Any]:
        self.writer.flush()  # before `flat` is pickled
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _loaded=True)

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

        if self._n_step is not None:
            self._n_step.env = env

        if not len(self.flat):
            self.writer.flush()
        rows, self.last_info = self.flat.sample(batch_size, return_info=True)
        return self._samples({key: rows.get(key) for key in self._keys}, env)

    @override
    def _get_samples(self, batch_inds: Array, env: VecNormalize | None = None) -> Any:
        """The rows at these positions of SB3's ring, each of a random env."""
        if self._n_step is not None:
            self._n_step.env = env

        envs = np.zeros(len(batch_inds), np.int64)
        if self.n_envs > 1:  # with one env there is nothing to draw
            envs = np.random.randint(0, high=self.n_envs, size=(len(batch_inds),))

        # Position pos - 1 holds the newest step; going back around the ring, each earlier position holds the
        # step before.
        steps = self.writer.steps - 1 - (self.pos - 1 - batch_inds) % self.buffer_size
        return self._samples(self.writer.read_columns(steps, envs, self._keys), env)

    def _samples(self, columns: Columns, env: VecNormalize | None) -> Any:
        """Columns of rows as SB3's algorithms read them."""
        rewards = columns[REWARD]
        discounts = columns.get(DISCOUNTS)
        if env is not None and discounts is None:
            rewards = torch.from_numpy(env.normalize_reward(rewards.numpy(force=True)))
        if discounts is not None:
            discounts = discounts.to(self.device)

        make: Any = DictReplayBufferSamples if self._names else ReplayBufferSamples
        return make(
            self._normalize([columns[key] for key in self._observations], env),
            columns[ACTION].to(self.device),
            self._normalize([columns[key] for key in self._later.values()], env),
            columns[TERMINATED].to(self.device, torch.float32),
            rewards.to(self.device),
            discounts,
        )

    def _normalize(self, values: list[Tensor], env: VecNormalize | None) -> Any:
        """Observations, a dict of them for a Dict space, as ``env`` normalizes them."""
        named: Any = dict(zip(self._names or [""], values, strict=True))
        if env is not None:
            arrays: Any = {name: value.numpy(force=True) for name, value in named.items()}
            if self._names:
                arrays = env.normalize_obs(arrays)
            else:
                arrays = {"": env.normalize_obs(arrays[""])}
            named = {name: torch.from_numpy(array) for name, array in arrays.items()}

        named = {name: value.to(self.device) for name, value in named.items()}
        if self._names:
            return named
        return named[""]

    def update_priority(self, priority: Tensor | float) -> None:
        """Set the priorities of the rows of the last sample: one for all or one per row, not negative.

        SB3 hands out no errors of rows, so a callback or a subclass's ``train`` computes them. Nor do its losses weigh
        rows; ``last_info["priority_weight"]`` has the weights.

        Raises:
            RuntimeError: nothing was sampled, or there is no ``sampler``.
        """
        if not self.last_info:
            raise RuntimeError(
                "there is no sample whose priorities could be set: give the buffer a sampler "
                "(replay_buffer_kwargs={'sampler': PrioritizedSampler(...)}), and sample first"
            )
        self.flat.update_priority(self.last_info["index"], priority, self.last_info.get("index_generation"))
