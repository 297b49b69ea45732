"""The code of the reference documents runs here with nothing but its imports changed.

One test for each block of code: the same calls, names, arguments and asserted results. What is written in another way:
an env is Gymnasium's, ``TransformedEnv(GymEnv("X"), T())`` is ``T(gym.make("X"))``, ``SerialEnv`` is a vector env, and
``env.action_spec`` is ``env.action_space``; batches of collectors are flat, so a storage of theirs has no ``ndim=2``.
The first four knobs of the tutorial on memory: `tests/test_tutorial.py`. What cannot be as printed is in tests named
``..._differs``, which say why and hold it; `NO_PROGRAMS` are no Python.
"""

import os
import tempfile
from functools import partial
from itertools import islice
from pathlib import Path
from time import sleep
from typing import Any

import gymnasium as gym
import pytest
import torch
from memory_tutorial import collect, env_maker, sample_of
from set_files import write_trials
from tensordict import TensorDict, assert_close
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import multiprocessing as mp
from torch import nn
from worker_envs import Seeded

from flatroll import datasets, rollouts
from flatroll.buffers import (
    Compose,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    MultiStep,
    NextStateReconstructor,
    RenameTransform,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Resize,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorStorage,
    ToTensorImage,
)
from flatroll.buffers import NextObservationDelta as RestoreNextObservation
from flatroll.estimators import GAE, ClipPPOLoss
from flatroll.layout import step_mdp
from flatroll.modules import GRUModule, set_recurrent_mode
from flatroll.rollouts import Collector
from flatroll.trees import MCTSForest, QueryModule, TensorDictMap
from flatroll.wrappers import NextObservationDelta, StepCounter, as_vector_env
from flatroll.wrappers.testing import Script, ScriptedVectorEnv

#: (document, section): a block that is no program, as printed.
NO_PROGRAMS: dict[tuple[str, str], str] = {
    ("data package", "The Rationale Behind TED"): "observation.shape\n[200, 3]\naction.shape\n[199, 4]",
    ("data package", "TensorDictMap, pseudocode"): "next_state = storage[observation, action]",
    ("collector internals", "Per-timestep flow"): "for t in range(frames_per_batch): \u2502",
    (
        "trajectory replay buffer",
        "Rollout Worker",
    ): "time ->\n[ obs_0, obs_1, act_0, r_0, dones_0, ... ] --\u2510",
    ("trajectory replay buffer", "Actor Worker"): "Channel(get) -- Trajectory -- ReplayBuffer\n  |",
}


def named(name: str) -> Any:
    """A name of the references that `flatroll.rollouts` must have."""
    return getattr(rollouts, name)


# -- the data package ------------------------------------------------------------------------------------------------


def test_data_package_supported_data_types_list_storage() -> None:
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.add("a string!")
    rb.extend([30, None])
    assert [rb[i] for i in range(3)] == ["a string!", 30, None]


def test_data_package_supported_data_types_tensor_storage() -> None:
    container = torch.empty(10, 3, 64, 64, dtype=torch.uint8)
    rb = ReplayBuffer(storage=TensorStorage(container))
    img = torch.randint(255, (3, 64, 64), dtype=torch.uint8)
    rb.add(img)
    assert any(torch.equal(row, img) for row in container)


def image_buffer() -> ReplayBuffer:
    rb_td = ReplayBuffer(storage=LazyMemmapStorage(10), batch_size=1)
    img = torch.randint(255, (3, 64, 64), dtype=torch.uint8)
    rb_td.add(TensorDict({"img": img, "labels": torch.randint(100, ())}, batch_size=[]))
    return rb_td


def test_data_package_supported_data_types_lazy_storages() -> None:
    assert len(image_buffer()) == 1
    rb_pytree = ReplayBuffer(storage=LazyMemmapStorage(10))
    rb_pytree.extend({"a": {"b": torch.randn(3), "c": [torch.zeros(3, 2), (torch.ones(3, 10),)]}})
    assert len(rb_pytree) == 3


