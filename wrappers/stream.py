"""`VectorStream`: the interface of every adapted vector env, with the flags that all markers use."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from flatroll.layout.checks import check_type
from flatroll.wrappers.arrays import (
    ActionCheck,
    Array,
    Tree,
    action_limits,
    copy_array,
    fill_rows,
    first_leaf,
    full_for,
    leaves_at,
    map_tree,
    select,
)
from flatroll.wrappers.plain_state import copy_plain
from flatroll.wrappers.source import Info, Seed, Step, TorchView, VectorSource, is_from, layers
from flatroll.wrappers.step_info import StepInfo, rows_like
from flatroll.wrappers.sub_env_returns import misfit, one_reward

FinalObs = str | Callable[[dict[str, Any], Array], Tree] | None

#: Metadata key of adapted envs. Gymnasium copies metadata to the vector envs it makes.
ADAPTED = "flatroll.adapted"


class Moves:
    """Counts the steps and resets of an env object over all adapted envs around it; created by `shared_moves`.

    Attributes:
        env: the env object.
        count: how often it was stepped or reset.
    """

    def __init__(self, env: object) -> None:
        self.env = env
        self.count = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy the count: a copy counts the moves of the copied env."""
        return shared_moves, (self.env,), {"count": self.count}


# Keyed by id, since an env may not be hashable or weakly referenceable. An entry holds its env, so the id is not
# reused, and lives as long as an adapted env refers to the entry.
_MOVES: WeakValueDictionary[int, Moves] = WeakValueDictionary()


def shared_moves(env: object) -> Moves:
    """Return the `Moves` of an env object, shared by all callers while one of them keeps it."""
    return _MOVES.setdefault(id(env), Moves(env))


class Lending(NamedTuple):
    """What a collector promises for a step, so that less need be copied and checked.

    Attributes:
        arrays: reward, flags and final observations may be the env's own arrays, which its next step overwrites: the
            collector copies them.
        markers: markers may put their own arrays into ``info``, and `VectorStream.first` may be the same array as
            `VectorStream.ended`: nobody writes into them.
        drawn: the actions were drawn from the action space, so their range is not checked.
    """

    arrays: bool = False
    markers: bool = False
    drawn: bool = False


#: What a stream holds after a step.
_HELD = (
    "first",
    "ended",
    "known",
    "has_final",
    "any_first",
    "any_ended",
    "_elapsed",
    "_absent",
    "_stepped",
)

#: Of a step that no collector makes.
NOTHING_LENT = Lending()


