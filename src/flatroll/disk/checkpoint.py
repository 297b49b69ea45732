"""`Checkpoint`: one version of a whole run, with its buffer, collector, modules, optimizers and random generators."""

import copy
import os
import random
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from flatroll.disk.folder import Folder, LoadedVersion
from flatroll.disk.manifest import Version
from flatroll.disk.state_tree import DamagedState, Packer, damaged, unpack
from flatroll.layout.checks import check_flags, check_path, check_whole_number

#: Values saved together with a buffer: plain values by name.
Others: TypeAlias = Mapping[str, Any]
#: Applies a version that was read and checked.
Apply: TypeAlias = Callable[[], None]

_FACTOR = 2000  # limits of compressed tables: bytes per row
_LEAST = 2**28  # and total bytes


class SaveOptions(NamedTuple):
    """Options of a save: sync to disk, number of versions to keep, whether to overwrite a used folder."""

    sync: bool = True
    keep: int = 2
    overwrite: bool = False


@runtime_checkable
class Saves(Protocol):
    """The interface of a buffer for `Checkpoint` and ensembles: it saves itself and other values to a folder."""

    def save_version(self, path: Path, others: Others, options: SaveOptions) -> Version:
        """Publish a version of this buffer and ``others`` in the folder ``path``; return its number and line."""
        ...

    def load_version(self, path: Path, number: int | None, strict: bool) -> tuple[Others, Apply]:
        """Read and check a version; return the values saved with it, and a function that loads the rest."""
        ...

    def reopen(self) -> None:
        """After a load, let new rows continue the trajectories that were open when it was saved."""
        ...

    def saved_versions(self, path: Path) -> list[int]:
        """Return the numbers of the versions in a folder, the newest first."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """Anything with a state of plain values: a module, optimizer, scheduler or collector."""

    def state_dict(self) -> Any:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Restore it."""
        ...


@runtime_checkable
class Restarts(Protocol):
    """A collector that can go on as one does that has loaded its state."""

    @property
    def seeded(self) -> bool:
        """Whether it seeds its env."""
        ...

    @property
    def snapshot_problem(self) -> str | None:
        """Why it cannot save its open episodes; None if it can."""
        ...

    def state_dict(self, *, episodes: bool = False) -> dict[str, Any]:
        """Return its state, with ``episodes`` also that of the open episodes, as the entry ``"episodes"``."""
        ...

    def restart(self) -> None:
        """Begin new episodes, whose seeds follow from its state."""
        ...