def test_data_package_sampling_and_indexing() -> None:
    rb_td = image_buffer()
    first_elt = rb_td[0]
    storage = rb_td[:]
    sample = rb_td.sample(128)
    assert first_elt.batch_size == () and storage.batch_size == (1,) and sample.batch_size == (128,)
    for data in islice(rb_td, 3):  # the document's loop has no end, as its sampler draws with replacement
        assert data.batch_size == (1,)


def extend_elsewhere(rb: TensorDictReplayBuffer) -> None:
    rb.extend(TensorDict({"a": torch.ones(10)}, [10]))


def test_data_package_sharing_replay_buffers_across_processes() -> None:
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(21))
    rb.extend(TensorDict({"a": torch.zeros(10)}, [10]))
    proc = mp.get_context("fork").Process(target=extend_elsewhere, args=(rb,))
    proc.start()
    proc.join(600)
    assert len(rb) == 20
    assert (rb["_data", "a"][:10] == 0).all()
    assert (rb["_data", "a"][10:20] == 1).all()


def test_data_package_storing_trajectories_one_env() -> None:
    env = StepCounter(gym.make("CartPole-v1"))
    collector = named("SyncDataCollector")(
        env, named("RandomPolicy")(env.action_space), frames_per_batch=10, total_frames=-1
    )
    rb = ReplayBuffer(
        storage=LazyTensorStorage(100),
        sampler=SliceSampler(
            num_slices=8, traj_key=("collector", "traj_ids"), truncated_key=None, strict_length=False
        ),
        batch_size=64,
    )
    for i, data in enumerate(collector):
        rb.extend(data)
        if i == 10:
            break
    assert len(rb) == 100, len(rb)
    steps = rb[:]["next", "step_count"]
    assert steps.shape == (100, 1)
    assert (steps[1:10] - steps[:9] == 1).sum() >= 7  # it counts on, but for the ends of episodes
    assert len(rb.sample()) <= 64


def test_data_package_storing_trajectories_several_envs() -> None:
    env = StepCounter(gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2))
    collector = named("SyncDataCollector")(
        env, named("RandomPolicy")(env.action_space), frames_per_batch=2, total_frames=-1
    )
    # The document stores [envs, time] with ndim=2, lest trajectories are interleaved; flat rows are not.
    rb = ReplayBuffer(
        storage=LazyTensorStorage(200),
        sampler=SliceSampler(
            num_slices=8, traj_key=("collector", "traj_ids"), truncated_key=None, strict_length=False
        ),
        batch_size=64,
    )
    for i, data in enumerate(collector):
        rb.extend(data)
        if i == 100:
            break
    assert len(rb) == 200, len(rb)
    sample = rb.sample()
    same = sample["collector", "traj_ids"][1:] == sample["collector", "traj_ids"][:-1]
    inside = same & ~sample["is_init"][1:, 0]
    assert (sample["step_count"][1:] - sample["step_count"][:-1] == 1)[inside].all()


@pytest.mark.filterwarnings("ignore:total_frames=200 is not a multiple:UserWarning")
def test_data_package_checkpointing_with_h5(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    env = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 3)
    torch.manual_seed(0)
    collector = named("SyncDataCollector")(env, policy=None, total_frames=200, frames_per_batch=22)
    rb = ReplayBuffer(storage=LazyMemmapStorage(100))
    rb_test = ReplayBuffer(storage=LazyMemmapStorage(100))
    rb.storage.checkpointer = H5StorageCheckpointer()
    rb_test.storage.checkpointer = H5StorageCheckpointer()
    for data in collector:
        rb.extend(data)
        assert rb.storage.max_size == 100  # 102 with ndim=2, for three lanes
        rb.dumps(tmp_path)
        rb_test.loads(tmp_path)
        assert_close(rb_test[:], rb[:])
    assert len(rb) == 100


def entries(data: TensorDict) -> set[Any]:
    return set(data.keys(True, True))


