"""The columns of a log's batches: which there are, how they are packed, and which an env does not have."""

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
from tensordict import TensorDict

from flatroll.datasets.replay_log.actions import MOST_NUMBERS, ActionCode, range_of
from flatroll.datasets.replay_log.digests import Words, digest_batch
from flatroll.disk.state_tree import DamagedState, from_text, pack, to_text, unpack
from flatroll.disk.tensor_file import DTYPES, DamagedFileError
from flatroll.layout.boundaries import run_ends
from flatroll.layout.keys import DONE, NestedKey, as_tuple, next_key, plain_key
from flatroll.layout.spaces import find_part
from flatroll.rollouts.batch_columns import spec_of_columns
from flatroll.rollouts.env_facts import EnvFacts

_TREE = "tree"  # name of the description among packed tensors


class ColumnForm(NamedTuple):
    """The form of a column of the batches.

    Args:
        key: of the column.
        dtype: of the column.
        shape: of one row.
    """

    key: NestedKey
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The columns of a log's batches.

    Attributes:
        made: the columns that the env makes.
        outputs: the columns that the policy wrote, which are stored.
        actions: the codes of the parts of the action.
        digested: keys of the columns whose bytes are in the digests.
        obs: keys of the observations with next ones, which are in the digests.
        counts: keys of step counters.
        init: key of ``is_init``.
        traj: key of the trajectory ids.
    """

    made: tuple[ColumnForm, ...]
    outputs: tuple[ColumnForm, ...]
    actions: tuple[ActionCode, ...]
    digested: tuple[NestedKey, ...]
    obs: tuple[NestedKey, ...]
    counts: tuple[NestedKey, ...]
    init: NestedKey
    traj: NestedKey

    @property
    def marks(self) -> dict[str, NestedKey]:
        """Arguments of the boundary rule."""
        return {"is_init_key": self.init, "traj_key": self.traj}

    def digest(self, batch: TensorDict, final: TensorDict | None = None) -> Words:
        """Return the digests of a batch's rows."""
        return digest_batch(batch, final, self.digested, self.obs, self.marks)

    def row_bytes(self) -> int:
        """Return the bytes of a row's columns."""
        return sum(form.dtype.itemsize * prod(form.shape) for form in (*self.made, *self.outputs))

    def to_tree(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "made": [(form.key, form.dtype, list(form.shape)) for form in self.made],
            "outputs": [(form.key, form.dtype, list(form.shape)) for form in self.outputs],
            "actions": [code.to_json() for code in self.actions],
            "digested": list(self.digested),
            "obs": list(self.obs),
            "counts": list(self.counts),
            "init": self.init,
            "traj": self.traj,
        }

    @classmethod
    def from_tree(cls, tree: Any) -> "Layout":
        """Invert `to_tree`; DamagedFileError for anything else."""
        try:
            layout = cls(
                made=_forms(tree["made"]),
                outputs=_forms(tree["outputs"]),
                actions=tuple(ActionCode.from_json(code) for code in tree["actions"]),
                digested=_keys(tree["digested"]),
                obs=_keys(tree["obs"]),
                counts=_keys(tree["counts"]),
                init=_keys([tree["init"]])[0],
                traj=_keys([tree["traj"]])[0],
            )
            layout._check()
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFileError(f"its columns cannot be read: {str(error)[:200]}") from None
        return layout

    def _check(self) -> None:
        """Raise ValueError unless each column that the env makes is in the digests, or follows from those that are."""
        made = [form.key for form in self.made]
        others = [form.key for form in self.outputs] + [code.key for code in self.actions]
        if len({*made, *others}) != len(made) + len(others):
            raise ValueError("a column stands there twice")

        implied: set[NestedKey] = {DONE, *map(next_key, self.obs), *map(next_key, self.counts)}
        digested = set(self.digested)
        if digested | implied != set(made) or not {*self.obs, *self.counts, self.init, self.traj} <= digested:
            raise ValueError("the columns of the env are not those of the digests")


def _keys(values: Any) -> tuple[NestedKey, ...]:
    keys = []
    for value in values:
        if not as_tuple(value) or not all(isinstance(part, str) for part in as_tuple(value)):
            raise ValueError(f"{value!r} is no key")
        keys.append(plain_key(as_tuple(value)))
    return tuple(keys)


