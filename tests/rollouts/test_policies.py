"""Policies of every kind: what they are given, what of theirs is stored, and how random actions are drawn."""

import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    set_composite_lp_aggregate,
)
from tensordict.nn.probabilistic import interaction_type
from torch import nn
from torch.distributions import Categorical, Independent, Normal

from flatroll.estimators import ClipPPOLoss
from flatroll.layout import run_ends
from flatroll.modules import GRUModule, LSTMModule, set_recurrent_mode
from flatroll.rollouts import Collector, evaluate, rollout
from flatroll.rollouts.random_actions import RandomActions
from flatroll.wrappers import CompactObs, StepCounter, as_vector_env
from flatroll.wrappers.testing import Script, ScriptedTorchEnv, ScriptedVectorEnv

LENGTHS = [[3, 1, 4], [2, 5], [6]]
MODES = ["NextStep", "SameStep", "Disabled", "torch", "torch NextStep"]


def make(which="SameStep", **options):
    own = Script(3, lengths=LENGTHS, **options)
    if which == "torch":
        return ScriptedTorchEnv(own)
    if which == "torch NextStep":
        return as_vector_env(ScriptedVectorEnv(own), framework="torch")
    return ScriptedVectorEnv(own, autoreset_mode=which)


def categorical():
    torch.manual_seed(0)
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(3, 5), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
        ),
    )


def gaussian():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"],
            ["action"],
            distribution_class=lambda loc, scale: Independent(Normal(loc, scale), 1),
            return_log_prob=True,
        ),
    )


# --- tensordict modules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", MODES)
def test_log_probabilities_of_a_categorical_policy_belong_to_the_stored_actions(which):
    policy = categorical()
    batch = torch.cat(list(Collector(make(which), policy, frames_per_batch=20, total_frames=60)))
    assert batch["action"].shape == batch["action_log_prob"].shape == (60,)
    logits = policy[0].module(batch["observation"])
    torch.testing.assert_close(batch["logits"], logits)
    torch.testing.assert_close(batch["action_log_prob"], Categorical(logits=logits).log_prob(batch["action"]))
    assert not any(leaf.requires_grad for leaf in batch.values(True, True))


@pytest.mark.filterwarnings("ignore:actions must lie in")  # as a Gaussian's may
@pytest.mark.parametrize("which", MODES)
def test_log_probabilities_of_a_gaussian_policy_belong_to_the_stored_actions(which):
    policy = gaussian()
    batch = torch.cat(
        list(Collector(make(which, action="box"), policy, frames_per_batch=20, total_frames=60))
    )
    loc, scale = policy[0].module(batch["observation"])
    expected = Normal(loc, scale).log_prob(batch["action"]).sum(-1)
    torch.testing.assert_close(batch["action_log_prob"], expected)


def test_policies_sample_unless_told_otherwise():
    obs = torch.tensor([0.0, 0.0, 0.0])
    chances = categorical()[0].module(obs).softmax(-1)
    own = Script(200, lengths=1)  # env i shows (i, episode, 0): only the bias counts with zeroed weights
    policy = categorical()
    with torch.no_grad():
        policy[0].module.weight.zero_()
    torch.manual_seed(0)
    drawn = next(Collector(ScriptedVectorEnv(own, autoreset_mode="SameStep"), policy, frames_per_batch=4000))
    shares = drawn["action"].bincount(minlength=5) / 4000
    assert (shares - chances).abs().max() < 4 * (0.25 / 4000) ** 0.5
    best = next(
        Collector(
            ScriptedVectorEnv(own, autoreset_mode="SameStep"),
            policy,
            frames_per_batch=4000,
            exploration_type=InteractionType.DETERMINISTIC,
        )
    )
    assert (best["action"] == chances.argmax()).all()
    same = rollout(make(), policy, 5, exploration_type=InteractionType.DETERMINISTIC)
    assert (same["action"] == chances.argmax()).all()


def test_threads_act_each_in_its_own_way_and_leave_none_behind():
    """tensordict has one interaction type for all threads; windows that overlap must not use one another's."""
    begun, seen = threading.Barrier(3), {kind: set() for kind in InteractionType}

    def act(kind):
        def policy(obs):
            if not seen[kind]:
                seen[kind].add(interaction_type())  # all windows are open before one of them acts on
                with suppress(threading.BrokenBarrierError):
                    begun.wait(0.2)
            seen[kind].add(interaction_type())
            time.sleep(1e-4)
            seen[kind].add(interaction_type())
            return torch.zeros(3, dtype=torch.int64)

        if kind is InteractionType.MODE:
            return evaluate(make(), policy, episodes=30, exploration_type=kind)
        return rollout(make(), policy, 50, exploration_type=kind)

    kinds = [InteractionType.RANDOM, InteractionType.DETERMINISTIC, InteractionType.MODE]
    before = interaction_type()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(act, kinds))
    assert [seen[kind] for kind in kinds] == [{kind} for kind in kinds]
    assert interaction_type() is before