def test_data_package_structure_of_ted_differs() -> None:
    """Envs are Gymnasium's: they take and give arrays. What the document prints is a row of a rollout."""
    env = gym.make("CartPole-v1")
    data = env.reset()
    assert not isinstance(data, TensorDict)
    step = rollouts.rollout(env, num_steps=1)[0]
    flags = {"done", "terminated", "truncated"}
    results = {("next", name) for name in (*flags, "observation", "reward")}
    assert step.batch_size == () and results | {"observation", "action"} <= entries(step)
    # The flags before the action, False in nearly every row of the document's, are told by is_init.
    assert not flags & entries(step) and step["is_init"]
    # t <- t+1, as in a rollout: what came of the step goes to the root.
    assert flags | {"observation"} <= entries(step_mdp(step)) and not results & entries(step_mdp(step))


def test_data_package_dimensionality_differs() -> None:
    """``env.rollout(10, policy)``: rows of several envs lie end to end, so the last dim is not named "time"."""
    rollout = rollouts.rollout(gym.make("CartPole-v1"), None, 10)
    assert rollout.shape[-1] == 10
    assert rollout.names[-1] is None
    assert rollouts.rollout(gym.make_vec("CartPole-v1", 2, vectorization_mode="sync"), None, 10).shape == (
        20,
    )


def test_data_package_multi_step() -> None:
    data = next(iter(Collector(gym.make("CartPole-v1"), frames_per_batch=8, total_frames=8, seed=1)))
    assert (data[..., 1:]["observation"] == data[..., :-1]["next", "observation"]).all()
    data = MultiStep(gamma=0.9, n_steps=3)(data)
    assert not (data[..., 1:]["observation"] == data[..., :-1]["next", "observation"]).all()


def test_data_package_composing_datasets() -> None:
    rb0 = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(10),
        transform=Compose(
            ToTensorImage(in_keys=["pixels", ("next", "pixels")]),
            Resize(32, in_keys=["pixels", ("next", "pixels")]),
            RenameTransform([("some", "key")], ["renamed"]),
        ),
    )
    rb1 = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(10),
        transform=Compose(
            ToTensorImage(in_keys=["pixels", ("next", "pixels")]),
            Resize(32, in_keys=["pixels", ("next", "pixels")]),
            RenameTransform(["another_key"], ["renamed"]),
        ),
    )
    rb = ReplayBufferEnsemble(
        rb0, rb1, p=[0.5, 0.5], transform=Resize(33, in_keys=["pixels"], out_keys=["pixels33"])
    )
    for member, size, key in ((0, 244, ("some", "key")), (1, 64, "another_key")):
        entries = {
            "pixels": torch.randint(255, (10, size, size, 3)),
            ("next", "pixels"): torch.randint(255, (10, size, size, 3)),
            key: torch.randn(10),
        }
        rb[member].extend(TensorDict(entries, batch_size=[10]))
    for _ in range(2):
        sample = rb.sample(10)
        assert sample["next", "pixels"].shape == torch.Size([2, 5, 3, 32, 32])
        assert sample["pixels"].shape == torch.Size([2, 5, 3, 32, 32])
        assert sample["pixels33"].shape == torch.Size([2, 5, 3, 33, 33])
        assert sample["renamed"].shape == torch.Size([2, 5])


