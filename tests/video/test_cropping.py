"""Tests of frames cropped by the container: we probe, store and deliver what the ffmpeg program shows."""

from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.video.clip_index import index_clip
from streamvid.video.cropping import container_margins
from streamvid.video.decode.file import decode_pictures
from streamvid.video.encode.clip import encode_clip
from streamvid.video.encode.profiles import Encoding
from streamvid.video.picture import PictureFormat
from streamvid.video.probe import probe
from streamvid.video.stream_info import StreamInfo
from tests.video.clips import ClipFolder, run_ffmpeg

NESTED = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd", b"avc1")


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(content), kind) + content


def clap(width: Fraction, height: Fraction, right: Fraction, down: Fraction) -> bytes:
    return box(
        b"clap", struct.pack(">IIIIiIiI", *(n for x in (width, height, right, down) for n in x.as_integer_ratio()))
    )


def with_clap(data: bytes, added: bytes) -> bytes:
    """Add a box to the video sample description of an MP4 file whose index follows its packets."""
    changed = bytearray(data)
    place = data.index(b"avcC") - 4
    for kind in NESTED:
        start = data.index(kind, data.index(b"moov")) - 4
        changed[start : start + 4] = struct.pack(">I", struct.unpack_from(">I", data, start)[0] + len(added))
    return bytes(changed[:place] + added + changed[place:])


def with_pixel_crop(data: bytes, left: int, top: int) -> bytes:
    """Replace the display size of a Matroska file by margins of the same number of bytes."""
    changed = bytearray(data)
    for display, margin, pixels in (("54b081", "54cc81", left), ("54ba81", "54bb81", top)):
        place = data.index(bytes.fromhex(display))
        changed[place : place + 4] = bytes.fromhex(margin) + bytes([pixels])
    return bytes(changed)


def shown_by_ffmpeg(path: Path) -> tuple[int, int, bytes]:
    """Return the width and height of the first frame, and the planes of all frames."""
    pictures = run_ffmpeg("-i", path, "-fps_mode", "passthrough", "-pix_fmt", "yuv420p", "-f", "rawvideo", "-")
    header = run_ffmpeg("-i", path, "-frames:v", 1, "-pix_fmt", "yuv420p", "-f", "yuv4mpegpipe", "-").split(b"\n")[0]
    sizes = {part[:1]: int(part[1:]) for part in header.split()[1:3]}
    return sizes[b"W"], sizes[b"H"], pictures


def check(path: Path) -> None:
    width, height, pictures = shown_by_ffmpeg(path)
    info = probe(path)
    assert (info.width, info.height) == (width, height)
    picture = PictureFormat(height, width, "yuv420p")
    found = np.zeros((info.num_frames, picture.num_bytes), np.uint8)
    decode_pictures(path, 0, found, picture)
    assert found.tobytes() == pictures


@pytest.mark.parametrize("name", ["h264_one_gop.mp4", "turn_90.mp4", "mirror.mp4"])
@pytest.mark.parametrize("place", [(96, 64, 10, -5), (150, 80, 0, 0), (64, 90, -48, 0), (Fraction(301, 2), 77, 1, 1)])
def test_a_clean_aperture_is_cropped_as_in_ffmpeg(
    clip: ClipFolder, tmp_path: Path, name: str, place: tuple[int, int, int, int]
) -> None:
    """SAMPLE-1: size and every pixel equal ffmpeg's, also for frames that are rotated for display."""
    path = tmp_path / name
    path.write_bytes(with_clap(clip(name).read_bytes(), clap(*map(Fraction, place))))
    assert path.stat().st_size == clip(name).stat().st_size + 40
    check(path)


def test_a_pixel_crop_is_cropped_as_in_ffmpeg(clip: ClipFolder, tmp_path: Path) -> None:
    """SAMPLE-1: left and top margins are set; the others default to 0."""
    path = tmp_path / "cropped.mkv"
    # FFV1 leaves the pixel shape to the container, which writes a display size only if pixels are not square.
    run_ffmpeg("-i", clip("h264_one_gop.mp4"), "-vf", "setsar=4/3", "-c:v", "ffv1", "-frames:v", 5, path)
    path.write_bytes(with_pixel_crop(path.read_bytes(), 26, 18))
    info = probe(path)
    assert info.margins == (26, 18, 0, 0) and (info.coded_width, info.coded_height) == (160, 90)
    check(path)


