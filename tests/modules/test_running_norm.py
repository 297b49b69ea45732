"""`RunningNorm` counts each observation of a stream once, and applies what it has counted."""

import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from flatroll.disk import Checkpoint
from flatroll.estimators import GAE
from flatroll.layout import split_trajectories
from flatroll.layout.moments import Moments
from flatroll.modules import GRUModule, RunningNorm
from flatroll.rollouts import Collector
from flatroll.wrappers import NextObservationDelta, as_vector_env
from flatroll.wrappers.testing import Script, make_scripted

MODES = ("NextStep", "SameStep", "Disabled")
SCRIPT = Script(3, lengths=[[3, 5, 1], [2, 4], [7]], ends=["terminated", "truncated", "both"])


def windows(mode: str, rows: int = 10, **options: Any) -> Iterator[tuple[TensorDict, TensorDict | None]]:
    """Five windows of the script, with their `final`."""
    env: Any = make_scripted(SCRIPT, autoreset_mode=mode)  # type: ignore[arg-type]
    if options.pop("delta", False):
        env = NextObservationDelta(env)
    collector = Collector(env, None, frames_per_batch=rows, total_frames=5 * rows, **options)
    for batch in collector:
        yield batch, collector.final


def shown(mode: str, rows: int = 10) -> Tensor:
    """Every observation in five windows, once, float64 ``[K, 3]``: each is (env, episode, step), and so no other."""
    batches = [batch for batch, _ in windows(mode, rows)]
    columns = [column for x in batches for column in (x["observation"], x["next", "observation"])]
    return torch.cat(columns).double().unique(dim=0)


def assert_counted(norm: RunningNorm, rows: Tensor) -> None:
    statistics = norm.statistics
    assert statistics.count.item() == len(rows)
    torch.testing.assert_close(statistics.mean, rows.mean(0), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(statistics.var, rows.var(0, correction=0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 10, 11])
@pytest.mark.parametrize(
    "options",
    [{}, {"compact_obs": True}, {"set_truncated": True}, {"delta": True}],
    ids=lambda x: "-".join(x),
)
def test_each_observation_of_a_stream_counts_once(mode: str, rows: int, options: dict[str, Any]) -> None:
    norm = RunningNorm("observation", shape=(3,))
    for batch, final in windows(mode, rows, **options):
        norm.update(batch, final=final)
    assert_counted(norm, shown(mode, rows))


def test_observations_that_the_env_hides_are_left_out() -> None:
    env = as_vector_env(make_scripted(SCRIPT, backend="native", autoreset_mode="SameStep"), final_obs=None)
    collector = Collector(env, None, frames_per_batch=10, total_frames=50)
    norm, seen = RunningNorm("observation", shape=(3,)), []
    for batch in collector:
        norm.update(batch)
        known = batch["collector", "next_known"].reshape(-1)
        seen += [batch["observation"], batch["next", "observation"][known]]
    assert_counted(norm, torch.cat(seen).double().unique(dim=0))


def test_padding_is_left_out() -> None:
    norm = RunningNorm("observation", shape=(3,))
    for batch, _ in windows("SameStep"):
        padded = split_trajectories(batch)
        padded["observation"][~padded["collector", "mask"]] = math.nan
        padded["next", "observation"][~padded["collector", "mask"]] = math.nan
        norm.update(padded)
    assert_counted(norm, shown("SameStep"))


def test_frames_of_a_stack_are_places_of_one_observation() -> None:
    stacks = torch.randn(20, 4, 2)
    norm = RunningNorm("observation", shape=(4, 2))
    norm.update(TensorDict({"observation": stacks}, [20]))
    assert_counted(norm, stacks.double())


@given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), max_size=8), min_size=1, max_size=6))
@examples(60)
def test_parts_in_any_grouping_are_the_whole(parts: list[list[float]]) -> None:
    whole, in_turn, merged = (RunningNorm("x", shape=()) for _ in range(3))
    rows = torch.tensor([x for part in parts for x in part], dtype=torch.float32)
    whole.update(TensorDict({"x": rows}, rows.shape))
    for part in parts:
        column = torch.tensor(part, dtype=torch.float32)
        batch = TensorDict({"x": column}, column.shape)
        in_turn.update(batch)
        alone = RunningNorm("x", shape=())
        alone.update(batch)
        merged.merge(alone)
    scale = 1.0 + rows.double().square().mean().nan_to_num().item()
    for norm in (in_turn, merged):
        for name, one in norm.statistics.state_dict().items():
            torch.testing.assert_close(
                one, whole.statistics.state_dict()[name], rtol=1e-12, atol=1e-13 * scale
            )
    if len(rows):
        torch.testing.assert_close(whole.statistics.mean[0], rows.double().mean(), rtol=1e-12, atol=1e-9)
    else:
        assert (whole.statistics.mean, whole.statistics.var) == (0.0, 1.0)