def test_data_package_transforming_datasets(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    # A download by name alone is the one thing that is not here: the files are made in its place.
    RobosetExperienceReplay: Any = partial(
        datasets.RobosetExperienceReplay,
        root=tmp_path,
        fetch=lambda _, folder: write_trials(folder / "trials.h5"),
    )
    dataset = RobosetExperienceReplay(
        "FK1-v4(expert)/FK1_MicroOpenRandom_v2d-v4", batch_size=32, download="force"
    )

    def func(data):  # type: ignore[no-untyped-def]
        return data.set("obs_norm", data.get("observation").norm(dim=-1))

    dataset.preprocess(
        func,
        num_workers=max(1, (os.cpu_count() or 1) - 2),
        num_chunks=1000,
        mp_start_method="fork",
    )
    sample = dataset.sample()
    assert "obs_norm" in sample.keys()  # noqa: SIM118
    # re-recreating the dataset gives us the transformed version back.
    dataset = RobosetExperienceReplay("FK1-v4(expert)/FK1_MicroOpenRandom_v2d-v4", batch_size=32)
    sample = dataset.sample()
    assert "obs_norm" in sample.keys()  # noqa: SIM118


def test_data_package_tensordict_map() -> None:
    storage: Any = TensorStorage(TensorDict({"observation": torch.arange(5)}, [5]))
    rb = ReplayBuffer(storage=storage)  # which counts the rows
    data = storage[3]
    assert data["observation"] == 3 and len(rb) == 5
    storage = TensorDictMap(query_module=QueryModule(in_keys=["observation", "action"]))
    observation, action = torch.zeros(3), torch.tensor(1)
    next_state = TensorDict(observation=torch.ones(3))
    td = TensorDict(observation=observation, action=action)
    storage[td] = next_state
    next_td = storage[td]
    assert next_td["observation"].tolist() == [1, 1, 1]
    with pytest.raises(
        TypeError, match=r"keys must be a tensordict with the entries \['observation', 'action'\], got tu"
    ):
        storage[observation, action]  # the document's pseudocode, which it replaces by the above


def test_data_package_mcts_forest() -> None:
    observation = torch.tensor(0)
    forest = MCTSForest()
    for action, then in ((3, 123), (2, 359), (1, 75)):
        step = TensorDict(observation=observation, action=torch.tensor(action))
        forest.add(step.set("next", TensorDict(observation=torch.tensor(then))))
    data = TensorDict(observation=observation)
    metadata = forest.node_map[data]
    index = metadata["_index"]
    next_data = forest.data_map[index]
    assert next_data.shape == index.shape and next_data["action"].tolist() == [3, 2, 1]
    assert next_data["next", "observation"].tolist() == [123, 359, 75]
    assert forest.get_tree(data).num_children == 3


# -- data layout: contiguous trajectories ------------------------------------------------------------------------------


def gru_module() -> GRUModule:
    return GRUModule(
        input_size=4,
        hidden_size=8,
        num_layers=1,
        in_keys=["observation", "recurrent_state", "is_init"],
        out_keys=["features", ("next", "recurrent_state")],
    )


def with_head(gru: GRUModule) -> TensorDictSequential:
    choose = nn.Sequential(nn.Linear(8, 2), ArgMax())
    return TensorDictSequential(gru, TensorDictModule(choose, in_keys=["features"], out_keys=["action"]))


class ArgMax(nn.Module):
    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)


def test_data_layout_slice_sampler() -> None:
    sampler = SliceSampler(num_slices=4, slice_len=32, strict_length=False)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100_000), sampler=sampler, batch_size=128)
    recurrent_policy = with_head(gru_module())
    collector = Collector(
        gym.make("CartPole-v1"), recurrent_policy, frames_per_batch=300, total_frames=300, seed=0
    )
    rb.extend(next(iter(collector)))
    sample = rb.sample()
    assert sample.batch_dims == 1 and len(sample) <= 128
    with set_recurrent_mode("recurrent"):
        out = recurrent_policy(sample)
    assert out["features"].shape == (len(sample), 8)


def test_data_layout_auto_discoverability_for_recurrent_policies() -> None:
    gru = gru_module()
    env = as_vector_env(gym.make("CartPole-v1"), policy=gru)
    first = next(iter(Collector(env, with_head(gru), frames_per_batch=5, total_frames=5)))
    assert {"is_init", "recurrent_state"} <= set(first.keys())


# -- memory-efficient training, from the fifth knob on ---------------------------------------------------------------


def value_network() -> TensorDictModule:
    return TensorDictModule(
        lambda x: x.pow(2).sum(-1, keepdim=True).sqrt(), in_keys=["observation"], out_keys=["state_value"]
    )


@pytest.fixture(scope="module")
def compact_data() -> TensorDict:
    return collect(env_maker, compact_obs=True)


