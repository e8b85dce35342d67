"""Tests of encode_clip: a native clip has the source's frames, times and colors, which are verified."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamvid.errors import ConfigError, DecodeError, ProbeError
from streamvid.video.decode.file import decode_into
from streamvid.video.encode.clip import encode_clip
from streamvid.video.encode.made import MadeClip
from streamvid.video.encode.profiles import PROFILES, Encoding
from streamvid.video.encode.timeline import make_timeline
from streamvid.video.probe import probe
from tests.clips import real_clip
from tests.processes import run_python
from tests.video.clips import IMAGE_NAMES, VIDEO_NAMES, ClipFolder, mean_square_errors, psnr, run_ffmpeg

HEIGHT, WIDTH = 96, 128
H264 = Encoding()
LOSSLESS = Encoding("ffv1")


def native(source: Any, encoding: Encoding = H264, **options: Any) -> MadeClip:
    return encode_clip(source, height=HEIGHT, width=WIDTH, encoding=encoding, **options)


def rgb(source: Any, count: int, start: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    out = np.zeros((count, HEIGHT, WIDTH, 3), np.uint8)
    decode_into(source, start, out)
    return out


def plain_frames(data: bytes) -> list[av.VideoFrame]:
    """Decode all frames with plain PyAV, as any other reader would."""
    with av.open(io.BytesIO(data)) as container:
        return list(container.decode(video=0))


def seconds(path_or_bytes: Any) -> list[Fraction]:
    info = probe(path_or_bytes)
    return [(time - info.timestamps[0]) * info.time_base for time in info.timestamps]


@pytest.mark.parametrize("name", VIDEO_NAMES)
def test_frame_i_is_frame_i_of_the_source_at_the_same_time(clip: ClipFolder, name: str) -> None:
    """SAMPLE-2: covers rotations, odd sizes, pixel shapes, 10 bit, alpha, interlaced video and variable rates."""
    path = clip(name)
    info, made = probe(path), native(path)
    found = probe(made.data)
    assert (found.width, found.height, found.rotation, found.flip) == (WIDTH, HEIGHT, 0, False)
    assert (found.codec, found.pixel_format.replace("j", ""), found.container) == ("h264", "yuv420p", "mov")
    assert found.keyframes == tuple(range(0, info.num_frames, 16))
    assert (made.num_frames, made.extension, made.num_bytes) == (
        info.num_frames,
        "mp4",
        found.num_frames and len(made.data),
    )
    assert seconds(made.data) == seconds(path)
    assert made.fps == pytest.approx(found.fps)
    assert made.duration_seconds == pytest.approx(found.duration_seconds, abs=1e-6)
    direct, stored = rgb(path, info.num_frames), rgb(made.data, info.num_frames)
    for number, frame in enumerate(stored):
        errors = mean_square_errors(direct, frame)
        assert psnr(errors[number]) >= 35, f"frame {number}"
        assert errors[number] == errors.min(), f"frame {number} looks like {errors.argmin()}"
    assert made.psnr_y >= 42


@pytest.mark.parametrize("codec", PROFILES)
@pytest.mark.parametrize("name", ["variable_rate.mkv", "h264_10bit.mp4", "turn_90_mirror.mp4", "rgb.mkv"])
def test_every_profile_keeps_frames_times_and_key_frames(clip: ClipFolder, codec: str, name: str) -> None:
    """SAMPLE-2: the profiles differ only in bytes and quality."""
    path = clip(name)
    made = native(path, Encoding(codec))
    found = probe(made.data)
    assert (made.codec, found.codec) == (codec, codec)
    assert seconds(made.data) == seconds(path)
    assert found.keyframes == tuple(range(0, found.num_frames, made_gop(codec)))
    assert len(plain_frames(made.data)) == made.num_frames == len(seconds(path))
    errors = [mean_square_errors(rgb(path, 40), frame).argmin() for frame in rgb(made.data, 40)]
    assert errors == list(range(40))
    assert made.psnr_y == 100.0 if codec == "ffv1" else 40 <= made.psnr_y < 60


def made_gop(codec: str) -> int:
    return 16 if codec in ("h264", "av1") else 1


def test_psnr_can_be_reproduced(clip: ClipFolder) -> None:
    """The manifest's PSNR equals a measurement with plain PyAV: luma, against the pictures of the lossless profile."""
    path = clip("h264_open_gop.mp4")
    for codec in ("h264", "av1"):
        made = native(path, Encoding(codec))
        pairs = zip(plain_frames(made.data), plain_frames(native(path, LOSSLESS).data), strict=True)
        error = np.mean(
            [
                np.square(one.to_ndarray()[:HEIGHT].astype(float) - other.to_ndarray()[:HEIGHT]).mean()
                for one, other in pairs
            ]
        )
        assert made.psnr_y == pytest.approx(psnr(float(error)), abs=1e-6)


