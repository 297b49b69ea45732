"""Play an environment and check that it keeps the contract of `as_vector_env`.

>>> from flatroll.wrappers.testing import Script, ScriptedVectorEnv
>>> check_vector_env(ScriptedVectorEnv(Script(2, lengths=[[3, 4], [5]])))
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from flatroll.layout.checks import check_function, check_seed, check_whole_number
from flatroll.layout.keys import ACTION_MASK
from flatroll.layout.spaces import observation_leaves
from flatroll.specs import as_spec
from flatroll.wrappers.adapt_env import adapt_env, find_stream
from flatroll.wrappers.arrays import Array, Tree, map_tree
from flatroll.wrappers.source import EnvLike
from flatroll.wrappers.testing.script import row

_SUSPICION = "suspicion: "
_STEP_DTYPES = (("reward", np.float32), ("terminated", np.bool_), ("truncated", np.bool_))
#: Entries of ``info`` in which envs report that a row's episode has ended.
_SAYS_DONE = ("done", "_final_obs", "_final_observation", "_final_info", "_episode")
#: Check at most this many numbers of an observation (images are large).
_FEATURES = 64
#: A step is a jump if it is this many times as long as the median step.
_JUMP = 4.0


class ContractError(AssertionError):
    """Raised if an environment breaks the contract of `as_vector_env`; the message lists how."""


def check_vector_env(
    env: EnvLike, *, steps: int = 200, seed: int = 0, actions: Callable[[int], Any] | None = None
) -> None:
    """Play an environment and raise `ContractError` if it breaks the contract; for env authors' tests.

    Suspicious behaviour that is not provably wrong (an observation jumps back to a first one without an ended
    episode, all episodes terminate at the same length) is reported as a warning.

    Args:
        env, steps, seed, actions: as for :func:`vector_env_problems`.

    Raises:
        ContractError: the contract is broken; every problem is listed.

    >>> from flatroll.wrappers.testing import Script, ScriptedTorchEnv
    >>> check_vector_env(ScriptedTorchEnv(Script(3)))
    """
    problems = vector_env_problems(env, steps=steps, seed=seed, actions=actions)
    if not all(map(is_suspicion, problems)):
        raise ContractError("the env breaks the contract:\n" + "\n".join(f"- {text}" for text in problems))

    for text in problems:
        warnings.warn(text, UserWarning, stacklevel=2)


def is_suspicion(problem: str) -> bool:
    """Return whether a problem from `vector_env_problems` is only a suspicion."""
    return problem.startswith(_SUSPICION)


def vector_env_problems(
    env: EnvLike, *, steps: int = 200, seed: int = 0, actions: Callable[[int], Any] | None = None
) -> list[str]:
    """Play an environment and return a list of its problems, one sentence each.

    The env is adapted by `flatroll.wrappers.as_vector_env` and played twice from the same seed. The checks cover
    spaces; shapes, dtypes and ownership of returned arrays; the rows after an ended episode; final observations;
    infos and legal-action masks; reproducibility; masked resets; and the refusal of a wrong number of actions. Random
    actions obey an ``action_mask`` of the observation or info that has one number for each option. The env is not
    closed.

    Args:
        env: anything `flatroll.wrappers.as_vector_env` accepts, on a device whose values can be read.
        steps: vector steps to play, default 200; choose enough for several episodes to end.
        seed: seed of the env and of the random actions, default 0.
        actions: function from the step number to a batched action; None draws random actions.

    Returns:
        One text per problem, empty if there is none. Texts that begin with ``"suspicion: "`` are not proven.

    >>> from flatroll.wrappers.testing import Script, ScriptedVectorEnv
    >>> vector_env_problems(ScriptedVectorEnv(Script(2), autoreset_mode=None))[0][:57]
    'as_vector_env refuses the env: autoreset_mode is needed: '
    """
    check_whole_number("steps", steps)
    seed = check_seed("seed", seed)
    if actions is not None:
        check_function("actions", actions, "a function of the step")

    try:
        vector = adapt_env(env)
    except (TypeError, ValueError) as error:
        return [f"as_vector_env refuses the env: {error}"]

    problems = [*_check_spaces(vector), *_check_names(vector)]
    if problems:
        return problems

    stream = find_stream(vector)
    seedable = stream is not None and stream.capabilities.seedable
    try:
        record, again = (play(vector, steps, seed, actions, seedable) for _ in range(2))
    except Exception as error:  # an env under test may raise anything; report it
        return [f"reset or step raised {type(error).__name__}: {error}"]

    problems += _check_returns(vector, record)
    problems += _check_ownership(record)
    if not problems:  # the checks below rely on the shapes
        problems += _check_rows_after_the_end(record)
        problems += _check_final_observations(record)
        problems += _check_infos(vector, record)
        problems += _check_masks(vector.single_action_space, record)
        problems += _check_reproduction(record, again)
        problems += _check_masked_reset(vector)
        problems += (f"{_SUSPICION}{text}" for text in _suspicions(record))

    problems += _check_action_count(vector)
    return problems


@dataclass
class Record:
    """NumPy copies of what an env returned: one entry per step, and the first observation."""

    mode: AutoresetMode
    seeded: bool  # whether reset(seed=...) has an effect
    starts: list[npt.NDArray[np.bool_]] = field(default_factory=list)  # the stream's `first`, as obs
    obs: list[Tree] = field(default_factory=list)  # obs[k + 1] came back from step k
    reward: list[npt.NDArray[Any]] = field(default_factory=list)
    terminated: list[npt.NDArray[Any]] = field(default_factory=list)
    truncated: list[npt.NDArray[Any]] = field(default_factory=list)
    final: list[Tree | None] = field(default_factory=list)  # info["final_obs"]
    # Not copied; first_info came back from the reset.
    first_info: dict[str, Any] = field(default_factory=dict)
    infos: list[dict[str, Any]] = field(default_factory=list)
    # (Name, returned object, copy made at once.)
    returned: list[tuple[str, Tree, Tree]] = field(default_factory=list)

    def ended(self) -> npt.NDArray[np.bool_]:
        """Return bool ``[steps, E]``, True where an episode ended (terminated or truncated)."""
        ended: npt.NDArray[np.bool_] = np.stack(self.terminated) | np.stack(self.truncated)
        return ended

    def first(self) -> npt.NDArray[np.bool_]:
        """Return where ``obs[k]`` is the first of an episode, or of an absent agent: bool ``[steps + 1, E]``."""
        return np.stack(self.starts)

    def keep(self, name: str, tree: Tree) -> Tree:
        """Store the returned object and return a NumPy copy of it."""
        copy = map_tree(copied, tree)
        self.returned.append((name, tree, copy))
        return copy


def play(
    env: VectorEnv[Any, Any, Any], steps: int, seed: int, actions: Callable[[int], Any] | None, seedable: bool
) -> Record:
    """Reset an adapted env with ``seed``, make ``steps`` vector steps and record everything."""
    # A warning at reset(seed=...) says that the seed has no effect.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        obs, info = env.reset(seed=seed)

    stream = find_stream(env)
    assert stream is not None
    env.action_space.seed(seed)
    random = np.random.default_rng(seed)
    record = Record(AutoresetMode(env.metadata["autoreset_mode"]), seeded=seedable and not caught)
    record.first_info = info
    record.obs.append(record.keep("obs", obs))
    record.starts.append(copied(stream.first))

    for k in range(steps):
        if actions is None:
            action = obey_masks(env.single_action_space, env.action_space.sample(), obs, info, random)
        else:
            action = actions(k)
        obs, reward, terminated, truncated, info = env.step(action)
        record.obs.append(record.keep("obs", obs))
        record.starts.append(copied(stream.first))
        for name, flag in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
            getattr(record, name).append(record.keep(name, flag))

        final = None
        if record.mode == AutoresetMode.SAME_STEP:
            final = info.get("final_obs")
        if final is not None:
            final = record.keep("info['final_obs']", final)
        record.final.append(final)
        record.infos.append(info)
    return record


def copied(leaf: Array) -> npt.NDArray[Any]:
    """Return a NumPy copy of an array or tensor."""
    if isinstance(leaf, Tensor):
        leaf = leaf.detach().cpu().numpy()
    return np.array(leaf)


def same(one: Tree, other: Tree) -> bool:
    """Return whether two trees are equal (NaN equals NaN)."""
    equal: list[bool] = []
    map_tree(lambda a, b: equal.append(bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))), one, other)
    return all(equal)


def _check_spaces(env: VectorEnv[Any, Any, Any]) -> Iterator[str]:
    for name in ("observation", "action"):
        batched = getattr(env, f"{name}_space")
        if batched != batch_space(getattr(env, f"single_{name}_space"), env.num_envs):
            yield f"{name}_space is not single_{name}_space batched {env.num_envs} times, it is {batched}"

    mode = env.metadata.get("autoreset_mode")
    if mode not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
        yield f"metadata['autoreset_mode'] must be NEXT_STEP or SAME_STEP after as_vector_env, it is {mode!r}"


def _check_names(env: VectorEnv[Any, Any, Any]) -> Iterator[str]:
    """Check that the entries of the observation can be columns of a batch."""
    try:
        observation_leaves(env.single_observation_space)
    except ValueError as error:
        yield f"observation_space cannot be stored: {error}"


def _check_returns(env: VectorEnv[Any, Any, Any], record: Record) -> Iterator[str]:
    """Check shapes, dtypes and bounds; report each fault once, with its first step."""
    seen: set[str] = set()
    shape = (env.num_envs,)
    where = "from reset"
    for k, obs in enumerate(record.obs, -1):  # obs after step k; -1 is the reset
        faults = list(_check_tree(env.observation_space, obs, "obs"))
        if k >= 0:
            where = f"after step {k}"
            for name, dtype in _STEP_DTYPES:
                array = getattr(record, name)[k]
                if array.shape != shape or array.dtype != dtype:
                    faults.append(
                        f"{name} must be {np.dtype(dtype)} {shape}, it is {array.dtype} {array.shape}"
                    )
            if record.final[k] is not None:
                ended = record.terminated[k] | record.truncated[k]
                faults += _check_tree(env.observation_space, record.final[k], "info['final_obs']", ended)

        yield from (f"{text} (first seen {where})" for text in faults if text not in seen)
        seen.update(faults)


def _check_tree(
    space: spaces.Space[Any], tree: Tree, name: str, rows: npt.NDArray[np.bool_] | None = None
) -> Iterator[str]:
    """Check a batched observation; values are checked in ``rows`` only."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        items = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        parts: dict[Any, spaces.Space[Any]] = dict(items)
        entries: list[Any] = []
        if isinstance(tree, tuple):
            entries = list(range(len(tree)))
        elif isinstance(tree, dict):
            entries = list(tree)
        if set(entries) != set(parts):
            kind = type(tree).__name__
            yield f"{name} must have the entries {list(parts)} as its space says, it is {kind} {entries}"
            return

        for key, part in parts.items():
            yield from _check_tree(part, tree[key], f"{name}[{key!r}]", rows)
    elif tree.shape != space.shape or tree.dtype != space.dtype:
        yield f"{name} must be {space.dtype} {space.shape} as its space says, it is {tree.dtype} {tree.shape}"
    else:
        spec = as_spec(space)
        if rows is not None:  # the other rows do not matter
            tree = np.where(rows.reshape(-1, *(1,) * (tree.ndim - 1)), tree, spec.zero().numpy())
        if tree.dtype.kind == "f" and np.isnan(tree).any():
            yield (
                f"{name} has NaN: end the episode in the step in which the simulation fails, or replace the values in "
                "a wrapper (torch.nan_to_num)"
            )
        elif not spec.is_in(torch.from_numpy(tree)):
            yield f"{name} has values outside its space {space}"


