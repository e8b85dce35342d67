"""Tests of the packet index: which clips have one, and whether its windows match the bytes of the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.buckets.pick import time_base_of
from streamvid.errors import ConfigError, DecodeError, ProbeError
from streamvid.video.clip_index import KEY, SHOWN, ClipIndex, checksum, index_clip
from streamvid.video.decode.file import decode_into, decode_pictures
from streamvid.video.decode.stored import StoredDecoder
from streamvid.video.limits import Limits
from streamvid.video.picture import PictureFormat, Pixels
from streamvid.video.probe import probe
from streamvid.video.stream_info import StreamInfo
from tests.video.clips import IMAGE_NAMES, VIDEO_NAMES, ClipFolder

#: Clips that must have an index; a clip that silently falls back to its container fails the tests.
INDEXED = (
    *("h264_open_gop.mp4", "h264_open_gop.mkv", "h264_one_gop.mp4", "h264_refresh.mp4", "h264_fragments.mp4"),
    *("h264_10bit.mp4", "h264_interlaced.mp4", "hevc_open_gop.mp4", "hevc_layers.mp4", "hevc_10bit.mkv"),
    *("vp9_hidden.webm", "vp9_odd.webm", "av1.mp4", "mjpeg.mov", "odd_444.mkv", "rgb.mkv", "gray.mkv", "alpha.webm"),
    *("wide_pixels.mp4", "tall_pixels.mkv", "variable_rate.mp4", "variable_rate.mkv", "edit_list.mp4"),
    *("turn_90.mp4", "turn_180.mp4", "turn_270.mp4", "turn_90.mkv", "turn_90_wide_pixels.mp4"),
    *("mirror.mp4", "turn_90_mirror.mp4", "turn_270_mirror.mp4"),
)
#: Clips whose packets are not contiguous, have no timestamps of their own, or use a codec that is not inspected.
PLAIN = (
    *("h264.ts", "h264.flv", "vp8_hidden.webm", "mpeg4.mp4", "mpeg4.avi", "mpeg4_b_frames.avi", "mpeg2.mpg"),
    *("prores.mov", "variable_rate.avi", "edit_list_mpeg4.mp4", "mpeg2.m2v", "theora.ogv", "vp9.ivf"),
)

INFO = StreamInfo("h264", b"", 64, 64, "yuv420p", (1, 1), 0, False, (2, 0, 2, 2), 0)


def indexed(path: Path) -> ClipIndex:
    """Return the index of a clip that must have one."""
    found = index_clip(path.read_bytes())
    assert found is not None, path.name
    return found


def test_every_recipe_is_listed_as_indexed_or_not() -> None:
    assert sorted([*INDEXED, *PLAIN]) == sorted(VIDEO_NAMES)


@pytest.mark.parametrize("name", INDEXED)
def test_an_index_has_the_frames_that_probe_counts(clip: ClipFolder, name: str) -> None:
    """SAMPLE-2: the index has the same frames by number, and the facts that a converter needs."""
    path = clip(name)
    info, found = probe(path), indexed(path)
    assert found.num_frames == info.num_frames
    assert sorted(found.times[found.flags & SHOWN > 0].tolist()) == list(info.timestamps)
    for field in ("codec", "coded_width", "coded_height", "pixel_format", "sample_aspect_ratio", "rotation", "flip"):
        assert getattr(found.info, field) == getattr(info, field), field


@pytest.mark.parametrize("name", [*PLAIN, *IMAGE_NAMES])
def test_clips_that_cannot_be_indexed_have_no_index(clip: ClipFolder, name: str) -> None:
    assert index_clip(clip(name).read_bytes()) is None


def test_a_file_that_is_not_a_video_is_an_error(clip: ClipFolder) -> None:
    """SAFE-1: if `probe` refuses a file, no index is made."""
    data = clip("h264_open_gop.mkv").read_bytes()
    for rubbish in (b"", b"no video at all" * 50, data[: len(data) // 2]):
        with pytest.raises(ProbeError):
            index_clip(rubbish)
    with pytest.raises(ProbeError, match="max_pixels=100"):
        index_clip(data, Limits(max_pixels=100))


@pytest.mark.parametrize("name", INDEXED)
def test_a_window_is_a_range_of_whole_pieces_with_checksums(clip: ClipFolder, name: str) -> None:
    """SAMPLE-2: for any window, the pieces have the checksums of the file's bytes and cover all packets."""
    data, found = clip(name).read_bytes(), indexed(clip(name))
    for start in range(found.num_frames):
        for num_frames in {1, 2, found.num_frames - start}:
            if start + num_frames > found.num_frames:
                continue
            window = found.window(start, num_frames)
            content = data[window.first_byte : window.first_byte + window.num_bytes]
            assert len(content) == window.num_bytes
            for low, high, digest in window.pieces:
                assert checksum(content[low:high]) == digest
            for _, offset, size, _ in window.packets.tolist():
                assert any(low <= offset and offset + size <= high for low, high, _ in window.pieces)
            assert sorted(window.packets[:, 3].tolist())[-num_frames:] == list(range(num_frames))
            assert window.key_time == window.packets[0, 0]


