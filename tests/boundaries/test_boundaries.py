"""The boundary table: our row is zero, and a fault planted in ours turns each fixture red."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benchmarks.boundaries import page
from benchmarks.boundaries.cells import Cell, Tally
from benchmarks.boundaries.fixtures import FIXTURES, PLAN, key_of
from benchmarks.boundaries.libraries import flatroll as ours
from benchmarks.boundaries.rows import packages, skipped
from benchmarks.boundaries.text import as_text
from flatroll import buffers, modules, rollouts
from flatroll.__main__ import main

Fault = Callable[[pytest.MonkeyPatch], None]


def collects(change: Callable[[Any], None]) -> Fault:
    """A collector whose batches have been changed."""

    class Faulty(rollouts.Collector):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                change(batch)
                yield batch

    return lambda patch: patch.setattr(rollouts, "Collector", Faulty)


def samples(change: Callable[[Any], None]) -> Fault:
    """A buffer whose samples have been changed."""

    class Faulty(buffers.ReplayBuffer):
        def sample(self, *arguments: Any, **options: Any) -> Any:
            sample = super().sample(*arguments, **options)
            change(sample)
            return sample

    return lambda patch: patch.setattr(buffers, "ReplayBuffer", Faulty)


def reads(change: Callable[[Any], None], after_loads: bool = False) -> Fault:
    """A buffer whose rows are read changed; or only after it was loaded."""

    class Faulty(buffers.ReplayBuffer):
        loaded = False

        def loads(self, *arguments: Any, **options: Any) -> Any:
            self.loaded = True
            return super().loads(*arguments, **options)

        def __getitem__(self, index: Any) -> Any:
            rows = super().__getitem__(index)
            if self.loaded or not after_loads:
                change(rows)
            return rows

    return lambda patch: patch.setattr(buffers, "ReplayBuffer", Faulty)


def ends(batch: Any) -> Any:
    return batch["next", "done"].squeeze(-1)


def terminates_time_limits(batch: Any) -> None:
    batch["next", "terminated"] |= batch["next", "truncated"]


def believes_time_limits(batch: Any) -> None:
    batch["next", "terminated"] &= ~batch["next", "truncated"]


def shows_the_reset(batch: Any) -> None:
    last = ends(batch)
    episode = batch["observation"][last] + torch.tensor([0.0, 1.0, 0.0])
    batch["next", "observation"][last] = episode * torch.tensor([1.0, 1.0, 0.0])


def stores_the_reset_step(batch: Any) -> None:
    last = ends(batch)
    batch["observation"][last] = batch["next", "observation"][last]


def sums_always_n_rows(sample: Any) -> None:
    sample["steps_to_next_obs"].fill_(3)


def marks_no_slice(sample: Any) -> None:
    sample["next", "done"].zero_()
    sample["is_init"].zero_()


def shifts_frames(rows: Any) -> None:
    rows["observation"] = rows["observation"].roll(1, 1)


def keeps_states(batch: Any) -> None:
    batch["recurrent_state"].fill_(1.0)


def forgets_the_last_reward(batch: Any) -> None:
    batch["next", "episode_reward"][ends(batch)] -= 1


def adds_to_rewards(rows: Any) -> None:
    rows["next", "reward"] += 1


def has_the_info_before(batch: Any) -> None:
    batch["next", "row"] = batch["row"]


def counts_twice(patch: pytest.MonkeyPatch) -> None:
    update = modules.RunningNorm.update

    def twice(self: Any, batch: Any) -> None:
        update(self, batch)
        update(self, batch)

    patch.setattr(modules.RunningNorm, "update", twice)


def draws_again(patch: pytest.MonkeyPatch) -> None:
    class Faulty(buffers.ReplayBuffer):
        def __iter__(self) -> Iterator[Any]:
            samples = list(super().__iter__())
            return iter([samples[0], *samples])

    patch.setattr(buffers, "ReplayBuffer", Faulty)


FAULTS: dict[str, Fault] = {
    "truncated_end": collects(terminates_time_limits),
    "both_ends": collects(believes_time_limits),
    "last_observation": collects(shows_the_reset),
    "dead_rows": collects(stores_the_reset_step),
    "n_step": samples(sums_always_n_rows),
    "slices": samples(marks_no_slice),
    "frame_stacks": reads(shifts_frames),
    "hidden_state": collects(keeps_states),
    "advantages": collects(terminates_time_limits),
    "episode_statistics": collects(forgets_the_last_reward),
    "normaliser": counts_twice,
    "saved_buffer": reads(adds_to_rewards, after_loads=True),
    "passes": draws_again,
    "last_info": collects(has_the_info_before),
}


@pytest.mark.parametrize("name", FIXTURES)
def test_ours_is_zero(name: str) -> None:
    cell = ours.fixtures()[name]()
    assert cell.wrong == 0
    assert cell.of >= 15


@pytest.mark.parametrize("name", FIXTURES)
def test_a_planted_fault_turns_the_fixture_red(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "MODES", ("SameStep",))
    FAULTS[name](monkeypatch)
    cell = ours.fixtures()[name]()
    assert 0 < cell.wrong <= cell.of
    assert cell.how


def test_every_kind_of_end_is_in_the_plan() -> None:
    rows = [row for step in PLAN.rows(24) for row in step]
    kinds = {(row.terminated, row.truncated, row.first) for row in rows if row.done}
    ways = ((True, False), (False, True), (True, True))
    assert kinds == {(*way, first) for way in ways for first in (True, False)}


def test_targets_by_hand() -> None:
    # Rewards of (0, 0, 0), (0, 0, 1), (0, 0, 2): 1, 2, 3; the episode is truncated at step 3.
    last = 100.0 * 0 + 10.0 * 0 + 1.0 * 3 + 50.0
    assert PLAN.n_step_target((0, 0, 2), 1) == 3 + 0.5 * last
    assert PLAN.n_step_target((0, 0, 1), 3) == 2 + 0.5 * 3 + 0.25 * last
    assert PLAN.n_step_target((0, 0, 0), 3, newest=(0, 0, 1)) == 1 + 0.5 * 2 + 0.25 * (2 + 50.0)
    assert PLAN.n_step_target((0, 1, 0), 3) == 9.0  # terminated and truncated
    assert PLAN.stack((0, 2, 1)).tolist() == [[0, 2, 0], [0, 2, 0], [0, 2, 1]]


def test_a_tally_counts_nan_and_shapes_as_wrong() -> None:
    tally = Tally()
    tally.compare("a", [1.0, float("nan")], [1.0, 2.0])
    tally.compare("b", [1.0], [1.0, 2.0])
    tally.compare("c", [1.0, 2.0], [1.0, 2.0])
    assert (tally.wrong, tally.of, tally.places) == (2, 3, ["a", "b"])
    assert tally.cell("how", script="x.sh") == Cell(2, 3, "how", script="x.sh")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 3, "how"), "wrong must be within 0 to of"),
        ((1, 3, "one two three four five six seven eight nine"), "at most 8 words"),
        ((1, 3, ""), "how must be said"),
        ((0, 3, "how"), "how must be said"),
    ],
)
def test_cells_are_checked(arguments: tuple[int, int, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cell(*arguments)


def test_the_page_says_what_the_rows_say() -> None:
    wrong = Cell(2, 9, "joins envs", documented="its page", script="x.sh", thread="a/b#1", note="a doubt")
    rows: dict[str, Any] = {
        "flatroll": {"version": "1", "fixtures": {name: Cell(0, 5).as_dict() for name in FIXTURES}},
        "other": {"version": "2", "fixtures": {"slices": wrong.as_dict()}},
        "third": skipped("does not install"),
    }
    text = page.page_text(rows)
    assert "| flatroll 1 | 0/5 |" in text
    assert "**2/9**\\*" in text
    assert "documented: its page; `findings/x.sh`; [a/b#1](https://github.com/a/b/issues/1)" in text
    assert "* other, slices: a doubt" in text
    assert "* third: does not install" in text
    assert "other, slices: 2/9 joins envs (documented)" in as_text(rows)
    labels = {label.get_text() for label in page.draw(rows).axes[0].texts}
    assert labels == {"0", "2/9*", "\N{EN DASH}"}


def test_every_script_is_there() -> None:
    findings = page.ROOT / "findings"
    known = packages()
    assert next(iter(known)) == "flatroll"
    for name in known.values():
        source = (page.ROOT / f"benchmarks/boundaries/libraries/{name}.py").read_text()
        scripts = re.findall(r'script="([^"]+)"', source)
        assert all((findings / script).is_file() for script in scripts), scripts


def test_options_of_boundaries_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gae", "--libraries", "torchrl"]) == 2
    assert "--libraries is an option of boundaries alone" in capsys.readouterr().err


def test_observations_say_their_rows() -> None:
    row = PLAN.row((1, 2, 3))
    assert key_of(row.observation) == row.key
