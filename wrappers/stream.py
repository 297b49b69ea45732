"""`VectorStream`: the interface that every adapted vector env has, with flags shared by all markers."""

from collections.abc import Callable
from traceback import extract_tb
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from flatroll.wrappers.arrays import (
    ActionCheck,
    Array,
    Tree,
    action_limits,
    copy_of,
    fill_rows,
    first_leaf,
    full_for,
    leaves_at,
    map_tree,
    select,
)
from flatroll.wrappers.source import Info, Seed, Step, TorchView, VectorSource, layers

FinalObs = str | Callable[[dict[str, Any], Array], Tree] | None

#: In the metadata of adapted envs, which Gymnasium copies to the vector envs that it makes of envs.
ADAPTED = "flatroll.adapted"


class Moves:
    """Counts the steps and resets of one env object by all adapted envs around it; made by `moves_of`.

    Attributes:
        env: the env object.
        count: how often it was stepped or reset.
    """

    def __init__(self, env: object) -> None:
        self.env = env
        self.count = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy counts the moves of the copied env, and goes on from the same number."""
        return moves_of, (self.env,), {"count": self.count}


# By id, since an env need not be hashable or weakly referable. An entry holds its env, so that no other env gets the
# id, and lives as long as an adapted env holds the entry: one that nobody holds has nobody to tell.
_MOVES: WeakValueDictionary[int, Moves] = WeakValueDictionary()


def moves_of(env: object) -> Moves:
    """The one `Moves` of an env object, shared by all who ask while any of them keeps it."""
    return _MOVES.setdefault(id(env), Moves(env))


class VectorStream(VectorEnv[Any, Any, Any]):
    """An adapted vector env, made by `as_vector_env`, with flags ``first`` and ``ended`` for each sub-env.

    Besides Gymnasium's interface it has the *row facts* of the last ``reset`` or ``step``, arrays of shape
    ``(E,)`` on the env's device, made afresh each time, so that they may be kept:

    Args:
        source: the adapter of the env, see `VectorSource`.
        mode: how the source resets envs whose episode has ended, an `AutoresetMode` or its value.
        final_obs: where a SAME_STEP env leaves its final observations, see `as_vector_env`.

    Attributes:
        first: the returned observation is the first of an episode.
        ended: the step just made was the last of an episode.
        valid: the step just made is a transition; None if every row is. A NEXT_STEP env that resets in the
            row after the end ignores the action there, and that row is no transition; nor is that of an agent who is
            not in its game (see `VectorSource.absent`), in which ``first`` stays True.
        known: the true next observation of the step is known; None if it is in every row.
        has_final: ``info["final_obs"]`` was there when the step left this env.
        any_first, any_ended: whether any row is; None on a device where asking would wait for it.
        same_step: the returned observation of an ended row is already the next episode's first.
        hides_final_obs: `known` can be less than every row: the env may hide its final observations.
        actions: what the env was given at the last step, after the checks and casts.
        lends: reward, flags and final observations may be the env's own arrays, which its next step writes into
            again. False but for the steps of a collector, which copies them.
        lends_markers: markers may show their own arrays in ``info``, and `first` may be `ended`, since nobody writes
            into them. As `lends`.
        drawn: the actions of the next step were drawn from the action space: their range is not looked at. As `lends`.
        capabilities: see `Capabilities`.
        moves: the count of steps and resets of the env, which every adapted env around the same one raises.
        at: the count at this stream's own last step or reset; -1 before the first.
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
        self.single_action_space = space = source.single_action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.render_mode = getattr(source.env, "render_mode", None)
        self.spec = getattr(source.env, "spec", None)
        self.capabilities = can = source.capabilities
        rows = can.batch_size or self.num_envs
        self._check_actions = ActionCheck(space, rows, can.framework, can.device, not can.checks_range)
        self._on_host = can.framework == "numpy"
        self._final = final_obs
        if final_obs != "auto" and mode is not AutoresetMode.SAME_STEP:
            raise ValueError(
                f"final_obs={final_obs!r} is for envs with autoreset_mode=SAME_STEP; in {mode.name} the step itself "
                "returns the last observation"
            )
        if mode is AutoresetMode.DISABLED and not can.partial_reset:
            raise ValueError(
                "an env with autoreset_mode=DISABLED must be able to reset chosen envs (reset_mask or env_ids), and "
                f"{type(source.env).__name__} is not: use one of its autoresetting modes"
            )
        self._folds = mode is AutoresetMode.DISABLED  # this stream resets the ended rows in the same step
        self._native_same_step = mode is AutoresetMode.SAME_STEP
        self.hides_final_obs = self._native_same_step and (
            final_obs is None or (final_obs == "auto" and can.hides_final_obs)
        )
        self._declare(AutoresetMode.NEXT_STEP if mode is AutoresetMode.NEXT_STEP else AutoresetMode.SAME_STEP)
        self._limit: int | None = None
        self._elapsed: Array = None  # with a limit: transitions made in each row's episode, int64 (E,)
        self._stepped = False
        self._absent: Array | None = None  # NEXT_STEP: the rows in which nobody is, see `VectorSource.absent`
        self.moves = moves_of(getattr(source.stepped, "unwrapped", source.stepped))
        self.at = -1
        self.actions: Tree = None
        self.lends = self.lends_markers = self.drawn = False
        self.first: Array = None
        self.ended: Array = None
        self.known: Array | None = None
        self.has_final = False
        self.any_first: bool | None = True
        self.any_ended: bool | None = False

    def _declare(self, mode: AutoresetMode) -> None:
        self.same_step = mode is AutoresetMode.SAME_STEP
        self.metadata = {
            **(getattr(self.source.env, "metadata", None) or {}),
            "autoreset_mode": mode,
            ADAPTED: True,
        }

    @property
    def valid(self) -> Array | None:
        """Which sub-envs made a transition in the last step, rather than only a reset; None if all did."""
        return None if self.same_step or not self._stepped else ~self.first

    @property
    def whole_finals(self) -> bool:
        """Whether ``info["final_obs"]`` is the true next observation of every row."""
        return not self._native_same_step or (self.capabilities.whole_finals and self._final == "auto")

    @property
    def action_spec(self) -> spaces.Space[Any]:
        """The references' name of ``single_action_space``, as in ``RandomPolicy(env.action_spec)``."""
        return self.single_action_space

    @property
    def unwrapped(self) -> Any:
        base = getattr(self.source.env, "unwrapped", self.source.env)
        return base if isinstance(base, VectorEnv) else self

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

    def reset_in_same_step(self, max_steps: int | None = None) -> None:
        """Reset ended rows in the step that ended them; end episodes after ``max_steps`` transitions if given.

        Without ``max_steps`` a SAME_STEP env does so by itself, and must show the last observations from now on.

        Raises:
            ValueError: the env cannot reset chosen rows, hides its last observations, or has been reset already.
        """
        if max_steps is not None and self._limit is not None and self._limit <= max_steps:
            return  # a second evaluation in this env, say
        limits = max_steps is not None
        asked = f"max_steps={max_steps}" if limits else "autoreset='same_step'"
        if (limits or not self.same_step) and not self.capabilities.partial_reset:
            way_out = (
                "or set the limit in the env (gymnasium, envpool: max_episode_steps=...)"
                if limits
                else "or with autoreset_mode=SAME_STEP"
            )
            raise ValueError(
                f"{asked} needs an env that can reset chosen envs, and {type(self.source.env).__name__} cannot: make "
                f"it with vectorization_mode='sync', {way_out}"
            )
        if (limits or not self.same_step) and self.at >= 0:
            raise ValueError(f"{asked} must be set before the env's first reset")
        if max_steps is not None:
            self._limit = max_steps if self._limit is None else min(max_steps, self._limit)
        elif self._native_same_step:
            if self._final is None:
                raise ValueError(
                    f"{asked} needs the last observations, and final_obs=None says that the env hides them"
                )
            self.hides_final_obs = False  # a step that hides one raises
        self._folds = not self._native_same_step
        self._declare(AutoresetMode.SAME_STEP)

    def reset(self, *, seed: Seed = None, options: Info | None = None) -> tuple[Tree, Info]:
        """Reset all rows, or those of ``options["reset_mask"]`` (bool ``(E,)``, NumPy or torch).

        The caller's ``options`` stay as they are. A masked reset returns the full batch; the other rows keep
        the observation they showed.
        """
        options = dict(options) if options else None
        mask = options.pop("reset_mask", None) if options else None
        if mask is None:
            self.moves.count = self.at = self.moves.count + 1
            obs, info = self.source.reset(seed, options)
            like = first_leaf(obs)
            self.first = full_for(like, self.num_envs, True, torch.bool)
            self.ended = full_for(like, self.num_envs, False, torch.bool)
            self._elapsed = full_for(like, self.num_envs, 0, torch.int64) if self._limit else None
            self.known = None
            self._stepped = False
            self._absent = None if self.same_step else self.source.absent()
            self.any_first, self.any_ended = (True, False) if self._on_host else (None, None)
            return obs, info
        rows = self.as_mask(mask)
        if not self.capabilities.partial_reset:
            raise ValueError(
                f"options['reset_mask'] is not possible here: {type(self.source.env).__name__} cannot reset "
                "chosen envs (or is not known to: with autoreset_mode=DISABLED every env must be able to)"
            )
        if self.moves.count != self.at:
            self._refuse("options['reset_mask'] was given to the first reset: reset all envs first")
        self.moves.count = self.at = self.at + 1
        obs, info = self.source.reset(seed, options, rows)
        # New arrays: the old ones were given away.
        self.first, self.ended = self.first | rows, self.ended & ~rows
        if self._elapsed is not None:
            self._elapsed = self._elapsed * ~rows  # 0 where reset
        if self._on_host:
            self.any_first, self.any_ended = bool(self.first.any()), bool(self.ended.any())
        return obs, info

    def step(self, actions: Tree) -> Step:
        """Step all sub-envs; in SAME_STEP mode ``info["final_obs"]`` is ``(E, ...)`` if the env shows it."""
        if self.moves.count != self.at:
            self._refuse("step was called before reset: call env.reset() first")
        self._stepped = True
        self.actions = self._check_actions(actions, self.drawn)
        self.moves.count = self.at = self.at + 1
        # A reset of ended rows may write into what the step has returned.
        self.source.lends = self.lends and not self._folds and self._limit is None
        try:
            obs, reward, terminated, truncated, info = self.source.step(self.actions)
        except Exception as error:  # whatever an env raises for an action that it does not know
            self._explain(error)
            raise
        if not self.capabilities.exact_flags:
            # Reward float32 and flags bool, all (E,), whatever the env calls its own; no copies where they fit.
            if isinstance(reward, Tensor):
                if reward.dtype is not torch.float32:
                    reward = reward.float()
                if not terminated.dtype is truncated.dtype is torch.bool:
                    terminated, truncated = terminated.bool(), truncated.bool()
            else:
                reward = np.asarray(reward, dtype=np.float32)
                terminated, truncated = np.asarray(terminated, dtype=bool), np.asarray(truncated, dtype=bool)
            shape = (self.num_envs,)
            if reward.shape != shape or terminated.shape != shape or truncated.shape != shape:
                if len(reward.reshape(-1)) != self.num_envs:
                    raise ValueError(_one_reward(f"shape {tuple(reward.shape)}"))
                for name, flags in (("terminated", terminated), ("truncated", truncated)):
                    if len(flags.reshape(-1)) != self.num_envs:
                        raise ValueError(
                            f"{name} must be one flag for each of {self.num_envs} envs, got shape {tuple(flags.shape)} "
                            f"from {type(self.source.env).__name__}"
                        )
                reward, terminated = reward.reshape(shape), terminated.reshape(shape)
                truncated = truncated.reshape(shape)
        ended: Array = terminated | truncated
        resets = ended if self._folds else None  # the rows that this stream has to reset itself
        if self._limit is not None:
            self._elapsed = self._elapsed + 1
            hit = self._elapsed >= self._limit
            # A SAME_STEP env has reset the rows that it ended; any other leaves all of them to this stream.
            resets = hit & ~ended if self._native_same_step else ended | hit
            truncated, ended = truncated | hit, ended | hit
            fill_rows(self._elapsed, ended, 0)
        # Asking whether any row ended is cheap in NumPy (count_nonzero more so than any); a device would wait.
        any_ended = bool(np.count_nonzero(ended)) if self._on_host else None
        if self.same_step:
            # Two arrays where both are given away: neither may change with the other.
            self.first, self.ended = (ended if self.lends_markers else copy_of(ended)), ended
            self.any_first = self.any_ended = any_ended
            obs, info = self._restart(obs, info, ended, resets)
        else:  # NEXT_STEP: the rows that ended one step ago have only reset, and show a first observation
            self.first, self.any_first = self.ended, self.any_ended
            self.ended, self.any_ended = ended, any_ended
            if self._absent is not None:
                self.first = self.first | self._absent
                self.any_first = bool(self.first.any()) if self._on_host else None
                self._absent = self.source.absent()
        return obs, reward, terminated, truncated, info

    def move(self, device: torch.device) -> None:
        """From now on return tensors on ``device``; the actions go back to the NumPy env.

        Raises:
            ValueError: the env is in use, or steps some envs at a time.
        """
        if self.at >= 0 or self.capabilities.batch_size is not None:
            raise ValueError(
                f"{type(self.source.env).__name__} cannot be moved to {device}: only one that was not reset yet can, "
                "and no envpool in async mode"
            )
        self.source = TorchView(self.source, device)
        self.capabilities = can = self.source.capabilities
        self._check_actions = ActionCheck(self.single_action_space, self.num_envs, can.framework, can.device)
        self._on_host = False

    def _explain(self, error: Exception) -> None:
        """Raise ValueError, from the error of the env's step, for a vector of rewards and for actions out of range."""
        *_, last = extract_tb(error.__traceback__)  # SyncVectorEnv writes rewards and flags into arrays
        if last.filename.endswith("sync_vector_env.py") and "array element with a sequence" in str(error):
            raise ValueError(_one_reward("an array")) from error
        if self._on_host:
            for path, limits in action_limits(self.single_action_space):
                (leaf,) = leaves_at(self.actions, [path])
                if not isinstance(limits.space, spaces.Box) and (problem := limits.problem(leaf)):
                    raise ValueError(problem) from error

    def send(self, actions: Tree) -> Tree:
        """Begin a step and return its checked actions, with which the `step` that follows awaits it.

        Only where ``capabilities.overlaps``. A copy of the actions is sent: the caller may reuse their memory.
        """
        if self.moves.count != self.at:
            self._refuse("send was called before reset: call env.reset() first")
        sent = map_tree(copy_of, self._check_actions(actions))
        self.source.send(sent)
        return sent

    def _refuse(self, before_reset: str) -> None:
        """Raise the error for an env that is not where this stream has left it, or was never reset."""
        if self.at < 0:
            raise RuntimeError(before_reset)
        raise RuntimeError(
            f"{type(self.source.env).__name__} was stepped or reset through another adapted env since this one's last "
            "step: call env.reset() first, and give each its own env"
        )

    def render(self) -> Any:
        """What the env renders, in its ``render_mode``: of an array or tensor ``[E, ...]`` its E arrays."""
        frames = self.source.env.render()
        if isinstance(frames, Tensor):
            frames = frames.detach().cpu().numpy()
        return tuple(frames) if isinstance(frames, np.ndarray | list) else frames

    def call(self, name: str, *args: object, **kwargs: object) -> tuple[Any, ...]:
        """Call a method of every sub-env, or read an attribute, as Gymnasium's Sync and Async envs do.

        An env that steps all its rows itself is asked once, and its answer holds for every row.
        """
        if name in ("reset", "step"):
            self.moves.count += 1
        env = self._with_method("call")
        if env is not None:
            return tuple(env.call(name, *args, **kwargs))
        value = getattr(self.source.env, name)
        return (value(*args, **kwargs) if callable(value) else value,) * self.num_envs

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every sub-env, see `call`."""
        return self.call(name)

    def set_attr(self, name: str, values: object) -> None:
        """Set an attribute of every sub-env (a list has one value for each), or of the env that steps them all."""
        env = self._with_method("set_attr")
        if env is not None:
            env.set_attr(name, values)
        else:
            setattr(self.source.env, name, values)

    def _with_method(self, method: str) -> Any:
        """The outermost layer of the env that has a method for its sub-envs, or None; wrappers have none."""
        return next((env for env in layers(self.source.env) if hasattr(env, method)), None)

    def close_extras(self, **kwargs: object) -> None:
        self.source.close()

    def __del__(self) -> None:
        """Before 1.3 Gymnasium closes a dropped vector env; what this one adapts is the caller's."""

    def _restart(self, obs: Tree, info: Info, ended: Array, resets: Array | None) -> tuple[Tree, Info]:
        """Put the true last observations into ``info["final_obs"]`` and first ones into the ended rows."""
        final: Tree | None = obs  # what the step returned is final in the rows that are not reset yet
        if self._native_same_step:
            by_env = ended if resets is None else ended & ~resets  # the rows that the env has reset
            final = self._native_final(info, obs, by_env)
            self.known = ~by_env if final is None else None
            if resets is not None and self.any_ended is not False:
                final = obs if final is None else map_tree(lambda o, f: select(resets, o, f), obs, final)
        # On a device `any` waits, but only where this stream resets rows: such an env has to know which ones.
        if resets is not None and self.any_ended is not False and bool(resets.any()):
            fresh, reset_info = self.source.reset(None, None, resets)
            obs = map_tree(lambda new, old: select(resets, new, old), fresh, obs)
            info = _merge_reset_info(info, reset_info, resets)
        self.has_final = final is not None
        if final is None:
            info.pop("final_obs", None)
        else:
            info["final_obs"] = final
        return obs, info

    def _native_final(self, info: Info, obs: Tree, ended: Array) -> Tree | None:
        """The last observations that a SAME_STEP env shows, as `as_vector_env`'s ``final_obs`` says."""
        if self._final is None:
            return None
        if self.any_ended is False:
            return obs
        if self._final == "auto":
            final = self.source.final_obs(info, obs, ended)
            if final is None and not self.hides_final_obs and bool(ended.any()):
                raise ValueError(
                    f"{type(self.source.env or self.source).__name__} resets ended envs in the same step, and "
                    "info['final_obs'] does not show their last observations: pass them on, or say that the env hides "
                    "them, as_vector_env(env, final_obs=None) or Capabilities(hides_final_obs=True)"
                )
            return final
        given = self._final(info, ended) if callable(self._final) else info.get(self._final)
        if given is None:
            # Some show it only in steps that end an episode, or not before the first end. Asking waits for a device.
            if not bool(ended.any()):
                return obs
            names = sorted(key for key in info if not key.startswith("_"))
            raise ValueError(
                f"final_obs={self._final!r} gave no final observations in a step that ended episodes; info has "
                f"{names}. Name the key, or pass final_obs='auto' (look for it) or None (it hides them)"
            )
        return self.source.final_obs(info, obs, ended, given)

    def as_mask(self, mask: Array) -> Array:
        """A reset mask in the env's framework; ValueError unless bool of shape ``(E,)``."""
        if self.capabilities.framework == "torch":
            mask = torch.as_tensor(mask, device=self.capabilities.device)
            is_bool = mask.dtype is torch.bool
        else:
            mask = mask.detach().cpu().numpy() if isinstance(mask, Tensor) else np.asarray(mask)
            is_bool = mask.dtype == np.bool_
        if not is_bool or tuple(mask.shape) != (self.num_envs,):
            raise ValueError(
                f"options['reset_mask'] must be bool of shape ({self.num_envs},), got {mask.dtype} of shape "
                f"{tuple(mask.shape)}"
            )
        return mask