@pytest.mark.parametrize("name", ["h264_open_gop.mp4", "mjpeg.mov", "hevc_10bit.mkv", "gray.mkv"])
def test_a_short_window_is_a_part_of_a_long_clip(clip: ClipFolder, name: str) -> None:
    """With an index, a window needs only the bytes from the preceding key frame on, not the whole clip."""
    data, found = clip(name).read_bytes(), indexed(clip(name))
    last = found.window(found.num_frames - 1, 1)
    assert last.num_bytes < len(data) / 2 and last.first_byte > len(data) / 4
    assert found.window(0, 1).num_bytes < len(data) / 2


def test_windows_outside_the_clip_are_refused(clip: ClipFolder) -> None:
    found = indexed(clip("edit_list.mp4"))
    assert found.num_frames == 27
    for start, num_frames in ((-1, 2), (26, 2), (27, 1), (0, 28), (1 << 40, 1)):
        with pytest.raises(DecodeError, match="the clip has 27"):
            found.window(start, num_frames)


@st.composite
def indexes(draw: st.DrawFn) -> ClipIndex:
    """Draw any packets that a clip may have: reordered, far apart, out of order in the file, hidden, with open GOPs."""
    count = draw(st.integers(1, 120))
    seed = draw(st.integers(0, 2**32))
    choose = np.random.default_rng(seed)
    reach = draw(st.integers(0, 6))
    times = np.argsort(np.argsort(np.arange(count) + choose.uniform(0, reach + 0.01, count))) * 512 - 1024
    sizes = choose.integers(1, 500, count)
    places = choose.permutation(count) if draw(st.booleans()) else np.arange(count)
    offsets = np.empty(count, np.int64)
    offsets[places] = np.cumsum(sizes[places] + choose.integers(0, 100, count)) - sizes[places]
    flags = (choose.random(count) < draw(st.sampled_from([0.0, 0.1, 1.0]))) * np.uint8(KEY)
    flags |= (choose.random(count) < 0.9) * np.uint8(SHOWN)
    flags[0] |= KEY
    packets = (INFO, times, offsets, sizes, flags.astype(np.uint8))
    edges = [i for i, since in enumerate(_since_key(flags.tolist())) if since % 32 == 0]
    digests = choose.integers(0, 256, (len(edges), 8), np.uint8)
    return ClipIndex(*packets, digests)


def _since_key(flags: list[int]) -> list[int]:
    found: list[int] = []
    for flag in flags:
        found.append(0 if flag & KEY else found[-1] + 1)
    return found


