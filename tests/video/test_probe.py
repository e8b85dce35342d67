"""Tests of probe against a full decode and against facts known from how a clip was made."""

from __future__ import annotations

import dataclasses
import io
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps

from streamvid.errors import ProbeError
from streamvid.video.decode.file import decode_into
from streamvid.video.info import VideoInfo
from streamvid.video.probe import probe
from tests.clips import real_clip
from tests.video.clips import VIDEO_NAMES, ClipFolder, run_ffmpeg


@pytest.mark.parametrize("name", VIDEO_NAMES)
def test_timestamps_equal_those_of_a_full_decode(clip: ClipFolder, name: str) -> None:
    """SAMPLE-2: frames counted from packets equal those of a full decode, including edit lists and hidden pictures."""
    with av.open(str(clip(name)), "r") as container:
        decoded = [frame.pts for frame in container.decode(video=0)]
    info = probe(clip(name))
    assert list(info.timestamps) == decoded
    assert info.num_frames == len(decoded)


@pytest.mark.parametrize("name", VIDEO_NAMES)
def test_keyframes_are_the_decoders_key_frames(clip: ClipFolder, name: str) -> None:
    info = probe(clip(name))
    with av.open(str(clip(name)), "r") as container:
        decoded = [number for number, frame in enumerate(container.decode(video=0)) if frame.key_frame]
    if name == "h264_refresh.mp4":
        decoded = [0]  # the others are complete only some frames later
    if not name.startswith("h264_open_gop") and name not in ("edit_list.mp4",) and "turn" not in name:
        assert list(info.keyframes) == decoded
    assert info.num_keyframes == len(info.keyframes)
    assert info.max_keyframe_distance == max(b - a for a, b in pairwise([*info.keyframes, info.num_frames]))


def test_a_gif_may_contain_comments(tmp_path: Path) -> None:
    """Neither a comment before the trailer nor bytes after it make the file an animation or a truncated file."""
    comment = b"!\xfe\x05hello\0"
    for num_frames in (1, 5):
        run_ffmpeg("-i", real_clip("bikes"), "-vf", "scale=64:48", "-frames:v", num_frames, tmp_path / "plain.gif")
        plain = (tmp_path / "plain.gif").read_bytes()
        for data in (plain, plain + b"\0" * 9, plain + b"made by us", plain[:-1] + comment + b";"):
            info = probe(data)
            assert (info.num_frames, info.is_image) == (num_frames, num_frames == 1)
        for data in (plain[:-1], plain[: len(plain) // 2], plain[:-1] + comment):
            with pytest.raises(ProbeError, match=r"no trailer byte|GIF|damaged"):
                probe(data)


def test_the_facts_of_a_plain_clip(clip: ClipFolder) -> None:
    info = probe(clip("h264_open_gop.mp4"))
    assert (info.width, info.height, info.coded_width, info.coded_height) == (160, 90, 160, 90)
    assert (info.num_frames, info.fps, info.duration_seconds) == (40, 25.0, 1.6)
    assert (info.codec, info.container, info.pixel_format) == ("h264", "mov", "yuv420p")
    assert (info.color_space, info.color_range, info.is_color_guessed) == ("bt601", "limited", True)
    assert (info.rotation, info.flip, info.sample_aspect_ratio) == (0, False, (1, 1))
    assert (info.has_audio, info.is_image, info.is_interlaced) == (False, False, False)
    assert info.timestamps[:3] == (0, 512, 1024)
    assert info.keyframes[:2] == (0, 16)
    assert info.max_keyframe_distance == 16


def test_audio_and_other_streams_are_detected_and_ignored() -> None:
    info = probe(real_clip("bigbuckbunny"))
    assert (info.has_audio, info.num_frames, info.width, info.height) == (True, 132, 1280, 720)


@pytest.mark.parametrize(
    ("name", "rotation", "flip", "size"),
    [
        ("turn_90.mp4", 270, False, (90, 160)),
        ("turn_180.mp4", 180, False, (160, 90)),
        ("turn_270.mp4", 90, False, (90, 160)),
        ("turn_90.mkv", 270, False, (90, 160)),
        ("mirror.mp4", 0, True, (160, 90)),
        ("turn_90_wide_pixels.mp4", 270, False, (90, 213)),
        ("wide_pixels.mp4", 0, False, (213, 90)),
        ("tall_pixels.mkv", 0, False, (120, 90)),
    ],
)
def test_display_size_follows_rotation_and_pixel_shape(
    clip: ClipFolder, name: str, rotation: int, flip: bool, size: tuple[int, int]
) -> None:
    """SAMPLE-2: ffmpeg's -display_rotation counts counterclockwise, VideoInfo.rotation clockwise."""
    info = probe(clip(name))
    assert (info.rotation, info.flip, (info.width, info.height)) == (rotation, flip, size)


def test_variable_frame_rate_is_averaged(clip: ClipFolder) -> None:
    info = probe(clip("variable_rate.mp4"))
    assert len({b - a for a, b in pairwise(info.timestamps)}) > 1
    span = float((info.timestamps[-1] - info.timestamps[0]) * info.time_base)
    assert info.fps == pytest.approx((info.num_frames - 1) / span)
    assert info.duration_seconds > span


def test_an_image_has_one_frame_and_no_rate(clip: ClipFolder) -> None:
    info = probe(clip("image.jpg"))
    assert (info.is_image, info.num_frames, info.fps, info.duration_seconds) == (True, 1, 0.0, 0.0)
    assert (info.color_space, info.color_range) == ("bt601", "full")


@pytest.mark.parametrize(
    ("orientation", "flip", "rotation"),
    [
        *[(1, False, 0), (2, True, 0), (3, False, 180), (4, True, 180)],
        *[(5, True, 270), (6, False, 90), (7, True, 90), (8, False, 270)],
    ],
)
def test_exif_orientation_of_a_photo_is_respected(
    clip: ClipFolder, orientation: int, flip: bool, rotation: int
) -> None:
    """SAMPLE-2: all eight orientations are as in the EXIF standard."""
    entry = b"\x01\x12\0\x03\0\0\0\x01" + orientation.to_bytes(2, "big") + b"\0\0"
    tiff = b"MM\0*\0\0\0\x08" + b"\0\x01" + entry + b"\0\0\0\0"
    payload = b"Exif\0\0" + tiff
    data = clip("image.jpg").read_bytes()
    turned = data[:2] + b"\xff\xe1" + (len(payload) + 2).to_bytes(2, "big") + payload + data[2:]
    info = probe(turned)
    assert (info.rotation, info.flip) == (rotation, flip)
    assert (info.width, info.height) == ((90, 160) if rotation in (90, 270) else (160, 90))


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "tiff", "avif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_of_every_format_are_upright(kind: str, orientation: int) -> None:
    """SAMPLE-2: the picture has the orientation that PIL gives it."""
    quarters = np.repeat(
        np.repeat(np.array([[[250, 20, 20], [20, 20, 250]], [[20, 250, 20], [240, 240, 30]]]), 24, 0), 40, 1
    )
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x112] = orientation
    Image.fromarray(quarters.astype(np.uint8)).save(file, kind, exif=exif)
    wanted = np.asarray(ImageOps.exif_transpose(Image.open(file)).convert("RGB")).astype(int)
    info = probe(file.getvalue())
    out = np.zeros((1, info.height, info.width, 3), np.uint8)
    decode_into(file.getvalue(), 0, out)
    assert out[0].shape == wanted.shape
    assert np.abs(out[0] - wanted).mean() < 8


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw", "tiff_deflate", "packbits", "jpeg"])
def test_a_tiff_with_jpeg_inside_is_rejected(compression: str) -> None:
    """SAMPLE-2: FFmpeg returns a black picture without an error; other compressions are supported."""
    file = io.BytesIO()
    Image.effect_noise((64, 48), 60).convert("RGB").save(file, "tiff", compression=compression)
    if compression == "jpeg":
        with pytest.raises(ProbeError, match="TIFF is compressed with JPEG, .*; save it as JPEG or PNG"):
            probe(file.getvalue())
    else:
        assert probe(file.getvalue()).num_frames == 1


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "tiff", "avif"])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_an_icc_profile_changes_nothing(kind: str, mode: str) -> None:
    """Exported pictures and screenshots have a profile; FFmpeg attaches it to the frame, for PNG with a name."""
    mode = "RGB" if (kind, mode) == ("jpeg", "RGBA") else mode
    picture = Image.effect_noise((64, 48), 60).convert(mode)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    seen = []
    for options in ({}, {"icc_profile": profile}):
        file = io.BytesIO()
        picture.save(file, kind, **options)
        assert (profile[:40] in file.getvalue()) == bool(options) or kind == "png"  # compressed in PNG
        for _ in range(20):
            out = np.zeros((1, 48, 64, 3), np.uint8)
            decode_into(file.getvalue(), 0, out, num_frames=1)
        seen.append((probe(file.getvalue()), out.tobytes()))
    assert seen[0] == seen[1]


