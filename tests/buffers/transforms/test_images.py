"""`ToTensorImage` and `Resize` against slow formulas in float64, and at their edges."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import Compose, Resize, ToTensorImage


def images(*shape: int, dtype: torch.dtype = torch.uint8, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.rand(shape, generator=generator, dtype=dtype)
    return torch.randint(0, 256, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("lead", [[], [2], [2, 3], [0]])
def test_channels_come_first_and_bytes_lie_in_0_to_1(lead: list[int], dtype: torch.dtype) -> None:
    raw = images(*lead, 4, 5, 3, dtype=dtype)
    td = TensorDict({"pixels": raw.clone(), "next": {"pixels": raw.clone()}}, lead)
    out = ToTensorImage(in_keys=["pixels", ("next", "pixels")])(td)
    assert out is td
    expected = np.moveaxis(raw.double().numpy() / (1 if dtype.is_floating_point else 255), -1, -3)
    for key in ("pixels", ("next", "pixels")):
        assert td[key].dtype is torch.float32 and td[key].shape == (*lead, 3, 4, 5)
        np.testing.assert_allclose(td[key].double().numpy(), expected, rtol=2e-7)


def test_options_of_to_tensor_image() -> None:
    raw = images(4, 5, 3)
    td = TensorDict({"pixels": raw}, [])
    assert torch.equal(
        ToTensorImage(from_int=False, in_keys=["pixels"], out_keys=["x"])(td)["x"],
        raw.permute(2, 0, 1).float(),
    )
    assert ToTensorImage(unsqueeze=True)(td.clone())["pixels"].shape == (1, 3, 4, 5)
    assert ToTensorImage(dtype=torch.float64)(td.clone())["pixels"].dtype is torch.float64
    same = ToTensorImage(from_int=False, dtype=torch.uint8)(td.clone())["pixels"]
    assert torch.equal(same, raw.permute(2, 0, 1)) and same.dtype is torch.uint8
    scaled = ToTensorImage(from_int=True)(TensorDict({"pixels": raw.float()}))["pixels"]
    assert torch.equal(scaled.max(), raw.max() / 255)
    with pytest.raises(ValueError, match=r"dtype must be floating.*unless from_int=False, got torch.uint8"):
        ToTensorImage(dtype=torch.uint8)


def test_images_with_channels_in_front_are_refused_or_left_in_shape() -> None:
    td = TensorDict({"pixels": images(2, 3, 8, 9)}, [2])
    with pytest.raises(ValueError, match=r"look like \[..., C, H, W\]: pass shape_tolerant=True"):
        ToTensorImage()(td)
    assert td["pixels"].dtype is torch.uint8
    tolerant = ToTensorImage(shape_tolerant=True)
    assert tolerant(td)["pixels"].shape == (2, 3, 8, 9)
    with pytest.raises(ValueError, match="look like"):  # the same image twice
        Compose(ToTensorImage(), ToTensorImage())(TensorDict({"pixels": images(2, 8, 9, 3)}, [2]))


def test_a_batch_dimension_is_not_taken_for_one_of_the_image() -> None:
    gray = TensorDict({"pixels": images(5, 5, 5)}, [5])
    for transform in (ToTensorImage(), Resize(3)):
        with pytest.raises(ValueError, match=r"'pixels'\] must be \[\*B, .*got \[5, 5, 5\] in a batch \[5\]"):
            transform(gray)
    with pytest.raises(TypeError, match=r"batch\['pixels'\] must be a tensor, got"):
        ToTensorImage()(TensorDict({"pixels": "cat"}))


def triangle(old: int, new: int) -> np.ndarray[Any, Any]:
    """Weights ``[new, old]`` of antialiased bilinear resizing: a triangle over the pixels that a new pixel covers."""
    scale = old / new
    width = max(scale, 1.0)
    weights = np.zeros((new, old))
    for i in range(new):
        center = scale * (i + 0.5)
        for j in range(old):
            weights[i, j] = max(0.0, 1.0 - abs((j + 0.5 - center) / width))
        weights[i] /= weights[i].sum()
    return weights


@pytest.mark.parametrize(("w", "h"), [(4, 4), (3, 7), (13, 5), (1, 1), (20, 20)])
def test_resize_is_a_weighted_mean_of_the_pixels_covered(w: int, h: int) -> None:
    raw = images(2, 5, 3, 12, 10, dtype=torch.float64)
    out = Resize(w, h)(TensorDict({"pixels": raw}, [2, 5]))["pixels"]
    expected = np.einsum("ai,bj,...ij->...ab", triangle(12, w), triangle(10, h), raw.numpy())
    assert out.dtype is torch.float64 and out.shape == (2, 5, 3, w, h)
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-9)
    whole = (raw * 255).round()
    expected = np.einsum("ai,bj,...ij->...ab", triangle(12, w), triangle(10, h), whole.numpy())
    out = Resize(w, h)(TensorDict({"pixels": whole.to(torch.uint8)}, [2, 5]))["pixels"]
    assert out.dtype is torch.uint8
    assert abs(out.double().numpy() - expected).max() <= 0.5 + 1e-4


@pytest.mark.parametrize("interpolation", ["nearest", "nearest-exact"])
def test_nearest_takes_pixels_as_they_are(interpolation: Any) -> None:
    shift = 0.5 if interpolation == "nearest-exact" else 0.0
    for dtype in (torch.uint8, torch.int64, torch.float32, torch.bool):
        raw = images(3, 6, 9).to(dtype)
        out = Resize(4, 3, interpolation)(TensorDict({"pixels": raw}))["pixels"]
        rows = [math.floor((i + shift) * 6 / 4) for i in range(4)]
        columns = [math.floor((i + shift) * 9 / 3) for i in range(3)]
        assert torch.equal(out, raw[:, rows][:, :, columns])


def test_bicubic_bytes_do_not_wrap_around() -> None:
    raw = torch.zeros(1, 8, 8, dtype=torch.uint8)
    raw[:, :, 4:] = 255
    out = Resize(8, 32, "bicubic")(TensorDict({"pixels": raw}))["pixels"]
    assert int(out[0, 0, :8].max()) == 0 and int(out[0, 0, -8:].min()) == 255


def test_edges_of_resize() -> None:
    td = TensorDict({"pixels": images(0, 3, 6, 6)}, [0])
    assert Resize(2)(td)["pixels"].shape == (0, 3, 2, 2)
    raw = images(3, 6, 6)
    assert Resize((6, 6))(TensorDict({"pixels": raw}))["pixels"] is not None
    assert Resize([2, 4])(TensorDict({"pixels": raw}))["pixels"].shape == (3, 2, 4)
    both = Resize(2, in_keys=["pixels"], out_keys=[("small", "pixels")])(TensorDict({"pixels": raw}))
    assert both["pixels"].shape == (3, 6, 6) and both["small", "pixels"].shape == (3, 2, 2)
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="w must be an integer of at least 1, got"):
            Resize(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"interpolation must be .* got 'cubic'"):
        Resize(3, interpolation="cubic")  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="Resize: batch has no entry 'pixels'"):
        Resize(3)(TensorDict({"frame": raw}))