@given(indexes(), st.integers(0, 200), st.integers(1, 40))
def test_a_window_equals_the_result_of_a_plain_search(found: ClipIndex, start: int, num_frames: int) -> None:
    """SAMPLE-2: a window starts at the last key packet stored and shown before all wanted packets."""
    shown = sorted((int(found.times[i]), i) for i in range(len(found.times)) if found.flags[i] & SHOWN)
    wanted = shown[start : start + num_frames]
    ordinals = [i for _, i in wanted]
    keys = [i for i in range(len(found.times)) if found.flags[i] & KEY]
    usable = [i for i in keys if wanted and i <= min(ordinals) and found.times[i] <= wanted[0][0]]
    if len(wanted) < num_frames or not usable:
        with pytest.raises(DecodeError):
            found.window(start, num_frames)
        return
    window = found.window(start, num_frames)
    first, last = usable[-1], max(ordinals)
    slots = {i: slot for slot, i in enumerate(ordinals)}
    assert window.packets.tolist() == [
        [found.times[i], found.offsets[i] - window.first_byte, found.sizes[i], slots.get(i, -1)]
        for i in range(first, last + 1)
    ]
    numbers = np.cumsum([since % 32 == 0 for since in _since_key(found.flags.tolist())]) - 1
    pieces = []
    for number in range(numbers[first], numbers[last] + 1):
        members = [i for i in range(len(numbers)) if numbers[i] == number]
        low = min(int(found.offsets[i]) for i in members) - window.first_byte
        high = max(int(found.offsets[i] + found.sizes[i]) for i in members) - window.first_byte
        pieces.append((low, high, found.checksums[number].tobytes()))
    assert list(window.pieces) == pieces
    assert min(piece[0] for piece in pieces) == 0 and max(piece[1] for piece in pieces) == window.num_bytes


def packets_of(
    times: list[int], offsets: list[int], sizes: list[int], flags: list[int], num_checksums: int = 1
) -> ClipIndex:
    """Build an index of these packets, which may be invalid as in a damaged file."""
    return ClipIndex(
        INFO,
        np.array(times, np.int64),
        np.array(offsets, np.int64),
        np.array(sizes, np.int64),
        np.array(flags, np.uint8),
        np.zeros((num_checksums, 8), np.uint8),
    )


@pytest.mark.parametrize(
    ("times", "offsets", "sizes", "flags", "num_checksums"),
    [
        ([], [], [], [], 0),
        ([0], [0, 9], [9], [3], 1),
        ([0, 1], [0, 9], [9, 0], [3, 2], 1),
        ([0, 1], [0, 9], [9, -4], [3, 2], 1),
        ([0, 1], [0, -9], [9, 9], [3, 2], 1),
        ([0, 1], [0, 9], [9, 9], [2, 3], 2),
        ([0, 1], [0, 9], [9, 9], [3, 2], 2),
        ([0, 1], [0, 2**63 - 5], [9, 9], [3, 2], 1),  # its end exceeds a 64-bit integer
        ([0, 1], [0, 9], [9, 2**63 - 5], [3, 2], 1),
    ],
)
def test_invalid_packets_are_refused(
    times: list[int], offsets: list[int], sizes: list[int], flags: list[int], num_checksums: int
) -> None:
    """SAFE-1."""
    with pytest.raises(DecodeError, match="packet index is invalid"):
        packets_of(times, offsets, sizes, flags, num_checksums)


@pytest.mark.parametrize(("flags", "num_frames"), [([3, 2, 2], 3), ([3, 0, 2], 2)])
def test_two_packets_with_the_same_time_are_refused(flags: list[int], num_frames: int) -> None:
    """SAMPLE-2: one packet's frame could replace the other's, or a frame could be left unwritten."""
    with pytest.raises(DecodeError, match="the same timestamp"):
        packets_of([0, 512, 512], [0, 9, 18], [9, 9, 9], flags).window(0, num_frames)


