"""Tests of decode_into against a full decode by the ffmpeg program, frame by frame."""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from streamvid.errors import ConfigError, DecodeError
from streamvid.video.decode.file import decode_into
from streamvid.video.limits import Limits
from streamvid.video.probe import probe
from streamvid.video.transform import Transform
from tests.clips import real_clip
from tests.processes import run_python
from tests.video.clips import (
    IMAGE_NAMES,
    VIDEO_NAMES,
    ClipFolder,
    decode_with_ffmpeg,
    mean_square_errors,
    psnr,
    run_ffmpeg,
)

HEIGHT, WIDTH = 72, 96


@pytest.mark.parametrize("name", VIDEO_NAMES)
def test_windows_are_the_frames_of_a_full_decode(clip: ClipFolder, name: str) -> None:
    """SAMPLE-2: for any codec, container, GOP, rate or rotation, frame i is frame i of the full decode."""
    path = clip(name)
    info = probe(path)
    reference = decode_with_ffmpeg(path, Transform.cover(info, HEIGHT, WIDTH).ffmpeg_filter, HEIGHT, WIDTH)
    assert info.num_frames == len(reference)
    data, draw = path.read_bytes(), random.Random(name)
    starts = {0, info.num_frames - 6, *(draw.randint(0, info.num_frames - 6) for _ in range(5))}
    for start in sorted(starts):
        out = np.zeros((6, HEIGHT, WIDTH, 3), np.uint8)
        decode_into(data, start, out, num_frames=info.num_frames)
        for slot, frame in enumerate(out):
            errors = mean_square_errors(reference, frame)
            assert psnr(errors[start + slot]) >= 45, f"frame {start + slot}"
            assert errors[start + slot] == errors.min(), f"frame {start + slot} looks like {errors.argmin()}"


@pytest.mark.parametrize("name", IMAGE_NAMES)
def test_an_image_is_a_video_of_one_frame(clip: ClipFolder, name: str) -> None:
    """SAMPLE-2: for still images of every pixel format."""
    path = clip(name)
    info = probe(path)
    reference = decode_with_ffmpeg(path, Transform.cover(info, HEIGHT, WIDTH).ffmpeg_filter, HEIGHT, WIDTH)
    out = np.zeros((1, HEIGHT, WIDTH, 3), np.uint8)
    decode_into(path.read_bytes(), 0, out, num_frames=1)
    assert (info.is_image, info.num_frames) == (True, 1)
    assert psnr(mean_square_errors(reference, out[0])[0]) >= 45


@pytest.mark.parametrize("name", [name for name in VIDEO_NAMES if name.startswith(("turn_", "mirror"))])
def test_turned_and_mirrored_clips_are_oriented_as_in_ffmpeg(clip: ClipFolder, name: str) -> None:
    """SAMPLE-2: the orientation equals that of ffmpeg's autorotation, which is independent of our filter."""
    path = clip(name)
    info = probe(path)
    height, width = info.height // 2 * 2, info.width // 2 * 2
    # Autorotation comes first: the filter sees upright frames.
    raw = run_ffmpeg(
        "-i", path, "-frames:v", 1, "-vf", f"scale={width}:{height}", "-f", "rawvideo", "-pix_fmt", "rgb24", "-"
    )
    upright = np.frombuffer(raw, np.uint8).reshape(1, height, width, 3)
    out = np.zeros((1, height, width, 3), np.uint8)
    decode_into(path, 0, out)
    right = mean_square_errors(upright, out[0])[0]
    others = [out[0][::-1], out[0][:, ::-1], out[0][::-1, ::-1]]
    assert psnr(right) > 28
    assert all(mean_square_errors(upright, other)[0] > 10 * right for other in others)


@pytest.mark.parametrize("tagged", [True, False])
@pytest.mark.parametrize(("matrix", "tag"), [("bt709", "bt709"), ("bt601", "smpte170m"), ("bt2020", "bt2020nc")])
@pytest.mark.parametrize("color_range", ["tv", "pc"])
def test_colors_are_preserved(tmp_path: Path, matrix: str, tag: str, color_range: str, tagged: bool) -> None:
    """SAMPLE-2: matrix and range are respected; untagged large frames are BT.709 and small ones BT.601."""
    if not tagged and (matrix == "bt2020" or color_range == "pc"):
        return  # these properties are known only from tags
    size = "1280x720" if matrix == "bt709" and not tagged else "64x64"
    colors = [(200, 50, 20), (20, 180, 60), (40, 60, 220), (250, 250, 250), (5, 5, 5)]
    tags = f"colorspace={tag}:range={color_range}" if tagged else "colorspace=unknown:range=unknown"
    for red, green, blue in colors:
        path = tmp_path / "color.mp4"
        run_ffmpeg(
            *("-f", "lavfi", "-i", f"color=c=0x{red:02x}{green:02x}{blue:02x}:s={size}:d=0.2:r=10,format=gbrp"),
            *("-vf", f"scale=out_color_matrix={matrix}:out_range={color_range},format=yuv444p,setparams={tags}"),
            *("-c:v", "libx264", "-qp", "1", path),
        )
        out = np.zeros((1, 32, 32, 3), np.uint8)
        decode_into(path, 0, out)
        assert probe(path).color_space == matrix
        assert probe(path).is_color_guessed is not tagged
        assert np.abs(out[0, 16, 16].astype(int) - (red, green, blue)).max() <= 4