@pytest.fixture
def sample(compact_data: TensorDict) -> TensorDict:
    return sample_of(compact_data)


@pytest.mark.filterwarnings("ignore:.*is used:UserWarning")
def test_memory_knob_5_shifted_value_network(sample: TensorDict) -> None:
    gae_shifted = GAE(gamma=0.99, lmbda=0.95, value_network=value_network(), shifted=True)
    shifted_out = gae_shifted(sample.reshape(-1, 20).clone())
    assert torch.isfinite(shifted_out["advantage"]).all()
    assert "shifted_valid" in shifted_out


@pytest.mark.filterwarnings("ignore:.*is used:UserWarning")
def test_memory_knob_6_chunks(sample: TensorDict) -> None:
    value_net = value_network()
    gae_full = GAE(gamma=0.99, lmbda=0.95, value_network=value_net, shifted=False)
    gae_chunked = GAE(gamma=0.99, lmbda=0.95, value_network=value_net, shifted=False, num_chunks=4)
    adv_full = gae_full(sample.reshape(-1, 20).clone())["advantage"]
    adv_chunked = gae_chunked(sample.reshape(-1, 20).clone())["advantage"]
    assert torch.allclose(adv_full, adv_chunked, equal_nan=True)


def test_memory_knob_7_memory_mapped_storage(compact_data: TensorDict) -> None:
    with tempfile.TemporaryDirectory() as tmpdir:
        rb_mmap = ReplayBuffer(
            storage=LazyMemmapStorage(max_size=1_000, scratch_dir=tmpdir),
            sampler=SliceSampler(slice_len=20, traj_key=("collector", "traj_ids")),
            transform=NextStateReconstructor(),
            batch_size=40,
        )
        rb_mmap.extend(compact_data)
        mmap_sample = rb_mmap.sample()
        assert mmap_sample.batch_size == (40,) and mmap_sample.reshape(-1, 20).batch_size == (2, 20)


#: 1,000,000 frames in batches of 1,024.
numbers_of_the_document = pytest.mark.filterwarnings(
    "ignore:total_frames=1000000 is not a multiple:UserWarning"
)


def actor_and_critic() -> tuple[Any, Any]:
    from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential

    logits = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"])
    draw = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=torch.distributions.Categorical, return_log_prob=True
    )
    critic = TensorDictModule(nn.Linear(4, 1), in_keys=["observation"], out_keys=["state_value"])
    return ProbabilisticTensorDictSequential(logits, draw), critic


@numbers_of_the_document
def test_memory_knob_8_devices() -> None:
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"  # the document's machine has one
    policy, _ = actor_and_critic()
    collector = Collector(
        create_env_fn=env_maker,
        policy=policy.to(accelerator),
        frames_per_batch=1024,
        total_frames=1_000_000,
        env_device=accelerator,
        policy_device=accelerator,
        storing_device="cpu",
        no_cuda_sync=False,
    )
    assert next(iter(collector))["observation"].device.type == "cpu"
    collector.shutdown()


def test_memory_knob_9_sequences_without_padding() -> None:
    rnn = GRUModule(
        input_size=64,
        hidden_size=128,
        in_keys=["obs", "rhs"],
        out_keys=["features", ("next", "rhs")],
        recurrent_backend="scan",
        default_recurrent_mode=True,
    )
    rows = TensorDict(
        {"obs": torch.randn(6, 64), "is_init": torch.tensor([[1], [0], [0], [1], [0], [0]]) > 0}, [6]
    )
    rows["rhs"] = torch.zeros(6, 1, 128)
    assert rnn(rows)["features"].shape == (6, 128)


