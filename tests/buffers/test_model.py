"""The buffer against a list: random writers, windows, capacities and dtypes, many wraps."""

from typing import Any

import pytest
import torch
from forms import examples
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler

EXAMPLES = examples(25, stateful_step_count=25, suppress_health_check=list(HealthCheck))


#: Which ids there are, and which markers are not: boundaries must come out alike.
DIALECTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "everything": ("unique", ()),
    "ids alone": ("unique", ("is_init", "step_count", ("next", "step_count"))),
    "writers' numbers, is_init and done": ("writer", ("step_count", ("next", "step_count"))),
    "writers' numbers and done": ("writer", ("is_init", "step_count", ("next", "step_count"))),
    "no ids": ("", ("step_count", ("next", "step_count"))),
}


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


class Machine(RuleBasedStateMachine):
    """Extends a buffer and a model alike, and compares all they can say."""

    world: Any
    compact: bool
    kind = "float32"

    @initialize(
        capacity=st.integers(1, 60),
        writers=st.integers(1, 5),
        dialect=st.sampled_from(sorted(DIALECTS)),
        longest=st.sampled_from([1, 4, 12, 40]),
        seed=st.integers(0, 10**6),
        by=st.sampled_from(["trajectory", "start"]),
    )
    def begin(self, capacity: int, writers: int, dialect: str, longest: int, seed: int, by: Any) -> None:
        self.ids, self.without = DIALECTS[dialect]
        abandon = 0.0 if dialect == "writers' numbers and done" else 0.05  # nothing would show it
        self.writers = self.world.writers(writers if self.ids else 1, seed, longest=longest, abandon=abandon)
        self.model = self.world.Model(capacity)
        self.buffer = ReplayBuffer(
            storage=LazyTensorStorage(capacity, compact_obs=self.compact),
            sampler=SliceSampler(slice_len=5, by=by, fill=False),
            batch_size=20,
            generator=torch.Generator().manual_seed(seed),
        )

    def batch(self, steps: list[Any]) -> Any:
        return self.world.to_batch(steps, self.kind, self.ids, self.without)

    def extend(self, lengths: list[tuple[int, int]], with_final: bool) -> None:
        steps = self.world.windows(self.writers, [(w % len(self.writers), n) for w, n in lengths])
        batch = self.batch(steps)
        if with_final:
            compact, final = self.world.compacted(batch, steps)
            if "step_count" in batch:
                compact["next", "step_count"] = batch["next", "step_count"]
            slots = self.buffer.extend(compact, final=final)
        else:
            slots = self.buffer.extend(batch)
        self.model.extend(steps)
        kept = min(len(steps), self.model.capacity)
        first = self.model.written - kept
        assert slots.tolist() == [(first + i) % self.model.capacity for i in range(kept)]

    @rule(
        lengths=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), min_size=1, max_size=6),
        with_final=st.booleans(),
    )
    def extend_windows(self, lengths: list[tuple[int, int]], with_final: bool) -> None:
        self.extend(lengths, with_final)

    @rule(repeats=st.integers(1, 4), with_final=st.booleans())
    def extend_time_major(self, repeats: int, with_final: bool) -> None:
        self.extend([(w, 1) for w in range(len(self.writers))] * repeats, with_final)

    @rule(writer=st.integers(0, 4))
    def add(self, writer: int) -> None:
        (step,) = self.world.windows(self.writers, [(writer % len(self.writers), 1)])
        self.buffer.add(self.batch([step])[0])
        self.model.extend([step])

    @rule()
    def empty(self) -> None:
        self.buffer.empty()
        for writer in self.writers:  # otherwise rows go on whose beginning the buffer never saw
            writer.episode, writer.step = writer.episode + 1, 0
        self.model = self.world.Model(self.model.capacity)

    @rule()
    def sample(self) -> None:
        stored = self.model.slots()
        if not stored:
            return
        sample, info = self.buffer.sample(return_info=True)
        slots = info["index"].tolist()
        steps = [stored[i] for i in slots]
        expected = self.batch(steps)
        legal = self.model.starts(5, strict=False)
        first, following = 0, self.model.next_slot()
        starts = torch.zeros(len(slots), 1, dtype=torch.bool)
        ends = starts.clone()
        for _ in range(4):
            length = legal[slots[first]]
            starts[first] = ends[first + length - 1] = True
            for i in range(first, first + length - 1):
                assert following[slots[i]] == slots[i + 1]
            first += length
        assert first == len(slots)
        self.compare(sample.exclude("is_init", ("next", "done"), ("next", "truncated")), expected)
        assert same(sample["is_init"], starts | expected["is_init"] if "is_init" in expected else starts)
        assert same(sample["next", "done"], ends | expected["next", "done"])
        marked = ends & ~expected["next", "terminated"]
        assert same(sample["next", "truncated"], marked | expected["next", "truncated"])

    def compare(self, rows: Any, expected: Any) -> None:
        for key, value in rows.items(True, True):
            assert same(value, expected[key]), key
        missing = set(expected.keys(True, True)) - set(rows.keys(True, True))
        assert missing <= {"is_init", ("next", "done"), ("next", "truncated")}

    @invariant()
    def rows_agree(self) -> None:
        stored = self.model.slots()
        assert len(self.buffer) == len(stored)
        if stored:
            expected = self.batch([stored[i] for i in range(len(stored))])
            self.compare(self.buffer[:], expected)

    @invariant()
    def index_agrees(self) -> None:
        index = self.buffer.index
        if index is None:
            return
        chains, following = self.model.trajectories(), self.model.next_slot()
        assert index.trajectories == len(chains)
        assert index.longest == max(map(len, chains.values()), default=0)
        stored = self.model.slots()
        open_chains = [chain for chain in chains.values() if not stored[chain[-1]].done]
        assert index.open_trajectories == len(open_chains)
        slots = torch.arange(len(stored))
        assert index.next_row(slots).tolist() == [following[i] for i in range(len(stored))]
        for length in (1, 2, 5):
            for strict in (True, False):
                assert index.starts(length, strict=strict) == len(self.model.starts(length, strict))
        named: dict[int, list[int]] = {}
        for chain in chains.values():  # in the order of their episodes
            step = stored[chain[0]]
            named.setdefault(step.traj if self.ids == "unique" else step.writer, []).extend(chain)
        for name, rows in named.items():
            assert not self.ids or index.find_rows(name).tolist() == rows

    @invariant()
    def pool_holds_only_what_no_row_holds(self) -> None:
        index = self.buffer.index
        if index is None or not self.compact:
            return
        alone = sum(slot == -1 for slot in self.model.next_slot().values())
        assert index.pool_used == alone


@pytest.mark.parametrize(("compact", "kind"), [(False, "float32"), (True, "float32"), (True, "dict")])
def test_buffer_equals_the_list_of_its_rows(world: Any, compact: bool, kind: str) -> None:
    machine = type("M", (Machine,), {"world": world, "compact": compact, "kind": kind})
    run_state_machine_as_test(machine, settings=EXAMPLES)