def test_crf_and_gop_take_effect(clip: ClipFolder) -> None:
    path = clip("h264_open_gop.mp4")
    for codec, low, high in (("h264", 14, 30), ("av1", 15, 45), ("mjpeg", 2, 12)):
        good, small = native(path, Encoding(codec, crf=low)), native(path, Encoding(codec, crf=high))
        assert good.psnr_y > small.psnr_y + 3 and good.num_bytes > small.num_bytes
    assert probe(native(path, Encoding(gop=7)).data).keyframes == (0, 7, 14, 21, 28, 35)
    assert probe(native(path, Encoding(gop=1)).data).num_keyframes == 40


@pytest.mark.parametrize("codec", ["h264", "av1"])
def test_gops_are_independent(clip: ClipFolder, codec: str) -> None:
    """GOPs are closed: each one, decoded alone by a new decoder, gives the same pictures as the whole clip."""
    data = native(clip("h264_one_gop.mp4"), Encoding(codec, gop=8)).data
    whole = [frame.to_ndarray() for frame in plain_frames(data)]
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        packets = [packet for packet in container.demux(stream) if packet.size]
        for first in range(0, len(packets), 8):
            decoder: Any = av.CodecContext.create("libdav1d" if codec == "av1" else codec, "r")
            decoder.extradata = stream.codec_context.extradata
            group = [av.Packet(bytes(packet)) for packet in packets[first : first + 8]]
            frames = [frame for packet in [*group, None] for frame in decoder.decode(packet)]
            assert len(frames) == len(group)
            assert all(np.array_equal(frame.to_ndarray(), whole[first + i]) for i, frame in enumerate(frames))


def test_h264_is_optimized_for_decoding(clip: ClipFolder) -> None:
    """CAVLC, no B-frames, no SEI units; the header depends only on size and color, not on timing."""
    headers = set()
    for name in ("h264_one_gop.mp4", "variable_rate.mp4", "mpeg4.avi"):
        with av.open(io.BytesIO(native(clip(name)).data)) as container:
            stream = container.streams.video[0]
            headers.add(bytes(stream.codec_context.extradata or b""))
            for packet in container.demux(stream):
                assert packet.pts == packet.dts
                assert not packet.size or bytes(packet)[4] & 31 in (1, 5)
            assert stream.codec_context.has_b_frames == 0
    assert len(headers) == 1
    header = headers.pop()
    num_sequence_bytes = int.from_bytes(header[6:8], "big")
    picture_set = header[8 + num_sequence_bytes + 3 :]
    assert picture_set[0] & 31 == 8
    assert picture_set[1] >> 5 == 0b110, "two identifiers of one bit, then entropy_coding_mode_flag 0: CAVLC"


@pytest.mark.parametrize("codec", PROFILES)
def test_bytes_are_the_same_in_every_process(clip: ClipFolder, codec: str) -> None:
    """SHARD-1: the bytes do not depend on the clock, the muxer's version or the number of cores."""
    path = clip("variable_rate.mp4")
    code = (
        "import hashlib, sys; from streamvid.video.encode.clip import encode_clip; from streamvid.video.encode.profiles import Encoding;"
        f"clip = encode_clip(sys.argv[1], height={HEIGHT}, width={WIDTH}, encoding=Encoding({codec!r}));"
        "print(hashlib.sha256(clip.data).hexdigest())"
    )
    done = run_python(code, path)
    data = native(path, Encoding(codec)).data
    assert done.stdout.strip() == hashlib.sha256(data).hexdigest()
    assert done.stderr == ""
    assert b"Lavf" not in data and b"Lavc" not in data and b"x264" not in data


