"""Values of any strides come back as they were, from every kind of column."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import LazyTensorStorage, ReplayBuffer

ENCODINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sparse": {"sparse": ["x"]},
    "zstd": {"codec": {"x": "zstd"}},
}
WIDE = torch.arange(40).view(10, 4)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", ENCODINGS.values(), ids=ENCODINGS)
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(1, id="one row"),  # whose stride torch does not look at: contiguous, but no bytes
        pytest.param(10, id="ten rows"),
    ],
)
def test_a_column_of_another_tensor_comes_back(
    rows: int, options: dict[str, Any], dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    if "codec" in options:
        pytest.importorskip("zstandard")
        if rows == 1:
            mark = pytest.mark.xfail(strict=False, reason="contiguous() leaves the stride of a single row")
            request.applymarker(mark)
    values = WIDE.to(dtype)[:rows, 1]
    assert values.stride() == (4,)
    buffer = ReplayBuffer(storage=LazyTensorStorage(16, **options))
    buffer.extend(TensorDict({"x": values}, [rows]))
    assert torch.equal(buffer[:]["x"], values)
