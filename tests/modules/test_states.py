"""What sequential steps recorded, recurrent passes over slices compute again: through rings, windows and resets."""

from typing import Any

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Categorical

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.estimators import GAE, ClipPPOLoss
from flatroll.layout import run_ends
from flatroll.modules import (
    BurnIn,
    DeltaNetModule,
    FFMModule,
    GRUModule,
    LinearRecurrentModule,
    LRUModule,
    LSTMModule,
    MinGRUModule,
    S6Module,
    set_recurrent_mode,
)
from flatroll.rollouts import Collector
from flatroll.wrappers.testing import Script, ScriptedTorchEnv, ScriptedVectorEnv

KINDS = [GRUModule, LSTMModule]
MODES = ["NextStep", "SameStep", "Disabled", "torch"]
LENGTHS = [[9, 1, 4], [2, 7], [30]]


def make(which: str, lengths: Any) -> Any:
    own = Script(len(lengths), lengths=lengths)
    return ScriptedTorchEnv(own) if which == "torch" else ScriptedVectorEnv(own, autoreset_mode=which)


def actor(kind: Any, layers: int = 1) -> Any:
    torch.manual_seed(0)
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), ["observation"], ["embedding"]),
        kind(4, 6, layers, in_key="embedding", out_key="features"),
        TensorDictModule(nn.Linear(6, 5), in_keys=["features"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
        ),
    )


def states_of(policy: Any) -> list[Any]:
    return list(policy[1].make_tensordict_primer().defaults)


def check_recomputed(policy: Any, sample: TensorDict) -> None:
    """Features, log-probabilities, and so PPO's ratio, at every row, to 1e-5."""
    with set_recurrent_mode("recurrent"), torch.no_grad():
        dist = policy.get_dist(again := sample.exclude("features", "logits", "embedding").clone())
    torch.testing.assert_close(again["features"], sample["features"], atol=1e-5, rtol=0)
    log_prob = dist.log_prob(sample["action"])
    torch.testing.assert_close(log_prob, sample["action_log_prob"], atol=1e-5, rtol=0)
    ratio = (log_prob - sample["action_log_prob"]).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)


