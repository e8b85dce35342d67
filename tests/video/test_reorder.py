"""Tests that frames of AVI files, which store pictures in decode order, are in the ffmpeg program's order."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest

from streamvid.errors import ProbeError
from streamvid.video.decode.file import decode_into
from streamvid.video.probe import probe
from tests.clips import real_clip
from tests.video.clips import run_ffmpeg

_X264 = "-c:v libx264 -qp 1 -pix_fmt yuv420p"


def _avi(path: Path, options: str) -> Path:
    source = ("-i", real_clip("bikes"), "-an", "-frames:v", 40, "-vf", "scale=160:90,setsar=1")
    run_ffmpeg(*source, *options.split(), path)
    return path


@pytest.mark.parametrize(
    "options",
    [
        f"{_X264} -bf 3 -g 12",
        f"{_X264} -x264-params open-gop=1:keyint=16:bframes=5:b-pyramid=normal",
        "-c:v libxvid -bf 2 -g 12",
        "-c:v mpeg4 -bf 2 -g 12",
    ],
)
def test_b_frames_in_avi_come_in_display_order(tmp_path: Path, options: str) -> None:
    """SAMPLE-2: every window has the frames of a plain decode of the whole file."""
    path = _avi(tmp_path / "clip.avi", options)
    with av.open(str(path)) as container:
        expected = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    info = probe(path)
    assert (info.num_frames, round(info.fps)) == (len(expected), 25)
    whole = np.zeros_like(expected)
    decode_into(path, 0, whole)
    # Each frame is more similar to its own reference than to any other.
    errors = np.abs(whole[:, None, ::4, ::4].astype(np.int16) - expected[None, :, ::4, ::4].astype(np.int16)).mean(
        (2, 3, 4)
    )
    assert (errors.argmin(1) == np.arange(len(expected))).all()
    for start in range(info.num_frames - 1):
        window = np.zeros_like(expected[:2])
        decode_into(path, start, window)
        np.testing.assert_array_equal(window, whole[start : start + 2])


def test_a_truncated_avi_is_refused(tmp_path: Path) -> None:
    path = _avi(tmp_path / "clip.avi", f"{_X264} -bf 3 -g 12")
    with pytest.raises(ProbeError):
        probe(path.read_bytes()[: path.stat().st_size // 2])
