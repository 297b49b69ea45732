"""Gen-DGRL, archives of pickled dicts of arrays: `read_gen_dgrl`, and `GenDGRLExperienceReplay`."""

import io
import pickle
import pickletools
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDict, TensorDictBase
from typing_extensions import override

from flatroll.datasets.experience_replay import BaseDatasetExperienceReplay
from flatroll.datasets.formats.episodes import count_on, damage_in, files_in, make_episode, naming
from flatroll.datasets.formats.npy import read_header
from flatroll.datasets.ids import unknown_id_error
from flatroll.layout.checks import check_path, check_whole_number
from flatroll.layout.export import Array

_NAMES = ("observations", "actions", "dones")
_LONGEST_NAME = 1 << 20
_MOST_STEPS = 4096  # maximum number of opcodes in a pickle; an array takes about 20
#: The opcodes of pickles of arrays, of any protocol. Those that create objects without `find_class`, or
#: allocate what a file only claims, are excluded: EXT*, INST, OBJ, NEWOBJ*, PERSID, BYTEARRAY8, out-of-band
#: buffers, sets.
_STEPS = re.compile(
    "PROTO|FRAME|STOP|MARK|MEMOIZE|((LONG_)?BIN)?(PUT|GET)|(STACK_)?GLOBAL|REDUCE|BUILD|(EMPTY_)?(TUPLE|DICT|LIST)"
    "|TUPLE[123]|SETITEMS?|APPENDS?|NONE|NEWTRUE|NEWFALSE|(BIN)?(INT|FLOAT)|BININT[12]|LONG[14]?"
    "|UNICODE|STRING|(SHORT_)?BIN(UNICODE|BYTES|STRING)|BIN(UNICODE|BYTES)8"
)
_PROCGEN = [
    "bigfish",
    "bossfight",
    "caveflyer",
    "chaser",
    "climber",
    "coinrun",
    "dodgeball",
    "fruitbot",
    "heist",
    "jumper",
    "leaper",
    "maze",
    "miner",
    "ninja",
    "plunder",
    "starpilot",
]
_PARTS = ("1M_E", "1M_S", "10M", "25M", "level_1_S", "level_40_S", "level_1_E", "level_40_E")


def read_gen_dgrl(path: str | Path, *, max_bytes: int = 1 << 30) -> Iterator[TensorDict]:
    """Yield the trajectories of a Gen-DGRL archive as flat batches ``[T]``.

    A trajectory has T + 1 observations, T actions, rewards (or none) and dones; a done is a termination, and one that
    has none is truncated. The archive is read as a stream, one member at a time.

    Args:
        path: of the ``.tar.xz`` (or ``.tar``, ``.tar.gz``) file.
        max_bytes: a member, and the arrays in it, may have no more. Default 1 GiB.

    Raises:
        ValueError: a member is larger, no such dict of arrays, or a link; a step before the last one is done, so that
            the member is not one trajectory; pictures are not bytes; the archive is damaged.
        pickle.UnpicklingError: a member holds anything but a dict of NumPy arrays; nothing of it is run.

    Source: Mediratta et al., The Generalization Gap in Offline Reinforcement Learning (2023).
    """
    number = 0
    check_whole_number("max_bytes", max_bytes)
    with damage_in(check_path("path", path)), tarfile.open(path, "r|*", tarinfo=_Member) as archive:
        for member in archive:
            if member.isdir():
                continue
            if not member.isreg():
                raise ValueError(
                    f"{path}: {member.name!r} is a link or a device, which may lead to other files"
                )
            if member.size > max_bytes:
                raise ValueError(
                    f"{path}: {member.name!r} has {member.size} bytes, more than max_bytes={max_bytes}"
                )

            file = archive.extractfile(member)
            assert file is not None
            name = f"{path}: {member.name}"
            yield _episode(load_arrays(file.read(), name, max_bytes), number, name)
            number += 1


class _Member(tarfile.TarInfo):
    """A member of an archive whose name is short, even if it is stored in a separate member."""

    def _proc_member(self, archive: Any) -> Any:
        named = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE)
        if self.type in (*named, tarfile.SOLARIS_XHDTYPE) and self.size > _LONGEST_NAME:
            raise ValueError(
                f"{archive.name}: claims a name of {self.size} bytes, at most {_LONGEST_NAME} are allowed"
            )
        return super()._proc_member(archive)  # type: ignore[misc]