def _forms(values: Any) -> tuple[ColumnForm, ...]:
    forms = []
    for key, dtype, shape in values:
        is_shape = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
        if dtype not in DTYPES.values() or not is_shape or prod(shape) > MOST_NUMBERS:
            raise ValueError(f"{key!r} is {dtype} {shape}")
        forms.append(ColumnForm(_keys([key])[0], dtype, tuple(shape)))
    return tuple(forms)


def pack_bytes(tree: Any) -> bytes:
    """Return a tree of plain values and tensors as bytes, without pickle."""
    description, tensors = pack(tree)
    text = torch.frombuffer(bytearray(to_text(description).encode()), dtype=torch.uint8)
    packed: bytes = safetensors.torch.save({**tensors, _TREE: text})
    return packed


def unpack_bytes(data: bytes, most: int) -> Any:
    """Invert `pack_bytes`; DamagedFileError for anything else, or for more than ``most`` bytes."""
    try:
        tensors = safetensors.torch.load(data)
        text = tensors.pop(_TREE)
        return unpack(from_text(text.numpy().tobytes()), tensors, max_bytes=most)
    except (safetensors.SafetensorError, DamagedState, ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(f"stored columns cannot be read: {str(error)[:200]}") from None


def first_bits(digests: Words) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the 8 bits of each digest that a log stores for each row."""
    return (digests >> np.uint64(56)).astype(np.uint8)


def pack_kept(layout: Layout, batch: TensorDict, final: TensorDict | None) -> bytes:
    """Pack the columns that the env made: each observation once."""
    implied = {next_key(key) for key in (*layout.obs, *layout.counts)}
    made = [form.key for form in layout.made if form.key not in implied]
    columns = [(key, batch.get(key).cpu()) for key in made]

    if final is None:
        rows = run_ends(batch, **layout.marks).nonzero().squeeze(-1)
        lasts = [(key, batch.get(next_key(key)).index_select(0, rows).cpu()) for key in layout.obs]
    else:
        rows = final.get("row")
        lasts = [(key, final.get(next_key(key)).cpu()) for key in layout.obs]
    return pack_bytes({"columns": columns, "final": lasts, "final_rows": rows.cpu()})


def differing_columns(layout: Layout, facts: EnvFacts) -> list[str]:
    """Describe the observations and actions of an env that are missing or of another form in a log, or the reverse.

    Dtypes are not compared: they may be cast, and checksums show what differs.
    """
    return [*_observations(layout, facts), *_actions(layout, facts)]


def _observations(layout: Layout, facts: EnvFacts) -> list[str]:
    spec = spec_of_columns(facts.keys, facts.env)
    forms = {form.key: form.shape for form in layout.made}
    problems = [f"it has no observation {key!r}" for key in layout.obs if key not in spec.keys(True, True)]

    for key in facts.keys.obs:
        shape = tuple(spec[key].shape[1:])
        if key not in forms:
            problems.append(f"its observation {key!r} is not in the log")
        elif shape != forms[key]:
            problems.append(f"its observation {key!r} has shape {list(shape)}, in the log {list(forms[key])}")
    return problems


def _actions(layout: Layout, facts: EnvFacts) -> list[str]:
    codes = {code.key: code for code in layout.actions}
    keys = facts.keys
    if set(codes) != set(keys.actions):
        return [f"its actions are {list(keys.actions)}, in the log {list(codes)}"]

    problems = []
    for key, path in zip(keys.actions, keys.action_paths, strict=True):
        part = find_part(facts.env.single_action_space, path)
        code = codes[key]
        fits = (code.low, code.bits) == range_of(part)
        if part.shape is not None:
            fits = fits and prod(part.shape) == prod(code.shape)
        if not fits:
            problems.append(f"its {key!r} is of {part}, in the log {_text_of(code)}")
    return problems


def _text_of(code: ActionCode) -> str:
    """Describe the actions that a code holds."""
    text = f"{str(code.dtype).removeprefix('torch.')} {list(code.shape)}"
    if code.bits:
        text += f", integers of {code.bits} bits from {code.low} on"
    return text
