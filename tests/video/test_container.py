"""Tests of hostile and broken files: they are refused with plain messages, within limits, and open no other file."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from streamvid.errors import ConfigError, DecodeError, ProbeError
from streamvid.video.decode.file import decode_into
from streamvid.video.limits import Limits
from streamvid.video.probe import probe
from tests.files import png_bytes
from tests.processes import run_python
from tests.video.clips import ClipFolder, run_ffmpeg


def test_a_file_that_is_not_media_is_refused(tmp_path: Path) -> None:
    """SAFE-1: the message is plain and contains no path, because it is stored in the dataset's rejections."""
    path = tmp_path / "text.mp4"
    path.write_text("This is no video.\n" * 100)
    with pytest.raises(
        ProbeError, match=r"not a video, image or audio file that FFmpeg can read.*also wav, flac, mp3"
    ) as caught:
        probe(path)
    assert str(tmp_path) not in str(caught.value)
    with pytest.raises(ProbeError, match="empty"):
        probe(b"")
    with pytest.raises(ProbeError, match="cannot be opened: No such file") as caught:
        probe(tmp_path / "absent.mp4")
    assert str(tmp_path) not in str(caught.value)
    with pytest.raises(DecodeError, match="empty"):
        decode_into(b"", 0, np.zeros((1, 8, 8, 3), np.uint8))


@pytest.mark.parametrize(
    "text",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{target}\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile {target}\n",
        '<?xml version="1.0"?><MPD><Period><BaseURL>{target}</BaseURL></Period></MPD>',
    ],
)
@pytest.mark.parametrize("name", ["list.m3u8", "list.mp4"])
def test_playlists_do_not_open_other_files(clip: ClipFolder, tmp_path: Path, text: str, name: str) -> None:
    """SAFE-1."""
    target = tmp_path / "target.ts"
    target.write_bytes(clip("h264.ts").read_bytes())
    playlist = tmp_path / name
    for reference in (target.name, str(target), target.as_uri()):
        playlist.write_text(text.format(target=reference))
        for source in (playlist, playlist.read_bytes()):
            with pytest.raises(ProbeError, match="which is not allowed"):
                probe(source)


@pytest.mark.parametrize("part", [0.3, 0.6, 0.9, 0.99])
@pytest.mark.parametrize("name", ["h264_open_gop.mkv", "faststart.mp4", "h264_open_gop.mp4", "mpeg4.avi"])
def test_truncated_files_are_refused(clip: ClipFolder, tmp_path: Path, name: str, part: float) -> None:
    """SAFE-1: for any cut, whether the header comes first or last."""
    if name == "faststart.mp4":
        path = tmp_path / name
        run_ffmpeg("-i", clip("h264_open_gop.mp4"), "-c", "copy", "-movflags", "+faststart", path)
    else:
        path = clip(name)
    data = path.read_bytes()
    cut = data[: int(len(data) * part)]
    with pytest.raises(ProbeError):
        probe(cut)
    with pytest.raises(DecodeError):
        decode_into(cut, 0, np.zeros((2, 16, 16, 3), np.uint8))


