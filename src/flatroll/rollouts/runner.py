"""The loop that steps an env with a policy and records transitions, shared by `rollout` and `Collector`."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType
from torch import Tensor

from flatroll.layout.checks import check_options
from flatroll.layout.keys import (
    ACTION_MASK,
    ENV,
    ENV_STEP,
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
from flatroll.layout.profiling import call_in_range, is_profiling
from flatroll.layout.spaces import find_part, mask_form, option_counts
from flatroll.rollouts.arguments import Devices
from flatroll.rollouts.batch_columns import DEAD
from flatroll.rollouts.env_facts import EnvFacts, check_overlaps
from flatroll.rollouts.info_columns import InfoColumns, join_numbers
from flatroll.rollouts.policies import (
    ActionRange,
    Columns,
    ModulePolicy,
    Policy,
    PolicyModule,
    act_in_turn,
    as_function_of_obs,
    is_module,
)
from flatroll.rollouts.random_actions import RandomActions, RandomPolicy
from flatroll.rollouts.row_log import StepLog
from flatroll.rollouts.window import Window
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
from flatroll.wrappers.markers import RecurrentPrimer, find_wrapper
from flatroll.wrappers.plain_state import copy_plain
from flatroll.wrappers.snapshots.stack import get_snapshot, set_snapshot, snapshot_problem
from flatroll.wrappers.stream import NOTHING_LENT, Lending


@dataclass(frozen=True, kw_only=True)
class RunnerOptions:
    """How a runner acts.

    Attributes:
        devices: see `Devices`.
        exploration: how probabilistic modules choose actions.
        seed: of random actions.
        recurrent: whether to carry the recurrent states that the policy declares.
        state_stride: store them in every n-th row of a trajectory and in the first rows of runs.
        track_version: whether to store the policy version in each row.
        track_envs: whether to store the number of the env in each row, and that of its row.
        sends: whether `Runner.step` only begins steps, which `Runner.settle` awaits.
    """

    devices: Devices
    exploration: InteractionType
    seed: int | None = None
    recurrent: bool = True
    state_stride: int = 1
    track_version: bool = False
    track_envs: bool = False
    sends: bool = False


class Runner:
    """Steps an env with a policy and builds batches.

    Args:
        facts: what `read_env` has read.
        policy: a tensordict module, a callable from observation to action, or None for random actions.
        steps: capacity of the window in vector steps.
        options: see `RunnerOptions`.

    Raises:
        ValueError: the policy writes columns of others, ``state_stride`` has no states, or the env cannot step in two
            parts, as ``sends`` wants.
    """

    def __init__(self, facts: EnvFacts, policy: Policy | None, steps: int, options: RunnerOptions) -> None:
        if options.sends:
            check_overlaps(facts)
        keys = facts.keys
        stream = facts.stream
        space = facts.env.single_action_space

        self.env = facts.env
        self.envs = [facts.env]
        self.stream = stream
        self.num_envs = facts.num_envs
        self.device = facts.device
        self.keys = keys
        self.sends = options.sends
        self._on_host = facts.on_host

        # How the env's arrays are recorded.
        self._dense_finals = facts.dense_finals
        self._whole_finals = facts.whole_finals
        self._looks_for_rewards = facts.shows_lost_rewards
        self._misses_infos = bool(keys.infos)
        self._one_obs = keys.obs_paths == ((),)
        self._one_action = keys.action_paths == ((),)
        self._seen_keys = (*keys.obs, *keys.roots)
        self._next_keys = [keys.next_of[key] for key in keys.obs]
        self._result_keys = (REWARD, TERMINATED, TRUNCATED, *keys.actions, *keys.nexts)
        if not stream.same_step:
            self._result_keys += (DEAD,)

        self._versions: Array = None  # policy version of each env, int64 [E], if stored
        if options.track_version:
            keys.claim("track_policy_version", POLICY_VERSION)
            self._versions = ()
            self.set_version(0)

        if options.track_envs:
            keys.claim("track_envs", ENV, ENV_STEP)
            keys.tracks_envs = True

        drawn_from = space
        if isinstance(policy, RandomPolicy):
            drawn_from = policy.space_in(facts.env)
            policy = None
        self.random = RandomActions(drawn_from, self.num_envs, self.device, options.seed)
        self.random.as_numpy = self._on_host
        #: Returns the random actions of a step.
        self.draw: Callable[[], Any] = self.random

        # The policy is a module, a function of the observation, or neither.
        self._exploration = options.exploration
        self._module: ModulePolicy | None = None
        self._function: Callable[[Any, Any], Any] | None = None
        #: The recurrent states ``[E, ...]`` that the next step starts from.
        self.states: Columns = {}
        self._defaults: Columns = {}
        #: What the policy carries to the next step besides, ``[E, ...]``: no columns, and reset by the policy.
        self.carried: Columns = {}
        self._hidden: Columns = {}  # their first values, of one env
        #: The masks in the policy's input: key -> number of options of each choice of its part of the action space.
        self.masks: dict[NestedKey, tuple[int, ...]] = {}
        if is_module(policy):
            self._module = _make_module(policy, facts, options)
            self.masks = _find_masks(policy, facts)
            self._carry(self._module.defaults, self._module.carried)
        elif policy is not None:
            self._function = as_function_of_obs(policy, space, options.devices)
        self._draws = policy is None

        self._stride = options.state_stride
        self.age: Array = None  # steps since the first row of the episode
        if self._stride > 1:
            self._claim_stride()

        # A wrapper that may change the actions gets checked ones; otherwise the adapted env checks and keeps them.
        self._check_actions: ActionCheck | None = None
        #: Checks the actions of each batch; None if they are random or a wrapper may change them.
        self.action_range: ActionRange | None = None
        if not facts.passes_actions:
            framework = stream.capabilities.framework
            self._check_actions = ActionCheck(space, self.num_envs, framework, self.device)
        elif policy is not None:
            self.action_range = ActionRange(space, keys.actions, keys.action_paths, self.device)

        self._lending = Lending(
            arrays=facts.lends,
            markers=facts.lends and self._module is None,  # a module receives them and may write into them
            drawn=policy is None and drawn_from is space and facts.passes_actions,
        )

        # What the last step or reset returned.
        self._obs: Tree = None
        self._info: dict[str, Any] = {}
        self._infos = InfoColumns(facts.env, stream, keys.infos)
        self._ended: Array = None  # whether it ended each env's episode, bool [E]; None after a reset

        #: Records what makes the rows again; None without a log.
        self.log: StepLog | None = None

        #: Whether the env has been reset.
        self.started = False
        self._at = -1  # number of moves of the env at this runner's last step or reset
        self._sent: Tree = None  # the actions of the pending step
        self._warned = False  # whether it has warned that other code moved the env

        self.window = Window(
            keys,
            self.num_envs,
            steps,
            device=self.device,
            same_step=stream.same_step,
            dense_finals=self._dense_finals,
            framework=stream.capabilities.framework,
            agents=stream.source.agents,
        )

    def _claim_stride(self) -> None:
        """Claim the column that marks the rows with states; ValueError if there are none."""
        if not self.states:
            raise ValueError(
                f"state_stride={self._stride} needs a recurrent policy, one with parts that have "
                "make_tensordict_primer(): this one has no state to keep"
            )
        self.keys.claim("state_stride", HAS_STATE)
        self.keys.strided = True

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
        module = self._module
        if module is None:
            return

        module.prime(states)
        fresh = {key: value for key, value in module.defaults.items() if key not in self.states}
        hidden = {key: value for key, value in module.carried.items() if key not in self.carried}
        if (fresh or hidden) and self.started:
            raise RuntimeError(
                f"the recurrent states {sorted(fresh | hidden, key=repr)} are new, and rows were collected without "
                "them: set them before the first batch"
            )
        self._carry(fresh, hidden)

    def _carry(self, defaults: Columns, hidden: Columns) -> None:
        """Carry these states from step to step from now on; hidden ones are no columns."""
        self.keys.claim("the policy's recurrent state", *defaults)
        self.keys.states += defaults
        for key, value in defaults.items():
            # One row per env: [*S] -> [E, *S].
            self.states[key] = self._defaults[key] = value.expand(self.num_envs, *value.shape).contiguous()
        self._hidden |= hidden
        self._carry_anew(hidden)

    def _carry_anew(self, hidden: Columns) -> None:
        """Carry the first values of hidden states, ``[*S]`` each."""
        for key, value in hidden.items():
            # A copy, because the policy may write in place.
            self.carried[key] = value.repeat(self.num_envs, *[1] * value.ndim)

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

        if self.log is not None:
            continues = self.started and self.stream.moves.count == self._at
            seed = self.log.choose_seed(seed, continues=continues)
        self._obs, self._info = self.env.reset(seed=seed)
        self.started, self._at, self._ended = True, self.stream.at, None
        if self.log is not None:
            self.log.note_reset(seed)

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
        self._carry_anew(self._hidden)  # as in a new runner
        self.started = False
        self._sent = None

    def snapshot_problem(self) -> str | None:
        """Return why the env's episodes cannot be saved, as a clause; None if they can."""
        return snapshot_problem(self.env)

    def get_snapshot(self) -> dict[str, Any] | None:
        """Return the state of the env and of the open episodes, between two batches; None before the first reset."""
        stream = self.stream
        if stream.at < 0 or stream.moves.count != self._at:
            return None

        policy = None
        if self._module is not None:
            policy = self._module.get_snapshot()
        return {
            "env": get_snapshot(self.env),
            "started": self.started,
            **self.get_shown(),
            "states": copy_plain(self.states),
            "carried": copy_plain(self.carried),
            "age": copy_plain(self.age),
            "policy": policy,
            "window": self.window.get_snapshot(),
        }

    def set_snapshot(self, snapshot: dict[str, Any]) -> None:
        """Go on from a `get_snapshot` of a runner with the same env and policy.

        Raises:
            ValueError: the env is made of other layers, or its state cannot be set.
        """
        device = self.device
        self.reset()  # makes the arrays that the snapshot is written into
        set_snapshot(self.env, snapshot["env"])
        self.started = snapshot["started"]

        self.set_shown(snapshot)
        self.states = _copy_states(snapshot["states"], self.states)
        self.carried = _copy_states(snapshot["carried"], self.carried)
        self.age = copy_plain(snapshot["age"], device)
        if self._module is not None and snapshot["policy"] is not None:
            self._module.set_snapshot(snapshot["policy"])
        self.window.set_snapshot(snapshot["window"])

    def trust(self) -> None:
        """Look no more for what a collector of the same rows has looked for: it has warned, or found nothing.

        An entry of ``info_keys`` that no step returns has no column.
        """
        self.action_range = None
        self._looks_for_rewards = False
        self._misses_infos = False

    def get_shown(self) -> dict[str, Any]:
        """Return what the env showed in its last step or reset, as plain values: what the next step reads."""
        return {
            "observation": copy_plain(self._obs),
            "info": {name: _as_list(self._info[name]) for name in self._read_infos()},
            "ended": copy_plain(self._ended),
            "seen": self._infos.seen,
        }

    def set_shown(self, shown: dict[str, Any]) -> None:
        """Restore what `get_shown` returned."""
        device = self.device
        self._obs = copy_plain(shown["observation"], device)
        self._info = {name: _as_array(copy_plain(entry, device)) for name, entry in shown["info"].items()}
        self._ended = copy_plain(shown["ended"], device)
        self._infos.seen = shown["seen"]

    def _read_infos(self) -> list[str]:
        """Return the entries of the last info that the next step reads."""
        read = {*self.keys.root_names, *(as_tuple(name)[0] for name in self.keys.infos), ACTION_MASK}
        read |= {f"_{name}" for name in read}
        return [name for name in self._info if name in read]

    def step(self, random: bool = False) -> None:
        """Make one vector step: record the policy's input, act, step the env, record the results."""
        window = self.window
        stream = self.stream
        keys = self.keys
        if stream.moves.count != self._at:
            self._restart_moved()

        # What the policy sees.
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
            if name in self.masks:
                value = self._allow_where_silent(name, value)
            window.put_loose(name, value)
            chosen[name] = value

        if self._versions is not None:
            window.put((POLICY_VERSION,), (self._versions,))
        if self.states:
            self._restart_states()

        # What it does.
        action: Tree = None
        if self._module is not None:
            action = self._ask_module(self._module, seen, chosen)
        elif self._function is not None:
            action = self._ask_function(self._function)
        if random or self._draws:
            action = self._draw_legal()

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

        stream.lending = self._lending
        try:
            if is_profiling():
                stepped = call_in_range("env_step", self.env.step, action)
            else:
                stepped = self.env.step(action)
        finally:
            stream.lending = NOTHING_LENT
        obs, reward, terminated, truncated, info = stepped

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
            self._record_with_finals(results, obs, info)
        else:
            if stream.same_step and stream.any_ended:
                self._record_finals(info)
            window.put(self._result_keys, results)

        if keys.infos:
            self._infos.record(info, window)
        self._obs = obs
        self._info = info
        self._ended = stream.ended
        self._at = stream.at
        window.advance()

    def _record_with_finals(self, results: list[Array], obs: Tree, info: dict[str, Any]) -> None:
        """Record the results and the true next observations of all rows."""
        stream = self.stream
        paths = self.keys.obs_paths
        leaves = leaves_at(obs, paths)
        final = stream.read_final(info)
        if final is None:
            finals = leaves
        else:
            finals = leaves_at(final, paths)

        if self._whole_finals:
            self.window.put((*self._result_keys, *self._next_keys), (*results, *finals))
        else:
            self.window.put_ended(self._result_keys, results, self._next_keys, leaves, stream.ended, finals)

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

    def _ask_module(
        self, module: ModulePolicy, seen: list[Array], chosen: dict[NestedKey, Array | None]
    ) -> Any:
        """Return the module's actions; record its other outputs and carry its states to the next step.

        ``seen`` are the observations and markers of this step, ``chosen`` the chosen entries of its info.
        """
        columns: Columns = {}
        for key, value in zip(self._seen_keys, seen, strict=True):  # views of NumPy memory
            if isinstance(value, np.ndarray):
                column = torch.from_numpy(value)
            else:
                column = to_torch(value)
            if column.ndim == 1 and key in self.keys.trailing:
                column = column.unsqueeze(-1)
            columns[key] = column

        for name, entry in chosen.items():
            if entry is not None:
                columns[name] = to_torch(entry)

        for key, counts in self.masks.items():
            if mask_form(counts, columns[key].shape[1:]) is not None:
                columns[key] = self._allow_where_ended(columns[key])
                check_options(ACTION_MASK, columns[key].flatten(1), each="env")

        columns.update(self.states)
        columns.update(self.carried)
        if is_profiling():
            acted = call_in_range("policy", act_in_turn, module, self._exploration, columns)
        else:
            acted = act_in_turn(module, self._exploration, columns)
        action, written, self.carried = acted
        self.window.put(list(written), list(written.values()))

        # The next step starts from the states under ("next", state).
        for key in self.states:
            self.states[key] = written.get(next_key(key), self.states[key])
        return action

    def _ask_function(self, function: Callable[[Any, Any], Any]) -> Any:
        """Return the actions of a callable policy."""
        obs = self._obs
        if isinstance(obs, np.ndarray):
            obs = torch.from_numpy(obs)
        elif not isinstance(obs, Tensor):
            obs = map_tree(to_torch, obs)

        first = self.stream.first
        if is_profiling():
            return call_in_range("policy", act_in_turn, function, self._exploration, obs, first)
        return act_in_turn(function, self._exploration, obs, first)

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
            options = torch.ones(self.num_envs, sum(self.masks[key]), dtype=torch.bool, device=self.device)
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

    def live_ids(self) -> Tensor:
        """Return the id of the trajectory of each env, int64 ``[E]``."""
        keys = self.keys
        return to_torch(self._info[keys.root_names[keys.roots.index(keys.traj)]])

    def open_ids(self) -> Tensor:
        """Return the ids (int64 ``[n]``) of trajectories that continue or have transitions not yet in a batch."""
        window = self.window
        keys = self.keys
        live = self.live_ids()
        if not window.steps:
            return live
        return torch.cat([live, window.take(keys.traj, window.valid())])

    def check_infos(self) -> None:
        """Raise ValueError if an entry of ``info_keys`` in a recorded last step is unknown; see `InfoColumns`."""
        self._infos.check_known()

    def lay_out(self, mask: Array, compact: bool) -> tuple[TensorDict, TensorDict | None]:
        """Build a flat batch of the transitions where ``mask`` is True, and its ``final`` if compact."""
        if self._misses_infos:
            self._infos.check_seen(self._info)
        if self.keys.infos:
            self._infos.check_known()

        if not self._dense_finals:
            # The observations after the last step are its rows' next observations.
            if self._one_obs:
                last = [self._obs]
            else:
                last = leaves_at(self._obs, self.keys.obs_paths)
            self.window.put(self.keys.obs, last)

        # With own_buffers=False other code that steps the env may write into these arrays.
        if self._one_obs:
            self._obs = copy_array(self._obs)
        else:
            self._obs = map_tree(copy_array, self._obs)

        # Rows on which the env only reset are not in the mask.
        if self._looks_for_rewards and not mask.all():
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