class VectorStream(VectorEnv[Any, Any, Any]):
    """An adapted vector env, made by `as_vector_env`, with flags ``first`` and ``ended`` for each sub-env.

    Besides Gymnasium's interface it has flags of the last ``reset`` or ``step``: arrays of shape ``(E,)`` on the
    env's device, new at each call, so that callers may keep them.

    Args:
        source: the adapter of the env, see `VectorSource`.
        mode: how the source resets envs whose episode has ended, an `AutoresetMode` or its value.
        final_obs: where a SAME_STEP env leaves its final observations, see `as_vector_env`.

    Attributes:
        first: the returned observation is the first of an episode.
        ended: the last step was the last of an episode.
        valid: the last step is a transition; None if every row is. A NEXT_STEP env that resets in the step after the
            end ignores the action, so that row is not a transition; nor is the row of an absent agent (see
            `VectorSource.absent`), whose ``first`` stays True.
        known: the true next observation of the step is known; None if it is known in every row.
        has_final: the last step of this env returned ``info["final_obs"]``.
        any_first, any_ended: whether any row is; None on a device, where checking would sync.
        same_step: the returned observation of an ended row is already the next episode's first.
        hides_final_obs: the env may hide final observations, so `known` may be False in some rows.
        actions: the actions passed to the env in the last step, after checks and casts.
        lending: what a collector promises for the step that it makes, see `Lending`; nothing outside of its steps.
        capabilities: see `Capabilities`.
        final_obs: as it was passed.
        moves: the count of steps and resets of the env, shared by all adapted envs around it.
        at: the count at this stream's last step or reset; -1 before the first.
    """

    def __init__(
        self, source: VectorSource, mode: AutoresetMode | str, *, final_obs: FinalObs = "auto"
    ) -> None:
        mode = AutoresetMode(mode)
        self.source = source
        self.num_envs = source.num_envs
        check_space(source.single_observation_space, "observation_space")
        check_space(source.single_action_space, "action_space")
        self.single_observation_space = source.single_observation_space
        self.single_action_space = source.single_action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.render_mode = getattr(source.env, "render_mode", None)
        self.spec = getattr(source.env, "spec", None)

        can = source.capabilities
        self.capabilities = can
        self._on_host = can.framework == "numpy"
        rows = can.batch_size or self.num_envs
        self._check_actions = ActionCheck(
            self.single_action_space, rows, can.framework, can.device, not can.checks_range
        )
        self.actions: Tree = None

        if final_obs != "auto" and mode is not AutoresetMode.SAME_STEP:
            raise ValueError(
                f"final_obs={final_obs!r} is for envs with autoreset_mode=SAME_STEP; in {mode.name} the step itself "
                "returns the last observation"
            )
        if mode is AutoresetMode.DISABLED and not can.partial_reset:
            raise ValueError(
                "an env with autoreset_mode=DISABLED must be able to reset chosen envs (reset_mask or "
                f"env_ids), and {type(source.env).__name__} cannot: use one of its autoresetting modes"
            )

        # How ended rows are reset, and where their last observations are.
        self._folds = mode is AutoresetMode.DISABLED  # this stream resets the ended rows within the same step
        self._native_same_step = mode is AutoresetMode.SAME_STEP
        self.final_obs = final_obs
        self.hides_final_obs = self._native_same_step and (
            final_obs is None or (final_obs == "auto" and can.hides_final_obs)
        )
        if mode is AutoresetMode.NEXT_STEP:
            self._declare(AutoresetMode.NEXT_STEP)
        else:
            self._declare(AutoresetMode.SAME_STEP)
        self._limit: int | None = None
        self._elapsed: Array = None  # with a limit: steps of each row's episode so far, int64 (E,)
        self._absent: Array | None = None  # NEXT_STEP: the rows of absent agents, see `VectorSource.absent`

        self.moves = shared_moves(getattr(source.stepped, "unwrapped", source.stepped))
        self.at = -1
        self._stepped = False

        self.lending = NOTHING_LENT

        # The flags of the last step or reset.
        self.first: Array = None
        self.ended: Array = None
        self.known: Array | None = None
        self.has_final = False
        self.any_first: bool | None = True
        self.any_ended: bool | None = False

        # The entries of info that the env itself returned in the last step that may have ended an episode. Of these,
        # RecordEpisodeStatistics writes those of the step where SAME_STEP keeps the entries of the reset.
        self._own_entries: set[str] = set()
        keys = [layer._stats_key for layer in layers(source.env) if hasattr(layer, "_stats_key")]
        self._of_step = {name for key in keys for name in (key, f"_{key}")}

    def _declare(self, mode: AutoresetMode) -> None:
        self.same_step = mode is AutoresetMode.SAME_STEP
        self.metadata = {
            **(getattr(self.source.env, "metadata", None) or {}),
            "autoreset_mode": mode,
            ADAPTED: True,
        }

    @property
    def valid(self) -> Array | None:
        """Mask of the sub-envs whose last step was a transition, not only a reset; None if all were."""
        if self.same_step or not self._stepped:
            return None
        return ~self.first

    @property
    def may_alias(self) -> bool:
        """The same as ``lending.arrays``."""
        return self.lending.arrays

    @property
    def may_alias_markers(self) -> bool:
        """The same as ``lending.markers``."""
        return self.lending.markers

    @property
    def drawn(self) -> bool:
        """The same as ``lending.drawn``."""
        return self.lending.drawn

    @property
    def resets_itself(self) -> bool:
        """Whether the env resets ended rows within the step that ended them; otherwise this stream or a step does."""
        return self._native_same_step

    @property
    def whole_finals(self) -> bool:
        """Whether ``info["final_obs"]`` is the true next observation of every row."""
        return not self._native_same_step or (self.capabilities.whole_finals and self.final_obs == "auto")

    @property
    def action_spec(self) -> spaces.Space[Any]:
        """Alias of ``single_action_space``, as in ``RandomPolicy(env.action_spec)``."""
        return self.single_action_space

    @property
    def unwrapped(self) -> Any:
        base = getattr(self.source.env, "unwrapped", self.source.env)
        if isinstance(base, VectorEnv):
            return base
        return self

    def __repr__(self) -> str:
        mode = self.metadata["autoreset_mode"].value
        return f"VectorStream({type(self.source.env).__name__}, num_envs={self.num_envs}, {mode})"

    @property
    def np_random(self) -> Any:
        return self.source.env.np_random

    @np_random.setter
    def np_random(self, value: Any) -> None:
        self.source.env.np_random = value

    @property
    def np_random_seed(self) -> Any:
        return self.source.env.np_random_seed

    def flags(self) -> dict[str, Any]:
        """Return what the stream itself holds after the last step or reset, as plain values; see `Snapshots`."""
        flags = {name: copy_plain(getattr(self, name)) for name in _HELD}
        return {**flags, "own_entries": sorted(self._own_entries)}

    def set_flags(self, flags: Mapping[str, Any]) -> None:
        """Restore what `flags` returned; the env inside must be restored, too."""
        device = self.capabilities.device
        for name in _HELD:
            setattr(self, name, copy_plain(flags[name], device))
        self._own_entries = set(flags["own_entries"])

    @property
    def elapsed(self) -> Array | None:
        """Steps of each sub-env's episode so far, int64 ``(E,)``; None unless `reset_in_same_step` set a limit."""
        return self._elapsed

    def enter_episodes(self, elapsed: Array | None) -> None:
        """Have the flags of a step that began and ended no episode, after ``elapsed`` steps of each: see `elapsed`.

        For a stack that was reset and whose env was then put into the middle of an episode.
        """
        self.first = self.first & False
        self.ended = self.ended & False
        self.any_first = False
        self.any_ended = False
        self._elapsed = copy_plain(elapsed, self.capabilities.device)
        self._stepped = True

    def reset_in_same_step(self, max_steps: int | None = None) -> None:
        """Reset ended rows in the step that ended them; end episodes after ``max_steps`` transitions if given.

        Without ``max_steps`` a SAME_STEP env already does so, and must return the last observations from now on.

        Raises:
            ValueError: the env cannot reset chosen rows, hides its last observations, or has been reset already.
        """
        if max_steps is not None and self._limit is not None and self._limit <= max_steps:
            return  # for example a second evaluation in this env

        limits = max_steps is not None
        asked = f"max_steps={max_steps}" if limits else "autoreset='same_step'"
        if (limits or not self.same_step) and not self.capabilities.partial_reset:
            raise self._partial_reset_error(asked, limits)
        if (limits or not self.same_step) and self.at >= 0:
            raise ValueError(f"{asked} must be set before the env's first reset")

        if max_steps is not None:
            if self._limit is None:
                self._limit = max_steps
            else:
                self._limit = min(max_steps, self._limit)
        elif self._native_same_step:
            if self.final_obs is None:
                raise ValueError(
                    f"{asked} needs the last observations, and final_obs=None says that the env hides them"
                )
            self.hides_final_obs = False  # a step that hides an observation raises

        self._folds = not self._native_same_step
        self._declare(AutoresetMode.SAME_STEP)

    def _partial_reset_error(self, asked: str, limits: bool) -> ValueError:
        """Return the error for an env that cannot reset chosen rows."""
        name = type(self.source.env).__name__
        if limits and is_from("ale_py", self.source.env):
            return ValueError(
                f"{asked} needs an env that can reset chosen envs, and {name} cannot: set the limit in the env, "
                "max_num_frames_per_episode=..."
            )

        if limits:
            way_out = "set the limit in the env (gymnasium, envpool: max_episode_steps=...)"
        else:
            way_out = "with autoreset_mode=SAME_STEP"
        return ValueError(
            f"{asked} needs an env that can reset chosen envs, and {name} cannot: make it with "
            f"vectorization_mode='sync', or {way_out}"
        )

    def reset(self, *, seed: Seed = None, options: Info | None = None) -> tuple[Tree, Info]:
        """Reset all rows, or those of ``options["reset_mask"]`` (bool ``(E,)``, NumPy or torch).

        The caller's ``options`` are not modified. A masked reset returns the full batch; the other rows keep their
        observation.
        """
        mask = None
        if options is not None:
            check_type("options", options, Mapping, "a dict or None")
            options = dict(options) or None
        if options:
            mask = options.pop("reset_mask", None)
        seed = _plain_seed(seed)

        if mask is None:
            first = self.at < 0
            # Together: an interrupt must not come between.
            self.moves.count = self.at = self.moves.count + 1
            obs, info = self.source.reset(seed, options)
            if first:
                self._compare_with_space(obs)

            like = first_leaf(obs)
            self.first = full_for(like, self.num_envs, True, torch.bool)
            self.ended = full_for(like, self.num_envs, False, torch.bool)
            if self._limit:
                self._elapsed = full_for(like, self.num_envs, 0, torch.int64)
            else:
                self._elapsed = None
            self.known = None
            self._stepped = False

            if self.same_step:
                self._absent = None
            else:
                self._absent = self.source.absent()
            if self._on_host:
                self.any_first = True
                self.any_ended = False
            else:
                self.any_first = None
                self.any_ended = None
            return obs, info

        rows = self.as_mask(mask)
        if not self.capabilities.partial_reset:
            raise ValueError(
                f"options['reset_mask'] is not possible here: {type(self.source.env).__name__} cannot reset "
                "chosen envs (or is not known to: with autoreset_mode=DISABLED every env must be able to)"
            )
        if self.moves.count != self.at:
            self._refuse("options['reset_mask'] was given to the first reset: reset all envs first")

        # Together: an interrupt must not come between.
        self.moves.count = self.at = self.at + 1
        obs, info = self.source.reset(seed, options, rows)

        # New arrays: the caller may keep the old ones.
        self.first, self.ended = self.first | rows, self.ended & ~rows
        if self._elapsed is not None:
            self._elapsed = self._elapsed * ~rows  # 0 where reset
        if self._on_host:
            self.any_first, self.any_ended = bool(self.first.any()), bool(self.ended.any())
        return obs, info

    def step(self, actions: Tree) -> Step:
        """Step all sub-envs; in SAME_STEP mode ``info["final_obs"]`` is ``(E, ...)`` if the env returns it."""
        if self.moves.count != self.at:
            self._refuse("step was called before reset: call env.reset() first")

        self._stepped = True
        self.actions = self._check_actions(actions, self.lending.drawn)
        # Together: an interrupt must not come between.
        self.moves.count = self.at = self.at + 1
        # Resetting ended rows may overwrite what the step returned.
        self.source.may_alias = self.lending.arrays and not self._folds and self._limit is None
        try:
            obs, reward, terminated, truncated, info = self.source.step(self.actions)
        except Exception as error:  # an env may raise anything for an invalid action
            self._explain(error)
            raise

        if not self.capabilities.exact_flags:
            # Convert reward to float32 and flags to bool, all (E,); no copy where they already are.
            if isinstance(reward, Tensor):
                if reward.dtype is not torch.float32:
                    reward = reward.float()
                if not terminated.dtype is truncated.dtype is torch.bool:
                    terminated = terminated.bool()
                    truncated = truncated.bool()
            else:
                reward = np.asarray(reward, dtype=np.float32)
                terminated = np.asarray(terminated, dtype=bool)
                truncated = np.asarray(truncated, dtype=bool)

            shape = (self.num_envs,)
            if reward.shape != shape or terminated.shape != shape or truncated.shape != shape:
                if len(reward.reshape(-1)) != self.num_envs:
                    raise ValueError(one_reward(f"shape {tuple(reward.shape)}"))
                for name, flags in (("terminated", terminated), ("truncated", truncated)):
                    if len(flags.reshape(-1)) != self.num_envs:
                        raise ValueError(
                            f"{name} must be one flag for each of {self.num_envs} envs, got shape {tuple(flags.shape)} "
                            f"from {type(self.source.env).__name__}"
                        )

                reward = reward.reshape(shape)
                terminated = terminated.reshape(shape)
                truncated = truncated.reshape(shape)

        ended: Array = terminated | truncated
        resets: Array | None = None  # rows that this stream must reset
        if self._folds:
            resets = ended
        if self._limit is not None:
            self._elapsed = self._elapsed + 1
            hit = self._elapsed >= self._limit
            # A SAME_STEP env has reset the rows that it ended; other envs leave all ended rows to this stream.
            if self._native_same_step:
                resets = hit & ~ended
            else:
                resets = ended | hit
            truncated = truncated | hit
            ended = ended | hit
            fill_rows(self._elapsed, ended, 0)

        # Checking for an ended row is cheap in NumPy (count_nonzero is faster than any); on a device it would sync.
        any_ended: bool | None = None
        if self._on_host:
            any_ended = bool(np.count_nonzero(ended))

        if self.same_step:
            first = ended
            if not self.lending.markers:
                first = copy_array(ended)  # the caller may keep both arrays: they must not alias
            # Together: an interrupt must not come between.
            self.first, self.ended = first, ended
            self.any_first = any_ended
            self.any_ended = any_ended
            obs, info = self._restart(obs, info, ended, resets)
        else:  # NEXT_STEP: rows that ended in the previous step only reset and return a first observation
            self.first, self.any_first = self.ended, self.any_ended
            self.ended = ended
            self.any_ended = any_ended
            if self._absent is not None:
                self.first = self.first | self._absent
                if self._on_host:
                    self.any_first = bool(self.first.any())
                else:
                    self.any_first = None
                self._absent = self.source.absent()

        return obs, reward, terminated, truncated, info

    def true_next(self, obs: Tree, info: Info) -> Tree:
        """Return the observations that the last step led to, those of ended episodes included.

        Under SAME_STEP and DISABLED, ``obs`` has the next episode's first observation in each row that `ended`. Here
        such a row has its last observation. Under NEXT_STEP the result is ``obs``, whose rows outside `valid` were only
        reset.

        Args:
            obs: the observations that the step returned, a tree with leaves ``(E, ...)``.
            info: the ``info`` that it returned with them.

        Returns:
            A tree like ``obs``; ``obs`` itself if no row ended, so do not write into it. Where the env hides the last
            observation (`known` is False), floats are NaN and other dtypes 0.

        Raises:
            ValueError: a wrapper in between has dropped ``info["final_obs"]``.

        >>> from flatroll.wrappers import as_vector_env
        >>> from flatroll.wrappers.testing import Script, ScriptedVectorEnv
        >>> env = as_vector_env(ScriptedVectorEnv(Script(1, lengths=1), autoreset_mode="SameStep"))
        >>> _ = env.reset()
        >>> obs, reward, terminated, truncated, info = env.step([0])
        >>> obs.tolist(), env.true_next(obs, info).tolist()
        ([[0.0, 1.0, 0.0]], [[0.0, 0.0, 1.0]])
        """
        if not self.same_step or self.any_ended is False:
            return obs

        final = self.read_final(info)
        if final is not None:
            obs = map_tree(lambda o, f: select(self.ended, f, o), obs, final)

        if self.known is not None:
            lost = ~self.known
            obs = map_tree(lambda leaf: fill_rows(copy_array(leaf), lost, _unknown(leaf)), obs)
        return obs

    def step_info(self, info: Info) -> Mapping[str, Any]:
        """Return the entries of ``info`` that the last step returned, those of ended episodes included.

        Under SAME_STEP and DISABLED, an entry of ``info`` has the value of the next episode's reset in each row that
        `ended`, and the step's is in ``info["final_info"]``. Here both are one entry: the step's value in every row; 0,
        False or None where the step returned none, as Gymnasium has it. Entries that wrappers around the adapted env
        added are passed on. Under NEXT_STEP the result is ``info``.

        Args:
            info: the ``info`` that the step returned.

        Returns:
            A mapping from names to arrays ``(E, ...)`` (or what else the env returns); a dict within it is such a
            mapping, too. Copy what you keep, and do not write into it. An env that resets itself and gives no
            ``final_info`` hides the values of ended rows: floats are NaN there.

        Raises:
            ValueError: when an entry is read that is hidden in an ended row and has no NaN.

        >>> from flatroll.wrappers import as_vector_env
        >>> from flatroll.wrappers.testing import Script, make_scripted
        >>> env = as_vector_env(make_scripted(Script(1, lengths=1), autoreset_mode="SameStep"))
        >>> _ = env.reset()
        >>> *_, info = env.step([0])
        >>> info["t"], env.step_info(info)["t"]  # "t" counts the steps of an episode
        (array([0]), array([1]))
        """
        if not self.same_step or self.any_ended is False:
            return info

        final = info.get("final_info")
        if not isinstance(final, Mapping):
            final = {}

        return StepInfo(
            info,
            final,
            ended=self.ended,
            lost=self.rows_without_info(info),
            passed=info.keys() - self._own_entries,
            env=type(self.source.env or self.source).__name__,
        )

    def rows_without_info(self, info: Info) -> Array | None:
        """Return the ended rows that the env reset without ``final_info``, bool ``(E,)``; None if there are none."""
        if not self._native_same_step:
            return None
        if not isinstance(info.get("final_info"), Mapping):
            return self.ended

        told = info.get("_final_info")
        if told is None:  # it is about all ended rows
            return None

        lost = self.ended & ~rows_like(told, self.ended)
        if not self._on_host or lost.any():
            return lost
        return None

    def read_final(self, info: Info) -> Tree | None:
        """Return the last observations of ended episodes (``(E, ...)``, SAME_STEP only); None if they are hidden.

        Raises:
            ValueError: a wrapper in between has dropped them.
        """
        final = info.get("final_obs")
        if final is None and self.has_final and self.any_ended is not False:
            raise ValueError(
                "a wrapper around the adapted env has dropped info['final_obs'], and with it the last observations of "
                "ended episodes: let it forward the entries of info, or put it inside as_vector_env"
            )
        return final

    def move(self, device: torch.device) -> None:
        """Return tensors on ``device`` from now on; actions are copied back to the NumPy env.

        Raises:
            ValueError: the env is in use, or is an async pool that steps only some envs at a time.
        """
        if self.at >= 0 or self.capabilities.batch_size is not None:
            raise ValueError(
                f"{type(self.source.env).__name__} cannot be moved to {device}: only an env that was never "
                "reset can be moved, and an envpool in async mode cannot"
            )

        self.source = TorchView(self.source, device)
        self.capabilities = self.source.capabilities
        can = self.capabilities
        self._check_actions = ActionCheck(self.single_action_space, self.num_envs, can.framework, can.device)
        self._on_host = False

    def _explain(self, error: Exception) -> None:
        """Raise a clear ValueError, from the env's error, for actions out of range."""
        if self._on_host:
            for path, limits in action_limits(self.single_action_space):
                (leaf,) = leaves_at(self.actions, [path])
                if not isinstance(limits.space, spaces.Box) and (problem := limits.problem(leaf)):
                    raise ValueError(problem) from error

    def send(self, actions: Tree) -> Tree:
        """Begin a step and return its checked actions; pass them to the `step` that awaits it.

        Requires ``capabilities.overlaps``. A copy of the actions is sent: the caller may reuse their memory.
        """
        if self.moves.count != self.at:
            self._refuse("send was called before reset: call env.reset() first")

        sent = map_tree(copy_array, self._check_actions(actions))
        self.source.send(sent)
        return sent

    def _compare_with_space(self, obs: Tree) -> None:
        """Warn if observations have entries that their space lacks; ValueError if they do not fit it."""
        name = type(self.source.env or self.source).__name__
        _compare_entries(name, self.single_observation_space, obs)
        rows = self.capabilities.batch_size or self.num_envs
        problem = misfit(self.single_observation_space, obs, (rows,))
        if problem is not None:
            raise ValueError(
                f"the observation of {name} {problem}: return what single_observation_space describes, or change it"
            )

    def _refuse(self, before_reset: str) -> None:
        """Raise the error for an env that somebody else stepped or reset, or that was never reset."""
        if self.at < 0:
            raise RuntimeError(before_reset)
        raise RuntimeError(
            f"{type(self.source.env).__name__} was stepped or reset through another adapted env since this one's last "
            "step: call env.reset() first, and give each its own env"
        )

    def render(self) -> Any:
        """Render the env in its ``render_mode``; an array or tensor ``[E, ...]`` is returned as E arrays."""
        frames = self.source.env.render()
        if isinstance(frames, Tensor):
            frames = frames.detach().cpu().numpy()
        if isinstance(frames, np.ndarray | list):
            return tuple(frames)
        return frames

    def call(self, name: str, *args: object, **kwargs: object) -> tuple[Any, ...]:
        """Call a method of every sub-env, or read an attribute, as Gymnasium's Sync and Async envs do.

        An env without sub-envs is called once, and its result is repeated for every row.
        """
        if name in ("reset", "step"):
            self.moves.count += 1
        env = self._with_method("call")
        if env is not None:
            return tuple(env.call(name, *args, **kwargs))

        value = getattr(self.source.env, name)
        if callable(value):
            value = value(*args, **kwargs)
        return (value,) * self.num_envs

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every sub-env, see `call`."""
        return self.call(name)

    def set_attr(self, name: str, values: object) -> None:
        """Set an attribute of every sub-env (a list gives one value per env), or of the env if it has no sub-envs."""
        env = self._with_method("set_attr")
        if env is not None:
            env.set_attr(name, values)
        else:
            setattr(self.source.env, name, values)

    def _with_method(self, method: str) -> Any:
        """Return the outermost layer with a method for its sub-envs, or None; wrappers have none."""
        return next((env for env in layers(self.source.env) if hasattr(env, method)), None)

    def close_extras(self, **kwargs: object) -> None:
        self.source.close()

    def __del__(self) -> None:
        """Gymnasium before 1.3 closes a vector env on deletion; the adapted env belongs to the caller."""

    def _restart(self, obs: Tree, info: Info, ended: Array, resets: Array | None) -> tuple[Tree, Info]:
        """Put the true last observations into ``info["final_obs"]`` and first observations into the ended rows."""
        final: Tree | None = obs  # in rows that are not reset yet the step's observations are final
        if self._native_same_step:
            # rows that the env itself has reset
            if resets is None:
                by_env = ended
            else:
                by_env = ended & ~resets
            final = self._native_final(info, obs, by_env)
            if final is None:
                self.known = ~by_env
            else:
                self.known = None

            if resets is not None and self.any_ended is not False:
                if final is None:
                    final = obs
                else:
                    final = map_tree(lambda o, f: select(resets, o, f), obs, final)

        # On a device `any` syncs, but only if this stream resets rows: their env needs the row numbers anyway.
        if resets is not None and self.any_ended is not False and bool(resets.any()):
            fresh, reset_info = self.source.reset(None, None, resets)
            obs = map_tree(lambda new, old: select(resets, new, old), fresh, obs)
            info = _merge_reset_info(info, reset_info, resets)

        self.has_final = final is not None
        if final is None:
            info.pop("final_obs", None)
        else:
            info["final_obs"] = final

        if self.any_ended is not False:
            self._own_entries = info.keys() - self._of_step
        return obs, info

    def _native_final(self, info: Info, obs: Tree, ended: Array) -> Tree | None:
        """Return the last observations of a SAME_STEP env, located by `as_vector_env`'s ``final_obs``."""
        if self.final_obs is None:
            return None
        if self.any_ended is False:
            return obs

        if self.final_obs == "auto":
            final = self.source.final_obs(info, obs, ended)
            if final is None and not self.hides_final_obs and bool(ended.any()):
                raise ValueError(
                    f"{type(self.source.env or self.source).__name__} resets ended envs in the same step, and "
                    "info['final_obs'] does not show their last observations: pass them on, or say that the env hides "
                    "them, as_vector_env(env, final_obs=None) or Capabilities(hides_final_obs=True)"
                )
            return final

        if callable(self.final_obs):
            given = self.final_obs(info, ended)
        else:
            given = info.get(self.final_obs)

        if given is None:
            # Some envs return it only in steps that end an episode. Checking that syncs with a device.
            if not bool(ended.any()):
                return obs
            names = sorted(str(key) for key in info if not str(key).startswith("_"))
            raise ValueError(
                f"final_obs={self.final_obs!r} found no final observations in a step that ended episodes; info "
                f"has {names}. Name the key, or pass final_obs='auto' (search info) or None (the env hides them)"
            )
        return self.source.final_obs(info, obs, ended, given)

    def as_mask(self, mask: Array) -> Array:
        """Convert a reset mask to the env's framework; ValueError unless bool of shape ``(E,)``."""
        if self.capabilities.framework == "torch":
            mask = torch.as_tensor(mask, device=self.capabilities.device)
            is_bool = mask.dtype is torch.bool
        else:
            if isinstance(mask, Tensor):
                mask = mask.detach().cpu().numpy()
            else:
                mask = np.asarray(mask)
            is_bool = mask.dtype == np.bool_

        if not is_bool or tuple(mask.shape) != (self.num_envs,):
            raise ValueError(
                f"options['reset_mask'] must be bool of shape ({self.num_envs},), got {mask.dtype} of shape "
                f"{tuple(mask.shape)}"
            )
        return mask


