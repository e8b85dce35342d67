"""Tests of windows cut from a video without encoding, decoded by our decoder and by the ffmpeg program."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from streamvid.errors import DecodeError, ProbeError
from streamvid.video.bitstream.boxes import find_box
from streamvid.video.clip_index import index_clip
from streamvid.video.container import open_video
from streamvid.video.decode.file import decode_into
from streamvid.video.decode.stored import StoredDecoder
from streamvid.video.encode.cut import Cutter
from streamvid.video.encode.made import MadeClip
from streamvid.video.info import VideoInfo
from streamvid.video.limits import LIMITS
from streamvid.video.picture import PictureFormat
from streamvid.video.probe import probe
from tests.clips import encode, frames_of
from tests.video.clips import VIDEO_NAMES, ClipFolder, decode_with_ffmpeg

REFUSED = {
    "theora.ogv": "FFmpeg cannot store theora in MP4 or QuickTime files",
    "vp8_hidden.webm": "some packets have no timestamp, or have the same timestamp as another packet",
}
SOME = (
    *("h264_open_gop.mp4", "hevc_open_gop.mp4", "h264.ts", "mpeg4_b_frames.avi"),
    *("variable_rate.mp4", "edit_list.mp4", "turn_90_wide_pixels.mp4", "prores.mov"),
)
SIZE = (54, 96)
SHOWN = ("width", "height", "rotation", "flip", "sample_aspect_ratio", "pixel_format", "color_space", "color_range")


def cut(source: Path | bytes, start: int, num_frames: int, **options: Any) -> MadeClip:
    with open_video(source, LIMITS) as video:
        return Cutter(source, video).cut(start, num_frames, **options)


def rgb(source: Path | bytes) -> NDArray[np.uint8]:
    out = np.zeros((probe(source).num_frames, *SIZE, 3), np.uint8)
    decode_into(source, 0, out)
    return out


def seconds_of(info: VideoInfo) -> list[Fraction]:
    """Return the time of each frame relative to the first one."""
    return [(time - info.timestamps[0]) * info.time_base for time in info.timestamps]


def check_windows(path: Path, folder: Path, num_windows: int, *, verify: bool) -> None:
    """Check that random windows show their frames at their times: from the file, from its packets, and in ffmpeg."""
    draw, info, frames = random.Random(path.name), probe(path), rgb(path)
    by_ffmpeg = decode_with_ffmpeg(path, f"scale={SIZE[1]}:{SIZE[0]}", *SIZE)
    decoder, picture = StoredDecoder(), PictureFormat(*SIZE, accuracy="exact")
    with open_video(path, LIMITS) as video:
        cutter = Cutter(path, video)
        for _ in range(num_windows):
            start = draw.randrange(info.num_frames)
            stop = draw.randint(start + 1, info.num_frames)
            mine, where = slice(start, stop), f"{path.name}: {start} to {stop}"
            clip = cutter.cut(start, stop - start, verify=verify)
            found = probe(clip.data)
            times = seconds_of(info)[mine]
            assert seconds_of(found) == [time - times[0] for time in times], where
            assert [getattr(found, name) for name in SHOWN] == [getattr(info, name) for name in SHOWN], where
            assert (rgb(clip.data) == frames[mine]).all(), where
            index, out = index_clip(clip.data), np.zeros((stop - start, picture.num_bytes), np.uint8)
            if index is not None:
                window = index.window(0, stop - start)
                part = memoryview(clip.data)[window.first_byte :][: window.num_bytes]
                decoder.decode(index.info, window.packets, part, window.key_time, out, picture)
                assert (out.reshape(-1, *SIZE, 3) == frames[mine]).all(), where
            (folder / "cut.mp4").write_bytes(clip.data)
            shown = decode_with_ffmpeg(folder / "cut.mp4", f"scale={SIZE[1]}:{SIZE[0]}", *SIZE)
            assert len(shown) == stop - start and (shown == by_ffmpeg[mine]).all(), where


@pytest.mark.parametrize("name", SOME)
def test_a_window_shows_exactly_its_frames(clip: ClipFolder, tmp_path: Path, name: str) -> None:
    """SAMPLE-2: the pictures are bit-identical and have the source's times; ffmpeg follows the edit list too."""
    check_windows(clip(name), tmp_path, 3, verify=name == "h264.ts")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VIDEO_NAMES if name not in REFUSED])
def test_windows_of_every_kind_of_video(clip: ClipFolder, tmp_path: Path, name: str) -> None:
    check_windows(clip(name), tmp_path, 15, verify=False)


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * ("vp8" in one)) for one in REFUSED])
def test_a_video_that_mp4_cannot_hold_is_refused_with_a_remedy(clip: ClipFolder, name: str) -> None:
    with pytest.raises(ProbeError, match=f"{REFUSED[name]}; use --clips native") as caught:
        cut(clip(name), 5, 9)
    assert caught.value.kind == "cut"


def test_the_file_starts_at_a_key_frame_and_ends_with_the_last_packet_needed(tmp_path: Path) -> None:
    """A cut contains only the packets that it needs; equal windows give equal bytes, without dates and versions."""
    film = encode(frames_of("bikes", 160, 96, 120), options={"g": "12", "bf": "2", "sc_threshold": "0"})
    sizes = [len(cut(film, start, 6).data) for start in (12, 18, 23)]
    assert sizes[0] < sizes[1] < sizes[2] < len(film) / 3
    table = index_clip(cut(film, 18, 5).data)
    assert table is not None and len(table.times) == 12, "from frame 12 to frame 23, to which frame 22 refers"
    assert list(table.frame_times - table.frame_times[0]) == [512 * number for number in range(5)]
    first, again = cut(film, 18, 6), cut(film, 18, 6, verify=True)
    assert first == again and b"Lavf" not in first.data and b"mvhd\0\0\0\0\0\0\0\0\0\0\0\0" in first.data
    facts = (first.extension, first.codec, first.num_frames, first.fps, first.duration_seconds)
    assert facts == ("mp4", "h264", 6, 24.0, 0.25) and (first.width, first.height) == (160, 96)