def _episode(steps: dict[str, Array], number: int, name: str) -> TensorDict:
    if missing := [key for key in _NAMES if key not in steps]:
        raise ValueError(f"{name} has no {missing[0]!r}; it has {sorted(steps)}")

    done = np.asarray(steps["dones"]).reshape(-1).astype(bool)
    length = len(done)
    seen = np.asarray(steps["observations"])
    lengths = {key: len(np.atleast_1d(steps[key])) for key in (*_NAMES, "rewards") if key in steps}
    if not length or lengths != {key: length + (key == "observations") for key in lengths}:
        raise ValueError(f"{name} must have T + 1 observations for T other values, got lengths {lengths}")

    if (early := np.flatnonzero(done[:-1])).size:
        raise ValueError(
            f"{name} is done at step {early[0]} of {length}: the observation after it may be of another game, so it is "
            "not one trajectory"
        )

    pictures = seen.astype(np.uint8, copy=False)
    if not np.array_equal(pictures, seen):
        raise ValueError(f"{name} has observations of {seen.dtype} that are not bytes 0 ... 255")

    truncated = np.zeros(length, bool)
    truncated[-1] = not done[-1]
    others = {key: values for key, values in steps.items() if key not in (*_NAMES, "rewards")}
    others = {key: values for key, values in others.items() if values.ndim and len(values) == length}

    return make_episode(
        number,
        {"observation": pictures},
        {"action": steps["actions"], **others},
        steps.get("rewards"),
        done,
        truncated,
    )


def load_arrays(data: bytes, name: str, max_bytes: int) -> dict[str, Array]:
    """Return the dict of arrays that ``numpy.save`` has pickled into a ``.npy`` file.

    Args:
        data: the file.
        name: for errors.
        max_bytes: all arrays together may have no more.

    Raises:
        ValueError: the file is of another kind, or the arrays have more than ``max_bytes``.
        pickle.UnpicklingError: it contains anything but dicts, text, numbers and arrays of numbers.

    >>> file = io.BytesIO()
    >>> np.save(file, {"rewards": np.ones(2)}, allow_pickle=True)
    >>> load_arrays(file.getvalue(), "a", 1000)
    {'rewards': array([1., 1.])}
    """
    stream = io.BytesIO(data)
    with naming(name):
        shape, _, dtype = read_header(stream)
    if dtype.kind != "O" or shape != ():
        raise ValueError(f"{name} must hold one dict, got an array {shape} of {dtype}")

    try:
        _check_steps(stream, name)
        value = _ArraysOnly(stream, max_bytes).load()
        if isinstance(value, _Array) and value.shape == ():
            value = value.item()
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, EOFError, MemoryError) as error:
        raise pickle.UnpicklingError(f"{name} is not a pickle of arrays ({error})") from None

    arrays: dict[str, Array] = {}
    items = value.items() if isinstance(value, dict) else [("", None)]
    for key, array in items:
        if not isinstance(key, str) or not isinstance(array, np.ndarray) or array.dtype.kind not in "biufc":
            raise pickle.UnpicklingError(
                f"{name} must hold a dict of arrays of numbers, got {type(key)} of {type(array)}"
            )
        arrays[key] = array.view(np.ndarray)

    # An array may have several names; each becomes a column.
    if sum(array.nbytes for array in arrays.values()) > max_bytes:
        raise pickle.UnpicklingError(f"{name}: the arrays have more than max_bytes={max_bytes}")
    return arrays


def _check_steps(stream: io.BytesIO, name: str) -> None:
    """Scan a pickle without executing it; pickle.UnpicklingError if it contains more than arrays need.

    So few steps can neither nest tuples so deeply that their hash overflows the stack, nor name a place of the memo for
    which gigabytes would be allocated.
    """
    begin = stream.tell()
    for number, (step, argument, _) in enumerate(pickletools.genops(stream)):
        far = isinstance(argument, int) and "PUT" in step.name and argument > _MOST_STEPS
        if number == _MOST_STEPS or far or _STEPS.fullmatch(step.name) is None:
            raise pickle.UnpicklingError(
                f"{name}: opcode {step.name} at step {number} does not belong to a dict of arrays: nothing was "
                "executed"
            )
    stream.seek(begin)


