"""A run that is stopped and loaded has the rows and weights of one that never stopped."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from forms import is_long
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.disk import Checkpoint
from flatroll.estimators import DQNLoss, SoftUpdate, update_step
from flatroll.modules import TensorDictPrimer, q_network, set_epsilon, update_norms
from flatroll.rollouts import Collector, MultiCollector
from flatroll.wrappers.testing import Script, ScriptedTorchEnv

UPDATES = 6


class Opaque(gym.Wrapper):  # type: ignore[type-arg]
    """May hold anything, so its env begins new episodes after a save."""


def cartpoles(*, opaque: bool = False) -> Any:
    def make() -> Any:
        env = gym.make("CartPole-v1")
        return Opaque(env) if opaque else env

    return gym.vector.SyncVectorEnv([make] * 2)


class Run:
    """DQN on CartPole with slices of a compact buffer; a checkpoint after every other batch, or at these batches."""

    def __init__(
        self,
        path: Path,
        *,
        seed: int = 0,
        recurrent: Any = None,
        opaque: bool = False,
        save_at: Collection[int] | None = None,
    ) -> None:
        torch.manual_seed(seed)
        env = cartpoles(opaque=opaque)
        self.save_at = save_at
        self.policy = q_network(env, hidden=(16,), recurrent=recurrent)
        set_epsilon(self.policy, 0.3)
        loss = DQNLoss(self.policy, delay_value=True)
        self.step = update_step(
            loss, torch.optim.Adam(loss.parameters(), lr=0.01), updater=SoftUpdate(loss, tau=0.1)
        )
        self.collector = Collector(env, self.policy, frames_per_batch=32, init_random_frames=32, seed=0)
        self.buffer = ReplayBuffer(
            storage=LazyTensorStorage(160, compact_obs=True), sampler=SliceSampler(slice_len=4), batch_size=16
        )
        self.checkpoint = Checkpoint(
            path,
            buffer=self.buffer,
            collector=self.collector,
            loss=loss,
            optimizer=self.step.optimizer,
            exact=True,
        )

    def go_on(self, updates: int = UPDATES) -> None:
        """Up to this number of batches, from where the newest checkpoint is."""
        first = 0
        if self.checkpoint.versions():
            first = int(self.checkpoint.load()["batch"])
        for batch in range(first, updates):
            rows = next(self.collector)
            update_norms(self.policy, rows)
            self.buffer.extend(rows)
            for _ in range(3):
                self.step(self.buffer.sample())
            saves = batch % 2 == 1 if self.save_at is None else batch in self.save_at
            if saves:
                self.checkpoint.save(batch=batch + 1)

    def result(self) -> tuple[Any, torch.Tensor]:
        """All rows, and all weights."""
        weights = torch.nn.utils.parameters_to_vector(self.step.loss.parameters())
        return self.buffer.oldest_first(), weights.detach()


def assert_equal(one: tuple[Any, torch.Tensor], other: tuple[Any, torch.Tensor]) -> None:
    assert len(one[0]) == len(other[0]) > 0
    assert (one[0] == other[0]).all()
    assert torch.equal(one[1], other[1])


@pytest.mark.filterwarnings("ignore:exact=True. collector begins new episodes")
@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("recurrent", [None, "gru"])
def test_a_run_in_pieces_equals_one_that_never_stopped(recurrent: Any, opaque: bool, tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole", recurrent=recurrent, opaque=opaque)
    whole.go_on()
    for updates in (2, 3, 5, UPDATES):  # 3 and 5 end between two checkpoints: their last batch is lost
        seed = 7 + updates if updates > 2 else 0
        piece = Run(tmp_path / "pieces", seed=seed, recurrent=recurrent, opaque=opaque)
        piece.go_on(updates)
    assert_equal(piece.result(), whole.result())

    # The buffer holds batches 1 to 5, oldest first; opaque episodes begin anew after the saves behind batches 1 and 3.
    is_init = whole.buffer.oldest_first()["is_init"]
    assert bool(is_init[32].all() and is_init[3 * 32].all()) == opaque


def test_saves_leave_no_trace(tmp_path: Path) -> None:
    """A run that saves in the middle of its episodes equals one that never saves, also after a resume."""
    whole = Run(tmp_path / "whole", save_at=[])
    whole.go_on()
    piece = Run(tmp_path / "pieces", save_at=[0, 2, 3])
    piece.go_on(4)
    piece = Run(tmp_path / "pieces", save_at=[], seed=5)
    piece.go_on()
    assert_equal(piece.result(), whole.result())


def test_without_reopening_slices_would_end_at_the_save(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.go_on(2)
    loaded = Run(tmp_path, seed=3)
    loaded.checkpoint.load()
    numbers = torch.get_rng_state()
    for each in (run, loaded):
        torch.set_rng_state(numbers)
        each.buffer.extend(next(each.collector))
    tables = [each.buffer.ring.state_dict()["chains"] for each in (run, loaded)]
    assert (tables[0]["total"] == tables[1]["total"]).all()
    assert run.buffer.index is not None and loaded.buffer.index is not None
    assert run.buffer.index.open_trajectories == loaded.buffer.index.open_trajectories > 0

    closed = ReplayBuffer(storage=LazyTensorStorage(160, compact_obs=True), sampler=SliceSampler(slice_len=4))
    closed.load_state_dict(run.buffer.state_dict())
    assert closed.index is not None and closed.index.open_trajectories == 0


def test_a_buffer_without_its_collector_is_not_reopened(tmp_path: Path) -> None:
    """Another collector counts from 0 as well, and its rows belong to other trajectories."""
    run = Run(tmp_path)
    run.go_on(2)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(160, compact_obs=True), sampler=SliceSampler(slice_len=4), batch_size=16
    )
    Checkpoint(tmp_path, buffer=buffer).load(partial=True)
    assert buffer.index is not None and len(buffer) > 0
    assert buffer.index.open_trajectories == 0


def test_a_wrapper_that_cannot_be_saved_is_named_in_one_line(tmp_path: Path) -> None:
    with pytest.warns(UserWarning) as caught:
        Run(tmp_path, opaque=True)
    (warning,) = caught
    assert str(warning.message) == (
        "exact=True: collector begins new episodes at each save, since Opaque has no get_snapshot and set_snapshot"
    )
    assert warning.filename == __file__


def test_without_exact_the_episodes_differ(tmp_path: Path) -> None:
    """The env of the run that goes on is in the middle of an episode."""
    whole, piece = (Run(tmp_path / name) for name in ("whole", "pieces"))
    for run in (whole, piece):
        run.checkpoint._exact = {}
    whole.go_on()
    piece.go_on(2)
    piece.go_on()
    piece.collector.restart()
    piece.go_on()
    assert not torch.equal(piece.result()[1], whole.result()[1])


def test_what_cannot_be_exact_is_refused(tmp_path: Path) -> None:
    env = cartpoles(opaque=True)
    with pytest.raises(TypeError, match=r"exact=True needs collector=, a Collector .*, got NoneType"):
        Checkpoint(tmp_path, policy=torch.nn.Linear(1, 1), exact=True)
    with pytest.raises(ValueError, match=r"needs a seed of collector.*can save its state .Opaque has no"):
        Checkpoint(tmp_path, collector=Collector(env, frames_per_batch=8), exact=True)
    with pytest.raises(ValueError, match="needs the random generators: leave rng=False out"):
        Checkpoint(tmp_path, collector=Collector(env, frames_per_batch=8, seed=0), exact=True, rng=False)
    assert not hasattr(MultiCollector, "restart")

    class Unseeded(ScriptedTorchEnv):
        get_snapshot = set_snapshot = None  # type: ignore[assignment]

    unseeded = Unseeded(Script(4))  # its reset takes no seed
    unseeded.reset = lambda: ScriptedTorchEnv.reset(unseeded)  # type: ignore[method-assign]
    other = Collector(unseeded, frames_per_batch=8, seed=0)
    with pytest.raises(ValueError, match="needs a seed of other"):
        Checkpoint(
            tmp_path, collector=Collector(cartpoles(), frames_per_batch=8, seed=0), other=other, exact=True
        )


def test_each_collector_and_each_seed_goes_on(tmp_path: Path) -> None:
    def collectors(seed: int) -> tuple[Collector, Collector]:
        envs = (gym.make_vec("CartPole-v1", num_envs=2) for _ in range(2))
        one, other = (Collector(env, frames_per_batch=8, seed=seed) for env in envs)
        return one, other

    one, other = collectors(0)
    checkpoint = Checkpoint(tmp_path, collector=one, second=other, exact=True)
    next(one)
    next(other)
    other.set_seed(7)
    next(other)
    checkpoint.save()

    loaded = collectors(3)
    Checkpoint(tmp_path, collector=loaded[0], second=loaded[1], exact=True).load()
    for goes_on, again in zip((one, other), loaded, strict=True):
        assert (next(goes_on) == next(again)).all()


class Noise(TensorDictModuleBase):
    """Acts by a hidden number that goes on over episodes."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys = ["observation", "_n"]
        self.out_keys = ["action", ("next", "_n")]  # pyright: ignore[reportAttributeAccessIssue]

    def make_tensordict_primer(self) -> TensorDictPrimer:
        return TensorDictPrimer({"_n": torch.zeros(1)})

    def forward(self, rows: TensorDictBase) -> TensorDictBase:
        after = rows["_n"] + 1
        rows["action"] = (after.squeeze(-1) % 3 == 0).long()
        rows["next", "_n"] = after
        return rows