def _plain_seed(seed: Any) -> Any:
    """Return a seed, or one for each env, as Python integers: envs refuse NumPy's."""
    if isinstance(seed, np.integer):
        return int(seed)
    if isinstance(seed, np.ndarray):
        if seed.ndim:
            return [int(one) for one in seed]
        return int(seed)
    if isinstance(seed, list | tuple):
        return [int(one) if isinstance(one, np.integer) else one for one in seed]
    return seed


def _compare_entries(name: str, space: spaces.Space[Any], obs: Tree) -> None:
    """Warn if an observation has entries that its space lacks; raise ValueError if it lacks entries of the space."""
    extra: list[object] = []
    lacks: list[object] = []

    def walk(space: spaces.Space[Any], obs: Tree, path: tuple[str, ...]) -> None:
        if not isinstance(space, spaces.Dict):
            return
        values = obs if isinstance(obs, Mapping) else {}
        for names, one, other in ((extra, values, space.spaces), (lacks, space.spaces, values)):
            missing = [key for key in one if key not in other]
            if path:
                names += [(*path, key) for key in missing]
            else:
                names += missing

        for key in space.spaces.keys() & values.keys():
            walk(space[key], values[key], (*path, key))

    walk(space, obs, ())
    if lacks:
        raise ValueError(
            f"the observation of {name} must have all entries of its observation_space, and lacks {lacks}: "
            "return them, or leave them out of the space"
        )
    if extra:
        warnings.warn(
            f"the observation of {name} has entries that its observation_space lacks, so they are left out: {extra}. "
            "Declare them in single_observation_space, or do not return them",
            stacklevel=5,
        )