def test_a_policy_may_roll_out_by_itself():
    def plans(obs):
        rollout(make(), lambda obs: torch.zeros(3, dtype=torch.int64), 2, exploration_type="mode")
        kinds.append(interaction_type())
        return torch.zeros(3, dtype=torch.int64)

    kinds = []
    rollout(make(), plans, 4)
    assert kinds == [InteractionType.RANDOM] * len(kinds)


def test_a_fork_acts_though_another_thread_was_acting():
    go, inside = threading.Event(), threading.Event()

    def waits(obs):
        inside.set()
        go.wait(600)
        return torch.zeros(3, dtype=torch.int64)

    thread = threading.Thread(target=rollout, args=(make(), waits, 1))
    thread.start()
    inside.wait(600)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of a fork beside threads
        pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            rollout(make(), lambda obs: torch.zeros(3, dtype=torch.int64), 2)
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    go.set()
    thread.join()


def test_a_policy_runs_without_gradients_in_the_mode_it_is_in():
    seen = []

    class Policy(nn.Module):
        def forward(self, obs):
            seen.append((torch.is_grad_enabled(), self.training, self.dropout.training))
            return torch.zeros(3, dtype=torch.int64)

        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout()

    for training in (True, False):
        seen.clear()
        policy = Policy().train(training)
        policy.dropout.train(not training)
        grads = []
        collector = Collector(
            make(),
            policy,
            frames_per_batch=6,
            pre_collect_hook=lambda grads=grads: grads.append(torch.is_grad_enabled()),
            post_collect_hook=lambda batch, grads=grads: grads.append(torch.is_grad_enabled()),
        )
        next(collector)
        assert seen == [(False, training, not training)] * 2
        assert grads == [True, True]
        assert (policy.training, policy.dropout.training) == (training, not training)


def test_a_module_sees_observations_and_markers():
    seen = []

    class Policy:
        in_keys = ("observation",)
        out_keys = ("action",)

        def __call__(self, td):
            seen.append(td.clone())
            td["action"] = torch.zeros(3, dtype=torch.int64)
            td["left out"] = torch.zeros(3)
            return td

    batch = next(Collector(StepCounter(make()), Policy(), frames_per_batch=9, seed=0))
    shapes = {key: tuple(seen[0][key].shape) for key in seen[0].keys(True, True)}
    assert shapes == {
        "observation": (3, 3),
        "is_init": (3, 1),
        "step_count": (3, 1),
        ("collector", "traj_ids"): (3,),
    }
    assert torch.equal(torch.stack([td["observation"] for td in seen], 1).flatten(0, 1), batch["observation"])
    assert torch.equal(torch.stack([td["is_init"] for td in seen], 1).flatten(0, 1), batch["is_init"])
    assert "left out" not in batch


def test_only_named_outputs_are_stored():
    module = TensorDictModule(
        lambda obs: (torch.zeros(3, dtype=torch.int64), obs[:, :1], obs.sum(-1), obs),
        in_keys=["observation"],
        out_keys=["action", "_scratch", ("aux", "sum"), ("aux", "_private")],
    )
    batch = next(Collector(make(), module, frames_per_batch=6))
    assert set(batch.keys(True, True)) & {"_scratch", ("aux", "sum"), ("aux", "_private")} == {("aux", "sum")}
    assert torch.equal(batch["aux", "sum"], batch["observation"].sum(-1))


def test_a_module_may_return_another_tensordict():
    class Policy:
        in_keys = ("observation",)
        out_keys = ("action", "value")

        def __call__(self, td):
            out = td.select("observation")
            out["action"] = torch.full((3,), 2)
            out["value"] = td["observation"].sum(-1)
            return out.exclude("observation")

    batch = next(Collector(make(), Policy(), frames_per_batch=6))
    assert torch.equal(batch["value"], batch["observation"].sum(-1))
    assert (batch["action"] == 2).all()