@given(st.integers(0, 2**31), st.integers(1, 40), st.floats(0, 1))
@examples(40)
def test_what_a_device_does_without_a_wait_is_the_same(seed: int, rows: int, share: float) -> None:
    """The mask picks rows as an index does; those left out may be NaN."""
    generator = torch.Generator().manual_seed(seed)
    column = torch.randn(rows, 2, generator=generator)
    counted = torch.rand(rows, generator=generator) < share
    column[~counted] = math.nan
    by_mask, by_index = Moments((2,)), Moments((2,))
    by_mask.add(("x", column, counted))
    by_index.add(("x", column[counted], None))
    for one, other in zip(by_mask.buffers(), by_index.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_digits_far_from_zero_are_kept() -> None:
    """A thousand parts of a column with deviation 1 around 1e9, where a sum of squares has no digits left."""
    column = 1e9 + torch.randn(20_000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    norm = RunningNorm("x", shape=(1,), clip=None)
    for part in column.split(20):
        norm.update(TensorDict({"x": part}, part.shape[:1]))
    torch.testing.assert_close(norm.statistics.var, column.var(0, correction=0), rtol=1e-9, atol=0)
    out = norm(x=column)
    assert abs(out.mean().item()) < 1e-6 and abs(out.std().item() - 1) < 1e-4


def test_output_is_clipped_and_keeps_its_dtype() -> None:
    x = torch.tensor([[0.0], [2.0]])
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        norm = RunningNorm("x", shape=(1,), clip=0.5)
        norm.update(TensorDict({"x": x.to(dtype)}, [2]))
        out = norm(x=x.to(dtype))
        assert out.dtype is dtype and out.tolist() == [[-0.5], [0.5]]
    norm.clip = None
    assert norm(x=torch.tensor([[11.0]])).item() == pytest.approx(10.0)


def test_before_the_first_update_only_the_clip_acts() -> None:
    norm = RunningNorm(("agents", "pos"), shape=(2,))
    out = norm(TensorDict({"agents": {"pos": torch.tensor([[3.0, 30.0]])}}, [1]))
    assert out["agents", "pos_norm"].tolist() == [[3.0, 10.0]]


def test_losses_that_go_on_without_an_update_are_warned_of_once() -> None:
    rows = next(windows("SameStep"))[0]
    for learn in (None, "update", "load", "merge"):
        norm, other = (RunningNorm("observation", shape=(3,)) for _ in range(2))
        other.update(rows)
        norm.statistics.unlearned = 3
        for _ in range(9):
            with torch.no_grad():
                norm(rows.clone())  # as a collector acts
        assert norm.statistics.unlearned == 3
        if learn == "load":
            norm.load_state_dict(other.state_dict())
        elif learn is not None:
            getattr(norm, learn)(rows if learn == "update" else other)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(9):
                norm(rows.clone())
        expected = (
            [] if learn else ["RunningNorm('observation') was used in many losses and has counted nothing"]
        )
        assert [str(one.message)[: len(text)] for one, text in zip(told, expected, strict=True)] == expected


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
def test_integers_are_passed_on(dtype: torch.dtype) -> None:
    norm = RunningNorm("x", shape=(2,))
    rows = TensorDict({"x": torch.ones(3, 2, dtype=dtype)}, [3])
    norm.update(rows)
    assert norm(rows)["x_norm"] is rows["x"] and norm.statistics.count == 0


def test_eval_freezes() -> None:
    norm = RunningNorm("x", shape=())
    rows = TensorDict({"x": torch.arange(4.0)}, [4])
    norm.eval()
    norm.update(rows)
    assert norm.statistics.count == 0
    norm.train()
    norm.update(rows)
    norm(rows)
    assert norm.statistics.count == 4


def test_statistics_stay_float64_when_a_policy_changes_its_dtype() -> None:
    norm = RunningNorm("x", shape=(2,))
    norm.update(TensorDict({"x": torch.tensor([[1 / 3, 1e9]], dtype=torch.float64)}, [1]))
    before = norm.statistics.mean.clone()
    policy = nn.Sequential(norm, nn.Linear(2, 1)).half().float().to(torch.bfloat16).to("cpu")
    assert policy[1].weight.dtype is torch.bfloat16
    assert norm.statistics.mean.dtype is torch.float64 and norm.statistics.mean.equal(before)


class Same(nn.Module):
    """Passes its input on."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def acting(norm: RunningNorm) -> TensorDictSequential:
    """A policy that also stores what it has seen through the norm."""
    act = TensorDictModule(lambda x: x.sum(-1).long() % 5, ["observation_norm"], ["action"])
    return TensorDictSequential(norm, TensorDictModule(Same(), ["observation_norm"], ["seen"]), act)


def test_collectors_store_raw_rows_and_name_the_version_of_the_statistics() -> None:
    norm, by_version = RunningNorm("observation", shape=(3,)), []
    collector = Collector(
        make_scripted(SCRIPT), acting(norm), frames_per_batch=13, total_frames=65, track_policy_version=True
    )
    for batch in collector:
        by_version.append(copy.deepcopy(norm))
        assert batch.get("observation_norm", None) is None
        for row in range(len(batch)):  # some rows wait for the next batch, and are of the version before
            version = batch["collector", "policy_version"][row]
            out = by_version[version](observation=batch["observation"][row])
            torch.testing.assert_close(batch["seen"][row], out)
        norm.update(batch)
        collector.update_policy_weights_()
    assert collector.policy_version == 5


def test_estimators_and_losses_look_through_one_norm() -> None:
    """The values of a critic behind the norm are those of the bare critic on rows normalised by hand."""
    norm, linear = RunningNorm("observation", shape=(3,)), nn.Linear(3, 1)
    bare = TensorDictModule(linear, ["observation_norm"], ["state_value"])
    by_hand = TensorDictModule(linear, ["observation"], ["state_value"])
    for batch, final in windows("SameStep"):
        norm.update(batch, final=final)
        raw = batch["observation"].clone()
        for shifted in (False, True):
            gae = GAE(gamma=0.9, lmbda=0.8, value_network=TensorDictSequential(norm, bare), shifted=shifted)
            one = gae(batch.clone())["advantage"]
            other = batch.clone()
            for key in ("observation", ("next", "observation")):
                other[key] = norm(observation=other[key])
            two = GAE(gamma=0.9, lmbda=0.8, value_network=by_hand, shifted=shifted)(other)["advantage"]
            torch.testing.assert_close(one, two)
        assert batch["observation"].equal(raw)


def test_in_front_of_a_recurrent_module() -> None:
    norm = RunningNorm("observation", shape=(3,))
    gru = GRUModule(input_size=3, hidden_size=4, in_key="observation_norm", out_key="features")
    policy = TensorDictSequential(
        norm, gru, TensorDictModule(lambda x: x.argmax(-1), ["features"], ["action"])
    )
    for batch in Collector(make_scripted(SCRIPT), policy, frames_per_batch=20, total_frames=40):
        norm.update(batch)
        critic = TensorDictSequential(
            norm, gru, TensorDictModule(nn.Linear(4, 1), ["features"], ["state_value"])
        )
        assert GAE(gamma=0.9, lmbda=0.8, value_network=critic)(batch)["advantage"].isfinite().all()


def test_a_run_goes_on_bit_for_bit(tmp_path: Any) -> None:
    def new() -> tuple[RunningNorm, nn.Module, Any]:
        torch.manual_seed(0)
        norm = RunningNorm("observation", shape=(3,))
        policy = TensorDictSequential(norm, TensorDictModule(nn.Linear(3, 1), ["observation_norm"], ["out"]))
        return norm, policy, torch.optim.Adam(policy.parameters())

    def train(batch: TensorDictBase, norm: RunningNorm, policy: Any, optimizer: Any) -> None:
        norm.update(batch)
        policy(batch.clone())["out"].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    batches = [batch for batch, _ in windows("SameStep")]
    norm, policy, optimizer = new()
    for batch in batches[:3]:
        train(batch, norm, policy, optimizer)
    Checkpoint(tmp_path, policy=policy, optimizer=optimizer).save()
    norm2, policy2, optimizer2 = new()
    Checkpoint(tmp_path, policy=policy2, optimizer=optimizer2).load()
    for batch in batches[3:]:
        train(batch, norm, policy, optimizer)
        train(batch, norm2, policy2, optimizer2)
    state, other = policy.state_dict(), policy2.state_dict()
    assert state.keys() == other.keys() and all(state[key].equal(other[key]) for key in state)
    assert "module.0.statistics.mean" in state and norm.statistics.count > 50


def test_two_entries_may_share_statistics() -> None:
    """As for TorchRL's losses, which copy what is in a critic: then samples are normalised in front of them."""
    norm, following = RunningNorm("observation", shape=(3,)), RunningNorm(("next", "observation"), shape=(3,))
    following.statistics = norm.statistics
    for batch, _ in windows("SameStep"):
        norm.update(batch)
        out = following(norm(batch))
        expected = norm(observation=batch["next", "observation"])
        torch.testing.assert_close(out["next", "observation_norm"], expected)


def test_copies_have_statistics_of_their_own() -> None:
    norm = RunningNorm("x", shape=())
    other = copy.deepcopy(norm)
    norm.update(TensorDict({"x": torch.ones(2)}, [2]))
    assert (norm.statistics.count, other.statistics.count) == (2, 0)


@pytest.mark.parametrize("options", [{}, {"compact_obs": True}, {"delta": True}])
def test_on_the_meta_device_where_no_value_can_be_read(options: dict[str, Any]) -> None:
    norm = RunningNorm("observation", shape=(3,), device="meta")
    batch, final = next(windows("SameStep", **options))
    batch = batch.to("meta")
    norm.update(batch, final=None if final is None else final.to("meta"))
    assert norm(batch)["observation_norm"].shape == (10, 3) and norm.statistics.mean.device.type == "meta"


@pytest.mark.parametrize("shape", [(), (3,)])
def test_torch_compile_makes_one_graph(shape: tuple[int, ...]) -> None:
    norm, eager = (RunningNorm("x", shape=shape) for _ in range(2))

    def run(rows: Tensor) -> Tensor:
        norm.update(TensorDict({"x": rows}, [10]))
        out: Tensor = norm(TensorDict({"x": rows}, [10]))["x_norm"]
        return out

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        rows = torch.randn(10, *shape, generator=torch.Generator().manual_seed(seed))
        eager.update(TensorDict({"x": rows}, [10]))
        torch.testing.assert_close(compiled(rows), eager(x=rows))
    assert norm.statistics.count == 30


def with_rows(**changes: Any) -> TensorDict:
    batch = next(windows("SameStep"))[0]
    for key, value in changes.items():
        batch[("next", "observation") if key == "next" else key][4, 1] = value
    return batch


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused_and_leave_the_statistics(bad: float) -> None:
    norm = RunningNorm("observation", shape=(3,))
    norm.update(next(windows("SameStep"))[0])
    before = copy.deepcopy(norm.state_dict())
    with pytest.raises(ValueError, match=rf"batch\['observation'\] must be finite, got {bad} in row 4 of 10"):
        norm.update(with_rows(observation=bad))
    ends = next(windows("SameStep"))[0]
    ends["next", "observation"][:] = bad
    with pytest.raises(ValueError, match=r"the next observations, .* must be finite, got"):
        norm.update(ends)
    assert all(before[key].equal(value) for key, value in norm.state_dict().items())


def test_other_input_that_is_refused() -> None:
    norm, batch = RunningNorm("observation", shape=(4,)), next(windows("SameStep"))[0]
    shapes = r"batch\['observation'\] must have shape .*4\), the shape of RunningNorm\(shape=\(4,\)\), got \(10, 3\)"
    with pytest.raises(ValueError, match=shapes):
        norm.update(batch)
    with pytest.raises(ValueError, match=shapes):
        norm(batch)
    norm = RunningNorm("observation", shape=(3,))
    with pytest.raises(ValueError, match="must have shape"):
        norm.update(TensorDict({"observation": torch.zeros(10, 4, 3)}, [10]))
    with pytest.raises(ValueError, match=r"update\(batch, final=collector.final\)"):
        norm.update(next(windows("SameStep", compact_obs=True))[0])
    _, final = next(windows("SameStep", 30, compact_obs=True))
    with pytest.raises(ValueError, match="must ascend within the 10 rows"):
        norm.update(batch, final=final)
    with pytest.raises(KeyError, match="batch has no entry 'pos'"):
        RunningNorm("pos", shape=(3,)).update(batch)
    with pytest.raises(ValueError, match="other must be for shape"):
        norm.merge(RunningNorm("observation", shape=()))
    with pytest.raises(ValueError, match="float64 to hold its squares"):
        huge = torch.tensor([[1e300], [-1e300]], dtype=torch.float64).expand(2, 3)
        norm.update(TensorDict({"observation": huge}, [2]))
    for wrong in ({"clip": 0.0}, {"epsilon": 0.0}, {"epsilon": math.inf}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            RunningNorm("observation", shape=(3,), **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("gradients", [True, False])
def test_a_number_far_from_zero_keeps_its_digits(shape: tuple[int, ...], gradients: bool) -> None:
    """The difference to the mean is taken in float64, also where a row is one number."""
    norm = RunningNorm("x", shape=shape, clip=None)
    column = (1e6 + torch.arange(4.0) / 4).reshape(4, *shape)
    norm.update(TensorDict({"x": torch.cat([column.double(), column.double() + 0.07])}, [8]))
    statistics = norm.statistics
    expected = (column.double() - statistics.mean) / (statistics.var + 1e-8).sqrt()
    with torch.set_grad_enabled(gradients):
        out = norm(TensorDict({"x": column}, [4]))["x_norm"]
    torch.testing.assert_close(out, expected.float(), rtol=1e-6, atol=1e-7)