def check_space(space: object, name: str, hint: str = "") -> None:
    """Raise TypeError unless samples of ``space`` are arrays of fixed shape, or trees of them."""
    if isinstance(space, spaces.Dict):
        for key, child in space.spaces.items():
            if name == "observation_space":
                others = [other for other in space.spaces if other != key]
                hint = f", or leave it out: gymnasium.wrappers.FilterObservation(env, {others})"
            check_space(child, f"{name}[{key!r}]", hint)
    elif isinstance(space, spaces.Tuple):
        for i, child in enumerate(space.spaces):
            check_space(child, f"{name}[{i}]", hint)
    elif not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        shown = str(space)
        if isinstance(space, spaces.Text):
            shown = f"Text({space.min_length}, {space.max_length}, charset=...)"
        elif type(space).__name__ == "MissionSpace":
            shown = "MiniGrid's MissionSpace"
            hint = ", such as MiniGrid's ImgObsWrapper or FlatObsWrapper"
        raise TypeError(
            f"{name} must be made of Box, Discrete, MultiDiscrete or MultiBinary inside Dict or Tuple, "
            f"got {shown}: convert it with an observation or action wrapper first{hint}"
        )


def _merge_reset_info(info: Info, reset_info: Info, rows: Array) -> dict[str, Any]:
    """Merge infos as Gymnasium's SAME_STEP does: reset entries in the restarted rows, step entries in ``final_info``.

    Entries that only steps return are empty (0, False or None) in restarted rows, as in Gymnasium. Rows that the env
    itself restarted keep its ``final_info``.
    """
    known = info.get("_final_info")
    final_info = _final_info(info, rows)
    final_rows = rows if known is None else rows | rows_like(known, rows)
    return {**_merge_rows(info, reset_info, rows), "final_info": final_info, "_final_info": final_rows}