class Checkpoint:
    """Saves the state of a whole run to a folder, in versions, and loads the newest.

    Saves are atomic: if the process is killed, the folder still holds a complete version. Of the buffer only rows added
    since the last save are written. A part is any object with ``state_dict`` and ``load_state_dict`` whose state is
    plain data, see `state_tree.pack`. No pickle is written or read.

    What an optimizer trains must be in a part, too: pass the loss, which holds all networks and, for SAC, the
    temperature. The first `save` raises an error if a trained parameter is in none.

    A loaded run continues exactly, except for the env: its state is not saved, so a collector resets it, and open
    trajectories are cut. Save between batches. With ``exact=True`` the rows and weights of a run that is killed and
    loaded are those of one that never stopped: it goes on in the middle of its episodes, see
    `flatroll.wrappers.Snapshots`. If the env cannot save its state, the run that saves begins new episodes, too.

    Args:
        path: the folder; the first save creates it.
        buffer: a `ReplayBuffer` or `ReplayBufferEnsemble`.
        collector: a `Collector`.
        policy: a module.
        optimizer: a torch optimizer.
        rng: whether to save the global generators of torch (CPU and CUDA), NumPy and Python, default True.
        keep: number of versions kept in the folder, default 2.
        sync: flush to disk before `save` returns, safe from a power loss, default True.
        overwrite: start over in a folder with a version that was not loaded, default False.
        exact: also save the open episodes of each `Collector`. If its env cannot save its state, a warning says why,
            and ``restart()`` is called after each save. That cuts open trajectories, and needs a seed and an env
            whose episodes follow from the seed of their reset alone: not statistics that a wrapper gathers, and no
            generators of processes of their own. Default False.
        others: further parts by name, such as ``critic=critic`` or ``scheduler=scheduler``.

    Raises:
        TypeError: a part lacks ``state_dict`` or ``load_state_dict``, or a buffer is given under another name; with
            ``exact``, the collector is none that can restart, such as one of workers, whose rows depend on their speed.
        ValueError: with ``exact``, a collector has no seed and its env cannot save its state, or ``rng`` is False.

    >>> import tempfile
    >>> from torch import nn
    >>> policy, other = nn.Linear(2, 1), nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as path:
    ...     number = Checkpoint(path, policy=policy).save(step=3)
    ...     extra = Checkpoint(path, policy=other).load()
    >>> number, extra, torch.equal(policy.weight, other.weight)
    (1, {'step': 3}, True)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        buffer: Saves | None = None,
        collector: Stateful | None = None,
        policy: Stateful | None = None,
        optimizer: Stateful | None = None,
        rng: bool = True,
        keep: int = 2,
        sync: bool = True,
        overwrite: bool = False,
        exact: bool = False,
        **others: Stateful | None,
    ) -> None:
        self.path = check_path("path", path).absolute()  # absolute: the working directory may change
        check_flags(rng=rng, sync=sync, overwrite=overwrite, exact=exact)

        self._buffer = buffer
        self._rng = rng
        named = {"collector": collector, "policy": policy, "optimizer": optimizer, **others}
        self._parts = {name: part for name, part in named.items() if part is not None}
        self._options = SaveOptions(sync, check_whole_number("keep", keep), overwrite)

        self._folder: Folder | None = None  # saved to or loaded last
        self._left: list[str] = []  # what a partial load left in the folder
        self._complete = False  # whether the parts were found to hold what the optimizers train

        if buffer is not None and not isinstance(buffer, Saves):
            raise TypeError(
                f"buffer must be a ReplayBuffer or a ReplayBufferEnsemble, got {type(buffer).__name__}"
            )

        for name, part in self._parts.items():
            if isinstance(part, Saves):
                raise TypeError(
                    f"{name} is a buffer: pass it as buffer=, and several as one ReplayBufferEnsemble"
                )
            if not isinstance(part, Stateful):
                raise TypeError(f"{name} has no state_dict and load_state_dict: {type(part).__name__}")

        self._exact: dict[str, Restarts] = {}
        if exact:
            self._exact = _find_collectors(self._parts, rng)

    def versions(self) -> list[int]:
        """Return the numbers of the versions in the folder, the newest first; empty if there is none to load."""
        if self._buffer is not None:
            return self._buffer.saved_versions(self.path)
        if self.path.is_dir():
            return Folder(self.path).versions()
        return []

    def save(self, **extra: Any) -> int:
        """Publish a version; return its number.

        Args:
            extra: further values, such as the number of steps, which `load` returns: None, bools, numbers, strings,
                bytes, NumPy arrays, tensors, tensordicts, and dicts, lists and tuples of them.

        Raises:
            TypeError: a part's state or ``extra`` has a value of another type; the message names it.
            FileExistsError: the folder has a version that was neither loaded nor saved by this object, or of which
                ``load(partial=True)`` left parts out.
            ValueError: an optimizer trains a parameter that no part holds; at the first save.
            OSError: the disk is full or failed; the previous versions are intact.
        """
        if self._left:
            raise FileExistsError(
                f"the version in {self.path} has {self._left}, which load(partial=True) left out and a save would "
                "lose: save to another folder, with a new Checkpoint"
            )

        parts = {name: self._state_of(name, part) for name, part in self._parts.items()}
        if not self._complete:
            _check_trained(self._parts, parts)
            self._complete = True

        generators = _generators() if self._rng else None
        others = {"parts": parts, "rng": generators, "extra": extra}
        number = self._publish(others)
        for name, collector in self._exact.items():
            if parts[name].get("episodes") is None:
                collector.restart()
        return number

    def _state_of(self, name: str, part: Stateful) -> Any:
        """Return the state of a part, with the open episodes of a collector that shall go on in them."""
        collector = self._exact.get(name)
        if collector is not None and collector.snapshot_problem is None:
            return collector.state_dict(episodes=True)
        return part.state_dict()

    def _publish(self, others: Others) -> int:
        """Write a version with these values and the buffer's new rows; return its number."""
        if self._buffer is not None:
            return self._buffer.save_version(self.path, others, self._options).number

        packer = Packer()
        packer.add("buffer", None)
        packer.add("others", others)
        with Folder(
            self.path, write=True, log=False, resume=self._folder, **self._options._asdict()
        ) as folder:
            self._folder = folder
            facts = {"kind": "run", "parts": sorted(self._parts)}
            return folder.publish(packer.tree, packer.tensors, extra=facts).number

    def load(
        self, *, version: int | None = None, strict: bool = False, partial: bool = False
    ) -> dict[str, Any]:
        """Load a version into the parts; return the values passed to `save`.

        All of it is read and checked first. A part that refuses its state leaves all as it was.

        Args:
            version: number of a version that is kept, default the newest.
            strict: raise if the newest version is damaged, instead of a warning and the one before it.
            partial: load the parts that this object has, such as the policy alone, and leave out the version's other
                parts, its buffer and the random generators. If parts were left out, `save` raises. Default False:
                the version must have the same parts.

        Raises:
            FileNotFoundError: there is no version.
            ValueError: damaged files, or a version of other parts.

        >>> import tempfile
        >>> from torch import nn
        >>> policy, other = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as path:
        ...     _ = Checkpoint(path, policy=policy, critic=nn.Linear(2, 1)).save(step=3)
        ...     Checkpoint(path, policy=other).load(partial=True)
        {'step': 3}
        >>> torch.equal(policy.weight, other.weight)
        True
        """
        check_flags(strict=strict, partial=partial)
        apply: Apply | None = None
        left: list[str] = []

        if self._buffer is not None:
            others, apply = self._buffer.load_version(self.path, version, strict)
        else:
            if not self.path.is_dir():
                raise FileNotFoundError(f"there is no folder {self.path}: save makes it")

            def read(loaded: LoadedVersion) -> dict[str, Any]:
                rows = loaded.end - loaded.head if partial else 0
                return read_tree(loaded, rows)

            folder = Folder(self.path)
            tree = folder.load_with(read, version, strict=strict)
            if tree["buffer"] is not None:
                if not partial:
                    raise ValueError(
                        f"the version in {self.path} has a buffer: pass one like it as Checkpoint(buffer=...), or "
                        "leave it out with load(partial=True)"
                    )
                left = ["buffer"]
            others = tree["others"]
            self._folder = folder

        try:
            states = others["parts"]
            generators = others["rng"]
            extra = others["extra"]
        except KeyError:
            raise ValueError(f"{self.path} was saved by buffer.dumps: load it with buffer.loads") from None

        try:
            if not isinstance(extra, dict) or not isinstance(states, dict):
                raise damaged(
                    f"its extra values are a {type(extra).__name__} and its parts a {type(states).__name__}"
                )
            left += sorted(map(str, states.keys() - self._parts.keys()))
            self._check_parts(states, surplus=bool(left) and not partial)
            if generators is not None:
                _check_generators(generators)
        except ValueError as error:
            error.add_note(f"while {self.path} was read")
            raise

        # All of it is sound: load it.
        self._load_parts(states)
        if apply is not None:
            apply()
        if self._buffer is not None and any(_has_episodes(states[name]) for name in self._parts):
            self._buffer.reopen()
        if self._rng and not partial and generators is not None:
            _set_generators(generators)
        self._left = left
        return dict(extra)

    def _check_parts(self, states: dict[str, Any], *, surplus: bool) -> None:
        """Raise ValueError if a version lacks parts of this object, or has a ``surplus`` that it may not have."""
        lacks = self._parts.keys() - states.keys()
        if not lacks and not surplus:
            return

        named = str(sorted(map(str, states)))[:400]
        advice = "" if lacks else ", or leave the others out with load(partial=True)"
        raise ValueError(
            f"the version has the parts {named}, this Checkpoint has {sorted(self._parts)}: create it "
            f"with the same parts{advice}"
        )

    def _load_parts(self, states: dict[str, Any]) -> None:
        """Load all parts, or none."""
        before = {name: copy.deepcopy(part.state_dict()) for name, part in self._parts.items()}
        tried: list[str] = []

        try:
            for name, part in self._parts.items():
                tried.append(name)
                part.load_state_dict(states[name])
        except BaseException as error:
            error.add_note(f"while {tried[-1]} was loaded from {self.path}; nothing has changed")
            for name in tried:
                self._parts[name].load_state_dict(before[name])
            raise