def test_an_output_that_is_missing_later_is_an_error():
    """Its column would show what an earlier batch has left there."""

    class Policy:
        in_keys = ("observation",)
        out_keys = ("action", "value")
        calls = 0

        def __call__(self, td):
            self.calls += 1
            td["action"] = torch.zeros(3, dtype=torch.int64)
            if self.calls < 3:
                td["value"] = torch.zeros(3)
            return td

    collector = Collector(make(), Policy(), frames_per_batch=3)
    next(collector)
    next(collector)
    with pytest.raises(KeyError, match="value"):
        next(collector)


# --- callables ----------------------------------------------------------------------------------------------


class ArgMax(nn.Module):
    def forward(self, x):
        return x.argmax(-1)


def test_callables_get_the_observation_and_give_the_action():
    def numpy(obs):
        return (obs[:, 2] % 5).long().numpy()

    def listing(obs):
        return (obs[:, 2] % 5).long().tolist()

    for policy in (numpy, listing, lambda obs: obs[:, 2].int() % 5, nn.Sequential(OneHot(), ArgMax())):
        for which in MODES:
            batch = next(Collector(make(which), policy, frames_per_batch=20, seed=0))
            assert torch.equal(batch["action"], (batch["observation"][:, 2] % 5).long())


class OneHot(nn.Module):
    def forward(self, obs):
        return nn.functional.one_hot(obs[:, 2].long() % 5, 5)


def test_callables_get_dicts_and_tuples_of_tensors():
    def from_dict(obs):
        assert obs["critic"]["image"].shape == (3, 3, 2, 2)
        return obs["policy"][:, 2].long() % 5

    def from_tuple(obs):
        vector, code = obs
        assert isinstance(obs, tuple) and code.shape == (3,)
        return vector[:, 2].long() % 5

    for which in MODES:
        batch = next(Collector(make(which, obs="dict"), from_dict, frames_per_batch=10))
        assert torch.equal(batch["action"], batch["policy"][:, 2].long() % 5)
        batch = next(Collector(make(which, obs="tuple"), from_tuple, frames_per_batch=10))
        assert torch.equal(batch["action"], batch["observation", "0"][:, 2].long() % 5)


def test_callables_give_dicts_for_dict_spaces():
    def policy(obs):
        return {"move": torch.full((3, 2), 0.5), "press": torch.ones(3, dtype=torch.int64)}

    batch = next(Collector(make(action="dict"), policy, frames_per_batch=6))
    assert (batch["action", "move"] == 0.5).all() and (batch["action", "press"] == 1).all()
    assert batch["action", "move"].shape == (6, 2)


# --- recurrent policies -------------------------------------------------------------------------------------


class Counter(nn.Module):
    """Its state counts the steps since the episode's start, from 7."""

    in_keys = ("observation", "state", "is_init")
    out_keys = ("action", ("next", "state"))
    asked = 0

    def forward(self, td):
        td["next", "state"] = td["state"] + 1
        td["action"] = torch.zeros(td.shape, dtype=torch.int64)
        return td

    def make_tensordict_primer(self):
        self.asked += 1
        return SimpleNamespace(defaults={"state": torch.full((1,), 7.0)})


