"""Tests of the crops that a loader delivers, judged from their pixels (SAMPLE-1)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from streamvid import VideoLoader
from streamvid.buckets.bucket import parse_buckets
from streamvid.buckets.frames import FrameRate
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError
from streamvid.loader.view.index_row import IndexRow, SampleFile
from streamvid.loader.view.view import RandomChoices, ViewOptions, view_of
from streamvid.sharder.sharder import shard
from streamvid.video.probe import probe
from streamvid.video.transform import Transform
from tests.conftest import merged
from tests.shard_options import shard_options
from tests.video.clips import ClipFolder, decode_with_ffmpeg, mean_square_errors, psnr

SIDE, COUNT = 64, 5
NAMES = ("h264_open_gop.mp4", "turn_90.mp4", "wide_pixels.mp4", "mpeg4.avi", "image.png")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make, folder = ClipFolder(tmp_path_factory.mktemp("made")), tmp_path_factory.mktemp("source")
    for name in NAMES:
        (folder / name).write_bytes(make(name).read_bytes())
    return folder


def make(source: Path, dest: Path, **options: Any) -> Path:
    buckets = parse_buckets(f"{SIDE}x{SIDE}@{COUNT},{SIDE}x{SIDE}@1")
    shard(source, dest, shard_options(buckets=buckets, workers=1, caption_column="", **options))
    return dest


@pytest.fixture(scope="module")
def dataset(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(source, tmp_path_factory.mktemp("square") / "ds")


def deliver(path: Path, **options: Any) -> list[tuple[Mapping[str, Any], NDArray[np.uint8]]]:
    """Return (index row, frames) of each sample, in order of delivery."""
    rows = {row["key"]: row for row in open_dataset(path).samples_table().to_pylist()}
    given = {"num_workers": 0, "batch_size": 1, "tail": "uneven", "output": {"accuracy": "exact", "layout": "BTHWC"}}
    with VideoLoader(path, **merged(given, options)) as loader:
        return [
            (rows[key], video.numpy().copy())
            for batch in loader
            for key, video in zip(batch.sample_keys, batch.video, strict=True)
        ]


@pytest.mark.parametrize("spatial", ["random_crop", "rand_size_crop"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_drawn_crops_match_ffmpeg(source: Path, dataset: Path, spatial: str, num_workers: int) -> None:
    """OPEN-SORA 24: all frames of a delivery have their visit's crop, rotated and with square pixels as displayed."""
    scale = (0.4, 0.9) if spatial == "rand_size_crop" else None
    options = ViewOptions(spatial=spatial, spatial_scale=scale)  # type: ignore[arg-type]
    seen: dict[str, set[object]] = {}
    num_epochs = 3 if num_workers == 0 else 1
    found = deliver(
        dataset,
        view={"spatial": spatial, "spatial_scale": scale},
        num_workers=num_workers,
        num_epochs=num_epochs,
        seed=4,
    )
    for place, (row, frames) in enumerate(found):
        visit, path = place // len(NAMES), source / row["source"]
        clip = SampleFile(0, 1, b"", row["window_num_frames"])
        choices = RandomChoices.of(4, row["key"], visit)
        view = view_of(options, FrameRate(), IndexRow(row["key"], clip, fps=row["fps"]), len(frames), choices)
        assert view.crop is not None
        transform = Transform.cover(probe(path), SIDE, SIDE, view.crop)
        reference = decode_with_ffmpeg(path, transform.ffmpeg_filter, SIDE, SIDE)
        for frame, number in zip(frames, view.pick.numbers(len(reference)), strict=True):
            assert psnr(mean_square_errors(reference[number : number + 1], frame)[0]) >= 45, row["source"]
        seen.setdefault(row["source"], set()).add(view.crop)
    assert all(len(crops) == num_epochs for crops in seen.values())


def test_a_center_crop_is_the_short_side_and_a_square(source: Path, dataset: Path) -> None:
    """OPEN-SORA 24: for a square bucket, center and resize_crop give the same pixels: the full short side, centered."""
    for (row, center), (_, cover) in zip(
        deliver(dataset, view={"spatial": "center"}), deliver(dataset, view={"spatial": "resize_crop"}), strict=True
    ):
        assert np.array_equal(center, cover)
        transform = Transform.cover(probe(source / row["source"]), SIDE, SIDE)
        assert transform.crop_height == 90 or transform.crop_width == transform.source_width


def test_native_clips_have_a_fixed_crop_but_any_window(source: Path, tmp_path: Path) -> None:
    """The error names the choices that were made when sharding. Temporal choices remain."""
    one = tmp_path / "one"
    one.mkdir()
    (one / NAMES[0]).write_bytes((source / NAMES[0]).read_bytes())
    path = make(one, tmp_path / "native", clips="native", fps=12)
    assert open_dataset(path).manifest.frame_rate.to_json() == {"rule": "resample", "fps": "12"}
    for spatial in ("random_crop", "center"):
        with pytest.raises(ConfigError, match=f"spatial='{spatial}'.*contains native clips"):
            VideoLoader(path, batch_size=1, view={"spatial": spatial})  # type: ignore[arg-type]
    ((row, spread),) = deliver(path, view={"temporal": "uniform"})
    ((_, head),) = deliver(path, view={"temporal": "head"})
    assert row["window_num_frames"] == 19  # 1.6 seconds at 12 fps, so it was not resampled again
    assert np.array_equal(spread[0], head[0])
    assert not np.array_equal(spread[1], head[1])


def test_crops_require_decoding(dataset: Path) -> None:
    with pytest.raises(ConfigError, match="decode=False cannot be combined with view.spatial"):
        VideoLoader(dataset, batch_size=1, output={"decode": False}, view={"spatial": "random_crop"})