def _check_ownership(record: Record) -> Iterator[str]:
    # Each returned array was copied at once: compare it with the copy.
    changed = Counter(
        name for name, array, copy in record.returned if not same(map_tree(copied, array), copy)
    )
    for name, times in changed.items():
        yield f"{name} changed after it was returned ({times} times): the env writes into the same memory"


def _check_rows_after_the_end(record: Record) -> Iterator[str]:
    """Check that under NEXT_STEP the step after an episode's end only resets the row: no reward, no end."""
    if record.mode != AutoresetMode.NEXT_STEP:
        return

    ended = record.ended()
    for name, column in (("pays a reward", record.reward), ("ends an episode", list(ended))):
        # bool [steps - 1, E]: the row ended in step k, but step k + 1 has a reward or an end
        bad = ended[:-1] & (np.stack(column)[1:] != 0)
        if bad.any():
            k, i = np.argwhere(bad)[0]
            yield (
                f"step {k + 1} {name} in row {i}, whose episode had ended in step {k}: under NEXT_STEP that "
                f"step only resets the row ({int(bad.sum())} times)"
            )


def _check_final_observations(record: Record) -> Iterator[str]:
    ended = record.ended()
    # Where no episode ends, they are not read.
    shown = np.array([final is not None for final in record.final])[ended.any(1)]
    if not shown.any():
        return
    if not shown.all():
        yield (
            f"info['final_obs'] is in {shown.sum()} of the {len(shown)} steps that ended episodes: it must be in all "
            "of them or in none"
        )
        return

    rows = np.argwhere(ended)  # (step, row) of every ended episode; obs[step + 1] came back from that step
    # Observations that never change, or have no numbers, show nothing.
    changes = any(not same(row(record.obs[k], i), row(record.obs[k + 1], i)) for k, i in rows)
    equal = all(same(row(record.final[k], i), row(record.obs[k + 1], i)) for k, i in rows)
    if len(rows) > 2 and equal and changes:
        yield (
            f"info['final_obs'] equals the returned observation in all {len(rows)} ended rows: it is the "
            "first one of the next episode, and the last one of the ended episode is lost"
        )