def _merge_rows(info: Info, reset_info: Info, rows: Array) -> dict[str, Any]:
    """Merge the entries of a reset into those of a step in the given rows, also within dicts."""
    merged = dict(info)
    for key, value in info.items():
        if key in reset_info or key in ("final_info", "_final_info"):
            continue

        if isinstance(value, dict):
            merged[key] = _merge_rows(value, {}, rows)
        elif _has_rows(value, rows):
            merged[key] = _clear_rows(value, rows)

    for key, value in reset_info.items():
        old: Any = info.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            merged[key] = _merge_rows(old, value, rows)
            continue

        merged[key] = value
        if (
            isinstance(value, np.ndarray | Tensor)
            and isinstance(old, np.ndarray | Tensor)
            and old.shape == value.shape
        ):
            merged[key] = select(rows_like(rows, old), value, old)
    return merged


def _unknown(leaf: Array) -> float:
    """Return what stands for unknown numbers of this dtype: NaN, or 0 if it has none."""
    if isinstance(leaf, Tensor):
        floating = leaf.is_floating_point()
    else:
        floating = leaf.dtype.kind == "f"

    if floating:
        return float("nan")
    return 0


def _has_rows(entry: object, rows: Array) -> bool:
    """Return whether an entry of ``info`` is an array with one row per env, like ``rows`` (bool ``(E,)``)."""
    return isinstance(entry, np.ndarray | Tensor) and entry.shape[:1] == rows.shape