@examples(12, derandomize=True)
@given(
    lengths=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=4),
    which=st.sampled_from(MODES),
    frames=st.integers(7, 30),
    capacity=st.integers(30, 80),
    length=st.integers(1, 9),
    stride=st.sampled_from([1, 2, 5]),
    kind=st.sampled_from(KINDS),
    layers=st.sampled_from([1, 2]),
    compact=st.booleans(),
    burn_in=st.sampled_from([0, 0, 3]),
)
def test_random_slices_of_a_ring_that_wraps(
    lengths: Any,
    which: str,
    frames: int,
    capacity: int,
    length: int,
    stride: int,
    kind: Any,
    layers: int,
    compact: bool,
    burn_in: int,
) -> None:
    """Windows cut trajectories, the ring drops their heads, slices begin and end anywhere that has a state.

    With frozen weights burnt in states are those that the rollout had there.
    """
    policy = actor(kind, layers)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(
            capacity, compact_obs=compact, sparse=states_of(policy) if stride > 1 else ()
        ),
        sampler=SliceSampler(slice_len=length, fill=False),
        generator=torch.Generator().manual_seed(0),
    )
    collector = Collector(
        make(which, lengths),
        policy,
        frames_per_batch=frames,
        total_frames=-(-3 * capacity // frames) * frames,
        compact_obs=compact,
        state_stride=stride,
        replay_buffer=buffer,
    )
    for number, _ in enumerate(collector):
        if number % 4 == 3 or collector.frames > 2 * capacity:
            sample = BurnIn([policy[0], policy[1]], burn_in)(buffer.sample(6 * length))
            check_recomputed(policy, sample)


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_ppo_starts_at_ratio_one(kind: Any, stride: int) -> None:
    """The loss itself says so: no divergence, nothing clipped, and the objective is the mean advantage."""
    policy = actor(kind)
    sampler = SliceSampler(slice_len=8, fill=True)
    buffer = ReplayBuffer(storage=LazyTensorStorage(200), sampler=sampler, batch_size=64)
    collector = Collector(
        make("SameStep", LENGTHS), policy, frames_per_batch=50, total_frames=400, state_stride=stride
    )
    loss = ClipPPOLoss(policy, TensorDictModule(nn.Linear(6, 1), ["features"], ["state_value"]))
    for batch in collector:
        batch["advantage"], batch["value_target"] = torch.randn(2, 50, 1)
        buffer.extend(batch)
        sample = buffer.sample()
        losses = loss(sample)
        assert abs(float(losses["kl_approx"])) < 1e-5
        assert float(losses["clip_fraction"]) == 0
        torch.testing.assert_close(
            losses["loss_objective"], -sample["advantage"].mean(), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("kind", KINDS)
def test_with_frozen_weights_all_ways_to_start_a_slice_agree(kind: Any) -> None:
    """Stored states, and states burnt in from the beginning of the episode, are those of the full unroll."""
    policy = actor(kind)
    env = make("SameStep", [[30]])
    batch = next(Collector(env, policy, frames_per_batch=30))
    piece = batch[12:].clone()
    piece["is_init"][0] = True
    check_recomputed(policy, piece)
    burnt = BurnIn([policy[0], policy[1]], 12)(batch.clone())
    for key in states_of(policy):
        torch.testing.assert_close(burnt[key][0], batch[key][12], atol=1e-5, rtol=0)
    check_recomputed(policy, burnt)


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_from_zeros_is_not_the_stored_one(kind: Any) -> None:
    """The check above can fail: without its state a slice computes something else."""
    policy = actor(kind)
    batch = next(Collector(make("SameStep", [[30]]), policy, frames_per_batch=30))
    piece = batch[12:].clone()
    piece["is_init"][0] = True
    for key in states_of(policy):
        piece[key].zero_()
    with pytest.raises(AssertionError):
        check_recomputed(policy, piece)


def test_a_primer_that_starts_elsewhere_is_the_same_in_rollout_and_training() -> None:
    """Rollouts and training begin with the same state."""
    policy = actor(GRUModule)
    gru = policy[1]
    gru.make_tensordict_primer = lambda: type("P", (), {"defaults": {"recurrent_state": torch.ones(1, 6)}})()
    batch = next(Collector(make("SameStep", LENGTHS), policy, frames_per_batch=40))
    check_recomputed(policy, batch)


@pytest.mark.parametrize("kind", KINDS)
def test_runs_that_begin_without_their_state_are_refused(kind: Any) -> None:
    """Where only every 4th row has its state, nothing is computed from zeros in silence."""
    policy = actor(kind)
    collector = Collector(make("SameStep", [[30]]), policy, frames_per_batch=30, state_stride=4)
    batch = next(collector)
    check_recomputed(policy, batch)
    for first, fine in ((12, True), (13, False)):
        piece = batch[first:].clone()
        piece["is_init"][0] = True
        if fine:
            check_recomputed(policy, piece)
            continue
        with pytest.raises(ValueError, match="1 of the runs begin at rows that do not store their state"):
            check_recomputed(policy, piece)
    burnt = BurnIn([policy[0], policy[1]], 3)(batch[12:].clone())
    check_recomputed(policy, burnt)  # its first row has a new one


def test_padded_slices_begin_where_the_state_is() -> None:
    policy = actor(GRUModule)
    buffer = ReplayBuffer(storage=LazyTensorStorage(60), sampler=SliceSampler(slice_len=7, pad_output=True))
    collector = Collector(
        make("SameStep", LENGTHS),
        policy,
        frames_per_batch=60,
        total_frames=60,
        state_stride=4,
        replay_buffer=buffer,
    )
    assert list(collector) == [None]
    sample = buffer.sample(70)
    with set_recurrent_mode("recurrent"), torch.no_grad():
        again = policy(sample.clone())
    real = sample["collector", "mask"]
    torch.testing.assert_close(again["features"][real], sample["features"][real], atol=1e-5, rtol=0)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_value_of_a_cut_is_the_value_that_the_next_window_begins_with(
    kind: Any, stride: int, compact: bool
) -> None:
    """A batch need not hold the states after its cuts: the estimator's one pass goes on to the next observation."""
    policy = actor(kind, 2)
    head = TensorDictModule(nn.Linear(6, 1), ["features"], ["state_value"])
    critic = TensorDictSequential(policy[0], policy[1], head)
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=critic)
    options: Any = {"frames_per_batch": 21, "compact_obs": compact, "state_stride": stride}
    collector = Collector(make("SameStep", LENGTHS), policy, total_frames=210, **options)
    cuts: dict[int, torch.Tensor] = {}
    met = 0
    for batch in collector:
        gae(batch, final=collector.final)
        again = batch.clone()
        with torch.no_grad(), set_recurrent_mode("recurrent"):
            value = critic(again)["state_value"]
        torch.testing.assert_close(batch["state_value"], value, atol=1e-5, rtol=0)
        for row in range(len(batch)):
            number = int(batch["collector", "traj_ids"][row])
            if number in cuts:
                torch.testing.assert_close(cuts.pop(number), value[row], atol=1e-5, rtol=0)
                met += 1
        for row in run_ends(batch).nonzero().flatten().tolist():
            if not batch["next", "done"][row]:
                cuts[int(batch["collector", "traj_ids"][row])] = batch["next", "state_value"][row]
    assert met > 15


@pytest.mark.parametrize("compact", [False, True])
def test_advantages_need_no_other_states(compact: bool) -> None:
    """GAE with a recurrent critic reads the states of first rows only, so few states give the very same numbers."""
    policy = actor(LSTMModule)
    head = TensorDictModule(nn.Linear(6, 1), ["features"], ["state_value"])
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=TensorDictSequential(policy[0], policy[1], head))
    both = []
    for stride in (1, 5):
        torch.manual_seed(1)
        options: Any = {"frames_per_batch": 40, "compact_obs": compact, "state_stride": stride}
        collector = Collector(make("SameStep", LENGTHS), policy, **options)
        next(collector)
        batch = next(collector)  # runs that go on from the window before
        both.append(gae(batch, final=collector.final)["advantage"])
    assert torch.equal(*both)