class _Array(np.ndarray[Any, Any]):
    """An array whose bytes count, so that a small file cannot make many large arrays of one piece of its bytes."""

    def __new__(cls, budget: list[int]) -> "_Array":
        array = super().__new__(cls, (0,), np.uint8)
        array._budget = budget
        return array

    _budget: list[int]

    def __setstate__(self, state: Any) -> None:
        version, shape, kind, fortran, data = state
        if version != 1 or not isinstance(kind, _Kind) or not isinstance(data, bytes | list):
            raise pickle.UnpicklingError("this is not the state of a NumPy array")
        self._budget[0] -= len(data)
        if self._budget[0] < 0:
            raise pickle.UnpicklingError("the arrays have more than max_bytes")
        super().__setstate__((version, shape, kind.dtype, fortran, data))


class _Kind:
    """A dtype of numbers, or of objects, as a pickle names it. NumPy's own would believe any state that follows."""

    def __init__(self, kind: Any, *_: Any) -> None:
        if not isinstance(kind, str) or re.fullmatch("[biufc][0-9]{1,2}|O8?", kind) is None:
            raise pickle.UnpicklingError(f"the pickle has arrays of {kind!r}, expected numbers")
        self.dtype = np.dtype(kind)

    def __setstate__(self, state: Any) -> None:
        # Byte order, then fields that only structured dtypes have; item 0 is the version.
        order, *parts = state[1:5]
        if order not in ("<", ">", "|", "=") or any(part is not None for part in parts):
            raise pickle.UnpicklingError("this is not a dtype of numbers")
        self.dtype = self.dtype.newbyteorder(order)


class _ArraysOnly(pickle.Unpickler):
    """Unpickles NumPy arrays, dicts, lists, text and numbers; no other function can be called."""

    def __init__(self, stream: io.BytesIO, max_bytes: int) -> None:
        super().__init__(stream)
        self._budget = [max_bytes]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
        }:  # the shape given here is ignored, because the state repeats it
            return _Function(lambda *_: _Array(self._budget))
        if (module, name) == ("numpy", "ndarray"):
            # Only an argument of `_reconstruct`; the class itself would make object arrays from any bytes.
            return None
        if (module, name) == ("numpy", "dtype"):
            return _Function(_Kind)
        if (module, name) == ("_codecs", "encode"):  # bytes objects in pickles of protocols 0 to 2
            return _Function(_encode)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong to NumPy arrays: it was not executed")


class _Function:
    """A function that a pickle may call, and not change: BUILD would set the defaults of Python's own functions."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("the pickle has a function, expected arrays")


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if encoding != "latin1" or not isinstance(text, str):
        raise pickle.UnpicklingError(
            f"the pickle encodes text as {encoding!r}, expected the bytes of an array in 'latin1'"
        )
    return text.encode("latin1")


class GenDGRLExperienceReplay(BaseDatasetExperienceReplay):
    """A Gen-DGRL data set: Procgen games in an archive of pickled arrays (`read_gen_dgrl`); runs none of its code.

    Args:
        dataset_id: game and category, such as ``"bigfish-1M_E"``.
        batch_size, options: see `BaseDatasetExperienceReplay`; ``fetch`` gives the ``.tar.xz`` file.

    Raises:
        ValueError: no such set.
    """

    kind = "gen_dgrl"
    #: Names of all sets.
    available_datasets = tuple(f"{game}-{part}" for game in _PROCGEN for part in _PARTS)

    @override
    def _check_id(self) -> None:
        if self.dataset_id not in self.available_datasets:
            raise ValueError(
                f"dataset_id must be a game and a category, such as 'bigfish-1M_E', see available_datasets: "
                f"{unknown_id_error(type(self).__name__, self.dataset_id, self.available_datasets)}"
            )

    @override
    def _convert(self, source: Any) -> Iterator[TensorDictBase]:
        return count_on(map(read_gen_dgrl, files_in(source, (".xz", ".tar", ".gz"))))