def _one_reward(came: str) -> str:
    """The text of the error for a reward that is no number."""
    return (
        f"reward must be one number for each env and step, got {came}: weigh the parts of a vector, as with "
        "gymnasium.wrappers.TransformReward(env, lambda r: float(r @ weights)), and keep it in info (info_keys=)"
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
            shown, hint = "MiniGrid's MissionSpace", ", such as MiniGrid's ImgObsWrapper or FlatObsWrapper"
        raise TypeError(
            f"{name} must be made of Box, Discrete, MultiDiscrete or MultiBinary inside Dict or Tuple, "
            f"got {shown}: convert it with an observation or action wrapper first{hint}"
        )


def _merge_reset_info(info: Info, reset_info: Info, rows: Array) -> dict[str, Any]:
    """Gymnasium's SAME_STEP info: in the restarted rows the reset's entries, the step's in ``final_info``.

    A restarted row of an entry that only steps give is empty (0, False or None), as Gymnasium leaves it. Rows
    that the env itself restarted in this step keep what it put into ``final_info`` for them.
    """
    known = info.get("_final_info")
    final_info, final_rows = _final_info(info, rows), rows if known is None else rows | known
    merged = {**info, "final_info": final_info, "_final_info": final_rows}
    for key, value in info.items():
        if key not in reset_info and _has_rows(value, rows):
            merged[key] = _clear_rows(value, rows)
    for key, value in reset_info.items():
        old: Any = info.get(key)
        arrays = isinstance(value, np.ndarray | Tensor) and isinstance(old, np.ndarray | Tensor)
        merged[key] = select(rows, value, old) if arrays and old.shape == value.shape else value
    return merged


def _has_rows(entry: object, rows: Array) -> bool:
    """Whether an entry of ``info`` is an array with one row for each env, as ``rows`` (bool ``(E,)``) has."""
    return isinstance(entry, np.ndarray | Tensor) and entry.shape[:1] == rows.shape


def _clear_rows(entry: Array, rows: Array) -> Array:
    """A copy of an entry of ``info`` with nothing in the given rows (0, False or None)."""
    return fill_rows(copy_of(entry), rows, None if entry.dtype == object else False)


def _final_info(info: Info, rows: Array) -> dict[str, Any]:
    """The step's entries in ``rows``, and in the others those of the env's own ``final_info``, if it made one."""
    native = info.get("final_info")
    if not isinstance(native, dict):
        return info
    step = {key: value for key, value in info.items() if key not in ("final_info", "_final_info")}
    final = {**step, **native}
    for key, value in step.items():
        if _has_rows(value, rows):
            old: Any = native.get(key)
            mixes = isinstance(old, np.ndarray | Tensor) and old.shape == value.shape
            final[key] = select(rows, value, old) if mixes else _clear_rows(value, ~rows)
    for key in native.keys() - info.keys():
        if _has_rows(native[key], rows):
            final[key] = _clear_rows(native[key], rows)
    return final
