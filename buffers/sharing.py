"""Helpers for passing replay buffers and ensembles to other processes."""

import pickle
from multiprocessing.reduction import ForkingPickler

import torch
from torch.utils.data import get_worker_info


def pickle_by_value(cls: type) -> None:
    """Make objects of this class be copied to other processes.

    By default, torch's pickler for other processes shares the memory of the tensors, but not the counters.
    """
    ForkingPickler.register(cls, lambda buffer: (pickle.loads, (pickle.dumps(buffer),)))


def reseed_in_worker(generator: torch.Generator | None) -> None:
    """Reseed ``generator`` in a worker of a `torch.utils.data.DataLoader`; elsewhere do nothing.

    Every worker starts with a copy of the same generator. The new seed depends on the generator's state and the
    worker's seed, so two buffers of a worker also differ, and a loader with a seeded generator is reproducible.
    """
    worker = get_worker_info()
    if generator is not None and worker is not None:
        number = torch.randint(2**62, (), generator=generator)
        generator.manual_seed(int(number) ^ worker.seed)
