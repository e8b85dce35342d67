"""Tests of windows decoded from packets by decoders that stay open, compared with decoding the container."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid.errors import DecodeError
from streamvid.video.clip_index import KEY, ClipIndex, checksum, index_clip
from streamvid.video.decode.file import decode_into, decode_pictures
from streamvid.video.decode.stored import StoredDecoder
from streamvid.video.limits import Limits
from streamvid.video.picture import PictureFormat
from streamvid.video.stream_info import StreamInfo
from tests.clips import encode, frames_of
from tests.processes import run_python
from tests.video.clips import ClipFolder
from tests.video.test_clip_index import INDEXED, indexed
from tests.video.test_memory import LOST_BYTES, in_use, no_collection

PICTURES = (
    PictureFormat(72, 96, accuracy="exact"),
    PictureFormat(72, 96, accuracy="fast"),
    PictureFormat(72, 96, pixels="yuv420p"),
    PictureFormat(90, 160, pixels="yuv420p"),  # the size of most clips, so no scaling
    PictureFormat(33, 21, accuracy="exact"),
)


def from_packets(
    decoder: StoredDecoder,
    data: bytes,
    index: ClipIndex,
    start: int,
    num_frames: int,
    picture: PictureFormat,
    **options: Any,
) -> tuple[np.ndarray, object]:
    """Decode a window's frames and their color from a copy of its byte range and nothing else."""
    window = index.window(start, num_frames)
    part = bytes(data[window.first_byte : window.first_byte + window.num_bytes])
    out = np.full((num_frames, picture.num_bytes), 77, np.uint8)
    options = {"numbers": range(start, start + num_frames)} | options
    color = decoder.decode(index.info, window.packets, memoryview(part), window.key_time, out, picture, **options)
    return out, color


def from_container(data: bytes, start: int, num_frames: int, picture: PictureFormat) -> tuple[np.ndarray, object]:
    """Decode the same window through the container."""
    out = np.full((num_frames, picture.num_bytes), 33, np.uint8)
    return out, decode_pictures(data, start, out, picture)


@pytest.fixture(scope="module")
def kept() -> StoredDecoder:
    """One decoder for the whole module, as in a worker: earlier clips must not affect later ones."""
    return StoredDecoder()


@pytest.mark.parametrize("name", INDEXED)
def test_packets_give_the_same_bytes_as_the_container(clip: ClipFolder, kept: StoredDecoder, name: str) -> None:
    """SAMPLE-2: for every picture format, including first and last frames."""
    data, index, draw = clip(name).read_bytes(), indexed(clip(name)), random.Random(name)
    for number, picture in enumerate(PICTURES):
        for num_frames in {1, (3, 7, 17)[number % 3]}:
            last = index.num_frames - num_frames
            for start in {0, last, draw.randint(0, last)}:
                expected, color = from_container(data, start, num_frames, picture)
                found, found_color = from_packets(kept, data, index, start, num_frames, picture)
                assert np.array_equal(found, expected), (picture, start, num_frames)
                assert found_color == color
    out = np.zeros((2, 72, 96, 3), np.uint8)
    decode_into(data, 5, out, accuracy="fast")
    assert np.array_equal(from_packets(kept, data, index, 5, 2, PICTURES[1])[0], out.reshape(2, -1))


@cache
def whole(path: Path, picture: PictureFormat) -> np.ndarray:
    """Decode all frames of a clip through its container."""
    return from_container(path.read_bytes(), 0, indexed(path).num_frames, picture)[0]


CALLS = st.lists(
    st.tuples(st.sampled_from(INDEXED), st.integers(0, 59), st.integers(1, 60), st.sampled_from(PICTURES[:4])),
    min_size=2,
    max_size=8,
)