@pytest.mark.parametrize("frames", [1, 4, 7, 30])
@pytest.mark.parametrize("which", MODES)
def test_states_start_anew_and_go_on_over_batches(which, frames):
    """A row on which a NEXT_STEP env only resets must not count."""
    collector = Collector(make(which), Counter(), frames_per_batch=frames, total_frames=60 // frames * frames)
    batch = torch.cat(list(collector))
    time = batch["observation"][:, 2:]
    assert torch.equal(batch["state"], 7 + time)
    assert torch.equal(batch["next", "state"], 8 + time)


@pytest.mark.parametrize("which", MODES)
def test_a_reset_before_a_batch_restarts_the_states(which):
    collector = Collector(
        make(which), Counter(), frames_per_batch=7, total_frames=70, reset_at_each_iter=True
    )
    batch = torch.cat(list(collector))
    assert torch.equal(batch["state"], 7 + batch["observation"][:, 2:])


def test_states_are_dropped_where_they_repeat():
    batch = next(Collector(CompactObs(make()), Counter(), frames_per_batch=10))
    assert "state" in batch and ("next", "state") not in batch.keys(True, True)
    joined = next(Collector(make(), Counter(), frames_per_batch=10, compact_obs=True, trajs_per_batch=2))
    assert "state" in joined and ("next", "state") not in joined.keys(True, True)


def test_one_policy_may_be_asked_often():
    policy = Counter()
    expected = next(Collector(make(), policy, frames_per_batch=10, seed=0))
    twice = TensorDictSequential(policy, TensorDictModule(lambda s: s, in_keys=["state"], out_keys=["copy"]))
    for _ in range(2):
        again = next(Collector(make(), twice, frames_per_batch=10, seed=0))
        assert (again.exclude("copy") == expected).all()
    for wired in (None, True):
        again = next(
            Collector(make(), policy, frames_per_batch=10, seed=0, auto_register_policy_transforms=wired)
        )
        assert (again == expected).all()
    assert policy.asked == 5


def test_states_may_be_left_to_the_policy():
    seen = []

    class Own(Counter):
        def forward(self, td):
            seen.append(set(td.keys()))
            td["state"] = torch.full((3, 1), 7.0)
            return super().forward(td)

    batch = next(Collector(make(), Own(), frames_per_batch=9, auto_register_policy_transforms=False))
    assert all("state" not in keys for keys in seen)
    assert "state" not in batch
    assert (batch["next", "state"] == 8).all()


@pytest.mark.parametrize("which", ["NextStep", "SameStep", "torch"])
@pytest.mark.parametrize("kind", [GRUModule, LSTMModule])
def test_training_on_a_batch_computes_what_was_collected(kind, which):
    """The stored states at the run starts are enough, with ids and without; no key argument is needed."""
    torch.manual_seed(0)
    net = kind(3, 4, in_key="observation", out_key="features")
    policy = TensorDictSequential(
        net,
        TensorDictModule(nn.Sequential(nn.Linear(4, 5), ArgMax()), in_keys=["features"], out_keys=["action"]),
    )
    options = {"frames_per_batch": 11, "total_frames": 55, "seed": 0}
    batches = list(Collector(make(which), policy, **options))
    for batch in [*batches, *Collector(make(which), policy, **options, track_traj_ids=False)]:
        with set_recurrent_mode(True), torch.no_grad():
            again = net(batch.clone().exclude("features"))
        torch.testing.assert_close(again["features"], batch["features"])
    rows = torch.cat(batches)
    for key in net.make_tensordict_primer().defaults:
        state, after = rows[key], rows["next", key]
        first = rows["is_init"].squeeze(-1)
        assert (state[first] == 0).all()
        for i in rows["collector", "traj_ids"].unique():
            own = rows["collector", "traj_ids"] == i
            assert torch.equal(state[own][1:], after[own][:-1])


def test_states_of_an_lstm_stand_with_every_row():
    policy = TensorDictSequential(
        LSTMModule(3, 4, in_key="observation", out_key="features"),
        TensorDictModule(lambda x: x.argmax(-1), in_keys=["features"], out_keys=["action"]),
    )
    batch = next(Collector(make(), policy, frames_per_batch=10))
    for key in policy[0].make_tensordict_primer().defaults:
        assert batch[key].shape == batch["next", key].shape == (10, 1, 4)
        assert torch.equal(
            batch[key][1:][~run_ends(batch)[:-1]], batch["next", key][:-1][~run_ends(batch)[:-1]]
        )


# --- random actions -----------------------------------------------------------------------------------------


def draws(space, steps=64, num_envs=200, seed=0):
    policy = RandomActions(space, num_envs, torch.device("cpu"), seed)
    return torch.stack([policy() for _ in range(steps)]).flatten(0, 1)


def assert_uniform(values, low, high):
    """Every whole number from low to high comes equally often, within 4.5 standard deviations."""
    n = values.numel()
    counts = (values.long() - low).flatten().bincount(minlength=high - low + 1)
    assert len(counts) == high - low + 1
    p = 1 / len(counts)
    assert ((counts - n * p).abs() < 4.5 * (n * p * (1 - p)) ** 0.5).all()


def test_discrete_actions_are_uniform():
    assert_uniform(draws(spaces.Discrete(5, start=-2)), -2, 2)
    both = draws(spaces.MultiDiscrete([3, 10], start=[0, 5]))
    assert_uniform(both[:, 0], 0, 2)
    assert_uniform(both[:, 1], 5, 14)
    assert_uniform(draws(spaces.MultiBinary(4)), 0, 1)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64])
def test_integer_boxes_are_uniform_with_both_ends(dtype):
    drawn = draws(spaces.Box(3, 6, (2,), dtype))
    assert drawn.dtype is torch.from_numpy(np.zeros(0, dtype)).dtype
    assert_uniform(drawn, 3, 6)


