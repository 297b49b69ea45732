"""`export_policy`: writes a policy to a file that needs neither flatroll nor torch, and proves it on stored rows."""

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from flatroll import __version__
from flatroll.deploy.graph import Entries, StepGraph, act, without_autocast
from flatroll.deploy.graph_files import KINDS
from flatroll.deploy.interface import (
    Interface,
    check_policy,
    check_states,
    name_of,
    read_interface,
    reads_of,
    samplers_of,
)
from flatroll.deploy.proof import Rows, flat_rows, prove, read_column, read_rows
from flatroll.deploy.records import Entry, Norm, PolicyRecord
from flatroll.disk.beside import write_beside
from flatroll.layout.checks import BLAMED, blame_entries, check_flags, check_path
from flatroll.layout.keys import NestedKey, as_tuple
from flatroll.modules.running_norm import RunningNorm
from flatroll.wrappers.markers import recurrent_states


@dataclass(frozen=True, slots=True)
class ExportedPolicy:
    """What `export_policy` returns.

    Attributes:
        path: the file.
        inputs: names of what the graph reads, ``[batch, ...]`` each.
        outputs: names of what it returns.
        largest_difference: between outputs of the file and of the policy, absolute for numbers up to 1 and relative
            above; of a choice, by how much its score is below that of the policy's choice.
        rows: number of rows that were compared.
    """

    path: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    largest_difference: float
    rows: int


def export_policy(
    policy: nn.Module, path: str | Path, *, batch: TensorDictBase, sample: bool = False
) -> ExportedPolicy:
    """Write a policy to a file, and prove that the file does what the policy does.

    The graph in the file makes one step of any number of rows. Normalisation is frozen inside, action masks are
    inputs, and states of memories are inputs and outputs: ``recurrent_state`` goes in, ``next.recurrent_state`` comes
    out and goes in again. Where ``is_init`` is True the graph sets them to their first value, whatever came in.

    Then the rows of ``batch`` are played through the file and through the policy, step by step, each with its own
    states; an episode begins with what another one left in them. All outputs are compared, and the scores that choices
    are made from. Where no run is longer than the ``context`` of a transformer, one of ``context + 2`` steps over these
    rows is played too, in which its cache turns. If an output differs by more than 1e-5, there is an error and no file:
    it is written under another name, and renamed after its proof. An older file at ``path`` is replaced.

    Args:
        policy: a tensordict module, such as an actor, a critic or a Q-network of `flatroll.modules`, or a sequence with
            modules of your own. It is copied, and acts as after ``eval()`` and without autocast.
        path: ``"policy.onnx"`` (extra ``onnx``), or ``"policy.pt2"`` for `torch.export.load`.
        batch: flat rows ``[N]`` that the policy can read, such as a batch of a collector; some hundreds are enough. For
            a policy with memory some must begin an episode, and some follow one another.
        sample: the file returns what actions are drawn from (logits; means and deviations; action values of a
            Q-network) in place of the deterministic action; those of illegal options are as `ActionMask` makes them.
            Default False.

    Returns:
        `ExportedPolicy`; `read_record` reads the same and more from the file.

    Raises:
        ImportError: onnx, onnxscript or onnxruntime is missing; the message names the extra.
        KeyError: ``batch`` lacks an entry that the policy reads.
        TypeError: ``policy`` is no tensordict module, ``batch`` no tensordict.
        ValueError: file and policy differ, or an output of the policy is not finite; the error names the first row. A
            state has no first value (``make_tensordict_primer``), or memories are reset by several entries. A part of
            the policy depends on numbers in its input by Python's ``if``, or has no form in ONNX; the error names the
            part. onnxruntime cannot run the file. ``path`` has another suffix, ``batch`` lacks rows, a weight has half
            precision, or with ``sample`` the policy has no distribution.

    >>> import tempfile
    >>> import gymnasium as gym
    >>> from flatroll.modules import actor
    >>> from flatroll.rollouts import rollout
    >>> env = gym.make_vec("CartPole-v1", num_envs=2)
    >>> policy = actor(env)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     exported = export_policy(policy, f"{folder}/policy.pt2", batch=rollout(env, policy, num_steps=8, seed=0))
    >>> exported.inputs, exported.outputs, exported.rows, exported.largest_difference < 1e-5
    (('observation',), ('action',), 16, True)
    """
    module = check_policy(policy)
    path = check_path("path", path)
    if path.suffix not in KINDS:
        raise ValueError(f"path must end with {' or '.join(KINDS)}, got {str(path)!r}")
    check_flags(sample=sample)
    flat, numbers = flat_rows(batch)

    with without_autocast():
        return _export(module, path, flat, numbers, sample=sample)