def test_the_error_for_a_truncated_file_says_how_much_is_missing(clip: ClipFolder, tmp_path: Path) -> None:
    path = tmp_path / "faststart.mp4"
    run_ffmpeg("-i", clip("h264_open_gop.mp4"), "-c", "copy", "-movflags", "+faststart", path)
    data = path.read_bytes()
    with pytest.raises(ProbeError, match=r"ends early: it declares 40 frames, but only \d+ are complete"):
        probe(data[: len(data) * 2 // 3])


@pytest.mark.parametrize("name", ["image.jpg", "image.png", "image.webp"])
def test_truncated_images_are_refused(clip: ClipFolder, name: str) -> None:
    data = clip(name).read_bytes()
    with pytest.raises(ProbeError):
        probe(data[: len(data) // 2])


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """PNG of 9000 x 9000 pixels, 243 MB uncompressed, in 240 kB."""
    return png_bytes(9000, 9000)


@pytest.mark.parametrize("container", ["png", "mov"])
def test_a_decoder_bomb_is_refused_without_using_much_memory(tmp_path: Path, bomb: bytes, container: str) -> None:
    """SAFE-1: a small file that decompresses to a huge frame, bare or in a MOV file whose header declares 64 x 64."""
    path = tmp_path / f"bomb.{container}"
    if container == "png":
        path.write_bytes(bomb)
    else:
        small, mov = tmp_path / "small.png", tmp_path / "small.mov"
        small.write_bytes(png_bytes(64, 64))
        run_ffmpeg("-i", small, "-c", "copy", mov)
        path.write_bytes(_with_packet(mov.read_bytes(), small.read_bytes(), bomb))
    assert "max_pixels" in _probed_within_120_mib(path)


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP"])
@pytest.mark.parametrize("container", ["png", "mov"])
def test_metadata_of_a_png_is_decompressed_only_up_to_a_limit(tmp_path: Path, kind: bytes, container: str) -> None:
    """SAFE-1: kilobytes in a chunk may decompress to gigabytes, all of which the decoder would keep."""
    small, path = tmp_path / "small.png", tmp_path / f"bomb.{container}"
    small.write_bytes(png_bytes(64, 64, (kind, 200 << 20), (kind, 200 << 20)))
    run_ffmpeg("-i", small, "-c", "copy", path) if container == "mov" else path.write_bytes(small.read_bytes())
    said = _probed_within_120_mib(path)
    assert "zTXt and iCCP chunks decompress to more than 16 MiB" in said or (kind == b"iTXt" and not said)
    fine = png_bytes(64, 64, (b"zTXt", 5 << 20), (b"zTXt", 5 << 20), (b"iCCP", 5 << 20))
    assert probe(fine).width == 64


def _probed_within_120_mib(path: Path) -> str:
    # The interpreter with PyAV needs some 200 MB of address space; a bomb would need as much again.
    code = (
        "import sys, av, resource; from streamvid.video.probe import probe; from streamvid.errors import ProbeError\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (120 << 20),) * 2)\n"
        "try: probe(sys.argv[1])\n"
        "except ProbeError as error: print(error)\n"
    )
    if not sys.platform.startswith("linux"):
        pytest.skip("needs /proc/self/statm and RLIMIT_AS to bound the child's memory")
    done = run_python(code, path)
    assert not done.stderr
    return done.stdout


def _with_packet(mov: bytes, old: bytes, new: bytes) -> bytes:
    """Replace the single packet of a MOV file: append the new one and patch the sample's size and offset."""
    at = mov.index(old)
    data = bytearray(mov + new)
    sizes, offsets = data.index(b"stsz"), data.index(b"stco")
    data[sizes + 8 : sizes + 12] = len(new).to_bytes(4, "big")
    assert int.from_bytes(data[offsets + 12 : offsets + 16], "big") == at
    data[offsets + 12 : offsets + 16] = len(mov).to_bytes(4, "big")
    return bytes(data)


def test_errors_name_the_exceeded_limit(clip: ClipFolder, tmp_path: Path) -> None:
    """SAFE-1: bytes, frames, seconds, streams, pixels, codecs and containers."""
    path = clip("h264_open_gop.mp4")
    for limits, message in [
        (Limits(max_bytes=100), "max_bytes=100"),
        (Limits(max_frames=39), "max_frames=39"),
        (Limits(max_seconds=1.0), "max_seconds=1"),
        (Limits(max_pixels=160 * 89), "max_pixels=14240"),
        (Limits(codecs=("vp9",)), "codec h264 is not allowed; allowed codecs: vp9"),
        (Limits(containers=("matroska",)), "allowed containers: matroska"),
    ]:
        with pytest.raises(ProbeError, match=message):
            probe(path, limits)
    assert probe(path, Limits(max_frames=40, max_seconds=1.6, max_pixels=192 * 96)).num_frames == 40
    many = tmp_path / "many.mkv"
    run_ffmpeg("-i", path, *["-map", "0:v"] * 70, "-c", "copy", many)
    with pytest.raises(ProbeError, match="max_streams=64"):
        probe(many)


@pytest.mark.parametrize("share", [0.4, 0.7, 0.99])
@pytest.mark.parametrize("name", ["theora.ogv", "vp9.ivf", "mpeg2.m2v"])
def test_a_file_that_is_cut_short_is_refused(clip: ClipFolder, name: str, share: float) -> None:
    """SHARD-3."""
    data = clip(name).read_bytes()
    with pytest.raises(ProbeError):
        probe(data[: int(share * len(data))])


@pytest.mark.parametrize("name", ["clip.mxf", "clip.apng", "clip.nut", "clip.h264"])
def test_a_format_that_ffmpeg_reads_but_we_do_not_allow_has_its_own_error(
    clip: ClipFolder, tmp_path: Path, name: str
) -> None:
    """SAFE-1: the message does not claim that FFmpeg cannot read the file."""
    copied = {"clip.nut": ["-c", "copy"], "clip.h264": ["-c", "copy"], "clip.apng": ["-f", "apng"]}
    run_ffmpeg(
        "-i", clip("h264_one_gop.mp4"), "-frames:v", 2, *copied.get(name, ["-c:v", "mpeg2video"]), tmp_path / name
    )
    with pytest.raises(ProbeError, match="format is not allowed; remux or re-encode it.*allowed containers: mov"):
        probe(tmp_path / name)


def test_invalid_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_frames is 0"):
        Limits(max_frames=0)
    with pytest.raises(ConfigError, match="containers"):
        Limits(containers=("mov,concat",))


def test_cover_art_is_not_a_video(clip: ClipFolder, tmp_path: Path) -> None:
    song, both = tmp_path / "song.m4a", tmp_path / "both.mp4"
    tone = ("-f", "lavfi", "-i", "sine=d=1")
    cover = ("-disposition:v:0", "attached_pic")
    run_ffmpeg(*tone, "-i", clip("image.png"), "-map", "0", "-map", "1", "-c:v", "copy", *cover, song)
    with pytest.raises(ProbeError, match="only audio and cover art, but a clip needs pictures"):
        probe(song)
    sound = tmp_path / "sound.mp4"
    run_ffmpeg(*tone, sound)
    with pytest.raises(ProbeError, match="only audio, but a clip needs pictures"):
        probe(sound)
    sources = ("-i", clip("image.png"), "-i", clip("h264_open_gop.mp4"))
    run_ffmpeg(*sources, "-map", "0", "-map", "1", "-c", "copy", *cover, both)
    assert probe(both).codec == "h264"


def test_an_animated_webp_is_refused(tmp_path: Path) -> None:
    run_ffmpeg("-f", "lavfi", "-i", "testsrc=s=64x64:d=0.5", "-c:v", "libwebp_anim", tmp_path / "a.webp")
    with pytest.raises(ProbeError, match="an animated WebP, which is not allowed"):
        probe(tmp_path / "a.webp")


def test_errors_of_the_source_are_raised_unchanged(clip: ClipFolder) -> None:
    """If the store fails during a read, its own error is raised instead of a rejection of the file."""

    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() > 4096:
                raise TimeoutError("the store is gone")
            return super().read(size)

    with pytest.raises(TimeoutError, match="the store is gone"):
        probe(Failing(clip("h264_open_gop.mkv").read_bytes()))


@pytest.mark.parametrize("bits", [(9000, 9000), (1 << 31, 1), (0, 0)])
def test_an_avif_with_a_huge_picture_uses_little_memory(tmp_path: Path, bits: tuple[int, int]) -> None:
    """SAFE-1: whatever the `ispe` box declares, also if the picture is larger than declared."""
    path, sizes = tmp_path / "bomb.avif", [(64, 64), bits] if bits[0] == 9000 else [bits]
    Image.new("RGB", (9000, 9000) if bits[0] == 9000 else (64, 64)).save(path, speed=10)
    data = path.read_bytes()
    at = data.index(b"ispe") + 8
    for width, height in sizes:
        path.write_bytes(data[:at] + width.to_bytes(4, "big") + height.to_bytes(4, "big") + data[at + 8 :])
        said = _probed_within_120_mib(path)
        # Before FFmpeg 8.1, a small picture with an impossible declared size is still read.
        assert "max_pixels" in said or "not a video, image or audio file" in said or (bits[0] != 9000 and not said)


def test_still_images_and_sequences_of_the_mp4_family_are_distinguished() -> None:
    """The brands in `ftyp` decide, whatever the codec; a still image has no rate."""
    pictures = [Image.effect_noise((64, 48), 40 + number).convert("RGB") for number in range(3)]
    still, sequence = io.BytesIO(), io.BytesIO()
    pictures[0].save(still, "AVIF")
    pictures[0].save(sequence, "AVIF", save_all=True, append_images=pictures[1:], duration=100)
    for brand in (b"avif", b"mif1", b"heic"):
        info = probe(still.getvalue().replace(b"ftypavif", b"ftyp" + brand))
        assert info.is_image and (info.num_frames, info.fps, info.duration_seconds) == (1, 0.0, 0.0)
    assert not probe(still.getvalue().replace(b"ftypavif", b"ftypmp42")).is_image
    assert not probe(sequence.getvalue()).is_image


def test_damaged_avif_files_raise_only_documented_errors() -> None:
    """SAFE-1: damage in each box, with a color profile and with undefined color matrices."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    out = io.BytesIO()
    draw = np.random.default_rng(0)
    Image.fromarray(draw.integers(0, 255, (64, 96, 3), np.uint8)).save(out, "AVIF", icc_profile=profile)
    data = out.getvalue()
    head = data.index(b"mdat") + 40
    colors = data.index(b"colr", data.index(b"colr") + 4) + 4
    places = [[colors + 8 + byte] for byte in range(4)] + [list(draw.integers(0, head, 4)) for _ in range(400)]
    for several in places:
        broken = bytearray(data)
        for at in several:
            broken[at] = draw.choice([0, 231, 255, draw.integers(256)])
        with contextlib.suppress(ProbeError, DecodeError):
            info = probe(bytes(broken))
            decode_into(bytes(broken), 0, np.zeros((1, 16, 16, 3), np.uint8), num_frames=info.num_frames)


def test_damaged_files_raise_only_documented_errors(clip: ClipFolder) -> None:
    """SAFE-1: a damaged header raises ProbeError or DecodeError, or gives a clip, but no other exception."""
    draw = np.random.default_rng(0)
    for name in ("h264_open_gop.mp4", "vp9_odd.webm", "h264.ts", "mpeg4.avi", "image.jpg", "image.png"):
        data = clip(name).read_bytes()
        for _ in range(40):
            broken = bytearray(data)
            for at in draw.integers(0, min(len(data), 4000), 8):
                broken[at] = draw.integers(256)
            try:
                info = probe(bytes(broken))
                decode_into(bytes(broken), 0, np.zeros((1, 16, 16, 3), np.uint8), num_frames=info.num_frames)
            except (ProbeError, DecodeError):
                continue
