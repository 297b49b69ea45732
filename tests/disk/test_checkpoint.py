"""A whole run is saved as one version, and goes on from it; whatever does not fit changes nothing."""

import random
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import interpreters
import numpy as np
import pytest
import torch
from torch import nn

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, SliceSampler
from flatroll.disk import Checkpoint, Folder
from flatroll.disk.state_tree import Packer
from flatroll.estimators import SACLoss
from flatroll.modules import actor, q_network
from flatroll.rollouts import Collector


class Run:
    """A small run: a collector, a buffer, a policy with its optimizer, and a scheduler."""

    def __init__(self, path: Path, seed: int = 0, ensemble: bool = False, **options: Any) -> None:
        torch.manual_seed(seed)
        self.policy: Any = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.collector = Collector(
            gym.make_vec("CartPole-v1", num_envs=2), None, frames_per_batch=20, total_frames=-1, seed=seed
        )
        self.buffer = ReplayBuffer(
            storage=LazyTensorStorage(100, compact_obs=True), sampler=SliceSampler(slice_len=4), batch_size=16
        )
        self.checkpoint = Checkpoint(
            path,
            buffer=ReplayBufferEnsemble(self.buffer, batch_size=16) if ensemble else self.buffer,
            collector=self.collector,
            policy=self.policy,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            **options,
        )

    def collect(self) -> None:
        self.buffer.extend(next(iter(self.collector)))

    def update(self) -> list[Any]:
        """A gradient step; all that is random in it."""
        sample = self.buffer.sample()
        loss = self.policy(sample["observation"]).square().mean() * torch.rand(())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        drawn = [float(loss.detach()), float(np.random.rand()), random.random()]
        return [*drawn, sample["observation"].sum().item(), self.optimizer.param_groups[0]["lr"]]


@pytest.mark.parametrize("ensemble", [False, True])
def test_a_run_goes_on(tmp_path: Path, ensemble: bool) -> None:
    run = Run(tmp_path, ensemble=ensemble)
    assert run.checkpoint.versions() == []
    for step in range(3):
        run.collect()
        run.update()
        assert run.checkpoint.save(step=step, note={"best": 0.5}) == step + 1
    expected = [run.update() for _ in range(3)]
    other = Run(tmp_path, seed=5, ensemble=ensemble)
    assert other.checkpoint.versions() == [3, 2]
    assert other.checkpoint.load() == {"step": 2, "note": {"best": 0.5}}
    assert [other.update() for _ in range(3)] == expected
    ids = run.buffer[:]["collector", "traj_ids"]
    other.collect()  # the env begins anew, with ids that none had
    new = other.buffer[-20:]["collector", "traj_ids"]
    assert int(new.min()) > int(ids.max())
    other.checkpoint.save(step=9)
    assert other.checkpoint.load(version=4) == {"step": 9}
    for one in (run, other):
        one.collector.shutdown()


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    run, other = Run(tmp_path), Run(tmp_path, seed=5)
    run.collect()
    run.checkpoint.save(step=1)
    with pytest.raises(FileExistsError):
        other.checkpoint.save()
    rows, weights = len(other.buffer), other.policy[0].weight.clone()
    wide = nn.Linear(9, 9)
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match=r"Missing key.*(?s:.*)nothing has changed"):
        _with(other, policy=wide).load()
    with pytest.raises(ValueError, match=r"has the parts .*, this Checkpoint has \['policy'\]"):
        Checkpoint(tmp_path, buffer=other.buffer, policy=other.policy).load()
    with pytest.raises(ValueError, match="has a buffer: pass one like it as Checkpoint"):
        Checkpoint(tmp_path, policy=other.policy).load()
    assert len(other.buffer) == rows and torch.equal(other.policy[0].weight, weights)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(TypeError, match="scheduler has no state_dict"):
        Checkpoint(tmp_path, scheduler=3)
    with pytest.raises(TypeError, match="replay is a buffer: pass it as buffer="):
        Checkpoint(tmp_path, replay=run.buffer)
    with pytest.raises(TypeError, match="buffer must be a ReplayBuffer"):
        Checkpoint(tmp_path, buffer=[])
    with pytest.raises(TypeError, match=r"'thing'.* is a object"):
        run.checkpoint.save(thing=object())
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        Checkpoint(tmp_path / "none", policy=other.policy).load()
    run.buffer.dumps(tmp_path / "buffer")
    with pytest.raises(ValueError, match=r"saved by buffer.dumps: load it with buffer.loads"):
        Checkpoint(tmp_path / "buffer", buffer=other.buffer).load()
    run.buffer.loads(tmp_path)  # of a whole run, the buffer alone
    for one in (run, other):
        one.collector.shutdown()