@settings(max_examples=30)
@given(CALLS, st.integers(1, 3))
def test_the_order_of_clips_does_not_affect_their_frames(
    clip: ClipFolder, calls: list[tuple[str, int, int, PictureFormat]], num_threads: int
) -> None:
    """SAMPLE-2: codecs, sizes, pixel formats and rotations in any order, with one set of open decoders."""
    decoder = StoredDecoder()
    for name, first, length, picture in calls:
        path = clip(name)
        index = indexed(path)
        start = first % index.num_frames
        num_frames = min(length, index.num_frames - start)
        found, _ = from_packets(decoder, path.read_bytes(), index, start, num_frames, picture, num_threads=num_threads)
        assert np.array_equal(found, whole(path, picture)[start : start + num_frames]), (name, start, num_frames)


@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("name", INDEXED)
def test_frame_threads_do_not_change_any_byte(
    clip: ClipFolder, kept: StoredDecoder, name: str, num_threads: int
) -> None:
    """SAMPLE-2: several windows in a row, so that a threaded decoder restarts while its threads are active."""
    data, index, picture = clip(name).read_bytes(), indexed(clip(name)), PICTURES[2]
    draw = random.Random(name)
    for num_frames in (1, 5, 16):
        start = draw.randint(0, index.num_frames - num_frames)
        found, _ = from_packets(kept, data, index, start, num_frames, picture, num_threads=num_threads)
        assert np.array_equal(found, whole(clip(name), picture)[start : start + num_frames]), (start, num_frames)


@pytest.mark.parametrize(
    "name", ["h264_open_gop.mp4", "h264_one_gop.mp4", "hevc_layers.mp4", "vp9_odd.webm", "av1.mp4"]
)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_decoder_that_stopped_early_starts_afresh(clip: ClipFolder, name: str, num_threads: int) -> None:
    """SAMPLE-2: pictures still buffered when a window is complete are discarded."""
    data, index, picture = clip(name).read_bytes(), indexed(clip(name)), PICTURES[2]
    decoder = StoredDecoder()
    for start in (39, 0, 3, 38, 12, 12, 0, 25):
        found, _ = from_packets(decoder, data, index, start, 1, picture, num_threads=num_threads)
        assert np.array_equal(found, whole(clip(name), picture)[start : start + 1]), start


# Damage.

#: Clips whose decoders depend only on the bytes. With damage, HEVC leaves old memory in gaps, FFV1 the last picture.
PURE = ("h264_open_gop.mp4", "h264_one_gop.mp4", "vp9_odd.webm", "av1.mp4", "mjpeg.mov")


def with_flipped_bytes(data: bytes, index: ClipIndex, start: int, draw: random.Random) -> bytes:
    """Change some bytes in one of the packets needed for the six frames from `start` on."""
    window, bad = index.window(start, 6), bytearray(data)
    _, offset, size, _ = draw.choice(window.packets.tolist())
    for at in draw.sample(range(size), min(size, draw.choice([1, 1, 40]))):
        bad[window.first_byte + offset + at] ^= draw.randrange(1, 256)
    return bytes(bad)


@pytest.mark.parametrize("name", [*PURE, "hevc_open_gop.mp4", "gray.mkv"])
def test_damage_is_detected_by_exactly_one_checksum(clip: ClipFolder, name: str) -> None:
    """BAD-1: only the checksum of the damaged piece differs."""
    data, index, draw = clip(name).read_bytes(), indexed(clip(name)), random.Random(name)
    for _ in range(30):
        start = draw.randint(0, index.num_frames - 6)
        window, bad = index.window(start, 6), with_flipped_bytes(data, index, start, draw)
        part = bad[window.first_byte :]
        assert sum(checksum(part[low:high]) != digest for low, high, digest in window.pieces) == 1


