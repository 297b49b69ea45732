"""Transforms of the set of entries: other names, fewer entries."""

from collections.abc import Sequence

from tensordict import TensorDictBase

from flatroll.buffers.transforms.transform import Transform, check_batch
from flatroll.layout.checks import check_flags
from flatroll.layout.keys import DONE, REWARD, TERMINATED, TRUNCATED, NestedKey, plain_key, without_next


class RenameTransform(Transform):
    """Renames entries: ``in_keys`` to ``out_keys`` in samples, ``out_keys_inv`` to ``in_keys_inv`` in what is stored.

    An entry may be a nested tensordict, which keeps what is in it.

    Args:
        in_keys: entries to rename.
        out_keys: their new names.
        in_keys_inv: names in the buffer of entries that are renamed when they are stored, default none.
        out_keys_inv: their names in the batch given to ``extend``, default ``in_keys_inv``.
        create_copy: keep the entries under their old names, too; the new ones own their memory.

    Raises:
        ValueError: not as many names as entries, a name that is an entry to rename as well, or one given twice.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> td = TensorDict({"some": {"key": torch.ones(2)}}, [2])
    >>> sorted(RenameTransform([("some", "key")], ["renamed"])(td).keys(True, True))
    ['renamed']
    """

    def __init__(
        self,
        in_keys: NestedKey | Sequence[NestedKey],
        out_keys: NestedKey | Sequence[NestedKey],
        in_keys_inv: NestedKey | Sequence[NestedKey] | None = None,
        out_keys_inv: NestedKey | Sequence[NestedKey] | None = None,
        create_copy: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        check_flags(create_copy=create_copy)
        self.create_copy = create_copy
        for suffix, olds, news in (
            ("", self.in_keys, self.out_keys),
            ("_inv", self.in_keys_inv, self.out_keys_inv),
        ):
            if len(olds) != len(news):
                raise ValueError(
                    f"in_keys{suffix}={olds} and out_keys{suffix}={news} must be of equal length"
                )
            if len(set(olds)) != len(olds) or len(set(news)) != len(news):
                raise ValueError(f"a key occurs twice in in_keys{suffix}={olds} or out_keys{suffix}={news}")
            if not suffix and set(olds) & set(news):
                raise ValueError(
                    f"{sorted(set(olds) & set(news), key=repr)} is both an old and a new name, so the order "
                    "is ambiguous: use two transforms one after the other"
                )

    def forward(self, td: TensorDictBase, /) -> TensorDictBase:
        """Rename the ``in_keys`` of ``td`` in place, and return ``td``.

        Raises:
            KeyError: an entry is missing.
            ValueError: there is an entry of the new name, which would be lost. Nothing is renamed then.
        """
        return self._rename(td, self.in_keys, self.out_keys)

    def inv(self, td: TensorDictBase, /) -> TensorDictBase:
        """Return a shallow copy of ``td`` with the ``out_keys_inv`` renamed; errors as for :meth:`forward`."""
        if not self.in_keys_inv:
            return td
        return self._rename(check_batch(self, td).clone(recurse=False), self.out_keys_inv, self.in_keys_inv)

    def _rename(
        self, td: TensorDictBase, olds: Sequence[NestedKey], news: Sequence[NestedKey]
    ) -> TensorDictBase:
        values = [self._entry(td, old) for old in olds]
        pairs = [(old, new, value) for old, new, value in zip(olds, news, values, strict=True) if old != new]

        for _, new, _ in pairs:
            if td.get(new, None) is not None:
                raise ValueError(
                    f"{type(self).__name__} cannot write {new!r}, as the batch already has this entry: remove it "
                    f"first, with ExcludeTransform({new!r})"
                )

        for old, new, value in pairs:
            if self.create_copy:
                td.set(new, value.clone())
            else:
                td.rename_key_(old, new)

        return td


class SelectTransform(Transform):
    """Keeps the named entries of samples, and drops the others.

    Missing names are ignored. Trajectories are separated by entries such as ``"is_init"``: select everything that
    later transforms, estimators and modules read.

    Args:
        *selected_keys: entries to keep; a nested tensordict keeps all that is in it.
        keep_rewards: keep ``"reward"``, too, at the root and under ``"next"``.
        keep_dones: keep ``"done"``, ``"terminated"`` and ``"truncated"``, too, at the root and under ``"next"``.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> td = TensorDict({"x": torch.ones(2), "y": torch.ones(2), "next": {"reward": torch.ones(2, 1)}}, [2])
    >>> sorted(SelectTransform("x")(td).keys(True, True), key=str)
    [('next', 'reward'), 'x']
    """

    def __init__(self, *selected_keys: NestedKey, keep_rewards: bool = True, keep_dones: bool = True) -> None:
        super().__init__()
        self.selected_keys = _check_keys("selected_keys", selected_keys)
        self.keep_rewards = keep_rewards
        self.keep_dones = keep_dones

    def __repr__(self) -> str:
        return f"SelectTransform({', '.join(map(repr, self.selected_keys))})"

    def forward(self, td: TensorDictBase, /) -> TensorDictBase:
        """Return a tensordict with the named entries of ``td``."""
        flags: list[NestedKey] = []
        if self.keep_rewards:
            flags.append(REWARD)
        if self.keep_dones:
            flags += [DONE, TERMINATED, TRUNCATED]
        flags += [without_next(key) for key in flags]
        return check_batch(self, td).select(*self.selected_keys, *flags, strict=False)


class ExcludeTransform(Transform):
    """Drops the named entries of samples, or, with ``inverse=True``, of what is stored.

    Names that are not there are ignored.

    Args:
        *excluded_keys: entries to drop; a nested tensordict goes with all that is in it.
        inverse: drop them on the way into the buffer, and leave samples as they are.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> td = TensorDict({"x": torch.ones(2), "y": torch.ones(2), "info": {"z": torch.ones(2)}}, [2])
    >>> list(ExcludeTransform("y", ("info", "z"))(td).keys(True, True))
    ['x']
    """

    def __init__(self, *excluded_keys: NestedKey, inverse: bool = False) -> None:
        super().__init__()
        self.excluded_keys = _check_keys("excluded_keys", excluded_keys)
        self.inverse = inverse

    def __repr__(self) -> str:
        inverse = ", inverse=True" if self.inverse else ""
        return f"ExcludeTransform({', '.join(map(repr, self.excluded_keys))}{inverse})"

    def forward(self, td: TensorDictBase, /) -> TensorDictBase:
        """Return ``td`` without the named entries; with ``inverse``, ``td`` itself."""
        if self.inverse:
            return td
        return check_batch(self, td).exclude(*self.excluded_keys)

    def inv(self, td: TensorDictBase, /) -> TensorDictBase:
        """Return ``td`` itself; with ``inverse``, without the named entries."""
        if self.inverse:
            return check_batch(self, td).exclude(*self.excluded_keys)
        return td


def _check_keys(name: str, keys: Sequence[NestedKey]) -> list[NestedKey]:
    """Return keys given one by one as a list; TypeError if one is not a key."""
    for key in keys:
        if not isinstance(key, str) and not (
            isinstance(key, tuple) and key and all(isinstance(part, str) for part in key)
        ):
            raise TypeError(f"{name} must be strings or tuples of strings, passed one by one, got {key!r}")
    return [plain_key(key) for key in keys]