@pytest.mark.parametrize(
    "others",
    [
        {"parts": {}, "rng": None, "extra": 3},
        {"parts": 5, "rng": None, "extra": {}},
        {"parts": {"a" * 10**6: {}, 3: {}}, "rng": None, "extra": {}},
        {"parts": {"policy": {}}, "rng": {"torch": None}, "extra": {}},
    ],
)
def test_what_was_saved_along_and_cannot_be_is_named_with_its_folder(others: Any, tmp_path: Path) -> None:
    packer = Packer()
    packer.add("buffer", None)
    packer.add("others", others)
    with Folder(tmp_path, write=True) as folder:
        folder.publish(packer.tree, packer.tensors)
    with pytest.raises(ValueError, match=r"its extra values are|has the parts|generators cannot") as caught:
        Checkpoint(tmp_path, policy=nn.Linear(1, 1)).load()
    assert len(str(caught.value)) < 1000 and caught.value.__notes__ == [f"while {tmp_path} was read"]


def _with(run: Run, **parts: Any) -> Checkpoint:
    """The checkpoint of a run with other parts."""
    names = ("collector", "policy", "optimizer", "scheduler")
    return Checkpoint(
        run.checkpoint.path, buffer=run.buffer, **({name: getattr(run, name) for name in names} | parts)
    )


@pytest.mark.parametrize("ensemble", [False, True])
def test_a_part_of_a_run_is_loaded_alone_and_the_rest_is_not_lost(tmp_path: Path, ensemble: bool) -> None:
    run = Run(tmp_path, ensemble=ensemble)
    run.collect()
    run.update()
    run.checkpoint.save(step=1)
    policy = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    alone = Checkpoint(tmp_path, policy=policy)
    with pytest.raises(ValueError, match=r"has a buffer: .*, or leave it out with load\(partial=True\)"):
        alone.load()
    state = torch.get_rng_state()
    assert alone.load(partial=True) == {"step": 1}
    assert all(map(torch.equal, policy.parameters(), run.policy.parameters()))
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(
        FileExistsError, match=r"\['buffer', 'collector', 'optimizer', 'scheduler'\], which load\(par"
    ):
        alone.save()
    with pytest.raises(
        ValueError, match=r"this Checkpoint has \['actor', 'policy'\]: create it with the same parts\n"
    ):
        Checkpoint(tmp_path, policy=policy, actor=policy).load(partial=True)
    with pytest.raises(TypeError, match="partial must be True or False"):
        alone.load(partial="policy")  # type: ignore[arg-type]
    other = Run(tmp_path, seed=5, ensemble=ensemble)
    assert other.checkpoint.load(partial=True) == {"step": 1}
    assert len(other.buffer) == len(run.buffer)
    assert other.checkpoint.save() == 2  # nothing was left out
    for one in (run, other):
        one.collector.shutdown()


def test_a_version_without_a_buffer_names_partial_as_the_way_out(tmp_path: Path) -> None:
    policy = nn.Linear(1, 1)
    Checkpoint(tmp_path, policy=policy, critic=nn.Linear(1, 1)).save()
    alone = Checkpoint(tmp_path, policy=policy)
    with pytest.raises(
        ValueError, match=r"with the same parts, or leave the others out with load\(partial=True\)"
    ):
        alone.load()
    assert alone.load(partial=True) == {}
    with pytest.raises(FileExistsError, match=r"has \['critic'\], which load"):
        alone.save()