def test_interlaced_video_is_detected(clip: ClipFolder) -> None:
    assert probe(clip("h264_interlaced.mp4")).is_interlaced


def test_hdr_is_refused(tmp_path: Path) -> None:
    for transfer in ("smpte2084", "arib-std-b67"):
        path = tmp_path / f"{transfer}.mp4"
        params = f"colorprim=bt2020:transfer={transfer}:colormatrix=bt2020nc"
        run_ffmpeg(
            *("-f", "lavfi", "-i", "testsrc=s=64x64:d=0.2", "-c:v", "libx264", "-pix_fmt", "yuv420p10le"),
            *("-x264-params", params, path),
        )
        with pytest.raises(ProbeError, match="HDR .*; tone-map .* or accept it"):
            probe(path)


def test_a_rotation_by_other_angles_is_refused(clip: ClipFolder, tmp_path: Path) -> None:
    run_ffmpeg("-display_rotation", 45, "-i", clip("h264_open_gop.mp4"), "-c", "copy", tmp_path / "askew.mp4")
    with pytest.raises(
        ProbeError, match="rotates the picture by -?45 degrees or distorts it; only rotations by multiples of 90"
    ):
        probe(tmp_path / "askew.mp4")


def test_bytes_and_file_objects_give_the_same_info_as_paths(clip: ClipFolder) -> None:
    path = clip("vp9_odd.webm")
    info = probe(path)
    assert isinstance(info, VideoInfo)
    data = path.read_bytes()
    for source in (str(path), data, memoryview(data), io.BytesIO(data)):
        assert probe(source) == info
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.width = 1  # type: ignore[misc]


def test_reordered_pictures_under_timestamps_in_storage_order_are_refused(clip: ClipFolder) -> None:
    """SAMPLE-2: a muxer that writes decode times as presentation times scrambles the frames, as a camera app did."""
    sink = io.BytesIO()
    with av.open(str(clip("h264_one_gop.mp4"))) as source, av.open(sink, "w", format="mp4") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        first = None
        for packet in source.demux(video=0):
            if packet.dts is not None:
                first = packet.dts if first is None else first
                packet.stream = stream
                packet.pts = packet.dts = packet.dts - first
                target.mux(packet)
    with pytest.raises(ProbeError, match="their timestamps do not match.*; re-encode the file"):
        probe(sink.getvalue())