def _check_infos(env: VectorEnv[Any, Any, Any], record: Record) -> Iterator[str]:
    """Check that per-env entries of ``info`` keep their shape, and Gymnasium's own entries their form.

    Their dtype may change: Gymnasium's vector envs use that of the first env that returns a value.
    """
    first: dict[str, tuple[tuple[int, ...], int]] = {}
    seen: set[str] = set()
    for k, info in enumerate(record.infos):
        for key, value in info.items():
            if not isinstance(value, np.ndarray | Tensor) or value.dtype == object:
                continue
            shape = tuple(value.shape)
            known, step = first.setdefault(key, (shape, k))
            if shape != known:
                yield f"info[{key!r}] has shape {known} in step {step} and {shape} in step {k}"
                first[key] = shape, k

        faults = [text for text in _info_faults(env.num_envs, info) if text not in seen]
        yield from (f"{text} (first seen after step {k})" for text in faults)
        seen.update(faults)


def _info_faults(num_envs: int, info: dict[Any, Any]) -> Iterator[str]:
    """Check one step's ``final_info``, and the flags ``_name`` of the envs that returned an entry ``name``."""
    final = info.get("final_info")
    if final is not None and not isinstance(final, dict):
        yield (
            f"info['final_info'] must be a dict with an array for each entry, it is {type(final).__name__}: the "
            "entries of last steps are lost"
        )

    for key, flags in info.items():
        if not isinstance(key, str) or not key.startswith("_") or key[1:] not in info:
            continue

        is_array = isinstance(flags, np.ndarray | Tensor)
        is_bool = is_array and str(flags.dtype).endswith("bool")
        if not is_bool or tuple(flags.shape) != (num_envs,):
            came = type(flags).__name__
            if is_array:
                came = f"{flags.dtype} {tuple(flags.shape)}"
            yield (
                f"info[{key!r}] must be bool {(num_envs,)}, one flag for each env that has info[{key[1:]!r}], it is "
                f"{came}"
            )