def _clear_rows(entry: Array, rows: Array) -> Array:
    """Return a copy of an ``info`` entry with empty values (0, False or None) in the given rows."""
    empty: bool | None = False
    if entry.dtype == object:
        empty = None
    return fill_rows(copy_array(entry), rows_like(rows, entry), empty)


def _final_info(info: Info, rows: Array) -> dict[str, Any]:
    """Return ``final_info``: the step's entries in ``rows``, and the env's own ``final_info`` in other rows."""
    native = info.get("final_info")
    if not isinstance(native, dict):
        return info

    step = {key: value for key, value in info.items() if key not in ("final_info", "_final_info")}
    return _mix_rows(step, native, rows)


def _mix_rows(step: Info, native: Info, rows: Array) -> dict[str, Any]:
    """Take the entries of ``step`` in the given rows and those of ``native`` in others, also within dicts."""
    final = {**step, **native}
    for key, value in final.items():
        mine: Any = step.get(key)
        other: Any = native.get(key)
        if isinstance(value, dict):
            if not isinstance(mine, dict):
                mine = {}
            if not isinstance(other, dict):
                other = {}
            final[key] = _mix_rows(mine, other, rows)
        elif _has_rows(mine, rows) and _has_rows(other, rows) and mine.shape == other.shape:
            final[key] = select(rows_like(rows, other), mine, other)
        elif _has_rows(mine, rows):
            final[key] = _clear_rows(mine, ~rows)
        elif _has_rows(other, rows):
            final[key] = _clear_rows(other, rows)
    return final
