"""Every public class that takes rows or a device is driven on the emulated device, or it is said here why not."""

import inspect
from importlib import import_module

import pytest
from chip_cases import Cases

#: Classes that no case makes, by the reason.
NOT_DRIVEN = {
    "holds no rows": """
        After BoundaryKeys Capabilities Estimate LossInputs OwnerGoneError
        AdaptiveKLController ConstantKLController PolicyRecord SnapshotFamily Snapshots
    """,
    "a base class, whose subclasses are driven": """
        Buffer Column ColumnStorage KLControllerBase MarkerWrapper OffPolicyLoss ParameterScheduler PolicyGradientLoss
        Sampler Storage StorageCheckpointerBase Transform VectorSource Writer
    """,
    "driven within others": """
        Draw Ring RoundRobinWriter TensorDictRoundRobinWriter TrajectoryIndex set_recurrent_mode
    """,
    "another name of a driven class": "SyncDataCollector",
    "its rows come from other processes, as those of MultiSyncCollector": "MultiAsyncCollector",
    "a number that a schedule changes": "LambdaScheduler SchedulerList StepScheduler",
    "needs a package that the device does not know: jax, vmas, ray": """
        FunctionalEnv VmasSource RayCollector RayReplayBuffer RayReplayBufferEnsemble
    """,
    "reads or writes texts, on the CPU": """
        PromptData PromptTensorDictTokenizer RolloutFromModel TensorDictTokenizer TextModule TokenizedDatasetLoader
    """,
}
EXCUSED = {name for names in NOT_DRIVEN.values() for name in names.split()}
ROOMS = [
    "layout",
    "wrappers",
    "rollouts",
    "buffers",
    "modules",
    "estimators",
    "trees",
    "text",
    "export",
    "deploy",
]


@pytest.mark.parametrize("room", ROOMS)
def test_each_public_class_is_driven(room: str) -> None:
    module = import_module(f"flatroll.{room}")
    classes = {name for name in module.__all__ if inspect.isclass(getattr(module, name))}
    assert classes - driven() - EXCUSED == set()


def test_no_reason_for_what_is_driven() -> None:
    assert EXCUSED & driven() == set()


def driven() -> set[str]:
    """The public names that the cases of the other files use."""
    if len(Cases.made) < 4:
        pytest.skip("needs the cases of the other files: run the folder")
    return {name for cases in Cases.made for names in cases.drives.values() for name in names.split()}