def _option_counts(space: spaces.Space[Any]) -> list[int]:
    """Return the number of options of each choice of an action space; empty if it is not made of choices."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return [int(n) for n in space.nvec.reshape(-1)]
    if isinstance(space, spaces.MultiBinary):
        return [2] * int(np.prod(space.shape))
    return []


def _find_mask(obs: Tree, info: dict[str, Any]) -> tuple[str, npt.NDArray[Any]] | None:
    """Return the name and a copy of the legal-action mask ``[E, k]``; None if there is none of one dim per env.

    Rows of envs that returned no mask allow all actions.
    """
    name = "info"
    mask = info.get(ACTION_MASK)
    told = info.get(f"_{ACTION_MASK}")
    if isinstance(obs, dict) and ACTION_MASK in obs:
        name = "obs"
        mask = obs[ACTION_MASK]
        told = None
    if not isinstance(mask, np.ndarray | Tensor) or mask.ndim != 2 or mask.dtype == object:
        return None

    mask = copied(mask)
    if told is not None:
        mask[~copied(told)] = 1
    return f"{name}[{ACTION_MASK!r}]", mask


def obey_masks(
    space: spaces.Space[Any], action: Tree, obs: Tree, info: dict[str, Any], random: np.random.Generator
) -> Tree:
    """Return a batched action with each choice among those that a mask of all options allows, if there is one."""
    counts = _option_counts(space)
    found = _find_mask(obs, info)
    if not counts or found is None or found[1].shape[1] != sum(counts):
        return action

    # The allowed option with the highest random number; any option where none is allowed.
    numbers = random.random(found[1].shape) + (found[1] != 0)
    parts = np.split(numbers, np.cumsum(counts)[:-1], axis=1)
    chosen = np.stack([part.argmax(1) for part in parts], 1).reshape(action.shape)
    start = 0 if isinstance(space, spaces.MultiBinary) else space.start  # type: ignore[attr-defined]
    return (chosen + start).astype(action.dtype)


def _check_masks(space: spaces.Space[Any], record: Record) -> Iterator[str]:
    """Check that legal-action masks have one number for each option, and allow one in rows whose episode continues."""
    counts = _option_counts(space)
    if not counts:
        return

    ended = np.zeros_like(record.ended()[0])
    where = "from reset"
    for k, (obs, info) in enumerate(zip(record.obs, (record.first_info, *record.infos), strict=True), -1):
        if k >= 0:
            where = f"after step {k}"
            if record.mode == AutoresetMode.NEXT_STEP:
                ended = record.terminated[k] | record.truncated[k]  # here obs is the last one of the episode

        found = _find_mask(obs, info)
        if found is None:
            continue
        name, mask = found

        if mask.shape[1] != sum(counts):
            yield (
                f"{name} must have {sum(counts)} numbers for each env, one for each option of {space}, it has "
                f"{mask.shape[1]} (first seen {where})"
            )
            return

        parts = np.split(mask != 0, np.cumsum(counts)[:-1], axis=1)
        hopeless = ~np.stack([part.any(1) for part in parts], 1).all(1) & ~ended
        if hopeless.any():
            row = int(np.flatnonzero(hopeless)[0])
            yield f"{name} allows no option in row {row}, whose episode continues (first seen {where})"
            return


def _check_reproduction(record: Record, again: Record) -> Iterator[str]:
    if not record.seeded:
        return

    for name in ("obs", "reward", "terminated", "truncated"):
        pairs = zip(getattr(record, name), getattr(again, name), strict=True)
        different = [k for k, (one, other) in enumerate(pairs) if not same(one, other)]
        if different:
            yield f"two runs from one seed with the same actions differ in {name} (first at {different[0]})"
            return


def _check_masked_reset(env: VectorEnv[Any, Any, Any]) -> Iterator[str]:
    stream = find_stream(env)
    if env.num_envs < 2 or stream is None or not stream.capabilities.partial_reset:
        return

    agents = stream.source.agents  # the agents of a game are reset together
    if agents is None:
        mask = np.arange(env.num_envs) == 0
    else:
        mask = agents[1] == 0
    if mask.all():
        return

    options = {"reset_mask": mask}
    given = mask.copy()
    obs, info = env.reset()
    random = np.random.default_rng(0)
    action = obey_masks(env.single_action_space, env.action_space.sample(), obs, info, random)
    before = map_tree(copied, env.step(action)[0])
    after = map_tree(copied, env.reset(options=options)[0])

    if list(options) != ["reset_mask"] or not np.array_equal(mask, given):
        yield "reset changed the options it was given"
    if not same(map_tree(lambda leaf: leaf[~given], before), map_tree(lambda leaf: leaf[~given], after)):
        yield "reset(options={'reset_mask': ...}) changed the observations of rows outside the mask"


def _check_action_count(env: VectorEnv[Any, Any, Any]) -> Iterator[str]:
    env.reset()
    try:
        env.step(batch_space(env.single_action_space, env.num_envs + 1).sample())
    except Exception:  # any exception is fine: the alternative is a silent step or an abort in C++
        return
    yield f"step accepted {env.num_envs + 1} actions for {env.num_envs} envs without an exception"


def _suspicions(record: Record) -> Iterator[str]:
    """Return suspicions that the env hides or mislabels the ends of its episodes, with reasons."""
    if not record.ended().any():
        yield f"no episode ended in {len(record.reward)} steps, so no end was checked: take more steps"

    infinite: list[bool] = []
    for obs in record.obs:
        map_tree(lambda leaf: infinite.append(leaf.dtype.kind == "f" and bool(np.isinf(leaf).any())), obs)
    if any(infinite):
        yield "an observation has infinite values, which no network can read: clip them in a wrapper (torch.nan_to_num)"
    else:
        yield from _silent_resets(record)
    yield from _unflagged_ends(record)
    yield from _one_length(record)


def _silent_resets(record: Record) -> Iterator[str]:
    """Find ordinary steps that jump from far outside into the bounding box of all first observations."""
    obs = np.stack([_features(tree) for tree in record.obs])
    first = record.first()
    ended = record.ended()
    starts = obs[first]
    # bool [steps + 1, E]: inside the bounding box of all first observations; step lengths [steps, E]
    inside = ((obs >= starts.min(0)) & (obs <= starts.max(0))).all(-1)
    length = np.linalg.norm(np.diff(obs, axis=0), axis=-1)

    ordinary = ~ended & ~first[1:]
    if not ordinary.any():
        return

    # Compare with the median of ordinary steps, so that the env's scale does not matter.
    far = length > _JUMP * np.median(length[ordinary])
    jump = ordinary & inside[1:] & ~inside[:-1] & far
    if jump.any():
        k, i = np.argwhere(jump)[0]
        yield (
            f"the observation of row {i} jumps back to a first one in step {k}, which is neither terminated "
            f"nor truncated there ({int(jump.sum())} such jumps): does the env reset without saying so?"
        )


def _features(tree: Tree) -> npt.NDArray[np.float64]:
    """Return about `_FEATURES` numbers of each row, evenly spaced over its leaves: ``[E, F]``."""
    leaves: list[npt.NDArray[Any]] = []
    map_tree(lambda leaf: leaves.append(leaf.reshape(len(leaf), -1)), tree)

    # Every stride-th number of each leaf, rounded up, so that all leaves together give about _FEATURES.
    stride = max(1, -(-max(leaf.shape[1] for leaf in leaves) * len(leaves) // _FEATURES))
    return np.concatenate([leaf[:, ::stride].astype(np.float64) for leaf in leaves], 1)


def _unflagged_ends(record: Record) -> Iterator[str]:
    for k, (info, ended) in enumerate(zip(record.infos, record.ended(), strict=True)):
        for key in _SAYS_DONE:
            if key not in info:
                continue
            said = copied(info[key])  # [E] in all known dialects
            if said.shape == ended.shape and (said.astype(bool) & ~ended).any():
                yield (
                    f"info[{key!r}] is set in a row of step {k} that is neither terminated nor truncated: "
                    "an end without a reason"
                )
                return


def _one_length(record: Record) -> Iterator[str]:
    elapsed = np.zeros(record.ended().shape[1], np.int64)  # steps made so far in each row's episode
    lengths: list[int] = []
    starts = record.first()[:-1]
    for first, terminated, truncated in zip(starts, record.terminated, record.truncated, strict=True):
        if truncated.any():
            return
        elapsed = np.where(first, 0, elapsed) + 1  # int64 [E]
        lengths += elapsed[terminated].tolist()

    if len(lengths) >= 5 and len(set(lengths)) == 1 and lengths[0] > 1:
        yield (
            f"all {len(lengths)} episodes terminated after {lengths[0]} steps, none was truncated: "
            "is a time limit reported as terminated?"
        )