@pytest.mark.parametrize("name", PURE)
def test_damaged_packets_give_the_same_frames_as_the_damaged_container(clip: ClipFolder, name: str) -> None:
    """SAFE-1, SAMPLE-2: the frames are equal or there is an error, but no shifted frames or frames of earlier clips.

    The container path reads its timestamps from the file again, so that frames at the same position are the same
    frames.
    """
    data, index, picture = clip(name).read_bytes(), indexed(clip(name)), PICTURES[2]
    draw, decoder = random.Random(name), StoredDecoder()
    num_same = 0
    for _ in range(20):
        start = draw.randint(0, index.num_frames - 6)
        bad = with_flipped_bytes(data, index, start, draw)
        with contextlib.suppress(DecodeError):
            found, _ = from_packets(decoder, bad, index, start, 6, picture)
            assert np.array_equal(found, from_container(bad, start, 6, picture)[0])
            num_same += 1
    assert num_same < 20 and (num_same or name == "av1.mp4")  # AV1's decoder detects most damage


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", [*PURE, "hevc_open_gop.mp4", "hevc_10bit.mkv", "gray.mkv"])
def test_damage_does_not_affect_later_windows(clip: ClipFolder, name: str, num_threads: int) -> None:
    """BAD-1: this holds whether or not the damaged window failed."""
    data, index, picture = clip(name).read_bytes(), indexed(clip(name)), PICTURES[2]
    draw, decoder = random.Random(name), StoredDecoder()
    for _ in range(12):
        start = draw.randint(0, index.num_frames - 6)
        with contextlib.suppress(DecodeError):
            bad = with_flipped_bytes(data, index, start, draw)
            from_packets(decoder, bad, index, start, 6, picture, num_threads=num_threads)
        found, _ = from_packets(decoder, data, index, start, 6, picture, num_threads=num_threads)
        assert np.array_equal(found, whole(clip(name), picture)[start : start + 6])


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    "name", ["h264_open_gop.mp4", "h264_one_gop.mp4", "hevc_open_gop.mp4", "vp9_odd.webm", "av1.mp4"]
)
def test_packets_that_do_not_decode_never_shift_frames(clip: ClipFolder, name: str, num_threads: int) -> None:
    """SAMPLE-2: garbage in place of wanted packets is an error; the next decodable frame must not replace them."""
    data, index, picture = clip(name).read_bytes(), indexed(clip(name)), PICTURES[2]
    window = index.window(17, 8)
    part = bytearray(data[window.first_byte : window.first_byte + window.num_bytes])
    for _, offset, size, slot in window.packets.tolist():
        if slot in (2, 3, 4):
            part[offset : offset + size] = b"\xff" * size
    out = np.zeros((8, picture.num_bytes), np.uint8)
    decoder = StoredDecoder()
    with pytest.raises(DecodeError, match=r"decode|damaged"):
        decoder.decode(
            index.info, window.packets, memoryview(part), window.key_time, out, picture, num_threads=num_threads
        )
    found, _ = from_packets(decoder, data, index, 17, 8, picture, num_threads=num_threads)
    assert np.array_equal(found, whole(clip(name), picture)[17:25])


def test_a_failed_decoder_is_not_kept(clip: ClipFolder) -> None:
    """BAD-1: after an error, the decoder is freed, without the garbage collector."""
    data, index = clip("h264_open_gop.mp4").read_bytes(), indexed(clip("h264_open_gop.mp4"))
    decoder = StoredDecoder()
    from_packets(decoder, data, index, 3, 4, PICTURES[0])
    assert num_kept(decoder) == 1
    with pytest.raises(DecodeError):
        from_packets(decoder, bytes(len(data)), index, 3, 4, PICTURES[0])
    assert num_kept(decoder) == 0


def test_a_header_of_another_clip_gives_an_error_or_harmless_frames(clip: ClipFolder) -> None:
    """SAFE-1: wrong, truncated and missing headers raise DecodeError, as for any hostile index."""
    data, index = clip("h264_open_gop.mp4").read_bytes(), indexed(clip("h264_open_gop.mp4"))
    header = index.info.extradata
    others = [indexed(clip(name)).info.extradata for name in ("h264_interlaced.mp4", "av1.mp4", "hevc_open_gop.mp4")]
    for extradata in (header[:20], header[:-4], b"\x01" * 60, bytes(60), *others):
        with contextlib.suppress(DecodeError):
            found, _ = from_packets(StoredDecoder(), data, replace_info(index, extradata=extradata), 17, 4, PICTURES[2])
            assert found.shape == (4, PICTURES[2].num_bytes)
    with pytest.raises(DecodeError):
        from_packets(StoredDecoder(), data, replace_info(index, extradata=bytes(60)), 17, 4, PICTURES[2])
    for codec in ("hevc", "vp9", "av1", "mjpeg", "ffv1"):
        with pytest.raises(DecodeError):
            from_packets(StoredDecoder(), data, replace_info(index, codec=codec), 17, 4, PICTURES[2])