def test_the_last_frame_lasts_as_long_as_in_its_source(clip: ClipFolder) -> None:
    """With a variable rate, the last frame lasts until the source's next frame, which is not in the file."""
    path = clip("variable_rate.mp4")
    info = probe(path)
    times = [*seconds_of(info), Fraction(info.duration_seconds).limit_denominator(12800)]
    for start, stop in pairwise(range(0, info.num_frames, 5)):
        assert cut(path, start, stop - start).duration_seconds == float(times[stop] - times[start])


def test_decoders_get_the_x264_version_from_the_first_packet(tmp_path: Path) -> None:
    """Lossless 4:4:4 of old x264 versions deviates from the standard and decodes to garbage without the version."""
    path = Path(__file__).parents[1] / "data" / "x264_core148_444.mp4"
    check_windows(path, tmp_path, 4, verify=True)
    late = index_clip(cut(path, 18, 4).data)
    assert late is not None and late.info.x264_core == 148 and len(late.times) < 9


def test_damage_is_detected_if_the_frames_are_verified() -> None:
    film = bytearray(encode(frames_of("bikes", 160, 96, 60), options={"g": "12", "bf": "2", "sc_threshold": "0"}))
    index = index_clip(bytes(film))
    assert index is not None
    at = int(index.offsets[30])
    film[at + 8 : at + int(index.sizes[30])] = random.Random(1).randbytes(int(index.sizes[30]) - 8)
    assert cut(bytes(film), 24, 12).num_frames == 12
    with pytest.raises((DecodeError, ProbeError), match="decode"):
        cut(bytes(film), 24, 12, verify=True)
    assert cut(bytes(film), 40, 12, verify=True).num_frames == 12, "another part of the film is intact"


def with_edits(data: bytes, edits: list[tuple[int, int]]) -> bytes:
    """Replace the edit list of an MP4 file whose boxes follow its packets; an edit is (milliseconds, media ticks)."""
    file = bytearray(data)
    path = (b"moov", b"trak", b"edts", b"elst")
    boxes = [
        find_box(lambda at, size: bytes(file[at : at + size]), 0, len(file), *path[:depth]) for depth in (1, 2, 3, 4)
    ]
    found = [box for box in boxes if box is not None]
    _, start, end = found[-1]
    body = struct.pack(">II", 0, len(edits)) + b"".join(struct.pack(">IiI", *edit, 1 << 16) for edit in edits)
    for _, inner, _ in found:
        (size,) = struct.unpack_from(">I", file, inner - 8)
        struct.pack_into(">I", file, inner - 8, size + len(body) - (end - start))
    file[start:end] = body
    return bytes(file)


def test_a_window_across_two_edits_is_refused_and_never_shows_hidden_frames() -> None:
    """SAMPLE-2: the frames between two edits would have to stay hidden in the middle of the window."""
    film = encode(frames_of("bikes", 160, 96, 60), options={"g": "12", "bf": "2", "sc_threshold": "0"})
    edited = with_edits(film, [(417, 1024), (417, 1024 + 30 * 512)])
    frames = rgb(edited)
    assert 20 <= len(frames) < 40
    for start, num_frames in ((0, 5), (2, 8), (12, 6)):
        data = cut(edited, start, num_frames).data
        assert (rgb(data) == frames[start : start + num_frames]).all()
    for verify in (False, True):
        with pytest.raises(
            ProbeError, match="would show (.* frames instead of 10|its frames at different times than the source); use"
        ):
            cut(edited, 5, 10, verify=verify)


def test_windows_beyond_the_end_are_refused(clip: ClipFolder) -> None:
    with pytest.raises(DecodeError, match="frames 30 to 49 were requested, but the video has 40 frames"):
        cut(clip("h264_open_gop.mp4"), 30, 20)


def flv_tags(data: bytes, after_ms: int) -> Iterator[bytes]:
    """Yield the tags of an FLV file, delayed by `after_ms`."""
    at = 9 + 4  # the file header, and the size of the previous tag
    while at < len(data):
        size = 11 + int.from_bytes(data[at + 1 : at + 4], "big") + 4
        tag = data[at : at + size]
        time = (int.from_bytes(tag[7:8] + tag[4:7], "big") + after_ms).to_bytes(4, "big")
        yield tag[:4] + time[1:] + time[:1] + tag[8:]
        at += size


def test_a_file_whose_codec_headers_change_is_refused() -> None:
    """An interrupted broadcast may give an FLV file with two headers, but an MP4 track has only one."""
    frames, video = frames_of("bikes", 96, 64, 24), 9
    first = encode(frames[:12], container="flv")
    second = encode(frames[12:], container="flv", options={"bf": "0", "profile": "baseline"})
    both = first + b"".join(tag for tag in flv_tags(second, 1000) if tag[0] == video)
    assert probe(both).num_frames == 24
    with pytest.raises(ProbeError, match="the codec headers change within the file; use --clips native"):
        cut(both, 2, 4)
    assert cut(first, 2, 4).num_frames == 4
