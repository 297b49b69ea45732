"""Burnt-in slices against running the whole slice and leaving its head out."""

from typing import Any

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from flatroll.buffers import LazyTensorStorage, MultiStepTransform, RandomSampler, ReplayBuffer, SliceSampler
from flatroll.modules import BurnIn, GRUModule, LSTMModule, recurrent_mode, set_recurrent_mode

IN, HIDDEN = 3, 4


def module_of(kind: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(IN, HIDDEN, num_layers=2, in_key="observation", out_key="features", **options).double()


def slices_of(
    module: Any, lengths: list[int], resets: list[int], marked: bool = True
) -> tuple[TensorDict, Tensor]:
    """Slices end to end with a random state stored at every row, episodes that begin at ``resets``; and their ends."""
    rows = sum(lengths)
    generator = torch.Generator().manual_seed(rows)
    ends = torch.zeros(rows, dtype=torch.bool)
    ends[torch.tensor(lengths).cumsum(0) - 1] = True
    is_init = torch.zeros(rows, 1, dtype=torch.bool)
    is_init[[r for r in resets if r < rows]] = True
    if marked:
        is_init[1:] |= ends[:-1, None]
        is_init[0] = True
    batch = TensorDict({"is_init": is_init, "row": torch.arange(rows)}, [rows])
    batch["observation"] = torch.randn(rows, IN, generator=generator, dtype=torch.float64)
    for key, zero in module.make_tensordict_primer().defaults.items():
        batch[key] = torch.randn(rows, *zero.shape, generator=generator, dtype=torch.float64)
    return batch, ends


def run(module: Any, batch: TensorDict) -> TensorDict:
    with set_recurrent_mode("recurrent"):
        out: TensorDict = module(batch)
    return out


def slice_by_slice(module: Any, batch: TensorDict, lengths: list[int], burn_in: int) -> list[TensorDict]:
    """The oracle: for each slice the rows that stay, run on from the state of a run over its head without grad."""
    outputs = []
    for part in batch.split(lengths):
        part = part.clone()
        part["is_init"][0] = True
        cut = min(burn_in, len(part) - 1)
        head, tail = part[:cut].clone(), part[cut:].clone()
        if cut and not tail["is_init"][0]:
            with torch.no_grad():
                head = run(module, head)
            for key in module.make_tensordict_primer().defaults:
                tail[key][0] = head["next", key][-1]
        tail["is_init"][0] = True
        outputs.append(run(module, tail))
    return outputs


@examples(40, derandomize=True)
@given(
    kind=st.sampled_from([GRUModule, LSTMModule]),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    resets=st.lists(st.integers(0, 30), max_size=6),
    burn_in=st.integers(1, 10),
    told=st.sampled_from(["is_init", "ends", "both"]),
)
def test_the_rest_of_a_slice_goes_on_as_if_it_were_whole(
    kind: Any, lengths: list[int], resets: list[int], burn_in: int, told: str
) -> None:
    """Outputs, states and gradients; resets in the head, at the border and behind it; adjacent unmarked slices."""
    module = module_of(kind)
    if told == "is_init":  # runs are the slices then
        resets = []
    batch, ends = slices_of(module, lengths, resets, marked=told != "ends")
    before = batch.clone()
    sample = BurnIn(module, burn_in).forward(batch, None if told == "is_init" else ends)
    assert (batch == before).all()
    expected = slice_by_slice(module, batch, lengths, burn_in)
    wanted = torch.cat(expected)
    assert torch.equal(sample["row"], wanted["row"])
    assert torch.equal(sample["is_init"], wanted["is_init"])
    for key in module.make_tensordict_primer().defaults:
        assert not sample[key].requires_grad
        torch.testing.assert_close(sample[key], wanted[key])
    out = run(module, sample)
    torch.testing.assert_close(out["features"], wanted["features"])
    weight = torch.arange(out["features"].numel()).view_as(out["features"]).cos()
    grads, expected_grads = (
        torch.autograd.grad((td["features"] * weight).sum(), list(module.parameters()))
        for td in (out, wanted)
    )
    torch.testing.assert_close(grads, expected_grads)


@pytest.mark.parametrize("kind", [GRUModule, LSTMModule])
def test_values_are_those_of_the_whole_slice(kind: Any) -> None:
    module = module_of(kind)
    batch, ends = slices_of(module, [7, 7, 5], [3, 9, 16])
    whole = run(module, batch.clone())["features"]
    sample = run(module, BurnIn(module, 4).forward(batch, ends))
    torch.testing.assert_close(sample["features"], whole[sample["row"]])


def test_without_stored_states_slices_begin_at_zero() -> None:
    module = module_of(LSTMModule)
    batch, ends = slices_of(module, [6, 1, 6], [])
    states = list(module.make_tensordict_primer().defaults)
    zeros = batch.clone()
    for key in states:
        zeros[key].zero_()
    bare = batch.exclude(*states)
    sample, expected = (BurnIn(module, 3).forward(td, ends) for td in (bare, zeros))
    assert set(sample.keys(True, True)) == set(expected.keys(True, True))
    assert all(torch.equal(sample[key], expected[key]) for key in expected.keys(True, True))
    assert bool(sample["recurrent_state_c"][0].any()) and not bool(sample["recurrent_state_c"][1:4].any())
    assert "recurrent_state_h" not in bare
    alone = BurnIn(module, 3).forward(bare[:1])
    assert set(alone.keys(True, True)) == set(
        expected.keys(True, True)
    )  # one schema, also if nothing is burnt in


def test_without_a_marker_the_ends_tell_and_is_init_is_written() -> None:
    module = module_of(GRUModule)
    batch, ends = slices_of(module, [4, 4], [])
    sample = BurnIn(module, 2).forward(batch.exclude("is_init"), ends)
    assert sample["is_init"].tolist() == [[True], [False]] * 2
    flat = batch.clone().set("is_init", batch["is_init"].squeeze(-1))
    assert BurnIn(module, 2).forward(flat, ends)["is_init"].tolist() == [True, False] * 2


def test_several_modules_run_in_order_and_in_recurrent_mode() -> None:
    seen: list[Any] = []

    def encode(x: Tensor) -> Tensor:
        seen.append((recurrent_mode(), torch.is_grad_enabled(), len(x)))
        return x.tanh()

    encoder = TensorDictModule(encode, in_keys=["observation"], out_keys=["code"])
    gru = GRUModule(IN, HIDDEN, in_keys=["code", "h"], out_keys=["features", ("next", "h")]).double()
    head = TensorDictModule(nn.Linear(HIDDEN, 1).double(), in_keys=["features"], out_keys=["value"])
    batch, ends = slices_of(module_of(GRUModule), [5, 5], [])
    batch["h"] = torch.zeros(10, 1, HIDDEN, dtype=torch.float64)
    whole = BurnIn([encoder, gru], 3).forward(batch, ends)
    assert seen == [(True, False, 6)] and recurrent_mode() is None
    sequence = BurnIn(TensorDictSequential(encoder, gru, head), 3, out_keys=[("next", "h")]).forward(
        batch, ends
    )
    assert torch.equal(whole["h"], sequence["h"]) and bool(whole["h"][0].any())
    assert "features" not in whole and "code" not in whole


def test_none_and_nothing_left_over_is_left_alone() -> None:
    module = module_of(GRUModule)
    batch, ends = slices_of(module, [4, 4], [])
    assert BurnIn(module, 0).forward(batch, ends) is batch
    single = BurnIn(module, 3).forward(batch, torch.ones(8, dtype=torch.bool))
    assert len(single) == 8 and single["is_init"].all()
    assert torch.equal(single["recurrent_state"], batch["recurrent_state"])


def stored(
    module: Any, transform: Any, sampler: Any = None, **options: Any
) -> tuple[ReplayBuffer, TensorDict]:
    """Four trajectories of 11 rows, the state of each row as a rollout would store it."""
    rows = 44
    last = (torch.arange(rows) % 11 == 10).unsqueeze(-1)
    torch.manual_seed(1)
    batch = TensorDict({"observation": torch.randn(rows, IN).double(), "row": torch.arange(rows)}, [rows])
    batch["is_init"] = last.roll(1)
    batch["next"] = TensorDict({"done": last, "terminated": last, "reward": torch.ones(rows, 1)}, [rows])
    batch["next", "observation"] = batch["observation"].roll(-1, 0)
    batch = batch.update(module.make_tensordict_primer().expand(rows))
    for start in range(0, rows, 11):
        part = batch[start : start + 11]
        for i in range(10):
            after = module(part[i : i + 1].clone())
            for key in module.make_tensordict_primer().defaults:
                part[key][i + 1] = after["next", key][0].detach()
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(rows),
        sampler=SliceSampler(slice_len=6) if sampler is None else sampler,
        batch_size=60,
        generator=torch.Generator().manual_seed(0),
        **options,
    )
    for one in transform:
        buffer.append_transform(one)
    buffer.extend(batch)
    return buffer, batch