def test_limits_apply_without_a_container_too(clip: ClipFolder) -> None:
    """SAFE-1: limits on codecs and pixels apply to the index and to the frames themselves."""
    data, index = clip("h264_open_gop.mp4").read_bytes(), indexed(clip("h264_open_gop.mp4"))
    for limits, message in [
        (Limits(codecs=("vp9",)), "codec h264 is not allowed; allowed codecs: vp9"),
        (Limits(max_pixels=100), "max_pixels=100"),
    ]:
        with pytest.raises(DecodeError, match=message):
            from_packets(StoredDecoder(limits), data, index, 0, 2, PICTURES[0])
    lies = replace_info(index, coded_width=8, coded_height=8)
    with pytest.raises(DecodeError):
        from_packets(StoredDecoder(Limits(max_pixels=100)), data, lies, 0, 2, PICTURES[0])
    with pytest.raises(DecodeError, match="codec cinepak is not allowed"):
        from_packets(StoredDecoder(), data, replace_info(index, codec="cinepak"), 0, 2, PICTURES[0])


def replace_info(index: ClipIndex, **values: Any) -> ClipIndex:
    """Return an index with the same packets and changed stream information."""
    return replace(index, info=replace(index.info, **values))


# Memory.


def num_kept(decoder: StoredDecoder) -> int:
    """Return the number of codec contexts that a decoder keeps open."""
    return len(decoder._open)


def sized_clip(width: int, height: int, num_frames: int = 2) -> bytes:
    return encode(frames_of("bikes", width, height, num_frames), fps=24)


