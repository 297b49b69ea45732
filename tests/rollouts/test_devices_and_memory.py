"""Where batches are, what waits for a device, and whose memory they are."""

import gc
import weakref

import numpy as np
import pytest
import torch
from list_collector import Counter, ListCollector, always_four, check, make, script
from tensordict.nn import TensorDictModule
from torch.utils._python_dispatch import TorchDispatchMode

from flatroll.layout.checks import check_device
from flatroll.rollouts import Collector
from flatroll.wrappers import (
    NextObservationDelta,
    RewardSum,
    StepCounter,
    as_vector_env,
)
from flatroll.wrappers.testing import ScriptedTorchEnv, ScriptedVectorEnv

# --- devices ------------------------------------------------------------------------------------------------


@pytest.fixture
def meta_is_usable(monkeypatch):
    """Collectors refuse the meta device, which stands for a GPU here."""
    monkeypatch.setattr("flatroll.rollouts.arguments.usable_device", check_device)


@pytest.mark.usefixtures("meta_is_usable")
def test_batches_are_put_where_they_are_wanted():
    for options in (
        {"storing_device": "meta"},
        {"storing_device": torch.device("meta"), "compact_obs": True},
    ):
        collector = Collector(make("SameStep"), frames_per_batch=10, **options)
        batch = next(collector)
        assert {leaf.device.type for leaf in batch.values(True, True)} == {"meta"}
        if collector.final is not None:
            assert {leaf.device.type for leaf in collector.final.values(True, True)} == {"meta"}
    for options in ({"device": "cpu"}, {"policy_device": "cpu", "env_device": "cpu", "no_cuda_sync": True}):
        oracle = ListCollector(script(), "SameStep", 10)
        collector = Collector(
            StepCounter(make("SameStep")), always_four, frames_per_batch=10, seed=0, **options
        )
        check(next(collector), oracle.window())


@pytest.mark.usefixtures("meta_is_usable")
def test_a_policy_gets_its_input_where_it_wants_it():
    seen = []

    def policy(obs):
        seen.append(obs.device.type)
        return np.zeros(3, np.int64)

    collector = Collector(make("SameStep"), policy, frames_per_batch=6, policy_device="meta")
    next(collector)
    assert seen == ["meta", "meta"]
    seen.clear()
    own = script(obs="tuple")
    next(
        Collector(make("SameStep", own), lambda obs: policy(obs[1]), frames_per_batch=6, policy_device="meta")
    )
    assert seen == ["meta", "meta"]


@pytest.mark.usefixtures("meta_is_usable")
def test_an_env_elsewhere_is_an_error():
    env = ScriptedTorchEnv(script(), device="cpu", final_obs="dense")
    with pytest.raises(ValueError, match=r"env_device='meta', but the env's arrays are on cpu: move the env"):
        Collector(env, frames_per_batch=10, env_device="meta")
    used = StepCounter(make("SameStep"))
    used.reset()
    with pytest.raises(ValueError, match=r"cannot be moved to meta: only an env that was never reset can"):
        Collector(used, frames_per_batch=10, env_device="meta")


@pytest.mark.usefixtures("meta_is_usable")
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_numpy_env_is_moved_to_env_device(wrapped):
    """What the env returns is copied there in each step, and what it is given back; nothing else sees the host."""
    collector = Collector(
        StepCounter(make("SameStep")) if wrapped else make("SameStep"), frames_per_batch=10, env_device="meta"
    )
    obs, info = collector.env.reset(seed=0)
    assert obs.device.type == info["is_init"].device.type == info["traj_ids"].device.type == "meta"
    assert collector._devices.env.type == "meta"


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_a_moved_env_gives_the_same_rows(mode):
    """The CPU stands for the device: values can be compared there."""
    batches = []
    for moved in (False, True):
        env = as_vector_env(make(mode))
        if moved:
            env.move(torch.device("cpu"))
            assert env.capabilities.framework == "torch"
        batches.append(
            torch.cat(list(Collector(StepCounter(env), always_four, frames_per_batch=9, total_frames=90)))
        )
    one, other = batches
    assert set(one.keys(True, True)) == set(other.keys(True, True)) and (one == other).all()