@pytest.mark.parametrize(
    "kind",
    [
        GRUModule,
        LSTMModule,
        MinGRUModule,
        LinearRecurrentModule,
        LRUModule,
        S6Module,
        FFMModule,
        DeltaNetModule,
    ],
)
def test_a_run_starts_from_whatever_its_first_row_stores(kind: Any) -> None:
    """A loop of one's own that carries the state across resets: acting zeroes it, training reads what was stored."""
    torch.manual_seed(0)
    module = kind(3, 4, in_key="observation", out_key="features")
    states = module.make_tensordict_primer().defaults
    lengths = [3, 2]  # two episodes of one env
    observation = torch.randn(5, 3)
    is_init = torch.tensor([[True], [False], [False], [True], [False]])
    # not zero, not even before the first episode
    carried = {key: torch.randn_like(zero).unsqueeze(0) for key, zero in states.items()}
    before = []
    acted = []
    for t in range(sum(lengths)):
        step = TensorDict(
            {"observation": observation[t : t + 1], "is_init": is_init[t : t + 1], **carried}, [1]
        )
        before.append(step.clone())
        with torch.no_grad():
            acted.append(module(step))
        carried = {key: step["next", key] for key in states}

    # The module writes the state that it used back to the row, zeros at the start of an episode.
    rows = torch.cat(acted)
    assert all(not rows[key][[0, 3]].any() and rows[key][[1, 2, 4]].any() for key in states)
    with set_recurrent_mode(True), torch.no_grad():
        again = module(rows.select("observation", "is_init", *states))["features"]
    torch.testing.assert_close(again, rows["features"], atol=1e-5, rtol=0)

    # Rows that keep what the loop carried start each run from it, as one-row steps from that state do.
    kept = torch.cat(before)
    with set_recurrent_mode(True), torch.no_grad():
        from_kept = module(kept.clone())["features"]
        first, _ = module.step(observation[3:4], tuple(kept[key][3:4] for key in states))
    torch.testing.assert_close(from_kept[3:4], first, atol=1e-5, rtol=0)
    assert (from_kept[[0, 3]] - rows["features"][[0, 3]]).abs().amax(1).min() > 1e-3

    # state="zero" reads no state.
    zero = kind(3, 4, in_key="observation", out_key="features", state="zero")
    zero.load_state_dict(module.state_dict())
    with set_recurrent_mode(True), torch.no_grad():
        from_zero = zero(kept.clone())["features"]
    torch.testing.assert_close(from_zero, rows["features"], atol=1e-5, rtol=0)
