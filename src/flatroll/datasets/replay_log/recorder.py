"""The recorder: writes a log while a collector collects."""

import random
import secrets
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from types import MethodType
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv
from tensordict import TensorDict
from torch import Tensor

from flatroll.datasets.replay_log.actions import codes_of
from flatroll.datasets.replay_log.columns import ColumnForm, Layout, first_bits, pack_bytes, pack_kept
from flatroll.datasets.replay_log.digests import checksums
from flatroll.datasets.replay_log.generators import generator_of, generator_words, single_envs
from flatroll.datasets.replay_log.marks import encode_marks
from flatroll.datasets.replay_log.recipe import (
    EnvMaker,
    Recipe,
    describe,
    differing_settings,
    differing_versions,
    versions_here,
)
from flatroll.datasets.replay_log.replay import Replayer, RowsDiffer
from flatroll.datasets.replay_log.state_code import StateCode
from flatroll.datasets.replay_log.states import can_save, state_of, states_problem
from flatroll.datasets.replay_log.varints import Ints
from flatroll.datasets.replay_log.windows import (
    NEW,
    RESTART,
    SAVE,
    UNSEEDED,
    Window,
    Windows,
)
from flatroll.disk.folder import Folder
from flatroll.disk.state_tree import pack, unpack
from flatroll.layout.keys import (
    DELTA,
    DONE,
    NEXT_KNOWN,
    REWARD,
    TERMINATED,
    TRUNCATED,
    NestedKey,
    as_tuple,
    next_key,
)
from flatroll.layout.tensordict_seam import leaves
from flatroll.rollouts.batch_columns import ColumnKeys
from flatroll.rollouts.row_log import LoggedEnv
from flatroll.rollouts.runner import Runner
from flatroll.wrappers.arrays import Array
from flatroll.wrappers.source import innermost

#: What the state of a log's folder begins with, and the version of its form.
KIND = "replay log"
FORM = 1
#: Rows of an env between two states from which it can be begun again.
_GAP = 256
#: Rows of an env after a point from which it can certainly be stepped again, before its state is saved.
_FAR = 384
_FAR_ONLY = 192  # where states of generators do not suffice: there are no other points
_FAR_TOGETHER = 1536  # of all envs: to save their state takes longer
#: Bytes of saved states for each row.
_BYTES_PER_ROW = 0.85
#: Envs whose first rows are made again at once, to find an env that is not deterministic.
_TRIED = 4
#: Resets after lost rows whose first rows are made again at once: so many, and then the 16th, 64th, ...
_ALWAYS = 4
#: Envs that cannot be stepped alone are stepped from the last seed on: up to this window, to find out.
_MOST_TOGETHER = 16


