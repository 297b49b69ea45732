"""The actor that holds a collector in another process of a Ray cluster."""

import importlib
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from flatroll.layout.keys import POLICY_VERSION
from flatroll.rollouts.collector import Collector
from flatroll.rollouts.workers.actors.fleet import Report
from flatroll.sharing.flat_weights import unflatten_weights
from flatroll.sharing.packed import Packed, pack
from flatroll.sharing.ray_calls import Failure, attempt


class CollectorActor:
    """Makes a collector, and collects a window at each call. Rows and errors go back as plain values."""

    _collector: Any = None
    #: Of a `MultiCollector`, which counts the updates that it has seen: each one's number for the driver.
    _versions: list[int] | None = None

    def start(
        self,
        create_env_fn: Any,
        policy: Any,
        policy_factory: Callable[[], Any] | None,
        arguments: Mapping[str, Any],
        own: Mapping[str, Any],
    ) -> int | Failure:
        """Make the collector; return the bytes of a row as far as its spec tells, or a `Failure`.

        Args:
            create_env_fn: a function that makes the env.
            policy: of the collector, or None with a ``policy_factory`` that makes it here.
            policy_factory: a function, or None.
            arguments: of the collector.
            own: further ones, of this actor; ``num_threads``, ``workers``, and ``sync`` for a `MultiCollector` of them.
        """
        made: int | Failure = attempt(
            self._start, create_env_fn, policy, policy_factory, {**arguments, **own}
        )
        return made

    def _start(self, create_env_fn: Any, policy: Any, factory: Callable[[], Any] | None, options: Any) -> int:
        threads, workers, sync = (options.pop(name) for name in ("num_threads", "workers", "sync"))
        if workers > 1:
            self._versions = [0]
            # By its public name: files that hold an actor stand beside those of processes, not on them.
            multi_collector = importlib.import_module("flatroll.rollouts").MultiCollector
            self._collector = multi_collector(
                create_env_fn,
                policy,
                policy_factory=factory,
                num_workers=workers,
                sync=sync,
                num_threads=threads,
                **options,
            )
            return 0
        torch.set_num_threads(threads)
        reseed(options["seed"])
        self._collector = Collector(create_env_fn, policy if factory is None else factory(), **options)
        leaves: Any = self._collector.spec.items(True, True)
        return sum(spec.shape[1:].numel() * spec.dtype.itemsize for _, spec in leaves)

    def collect(self, version: int, weights: Any, frames: int | None, total: int | None) -> tuple[Any, Any]:
        """Collect a window; return a `Report` or a `Failure`, and the rows and their *final*, packed.

        Args:
            version: number of the weights.
            weights: an array of bytes and its layout, None if the actor has this version.
            frames: rows of the window; None: as before.
            total: rows to collect in all; None: no end.
        """
        found = attempt(self._collect, version, weights, frames, total)
        return (found, None) if isinstance(found, Failure) else found

    def _collect(
        self, version: int, weights: Any, frames: int | None, total: int | None
    ) -> tuple[Report, Any]:
        collector = self._collector
        if self._versions:
            if weights is not None or version != self._versions[-1]:
                collector.update_policy_weights_(None if weights is None else unflatten_weights(*weights))
                self._versions.append(version)
        else:
            if weights is not None:
                collector.update_policy_weights_(unflatten_weights(*weights))
            collector.policy_version = version
            collector.total_frames = -1 if total is None else total
            if frames is not None:
                collector.frames_per_batch = frames
        batch = None if total is not None and total < 1 else next(collector, None)
        if batch is None:
            return Report(0, collector.frames, version, 0), None
        if self._versions and batch.get(POLICY_VERSION, None) is not None:
            batch[POLICY_VERSION] = torch.tensor(self._versions)[batch[POLICY_VERSION]]
        final = collector.final
        packed: tuple[Packed, Packed | None] = pack((batch, final))
        if not isinstance(packed[0], Packed):
            raise TypeError(f"postproc must return a tensordict of rows, got {type(batch).__name__}")
        return Report(len(batch), collector.frames, version, packed[0].nbytes), packed

    def close(self) -> None:
        """Close the env."""
        if self._collector is not None:
            self._collector.shutdown()


def reseed(seed: int | None) -> None:
    """Seed the generators of Python, NumPy and torch; without a seed, with numbers that no other process has."""
    random.seed(seed)
    np.random.seed(None if seed is None else seed % 2**32)
    if seed is None:
        torch.seed()
    else:
        torch.manual_seed(seed)
