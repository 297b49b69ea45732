"""The loop that steps an env with a policy and records transitions, shared by `rollout` and `Collector`."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Required, TypedDict

import numpy as np
import torch
from gymnasium.vector import VectorEnv, VectorObservationWrapper, VectorRewardWrapper
from tensordict import TensorDict
from tensordict.nn import InteractionType
from torch import Tensor

from flatroll.layout.checks import check_key_names, check_options
from flatroll.layout.keys import (
    ACTION_MASK,
    HAS_STATE,
    POLICY_VERSION,
    REWARD,
    TERMINATED,
    TRUNCATED,
    NestedKey,
    as_tuple,
    next_key,
    plain_key,
)
from flatroll.layout.spaces import find_part, mask_form, option_counts
from flatroll.rollouts.action_range import ActionRange
from flatroll.rollouts.arguments import Devices, check_writer
from flatroll.rollouts.batch_columns import DEAD, ColumnKeys
from flatroll.rollouts.policies import (
    Columns,
    ModulePolicy,
    Policy,
    PolicyModule,
    act_in_turn,
    as_function_of_obs,
    is_module,
)
from flatroll.rollouts.random_actions import RandomActions, RandomPolicy
from flatroll.rollouts.window import Window
from flatroll.wrappers.adapt_env import adapt_env, find_stream
from flatroll.wrappers.arrays import (
    ActionCheck,
    Array,
    Tree,
    copy_array,
    fill_rows,
    full_for,
    leaves_at,
    map_tree,
    select,
    to_torch,
)
from flatroll.wrappers.compact import CompactObs
from flatroll.wrappers.markers import (
    InitTracker,
    MarkerWrapper,
    RecurrentPrimer,
    RewardSum,
    StepCounter,
    TrajId,
    find_wrapper,
)
from flatroll.wrappers.source import EnvLike, layers
from flatroll.wrappers.stream import VectorStream

#: If a step has at most this many bytes of observations, all next observations are written, not only those of
#: ended rows.
_FEW_BYTES = 1 << 17

#: Markers that keep no reference to the arrays of a step.
_KEEP_NOTHING = (InitTracker, StepCounter, TrajId, RewardSum, CompactObs, RecurrentPrimer)


class StartOptions(TypedDict, total=False):
    """The options of `Runner.start` except ``seed``, which classes around a runner pass on."""

    devices: Required[Devices]
    exploration: Required[InteractionType]
    recurrent: bool
    state_stride: int


class Runner:
    """Steps an env with a policy and builds batches; adds InitTracker and TrajId if they are missing."""

    def __init__(
        self,
        env: EnvLike,  # anything as_vector_env takes, or a stack of wrappers
        # Stored entries: key before the step, ("next", key) after it.
        info_keys: Sequence[NestedKey] = (),
        track_traj_ids: bool = True,
        writer: int = 0,  # makes ids unique among the writers of a buffer
        track_version: bool = False,  # store the policy version in each row
    ) -> None:
        info_keys = check_key_names("info_keys", info_keys)
        env = adapt_env(env)
        if find_wrapper(env, InitTracker) is None:
            env = InitTracker(env)
        check_writer(writer, track_traj_ids, find_wrapper(env, TrajId))
        if track_traj_ids and find_wrapper(env, TrajId) is None:
            env = TrajId(env, writer=writer)

        stream = find_stream(env)
        assert stream is not None
        self.env = env
        self.envs = [env]
        self.stream: VectorStream = stream
        self.num_envs: int = env.num_envs
        self.device = stream.capabilities.device
        self.keys = ColumnKeys(env, info_keys)
        self.asks_compact = find_wrapper(env, CompactObs) is not None
        space = env.single_action_space
        keys = self.keys
        self._one_obs = keys.obs_paths == ((),)
        self._one_action = keys.action_paths == ((),)
        self._seen_keys = (*keys.obs, *keys.roots)
        self._next_keys = [keys.next_of[key] for key in keys.obs]
        self._result_keys = (REWARD, TERMINATED, TRUNCATED, *keys.actions, *keys.nexts)
        if not stream.same_step:
            self._result_keys += (DEAD,)

        self._on_host = stream.capabilities.framework == "numpy"
        # The adapted env checks and keeps its actions; a wrapper in between may change them.
        passing = (VectorStream, MarkerWrapper, VectorObservationWrapper, VectorRewardWrapper)
        self._check_actions: ActionCheck | None = None
        if not all(isinstance(layer, passing) for layer in layers(env)):
            framework = stream.capabilities.framework
            self._check_actions = ActionCheck(space, self.num_envs, framework, self.device)

        # Unknown wrappers may keep the returned arrays.
        self._lends = all(type(layer) in (VectorStream, *_KEEP_NOTHING) for layer in layers(env))
        #: Checks the actions of each batch; None if they are random or a wrapper may change them.
        self.action_range: ActionRange | None = None

        # A SAME_STEP env returns the reset observation in an ended row; the final one is stored separately. For small
        # observations writing all rows is as fast as finding the ended ones, which on a device would sync.
        self._whole_finals = self._lends and stream.whole_finals
        leaves: Any = [find_part(env.observation_space, path) for path in keys.obs_paths]
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        self._dense_finals = stream.same_step and (
            not self._on_host or (self._whole_finals and size <= _FEW_BYTES)
        )
        self.window: Window

        #: Whether the env has been reset.
        self.started = False
        self._at = -1  # number of moves of the env at this runner's last step or reset

        #: Whether `step` only starts a step, which `settle` waits for.
        self.sends = False
        self._sent: Tree = None  # the actions of the pending step
        self._warned = False  # whether it has warned that other code moved the env

        # Whether to warn if the env paid rewards in steps that only reset. A wrapper may add a constant to all rewards;
        # an async pool's window has cells without values. On a device the question would sync once a batch.
        can = stream.capabilities
        shifts = any(
            isinstance(layer, VectorRewardWrapper) for layer in (*layers(env), *layers(stream.source.env))
        )
        self._looks_for_rewards = not shifts and can.batch_size is None and can.device.type == "cpu"

        #: The recurrent states ``[E, ...]`` that the next step starts from.
        self.states: Columns = {}
        self._defaults: Columns = {}
        self._policy: ModulePolicy | Callable[[Any, Any], Any] | None = None
        self._stride = 1
        self._versions: Array = None  # policy version of each env, int64 [E], if stored

        if track_version:
            keys.claim("track_policy_version", POLICY_VERSION)
            self._versions = ()
            self.set_version(0)

        # Whether the last step ended each env's episode, bool [E]; None after a reset.
        self._ended: Array = None
        self.age: Array = None  # steps since the first row of the episode
        self._obs: Tree = None
        self._info: dict[str, Any] = {}
        self._infos = InfoColumns(env, stream, keys.infos)

        # The masks in the policy's input: key -> number of options of each choice of its part of the action space.
        self._masks: dict[NestedKey, tuple[int, ...]] = {}

    def start(
        self,
        policy: Policy
        | None,  # a tensordict module, a callable from observation to action, or None for random actions
        steps: int,  # capacity in vector steps
        *,
        devices: Devices,
        exploration: InteractionType,  # how probabilistic modules choose actions
        seed: int | None = None,  # of random actions
        recurrent: bool = True,  # carry the recurrent states that the policy declares
        state_stride: int = 1,  # store them in every n-th row of a trajectory and in the first rows of runs
    ) -> None:
        """Set the policy and create a window for ``steps`` vector steps."""
        self._exploration = exploration
        space = self.env.single_action_space
        drawn_from = space
        if isinstance(policy, RandomPolicy):
            drawn_from = policy.space_in(self.env)
            policy = None

        self._drawn = policy is None and drawn_from is space and self._check_actions is None
        self.random = RandomActions(drawn_from, self.num_envs, self.device, seed)
        self.random.as_numpy = self._on_host

        #: Returns the random actions of a step.
        self.draw: Callable[[], Any] = self.random
        if policy is not None and self._check_actions is None:  # otherwise a wrapper may change the actions
            self.action_range = ActionRange(space, self.keys.actions, self.keys.action_paths, self.device)
        if is_module(policy):
            primer = find_wrapper(self.env, RecurrentPrimer)
            primed = None if primer is None else primer.states
            module = ModulePolicy(
                policy, space, self.keys.actions, self.num_envs, devices, recurrent=recurrent, primed=primed
            )
            self.keys.claim("the policy", *module.writes)
            self._find_masks(policy)
            self._policy = module
            self._carry(module.defaults)
        elif policy is not None:
            self._policy = as_function_of_obs(policy, space, devices)

        # A module receives the markers and may write into them.
        self._lends_markers = self._lends and not isinstance(self._policy, ModulePolicy)
        if state_stride > 1:
            if not self.states:
                raise ValueError(
                    f"state_stride={state_stride} needs a recurrent policy, one with parts that have "
                    "make_tensordict_primer(): this one has no state to keep"
                )
            self.keys.claim("state_stride", HAS_STATE)
            self.keys.strided = True

        self._stride = state_stride
        self.window = Window(
            self.keys,
            self.num_envs,
            steps,
            device=self.device,
            same_step=self.stream.same_step,
            dense_finals=self._dense_finals,
            framework=self.stream.capabilities.framework,
            agents=self.stream.source.agents,
        )

    def _find_masks(self, policy: PolicyModule) -> None:
        """Find the action masks in the policy's input; one that no observation has is stored from info."""
        keys = self.keys
        read = [key for key in policy.in_keys if as_tuple(key)[0] == ACTION_MASK]

        missing = [key for key in read if key not in (*keys.obs, *keys.infos)]
        if missing:
            keys.claim("the policy's mask", *missing, *map(next_key, missing))
            keys.infos += (*missing,)
            self._infos = InfoColumns(self.env, self.stream, keys.infos)

        for path in keys.action_paths:
            key = plain_key((ACTION_MASK, *map(str, path)))
            counts = option_counts(find_part(self.env.single_action_space, path))
            if counts is not None and key in (*keys.obs, *keys.infos):
                self._masks[key] = counts

    def set_version(self, version: int) -> None:
        """Set the policy version of the following steps, if it is stored."""
        if self._versions is None:
            return
        versions = torch.full((self.num_envs,), version, dtype=torch.int64, device=self.device)
        self._versions = versions.numpy() if self._on_host else versions

    def prime(self, states: Columns) -> None:
        """Also carry these recurrent states from step to step, if the policy writes them under ``"next"``.

        Raises:
            RuntimeError: the env was stepped without them.
        """
        if not isinstance(self._policy, ModulePolicy):
            return

        before = set(self._policy.defaults)
        self._policy.prime(states)
        fresh = {key: value for key, value in self._policy.defaults.items() if key not in before}
        if fresh and self.started:
            raise RuntimeError(
                f"the recurrent states {sorted(fresh, key=repr)} are new, and rows were collected without them: "
                "set them before the first batch"
            )
        self._carry(fresh)

    def _carry(self, defaults: Columns) -> None:
        """Carry these states from step to step from now on."""
        self.keys.claim("the policy's recurrent state", *defaults)
        self.keys.states += defaults
        for key, value in defaults.items():
            # One row per env: [*S] -> [E, *S].
            self.states[key] = self._defaults[key] = value.expand(self.num_envs, *value.shape).contiguous()

    def reset(self, seed: int | None = None) -> None:
        """Reset the env; open trajectories are cut.

        Raises:
            RuntimeError: another runner has given the env a step limit, which changed its autoreset mode.
        """
        window = self.window
        if window.same_step != self.stream.same_step:
            raise RuntimeError(
                f"{type(self.stream.source.stepped).__name__} was given a limit of steps (max_frames_per_traj=, "
                "StepCounter(max_steps=)) after this collector was made: set the limit first"
            )

        if window.steps and not self._dense_finals and self._ended is not None:
            # The next step will not contain the next observations of rows in the window, so store them. (Under
            # SAME_STEP those of ended rows are stored already.)
            if self.stream.same_step:
                waiting = ~self._ended
            else:
                waiting = self._ended | True
            envs = np.flatnonzero(to_torch(waiting).numpy(force=True))

            for key, leaf in zip(self.keys.obs, leaves_at(self._obs, self.keys.obs_paths), strict=True):
                values = to_torch(leaf).numpy(force=True)[envs]
                window.put_final(key, envs, values, window.steps - 1)

        self._obs, self._info = self.env.reset(seed=seed)
        self.started, self._at, self._ended = True, self.stream.at, None

    def _restart_moved(self) -> None:
        """Cut open episodes and reset an env that somebody else has moved; warn the first time."""
        if not self._warned:
            self._warned = True
            name = type(self.stream.source.stepped).__name__
            warnings.warn(
                f"{name} was stepped or reset by another collector, rollout or adapted env since this collector's last "
                "step (or a step of it failed): the open episodes are cut and the env is reset; give each its own env",
                stacklevel=2,
            )

        self.reset()

    def begin_only(self) -> None:
        """Make `step` only begin steps, which `settle` awaits.

        Raises:
            ValueError: the env does not support it.
        """
        base = self.stream.source.env
        if not self.stream.capabilities.overlaps:
            raise ValueError(
                "splits= needs envs whose steps can be started and awaited separately (AsyncVectorEnv, envpool "
                "in sync mode), "
                f"without gymnasium's wrappers around them, got {base}: put wrappers around the single envs"
            )

        if self._check_actions is not None:
            raise ValueError(
                f"splits= sends the actions straight to {base}, and a wrapper in its stack may change them: put it "
                "around the single envs"
            )
        self.sends = True

    def settle(self) -> None:
        """Wait for the pending step, if there is one."""
        if self._sent is not None:
            sent = self._sent
            self._sent = None
            self.finish(sent)

    def forget(self) -> None:
        """Discard the recorded transitions; the next step needs a reset first."""
        self.window.clear()  # with its columns: an interrupt may have left them partly grown
        self._infos.clear()
        self.started = False
        self._sent = None

    def step(self, random: bool = False) -> None:
        """Make one vector step: record the policy's input, act, step the env, record the results."""
        window = self.window
        stream = self.stream
        keys = self.keys
        if stream.moves.count != self._at:
            self._restart_moved()

        info = self._info
        if self._one_obs:
            seen = [self._obs]
        else:
            seen = leaves_at(self._obs, keys.obs_paths)
        seen += [info[name] for name in keys.root_names]
        window.put(self._seen_keys, seen)

        chosen: dict[NestedKey, Array | None] = {}
        for name in keys.infos:
            value = self._infos.entry(info, name)
            if name in self._masks:
                value = self._allow_where_silent(name, value)
            window.put_loose(name, value)
            chosen[name] = value

        if self._versions is not None:
            window.put((POLICY_VERSION,), (self._versions,))
        if self.states:
            self._restart_states()
        if self._policy is None:
            action = self._draw_legal()
        else:
            action = self._choose_action(seen, chosen, random)

        if self._check_actions is not None:
            action = self._check_actions(action)
        if stream.moves.count != self._at:
            raise RuntimeError(
                f"{type(stream.source.stepped).__name__} was stepped or reset while the policy chose its "
                "action, so the action would not belong to what the policy saw: let the policy plan in a "
                "separate env"
            )

        if not self.sends:
            self.finish(action)
            return
        self._sent = stream.send(action)

    def finish(self, action: Tree) -> None:
        """Step the env, or wait for the step begun with these actions; record the results."""
        window = self.window
        stream = self.stream
        keys = self.keys
        stream.may_alias, stream.may_alias_markers, stream.drawn = (
            self._lends,
            self._lends_markers,
            self._drawn,
        )

        try:
            obs, reward, terminated, truncated, info = self.env.step(action)
        finally:
            stream.may_alias = stream.may_alias_markers = stream.drawn = False

        # the actions that the env received
        if self._check_actions is None:
            given = stream.actions
        else:
            given = action
        results = [reward, terminated, truncated, given]
        if not self._one_action:
            results[3:] = leaves_at(given, keys.action_paths)
        if keys.next_names:
            results += [info[name] for name in keys.next_names]
        if not stream.same_step:
            results.append(stream.first)
        elif stream.hides_final_obs:
            window.put_known(stream.known)

        if self._dense_finals:
            leaves = leaves_at(obs, keys.obs_paths)
            final = stream.read_final(info)
            if final is None:
                finals = leaves
            else:
                finals = leaves_at(final, keys.obs_paths)

            if self._whole_finals:
                window.put((*self._result_keys, *self._next_keys), (*results, *finals))
            else:
                window.put_ended(self._result_keys, results, self._next_keys, leaves, stream.ended, finals)
        else:
            if stream.same_step and stream.any_ended:
                self._record_finals(info)
            window.put(self._result_keys, results)

        if keys.infos:
            self._infos.record(info, window)
        self._obs = obs
        self._info = info
        self._ended, self._at = stream.ended, stream.at
        window.advance()

    def _restart_states(self) -> None:
        """Reset the states of new episodes and mark the rows that store states."""
        stream = self.stream
        # None on a device, where checking would sync: then always run this.
        begins = stream.any_first is not False
        if self._stride > 1:
            zero = full_for(stream.first, self.num_envs, 0, torch.int64)
            self.age = zero if self.age is None else self.age + 1
            if begins:
                fill_rows(self.age, stream.first, 0)
            self.window.put((HAS_STATE,), (self.age % self._stride == 0,))

        if begins:
            first = to_torch(stream.first)
            for key, state in self.states.items():
                self.states[key] = select(first, self._defaults[key], state)

    def _choose_action(self, seen: list[Array], chosen: dict[NestedKey, Array | None], random: bool) -> Any:
        """Call the policy; record a module's other outputs and carry its states to the next step.

        ``seen`` are the observations and markers of this step, ``chosen`` the chosen entries of its info.
        """
        policy = self._policy
        obs = self._obs
        if isinstance(policy, ModulePolicy):
            columns: Columns = {}
            for key, value in zip(self._seen_keys, seen, strict=True):  # views of NumPy memory
                if isinstance(value, np.ndarray):
                    column = torch.from_numpy(value)
                else:
                    column = to_torch(value)
                flat = column.ndim == 1 and key in self.keys.trailing
                columns[key] = column.unsqueeze(-1) if flat else column

            for name, entry in chosen.items():
                if entry is not None:
                    columns[name] = to_torch(entry)

            for key, counts in self._masks.items():
                if mask_form(counts, columns[key].shape[1:]) is not None:
                    columns[key] = self._allow_where_ended(columns[key])
                    check_options(ACTION_MASK, columns[key].flatten(1), each="env")

            columns.update(self.states)
            action, written = act_in_turn(policy, self._exploration, columns)
            self.window.put(list(written), list(written.values()))

            # The next step starts from the states under ("next", state).
            for key in self.states:
                self.states[key] = written.get(next_key(key), self.states[key])
        else:
            assert policy is not None
            if not isinstance(obs, Tensor):
                if isinstance(obs, np.ndarray):
                    obs = torch.from_numpy(obs)
                else:
                    obs = map_tree(to_torch, obs)

            action = act_in_turn(policy, self._exploration, obs, self.stream.first)

        if random:
            return self._draw_legal()
        return action

    def _draw_legal(self) -> Tree:
        """Draw the step's random actions, among those that an ``action_mask`` in observation or info allows."""
        drawn = self.draw()
        if isinstance(self._obs, dict):
            mask = self._obs.get(ACTION_MASK)
        else:
            mask = None

        if mask is None:
            mask = _allow_silent(self._info, ACTION_MASK)
        if mask is None:
            return drawn
        return self.random.legal(drawn, map_tree(self._allow_where_ended, mask))

    def _allow_where_ended(self, mask: Array) -> Tensor:
        """Allow all actions in a mask ``[E, ...]`` for envs that will only reset: after an end none may be legal."""
        column = to_torch(mask)
        if self._ended is None or self.stream.same_step or self.stream.any_ended is False:
            return column
        allowed: Tensor = select(to_torch(self._ended), torch.ones_like(column), column)
        return allowed

    def _allow_where_silent(self, key: NestedKey, mask: Array | None) -> Array:
        """Return a mask of info in which envs that reported none allow all actions."""
        if mask is None:
            options = torch.ones(self.num_envs, sum(self._masks[key]), dtype=torch.bool, device=self.device)
            if self._on_host:
                return options.numpy()
            return options

        *outer, last = as_tuple(key)
        told = self._infos.entry(self._info, (*outer, f"_{last}"))
        if told is None:
            return mask
        return _open_rows(mask, ~told)

    def _record_finals(self, info: dict[str, Any]) -> None:
        """Record the true next observations of ended rows."""
        final = self.stream.read_final(info)
        if final is not None:
            # Indexing copies: the env may reuse its arrays.
            envs = np.flatnonzero(self.stream.ended)
            for key, leaf in zip(self.keys.obs, leaves_at(final, self.keys.obs_paths), strict=True):
                self.window.put_final(key, envs, leaf[envs], self.window.steps)

    def open_ids(self) -> Tensor:
        """Return the ids (int64 ``[n]``) of trajectories that continue or have transitions not yet in a batch."""
        window = self.window
        keys = self.keys
        live = to_torch(self._info[keys.root_names[keys.roots.index(keys.traj)]])
        if not window.steps:
            return live
        return torch.cat([live, window.take(keys.traj, window.valid())])

    def check_infos(self) -> None:
        """Raise ValueError if an entry of ``info_keys`` in a recorded last step is unknown; see `InfoColumns`."""
        self._infos.check_known()

    def lay_out(self, mask: Array, compact: bool) -> tuple[TensorDict, TensorDict | None]:
        """Build a flat batch of the transitions where ``mask`` is True, and its ``final`` if compact."""
        if self.keys.infos:
            self._infos.check_seen(self._info)
            self._infos.check_known()

        if not self._dense_finals:
            # The observations after the last step are its rows' next observations.
            self.window.put(self.keys.obs, leaves_at(self._obs, self.keys.obs_paths))

        # With own_buffers=False other code that steps the env may write into these arrays.
        if self._one_obs:
            self._obs = copy_array(self._obs)
        else:
            self._obs = map_tree(copy_array, self._obs)

        if self._looks_for_rewards and DEAD in self.window.columns:
            self._look_for_lost_rewards()
        laid_out = self.window.lay_out(mask, compact)
        if self.action_range is not None and len(laid_out[0]):
            self.action_range.look(laid_out[0])
        return laid_out

    def _look_for_lost_rewards(self) -> None:
        """Warn once if an env has paid rewards in steps in which it only reset; these rows are in no batch."""
        window = self.window
        dead = window.columns[DEAD][: window.steps]
        if not dead.any():
            return

        lost = window.columns[REWARD][: window.steps][dead]
        if not lost.any():
            return

        self._looks_for_rewards = False
        first = float(lost[lost != 0][0])
        warnings.warn(
            f"{type(self.stream.source.env).__name__} paid rewards (the first is {first:g}) in steps in which it "
            "only reset an ended episode. Such a step is not a transition and is in no batch, so these rewards are "
            "lost: a NEXT_STEP env should return 0 there. If the env resets in the step that ends an episode, pass "
            "as_vector_env(env, autoreset_mode='SameStep')",
            stacklevel=3,
        )