def test_stored_clips_are_cropped(clip: ClipFolder, tmp_path: Path) -> None:
    """SAMPLE-2: the index's stream description has the margins, and a native clip contains the cropped picture."""
    data = with_clap(clip("h264_one_gop.mp4").read_bytes(), clap(*map(Fraction, (96, 64, 10, -5))))
    index = index_clip(data)
    assert index is not None and index.info.margins == probe(data).margins == (42, 8, 22, 18)
    assert StreamInfo.from_json(index.info.to_json()) == index.info
    whole, plain = PictureFormat(64, 96, "yuv420p"), clip("h264_one_gop.mp4").read_bytes()
    assert "margins" not in index_clip(plain).info.to_json()  # type: ignore[union-attr]
    native = encode_clip(data, height=64, width=96, encoding=Encoding("ffv1"))
    found, wanted = (np.zeros((40, whole.num_bytes), np.uint8) for _ in range(2))
    decode_pictures(native.data, 0, found, whole)
    decode_pictures(data, 0, wanted, whole)
    assert (found == wanted).all()


@given(values=st.tuples(*[st.integers(-(2**31), 2**31 - 1)] * 8))
def test_an_impossible_aperture_is_ignored(clip: ClipFolder, values: tuple[int, ...]) -> None:
    """SAFE-1: for any numbers, the probed margins are inside the frame."""
    added = box(b"clap", b"".join(value.to_bytes(4, "big", signed=True) for value in values))
    left, top, right, bottom = probe(with_clap(clip("h264_one_gop.mp4").read_bytes(), added)).margins
    assert min(left, top, right, bottom) >= 0 and left + right < 160 and top + bottom < 90


@given(
    data=st.binary(max_size=200), head=st.sampled_from([b"\x1a\x45\xdf\xa3", bytes(4) + b"moov", bytes(4) + b"ftyp"])
)
def test_any_bytes_give_a_result(data: bytes, head: bytes) -> None:
    """SAFE-1: the parser terminates and raises no error."""
    file = head + data
    container_margins(lambda offset, size: file[offset : offset + size], len(file))


def test_heif_pictures_are_cropped_by_their_properties() -> None:
    """ISO/IEC 23008-12: item 2 has the aperture; items 1 and 3 have only a size."""
    size = box(b"ispe", struct.pack(">III", 0, 64, 64))
    owned = box(b"ipco", size + clap(*map(Fraction, (64, 48, 0, -8))))
    links = struct.pack(">IIHBB", 0, 3, 1, 1, 1) + struct.pack(">HBBB", 2, 2, 1, 0x82) + struct.pack(">HBB", 3, 1, 1)
    meta = box(b"meta", bytes(4) + box(b"iprp", owned + box(b"ipma", links)))
    file = box(b"ftyp", b"heic" + bytes(4)) + meta
    found = container_margins(lambda offset, size: file[offset : offset + size], len(file))
    assert found == {2: (0, 0, 0, 16)}


def reads_of(file: bytes) -> list[tuple[int, int]]:
    """Return the (offset, size) of each read by the parser."""
    reads: list[tuple[int, int]] = []

    def read_at(offset: int, size: int) -> bytes:
        reads.append((offset, size))
        return file[offset : offset + size]

    container_margins(read_at, len(file))
    return reads


def test_a_hostile_file_needs_few_reads_and_little_memory() -> None:
    """SAFE-1: 300,000 boxes in a box, and a property list as large as the file."""
    track = box(b"trak", b"")
    tracks = box(b"moov", track * 300_000)
    assert len(reads_of(box(b"ftyp", b"isom") + tracks)) < 70_000
    owned = box(b"ipco", box(b"ispe", bytes(12)))
    meta = box(b"meta", bytes(4) + box(b"iprp", owned + box(b"ipma", bytes(8 << 20))))
    assert max(size for _, size in reads_of(box(b"ftyp", b"heic") + meta)) <= 1 << 20


def test_nothing_is_read_beyond_the_description_of_the_tracks() -> None:
    """FETCH: the fragments of a long file may be far away."""
    head = box(b"ftyp", b"isom") + box(b"moov", box(b"trak", b""))
    assert max(offset for offset, _ in reads_of(head + box(b"moof", b"") * 1000)) < len(head)