def test_the_number_of_open_decoders_is_bounded() -> None:
    """MEM: streams with sixty sizes, each with and without threads, followed by large frames."""
    decoder, names = StoredDecoder(), set()
    for number in range(60):
        data = sized_clip(32 + 2 * number, 48)
        index = index_clip(data)
        assert index is not None
        names.add(index.info)
        for num_threads in (1, 2):
            from_packets(decoder, data, index, 0, 2, PictureFormat(16, 16), num_threads=num_threads)
            assert num_kept(decoder) <= 32
    assert len(names) == 60 and num_kept(decoder) == 32
    large = [sized_clip(width, 1072, 1) for width in (1872, 1888, 1904, 1920)]
    for number, data in enumerate(large * 2):
        index = index_clip(data)
        assert index is not None
        from_packets(decoder, data, index, 0, 1, PictureFormat(16, 16), num_threads=1 + number // 4 * 3)
    assert 1 <= num_kept(decoder) <= 4


def test_the_converters_of_a_decoder_use_bounded_memory() -> None:
    """MEM: one stream requested in hundreds of sizes."""
    decoder, data = StoredDecoder(), sized_clip(64, 48)
    index = index_clip(data)
    assert index is not None

    def sizes(first: int) -> None:
        for number in range(first, first + 200):
            from_packets(decoder, data, index, 0, 1, PictureFormat(16 + number, 16))

    sizes(0)
    before = in_use()
    sizes(200)
    assert in_use() - before < 4 << 20


@pytest.mark.parametrize("num_threads", [1, 2])
def test_hundreds_of_windows_leak_no_memory(clip: ClipFolder, num_threads: int) -> None:
    """MEM: the memory allocated by the C library is the same after hundreds of further windows."""
    names = ("h264_open_gop.mp4", "vp9_odd.webm", "hevc_10bit.mkv")
    clips = [(clip(name).read_bytes(), indexed(clip(name))) for name in names]
    decoder, draw = StoredDecoder(), random.Random(0)

    def windows(count: int) -> None:
        for number in range(count):
            data, index = clips[number % 3]
            picture = PICTURES[number // 3 % 3]
            from_packets(decoder, data, index, draw.randint(0, 36), 4, picture, num_threads=num_threads)

    windows(180)
    before = in_use()
    windows(360)
    assert (in_use() - before) / 360 < LOST_BYTES * (1 if num_threads == 1 else 64)


@pytest.mark.parametrize("name", ["h264_open_gop.mp4", "vp9_odd.webm", "hevc_10bit.mkv", "turn_90.mp4", "mjpeg.mov"])
def test_no_picture_is_left_for_the_garbage_collector(clip: ClipFolder, name: str) -> None:
    """MEM: this also holds after failures."""
    data, index, decoder = clip(name).read_bytes(), indexed(clip(name)), StoredDecoder()
    from_packets(decoder, data, index, 0, 4, PICTURES[0])
    with no_collection():
        for start in (0, 20, 36):
            from_packets(decoder, data, index, start, 4, PICTURES[0])
        assert gc.collect() == 0
        with contextlib.suppress(DecodeError):
            from_packets(decoder, bytes(len(data)), index, 20, 4, PICTURES[0])
        assert gc.collect() == 0


STEADY = """
import resource, sys
import numpy as np
from pathlib import Path
from streamvid.video.clip_index import index_clip
from streamvid.video.picture import PictureFormat
from streamvid.video.stream_info import StreamInfo
from streamvid.video.decode.stored import StoredDecoder

clips = [Path(name).read_bytes() for name in sys.argv[1:]]
indexes = [index_clip(data) for data in clips]
picture, decoder = PictureFormat(240, 320, pixels="yuv420p"), StoredDecoder()
out = np.zeros((24, picture.num_bytes), np.uint8)

def state():
    return (
        int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(),
        resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
    )

states = []
for number in range(360):
    if number in (60, 359):
        states.append(state())
    data, index, start = clips[number % 3], indexes[number % 3], number * 5 % 17
    window = index.window(start, 24)
    part = memoryview(data)[window.first_byte : window.first_byte + window.num_bytes]
    decoder.decode(index.info, window.packets, part, window.key_time, out, picture)
print(states[1][0] - states[0][0], (states[1][1] - states[0][1]) / 300)
"""


@pytest.mark.parametrize(
    ("environment", "most_pages"),
    [({"MALLOC_TRIM_THRESHOLD_": str(1 << 30)}, 4), pytest.param({}, 200, marks=pytest.mark.slow)],
)
def test_no_new_pages_in_steady_state(tmp_path: Path, environment: dict[str, str], most_pages: int) -> None:
    """MEM: 300 windows of 24 frames, alternating between three clips; the pictures need some 3000 pages per window.

    If the C library returns free memory at the end of its heap, some of it is allocated again for each window.
    """
    if not sys.platform.startswith("linux"):
        pytest.skip("needs /proc/self/statm to see resident memory")
    paths = []
    for width, height in ((480, 270), (640, 360), (320, 240)):
        paths.append(tmp_path / f"{width}.mp4")
        paths[-1].write_bytes(sized_clip(width, height, 41))
    done = run_python(STEADY, *paths, env={**os.environ, **environment})
    growth, pages = map(float, done.stdout.split())
    assert growth < 4 << 20
    assert pages < most_pages


def test_streams_of_an_old_x264_decode_from_every_key_frame(kept: StoredDecoder) -> None:
    """SAMPLE-2: FFmpeg needs the version from the first packet to decode 4:4:4 of x264 up to core 150."""
    data = (Path(__file__).parents[1] / "data" / "x264_core148_444.mp4").read_bytes()
    index = index_clip(data)
    assert index is not None and index.info.x264_core == 148
    assert StreamInfo.from_json(index.info.to_json()) == index.info
    assert int(np.count_nonzero(index.flags & KEY)) == 3
    picture = PictureFormat(64, 96, "yuv420p")
    whole, _ = from_container(data, 0, index.num_frames, picture)
    for start in range(index.num_frames - 1):
        wanted = whole[start : start + 2]
        np.testing.assert_array_equal(from_container(data, start, 2, picture)[0], wanted)
        for decoder, num_threads in ((kept, 1), (StoredDecoder(), 2)):
            found, _ = from_packets(decoder, data, index, start, 2, picture, num_threads=num_threads)
            np.testing.assert_array_equal(found, wanted)
