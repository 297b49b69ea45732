"""LeRobot folders: the frames decide where they are, and pictures are kept exactly or refused."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from flatroll.export import export, import_lerobot

for library in ("pyarrow", "pyarrow.parquet", "PIL"):
    pytest.importorskip(library)


def rows_of(lengths: list[int], shape: tuple[int, ...] = (4, 5, 3)) -> TensorDict:
    """Episodes whose observation is (episode, step), and whose pictures show it."""
    steps = [(number, step) for number, length in enumerate(lengths) for step in range(length)]
    episode, step = torch.tensor(steps).T
    last = torch.tensor([step == lengths[number] - 1 for number, step in steps])[:, None]

    def seen(step: torch.Tensor) -> dict[str, torch.Tensor]:
        place = torch.arange(int(np.prod(shape))).view(shape)
        value = (episode * 16 + step).view(-1, *[1] * len(shape))
        return {
            "observation": torch.stack([episode, step], -1).float(),
            "pixels": (place * 3 + value).remainder(256).to(torch.uint8),
        }

    return TensorDict(
        {
            **seen(step),
            "action": step,
            "is_init": (step == 0)[:, None],
            "collector": {"traj_ids": episode},
            "next": {**seen(step + 1), "done": last, "truncated": last, "terminated": last & False},
        },
        [len(steps)],
    )


def foreign(path: Path, rows: TensorDictBase, **options: Any) -> Path:
    """A folder without the files that only this library writes."""
    export(rows, path, "lerobot", **options)
    for name in ("flatroll.json", "flatroll_last.parquet"):
        (path / "meta" / name).unlink()
    return path


def edit_episodes(path: Path, **changed: Any) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    file = path / "meta/episodes/chunk-000/file-000.parquet"
    episodes = [{**episode, **changed} for episode in parquet.read_table(file).to_pylist()]
    parquet.write_table(pyarrow.Table.from_pylist(episodes), file)


@pytest.mark.parametrize("ours", [True, False])
def test_frames_decide_where_meta_names_another_file(ours: bool, tmp_path: Path) -> None:
    rows = rows_of([3, 1, 2])
    path = tmp_path / "set"
    if ours:
        export(rows, path, "lerobot")
    else:
        foreign(path, rows)
    right = import_lerobot(path)
    edit_episodes(path, **{"data/chunk_index": 7})
    with pytest.warns(
        UserWarning, match=r"in 3 episodes: episode 0 is in data/chunk-000/file-000.parquet, "
    ) as seen:
        again = import_lerobot(path)
    assert len(seen) == 1 and "meta/episodes names data/chunk-007/file-000.parquet" in str(seen[0].message)
    assert set(right.keys(True, True)) == set(again.keys(True, True))
    assert bool((right == again).all())


def test_files_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    path = foreign(tmp_path / "set", rows_of([2, 2]))
    right = import_lerobot(path)
    file = path / "data/chunk-000/file-000.parquet"
    frames = parquet.read_table(file)
    file.unlink()
    for number, first in ((999, 0), (1000, 2)):  # of which the second comes first in the alphabet
        parquet.write_table(frames.slice(first, 2), path / f"data/chunk-000/file-{number}.parquet")
    with pytest.warns(UserWarning, match="in 2 episodes"):
        assert bool((import_lerobot(path) == right).all())


def test_an_episode_may_be_in_several_row_groups(tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    path = foreign(tmp_path / "set", rows_of([3, 1, 5]))
    right = import_lerobot(path)
    file = path / "data/chunk-000/file-000.parquet"
    parquet.write_table(parquet.read_table(file), file, row_group_size=2)
    assert bool((import_lerobot(path) == right).all())


def test_frames_that_are_not_in_order_are_refused(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    path = foreign(tmp_path / "set", rows_of([3, 2]))
    file = path / "data/chunk-000/file-000.parquet"
    frames = parquet.read_table(file)
    for order, text in [
        ([0, 2, 1, 3, 4], "frames of episode 0 are not in order: frame_index 0 comes before 2"),
        ([0, 1, 3, 4, 2], "has 2 frames of episode 0, meta/episodes says 3"),
    ]:
        parquet.write_table(frames.take(pyarrow.array(order)), file)
        with pytest.raises(ValueError, match=text):
            import_lerobot(path)
    parquet.write_table(frames.drop_columns(["episode_index"]), file)
    with pytest.raises(ValueError, match="has no column 'episode_index'"):
        import_lerobot(path)


# -- pictures ----------------------------------------------------------------------------------------------------------


def picture(values: Any, mode: str | None = None, **options: Any) -> bytes:
    """A PNG file."""
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    made = values if mode is None else image.fromarray(values).convert(mode)
    made.save(file, format="PNG", **options)
    return file.getvalue()


def set_pictures(path: Path, content: bytes, channels: int) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    file = path / "data/chunk-000/file-000.parquet"
    frames = parquet.read_table(file)
    place = frames.column_names.index("observation.pixels")
    cells = pyarrow.array([{"bytes": content, "path": None}] * len(frames), frames.schema.field(place).type)
    parquet.write_table(frames.set_column(place, "observation.pixels", cells), file)
    info = json.loads((path / "meta/info.json").read_text())
    info["features"]["observation.pixels"]["shape"] = [4, 5, channels]
    (path / "meta/info.json").write_text(json.dumps(info))


COLOURS = (np.arange(60) * 4).astype(np.uint8).reshape(4, 5, 3)
GREY = (np.arange(20) * 12).astype(np.uint8).reshape(4, 5)
CLEAR = np.concatenate([COLOURS, GREY[..., None]], -1)
OPAQUE = np.concatenate([COLOURS, np.full((4, 5, 1), 255, np.uint8)], -1)


def deep_png(colours: bool) -> bytes:
    """A PNG of 16 bits, written by hand: Pillow writes none with colours."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    samples = 3 if colours else 1
    values = (np.arange(20 * samples) * 1000).astype(">u2").reshape(4, -1)
    lines = b"".join(b"\0" + line.tobytes() for line in values)
    header = struct.pack(">IIBBBBB", 5, 4, 16, 2 if colours else 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(lines))
        + chunk(b"IEND", b"")
    )