@pytest.mark.parametrize("kind", [GRUModule, LSTMModule])
def test_buffers_burn_in_their_slices(kind: Any) -> None:
    """Stale states of flat rows are refreshed, too.

    With unchanged weights the states burnt in are those that the rollout stored.
    """
    module = module_of(kind)
    buffer, batch = stored(module, [BurnIn(module, 4)])
    sample = buffer.sample()
    assert len(sample) == 20
    assert sample["is_init"].flatten().tolist() == [True, False] * 10
    assert sample["next", "done"].flatten().tolist() == [False, True] * 10
    for key in module.make_tensordict_primer().defaults:
        torch.testing.assert_close(sample[key], batch[key][sample["row"]])


def test_n_step_slices_run_as_sequences() -> None:
    """Rows that reach the end of the episode are done in mid-slice; their own flag says how the sequence runs."""
    own = ("next", "original_done")
    module = module_of(GRUModule, done_key=own)
    buffer, batch = stored(module, [MultiStepTransform(3, 0.9), BurnIn(module, 4, done_key=own)])
    sample = run(module, buffer.sample())
    last_rows = sample["row"] % 11 >= 8
    assert last_rows.any() and torch.equal(sample["next", "terminated"].flatten(), last_rows)
    whole = run(module, batch.clone().set(own, batch["next", "done"]))
    torch.testing.assert_close(sample["features"], whole["features"][sample["row"]])