class Recorder:
    """Records the resets and rows of a collector's runner.

    The first window is made again at once, and so are those after the first resets that follow lost rows; then, if envs
    can be made alone, the rows of one of them in windows 1, 4, 16 and so on. From the first window on in which a row
    differs, rows are kept themselves.
    """

    def __init__(self, path: str | PathLike[str], logged: LoggedEnv, runner: Runner) -> None:
        with unchanged_generators():
            self._recipe = describe(logged)
        self._logged = logged
        self._runner = runner
        self._num_envs = runner.num_envs
        self._versions = versions_here(logged.facts)
        self._path = path

        self._layout: Layout | None = None
        self._written = 0  # windows
        self._first_window = 0  # number of the first one
        self._lost = 0  # resets that do not continue what is in the log
        self._begins_anew = False  # whether one of these is in the current window
        self._why: str | None = None  # why rows are kept
        self._used = runner.stream.moves.count > 0  # whether the env was stepped or reset before

        # Resets of the current window, and states of single envs that no row belongs to yet.
        self._events: list[tuple[int, Ints, Ints]] = []
        self._taken: dict[int, tuple[list[int], int]] = {}
        self._since: Ints = np.full(self._num_envs, _GAP)  # rows since the last state of each env
        self._due = np.ones(self._num_envs, bool)
        # Saved states that no row belongs to yet: env, -1 for all, rows since the last window, and the state.
        self._saved: list[tuple[int, Ints, bytes]] = []
        # Rows of each env since the last point to start from.
        self._far: Ints = np.zeros(self._num_envs, np.int64)
        self._codes: dict[int, StateCode] = {}
        self._saves = states_problem(logged.facts, alone=self._recipe.alone) is None
        self._restarts_suffice: bool | None = None  # whether a generator's state does; None: not known
        self._allowed = 0.0  # bytes that may be spent on states
        self._state_bytes = 0  # of the last one

        self._resetting = False
        self._taps: list[_Tap] = []
        self._asks = False

        self._folder = Folder(path, write=True, sync=False)
        try:
            self._resume()
        except BaseException:
            self._folder.close()
            raise
        if self._recipe.alone:
            singles = single_envs(logged.facts)
            # An env with slots cannot be tapped: it is stepped from seeds.
            self._taps = [
                _Tap(env, number, self) for number, env in enumerate(singles) if hasattr(env, "__dict__")
            ]
            self._asks = not singles

    def _resume(self) -> None:
        """Continue the log in the folder, if it has one of the same env."""
        if not self._folder.versions():
            return

        loaded = self._folder.load()
        tree = read_description(loaded.json, loaded.tensors)
        recipe = Recipe.from_tree(tree["recipe"])
        if recipe != self._recipe:
            raise ValueError(
                f"log={str(self._path)!r} is the log of {recipe.name} with {recipe.num_envs} envs and other settings "
                f"({'; '.join(differing_settings(recipe, self._recipe))}): choose another path"
            )
        if differs := differing_versions(tree["versions"], self._versions):
            raise ValueError(
                f"log={str(self._path)!r} was written with other versions ({'; '.join(differs)}): choose another path"
            )
        self._folder.recover()
        self._layout = Layout.from_tree(tree["layout"])
        windows = self._load_windows()
        self._first_window = len(windows)
        if any(windows.kept):
            self._keep("rows that are in the log were other when they were made again")

    def _load_windows(self) -> Windows:
        """Read the index of all windows: to keep it would take more memory with each."""
        windows = Windows(self._folder, self._num_envs, len(self._layout_here().actions))
        windows.load()
        return windows

    def choose_seed(self, seed: int | None, *, continues: bool) -> int | None:
        """Return the seed of the next reset: one of its own if rows before it are not in the log."""
        self._resetting = True
        can_seed = self._runner.stream.capabilities.seedable
        if continues:
            return seed

        self._lost += 1
        self._begins_anew = True
        if not can_seed:
            if self._used and self._why is None:
                self._keep("the env was used before, and takes no seed at a reset")
            return seed
        if seed is None:
            return secrets.randbits(31)
        return seed

    def note_reset(self, seed: int | None) -> None:
        """Record a reset."""
        self._resetting = False
        self._taken.clear()
        self._saved.clear()
        runner = self._runner
        window = runner.window

        number = UNSEEDED
        if not runner.stream.capabilities.seedable:
            if not self._used:
                number = NEW
        elif seed is not None:
            number = seed
        if not self._used and number != UNSEEDED:
            self._begin_codes()
        elif not self._written:
            self._codes.clear()  # the rows of the first reset were lost
        self._used = True

        if window.steps:
            local = window.valid().sum(axis=0).astype(np.int64)
        else:
            local = np.zeros(self._num_envs, np.int64)
            self._events.clear()  # their rows were dropped
        ids = runner.live_ids().cpu().numpy().astype(np.int64)
        self._events.append((number, local, ids))

    def note_rows(self, batch: TensorDict, final: TensorDict | None, mask: Array) -> None:
        """Write a batch."""
        if self._layout is None:
            self._layout = self._begin(batch)
        layout = self._layout

        counts = np.asarray(mask).sum(axis=0, dtype=np.int64)
        digests = layout.digest(batch, final)
        outputs = b""
        if layout.outputs:
            outputs = pack_bytes(
                {"columns": [(form.key, batch.get(form.key).cpu()) for form in layout.outputs]}
            )

        window = Window(
            counts=counts,
            checksums=checksums(digests, counts),
            digests=first_bits(digests),
            actions=[code.encode(batch.get(code.key)) for code in layout.actions],
            outputs=outputs,
            events=self._take_events(counts),
            restarts=self._take_restarts(batch, np.asarray(mask), counts),
            marks=encode_marks(_flags(batch, layout.init), _flags(batch, DONE), counts),
            **self._take_saved(counts),
        )
        if self._why is None:
            self._try(window)
        if self._why is not None:
            window.kept = pack_kept(layout, batch, final)
        self._folder.append(window.to_columns())
        self._written += 1
        self._save_states(window)

    def close(self) -> None:
        """Release the folder."""
        for tap in self._taps:
            tap.remove()
        self._taps = []
        self._folder.close()

    def _begin(self, batch: TensorDict) -> Layout:
        """Describe the env and the batches, in the folder's first version."""
        layout = self._layout_of(batch)
        tree = {
            "kind": KIND,
            "form": FORM,
            "recipe": self._recipe.to_tree(),
            "layout": layout.to_tree(),
            "versions": self._versions,
        }
        self._folder.publish(
            *pack(tree), extra={"kind": KIND, "env": self._recipe.name, "envs": self._num_envs}
        )
        return layout

    def _layout_of(self, batch: TensorDict) -> Layout:
        """Return the layout of batches like this one."""
        keys = self._runner.keys
        columns = leaves(batch)
        actions = {key: columns[key] for key in keys.actions}
        infos = [key for key in keys.infos if key not in self._runner.masks]
        made = _made_by_env(keys, infos, columns)
        outputs = [key for key in columns if key not in made and key not in actions]
        obs = [key for key in keys.obs if key not in keys.deltas]
        implied: set[NestedKey] = {DONE}
        for key in (*obs, *keys.counts):
            implied.add(next_key(key))
            made.add(next_key(key))
            columns.setdefault(next_key(key), columns[key])  # compact batches lack it

        def form(key: NestedKey) -> ColumnForm:
            column = columns[key]
            return ColumnForm(key, column.dtype, tuple(column.shape[1:]))

        return Layout(
            made=tuple(form(key) for key in sorted(made, key=as_tuple)),
            outputs=tuple(form(key) for key in sorted(outputs, key=as_tuple)),
            actions=tuple(codes_of(self._runner.env.single_action_space, actions)),
            digested=tuple(sorted((key for key in made if key not in implied), key=as_tuple)),
            obs=tuple(obs),
            counts=tuple(keys.counts),
            init=keys.init,
            traj=keys.traj,
        )

    def _take_events(self, counts: Ints) -> Ints:
        """Return the resets since the last window."""
        events = self._events
        self._events = []
        found = [np.concatenate([[seed], local, ids]) for seed, local, ids in events]
        if not found:
            return np.zeros((0, 1 + 2 * len(counts)), np.int64)
        return np.stack(found).astype(np.int64)

    # States of single envs.

    def take_before_reset(self, number: int, env: Any) -> None:
        """Take the state of a single env of this process, which is about to begin an episode."""
        if not self._due[number] or self._resetting:
            return
        words = generator_of(env)
        if words is not None:
            # The first observation of the episode is seen one step later.
            window = self._runner.window
            self._taken[number] = words, window.before + window.steps + 1
            self._due[number] = False

    def _take_restarts(self, batch: TensorDict, mask: Array, counts: Ints) -> Ints:
        """Return the states whose episodes begin in this window; note from which envs the next are taken."""
        window = self._runner.window
        found: list[list[int]] = []
        if self._taken:
            assert self._layout is not None
            begins = np.cumsum(counts) - counts
            firsts = batch.get(self._layout.init).reshape(-1).cpu().numpy()
            ids = batch.get(self._layout.traj).cpu().numpy()
            steps = np.nonzero(mask.T)[1] + window.before  # the vector step of each row

            for env, (words, step) in list(self._taken.items()):
                own = slice(begins[env], begins[env] + counts[env])
                places = np.flatnonzero(firsts[own] & (steps[own] >= step))
                if len(places):
                    row = int(places[0])
                    found.append([env, row, int(ids[own][row]), *words])
                    self._since[env] = -row
                    del self._taken[env]

        self._since += counts
        self._due = self._since >= _GAP
        if self._restarts_suffice is False:
            self._due[:] = False
        if self._asks and self._due.any():
            self._ask()
        return np.array(found, np.int64).reshape(-1, RESTART)

    def _ask(self) -> None:
        """Ask envs in other processes for their generators."""
        base = innermost(self._logged.facts.stream.source).env
        assert isinstance(base, AsyncVectorEnv)
        generators = base.call("np_random")

        step = self._runner.window.before + self._runner.window.steps + 1
        for env in np.flatnonzero(self._due).tolist():
            if env in self._taken or not isinstance(generators[env], np.random.Generator):
                continue
            words = generator_words(generators[env].bit_generator.state)
            if words is not None:
                self._taken[env] = words, step

    # States in the middle of episodes.

    def _begin_codes(self) -> None:
        """Note the states after the first reset, which a reader can make again: others are stored as differences."""
        if not self._saves:
            return

        envs = [-1]  # all together
        if self._recipe.alone:
            envs = list(range(self._num_envs))
        for env in envs:
            base = state_of(self._logged.facts, self._runner, _number_of(env))
            self._codes[env] = StateCode(base)

    def _take_saved(self, counts: Ints) -> dict[str, Any]:
        """Return the saved states that belong to rows of this window."""
        saved = self._saved
        self._saved = []
        base = self._first_window if self._codes else -1
        found = []
        states = []
        for env, local, state in saved:
            here = local if env < 0 else local[[env]]
            own = counts if env < 0 else counts[[env]]
            if (here <= own).all():
                found.append((env, int(here.sum()), len(state), base))
                states.append(state)
            elif env >= 0:
                self._saved.append((env, local - counts, state))
        return {"saves": np.array(found, np.int64).reshape(-1, SAVE), "states": b"".join(states)}

    def _save_states(self, window: Window) -> None:
        """Save the states of envs that have gone far since the last point from which they can be stepped again."""
        counts = window.counts
        self._far += counts
        if not self._saves or self._why is not None:
            return
        for event in window.events:
            if event[0] >= 0:
                self._far = counts - event[1 : 1 + self._num_envs]
        if self._restarts_suffice:
            for restart in window.restarts:
                self._far[restart[0]] = counts[restart[0]] - restart[1]

        self._allowed += _BYTES_PER_ROW * window.rows
        facts = self._logged.facts
        local = self._runner.window.valid().sum(axis=0).astype(np.int64) - counts
        if not self._recipe.alone:
            if self._far.min() >= _FAR_TOGETHER and self._allowed >= self._state_bytes:
                self._save(-1, local)
                self._far[:] = 0
            return

        far = _FAR
        if self._restarts_suffice is False:
            far = _FAR_ONLY
        # Where not all can be paid for, the farthest come first.
        due = np.flatnonzero(self._far >= far)
        for env in due[np.argsort(-self._far[due], kind="stable")].tolist():
            if self._allowed < self._state_bytes:
                break
            if can_save(facts, env):
                self._save(env, local)
                self._far[env] = -local[env]

    def _save(self, env: int, local: Ints) -> None:
        """Save a state; none from now on if it is not of plain values."""
        code = self._codes.get(env, StateCode())
        tree = state_of(self._logged.facts, self._runner, _number_of(env))
        if env < 0:
            tree["local"] = local.tolist()
        try:
            state = code.encode(tree)
        except (TypeError, ValueError):
            self._saves = False
            return
        self._saved.append((env, local, state))
        self._state_bytes = len(state)
        self._allowed -= len(state)

    # Is the env deterministic?

    def _try(self, window: Window) -> None:
        """Make some rows of a window again before it is written; keep rows from now on if they differ."""
        written = self._written
        anew = written == 0 or (self._begins_anew and (self._lost <= _ALWAYS or _is_power_of_4(self._lost)))
        self._begins_anew = False
        alone = self._recipe.alone
        if not anew and not (_is_power_of_4(written) and (alone or written <= _MOST_TOGETHER)):
            return

        windows = self._load_windows()
        number = len(windows)
        windows.add(window)
        replayer = Replayer(windows, self._layout_here(), self._maker(), _no_text, self._num_envs)
        try:
            with unchanged_generators():
                if not alone:
                    replayer.window(number)
                    return

                envs = np.flatnonzero(window.counts)
                chosen = envs[[number % len(envs)]]
                if anew:
                    chosen = envs[np.unique(np.linspace(0, len(envs) - 1, _TRIED).astype(int))]
                for env in chosen.tolist():
                    replayer.env_in(number, env)
                    suffices = replayer.restart_suffices(number, env)
                    if suffices is not None:
                        self._restarts_suffice = suffices
        except RowsDiffer as found:
            self._keep(f"row {found.row:,}, of env {found.env}, was other when it was made again")
        finally:
            replayer.close()

    def _layout_here(self) -> Layout:
        assert self._layout is not None
        return self._layout

    def _maker(self) -> EnvMaker:
        function = self._logged.make if self._recipe.kind == "function" else None
        return EnvMaker(self._recipe, function, self._logged.facts.stream.source.env)

    def _keep(self, why: str) -> None:
        """Keep the rows from now on."""
        self._why = why
        warnings.warn(
            f"log={str(self._path)!r}: {self._recipe.name} is not deterministic ({why}): its rows are kept themselves "
            "from now on, which takes more space",
            RuntimeWarning,
            stacklevel=2,
        )


