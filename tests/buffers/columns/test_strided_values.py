"""Values of any strides come back as they were, from every kind of column."""

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler

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
    rows: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    if "codec" in options:
        pytest.importorskip("zstandard")
    values = WIDE.to(dtype)[:rows, 1]
    assert values.stride() == (4,)
    buffer = ReplayBuffer(storage=LazyTensorStorage(16, **options))
    buffer.extend(TensorDict({"x": values}, [rows]))
    assert torch.equal(buffer[:]["x"], values)


def negated(values: torch.Tensor) -> torch.Tensor:
    """The same values with torch's negative bit, as the imaginary part of a conjugate has."""
    return torch.complex(values, -values).conj().imag


TAKEN: dict[str, Any] = {
    "of a graph": lambda x: x.clone().requires_grad_() * 1,
    "parameter": lambda x: torch.nn.Parameter(x.clone()),
    "expanded": lambda x: x[:1].expand(6, 3),
    "transposed": lambda x: x.T.contiguous().T,
    "aliased": lambda x: torch.as_strided(x.reshape(-1), (6, 3), (1, 1)),
    "negated": negated,
}
REFUSED: dict[str, Any] = {
    "sparse": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "meta": lambda x: x.to("meta"),
}


def rows(values: torch.Tensor, traj: int) -> TensorDict:
    at = torch.arange(6.0)[:, None]
    done = torch.zeros(6, 1, dtype=torch.bool)
    ids = torch.full((6,), traj)
    later = {"observation": at + 1, "done": done}
    return TensorDict({"x": values, "observation": at, "next": later, "collector": {"traj_ids": ids}}, [6])


@pytest.mark.parametrize("options", [*ENCODINGS.values(), {"compact_obs": True}], ids=[*ENCODINGS, "compact"])
@pytest.mark.parametrize("sampler", [None, SliceSampler(slice_len=2)], ids=["rows", "slices"])
@pytest.mark.parametrize("kind", [*TAKEN, *REFUSED])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_tensors_of_all_kinds(kind: str, sampler: Any, options: dict[str, Any]) -> None:
    """They come back as they were, or are refused before a row of a full buffer is given up."""
    if "codec" in options:
        pytest.importorskip("zstandard")
    plain = torch.arange(1.0, 19).view(6, 3)
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, **options), sampler=copy.deepcopy(sampler))
    buffer.extend(rows(plain, 0))
    buffer.extend(rows(plain, 1))
    if kind in TAKEN:
        values = TAKEN[kind](plain)
        buffer.extend(rows(values, 2))
        stored = buffer[:]["x"]
        assert torch.equal(stored[:6], values.detach()) and not stored.requires_grad
    else:
        with pytest.raises(TypeError, match="'x'"):
            buffer.extend(rows(REFUSED[kind](plain), 2))
        with pytest.raises(TypeError, match="'x'"):
            buffer[:6] = TensorDict({"x": REFUSED[kind](plain)}, [6])
        assert len(buffer) == 12 and torch.equal(buffer[:]["x"], torch.cat([plain, plain]))