def _allow_silent(info: dict[Any, Any], name: Any) -> Tree | None:
    """Return a mask, or tree of masks, of an info; envs that reported none (see ``"_name"``) allow all actions."""
    mask = info.get(name)
    if isinstance(mask, dict):
        parts = {part: _allow_silent(mask, part) for part in mask if not str(part).startswith("_")}
        return {part: own for part, own in parts.items() if own is not None}

    if isinstance(mask, np.ndarray) and mask.dtype == object:
        mask = _as_numbers(name, mask)  # lists of single envs, which Gymnasium does not join
    told = info.get(f"_{name}")
    if mask is None or told is None:
        return mask
    return _open_rows(mask, ~told)


def _open_rows(mask: Array, rows: Array) -> Array:
    """Return a mask ``[E, ...]`` that allows all actions where bool ``[E]`` ``rows`` is True."""
    if isinstance(mask, Tensor):
        ones = torch.ones_like(mask)
    else:
        ones = np.ones_like(mask)
    return select(rows, ones, mask)


class InfoColumns:
    """Finds and records the chosen entries of an env's ``info``."""

    def __init__(
        self, env: VectorEnv[Any, Any, Any], stream: VectorStream, names: Sequence[NestedKey]
    ) -> None:
        self._stream = stream
        self._names = names
        self._device = stream.capabilities.device
        self._on_host = stream.capabilities.framework == "numpy"

        # RecordEpisodeStatistics writes the step's entry where SAME_STEP keeps the entries of the reset.
        around = (*layers(env), *layers(stream.source.env))
        self._of_step = {layer._stats_key for layer in around if hasattr(layer, "_stats_key")}

        # So do markers that describe the step; others describe the observation after the reset.
        markers = [layer for layer in layers(env) if isinstance(layer, MarkerWrapper)]
        self._of_step |= {marker.info_name for marker in markers if marker.describes_step}
        self._of_reset = {marker.info_name for marker in markers} - self._of_step
        self._seen: set[NestedKey] = set()
        self._lost: dict[NestedKey, Tensor] = {}  # on a device: whether an unknown entry was recorded

    def clear(self) -> None:
        """Forget which entries were recorded, together with their columns."""
        self._seen.clear()
        self._lost.clear()

    def record(self, info: dict[str, Any], window: Window) -> None:
        """Record the entries of the last step in a `Window`.

        Gymnasium moves the entries of ended SAME_STEP rows to ``final_info``. Where such a row has none, its entries
        may be those of the reset: floating ones become NaN, and others, which cannot say that they are unknown, are
        an error.

        Raises:
            ValueError: an entry of an ended row is unknown and not floating (on a device: `check_known` raises it).
        """
        stream = self._stream
        final = info.get("final_info") if stream.same_step else None
        lost = self._lost_rows(info)

        for name in self._names:
            value = self.entry(info, name)
            if isinstance(final, dict):
                last = self.entry(final, name)
            else:
                last = None

            from_step = as_tuple(name)[0] in self._of_step
            if last is not None:
                if value is None:
                    value = last
                else:
                    value = select(stream.ended, last, value)
            elif final is None or value is None or from_step:
                pass
            elif value.shape[:1] == (stream.num_envs,):
                # it belongs to the reset of the next episode
                value = fill_rows(copy_array(value), stream.ended, False)

            if lost is not None and value is not None and not from_step:
                value = self._hide(name, value, lost)
            window.put_loose(next_key(name), value)

            if value is not None and name not in self._seen:
                self._seen.add(name)
                # The entry has no root value yet, which batches need.
                if name not in window.columns:
                    if isinstance(value, Tensor):
                        zeros = torch.zeros_like(value)
                    else:
                        zeros = np.zeros_like(value)
                    window.put_loose(name, zeros)

    def _lost_rows(self, info: dict[str, Any]) -> Array | None:
        """Return the rows that the env itself has reset without ``final_info``, bool ``[E]``; None if none is."""
        stream = self._stream
        if not stream.resets_itself or stream.any_ended is False:
            return None
        if not isinstance(info.get("final_info"), dict):
            return stream.ended

        told = info.get("_final_info")
        if told is None:  # it is about all ended rows
            return None

        if isinstance(stream.ended, np.ndarray):
            lost = stream.ended & ~np.asarray(told, bool)
        else:
            lost = stream.ended & ~to_torch(told, self._device).bool()

        if not self._on_host or lost.any():
            return lost
        return None

    def _hide(self, name: NestedKey, value: Array, lost: Array) -> Array:
        """Return the entry with NaN in the lost rows, see `record`."""
        if value.shape[:1] != (self._stream.num_envs,):
            return value
        if as_tuple(name)[0] == ACTION_MASK or as_tuple(name)[0] in self._of_reset:
            # Masks of last observations may be empty, and a marker is not about them.
            return fill_rows(copy_array(value), lost, False)

        if isinstance(value, Tensor):
            floating = value.is_floating_point()
        else:
            floating = value.dtype.kind in "fc"

        if floating:
            return fill_rows(copy_array(value), lost, float("nan"))
        if self._on_host:
            self._refuse_lost(name, lost, value)
        else:  # asking whether a row is lost would sync at each step
            before = self._lost.get(name)
            self._lost[name] = lost.any() if before is None else before | lost.any()

        return value

    def check_known(self) -> None:
        """Raise ValueError if an entry of an ended row was unknown and not floating; syncs with a device if needed."""
        for name, some in self._lost.items():
            if bool(some):
                self._lost = {}
                self._refuse_lost(name)

    def _refuse_lost(
        self, name: NestedKey, rows: Array | None = None, value: Array | None = None
    ) -> NoReturn:
        env = type(self._stream.source.env).__name__
        where = ""
        if rows is not None and value is not None:
            number = int(np.flatnonzero(rows)[0])
            where = f" (env {number} ended, and info says {value[number].tolist()})"

        raise ValueError(
            f"info_keys={[name]}: {env} resets ended envs in the same step and gives no info['final_info'], so "
            f"{name!r} of an episode's last step is unknown: the value in info may be that of the reset{where}. Let "
            "the env pass the last step's entries as a dict, info['final_info'] (dict(info) if these are they), make "
            "it with autoreset_mode=NEXT_STEP, or leave the entry out"
        )

    def entry(self, info: dict[str, Any], name: NestedKey) -> Array | None:
        """Return an entry of ``info`` on the env's device; None if it is missing."""
        value: Any = info
        for part in as_tuple(name):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None:
            return None
        if isinstance(value, dict):
            entries = [(*as_tuple(name), key) for key in value if not str(key).startswith("_")]
            raise TypeError(
                f"info_keys has {name!r}, which is a dict: name its entries, info_keys={entries}. (For returns and "
                "lengths of episodes flatroll.wrappers.RewardSum and StepCounter give a number at every step)"
            )

        if isinstance(value, np.ndarray) and value.dtype == object:
            value = _as_numbers(name, value)
            if value is None:
                return None

        if self._on_host:
            if isinstance(value, Tensor):
                return value.numpy(force=True)
            return np.asarray(value)
        return to_torch(value, self._device)

    def check_seen(self, info: dict[str, Any]) -> None:
        """Raise KeyError if an entry was in no step's info; ``info`` is the last info."""
        missing = [name for name in self._names if name not in self._seen]
        if missing:
            names = sorted(str(key) for key in info if not str(key).startswith("_"))
            raise KeyError(
                f"info_keys={missing} were in no step's info; the last one had {names}. A rare entry must "
                "occur in the first batch: use a larger frames_per_batch, or, for episode returns, "
                "flatroll.wrappers.RewardSum"
            )


def _as_numbers(name: NestedKey, entries: Array) -> Array | None:
    """Convert an object array ``[E]`` of equal kinds of numbers; 0 or False where an env is silent (None).

    Gymnasium's vector envs keep the infos of single envs as objects where they do not know the type, as of NumPy's
    bools.
    """
    told = np.array([one is not None for one in entries], bool)
    if not told.any():
        return None

    try:
        known = np.array(entries[told].tolist())
    except ValueError:  # of several shapes
        known = entries[told]

    if known.dtype.kind not in "biufc":
        raise TypeError(
            f"info_keys has {name!r}, whose values must be numbers, or arrays of one shape, got {entries[told][0]!r} "
            f"in env {int(np.flatnonzero(told)[0])}: leave it out, or turn it into numbers in a wrapper around the "
            "single env"
        )

    filled = np.zeros((len(entries), *known.shape[1:]), known.dtype)
    filled[told] = known
    return filled
