"""Tests of false key-frame flags: each window equals a decode from the start, whatever the container claims."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest

from streamvid.video.bitstream.entries import is_entry
from streamvid.video.clip_index import index_clip
from streamvid.video.decode.file import decode_into
from streamvid.video.decode.stored import StoredDecoder
from streamvid.video.picture import PictureFormat
from streamvid.video.probe import probe
from tests.clips import frames_of

WIDTH, HEIGHT, COUNT, WINDOW = 176, 144, 40, 4


def encoded(codec: str, container: str, **options: str) -> io.BytesIO:
    """Make a clip with a key frame every ten frames."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=25)
        stream.width, stream.height = WIDTH, HEIGHT
        stream.pix_fmt = options.pop("pix_fmt", "yuv420p")
        stream.options = {"g": "10", **options}
        stream.codec_context.gop_size = 10
        for frame in frames_of("bikes", WIDTH, HEIGHT, COUNT):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame).reformat(format=stream.pix_fmt)))
        out.mux(stream.encode())
    file.seek(0)
    return file


def all_flagged(source: io.BytesIO, container: str) -> bytes:
    """Return the same packets, all flagged as key frames."""
    file = io.BytesIO()
    with av.open(source) as old, av.open(file, "w", format=container) as new:
        stream = new.add_stream_from_template(old.streams.video[0], opaque=True)
        for packet in old.demux(old.streams.video[0]):
            if packet.size:
                packet.stream, packet.is_keyframe = stream, True
                packet.dts = packet.pts if packet.dts is None else packet.dts
                new.mux(packet)
    return file.getvalue()


def stored_window(data: bytes, start: int) -> np.ndarray | None:
    """Decode the same window from the clip's packets, or return None if the clip has no index."""
    index = index_clip(data)
    if index is None:
        return None
    packets, out = index.window(start, WINDOW), np.zeros((WINDOW, HEIGHT, WIDTH, 3), np.uint8)
    piece = memoryview(data)[packets.first_byte : packets.first_byte + packets.num_bytes]
    StoredDecoder().decode(
        index.info, packets.packets, piece, packets.key_time, out.reshape(WINDOW, -1), PictureFormat(HEIGHT, WIDTH)
    )
    return out


def check_windows(data: bytes) -> None:
    info = probe(data)
    assert info.num_frames == COUNT and info.num_keyframes <= COUNT // 4, info.num_keyframes
    whole = np.zeros((COUNT, HEIGHT, WIDTH, 3), np.uint8)
    decode_into(data, 0, whole, num_frames=COUNT)
    for start in range(COUNT - WINDOW + 1):
        window = np.zeros((WINDOW, HEIGHT, WIDTH, 3), np.uint8)
        decode_into(data, start, window, num_frames=COUNT)
        assert np.array_equal(window, whole[start : start + WINDOW]), f"frames {start} to {start + WINDOW - 1}"
        stored = stored_window(data, start)
        assert stored is None or np.array_equal(stored, window), f"stored frames {start} to {start + WINDOW - 1}"


@pytest.mark.parametrize(
    ("codec", "container", "options"),
    [
        *(("mpeg4", "mov", {}), ("mpeg4", "mov", {"bf": "2"}), ("mpeg4", "avi", {})),
        *(("h263", "3gp", {}), ("flv", "flv", {}), ("msmpeg4", "avi", {}), ("msmpeg4", "asf", {})),
        *(("msmpeg4v2", "asf", {}), ("wmv1", "asf", {}), ("wmv2", "asf", {}), ("qtrle", "mov", {"pix_fmt": "rgb24"})),
        *(("mpeg1video", "mov", {}), ("mpeg2video", "mov", {"bf": "2"}), ("libx264", "mov", {"bf": "2"})),
        ("libx265", "mov", {"x265-params": "log-level=none:keyint=10"}),
        *(("libvpx", "matroska", {"cpu-used": "8"}), ("libvpx-vp9", "mp4", {"cpu-used": "8", "deadline": "realtime"})),
        *(("ffv1", "mp4", {"level": "1", "context": "1"}), ("ffv1", "asf", {"level": "3", "slices": "4"})),
        ("libsvtav1", "asf", {"preset": "12"}),
    ],
)
def test_a_false_key_frame_flag_corrupts_no_window(codec: str, container: str, options: dict[str, str]) -> None:
    """SAMPLE-2: in real files, a 3GP file flagged five P-frames, and an ASF file flagged all of its 108 packets."""
    check_windows(all_flagged(encoded(codec, container, **options), container))