def test_every_kind_of_source_gives_the_same_frames(clip: ClipFolder) -> None:
    path = clip("h264_open_gop.mp4")
    data = path.read_bytes()
    padded = b"front" + data + b"back"
    expected = np.zeros((4, HEIGHT, WIDTH, 3), np.uint8)
    decode_into(data, 9, expected)
    with path.open("rb") as file:
        file.seek(100)
        sources = [bytearray(data), memoryview(padded)[5:-4], np.frombuffer(data, np.uint8).data, str(path), path]
        for source in [*sources, io.BytesIO(data), file]:
            out = np.zeros_like(expected)
            decode_into(source, 9, out)
            assert np.array_equal(out, expected), type(source)
        assert not file.closed


def test_a_video_with_unreliable_seeks_is_decoded_correctly(clip: ClipFolder) -> None:
    """Seeks in MPEG-TS are imprecise, but the frames are right (compared with a Matroska copy of the clip)."""
    out, expected = np.zeros((2, 5, HEIGHT, WIDTH, 3), np.uint8)
    path = clip("h264.ts")
    copy = path.with_name("remuxed.mkv")
    run_ffmpeg("-i", path, "-c", "copy", copy)
    for start in (0, 13, 35):
        decode_into(path, start, out)
        decode_into(copy, start, expected)
        assert np.array_equal(out, expected)