def _flags(batch: TensorDict, key: NestedKey) -> Any:
    """Return a column of flags, bool ``[N]``, in NumPy."""
    return batch.get(key).reshape(-1).cpu().numpy()


def _number_of(env: int) -> int | None:
    """Return the number of an env; None for all."""
    return None if env < 0 else env


def _no_text(row: int, env: int) -> str:
    return f"row {row} of env {env}"


class _Tap:
    """Stands for the ``reset`` of a single env, and tells a recorder of each call, as long as there is one."""

    def __init__(self, env: Any, number: int, recorder: Recorder) -> None:
        self._env = env
        self._number = number
        self._recorder: Callable[[], Recorder | None] = weakref.ref(recorder)
        left = vars(env).get("reset")
        if isinstance(left, _Tap) and left._recorder() is None:
            left.remove()
        self._reset = env.reset
        self._before = vars(env).get("reset")  # another attribute of this name
        env.reset = self

    def __call__(self, **arguments: Any) -> Any:
        recorder = self._recorder()
        if recorder is None:
            self.remove()
        else:
            recorder.take_before_reset(self._number, self._env)
        return self._reset(**arguments)

    def remove(self) -> None:
        """Give the env its own ``reset`` again, unless somebody has replaced this one."""
        self._recorder = _nobody
        if vars(self._env).get("reset") is not self:
            return
        if self._before is None:
            del self._env.reset
        else:
            self._env.reset = self._before

    def __reduce__(self) -> Any:
        """A copy of the env, deep or pickled, has a ``reset`` of its own."""
        return _bind, (type(self._env).reset, self._env)