def _find_collectors(parts: Mapping[str, Stateful], rng: bool) -> dict[str, Restarts]:
    """Return the collectors by name; TypeError or ValueError if a loaded run could not equal one that goes on."""
    collector = parts.get("collector")
    if not isinstance(collector, Restarts):
        raise TypeError(
            "exact=True needs collector=, a Collector that steps its env in this process, got "
            f"{type(collector).__name__}: leave exact out"
        )

    collectors: dict[str, Restarts] = {
        name: part for name, part in parts.items() if isinstance(part, Restarts)
    }
    if not rng:
        raise ValueError("exact=True needs the random generators: leave rng=False out")
    for name, part in collectors.items():
        problem = part.snapshot_problem
        if problem is None:
            continue
        if not part.seeded:
            raise ValueError(
                f"exact=True needs a seed of {name}, from which the episodes after a save follow: pass "
                "Collector(..., seed=...), with an env whose reset takes a seed (an envpool has its own), or an env "
                f"that can save its state ({problem})"
            )
        warnings.warn(f"exact=True: {name} begins new episodes at each save, since {problem}", stacklevel=3)
    return collectors


def _has_episodes(state: Any) -> bool:
    """Return whether the state of a part is that of a collector in the middle of its episodes."""
    return isinstance(state, dict) and isinstance(state.get("episodes"), dict)