@pytest.mark.parametrize("name", ["h264_open_gop.mp4", "vp9_hidden.webm", "variable_rate.mkv", "turn_90.mp4"])
@pytest.mark.parametrize("pixels", ["rgb24", "yuv420p"])
def test_strided_frames_equal_those_of_a_full_decode(clip: ClipFolder, name: str, pixels: Pixels) -> None:
    """SAMPLE-2: with a stride, frames from packets and from the container equal those of a full decode."""
    data, found = clip(name).read_bytes(), indexed(clip(name))
    picture = PictureFormat(48, 64, pixels)
    every = np.zeros((found.num_frames, picture.num_bytes), np.uint8)
    decode_pictures(data, 0, every, picture)
    decoder = StoredDecoder()
    for stride, start in ((2, 1), (3, 4), (7, 0)):
        numbers = range(start, found.num_frames, stride)
        window = found.window(start, len(numbers), stride)
        part = memoryview(data)[window.first_byte : window.first_byte + window.num_bytes]
        stored, plain = (np.zeros((len(numbers), picture.num_bytes), np.uint8) for _ in range(2))
        decoder.decode(found.info, window.packets, part, window.key_time, stored, picture)
        decode_pictures(data, start, plain, picture, stride=stride)
        assert np.array_equal(stored, every[list(numbers)]) and np.array_equal(plain, stored)
        with pytest.raises(DecodeError, match=f"requested, but the clip has {found.num_frames}"):
            found.window(start, len(numbers) + 1, stride)
        with pytest.raises(DecodeError, match=f"the video has {found.num_frames}"):
            decode_pictures(
                data, start, np.zeros((len(numbers) + 1, picture.num_bytes), np.uint8), picture, stride=stride
            )


def test_invalid_strides_are_refused(clip: ClipFolder) -> None:
    found, out = indexed(clip("h264_open_gop.mp4")), np.zeros((2, 8, 8, 3), np.uint8)
    with pytest.raises(DecodeError, match="stride is 0; both must be at least 1"):
        found.window(5, 2, 0)
    with pytest.raises(ConfigError, match="stride is 0; it must be at least 1"):
        decode_into(clip("h264_open_gop.mp4"), 5, out, stride=0)


@pytest.mark.parametrize("name", VIDEO_NAMES)
def test_the_time_base_follows_from_a_clips_average_rate(clip: ClipFolder, name: str) -> None:
    """SAMPLE-2: the time base is exact, so that frames chosen by time are the same with and without an index."""
    info, found = probe(clip(name)), index_clip(clip(name).read_bytes())
    assert time_base_of(info.timestamps, info.fps) == info.time_base
    if found is not None:
        assert found.frame_times.tolist() == list(info.timestamps)


@given(st.data())
def test_frames_at_any_distances_equal_frames_decoded_one_by_one(clip: ClipFolder, data: st.DataObject) -> None:
    """SAMPLE-2: repeats show the previous frame; each distinct frame is decoded once, from the nearest key frame."""
    name = data.draw(st.sampled_from(["h264_open_gop.mp4", "variable_rate.mkv", "hevc_layers.mp4", "vp9_hidden.webm"]))
    content = clip(name).read_bytes()
    found, picture = indexed(clip(name)), PictureFormat(36, 48)
    count = found.num_frames
    numbers = sorted(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=8)))
    window = found.window_of(numbers)
    slots = window.packets[window.packets[:, 3] >= 0, 3]
    assert sorted(slots.tolist()) == [numbers.index(number) for number in sorted(set(numbers))]
    part = memoryview(content)[window.first_byte : window.first_byte + window.num_bytes]
    out = np.full((len(numbers), picture.num_bytes), 7, np.uint8)
    StoredDecoder().decode(found.info, window.packets, part, window.key_time, out, picture, numbers=numbers)
    by_container = np.full_like(out, 9)
    decode_pictures(content, 0, by_container, picture, num_frames=count, choose=lambda table: numbers)
    assert np.array_equal(out, by_container)
    for slot, number in enumerate(numbers):
        one = np.zeros((1, picture.num_bytes), np.uint8)
        decode_pictures(content, number, one, picture)
        assert np.array_equal(out[slot], one[0])
    with pytest.raises(DecodeError, match=f"the clip has {count}"):
        found.window_of([*numbers, count])
