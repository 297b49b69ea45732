"""What each test finds as the one before it did."""

import gc
import importlib.util
import multiprocessing
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from multiprocessing import popen_spawn_posix, util
from types import SimpleNamespace

import forms
import interpreters
import numpy as np
import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help="the long form of the tests: more of each kind of check"
    )


def pytest_configure(config: pytest.Config) -> None:
    forms.choose(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The quick form leaves out what is marked so, and combinations of values that met before."""
    if not forms.is_long():
        kept, left_out = forms.quick(items)
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run."""
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    if item.get_closest_marker("triton") and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")


@pytest.fixture(autouse=True)
def start_method() -> None:
    """Processes start as Python starts them: torchrl, once imported, has them all spawned, with seconds of imports."""
    if multiprocessing.get_start_method(allow_none=True) is not None:
        multiprocessing.set_start_method(None, force=True)


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """Random numbers of this process are the same in each run, whichever tests run before."""
    random.seed(0)
    np.random.seed(0)

    # torch.manual_seed also notes for each kind of device, with a whole stack, to seed it when it is first used.
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def ctrl_c() -> None:
    """Ctrl-C is heard also where a shell that started the tests in the background has it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def no_power_cut() -> Iterator[None]:
    """``os.fsync`` only looks at the descriptor: whether it waits for the device can be seen after a power cut alone.

    What that leaves is tested with the order of the operations (`disk_recorder`), which stays as it is.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(autouse=True, scope="session")
def quick_collections() -> None:
    """No ``gc.collect()`` looks at what is there before the first test, modules above all: 0.3 s and more each time."""
    make_an_example()
    gc.freeze()


def make_an_example() -> None:
    """Hypothesis looks for what holds its generator before its first example; Python 3.14 finds nothing frozen."""
    try:
        from hypothesis import given, strategies
    except ModuleNotFoundError:  # of an environment for some of the tests
        return

    given(strategies.none())(lambda _: None)()


@pytest.fixture(autouse=True, scope="session")
def no_collections_of_a_parents_garbage() -> None:
    """A forked child, such as Gymnasium's workers, leaves alone what its parent had: envpool's pools crash there."""
    os.register_at_fork(after_in_child=gc.freeze)


@pytest.fixture(autouse=True, scope="session")
def quick_interpreters() -> Iterator[None]:
    """What prepares the workers of collectors, and processes that are spawned, are forked with torch loaded."""
    known_to_nurseries = SimpleNamespace(**{**vars(subprocess), "Popen": interpreters.OfCollectors})
    known_to_spawn = SimpleNamespace(**{**vars(util), "spawnv_passfds": interpreters.spawn_forked})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flatroll.sharing.nursery.subprocess", known_to_nurseries)
        patch.setattr(popen_spawn_posix, "util", known_to_spawn)
        yield
    interpreters.close_servers()