def _check_trained(parts: Mapping[str, Stateful], states: Mapping[str, Any]) -> None:
    """Raise ValueError if an optimizer among ``parts`` trains a parameter that no other part holds."""
    optimizers = {}
    for name, part in parts.items():
        if groups := getattr(part, "param_groups", None):
            optimizers[name] = groups
    if not optimizers:
        return

    held: set[int] = set()  # ids of the parameters of modules
    shared: set[tuple[int, torch.Size]] = set()  # addresses of tensors in states that are no copies
    copied: list[Tensor] = []  # tensors in states of parts that are no modules, which may be copies
    for name, part in parts.items():
        if name in optimizers:
            continue
        tensors = [leaf for leaf in tree_leaves(states[name]) if isinstance(leaf, Tensor)]
        shared |= {(tensor.data_ptr(), tensor.shape) for tensor in tensors}
        if isinstance(part, nn.Module):
            held |= {id(parameter) for parameter in part.parameters()}
        else:
            copied += tensors

    def is_saved(parameter: Tensor) -> bool:
        if id(parameter) in held or (parameter.data_ptr(), parameter.shape) in shared:
            return True
        return any(
            tensor.shape == parameter.shape
            and tensor.dtype is parameter.dtype
            and torch.equal(tensor.to(parameter.device), parameter.detach())
            for tensor in copied
        )

    for name, groups in optimizers.items():
        trained = [parameter for group in groups for parameter in group["params"]]
        missing = [list(parameter.shape) for parameter in trained if not is_saved(parameter)]
        if missing:
            shapes = ", ".join(map(str, missing[:3]))
            if len(missing) > 3:
                shapes += ", ..."
            raise ValueError(
                f"{name} trains {len(trained)} parameters, of which {len(missing)} are in no part of this Checkpoint "
                f"(shapes {shapes}) and would be lost: pass the module that holds them all, such as "
                "Checkpoint(..., loss=loss)"
            )


def read_tree(version: LoadedVersion, rows: int) -> dict[str, Any]:
    """Return the state tree of a buffer's version of at most ``rows`` rows; ValueError if there is none."""
    if isinstance(version.json, dict) and "kind" in version.json:
        raise ValueError(
            f"the folder holds no run or buffer, but a {str(version.json['kind'])[:40]}: open it as such"
        )

    tree = unpack(version.json, version.tensors, max_bytes=_LEAST + _FACTOR * rows)
    if (
        not isinstance(tree, dict)
        or tree.keys() != {"buffer", "others"}
        or not isinstance(tree["others"], dict)
    ):
        raise damaged("it is not a version of a run or a buffer")

    return tree


def _generators() -> dict[str, Any]:
    """Return the states of the global random generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def _check_generators(states: Any) -> None:
    """Raise ValueError unless these are states of generators."""
    try:
        torch.Generator().set_state(states["torch"])
        np.random.RandomState().set_state(states["numpy"])
        random.Random().setstate(states["python"])
        if not all(isinstance(state, Tensor) for state in states["cuda"]):
            raise TypeError("the state of a CUDA generator is not a tensor")
    except DamagedState:
        raise
    except (ValueError, TypeError, LookupError, RuntimeError, OverflowError) as error:
        raise damaged(f"its random generators cannot be restored ({error})") from None


def _set_generators(states: dict[str, Any]) -> None:
    """Restore the global random generators; states of missing CUDA devices are skipped."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)
