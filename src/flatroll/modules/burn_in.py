"""Burn-in of samples: recomputes recurrent states from the first rows of each slice."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from flatroll.layout.boundaries import run_ends, run_starts
from flatroll.layout.checks import check_key_names, check_keys, check_whole_number
from flatroll.layout.keys import (
    DONE,
    HAS_STATE,
    IS_INIT,
    MASK,
    NestedKey,
    is_hidden,
    marker,
    next_key,
    require,
    without_next,
)
from flatroll.modules.mode import set_recurrent_mode
from flatroll.modules.primer import TensorDictPrimer


class BurnIn:
    """Buffer transform: recomputes recurrent states with the first rows of each slice, then drops those rows.

    Use it with a sampler that draws slices. The first ``burn_in`` rows of each slice (all but the last row of a
    shorter one) are passed through the modules in recurrent mode without gradients and removed from the sample. The
    first remaining row gets the resulting state, instead of the stored one, and ``is_init``: modules then continue as
    if they had run over the whole slice, with truncated gradients. If an episode begins at that row, its stored state
    is kept.

    Burn-in rows start from their stored states, or from the initial states of episodes (zeros) if the sample has
    none.

    Args:
        modules: a tensordict module or several, run in this order; what they read besides states must be in the
            sample. Pass the modules being trained, so that the states are up to date.
        burn_in: rows to burn in, at least 0; 0 leaves samples unchanged.
        out_keys: root keys of the states, default those that the modules' ``make_tensordict_primer()`` name.
        init_key: the marker set, default ``"is_init"``.
        done_key: bool entry that ends an episode, default ``("next", "done")``, used if it is there; of samples of
            ``MultiStepTransform`` it is ``("next", "original_done")``, for the modules too.

    Raises:
        TypeError: a module is not a tensordict module.
        ValueError: ``burn_in`` below 0, or the modules have no state.

    Reference: Kapturowski et al. 2019, Recurrent experience replay in distributed reinforcement learning.

    >>> from tensordict import TensorDict
    >>> from flatroll.modules import GRUModule
    >>> gru = GRUModule(2, 3, in_key="observation", out_key="features")
    >>> slices = TensorDict({"observation": torch.zeros(10, 2), "is_init": torch.arange(10)[:, None] % 5 == 0}, [10])
    >>> sample = BurnIn(gru, burn_in=2).forward(slices)
    >>> sample["is_init"].flatten().tolist(), sample["recurrent_state"].shape
    ([True, False, False, True, False, False], torch.Size([6, 1, 3]))
    """

    wants_ends = True

    def __init__(
        self,
        modules: TensorDictModuleBase | Sequence[TensorDictModuleBase],
        burn_in: int,
        out_keys: Sequence[NestedKey] | None = None,
        *,
        init_key: NestedKey = IS_INIT,
        done_key: NestedKey = DONE,
    ) -> None:
        if isinstance(modules, Sequence):
            self.modules = list(modules)
        else:
            self.modules = [modules]

        for module in self.modules:
            if not isinstance(module, TensorDictModuleBase):
                raise TypeError(f"modules must be tensordict modules, got {type(module).__name__}")

        self.burn_in = check_whole_number("burn_in", burn_in, 0)
        check_keys(init_key=init_key, done_key=done_key)

        if out_keys is None:
            written = list(self._initial_states())
        else:
            written = check_key_names("out_keys", out_keys)
        self.out_keys = [without_next(key) for key in written]
        if not self.out_keys:
            raise ValueError(
                "the modules have no recurrent state: no part of them has make_tensordict_primer(). Pass a GRUModule "
                "or LSTMModule, or name the states with out_keys"
            )

        caches = list(filter(is_hidden, self.out_keys))
        if caches:
            raise ValueError(
                f"out_keys must be states that a row can hold, got {caches}, the cache of a TransformerModule: leave "
                "BurnIn out, and pass burn_in= to the loss, which keeps the first rows of each slice as context"
            )

        self.init_key = init_key
        self.done_key = done_key

    def forward(self, td: TensorDictBase, ends: Tensor | None = None) -> TensorDictBase:
        """Return the remaining rows as copies; ``td`` stays unchanged.

        Args:
            td: flat batch ``[N]`` of slices.
            ends: bool ``[N]``, True at the last row of each slice; passed by a buffer. Default: the run ends.

        Raises:
            KeyError: an input of a module is missing.
            ValueError: ``td`` is not flat, or has padding.
        """
        if td.batch_dims != 1:
            raise ValueError(f"BurnIn needs a flat batch [N] of slices, got {list(td.batch_size)}")
        if td.get(MASK, None) is not None and not bool(marker(td, MASK).all()):
            raise ValueError("BurnIn needs slices without padding: SliceSampler(pad_output=False)")
        if not self.burn_in or not len(td):
            return td

        marked = td.clone(recurse=False)
        self._fill_absent_states(marked)
        parts = self._divide(marked, ends)
        rest = cast(TensorDictBase, marked[parts.rest])
        if not len(parts.head):
            return rest

        after = cast(TensorDictBase, marked[parts.head])
        device = next((p.device for module in self.modules for p in module.parameters()), None)
        if device is not None:
            after = after.to(device)

        with torch.no_grad(), set_recurrent_mode("recurrent"):
            for module in self.modules:
                after = module(after)

        for key in self.out_keys:
            state = require(rest, key)
            final = require(after, next_key(key)).index_select(0, parts.final.to(after.device))
            rest.set(key, state.index_copy(0, parts.entry, final.to(state.device, state.dtype)))

        if (flags := rest.get(HAS_STATE, None)) is not None:
            rest.set(HAS_STATE, flags.index_fill(0, parts.entry.to(flags.device), True))
        return rest

    __call__ = forward

    def _fill_absent_states(self, rows: TensorDictBase) -> None:
        """Give rows that store no states those that episodes start from."""
        absent = [key for key in self.out_keys if rows.get(key, None) is None]
        if not absent:
            return

        for key, first in self._initial_states().items():
            if key in absent:
                rows.set(key, first.to(rows.device).expand(len(rows), *first.shape))

    def _divide(self, marked: TensorDictBase, ends: Tensor | None) -> "_Parts":
        """The rows to burn in and those that stay; marks the first rows of both in ``marked``."""
        if ends is None:
            ends = run_ends(marked, is_init_key=self.init_key, done_key=self.done_key)

        stored = marked.get(self.init_key, None)
        if stored is None:
            init = torch.zeros_like(ends)
        else:
            init = marker(marked, self.init_key).clone()
        ends = ends.to(init.device, copy=True)
        ends[-1] = True

        # last row, length and first row of each slice, and the number of rows to burn in
        lasts = ends.nonzero().squeeze(1)
        lengths = lasts.diff(prepend=lasts.new_tensor([-1]))
        firsts = lasts - lengths + 1
        burnt = (lengths - 1).clamp(max=self.burn_in)
        entry = (firsts + burnt)[burnt > 0]  # the first remaining row of each shortened slice
        init[firsts] = True
        shown = init.unsqueeze(1) if stored is None else init.view(stored.shape)
        marked.set(self.init_key, shown)

        # If the other markers say that an episode begins there, the stored state is right.
        fresh = run_starts(marked, is_init_key=self.init_key, done_key=self.done_key).to(init.device)[entry]
        init[entry] = True  # writes into `marked`, which shares the memory

        at = torch.arange(len(init), device=init.device)
        head = at < (firsts + burnt).repeat_interleave(lengths)
        rest = (~head).nonzero().squeeze(1)
        # the burnt rows of all slices are concatenated: each slice's last one is at the running sum of their counts
        final = burnt[burnt > 0].cumsum(0) - 1
        return _Parts(head.nonzero().squeeze(1), rest, final[~fresh], torch.searchsorted(rest, entry[~fresh]))

    def _initial_states(self) -> dict[NestedKey, Tensor]:
        """The states that the modules' parts declare, with the value that episodes start from."""
        states: dict[NestedKey, Tensor] = {}
        for part in (part for module in self.modules for part in module.modules()):
            make: Any = getattr(part, "make_tensordict_primer", None)
            if make is not None and isinstance(primer := make(), TensorDictPrimer):
                states |= primer.defaults
        return states


class _Parts(NamedTuple):
    """A sample cut in two, by row numbers, int64."""

    head: Tensor  # rows to burn in
    rest: Tensor  # rows that stay
    final: Tensor  # for each slice that needs the state, its last row among the rows to burn in
    entry: Tensor  # the remaining rows that take over these states
