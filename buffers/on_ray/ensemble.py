"""`RayReplayBufferEnsemble`: replay buffers on several nodes of a Ray cluster that are sampled as one."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.ensemble import collate_members, set_ids
from flatroll.buffers.on_ray.buffer import RayReplayBuffer, Weight
from flatroll.layout.checks import check_choice, check_whole_number
from flatroll.layout.inspect.text import Facts
from flatroll.layout.keys import ID_BITS, TRAJ_IDS
from flatroll.layout.transfers import upload
from flatroll.sharing.worker import WorkerDied

_LOG = logging.getLogger("flatroll.buffers")
PRIORITY_WEIGHT = "priority_weight"


class RayReplayBufferEnsemble(Facts):
    """Samples from `RayReplayBuffer` shards on several nodes as from one buffer; rows stay where they are.

    Each drawn row comes from a shard with a probability proportional to the shard's rows or, if its sampler has
    priorities, to the sum of its ``(priority + eps) ** alpha``. So a sample is distributed as one of a single buffer
    with all rows, importance weights included. All shards are asked at once, and only the drawn rows travel. A
    shard's weight is the one it reported with its last answer.

    Trajectories stay whole: a trajectory id decides its shard, and windows that a `RayCollector` leaves in the
    object store go to the shard of their actor.

    Args:
        shards: one buffer per node, all with the same sampler; ``remote_config`` of each selects its node.
        batch_size: rows per sample.
        prefetch: number of samples requested ahead. Default None: none.
        on_loss: what happens when the actor or node of a shard dies. ``"raise"``: `WorkerDied`. ``"drop"`` (default):
            its rows are lost, a warning is logged, and the others continue; new rows of its trajectories go to the next
            shard. When the last one dies, `WorkerDied` is raised in both cases.
        generator: CPU random generator that chooses shards. Default None: torch's.

    Raises:
        TypeError: a shard is not a `RayReplayBuffer`.
        ValueError: ``prefetch`` without ``batch_size``; a shard whose sampler has only ``num_slices``.

    >>> from functools import partial
    >>> from flatroll.buffers import LazyTensorStorage
    >>> nodes = [{"resources": {"node a": 1}}, {"resources": {"node b": 1}}]
    >>> rb = RayReplayBufferEnsemble(  # doctest: +SKIP
    ...     *(RayReplayBuffer(storage=partial(LazyTensorStorage, 10**6), remote_config=node) for node in nodes),
    ...     batch_size=256,
    ... )
    """

    def __init__(
        self,
        *shards: RayReplayBuffer,
        batch_size: int | None = None,
        prefetch: int | None = None,
        on_loss: Literal["raise", "drop"] = "drop",
        generator: torch.Generator | None = None,
    ) -> None:
        if not shards or not all(isinstance(shard, RayReplayBuffer) for shard in shards):
            got = ", ".join(type(shard).__name__ for shard in shards) or "none"
            raise TypeError(f"shards must be RayReplayBuffers, at least one, got {got}")

        if prefetch:
            check_whole_number("prefetch", prefetch)
            if batch_size is None:
                raise ValueError("prefetch needs a batch_size: samples are drawn ahead")
        check_choice("on_loss", on_loss, ("raise", "drop"))

        self.shards = shards
        self.batch_size = batch_size
        self.prefetch = prefetch
        self.on_loss = on_loss
        self.generator = generator

        self._lost: set[int] = set()
        self._turn = 0  # shard of the next batch without trajectory ids
        self._weights: dict[int, Weight] = {}  # of each shard, as last reported
        self._under_way: deque[_Asked] = deque()

    @property
    def lost(self) -> tuple[int, ...]:
        """The numbers of the shards that were lost."""
        return tuple(sorted(self._lost))

    # -- calls -------------------------------------------------------------------------------------------------

    def _live(self) -> list[int]:
        return [number for number in range(len(self.shards)) if number not in self._lost]

    def _home(self, number: int) -> int:
        """Return the shard, or the next one that is there: if one is lost, only its trajectories move."""
        number %= len(self.shards)
        while number in self._lost:
            number = (number + 1) % len(self.shards)
        return number

    def _settle(self, shard: int, wait: Callable[[], Any]) -> tuple[Any] | None:
        """Return a shard's answer in a tuple; None if it is lost."""
        try:
            return (wait(),)
        except WorkerDied as error:
            if self.on_loss == "raise" or len(self._live()) == 1:
                raise
            if shard not in self._lost:
                self._lost.add(shard)
                self._weights.pop(shard, None)
                _LOG.warning(
                    "shard %d is lost with its rows, %d are left: %s", shard, len(self._live()), error
                )
            return None

    def _ask(self, method: str, *arguments: Any) -> dict[int, Any]:
        """Call a method of all shards at once; return the answers by shard."""
        references = {shard: self.shards[shard].begin(method, *arguments) for shard in self._live()}
        answers = {}
        for shard, found in references.items():
            answer = self._settle(shard, partial(self.shards[shard].result, found))
            if answer is not None:
                answers[shard] = answer[0]
        return answers

    # -- writing -----------------------------------------------------------------------------------------------

    def extend(self, data: Any, final: TensorDictBase | None = None) -> int:
        """Store rows, each trajectory on its shard; return their number.

        Without ``("collector", "traj_ids")`` each batch goes to one shard, in turn.
        """
        ids = None
        if isinstance(data, TensorDictBase):
            ids = data.get(TRAJ_IDS, None)
        if ids is None:
            self._turn += 1
            homes = torch.full((len(data),), self._turn - 1)
        else:  # consecutive trajectories of a writer go to different shards
            ids = ids.reshape(-1)
            homes = (ids >> ID_BITS) + (ids & ((1 << ID_BITS) - 1))
        homes = homes.cpu() % len(self.shards)

        left = torch.ones(len(homes), dtype=torch.bool)
        while left.any():  # again for the rows of shards that are lost meanwhile
            moved = torch.tensor([self._home(number) for number in range(len(self.shards))])[homes]
            masks = {shard: left & (moved == shard) for shard in set(moved[left].tolist())}

            references = {}
            for shard, mask in masks.items():
                rows = _part(data, final, mask)
                references[shard] = self.shards[shard].begin("extend", *rows)

            for shard, found in references.items():
                if self._settle(shard, partial(self.shards[shard].result, found)):
                    left &= ~masks[shard]

        return len(homes)

    def extend_reference(self, rows: Any, place: int = 0) -> int:
        """Store packed rows from the object store, as `RayReplayBuffer.extend_reference` does.

        ``place``, the index of the actor that made them, decides the shard.
        """
        while True:
            home = self._home(place)
            stored = self._settle(home, partial(self.shards[home].extend_reference, rows))
            if stored is not None:
                return int(stored[0])

    def update_priority(
        self, index: Tensor, priority: Tensor | float, *, buffer_ids: Tensor, generation: Tensor | None = None
    ) -> None:
        """Set the priorities of rows on their shards, as `ReplayBufferEnsemble.update_priority` does.

        Rows of lost shards are left out.
        """
        priorities = torch.as_tensor(priority)
        references = {}
        for shard in self._live():
            mask = buffer_ids == shard
            if not mask.any():
                continue

            own = None if generation is None else generation[mask]
            of_rows = priorities[mask] if priorities.ndim else priorities
            references[shard] = self.shards[shard].begin("update_priority", index[mask], of_rows, own)

        for shard, found in references.items():
            self._settle(shard, partial(self.shards[shard].result, found))

    def empty(self) -> None:
        """Remove all rows and drop pending samples."""
        self._ask("empty")
        self._under_way.clear()
        self._weights.clear()

    # -- reading -----------------------------------------------------------------------------------------------

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Draw ``batch_size`` rows from all shards, concatenated.

        ``("collector", "buffer_ids")`` is each row's shard. With ``return_info`` the result is ``(sample, info)``, as
        of `ReplayBufferEnsemble.sample`.

        Raises:
            RuntimeError: no shard has rows.
            ValueError: the batch size is missing, or no multiple of the samplers' ``slice_len``.
            WorkerDied: a shard was lost, see ``on_loss``.
        """
        if batch_size is None:
            batch_size = self.batch_size
        if batch_size is None:
            raise ValueError("batch_size must be given to RayReplayBufferEnsemble(...) or to sample(...)")
        check_whole_number("batch_size", batch_size)

        if self.prefetch and batch_size == self.batch_size:
            while len(self._under_way) <= self.prefetch:
                self._under_way.append(self._begin(batch_size))
            asked = self._under_way.popleft()
        else:
            asked = self._begin(batch_size)

        parts: list[_Drawn] = []
        while missing := self._finish(asked, parts):
            asked = self._begin(missing)
        sample, info = self._join(parts)

        if return_info:
            return sample, info
        return sample

    def _begin(self, size: int) -> "_Asked":
        """Ask each shard for its part of a sample, and those without a part for their weights."""
        if self._weights.keys() != {*self._live()} or not any(each.total for each in self._weights.values()):
            self._weights = {shard: Weight(*weight) for shard, weight in self._ask("weight").items()}

        shards = list(self._weights)
        totals = torch.tensor([self._weights[shard].total for shard in shards], dtype=torch.float64)
        if not totals.any():
            raise RuntimeError("cannot sample: no shard has rows, extend the ensemble first")

        unit = self._weights[shards[0]].unit
        if size % unit:
            raise ValueError(f"batch_size must be a multiple of slice_len={unit}, got {size}")

        drawn = torch.multinomial(totals, size // unit, replacement=True, generator=self.generator)
        counts = (drawn.bincount(minlength=len(shards)) * unit).tolist()

        asked = []
        for shard, rows in zip(shards, counts, strict=True):
            if rows:
                found = self.shards[shard].begin("draw", rows)
            else:
                found = self.shards[shard].begin("weight")
            asked.append((shard, rows, found))
        return asked

    def _finish(self, asked: "_Asked", parts: "list[_Drawn]") -> int:
        """Wait for the parts of a sample; return the number of rows that lost shards leave to draw."""
        missing = 0
        for shard, rows, found in asked:
            answer = self._settle(shard, partial(self.shards[shard].result, found))
            if answer is None:
                missing += rows
            elif rows:
                sample, info, weight = answer[0]
                self._weights[shard] = Weight(*weight)
                parts.append(_Drawn(shard, sample, info, self._weights[shard]))
            else:
                self._weights[shard] = Weight(*answer[0])
        return missing

    def _join(self, parts: "list[_Drawn]") -> tuple[Any, dict[str, Tensor]]:
        """Concatenate the parts; importance weights become those of one buffer with all rows."""
        # A shard's weights are (P / min P) ** -beta, with the minimum over its own rows.
        weights = [weight for weight in self._weights.values() if weight.total]
        weights += [part.weight for part in parts]
        least = min(weight.least for weight in weights)
        for part in parts:
            if PRIORITY_WEIGHT in part.info:
                factor = (part.weight.least / least) ** -part.weight.beta
                part.info[PRIORITY_WEIGHT] = part.info[PRIORITY_WEIGHT] * factor
                if isinstance(part.sample, TensorDictBase) and PRIORITY_WEIGHT in part.sample:
                    part.sample[PRIORITY_WEIGHT] = part.sample[PRIORITY_WEIGHT] * factor

        members = [part.shard for part in parts]
        sample = collate_members([part.sample for part in parts], members, stack=False)

        infos = [part.info for part in parts]
        entries = [key for key in infos[0] if all(key in info for info in infos)]
        info = {key: collate_members([each[key] for each in infos], members, stack=False) for key in entries}

        counts = torch.tensor([len(each["index"]) for each in infos])
        info["buffer_ids"] = torch.tensor(members).repeat_interleave(counts)
        if isinstance(sample, TensorDictBase):
            set_ids(sample, info["buffer_ids"])

        return sample, info

    def __iter__(self) -> Iterator[Any]:
        """Iterate over samples forever."""
        while True:
            yield self.sample()

    def __len__(self) -> int:
        return sum(self._ask("__len__").values())

    def stats(self) -> dict[str, Any]:
        """Return the shards' statistics summed, and the numbers of live (``buffers``) and ``lost`` shards."""
        each = list(self._ask("stats").values())
        keys = dict.fromkeys(key for numbers in each for key in numbers if key != "bytes_per_row")
        total = {key: sum(numbers.get(key, 0) for numbers in each) for key in keys}
        return {"buffers": len(each), "lost": len(self._lost)} | total

    # -- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the shards' states, copied to this process one after the other; None for lost ones."""
        states = []
        for shard in range(len(self.shards)):
            state = None
            if shard not in self._lost:
                answer = self._settle(shard, self.shards[shard].state_dict)
                if answer is not None:
                    state = answer[0]
            states.append(state)
        return {"shards": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the shards' states, except those of lost shards. Pending samples are dropped."""
        if len(state["shards"]) != len(self.shards):
            raise ValueError(f"the state has {len(state['shards'])} shards, not {len(self.shards)}")

        for shard, saved in enumerate(state["shards"]):
            if saved is not None and shard not in self._lost:
                self._settle(shard, partial(self.shards[shard].load_state_dict, saved))

        self._under_way.clear()
        self._weights.clear()

    def shutdown(self) -> None:
        """Stop the shards' actors, which drop their rows; a second call does nothing."""
        self._under_way.clear()
        for shard in self.shards:
            shard.shutdown()

    def __enter__(self) -> "RayReplayBufferEnsemble":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_under_way": deque()}

    def _facts(self) -> dict[str, Any]:
        """What `repr` and notebooks show."""
        return {"shards": len(self.shards), "lost": len(self._lost), "prefetch": self.prefetch or 0}


#: Shard, rows and reference of each part of a sample under way; without rows the shard's weight is asked for.
_Asked = list[tuple[int, int, Any]]


class _Drawn(NamedTuple):
    """A shard's part of a sample, and the shard's weight."""

    shard: int
    sample: Any
    info: dict[str, Tensor]
    weight: Weight


def _part(data: Any, final: TensorDictBase | None, mask: Tensor) -> tuple[Any, ...]:
    """Return the rows of a batch in ``mask``, and those of its *final* that belong to them."""
    if mask.all():
        if final is None:
            return (data,)
        return data, final

    at = mask
    if isinstance(data, TensorDictBase) and data.device:
        at = upload(mask, data.device)
    rows = data[at]

    if final is None:
        return (rows,)

    of_rows = mask[final["row"].cpu()]
    own: Any = final[of_rows].clone()
    own.set("row", (mask.cumsum(0) - 1)[own.get("row").cpu()])
    return rows, own