def test_a_whole_collector_on_a_device_without_values():
    """Nothing on the meta device can be read, so nothing is."""
    env = ScriptedTorchEnv(script(), device="meta", final_obs="dense")
    collector = Collector(
        RewardSum(StepCounter(env)),
        lambda obs: torch.zeros(3, dtype=torch.int64, device="meta"),
        frames_per_batch=10,
        set_truncated=True,
        reset_at_each_iter=True,
        init_random_frames=7,
    )
    for _ in range(3):
        batch = next(collector)
        assert batch["next", "observation"].device.type == "meta"
        assert batch.batch_size == (10,)


class ForbidHostSync(TorchDispatchMode):
    """Raises where a GPU would be waited for, had the tensors been on one."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "item", "unique2")

    def __init__(self):
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        bool_index = name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype is torch.bool for i in args[1]
        )
        if name in self.FORBIDDEN or bool_index:
            raise AssertionError(f"{func} would wait for the device")
        self.ops += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("final_obs", ["dense", "absent"])
@pytest.mark.parametrize("kind", ["float32", "dict"])
def test_collecting_from_a_torch_env_waits_for_nothing(kind, final_obs):
    env = ScriptedTorchEnv(script(obs=kind), final_obs=final_obs)
    collector = Collector(
        RewardSum(StepCounter(env)), Counter(), frames_per_batch=10, set_truncated=True, info_keys=()
    )
    next(collector)
    with ForbidHostSync() as watch:
        for _ in range(3):
            next(collector)
    assert watch.ops > 100


def test_the_watch_sees_what_waits():
    """What does wait, once per batch: final observations are picked, deltas are checked."""
    for env, options in (
        (ScriptedTorchEnv(script()), {"compact_obs": True}),
        (NextObservationDelta(ScriptedTorchEnv(script())), {}),
        (ScriptedTorchEnv(script()), {"trajs_per_batch": 1}),
    ):
        collector = Collector(env, frames_per_batch=10, **options)
        with pytest.raises(AssertionError, match="would wait for the device"), ForbidHostSync():
            next(collector)


# --- memory -------------------------------------------------------------------------------------------------


def test_batches_own_their_memory():
    """Env, info and policy write into the same arrays again and again."""
    info, action = np.zeros(3), torch.zeros(3, dtype=torch.int64)

    class Env(ScriptedVectorEnv):
        def step(self, actions):
            *result, told = super().step(actions)
            np.add(info, 1, out=info)
            return *result, {**told, "mine": info}

    extra = torch.zeros(3, 2)
    module = TensorDictModule(
        lambda obs: (action.copy_(obs[:, 2] % 5), extra.copy_(obs[:, 1:])),
        in_keys=["observation"],
        out_keys=["action", "extra"],
    )
    for options in ({}, {"compact_obs": True}, {"trajs_per_batch": 2}, {"storing_device": "cpu"}):
        env = Env(script(), autoreset_mode="NextStep", reuse_buffer=True)
        collector = Collector(
            env, module, frames_per_batch=8, total_frames=120, info_keys=["mine"], **options
        )
        kept = []
        for batch in collector:
            parts = [batch] if collector.final is None else [batch, collector.final]
            kept += [(part, part.clone()) for part in parts]
        assert all((part == copy).all() for part, copy in kept)
        assert torch.equal(kept[0][0]["extra"], kept[0][0]["observation"][:, 1:])


@pytest.mark.parametrize("how", ["next", "for", "rollout"])
def test_a_collector_that_is_dropped_lets_go_of_its_env_at_once(how):
    """Not when garbage is collected: that may be in a forked child, where a pool of envpool crashes."""
    env = make("SameStep")
    collector = Collector(env, always_four, frames_per_batch=6, total_frames=12)
    gc.collect()
    gc.disable()
    try:
        left = [weakref.ref(one) for one in (collector, env)]
        if how == "next":
            next(collector)
        elif how == "rollout":
            collector.rollout()
        else:
            assert len(list(collector)) == 2
        del collector, env
        assert [one() for one in left] == [None, None]
    finally:
        gc.enable()
