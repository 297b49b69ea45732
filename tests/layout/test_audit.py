from collections.abc import Callable

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from flatroll.layout import Finding, audit


def found(batch: TensorDict) -> list[tuple[str, int]]:
    return [(finding.rule, finding.row) for finding in audit(batch)]


def undo_done(b: TensorDict) -> None:
    b["next", "done"][3] = False


def done_for_no_reason(b: TensorDict) -> None:
    b["next", "terminated"][3] = False


def skip_a_step(b: TensorDict) -> None:
    b["step_count"][6], b["next", "step_count"][6] = 5, 6


def negative_step(b: TensorDict) -> None:
    b["step_count"][10:] -= 9
    b["next", "step_count"][10:] -= 9
    b["is_init"][10] = False


def wrong_next_step(b: TensorDict) -> None:
    b["next", "step_count"][5] = 9


def forget_init(b: TensorDict) -> None:
    b["is_init"][4] = False


def init_in_mid_episode(b: TensorDict) -> None:
    b["is_init"][8] = True


def go_on_after_done(b: TensorDict) -> None:
    b["next", "done"][8], b["next", "truncated"][8] = True, True


def restart_without_done(b: TensorDict) -> None:
    for flag in ("done", "terminated"):
        b["next", flag][3] = False
    b["collector", "traj_ids"][4:7] = 0
    b.del_("step_count")


def reuse_an_id(b: TensorDict) -> None:
    b["collector", "traj_ids"][4:7] = 0


def live_after_termination(b: TensorDict) -> None:
    b["collector", "traj_ids"][7:10] = 0


def unset_id(b: TensorDict) -> None:
    b["collector", "traj_ids"][10:] = -1


def change_the_id_midway(b: TensorDict) -> None:
    b["collector", "traj_ids"][12:] = 99


def corrupt_next_observation(b: TensorDict) -> None:
    b["next", "observation"][5, 1] += 1


def nan_observation(b: TensorDict) -> None:
    b["observation"][10, 2] = torch.nan


def nan_reward(b: TensorDict) -> None:
    b["next", "reward"][2] = torch.nan


def overflown_delta(b: TensorDict) -> None:
    delta = b["next", "observation"].half()
    delta[6] = torch.inf
    b["next", "delta", "observation"] = delta


def reset_observation_as_next(b: TensorDict) -> None:
    b["next", "observation"][3] = b["observation"][4]


def unannounced_reset(b: TensorDict) -> None:
    b["observation"][12] = b["next", "observation"][11] = b["observation"][0]


PLANTED: list[tuple[Callable[[TensorDict], None], list[tuple[str, int]]]] = [
    (undo_done, [("done", 3)]),
    (done_for_no_reason, [("done_without_reason", 3)]),
    (skip_a_step, [("step_count", 6)]),
    (negative_step, [("step_count", 10), ("step_count", 11), ("step_count", 12), ("step_count", 13)]),
    (wrong_next_step, [("next_step_count", 5)]),
    (forget_init, [("is_init", 4)]),
    (init_in_mid_episode, [("is_init", 8)]),
    (go_on_after_done, [("after_done", 9)]),
    (restart_without_done, [("silent_reset", 4)]),
    (reuse_an_id, [("traj_id", 4), ("traj_id", 5), ("traj_id", 6)]),
    (live_after_termination, [("traj_id", 7)]),
    (unset_id, [("traj_id", 10), ("traj_id", 11), ("traj_id", 12), ("traj_id", 13)]),
    (change_the_id_midway, [("traj_id", 12)]),
    (corrupt_next_observation, [("next_observation", 5)]),
    (nan_observation, [("nan", 10)]),
    (nan_reward, [("nan", 2)]),
    (overflown_delta, [("delta", 6)]),
    (reset_observation_as_next, [("reset_as_next", 3)]),
    (unannounced_reset, [("obs_jump", 12)]),
]