def _copy_states(saved: Columns, now: Columns) -> Columns:
    """Return copies of saved states on the devices of the present ones; ValueError if they are others."""
    shapes, given = ({key: tuple(value.shape) for key, value in states.items()} for states in (now, saved))
    if shapes != given:
        raise ValueError(f"the policy carries the states {shapes}, and the saved ones are {given}")
    return {key: value.to(now[key].device, copy=True) for key, value in saved.items()}


def _as_list(entry: Any) -> Any:
    """Return an entry of info as plain values: an array of objects as ``("objects", list)``."""
    if isinstance(entry, np.ndarray) and entry.dtype == object:
        return "objects", copy_plain(list(entry))
    if isinstance(entry, dict):
        return {name: _as_list(part) for name, part in entry.items()}
    return copy_plain(entry)


def _as_array(entry: Any) -> Any:
    """Invert `_as_list`."""
    if isinstance(entry, dict):
        return {name: _as_array(part) for name, part in entry.items()}
    if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
        return entry

    objects = np.full(len(entry[1]), None, dtype=object)
    for i, value in enumerate(entry[1]):
        objects[i] = value
    return objects


def _make_module(policy: PolicyModule, facts: EnvFacts, options: RunnerOptions) -> ModulePolicy:
    """Wrap a tensordict module, which also carries the states that the env's RecurrentPrimer declares."""
    primer = find_wrapper(facts.env, RecurrentPrimer)
    if primer is None:
        primed = None
    else:
        primed = primer.states

    keys = facts.keys
    module = ModulePolicy(
        policy,
        facts.env.single_action_space,
        keys.actions,
        facts.num_envs,
        options.devices,
        options.exploration,
        recurrent=options.recurrent,
        primed=primed,
    )
    keys.claim("the policy", *module.writes)
    return module


