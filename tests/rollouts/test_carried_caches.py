"""Caches of a TransformerModule: carried by whoever steps, in no batch, and the flat pass gives the same numbers."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ray import FakeRay
from scripted_pool import ScriptedPool, same
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.estimators import GAE, ClipPPOLoss, DQNLoss
from flatroll.export import export, import_h5, import_parquet
from flatroll.layout import run_starts
from flatroll.modules import TransformerModule, actor, critic, q_network, set_recurrent_mode
from flatroll.rollouts import Collector, MultiCollector, RayCollector, evaluate, rollout
from flatroll.wrappers import InitTracker, StepCounter, as_vector_env, set_recurrent_primers_from
from flatroll.wrappers.testing import Script, ScriptedTorchEnv, ScriptedVectorEnv

LENGTHS = [[9, 1, 4], [2, 7], [42]]
MODES = ["NextStep", "SameStep", "Disabled", "torch"]


def make(which: str = "SameStep", lengths: Any = LENGTHS) -> Any:
    own = Script(len(lengths), lengths=lengths)
    if which == "torch":
        return ScriptedTorchEnv(own)
    return ScriptedVectorEnv(own, autoreset_mode=which)


def policy_of(context: int | None = 5, **options: Any) -> TensorDictSequential:
    torch.manual_seed(0)
    memory = TransformerModule(
        3, 8, 2, 2, context=context, in_key="observation", out_key="features", **options
    )
    with torch.no_grad():
        memory.network.embed.weight.mul_(0.1)  # observations count steps
    return TensorDictSequential(
        memory,
        TensorDictModule(nn.Linear(8, 5), ["features"], ["logits"]),
        TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"]),
    )


def check_logits(policy: Any, batch: TensorDict) -> None:
    with set_recurrent_mode("recurrent"), torch.no_grad():
        again = policy(batch.clone())
    torch.testing.assert_close(again["logits"], batch["logits"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("context", [1, 5, None])
@pytest.mark.parametrize("which", MODES)
def test_the_flat_pass_repeats_what_was_collected(which: str, context: int | None) -> None:
    policy = policy_of(context)
    batch = next(Collector(make(which), policy, frames_per_batch=120))
    assert run_starts(batch).sum() > 10
    check_logits(policy, batch)
    check_logits(policy, rollout(make(which), policy, 90))


def test_one_env() -> None:
    policy = policy_of()
    check_logits(policy, next(Collector(make(lengths=[[3, 12, 5]]), policy, frames_per_batch=40)))


def test_no_row_holds_a_cache() -> None:
    """One of 256 steps at this width would have 64 KiB a row."""
    policy = policy_of(context=256, position="learned").select_out_keys(
        "action", "logits", ("next", "_cache"), ("next", "_cache_steps")
    )
    collector = Collector(StepCounter(make()), policy, frames_per_batch=120)
    batch = next(collector)
    assert not any("_cache" in str(key) for key in batch.keys(True, True))
    assert batch.bytes() / len(batch) < 128
    buffer = ReplayBuffer(storage=LazyTensorStorage(120))
    buffer.extend(batch)
    assert buffer.sample(64).bytes() / 64 < 256


def test_a_collector_writes_into_one_cache() -> None:
    collector = Collector(make(), policy_of(), frames_per_batch=30)
    places = set()
    for _ in range(4):
        next(collector)
        places.add(collector._runner.carried["_cache"].data_ptr())
    assert len(places) == 1


def test_batches_go_on_where_the_last_one_ended() -> None:
    """Windows of the collector are cut in episodes; the cache is not."""
    policy = policy_of(context=None)
    whole = next(Collector(make(), policy, frames_per_batch=240))
    collector = Collector(make(), policy, frames_per_batch=60)
    parts = torch.cat([next(collector) for _ in range(4)])
    for one in (whole, parts):
        one["place"] = (one["observation"] * torch.tensor([1e6, 1e3, 1.0])).sum(-1)
    torch.testing.assert_close(
        parts["logits"][parts["place"].argsort()],
        whole["logits"][whole["place"].argsort()],
        atol=1e-6,
        rtol=0,
    )


def test_two_collectors_of_one_policy_have_their_own_caches() -> None:
    policy = policy_of()
    one, other = (Collector(make(), policy, frames_per_batch=12) for _ in range(2))
    for _ in range(6):
        same(next(one), next(other))


def test_a_copied_policy_carries_nothing_along() -> None:
    policy = policy_of()
    collector = Collector(make(), policy, frames_per_batch=30)
    next(collector)
    twin = copy.deepcopy(policy)
    assert not any("cache" in name for name in twin.state_dict())
    check_logits(twin, next(Collector(make(), twin, frames_per_batch=120)))


@pytest.mark.parametrize("context", [4, None])
def test_a_pool_in_async_mode(context: int | None) -> None:
    policy = policy_of(context)
    batch = next(Collector(ScriptedPool(5, 2), policy, frames_per_batch=200))
    check_logits(policy, batch)


def test_a_pool_in_parts() -> None:
    policy = policy_of()
    parts = next(Collector(ScriptedPool(4), policy, frames_per_batch=80))
    check_logits(policy, parts)


def test_a_hand_written_loop() -> None:
    policy = policy_of()
    env = set_recurrent_primers_from(make(), policy)
    obs, info = env.reset(seed=0)
    carried = {key: info[key] for key in ("_cache", "_cache_steps")}
    rows = []
    with torch.no_grad():
        for _ in range(30):
            step = TensorDict(
                {"observation": torch.as_tensor(obs), "is_init": torch.as_tensor(info["is_init"])}, [3]
            )
            step = policy(step.update(carried))
            rows.append(step.select("observation", "is_init", "logits"))
            obs, _, _, _, info = env.step(step["action"].numpy())
            carried = {key: step["next", key] for key in carried}
    check_logits(policy, torch.stack(rows, 1))


def test_a_policy_that_hides_its_modules() -> None:
    policy = policy_of()

    class Hidden:
        in_keys = policy.in_keys
        out_keys = policy.out_keys

        def __call__(self, td: Any) -> Any:
            return policy(td)

    by_primer = set_recurrent_primers_from(InitTracker(as_vector_env(make())), policy)
    check_logits(policy, next(Collector(by_primer, Hidden(), frames_per_batch=60)))
    collector = Collector(make(), Hidden(), frames_per_batch=60)
    collector.set_recurrent_primers_from(policy)
    check_logits(policy, next(collector))

    late = Collector(make(), lambda obs: torch.zeros(3, dtype=torch.int64), frames_per_batch=60)
    late.set_recurrent_primers_from(policy)  # a callable carries nothing


def test_a_cache_that_is_not_handed_on() -> None:
    with pytest.raises(ValueError, match=r"has the recurrent state '_cache' but not \('next', '_cache'\)"):
        Collector(make(), policy_of().select_out_keys("action"), frames_per_batch=10)


def test_workers() -> None:
    policy = policy_of(context=3)
    collector = MultiCollector([make, make], policy, frames_per_batch=120, total_frames=240)
    try:
        for batch in collector:
            assert not any("_cache" in str(key) for key in batch.keys(True, True))
            with set_recurrent_mode("recurrent", burn_in=4), torch.no_grad():
                again = policy(batch.clone())["logits"]
            at = torch.arange(len(batch))
            starts = run_starts(batch)
            into = at - torch.where(starts, at, 0).cummax(0).values
            exact = (into >= 4) | torch.where(starts, batch["is_init"].squeeze(-1), False)
            assert exact.sum() > 20
            torch.testing.assert_close(again[exact], batch["logits"][exact], atol=1e-5, rtol=0)
    finally:
        collector.shutdown()


def test_evaluation_has_its_own_cache() -> None:
    policy = policy_of()
    collector = Collector(make(), policy, frames_per_batch=12)
    plain = Collector(make(), policy, frames_per_batch=12)
    for _ in range(4):
        same(next(collector), next(plain))
        evaluate(make(), policy, episodes=3)


# --- training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_an_actor_and_a_critic_train_with_ppo(shared: bool) -> None:
    env = make()
    policy = actor(env, hidden=(8, 8), recurrent="transformer")
    value = critic(env, hidden=(8, 8), recurrent="transformer", actor=policy, shared=shared)
    batch = next(Collector(env, policy, frames_per_batch=120))
    assert not any("_cache" in str(key) for key in batch.keys(True, True))
    loss = ClipPPOLoss(policy, value)
    with torch.no_grad():
        GAE(gamma=0.9, lmbda=0.9, value_network=value)(batch)
        ratio = loss(batch)
    assert abs(float(ratio["kl_approx"])) < 1e-6  # the flat pass gives the collected log-probabilities
    sum(value for key, value in loss(batch).items() if key.startswith("loss")).backward()
    assert all(weight.grad is not None for weight in policy.parameters())


def test_a_loss_on_windows_sees_what_the_policy_saw() -> None:
    env = make()
    policy = actor(env, hidden=(8, 8), recurrent="transformer")
    value = critic(env, hidden=(8,))
    [memory] = [part for part in policy.module if isinstance(part, TransformerModule)]
    loss = ClipPPOLoss(policy, value)
    caches = None
    for batch in Collector(env, policy, frames_per_batch=30, total_frames=120):
        GAE(gamma=0.9, lmbda=0.9, value_network=value)(batch)
        with memory.begin_from(caches) as after, torch.no_grad(), set_recurrent_mode(True):
            policy(batch.copy())  # the loss passes no done on
        with memory.begin_from(caches), warnings.catch_warnings():
            warnings.simplefilter("error")
            ratio = loss(batch)
        assert abs(float(ratio["kl_approx"])) < 1e-6
        caches = after
    assert caches is not None and len(caches["_cache"]) > 0


@pytest.mark.parametrize("compact", [False, True])
def test_values_are_those_of_an_episode_run_by_itself(compact: bool) -> None:
    """Each row's value sees the rows before it, and so does that of the observation behind a run's end."""
    env = make()
    value = critic(env, hidden=(8, 8), recurrent="transformer", norm=False).double()
    collector = Collector(env, None, frames_per_batch=45, seed=0, compact_obs=compact)
    batch = next(collector)
    options = {"final": collector.final} if compact else {}
    full = next(Collector(make(), None, frames_per_batch=45, seed=0))
    full["observation"] = full["observation"].double() / 10
    full["next", "observation"] = full["next", "observation"].double() / 10
    batch["observation"] = batch["observation"].double() / 10
    if compact:
        collector.final["next", "observation"] = collector.final["next", "observation"].double() / 10
    else:
        batch["next", "observation"] = batch["next", "observation"].double() / 10
    GAE(gamma=0.9, lmbda=0.9, value_network=value)(batch, **options)

    starts = run_starts(full).nonzero().flatten().tolist()
    for first, stop in zip(starts, [*starts[1:], len(full)], strict=True):
        rows = torch.cat([full["observation"][first:stop], full["next", "observation"][stop - 1 : stop]])
        is_init = torch.arange(len(rows))[:, None] == 0
        with torch.no_grad(), set_recurrent_mode("recurrent"):
            values = value(TensorDict({"observation": rows, "is_init": is_init}, [len(rows)]))["state_value"]
        torch.testing.assert_close(batch["state_value"][first:stop].double(), values[:-1], atol=1e-6, rtol=0)
        going = ~full["next", "terminated"][first:stop].double().bool()
        delta = full["next", "reward"][first:stop] + 0.9 * values[1:] * going - values[:-1]
        advantage = torch.zeros(1, dtype=torch.float64)
        for row in reversed(range(len(delta))):
            advantage = delta[row] + 0.81 * advantage
            found = batch["advantage"][first + row]
            torch.testing.assert_close(found.double(), advantage, atol=1e-5, rtol=0)


def test_q_values_of_slices_with_burn_in() -> None:
    env = StepCounter(make())
    net = q_network(env, hidden=(8, 8), recurrent="transformer", epsilon=0.5)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(300), sampler=SliceSampler(slice_len=6, strict_length=False), batch_size=60
    )
    collector = Collector(env, net, frames_per_batch=120, total_frames=240)
    for batch in collector:
        buffer.extend(batch)
    loss = DQNLoss(net, burn_in=2)
    loss(buffer.sample())["loss"].backward()
    with pytest.warns(UserWarning, match="runs begin inside an episode"):
        DQNLoss(net)(buffer.sample())["loss"].backward()


@pytest.mark.parametrize("context", [5, None])
@pytest.mark.parametrize("which", MODES)
def test_windows_of_a_collector_repeat_what_was_collected(which: str, context: int | None) -> None:
    """Their runs begin inside episodes, with the caches that the window before left."""
    policy = policy_of(context)
    caches = None
    cuts = 0
    for batch in Collector(make(which), policy, frames_per_batch=21, total_frames=210):
        cuts += int((run_starts(batch) & ~batch["is_init"].squeeze(-1)).sum())
        with policy[0].begin_from(caches) as after, warnings.catch_warnings():
            warnings.simplefilter("error")
            check_logits(policy, batch)
        caches = after
    assert cuts > 10


# --- what leaves the process --------------------------------------------------------------------------------------


def test_actors_of_ray() -> None:
    """Each actor carries the caches of its own envs."""
    policy = policy_of()
    with RayCollector(
        make, policy, num_collectors=2, frames_per_batch=120, sync=True, calls=FakeRay()
    ) as actors:
        batch = next(iter(actors))
    assert not any("_cache" in str(key) for key in batch.keys(True, True))
    assert len(batch) == 120
    check_logits(policy, batch)


def test_checkpoint_of_a_buffer(tmp_path: Path) -> None:
    policy = policy_of()
    buffer = ReplayBuffer(storage=LazyTensorStorage(120))
    buffer.extend(next(Collector(make(), policy, frames_per_batch=120)))
    buffer.dumps(tmp_path)
    again = ReplayBuffer(storage=LazyTensorStorage(120))
    again.loads(tmp_path)
    same(again[:], buffer[:])
    check_logits(policy, again[:])


def test_restored_weights_go_on_with_the_same_steps() -> None:
    """Weights are all that a policy saves; a rollout under way keeps its caches."""
    policy = policy_of(gate="gtrxl")
    collector = Collector(make(), policy, frames_per_batch=30)
    twin = Collector(make(), policy_of(gate="gtrxl"), frames_per_batch=30)
    saved = copy.deepcopy(policy.state_dict())
    for _ in range(2):
        same(next(collector), next(twin))
    with torch.no_grad():
        for weight in policy.parameters():
            weight.zero_()
    policy.load_state_dict(saved)
    for _ in range(3):
        same(next(collector), next(twin))


@pytest.mark.parametrize("format", ["parquet", "h5", "minari"])
@pytest.mark.filterwarnings("ignore:.*Box.*precision:UserWarning")
def test_exported_rows_have_no_cache(tmp_path: Path, format: str) -> None:
    for name in ("pyarrow", "h5py", "minari"):
        pytest.importorskip(name)
    policy = policy_of()
    env = make()
    batch = next(Collector(env, policy, frames_per_batch=60))
    path = tmp_path / "rows"
    options: dict[str, Any] = {}
    if format == "h5":
        path = path.with_suffix(".h5")
    elif format == "minari":
        spaces = ("observation_space", "action_space")
        options = {name: getattr(env, f"single_{name}") for name in spaces}
    export(batch, path, format, **options)
    assert not any(b"_cache" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    if format == "parquet":
        check_logits(policy, import_parquet(path))
    elif format == "h5":
        check_logits(policy, import_h5(path))


def test_double_precision() -> None:
    policy = policy_of().double()
    caster = TensorDictModule(lambda rows: rows.double(), ["observation"], ["observation_64"])
    memory = policy[0]
    keys = {
        "in_keys": ["observation_64", "_cache", "_cache_steps"],
        "out_keys": ["features", ("next", "_cache"), ("next", "_cache_steps")],
    }
    double = TransformerModule(3, 8, 2, 2, context=5, dtype=torch.float64, **keys)
    double.load_state_dict(memory.state_dict())
    whole = TensorDictSequential(caster, double, *policy[1:])
    batch = next(Collector(make(), whole, frames_per_batch=120))
    assert batch["logits"].dtype == torch.float64
    with set_recurrent_mode("recurrent"), torch.no_grad():
        again = whole(batch.clone())
    torch.testing.assert_close(again["logits"], batch["logits"], atol=1e-12, rtol=0)