def test_the_widest_boxes():
    assert_uniform(draws(spaces.Box(0, 255, (8,), np.uint8)), 0, 255)
    assert_uniform(draws(spaces.Box(-128, 127, (8,), np.int8)), -128, 127)
    for dtype in (np.float32, np.float64):
        top = np.finfo(dtype).max
        wide = draws(spaces.Box(-top, top, (2,), dtype))
        assert wide.isfinite().all() and (wide > top / 2).any() and (wide < -top / 2).any()
    whole = draws(spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (2,), np.int64))
    assert (whole > 2**62).any() and (whole < -(2**62)).any()


def test_boxes_are_uniform_between_two_bounds_and_beyond_fewer_as_gymnasium_draws_them():
    low = np.array([-1, 2, -np.inf, -np.inf], np.float32)
    high = np.array([3, np.inf, -2, np.inf], np.float32)
    space = spaces.Box(low, high)
    drawn = draws(space)
    assert all(space.contains(row) for row in drawn[:200].numpy())
    between, above, below, free = drawn.double().unbind(-1)
    n = len(drawn)
    for values, mean, deviation in (
        (between, 1, (16 / 12) ** 0.5),
        (above, 3, 1),
        (below, -3, 1),
        (free, 0, 1),
    ):
        assert abs(values.mean() - mean) < 4.5 * deviation / n**0.5
        assert abs(values.std() - deviation) < 0.05
    quarters = ((between + 1) / 4 * 4).floor()
    assert_uniform(quarters, 0, 3)


def test_dicts_and_tuples_are_drawn_as_trees():
    space = spaces.Dict(
        {"a": spaces.Discrete(3), "b": spaces.Tuple((spaces.Box(0, 1, (2,)), spaces.MultiBinary(2)))}
    )
    policy = RandomActions(space, 4, torch.device("cpu"), 0)
    for _ in range(100):
        drawn = policy()
        assert drawn["a"].shape == (4,) and isinstance(drawn["b"], tuple)
        for i in range(4):
            one = {"a": drawn["a"][i].numpy()[()], "b": tuple(leaf[i].numpy() for leaf in drawn["b"])}
            assert space.contains(one)


def test_random_actions_go_on_after_a_state():
    space = spaces.Tuple((spaces.Discrete(100), spaces.Box(0, 1, (2,))))
    policy = RandomActions(space, 3, torch.device("cpu"), 4)
    for _ in range(70):
        policy()
    state = policy.state_dict()
    later = [policy() for _ in range(100)]
    other = RandomActions(space, 3, torch.device("cpu"), 5)
    other.load_state_dict(state)
    for drawn in later:
        assert all(torch.equal(a, b) for a, b in zip(drawn, other(), strict=True))


def test_random_actions_on_a_device_without_values():
    drawn = RandomActions(spaces.Box(0, 1, (2,)), 3, torch.device("meta"), 0)()
    assert drawn.device.type == "meta" and drawn.shape == (3, 2)


@pytest.mark.parametrize("aggregate", [True, False])
def test_actions_of_several_parts_keep_their_log_probabilities(aggregate):
    """tensordict writes one for all parts, or one beside each part, under "action" like the parts."""
    names = {"move": ("action", "move"), "press": ("action", "press")}
    params = [("params", "move", "loc"), ("params", "move", "scale"), ("params", "press", "logits")]

    def net(obs):
        return obs[..., :2].cos() / 2, 0.01 + obs[..., :2].sin() ** 2 / 100, obs.repeat(1, 2)[..., :5].cos()

    torch.manual_seed(0)
    arguments = {"distribution_map": {"move": Normal, "press": Categorical}, "name_map": names}
    with set_composite_lp_aggregate(aggregate):
        choose = ProbabilisticTensorDictModule(
            ["params"], list(names.values()), distribution_class=CompositeDistribution,
            distribution_kwargs=arguments, return_log_prob=True, default_interaction_type=InteractionType.RANDOM,
        )  # fmt: skip
        actor = ProbabilisticTensorDictSequential(TensorDictModule(net, ["observation"], params), choose)
        batch = next(Collector(make(action="dict"), actor, frames_per_batch=10, seed=0))
        kept = set() if aggregate else {("action", "move_log_prob"), ("action", "press_log_prob")}
        assert {key for key in batch.keys(True, True) if key[0] == "action"} == {*names.values(), *kept}
        batch["advantage"] = torch.ones(10, 1)
        loss = ClipPPOLoss(actor)
        if aggregate:
            loss.set_keys(sample_log_prob=choose.log_prob_keys[0])
        out = loss(batch.exclude("params"))
    assert out["max_ratio"] == pytest.approx(1.0, abs=1e-5) and out["kl_approx"].abs() < 1e-5