def _find_masks(policy: PolicyModule, facts: EnvFacts) -> dict[NestedKey, tuple[int, ...]]:
    """Return the action masks in the policy's input with the options of each choice.

    One that no observation has is stored from info.
    """
    keys = facts.keys
    read = [key for key in policy.in_keys if as_tuple(key)[0] == ACTION_MASK]
    missing = [key for key in read if key not in (*keys.obs, *keys.infos)]
    if missing:
        keys.claim("the policy's mask", *missing, *map(next_key, missing))
        keys.infos += (*missing,)

    masks = {}
    for path in keys.action_paths:
        key = plain_key((ACTION_MASK, *map(str, path)))
        counts = option_counts(find_part(facts.env.single_action_space, path))
        if counts is not None and key in (*keys.obs, *keys.infos):
            masks[key] = counts
    return masks


def _allow_silent(info: dict[Any, Any], name: Any) -> Tree | None:
    """Return a mask, or tree of masks, of an info; envs that reported none (see ``"_name"``) allow all actions."""
    mask = info.get(name)
    if isinstance(mask, dict):
        parts = {part: _allow_silent(mask, part) for part in mask if not str(part).startswith("_")}
        return {part: own for part, own in parts.items() if own is not None}

    if isinstance(mask, np.ndarray) and mask.dtype == object:
        mask = join_numbers(name, mask)  # lists of single envs, which Gymnasium does not join
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