@pytest.mark.parametrize("color_range", ["tv", "pc"])
@pytest.mark.parametrize(
    ("tag", "numbers"),
    [
        ("bt709", (1, 1, 1)),
        ("smpte170m", (6, 6, 6)),
        ("bt470bg", (5, 5, 6)),
        ("bt2020nc", (9, 9, 14)),
        ("fcc", (4, 4, 4)),
    ],
)
def test_colors_and_their_tags_are_preserved(
    tmp_path: Path, tag: str, numbers: tuple[int, int, int], color_range: str
) -> None:
    """SAMPLE-2: the container and the bitstream have the source's matrix and range, and the colors are right."""
    path = tmp_path / "color.mp4"
    matrix = {"bt2020nc": "bt2020", "smpte170m": "bt601", "bt470bg": "bt601"}.get(tag, tag)
    run_ffmpeg(
        *("-f", "lavfi", "-i", "color=c=0xc83214:s=64x48:d=0.2:r=10,format=gbrp", "-vf"),
        f"scale=out_color_matrix={matrix}:out_range={color_range},format=yuv420p,setparams=colorspace={tag}:range={color_range}",
        *("-c:v", "libx264", "-qp", "1", path),
    )
    for codec in ("h264", "av1", "ffv1", "mjpeg"):
        made = native(path, Encoding(codec))
        assert np.abs(rgb(made.data, 1)[0].astype(int) - (200, 50, 20)).max() <= 4, codec
        matrix_number = 5 if codec == "mjpeg" else numbers[0]
        range_number = 2 if codec == "mjpeg" or color_range == "pc" else 1
        frame = plain_frames(made.data)[0]
        tags = (frame.colorspace, frame.color_primaries, frame.color_trc, frame.color_range)
        assert tags == (matrix_number, *numbers[1:], range_number), codec
        with av.open(io.BytesIO(made.data)) as container:
            context = container.streams.video[0].codec_context
            assert (context.colorspace, context.color_range) == (matrix_number, range_number)
            if codec in ("h264", "av1"):
                decoder: Any = av.CodecContext.create("libdav1d" if codec == "av1" else codec, "r")
                decoder.extradata = context.extradata
                packet = next(container.demux(video=0))
                bare = [*decoder.decode(av.Packet(bytes(packet))), *decoder.decode(None)][0]
                assert (bare.colorspace, bare.color_primaries, bare.color_trc, bare.color_range) == tags


def test_guessed_colors_are_stored_as_tags(clip: ClipFolder) -> None:
    """An untagged clip is guessed once, from the source's size; for the small clip, the guess would be different."""
    big = real_clip("bigbuckbunny")
    assert probe(big).is_color_guessed
    found = probe(native(big, num_frames=2).data)
    assert (found.color_space, found.is_color_guessed) == ("bt709", False)
    assert probe(native(clip("rgb.mkv"), num_frames=2).data).color_space == "bt709"


@pytest.mark.parametrize("codec", ["h264", "av1", "mjpeg", "ffv1"])
def test_primaries_without_a_name_are_replaced(clip: ClipFolder, tmp_path: Path, codec: Any) -> None:
    """Probing accepts number 22 of ITU-T H.273; the clip gets the primaries of the matrix instead."""
    path = tmp_path / "ebu.mp4"
    named = "h264_metadata=colour_primaries=22:transfer_characteristics=6:matrix_coefficients=6"
    run_ffmpeg("-i", clip("h264_one_gop.mp4"), "-c", "copy", "-bsf:v", named, path)
    with av.open(str(path)) as container:
        assert next(container.decode(video=0)).color_primaries == 22
    with av.open(io.BytesIO(native(path, Encoding(codec), num_frames=3).data)) as container:
        assert container.streams.video[0].codec_context.color_primaries != 22


TURNS = {0: "", 90: ",transpose=clock", 180: ",hflip,vflip", 270: ",transpose=cclock"}


