"""What a training loop waits for: counts on the emulated device, and their table, docs/howto/gpu_waits.md."""

import chip_waits
import pytest

#: No wait and no blocking upload.
FREE = {
    "env step with `InitTracker`, `StepCounter`, `TrajId`, `RewardSum`",
    "`Collector`, SAME_STEP",
    "… with an actor of `recurrent='gru'`",
    "… with an actor of `recurrent='lstm'`",
    "… with an action mask",
    "… with random actions under a mask",
    "… with `no_cuda_sync=True`",
    "`GAE`",
    "… and `shifted_budget=…`",
    "… of a compact batch",
    "`VTrace`",
    "`update_step`, `step.epochs`",
    "`DQNLoss`, backward, `SoftUpdate`",
    "`update_norms`",
    "`RewardScale.update`, after `.to(device)`",
    "`buffer.sample`, single rows",
    "`buffer.sample`, slices",
    "`buffer.sample`, n-step returns",
    "`buffer.sample`, single rows, compact",
    "`buffer.sample`, slices, compact",
    "`buffer.sample`, n-step returns, compact",
    "the loop of [On a GPU](gpu.md#a-loop)",
}
#: One wait, and no blocking upload.
ONCE = {
    "a NumPy env, its policy on the device",
    "… with a GRU",
    'a batch to the CPU, `storing_device="cpu"`',
    "`GRUModule` on a batch",
    "`LSTMModule` on a batch",
    "`GRUModule` on a batch, `burn_in=2`",
    "`LSTMModule` on a batch, `burn_in=2`",
}
PARTS = {one[0]: one for one in chip_waits.PARTS}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("name", sorted(FREE | ONCE))
def test_at_most(name: str) -> None:
    assert chip_waits.count(name) <= (1 if name in ONCE else 0, 0)


@pytest.mark.parametrize("number", range(len(PARTS)))
def test_the_page_has_the_counts(number: int) -> None:
    """``python tests/support/chip_waits.py`` writes them."""
    assert chip_waits.lines_in_page()[number] == chip_waits.line(chip_waits.PARTS[number])


def test_the_page_has_no_other_rows() -> None:
    assert len(chip_waits.lines_in_page()) == len(chip_waits.PARTS) == len(PARTS)