def palette() -> Any:
    """A picture of mode P with 16 colours."""
    image = pytest.importorskip("PIL.Image")
    made = image.fromarray((np.arange(20) % 16).astype(np.uint8).reshape(4, 5)).convert("P")
    made.putpalette([(3 * index) % 256 for index in range(48)])
    return made


def in_palette(indices: Any) -> Any:
    table = np.array([(3 * index) % 256 for index in range(48)], np.uint8).reshape(16, 3)
    return table[indices]


INDICES = (np.arange(20) % 16).reshape(4, 5)
KEPT: dict[str, tuple[Any, int, Any]] = {
    "colours": (lambda: picture(COLOURS, "RGB"), 3, COLOURS),
    "grey": (lambda: picture(GREY, "L"), 1, GREY[..., None]),
    "grey as colours": (lambda: picture(GREY, "L"), 3, np.repeat(GREY[..., None], 3, -1)),
    "alpha": (lambda: picture(CLEAR, "RGBA"), 4, CLEAR),
    "opaque alpha as colours": (lambda: picture(OPAQUE, "RGBA"), 3, COLOURS),
    "colours as opaque": (lambda: picture(COLOURS, "RGB"), 4, OPAQUE),
    "grey in colours": (lambda: picture(np.repeat(GREY[..., None], 3, -1), "RGB"), 1, GREY[..., None]),
    "palette": (lambda: picture(palette()), 3, in_palette(INDICES)),
    "bits": (lambda: picture((GREY > 100).astype(np.uint8) * 255, "1"), 1, (GREY > 100)[..., None] * 255),
}
REFUSED: dict[str, tuple[Any, int, str]] = {
    "16 bits of grey": (lambda: deep_png(False), 1, "16-bit picture of mode 'I;16'"),
    "16 bits of colours": (lambda: deep_png(True), 3, "16-bit picture of mode 'RGB'"),
    "colours as grey": (lambda: picture(COLOURS, "RGB"), 1, "mode 'RGB' that would lose its colours as 'L'"),
    "alpha as colours": (
        lambda: picture(CLEAR, "RGBA"),
        3,
        "mode 'RGBA' that would lose its transparency as 'RGB'",
    ),
    "palette with a clear colour": (
        lambda: picture(palette(), transparency=3),
        3,
        "'P' that would lose its transparency",
    ),
    "grey with a clear value": (
        lambda: picture(GREY, "L", transparency=12),
        3,
        "'L' that would lose its transparency",
    ),
    "palette as grey": (lambda: picture(palette()), 1, "'P' that would lose its colours as 'L'"),
}


