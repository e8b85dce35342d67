"""Tests of common video decoding traps, from the container and from packets, compared with the ffmpeg program.

Other tests cover the following traps with the recipes of clips.py. `windows` means test_decode.py's
test_windows_are_the_frames_of_a_full_decode, `packets` means test_stored.py's
test_packets_give_the_same_bytes_as_the_container.

| trap | tests |
|---|---|
| rotation and mirrors | windows and packets; test_turned_and_mirrored_clips_are_oriented_as_in_ffmpeg |
| edit lists | windows and packets of edit_list.mp4; windows of edit_list_mpeg4.mp4 |
| variable frame rate | windows and packets of variable_rate.* |
| imprecise seeks in MPEG-TS | windows of h264.ts; test_a_video_with_unreliable_seeks_is_decoded_correctly |
| AVI with B-frames | windows of mpeg4_b_frames.avi; test_b_frames_in_avi_come_in_display_order |
| packets that do not decode | test_packets_that_do_not_decode_never_shift_frames; tests of damage in test_decode.py |
| decoder bomb in a small file | test_a_decoder_bomb_is_refused_without_using_much_memory |
| interlaced video | windows and packets of h264_interlaced.mp4 |
| HDR; files with only cover art | test_hdr_is_refused; test_cover_art_is_not_a_video |
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from streamvid.errors import DecodeError, ProbeError
from streamvid.video.clip_index import ClipIndex, index_clip
from streamvid.video.decode.file import decode_into, decode_pictures
from streamvid.video.decode.stored import StoredDecoder
from streamvid.video.limits import Limits
from streamvid.video.picture import PictureFormat
from streamvid.video.probe import probe
from streamvid.video.transform import Transform
from tests.clips import real_clip
from tests.video.clips import ClipFolder, decode_with_ffmpeg, mean_square_errors, psnr, run_ffmpeg

HEIGHT, WIDTH = 72, 96
HDR = Limits(allow_hdr=True)
X265 = "-x265-params log-level=none:keyint=16:bframes=3"


def make(path: Path, options: str, video_filter: str = "scale=160:90,setsar=1", num_frames: int = 30) -> Path:
    """Make a clip of real frames with these ffmpeg options."""
    length = ("-frames:v", num_frames)
    run_ffmpeg("-i", real_clip("bikes"), "-an", "-vf", video_filter, *length, *options.split(), path)
    return path


def by_packets(data: bytes, index: ClipIndex, start: int, num_frames: int) -> np.ndarray:
    """Decode frames from packets, in the layout of `decode_into`."""
    window, picture = index.window(start, num_frames), PictureFormat(HEIGHT, WIDTH)
    part = memoryview(data[window.first_byte : window.first_byte + window.num_bytes])
    out = np.zeros((num_frames, HEIGHT, WIDTH, 3), np.uint8)
    StoredDecoder().decode(
        index.info,
        window.packets,
        part,
        window.key_time,
        out.reshape(num_frames, -1),
        picture,
        numbers=range(start, start + num_frames),
    )
    return out


def check_both_ways(path: Path, *, has_packets: bool = True, limits: Limits = HDR) -> np.ndarray:
    """Check windows at both ends and in the middle against ffmpeg's frames; return all frames of the clip."""
    data, info = path.read_bytes(), probe(path, limits)
    reference = decode_with_ffmpeg(path, Transform.cover(info, HEIGHT, WIDTH).ffmpeg_filter, HEIGHT, WIDTH)
    assert info.num_frames == len(reference)
    index = index_clip(data, limits)
    assert (index is not None) is has_packets
    whole = np.zeros((info.num_frames, HEIGHT, WIDTH, 3), np.uint8)
    decode_into(data, 0, whole, num_frames=info.num_frames, limits=limits)
    for number, frame in enumerate(whole):
        errors = mean_square_errors(reference, frame)
        assert psnr(errors[number]) >= 45, f"frame {number}: {psnr(errors[number])}"
        assert errors[number] == errors.min(), f"frame {number} looks like {errors.argmin()}"
    for start in sorted({0, 1, info.num_frames // 2, info.num_frames - 5}):
        out = np.zeros((5, HEIGHT, WIDTH, 3), np.uint8)
        decode_into(data, start, out, limits=limits)
        assert np.array_equal(out, whole[start : start + 5])
        if index is not None:
            assert np.array_equal(by_packets(data, index, start, 5), out)
    return whole


@pytest.mark.parametrize("codec", ["libx264", f"libx265 {X265}", "libvpx-vp9 -cpu-used 8 -deadline realtime"])
@pytest.mark.parametrize("transfer", ["smpte2084", "arib-std-b67"])
def test_hdr_is_refused_unless_it_is_allowed(tmp_path: Path, transfer: str, codec: str) -> None:
    """SAMPLE-2: every function refuses PQ and HLG; if allowed, the frames equal ffmpeg's, including the matrix."""
    tags = f"-color_primaries bt2020 -color_trc {transfer} -colorspace bt2020nc"
    path = make(
        tmp_path / "hdr.mkv",
        f"-c:v {codec} -pix_fmt yuv420p10le {tags}",
        f"scale=160:90:out_color_matrix=bt2020,setsar=1,setparams=colorspace=bt2020nc:color_trc={transfer}",
    )
    data = path.read_bytes()
    for refused in (lambda: probe(data), lambda: index_clip(data)):
        with pytest.raises(ProbeError, match=r"is HDR .*--hdr allow"):
            refused()
    with pytest.raises(DecodeError, match="is HDR"):
        decode_into(data, 0, np.zeros((1, HEIGHT, WIDTH, 3), np.uint8))
    assert probe(data, HDR).color_space == "bt2020"
    check_both_ways(path)


DEEP = {
    "hevc_422_10bit.mkv": f"-c:v libx265 -pix_fmt yuv422p10le {X265}",
    "hevc_444_12bit.mp4": f"-c:v libx265 -pix_fmt yuv444p12le {X265}",
    "vp9_10bit.webm": "-c:v libvpx-vp9 -pix_fmt yuv420p10le -cpu-used 8 -deadline realtime -g 12",
    "av1_10bit.mkv": "-c:v libaom-av1 -pix_fmt yuv420p10le -cpu-used 8 -usage realtime -g 12",
    "ffv1_16bit.mkv": "-c:v ffv1 -level 3 -pix_fmt yuv444p16le",
    "h264_full_range.mp4": "-c:v libx264 -pix_fmt yuvj420p -bf 2 -g 12",
}


@pytest.mark.parametrize("name", DEEP)
def test_deep_and_full_range_pixels_equal_ffmpegs(tmp_path: Path, name: str) -> None:
    """SAMPLE-2: 10 to 16 bits, 4:2:2 and 4:4:4, full range."""
    check_both_ways(make(tmp_path / name, DEEP[name]))


@pytest.mark.parametrize(
    ("name", "options", "has_packets"),
    [
        ("ffv1.mkv", "-c:v ffv1 -level 3 -pix_fmt yuva420p", True),
        ("rgba.mkv", "-c:v ffv1 -level 3 -pix_fmt bgra", True),
        ("prores.mov", "-c:v prores_ks -pix_fmt yuva444p10le", False),
        ("vp9.webm", "-c:v libvpx-vp9 -pix_fmt yuva420p -cpu-used 8 -deadline realtime -auto-alt-ref 0", True),
    ],
)
def test_alpha_is_dropped_without_blending(tmp_path: Path, name: str, options: str, has_packets: bool) -> None:
    """SAMPLE-2: transparent pixels keep their stored colors."""
    see_through = "scale=160:90,setsar=1,format=yuva444p,geq=lum='lum(X,Y)':cb='cb(X,Y)':cr='cr(X,Y)':a='X'"
    check_both_ways(make(tmp_path / name, options, see_through, 12), has_packets=has_packets)


def test_all_traps_at_once(tmp_path: Path) -> None:
    """SAMPLE-2: ten bits, wide pixels, a variable rate, an edit list, a quarter turn and a mirror in one file."""
    straight = make(
        tmp_path / "straight.mp4",
        "-fps_mode passthrough -c:v libx264 -pix_fmt yuv420p10le -bf 3 -g 10",
        "scale=160:90,setsar=4/3,select='not(mod(n,3)*mod(n,5)*lt(random(1),0.6))'",
    )
    path = tmp_path / "all.mp4"
    run_ffmpeg("-ss", "0.5", "-display_rotation", "90", "-display_hflip", "-i", straight, "-c", "copy", path)
    info = probe(path)
    assert info.rotation in (90, 270) and info.flip and info.sample_aspect_ratio == (4, 3)
    assert info.num_frames < probe(straight).num_frames
    check_both_ways(path)


def test_properties_declared_only_by_the_stream_are_respected(tmp_path: Path) -> None:
    """SAMPLE-2: pixel shape, matrix and range come from H.264's own header if the container does not declare them."""
    silent, path = make(tmp_path / "silent.mkv", "-c:v libx264 -bf 2", "scale=160:90,setsar=0"), tmp_path / "own.mkv"
    says = "h264_metadata=sample_aspect_ratio=3/2:matrix_coefficients=1:video_full_range_flag=1"
    run_ffmpeg("-i", silent, "-c", "copy", "-bsf:v", says, path)
    info = probe(path)
    assert (info.color_space, info.color_range, info.sample_aspect_ratio) == ("bt709", "full", (3, 2))
    check_both_ways(path)


@pytest.mark.parametrize("codec", ["libx264 -qp 1", "libx265 -x265-params log-level=none:lossless=1", "ffv1 -level 3"])
@pytest.mark.parametrize(("size", "matrix"), [("1280x720", "bt709"), ("720x1280", "bt709"), ("64x64", "bt601")])
def test_untagged_colors_are_guessed_by_size_both_ways(tmp_path: Path, size: str, matrix: str, codec: str) -> None:
    """SAMPLE-2: other readers treat untagged HD as BT.601, which gives wrong colors."""
    path, color = tmp_path / "color.mkv", (200, 50, 20)
    run_ffmpeg(
        *("-f", "lavfi", "-i", f"color=c=0xc83214:s={size}:d=0.2:r=10,format=gbrp"),
        *(
            "-vf",
            f"scale=out_color_matrix={matrix}:out_range=tv,format=yuv444p,setparams=colorspace=unknown:range=unknown",
        ),
        *("-c:v", *codec.split(), path),
    )
    data, info = path.read_bytes(), probe(path)
    index = index_clip(data)
    assert info.is_color_guessed and info.color_space == matrix and index is not None
    out = np.zeros((1, HEIGHT, WIDTH, 3), np.uint8)
    decode_into(data, 1, out)
    assert np.abs(out[0, 16, 16].astype(int) - color).max() <= 4
    assert np.array_equal(by_packets(data, index, 1, 1), out)


def with_cover(clip: ClipFolder, path: Path, place: str, image: str) -> Path:
    """Add a picture to the clip, as a stream before or after the video, or as an attachment."""
    video, cover = ("-i", clip("h264_open_gop.mp4")), ("-i", clip(image))
    if place == "attached":
        kind = {"image.png": "image/png", "image.jpg": "image/jpeg"}[image]
        run_ffmpeg(*video, "-c", "copy", "-attach", clip(image), "-metadata:s:t", f"mimetype={kind}", path)
        return path
    number = 0 if place == "before" else 1
    inputs = (*cover, *video) if place == "before" else (*video, *cover)
    run_ffmpeg(*inputs, "-map", 0, "-map", 1, "-c", "copy", f"-disposition:v:{number}", "attached_pic", path)
    return path


@pytest.mark.parametrize("image", ["image.png", "image.jpg"])
@pytest.mark.parametrize(
    ("container", "place"), [("mp4", "before"), ("mp4", "after"), ("mov", "before"), ("mkv", "attached")]
)
def test_cover_art_is_not_mistaken_for_the_video(
    clip: ClipFolder, tmp_path: Path, container: str, place: str, image: str
) -> None:
    """SAMPLE-2: the frames equal those of the clip without cover art, from the container and from packets."""
    path = with_cover(clip, tmp_path / f"cover.{container}", place, image)
    data, plain = path.read_bytes(), clip("h264_open_gop.mp4").read_bytes()
    assert (probe(data).codec, probe(data).num_frames) == ("h264", 40)
    index = index_clip(data)
    assert index is not None and index.num_frames == 40
    for start in (0, 17, 35):
        out, expected = np.zeros((2, 5, HEIGHT, WIDTH, 3), np.uint8)
        decode_into(data, start, out, num_frames=40)
        decode_into(plain, start, expected)
        assert np.array_equal(out, expected)
        assert np.array_equal(by_packets(data, index, start, 5), expected)


@pytest.mark.parametrize(
    "options",
    [
        "-c:v libaom-av1 -cpu-used 8 -lag-in-frames 19 -auto-alt-ref 1 -g 32",
        "-c:v libsvtav1 -preset 10 -g 32 -svtav1-params hierarchical-levels=4",
    ],
)
def test_av1_keeps_the_frames_that_others_refer_to(tmp_path: Path, options: str) -> None:
    """SAMPLE-2: pyramids of hidden pictures, also with frame threads; skipping in AV1 lost 11 of 16 frames."""
    path = make(tmp_path / "av1.mp4", options, num_frames=48)
    whole = check_both_ways(path)
    data = path.read_bytes()
    index = index_clip(data)
    assert index is not None
    decoder, picture = StoredDecoder(), PictureFormat(HEIGHT, WIDTH)
    for start in range(0, 44, 4):
        window = index.window(start, 4)
        part = memoryview(data[window.first_byte : window.first_byte + window.num_bytes])
        out = np.zeros((4, picture.num_bytes), np.uint8)
        threads = 1 + start // 4 % 3
        decoder.decode(index.info, window.packets, part, window.key_time, out, picture, num_threads=threads)
        assert np.array_equal(out, whole[start : start + 4].reshape(4, -1))


def test_yuv_pictures_of_deep_and_rgb_sources_keep_their_colors(tmp_path: Path) -> None:
    """SAMPLE-2: yuv420p pictures of 10-bit and RGB sources, converted to RGB by ffmpeg, equal the RGB pictures."""
    for name, options in (("deep.mkv", DEEP["hevc_422_10bit.mkv"]), ("rgb.mkv", "-c:v libx264rgb -qp 4")):
        data = make(tmp_path / name, options, num_frames=6).read_bytes()
        planes, rgb = np.zeros((2, HEIGHT * WIDTH * 3 // 2), np.uint8), np.zeros((2, HEIGHT, WIDTH, 3), np.uint8)
        color = decode_pictures(data, 2, planes, PictureFormat(HEIGHT, WIDTH, pixels="yuv420p"))
        decode_into(data, 2, rgb)
        raw, back = tmp_path / "planes.yuv", tmp_path / "back.rgb"
        raw.write_bytes(planes.tobytes())
        scale = f"scale=in_color_matrix={color.matrix}:in_range={color.color_range}:flags=accurate_rnd+full_chroma_int"
        size = ("-f", "rawvideo", "-pix_fmt", "yuv420p", "-s", f"{WIDTH}x{HEIGHT}")
        run_ffmpeg(*size, "-i", raw, "-vf", scale, "-f", "rawvideo", "-pix_fmt", "rgb24", back)
        found = np.frombuffer(back.read_bytes(), np.uint8).reshape(rgb.shape)
        assert psnr(float(((found.astype(float) - rgb) ** 2).mean())) > 32
        assert np.abs(found.astype(float).mean((0, 1, 2)) - rgb.mean((0, 1, 2))).max() < 1


@pytest.mark.parametrize("matrix", ["bt709", "bt2020nc"])
def test_properties_declared_only_by_the_container_are_respected(tmp_path: Path, matrix: str) -> None:
    """SAMPLE-2: FFV1 itself cannot declare colors, but Matroska can."""
    tags = f"setparams=colorspace={matrix}"
    path = make(tmp_path / "tagged.mkv", "-c:v ffv1 -level 3 -pix_fmt yuv420p", f"scale=160:90,setsar=1,{tags}", 12)
    assert probe(path).color_space == matrix.removesuffix("nc")
    check_both_ways(path)