@pytest.mark.parametrize(
    "name", [name for name in VIDEO_NAMES if name.startswith(("turn_", "mirror")) and "wide" not in name]
)
def test_chroma_is_rotated_with_the_picture(clip: ClipFolder, tmp_path: Path, name: str) -> None:
    """SAMPLE-2: chroma equals that of a clip rotated by ffmpeg at 4:4:4; any other chroma position gives 58 dB."""
    path, upright = clip(name), tmp_path / "upright.avi"
    info = probe(path)
    turn = (",hflip" if info.flip else "") + TURNS[info.rotation]
    full = f"scale=in_chroma_loc=left:flags=bicubic+accurate_rnd,format=yuv444p{turn}"
    run_ffmpeg("-noautorotate", "-i", path, "-frames:v", 4, "-vf", full, "-c:v", "ffv1", upright)
    wanted, found = (
        np.stack([frame.to_ndarray()[HEIGHT:] for frame in plain_frames(native(source, LOSSLESS, num_frames=4).data)])
        for source in (upright, path)
    )
    assert psnr(float(np.square(wanted.astype(float) - found).mean())) >= 59


@given(data=st.data())
def test_a_new_rate_takes_the_frames_nearest_in_time(data: st.DataObject) -> None:
    """With `fps`, each time of the new rate gets the nearest source frame, whatever the source's timing."""
    steps = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=40))
    first = data.draw(st.integers(-1000, 1000))
    times = tuple(first + sum(steps[:i]) for i in range(len(steps)))
    fps = data.draw(st.fractions(Fraction(1, 2), 120, max_denominator=1001))
    line = make_timeline(times, Fraction(1, 1000), steps[-1], fps=fps)
    assert line.ticks == tuple(range(len(line.numbers))) and line.time_base == 1 / fps
    assert abs(line.duration_seconds - Fraction(sum(steps), 1000)) <= max(1 / (2 * fps), 1 / fps)
    for frame, number in enumerate(line.numbers):
        wanted = Fraction(frame) / fps
        distances = [abs(Fraction(time - first, 1000) - wanted) for time in times]
        assert distances[number] == min(distances)
    kept = make_timeline(times, Fraction(1, 1000), steps[-1])
    assert kept.ticks == tuple(time - first for time in times) and kept.numbers == tuple(range(len(times)))


def test_a_rate_and_a_window_are_cut_exactly(clip: ClipFolder) -> None:
    """The clip has frames `start` to `start + num_frames` with times from 0; with fps, the times are evenly spaced."""
    path = clip("variable_rate.mp4")
    all_seconds, whole = seconds(path), rgb(path, 40)
    made = native(path, start=17, num_frames=9)
    assert seconds(made.data) == [time - all_seconds[17] for time in all_seconds[17:26]]
    assert made.duration_seconds == pytest.approx(float(all_seconds[26] - all_seconds[17]))
    assert [int(mean_square_errors(whole, frame).argmin()) for frame in rgb(made.data, 9)] == list(range(17, 26))
    even = native(path, fps=10)
    assert seconds(even.data) == [Fraction(i, 10) for i in range(even.num_frames)]
    assert even.fps == pytest.approx(10)
    assert even.duration_seconds == pytest.approx(native(path).duration_seconds, abs=0.05)
    for i, frame in enumerate(rgb(even.data, even.num_frames)):
        shown = int(mean_square_errors(whole, frame).argmin())
        assert abs(all_seconds[shown] - Fraction(i, 10)) == min(abs(time - Fraction(i, 10)) for time in all_seconds)


@pytest.mark.parametrize("name", IMAGE_NAMES)
def test_an_image_stays_an_image(clip: ClipFolder, name: str) -> None:
    """SAMPLE-2: still images become full-range BT.601 JPEG without chroma subsampling, or lossless PNG."""
    path = clip(name)
    direct = rgb(path, 1)[0].astype(int)
    jpeg, png = native(path), native(path, LOSSLESS)
    assert (jpeg.extension, jpeg.codec, png.extension, png.codec) == ("jpg", "mjpeg", "png", "png")
    # The palette picture is dithered, and JPEG preserves little of this noise.
    for made, least in ((jpeg, 33 if "palette" in name else 43), (png, 45)):
        info = probe(made.data)
        assert (info.is_image, info.width, info.height, made.num_frames) == (True, WIDTH, HEIGHT, 1)
        assert psnr(float(np.square(direct - rgb(made.data, 1)[0]).mean())) >= least
    assert probe(jpeg.data).pixel_format == "yuvj444p" and png.psnr_y == 100.0 and jpeg.psnr_y >= 38
    with pytest.raises(DecodeError, match="frames 1 to 1 were requested, but the video has 1"):
        native(path, start=1, num_frames=1)