def test_a_wrong_number_of_frames_is_an_error(clip: ClipFolder) -> None:
    out = np.zeros((4, HEIGHT, WIDTH, 3), np.uint8)
    with pytest.raises(DecodeError, match="has 40 frames, but 41 were expected"):
        decode_into(clip("h264_open_gop.mp4"), 0, out, num_frames=41)
    with pytest.raises(DecodeError, match="frames 37 to 40 were requested, but the video has 40"):
        decode_into(clip("h264_open_gop.mp4"), 37, out)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (np.zeros((4, 8, 8, 3), np.float32), "float32"),
        (np.zeros((4, 3, 8, 8), np.uint8), r"\(4, 3, 8, 8\)"),
        (np.zeros((0, 8, 8, 3), np.uint8), "non-empty uint8 array"),
        (np.zeros((4, 8, 16, 3), np.uint8)[:, :, ::2], "C-contiguous"),
    ],
)
def test_arrays_that_cannot_hold_frames_are_refused(out: np.ndarray, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decode_into(b"unread", 0, out)


def test_a_negative_start_is_refused() -> None:
    with pytest.raises(ConfigError, match="start is -1"):
        decode_into(b"unread", -1, np.zeros((1, 8, 8, 3), np.uint8))


@pytest.mark.parametrize("name", ["h264_open_gop.mp4", "h264_one_gop.mp4", "mpeg4.mp4", "mpeg2.mpg", "av1.mp4"])
def test_damage_is_an_error_or_harmless_but_never_shifts_frames(clip: ClipFolder, name: str) -> None:
    """SAFE-1, SAMPLE-2: with packets overwritten in the middle, a window either fails or contains its own frames."""
    path = clip(name)
    info = probe(path)
    whole = np.zeros((info.num_frames, HEIGHT, WIDTH, 3), np.uint8)
    data = path.read_bytes()
    decode_into(data, 0, whole)
    failures = 0
    for tenths in (5, 6, 7, 8):  # FFmpeg does not detect all damage: a slice of zeros may decode to a wrong picture
        middle = len(data) * tenths // 10
        broken = data[:middle] + bytes(600) + data[middle + 600 :]
        for start in range(0, info.num_frames - 4, 3):
            out = np.zeros((4, HEIGHT, WIDTH, 3), np.uint8)
            try:
                decode_into(broken, start, out, num_frames=info.num_frames)
            except DecodeError:
                failures += 1
                continue
            for slot, frame in enumerate(out):
                errors = mean_square_errors(whole, frame)
                assert errors[start + slot] == errors.min(), f"frame {start + slot} looks like {errors.argmin()}"
    assert failures, "the damage was not detected at all"


def test_an_overwritten_gop_is_an_error(clip: ClipFolder, tmp_path: Path) -> None:
    """With a whole GOP overwritten, the error reports missing frames, and no other frames are returned instead."""
    import av

    data = bytearray(clip("h264_open_gop.mkv").read_bytes())
    with av.open(io.BytesIO(data), "r") as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    for packet in packets[18:24]:
        at = data.index(bytes(packet))
        data[at : at + packet.size] = b"\xff" * packet.size
    with pytest.raises(DecodeError, match=r"decode|damaged"):
        decode_into(data, 17, np.zeros((8, HEIGHT, WIDTH, 3), np.uint8), num_frames=40)
    decode_into(data, 2, np.zeros((8, HEIGHT, WIDTH, 3), np.uint8), num_frames=40)


def test_a_video_that_changes_its_size_is_refused(tmp_path: Path) -> None:
    for name, scale in (("small.ts", "160:90"), ("large.ts", "320:180")):
        video_filter = f"scale={scale},setsar=1"
        run_ffmpeg(
            *("-i", real_clip("bikes"), "-an", "-frames:v", 20, "-vf", video_filter, "-c:v", "libx264"),
            tmp_path / name,
        )
    (tmp_path / "list").write_text("ffconcat version 1.0\nfile small.ts\nfile large.ts\n")
    run_ffmpeg("-f", "concat", "-i", tmp_path / "list", "-c", "copy", tmp_path / "both.ts")
    with pytest.raises(DecodeError, match="changes from 160x90 yuv420p to 320x180"):
        decode_into(tmp_path / "both.ts", 15, np.zeros((10, HEIGHT, WIDTH, 3), np.uint8))


def test_limits_apply_to_decoding_too(clip: ClipFolder) -> None:
    """SAFE-1."""
    with pytest.raises(DecodeError):
        decode_into(clip("h264_open_gop.mp4"), 0, np.zeros((1, 8, 8, 3), np.uint8), limits=Limits(max_pixels=100))


def test_thousands_of_calls_leak_no_memory(clip: ClipFolder) -> None:
    """Containers, decoders and graphs are freed after each call, also after a failed one."""
    if not sys.platform.startswith("linux"):
        pytest.skip("needs /proc/self/statm to see resident memory")
    data = clip("h264_open_gop.mp4").read_bytes()
    out = np.zeros((4, 24, 32, 3), np.uint8)

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def calls(count: int) -> None:
        for number in range(count):
            decode_into(data, number % 36, out)
            with pytest.raises(DecodeError):
                decode_into(data[: len(data) // 2 + number], 0, out)

    calls(150)
    before = resident_bytes()
    calls(600)
    assert resident_bytes() - before < 12 << 20


def test_importing_the_room_loads_neither_pyav_nor_torch() -> None:
    code = "import sys, streamvid.video; print({'av', 'torch'} & set(sys.modules))"
    done = run_python(code)
    assert done.stdout.strip() == "set()"


def gradient_in(name: str, color_range: int, luma: NDArray[Any], colors: NDArray[Any]) -> bytes:
    """Make a lossless video with the same luma and one color per frame."""
    file, (height, width), dtype = io.BytesIO(), luma.shape, np.dtype("uint16" if "le" in name else "uint8")
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=25)
        stream.width, stream.height, stream.pix_fmt = width, height, name
        stream.codec_context.color_range, stream.codec_context.colorspace = color_range, 1
        for color in colors:
            frame = av.VideoFrame(width, height, name)
            for plane, value in zip(frame.planes, (luma, *color), strict=True):
                stored = np.zeros((plane.height, plane.line_size // dtype.itemsize), dtype)
                stored[:, : plane.width] = value
                plane.update(stored.tobytes())
            frame.color_range, frame.colorspace = color_range, 1
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize("color_range", [1, 2], ids=["limited", "full"])
@pytest.mark.parametrize("bits", [8, 10, 12])
@pytest.mark.parametrize("shape", ["420", "444"])
def test_the_exact_conversion_has_no_bias(shape: str, bits: int, color_range: int) -> None:
    """SAMPLE-2: compared with BT.709 in floating point (ITU-T H.273, 8.3), for a luma gradient in 16 colors."""
    height, width, most = 64, 96, 1 << bits
    step = most // 256
    low, span, chroma_span = (0, most - 1, most - 1) if color_range == 2 else (16 * step, 219 * step, 224 * step)
    luma = np.linspace(low + 0.3 * span, low + 0.7 * span, height * width).round().reshape(height, width)
    colors = np.random.default_rng(bits).integers(0.4 * most, 0.6 * most, (16, 2))
    data = gradient_in(f"yuv{shape}p" + (f"{bits}le" if bits > 8 else ""), color_range, luma, colors)
    out = np.zeros((len(colors), height, width, 3), np.uint8)
    decode_into(data, 0, out)
    errors = []
    for pixels, color in zip(out, colors, strict=True):
        y, (u, v) = (luma - low) / span, (color - most / 2) / chroma_span
        red, blue = y + 1.5748 * v, y + 1.8556 * u
        errors.append(pixels - np.stack([red, (y - 0.2126 * red - 0.0722 * blue) / 0.7152, blue], -1) * 255)
    error = np.stack(errors)
    assert abs(error.mean()) < 0.1
    assert psnr((error**2).mean()) > 58