def test_av1_without_a_table_of_key_frames() -> None:
    data = encoded("libsvtav1", "mp4", preset="12").getvalue()
    assert b"stss" in data
    whole = np.zeros((COUNT, HEIGHT, WIDTH, 3), np.uint8)
    decode_into(data, 0, whole, num_frames=COUNT)
    bare = data.replace(b"stss", b"free")
    for start in range(0, COUNT - WINDOW, 3):
        window = np.zeros((WINDOW, HEIGHT, WIDTH, 3), np.uint8)
        decode_into(bare, start, window, num_frames=COUNT)
        assert np.array_equal(window, whole[start : start + WINDOW])


WMV9_MAIN = bytes.fromhex("4ef91a01")  # no range reduction, no B-frames, no interpolation
WMV9_B_FRAMES = bytes.fromhex("4ef91a13")  # one B-frame, interpolation
VC1_SIZE = b"\0\0\1\x0f" + bytes([0b11001010, *[0] * 9])  # progressive
VC1_FIELDS = b"\0\0\1\x0f" + bytes([0b11001010, 0, 0, 0, 0, 0b01000000, *[0] * 4])


@pytest.mark.parametrize(
    ("codec", "header", "packet", "expected"),
    [
        *(("wmv3", WMV9_MAIN, [0b11_0_00000], True), ("wmv3", WMV9_MAIN, [0b11_1_00000], False)),
        *(("wmv3", WMV9_B_FRAMES, [0b1_00_0_1_000], True), ("wmv3", WMV9_B_FRAMES, [0b1_00_0_0_000], False)),
        ("wmv3", WMV9_B_FRAMES, [0b1_00_1_1_000], False),
        *(("vc1", VC1_SIZE, [0b110_00000], True), ("vc1", VC1_SIZE, [0b1110_0000], False)),
        *(("vc1", VC1_SIZE, [0b0_0000000], False), ("vc1", VC1_SIZE, [0b10_000000], False)),
        *(("vc1", VC1_SIZE, [0, 0, 1, 0x0D, 0b110_00000], True), ("vc1", VC1_SIZE, [0, 0, 1, 0x0D, 0], False)),
        *(("vc1", VC1_FIELDS, [0b11_001_000], True), ("vc1", VC1_FIELDS, [0b11_010_000], False)),
        *(("vc1", VC1_FIELDS, [0b0_110_0000], True), ("vc1", VC1_FIELDS, [0b10_110_000], True)),
        ("h263", b"", [0, 0, 0b100000_00, 0b000000_10, 0b000_111_00, 0b1_0000000, 0, 0b000_001_00], False),
        ("h263", b"", [0, 0, 0b100000_00, 0b000000_10, 0b000_111_00, 0b1_0000000, 0, 0b000_000_00], True),
        ("h263", b"", [0, 0, 0b100000_00, 0b000000_10, 0b000_111_00, 0b0_001_0000], False),
        *(("mpeg4", b"", [1, 2, 3], False), ("mpeg4", b"", [], False), ("hevc", b"", [0, 0, 1, 0x46, 1], True)),
        *(("mjpeg", b"", [1], True), ("gif", b"", [1], False), ("h263", b"", [0xFF] * 9, False)),
    ],
)
def test_picture_headers(codec: str, header: bytes, packet: list[int], expected: bool) -> None:
    """Covers codecs that no available encoder writes, and packets without a picture."""
    assert is_entry(codec, memoryview(bytes(packet)), header, is_first=False) is expected