def test_without_a_buffer_and_without_generators(tmp_path: Path) -> None:
    module: Any = nn.BatchNorm1d(3)
    checkpoint = Checkpoint(tmp_path, policy=module, rng=False, keep=3)
    for _ in range(4):
        module(torch.rand(5, 3))
        checkpoint.save()
    assert checkpoint.versions() == [4, 3, 2]
    other: Any = nn.BatchNorm1d(3)
    state = torch.get_rng_state()
    assert Checkpoint(tmp_path, policy=other, rng=False).load(version=3) == {}
    assert int(other.num_batches_tracked) == 3 and torch.equal(torch.get_rng_state(), state)


def test_the_example_ends_at_the_same_weights_whatever_kills_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flatroll.examples.disk.resume_training", str(tmp_path / "run")]
    done = interpreters.run(
        [*command, "--demo-kill", "--episodes", "8"],
        check=True,
        env={"PYTHONPATH": "src"},
    )
    last = done.stdout.splitlines()[-1]
    resumed, straight = (part.rpartition(" ")[2] for part in last.split(";"))
    assert resumed == straight and "killed" in last


def sac() -> tuple[Any, SACLoss, torch.optim.Optimizer]:
    env = gym.make("Pendulum-v1")
    policy = actor(env, std="dependent")
    loss = SACLoss(policy, q_network(env))
    return policy, loss, torch.optim.Adam(loss.parameters())


def test_a_trained_parameter_that_no_part_holds_is_an_error(tmp_path: Path) -> None:
    """SAC's critics would come back new, with the old moments of Adam, and its temperature at the start."""
    policy, loss, optimizer = sac()
    trained = len(list(loss.parameters()))
    missing = trained - len(list(policy.parameters()))
    checkpoint = Checkpoint(tmp_path / "run", policy=policy, optimizer=optimizer)
    text = rf"optimizer trains {trained} parameters, of which {missing} are in no part .*loss=loss"
    for _ in range(2):
        with pytest.raises(ValueError, match=text):
            checkpoint.save()
    assert not (tmp_path / "run").exists()

    Checkpoint(tmp_path / "run", loss=loss, optimizer=optimizer).save()
    _, other, other_optimizer = sac()
    Checkpoint(tmp_path / "run", loss=other, optimizer=other_optimizer).load()
    for here, there in zip(loss.parameters(), other.parameters(), strict=True):
        assert torch.equal(here, there)


class Holder:
    """A part that is no module; its state shares the parameter's memory or holds a copy."""

    def __init__(self, weight: torch.Tensor, copies: bool) -> None:
        self.weight, self.copies = weight, copies

    def state_dict(self) -> dict[str, Any]:
        return {"deep": [self.weight.detach().clone() if self.copies else self.weight.detach()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight.data.copy_(state["deep"][0])


@pytest.mark.parametrize("copies", [False, True])
def test_a_part_that_is_no_module_may_hold_what_is_trained(tmp_path: Path, copies: bool) -> None:
    weight = torch.randn(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    Checkpoint(tmp_path / "held", optimizer=optimizer, holder=Holder(weight, copies)).save()
    other = Holder(torch.randn(3), copies)
    with pytest.raises(ValueError, match=r"1 parameters, of which 1 are .* \(shapes \[3\]\)"):
        Checkpoint(tmp_path / "not", optimizer=optimizer, holder=other).save()


def test_a_module_of_equal_values_does_not_hold_the_parameters(tmp_path: Path) -> None:
    """A target network equals the trained one at first, and differs later."""
    net, target = nn.Linear(2, 2), nn.Linear(2, 2)
    target.load_state_dict(net.state_dict())
    optimizer = torch.optim.Adam(net.parameters())
    with pytest.raises(ValueError, match="of which 2 are in no part"):
        Checkpoint(tmp_path, target=target, optimizer=optimizer).save()
    Checkpoint(tmp_path, target=target, net=net, optimizer=optimizer).save()