@pytest.fixture(scope="module")
def one_episode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return foreign(tmp_path_factory.mktemp("lerobot") / "set", rows_of([2]))


@pytest.mark.parametrize("what", KEPT)
def test_pictures_that_bytes_hold_are_kept_exactly(what: str, one_episode: Path, tmp_path: Path) -> None:
    make, channels, right = KEPT[what]
    shutil.copytree(one_episode, tmp_path / "set")
    set_pictures(tmp_path / "set", make(), channels)
    pixels = import_lerobot(tmp_path / "set")["observation", "pixels"]
    assert pixels.dtype is torch.uint8 and np.array_equal(pixels[0].numpy(), right)


@pytest.mark.parametrize("what", REFUSED)
def test_pictures_that_a_conversion_would_narrow_are_refused(
    what: str, one_episode: Path, tmp_path: Path
) -> None:
    make, channels, text = REFUSED[what]
    shutil.copytree(one_episode, tmp_path / "set")
    set_pictures(tmp_path / "set", make(), channels)
    with pytest.raises(ValueError, match=rf"observation\.pixels has a .*{text}"):
        import_lerobot(tmp_path / "set")


@pytest.mark.parametrize(
    ("shape", "named", "stored"),
    [
        ((4, 5, 3), None, ("image", [4, 5, 3])),
        ((3, 4, 5), None, ("image", [4, 5, 3])),
        ((1, 4, 5), None, ("image", [4, 5, 1])),
        ((4, 5, 4), None, ("uint8", [4, 5, 4])),  # frames of a stack, or transparency
        ((4, 6, 5), None, ("uint8", [4, 6, 5])),
        ((4, 6, 5), "CHW", ("image", [6, 5, 4])),
        ((3, 5, 3), None, ("uint8", [3, 5, 3])),  # fits both ways
        ((3, 5, 3), "HWC", ("image", [3, 5, 3])),
        ((3, 5, 1), "CHW", ("image", [5, 1, 3])),
    ],
)
def test_what_is_an_image(
    shape: tuple[int, ...], named: str | None, stored: tuple[str, list[int]], tmp_path: Path
) -> None:
    rows = rows_of([2, 3], shape)
    export(rows, tmp_path / "set", "lerobot", images=None if named is None else {"pixels": named})
    about = json.loads((tmp_path / "set/meta/info.json").read_text())["features"]["observation.pixels"]
    assert (about["dtype"], about["shape"]) == stored
    again = import_lerobot(tmp_path / "set")
    assert torch.equal(again["pixels"], rows["pixels"])
    assert torch.equal(again["next", "pixels"], rows["next", "pixels"])


def test_images_that_are_none(tmp_path: Path) -> None:
    rows = rows_of([2], (5, 4, 3))
    for images, text in [
        ({"action": "HWC"}, r"images names 'action', the observations are \['observation', 'pixels'\]"),
        ({"observation": "HWC"}, r"needs uint8 of 1, 3 or 4 channels, got float32 \[2\]"),
        ({"pixels": "CHW"}, r"images\['pixels'\] is 'CHW', which needs .*, got uint8 \[5, 4, 3\]"),
        ({"pixels": "WHC"}, r"images\['pixels'\] must be"),
    ]:
        with pytest.raises(ValueError, match=text):
            export(rows, tmp_path / "set", "lerobot", images=images)


def test_numbers_that_are_wider_than_the_folder_says_are_kept(tmp_path: Path) -> None:
    rows = rows_of([2])
    rows["force"] = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    path = foreign(tmp_path / "set", rows)
    info = json.loads((path / "meta/info.json").read_text())
    info["features"]["force"]["dtype"] = "float32"
    info["features"]["action"]["dtype"] = "float32"
    (path / "meta/info.json").write_text(json.dumps(info))
    again = import_lerobot(path)
    assert torch.equal(again["force"].view(-1), rows["force"])
    assert again["action"].dtype is torch.int64  # which float32 does not hold