@pytest.mark.parametrize(("plant", "expected"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_a_planted_fault_is_found_and_nothing_else(batch, plant, expected):
    plant(batch)
    assert found(batch) == expected


def test_only_the_three_guesses_are_suspicious(batch):
    for plant in (reset_observation_as_next, unannounced_reset):
        plant(batch)
    assert {f.severity for f in audit(batch)} == {"suspicious"}
    forget_init(batch)
    assert next(f.severity for f in audit(batch)) == "error"


def test_a_restart_under_the_old_id_also_names_two_trajectories(batch):
    steps = batch["step_count"]
    restart_without_done(batch)
    batch["step_count"] = steps
    assert found(batch) == [("silent_reset", 4), ("traj_id", 4), ("traj_id", 5), ("traj_id", 6)]


def test_a_time_limit_reported_as_termination(make):
    runs = [(0, k, 0, 4, "terminated") for k in range(5)]
    finding = audit(make(runs))[0]
    assert (finding.rule, finding.row, finding.severity) == ("same_length", -1, "suspicious")
    assert "all 5 ended episodes terminate after 4 steps" in finding.text
    assert str(finding).startswith("batch [same_length] (suspicious) all 5")
    assert found(make(runs[:4])) == []
    assert found(make([*runs, (1, 0, 0, 3, "terminated")])) == []
    assert found(make([*runs, (1, 0, 0, 4, "truncated")])) == []
    assert found(make([(0, k, 0, 1, "terminated") for k in range(9)])) == []


@pytest.mark.parametrize(
    ("key", "change", "rule", "text"),
    [
        ("is_init", lambda c: c.squeeze(-1), "shape", "'is_init' has shape (14,), expected (14, 1)"),
        ("is_init", lambda c: c.byte(), "dtype", "'is_init' is torch.uint8, expected torch.bool"),
        ("step_count", lambda c: c.int(), "dtype", "'step_count' is torch.int32, expected torch.int64"),
        (
            ("next", "reward"),
            lambda c: c.long(),
            "dtype",
            "('next', 'reward') is torch.int64, expected torch.float32",
        ),
        (
            ("next", "observation"),
            lambda c: c[:, :2],
            "shape",
            "('next', 'observation') has shape (14, 2), expected (14, 3)",
        ),
        (("collector", "traj_ids"), lambda c: c[:, None], "shape", "expected (14,)"),
    ],
)
def test_markers_have_the_shape_and_dtype_of_the_contract(batch, key, change, rule, text):
    batch.set(key, change(batch.get(key)))
    (finding,) = audit(batch)
    assert (finding.rule, finding.row, finding.severity) == (rule, -1, "error")
    assert text in finding.text


def test_rewards_of_any_floating_dtype_are_fine(batch):
    """Collectors write float32; data sets keep what their files have."""
    assert audit(batch.set(("next", "reward"), batch["next", "reward"].double())) == []


def test_what_is_no_flat_batch(batch):
    assert audit(batch.reshape(2, 7)) == [
        Finding(
            -1, "batch_size", "the batch must have batch size [N], got [2, 7]: join() concatenates the rows"
        )
    ]
    (finding,) = audit(batch.select("observation", "step_count"))
    assert finding.rule == "markers"


def test_a_sound_batch_has_no_findings(batch):
    before = batch.clone()
    assert audit(batch) == []
    assert (batch == before).all()
    assert audit(batch[:0]) == []
    assert audit(batch[:1]) == []


@pytest.mark.parametrize(
    "columns",
    [
        ["is_init"],
        [("next", "done")],
        [("collector", "traj_ids")],
        ["observation", "step_count", "is_init", ("collector", "traj_ids"), ("next", "done")],
    ],
)
def test_any_subset_of_the_columns_will_do(batch, columns):
    assert audit(batch.select(*columns)) == []


def test_a_cut_that_no_marker_tells_is_an_error(batch):
    part = batch.select("is_init", ("next", "done"), "observation", ("next", "observation"))
    assert found(part) == [("next_observation", 6)]  # without ids nothing ends the first env's window
    assert found(part[:7]) == []


def test_without_ids_and_steps_a_done_row_may_be_the_end_of_a_window(batch):
    part = batch.select("is_init", ("next", "done"))
    part["next", "done"][6] = True
    assert [(f.rule, f.row, f.severity) for f in audit(part)] == [("after_done", 7, "suspicious")]


def test_slices_may_begin_in_mid_episode_repeat_and_continue_each_other(slices):
    assert audit(slices) == []


def test_slices_without_truncation_marks(slices):
    for flag in ("done", "truncated"):
        slices["next", flag][:9] = False
    # Rows 3 and 6 start slices of the trajectory of the row before; only row 3 goes on where that one stops.
    assert [(f.rule, f.row, f.severity) for f in audit(slices)] == [("silent_reset", 3, "suspicious")]


def test_a_slice_that_is_another_transition_under_the_same_id_and_step(slices):
    slices["action"][7] += 1
    assert found(slices) == [("traj_id", 7)]


def test_padding_is_left_out_and_checked(slices):
    padded = torch.cat([slices[:3], slices[2:3], slices[3:]])
    padded["collector", "mask"] = torch.arange(13) != 3
    assert audit(padded) == []
    padded["is_init"][3] = True
    assert found(padded) == [("padding", 3)]
    padded["is_init"][3] = False
    padded["collector", "mask"][0] = False
    assert ("padding", 0) in found(padded)
    padded["collector", "mask"][0] = True
    padded["next", "step_count"][12] = 7  # findings name rows of the batch, padding counted
    assert found(padded) == [("next_step_count", 12)]


def test_compact_batches_and_nan_at_ends(batch):
    batch["next", "observation"][[3, 6, 9, 13]] = torch.nan
    assert audit(batch) == []
    assert audit(batch.exclude(("next", "observation"))) == []


def test_nan_inside_a_run_equals_nan(batch):
    batch["observation"][2, 0] = batch["next", "observation"][1, 0] = torch.nan
    assert found(batch) == [("nan", 2)]


def test_dict_observations_are_checked_and_recurrent_states_are_not(batch):
    batch["pos"] = {"xy": batch["observation"].clone()}
    batch["next", "pos"] = {"xy": batch["next", "observation"].clone()}
    batch["recurrent_state"] = batch["next", "recurrent_state"] = torch.randn(14, 1, 2)
    batch["next", "pos", "xy"][1] = 0
    (finding,) = audit(batch)
    assert (finding.rule, finding.row) == ("next_observation", 1)
    assert finding.text.startswith("('next', 'pos', 'xy') is not ('pos', 'xy') of the row after")
    assert audit(batch, keys=["observation"]) == []


def test_no_more_findings_than_asked_for(batch):
    batch["next", "step_count"] += 1
    findings = audit(batch, limit=3)
    assert [f.row for f in findings] == [0, 1, 2]
    assert findings[2].text == "('next', 'step_count') is not step_count + 1 (and 11 more rows)"
    assert "more rows" not in findings[0].text
    assert (
        str(findings)
        == "14 rows: 0, 1, 2, ... [next_step_count] ('next', 'step_count') is not step_count + 1"
    )


def test_findings_of_one_kind_share_a_line(batch):
    assert str(audit(batch)) == "[]"
    batch["next", "step_count"][[1, 4]] += 1
    batch["next", "reward"][3] = float("nan")
    lines = str(audit(batch)).splitlines()
    assert lines[0] == "2 rows: 1, 4 [next_step_count] ('next', 'step_count') is not step_count + 1"
    assert lines[1:] == [str(finding) for finding in audit(batch)[2:]] and "[nan]" in lines[1]


@examples(100)
@given(data=st.data())
def test_collected_batches_of_any_shape_are_sound(make, data):
    runs = []
    for env in range(data.draw(st.integers(1, 4))):
        first = data.draw(st.integers(0, 3))
        for episode in range(data.draw(st.integers(1, 4))):
            end = data.draw(st.sampled_from(["terminated", "truncated", "both"]))
            runs.append((env, episode, first, data.draw(st.integers(1, 5)), end))
            first = 0
        if data.draw(st.booleans()):
            runs[-1] = (*runs[-1][:4], "cut")
    assert [f for f in audit(make(runs)) if f.rule != "same_length"] == []


# --- right rows of envs with few or repeating observations ---------------------------------------------------


def walk(
    seed: int, episodes: int, *, size: int, ahead: float = 0.5, start: int = 0, wrong: bool = False
) -> TensorDict:
    """Walks on a ring of ``size`` places, which end after 2 to 5 steps; ``wrong``: their ends show the reset."""
    random = torch.Generator().manual_seed(seed)
    rows: list[tuple[int, int, int, int, bool]] = []
    for episode in range(episodes):
        length = int(torch.randint(2, 6, (), generator=random))
        place = start
        for step in range(length):
            moves = 1 if float(torch.rand((), generator=random)) < ahead else -1
            after = (place + moves) % size
            over = step == length - 1
            rows.append((episode, step, place, start if over and wrong else after, over))
            place = after
    ids, step, now, later, over = (torch.tensor(column) for column in zip(*rows, strict=True))
    ended = over[:, None]
    done = {"done": ended, "terminated": ended, "truncated": torch.zeros_like(ended)}
    return TensorDict(
        {
            "observation": now,
            "is_init": (step == 0)[:, None],
            "step_count": step[:, None],
            "collector": {"traj_ids": ids},
            "next": {"observation": later, "reward": torch.ones(len(ids), 1), **done},
        },
        [len(ids)],
    )


@pytest.mark.parametrize("seed", range(5))
def test_ends_at_the_start_are_no_finding_where_few_look_so(seed: int) -> None:
    right = walk(seed, 60, size=5)
    alike = right["next", "observation"][right["next", "done"].flatten()] == 0
    assert alike.any() and not alike.all()  # some episodes end where the next begins
    assert audit(right) == []


@pytest.mark.parametrize("seed", range(5))
def test_ends_at_the_start_are_no_finding_where_the_start_is_common(seed: int) -> None:
    # Two places: at least half of the episodes, those of an even length, end where they began.
    even = walk(seed, 60, size=2)
    assert [finding for finding in audit(even) if finding.rule == "reset_as_next"] == []


@pytest.mark.parametrize("seed", range(5))
def test_ends_that_show_the_reset_are_found_among_many_places(seed: int) -> None:
    findings = audit(walk(seed, 60, size=10_000, ahead=1.0, wrong=True), limit=1000)
    assert {finding.rule for finding in findings} == {"reset_as_next"}
    assert len(findings) == 59  # all ended rows but the last, which no row follows


def test_constant_observations_are_no_finding() -> None:
    rows = walk(0, 20, size=10)
    rows["observation"] = rows["next", "observation"] = torch.zeros(len(rows), 3)
    assert audit(rows) == []


def test_standing_and_walking_back_to_the_start_are_no_jumps() -> None:
    # In the first, most steps stand still, so that the median of all moves is 0.
    def rows_of(*column: float) -> TensorDict:
        now = torch.tensor(column, dtype=torch.float32)[:, None]
        first = torch.arange(len(now)) == 0
        later = torch.cat([now[1:], now[-1:]])
        done = torch.zeros(len(now), 1, dtype=torch.bool)
        return TensorDict(
            {"observation": now, "is_init": first[:, None], "next": {"observation": later, "done": done}},
            [len(now)],
        )

    assert found(rows_of(0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 2, 2, 2)) == []
    assert (
        found(rows_of(0, 1, 0, 1, 2, 7, 14, 21, 0, 1)) == []
    )  # a leap back, but the start is as common as others
    assert found(rows_of(0, 1, 2, 3, 4, 5, 6, 7, 0, 1.5, 2.5)) == [("obs_jump", 8)]


@pytest.mark.parametrize("n_steps", [2, 3, 7])
@pytest.mark.parametrize("compact", [False, True])
def test_n_step_rows_are_sound(n_steps: int, compact: bool) -> None:
    from flatroll.buffers import LazyTensorStorage, MultiStepTransform, ReplayBuffer, SliceSampler
    from flatroll.rollouts import rollout
    from flatroll.wrappers import StepCounter
    from flatroll.wrappers.testing import Script, make_scripted

    script = Script(2, lengths=[[6, 1, 7], [4, 9]], ends=[["terminated", "both"], ["truncated"]])
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(60, compact_obs=compact),
        sampler=SliceSampler(slice_len=4),
        transform=MultiStepTransform(n_steps=n_steps, gamma=0.9),
        batch_size=24,
    )
    for batch in rollout(StepCounter(make_scripted(script)), num_steps=45).split(50):
        buffer.extend(batch)  # more than there is room for
    rows = buffer[:]
    assert audit(rows) == []
    for _ in range(5):
        assert audit(buffer.sample()) == []
    # What a rule can know is still checked.
    rows["next", "step_count"][3] += 1
    assert found(rows) == [("next_step_count", 3)]
    assert "is not step_count + steps_to_next_obs" in audit(rows)[0].text
    broken = buffer[:]
    broken["next", "reward"][2] = torch.nan
    broken["collector", "traj_ids"][5] = -1
    assert {rule for rule, _ in found(broken)} == {"nan", "traj_id"}