def test_damage_in_the_source_is_an_error(clip: ClipFolder, tmp_path: Path) -> None:
    """BAD-1: frames that do not decode are reported, whatever the codec's decoder reports."""
    path = clip("h264_one_gop.mp4")
    info, data = probe(path), bytearray(path.read_bytes())
    with av.open(str(path)) as container:
        packets = [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]
    at, size = packets[20]
    data[at + 6 : at + size] = bytes(255 - byte for byte in data[at + 6 : at + size])
    assert probe(bytes(data)).timestamps == info.timestamps
    with pytest.raises(DecodeError):
        native(bytes(data))
    with pytest.raises(ProbeError, match="ends early"):
        native(clip("h264_fragments.mp4").read_bytes()[:-3000])


def test_hdr_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hdr.mp4"
    run_ffmpeg(
        *("-i", real_clip("bikes"), "-frames:v", 3, "-vf", "setparams=color_trc=smpte2084:colorspace=bt2020nc"),
        *("-c:v", "libx264", path),
    )
    with pytest.raises(ProbeError, match="HDR"):
        native(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"codec": "vp9"}, "codec is 'vp9'; it must be one of h264, av1, mjpeg, ffv1"),
        ({"crf": 0}, "crf is 0; for h264, it must be a number from 1 to 51"),
        ({"codec": "av1", "crf": 20.5}, "crf is 20.5; for av1, it must be a whole number from 1 to 63"),
        ({"codec": "ffv1", "crf": 3}, "crf is 3, but ffv1 is lossless; omit crf"),
        ({"codec": "mjpeg", "gop": 4}, r"gop is 4; for mjpeg, it must be 1 \(every frame is a key frame\)"),
        ({"gop": 601}, "gop is 601; for h264, it must be a whole number from 1 to 600"),
        ({"gop": True}, "gop is True"),
        ({"crf": float("nan")}, "crf is nan"),
    ],
)
def test_invalid_encodings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Encoding(**fields)


def test_an_encoding_has_the_documented_values() -> None:
    assert asdict(Encoding()) == {"codec": "h264", "crf": 18, "gop": 16}
    assert asdict(Encoding("ffv1")) == {"codec": "ffv1", "crf": None, "gop": 1}
    for encoding in (Encoding(crf=19.5, gop=8), Encoding("av1"), Encoding("mjpeg", 5), LOSSLESS):
        assert Encoding(**asdict(encoding)) == encoding


def test_invalid_arguments_are_refused(clip: ClipFolder) -> None:
    path = clip("h264_one_gop.mp4")
    for options, error, message in (
        ({"start": -1}, ConfigError, "start is -1"),
        ({"num_frames": 0}, ConfigError, "num_frames is 0"),
        ({"fps": 0}, ConfigError, "fps is 0; it must be a number above 0"),
        ({"fps": float("inf")}, ConfigError, "fps is inf"),
        ({"start": 30, "num_frames": 11}, DecodeError, "frames 30 to 40 were requested, but the video has 40"),
    ):
        with pytest.raises(error, match=message):
            native(path, **options)
    with pytest.raises(ConfigError, match="width=129: must be an even number from 16 to 8192"):
        encode_clip(path, height=96, width=129, encoding=H264)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_clip(tmp_path: Path) -> None:
    """SAFE-1: 3,000 frames need as much memory as 100; their pictures alone would be 190 MB more."""
    path = tmp_path / "long.mp4"
    run_ffmpeg("-stream_loop", -1, "-i", real_clip("bikes"), "-frames:v", 3000, "-an", "-vf", "scale=320:180", path)
    code = (
        "import resource, sys; from streamvid.video.encode.clip import encode_clip; from streamvid.video.encode.profiles import Encoding;"
        "encode_clip(sys.argv[1], height=192, width=336, encoding=Encoding(), num_frames=int(sys.argv[2]));"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = [
        int(subprocess.run([sys.executable, "-c", code, str(path), str(count)], capture_output=True, check=True).stdout)
        for count in (100, 3000)
    ]
    assert peaks[1] - peaks[0] < 60_000, peaks