def _export(
    policy: TensorDictModuleBase, path: Path, flat: TensorDictBase, numbers: Tensor, *, sample: bool
) -> ExportedPolicy:
    """Write and prove the file; ``numbers`` are those of the rows ``flat`` in the caller's batch."""
    on_host = _frozen_copy(policy)
    interface = read_interface(on_host, _first_step(on_host, flat), sample=sample)
    rows = read_rows(flat, interface)._replace(numbers=numbers)
    example = _example(rows, interface)
    # of a copy: what happens to it while it is traced does not reach the policy that is compared
    file = KINDS[path.suffix](copy.deepcopy(on_host), interface, example)

    with write_beside(path, replace=True) as beside:
        file.write(beside, None)
        comparison = prove(on_host, file.open(beside), rows, interface)
        record = PolicyRecord(
            flatroll=__version__,
            inputs=_entries(example),
            outputs=_entries(StepGraph(on_host, interface.inputs, interface.outputs)(example)),
            states={state: interface.next_of(state) for state in interface.states},
            norms=_norms(on_host),
            sample=sample,
            rows=comparison.rows,
            episodes=comparison.episodes,
            largest_difference=comparison.largest,
        )
        file.write(beside, record)

    names = tuple(interface.inputs)
    return ExportedPolicy(path, names, tuple(interface.outputs), comparison.largest, comparison.rows)


def _frozen_copy(policy: TensorDictModuleBase) -> TensorDictModuleBase:
    """Return a copy on the host, in eval mode, whose weights take no gradient."""
    copied: TensorDictModuleBase = copy.deepcopy(policy)
    copied.to("cpu").eval().requires_grad_(False)
    for sampler in samplers_of(copied):
        sampler.return_log_prob = False  # nobody reads them, and they would stay in the graph
    return copied


def _first_step(policy: TensorDictModuleBase, flat: TensorDictBase) -> TensorDictBase:
    """Return the first row after the policy has acted on it."""
    check_states(policy, policy.out_keys)
    states = {as_tuple(key): value for key, value in recurrent_states(policy).items()}
    columns: dict[NestedKey, Tensor] = {}
    for key in reads_of(policy):
        first = states.get(as_tuple(key))
        if first is None:
            columns[key] = read_column(flat, key)[:1].clone()
        else:
            columns[key] = first.detach().unsqueeze(0).clone()
    try:
        with torch.no_grad():
            return act(policy, columns, 1)
    except BLAMED as error:
        blame_entries(policy, flat, columns, error)
        raise


def _example(rows: Rows, interface: Interface) -> Entries:
    """Return two rows of all inputs, with the first states."""
    at = torch.tensor([0, min(1, len(rows.starts) - 1)])
    entries = {name: value.expand(2, *value.shape).clone() for name, value in interface.states.items()}
    for name in interface.inputs:
        if name not in entries:
            entries[name] = rows.columns[name][at]
    return {name: entries[name] for name in interface.inputs}


def _entries(columns: Entries) -> tuple[Entry, ...]:
    """Return what a file's record says about tensors."""
    return tuple(
        Entry(name, str(column.dtype).removeprefix("torch."), tuple(column.shape[1:]))
        for name, column in columns.items()
    )


def _norms(policy: nn.Module) -> tuple[Norm, ...]:
    found: list[Norm] = []
    for part in policy.modules():
        if isinstance(part, RunningNorm):
            found.append(Norm(name_of(part.in_key), int(part.statistics.count)))
    return tuple(found)
