"""What replay buffers and ensembles do alike on their way to other processes."""

import pickle
from multiprocessing.reduction import ForkingPickler

import torch
from torch.utils.data import get_worker_info


def pickle_by_value(cls: type) -> None:
    """Let other processes get copies of the objects of this class.

    By default, torch's pickler for other processes shares the memory of the tensors, but not the counters.
    """
    ForkingPickler.register(cls, lambda buffer: (pickle.loads, (pickle.dumps(buffer),)))


def reseed_in_worker(generator: torch.Generator | None) -> None:
    """Give ``generator`` numbers of its own in a worker of a `torch.utils.data.DataLoader`; elsewhere nothing changes.

    Every worker begins with a copy of one generator. The new seed depends on the generator's state and on the worker's
    seed, so that two buffers of one worker differ too, and a loader with a seeded generator repeats itself.
    """
    worker = get_worker_info()
    if generator is not None and worker is not None:
        number = torch.randint(2**62, (), generator=generator)
        generator.manual_seed(int(number) ^ worker.seed)