def test_rows_drawn_one_by_one_have_nothing_to_burn_in() -> None:
    module = module_of(GRUModule)
    buffer, _ = stored(module, [BurnIn(module, 4)], RandomSampler())
    assert len(buffer.sample()) == 60


def test_errors_say_what_is_wrong() -> None:
    module = module_of(GRUModule)
    batch, ends = slices_of(module, [4, 4], [])
    for wrong in (-1, 1.0, True):
        with pytest.raises(ValueError, match="burn_in must be an integer of at least 0, got"):
            BurnIn(module, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="modules must be tensordict modules, got Linear"):
        BurnIn([module, nn.Linear(2, 2)], 3)
    plain = TensorDictModule(nn.Linear(IN, 2), in_keys=["observation"], out_keys=["features"])
    with pytest.raises(ValueError, match=r"no recurrent state: .*out_keys"):
        BurnIn(plain, 3)
    with pytest.raises(ValueError, match=r"needs a flat batch \[N\] of slices, got \[2, 4\]"):
        BurnIn(module, 3).forward(batch.reshape(2, 4))
    with pytest.raises(KeyError, match="no entry 'observation'"):
        BurnIn(module, 3).forward(batch.exclude("observation"), ends)
    with pytest.raises(KeyError, match="no entry 'memory'"):
        BurnIn(module, 3, out_keys=["memory"]).forward(batch, ends)
    padded = SliceSampler(slice_len=12, pad_output=True)
    buffer, _ = stored(module, [BurnIn(module, 4)], padded)
    with pytest.raises(ValueError, match=r"without padding: SliceSampler\(pad_output=False\)"):
        buffer.sample()