def _bind(function: Callable[..., Any], env: Any) -> Any:
    return MethodType(function, env)


def _nobody() -> None:
    return None


def _is_power_of_4(number: int) -> bool:
    """Return whether a number is 1, 4, 16, ...: one bit, at an even place."""
    return number > 0 and number & (number - 1) == 0 and number.bit_length() % 2 == 1


@contextmanager
def unchanged_generators() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch (CPU) afterwards: making envs may draw from them."""
    python = random.getstate()
    numpy = np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _made_by_env(
    keys: ColumnKeys, infos: list[NestedKey], columns: dict[NestedKey, Tensor]
) -> set[NestedKey]:
    """Return which columns the env and its markers make, not the policy; masks of info are opened by the runner."""
    made: set[NestedKey] = {REWARD, TERMINATED, TRUNCATED, DONE, *keys.obs, *keys.roots, *keys.nexts}
    made.update(keys.next_of[key] for key in keys.obs)
    made.update(next_key(key) for key in keys.counts)
    for key in infos:
        made.update((key, next_key(key)))
    delta = as_tuple(DELTA)
    made.update(key for key in columns if as_tuple(key)[: len(delta)] == delta)
    made.add(NEXT_KNOWN)
    known = {as_tuple(key) for key in made}
    return {key for key in columns if as_tuple(key) in known}


def read_description(json: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return what a log's folder says of it; ValueError if it is no log, or of a later form."""
    tree = unpack(json, tensors)
    if not isinstance(tree, dict) or tree.get("kind") != KIND:
        raise ValueError("the folder holds no replay log")
    if tree.get("form") != FORM:
        raise ValueError(
            f"the replay log has form {tree.get('form')!r}, this version reads {FORM}: install a later one"
        )
    versions = tree.get("versions")
    if not isinstance(versions, dict) or not all(isinstance(v, str) for v in (*versions, *versions.values())):
        raise ValueError("the replay log does not say its versions")
    return tree


def open_recorder(path: str | PathLike[str], logged: LoggedEnv, runner: Any) -> Recorder:
    """Open a log for a collector's runner."""
    return Recorder(path, logged, runner)