@numbers_of_the_document
@pytest.mark.filterwarnings("ignore:.*is used:UserWarning")
def test_memory_recipe_a() -> None:
    policy, critic = actor_and_critic()
    actor = policy
    collector = Collector(
        create_env_fn=env_maker,
        policy=policy,
        frames_per_batch=1024,
        total_frames=1_000_000,
        compact_obs=True,
    )
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(1_000_000),
        sampler=SliceSampler(slice_len=64, traj_key=("collector", "traj_ids")),
        transform=NextStateReconstructor(),
        batch_size=8 * 64,
    )
    loss = ClipPPOLoss(actor=actor, critic=critic)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, shifted=True, num_chunks=4)
    rb.extend(next(iter(collector)))
    assert torch.isfinite(loss(advantage(rb.sample()))["loss_objective"])


@numbers_of_the_document
def test_memory_recipe_b() -> None:
    policy, critic = actor_and_critic()
    actor = policy
    collector = Collector(
        create_env_fn=lambda: NextObservationDelta(env_maker()),
        policy=policy,
        frames_per_batch=1024,
        total_frames=1_000_000,
    )
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(1_000_000),
        sampler=SliceSampler(slice_len=64, traj_key=("collector", "traj_ids")),
        transform=RestoreNextObservation(in_keys=["observation"]),
        batch_size=8 * 64,
    )
    loss = ClipPPOLoss(actor=actor, critic=critic)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, shifted=True)
    rb.extend(next(iter(collector)))
    assert torch.isfinite(loss(advantage(rb.sample()))["loss_objective"])


def test_data_layout_the_buffer_to_collector_handoff() -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100_000),
        sampler=SliceSampler(slice_len=32),
        batch_size=256,
    )
    collector = rollouts.MultiCollector(
        [partial(Seeded, (3, 60))] * 4,
        None,
        replay_buffer=rb,
        frames_per_batch=200,
        total_frames=-1,
        trajs_per_batch=8,
        sync=False,
    )
    collector.start()
    while not len(rb):
        sleep(0.01)
    for _ in range(20):
        batch = rb.sample()
        inside = ~batch["is_init"][1:, 0]
        assert (batch["observation"][1:, 2] - batch["observation"][:-1, 2] == 1)[inside].all()
        assert (batch["observation"][1:, 1] == batch["observation"][:-1, 1])[inside].all()
    collector.shutdown()
    assert rb.oldest_first()["next", "done"][-1].all()  # each write ends with a trajectory


def test_data_layout_one_buffer_per_worker_differs() -> None:
    """The document's sketch does not run, as it says itself: an ensemble does not know whose rows they are."""
    num_workers, N = 4, 1_000
    buffers = [
        TensorDictReplayBuffer(storage=LazyTensorStorage(N, ndim=2), sampler=SliceSampler(num_slices=4))
        for _ in range(num_workers)
    ]
    rb = ReplayBufferEnsemble(*buffers, sample_from_all=True, batch_size=256)
    batch = rollouts.rollout(gym.make("CartPole-v1"), num_steps=20)
    with pytest.raises(RuntimeError, match="an ensemble cannot choose one of its 4 members"):
        rb.extend(batch)
    with pytest.raises(
        ValueError, match=r"ndim=2: .* got \[20\]; leave ndim out for a collector's flat batches"
    ):
        rb[0].extend(batch)
    # What runs: a collector for each member.
    buffers = [
        TensorDictReplayBuffer(storage=LazyTensorStorage(N), sampler=SliceSampler(num_slices=4))
        for _ in range(num_workers)
    ]
    rb = ReplayBufferEnsemble(*buffers, sample_from_all=True, batch_size=256)
    for writer, buffer in enumerate(buffers):
        env = ScriptedVectorEnv(Script(1, lengths=[80]))
        next(Collector(env, replay_buffer=buffer, frames_per_batch=200, writer=writer))
    sample = rb.sample()
    assert sample.batch_size == (4, 64)
    assert [len(part["collector", "traj_ids"].unique()) <= 4 for part in sample] == [True] * 4


@pytest.mark.parametrize("where", NO_PROGRAMS, ids=", ".join)
def test_what_is_no_program(where: tuple[str, str]) -> None:
    with pytest.raises((SyntaxError, NameError)):
        exec(compile(NO_PROGRAMS[where], ", ".join(where), "exec"), {})