def test_what_a_policy_carries_begins_anew(tmp_path: Path) -> None:
    def make() -> Collector:
        return Collector(gym.make_vec("CartPole-v1", num_envs=2), Noise(), frames_per_batch=10, seed=0)

    one = make()
    checkpoint = Checkpoint(tmp_path, collector=one, exact=True)
    next(one)
    checkpoint.save()
    loaded = make()
    Checkpoint(tmp_path, collector=loaded, exact=True).load()
    assert torch.equal(next(one)["action"], next(loaded)["action"])


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """With kill -9; two kills, in the long form ten."""
    kills = 10 if is_long() else 2
    updates = 4 * kills
    command = [sys.executable, __file__, str(tmp_path / "killed"), str(updates)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    moments = random.Random(0)
    for _ in range(kills):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()  # it has begun to train
        try:
            process.wait(moments.uniform(0.0, 0.3))
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
        assert process.returncode in (0, -signal.SIGKILL)

    killed = Run(tmp_path / "killed")
    killed.go_on(updates)
    whole = Run(tmp_path / "whole")
    whole.go_on(updates)
    assert_equal(killed.result(), whole.result())


if __name__ == "__main__":
    torch.set_num_threads(1)
    run = Run(Path(sys.argv[1]))
    print("begun", flush=True)
    run.go_on(int(sys.argv[2]))
