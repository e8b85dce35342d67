"""Tests of black bars: detection in all frames of a video, stored columns, and cropping before bucket assignment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamvid
from streamvid.buckets.bucket import parse_buckets
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.sharder import dry_run, shard
from streamvid.video.frame_format import FrameFormat
from tests.clips import encode, frames_of
from tests.files import write_rows
from tests.shard_options import shard_options

BARS = ("bar_left", "bar_top", "bar_right", "bar_bottom")


def options(**changes: Any) -> ShardOptions:
    given = {"buckets": parse_buckets("96x64@9,96x96@9"), "black_bars": True, "workers": 1, "gop": None}
    return shard_options(**{name: value for name, value in {**given, **changes}.items() if value is not None})


def boxed(frames: np.ndarray[Any, Any], left: int, top: int, right: int, bottom: int) -> np.ndarray[Any, Any]:
    return np.pad(frames, ((0, 0), (top, bottom), (left, right), (0, 0)))


def rows_of(dest: Path) -> dict[str, dict[str, Any]]:
    return {Path(row["source"]).stem: row for row in open_dataset(dest).samples_table().to_pylist()}


def frames_in(dest: Path, source: str) -> np.ndarray[Any, Any]:
    """Return the frames of a clip as the loader delivers them, (T, H, W, 3)."""
    given: dict[str, Any] = {"batch_size": 1, "where": f"contains(source, '{source}')", "num_workers": 0}
    with streamvid.VideoLoader(dest, **given) as loader:
        (batch,) = list(loader)
    return np.asarray(batch.video[0].permute(1, 2, 3, 0).float().cpu())


def test_bars_are_cropped_before_a_bucket_is_assigned(tmp_path: Path) -> None:
    """A letterboxed native clip equals the same clip without bars, in the same bucket. Copies keep their bars."""
    film = frames_of("bikes", 96, 64, 40)[31:40]
    dark = (film * np.linspace(0, 1, 9)[:, None, None, None]).astype(np.uint8)
    (tmp_path / "videos").mkdir()
    clips = {
        "plain": encode(film, numbered=False),
        "letterbox": encode(boxed(film, 0, 16, 0, 16), numbered=False),
        "windowbox": encode(boxed(film, 12, 8, 18, 6), container="matroska", numbered=False),
        "fade": encode(boxed(dark, 0, 16, 0, 16), numbered=False),
        "tiny": encode(boxed(film[:, :8, :8], 2, 2, 2, 2), codec="ffv1", container="matroska", numbered=False),
        "night": encode(np.zeros((9, 64, 96, 3), np.uint8), numbered=False),
    }
    for name, data in clips.items():
        (tmp_path / "videos" / f"{name}.mp4").write_bytes(data)
    report = shard(tmp_path / "videos", tmp_path / "native", options(clips="native"))
    assert [(row.source, row.kind) for row in report.rejections] == [("tiny.mp4", "too-small")]
    native = rows_of(tmp_path / "native")
    found = {name: tuple(row[f"user.{bar}"] for bar in BARS) for name, row in native.items()}
    assert found["plain"] == found["night"] == (0, 0, 0, 0)
    assert found["letterbox"] == found["fade"] == (0, 16, 0, 16)
    assert found["windowbox"] == (12, 8, 18, 6)
    assert {row["bucket_id"] for row in native.values()} == {"96x64-9f"}
    assert (native["letterbox"]["source_width"], native["letterbox"]["source_height"]) == (96, 64)
    plain = frames_in(tmp_path / "native", "plain")
    for name in ("letterbox", "windowbox"):
        apart = np.abs(frames_in(tmp_path / "native", name) - plain).mean()
        assert apart < 0.5 * np.abs(np.roll(plain, 2, axis=1) - plain).mean(), "not the same part of the picture"
    report = dry_run(tmp_path / "videos", tmp_path / "copies", options(where="bar_top == 0 and bar_left == 0"))
    assert [Path(row.source).stem for row in report.rejections] == ["fade", "letterbox", "tiny", "windowbox"]


def test_rows_that_share_a_file_share_its_bars(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(encode(boxed(frames_of("bikes", 96, 64, 9), 0, 16, 0, 16), numbered=False))
    write_rows(tmp_path / "metadata.jsonl", [{"path": "a.mp4", "text": text} for text in ("one", "two")])
    report = dry_run(tmp_path, tmp_path / "dest", options(whole_files=True, where="bar_top == 0"))
    assert [(row.row, row.kind) for row in report.rejections] == [(0, "where"), (1, "where")]


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_bars_of_rotated_and_stretched_frames(rotation: int, flip: bool) -> None:
    """Bars refer to the displayed frame, and margins to the decoded frame, whose pixels may not be square."""
    shown = np.zeros((60, 80), bool)
    left, top, right, bottom = 4, 8, 16, 12
    shown[top:-bottom, left:-right] = True
    stored = np.rot90(shown, rotation // 90)  # rotated back, counterclockwise
    stored = stored[:, ::-1] if flip else stored
    height, width = stored.shape
    whole = FrameFormat(width, height, (1, 1), rotation, flip, "yuv420p", "bt601", "limited", False)
    own_left, own_top, own_right, own_bottom = whole.without((left, top, right, bottom)).margins
    assert stored[own_top : height - own_bottom, own_left : width - own_right].all()
    assert (height - own_top - own_bottom) * (width - own_left - own_right) == stored.sum()
    assert whole.without((left, top, right, bottom)).display_size == (60, 40)
    wide = FrameFormat(width, height, (2, 1), rotation, flip, "yuv420p", "bt601", "limited", False)
    left, top, right, bottom = (2 * bar for bar in (left, top, right, bottom))
    squeezed = wide.without(
        (left, top // 2, right, bottom // 2) if rotation % 180 == 0 else (left // 2, top, right // 2, bottom)
    )
    assert squeezed.margins == (own_left, own_top, own_right, own_bottom)


def test_conditioning_inputs_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="black_bars=True cannot be combined with source.media and clips.kind='native'"
    ):
        options(clips="native", media={"control": "control_video"})
