"""Tests of containers and images: they are stored and delivered with the file's own frames, upright, images as T=1."""

from __future__ import annotations

import io
import struct
import zlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

import streamvid
from streamvid.errors import ProbeError
from streamvid.video.probe import probe
from tests.clips import encode, frames_of
from tests.sharder.test_layouts import Pixels, decoded, deliver, shard, write

CONTAINERS = {
    "mp4": ("mp4", "libx264"),
    "mov": ("mov", "libx264"),
    "avi": ("avi", "mpeg4"),
    "wmv": ("asf", "wmv2"),
    "mkv": ("matroska", "libx264"),
    "flv": ("flv", "flv"),
    "webm": ("webm", "libvpx-vp9"),
    "ivf": ("ivf", "libvpx-vp9"),
    "m2v": ("mpeg2video", "mpeg2video"),
    "vob": ("vob", "mpeg2video"),
    "asf": ("asf", "msmpeg4"),
    "f4v": ("f4v", "libx264"),
    "divx": ("avi", "mpeg4"),
    "gif": ("gif", "gif"),
}
_STORED = ("mp4", "avi", "wmv", "mkv", "flv", "webm", "ivf", "m2v", "mpg")
PICTURES = {"jpg": "mjpeg", "png": "png", "bmp": "bmp", "tif": "tiff", "webp": "libwebp", "gif": "gif", "avif": "avif"}
MARKS = {1: (0, False), 3: (2, False), 6: (3, False), 8: (1, False), 2: (0, True)}
"""EXIF orientation → (counterclockwise quarter turns, mirrored) that makes the image upright."""


def gif(frames: Pixels, ticks: list[int]) -> bytes:
    """Return an animated GIF; `ticks` are the times of its frames in hundredths of a second."""
    sink = io.BytesIO()
    with av.open(sink, "w", format="gif") as output:
        stream: Any = output.add_stream("gif", rate=100)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "rgb8"
        for picture, tick in zip(frames, ticks, strict=True):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="rgb8")
            frame.pts = tick
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return sink.getvalue()


def picture(codec: str, pixels: Pixels) -> bytes:
    """Return a still image, as FFmpeg's encoder with that name writes it."""
    if codec == "gif":
        return gif(pixels[None], [0])
    if codec == "avif":
        sink = io.BytesIO()
        Image.fromarray(pixels).save(sink, "AVIF", quality=90)
        return sink.getvalue()
    context: Any = av.CodecContext.create(codec, "w")
    context.height, context.width = pixels.shape[:2]
    context.pix_fmt = {"mjpeg": "yuvj420p", "bmp": "bgr24", "libwebp": "bgra"}.get(codec, "rgb24")
    context.time_base = Fraction(1, 25)
    frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
    packets = [*context.encode(frame.reformat(format=context.pix_fmt)), *context.encode(None)]
    return b"".join(map(bytes, packets))


def exif(orientation: int) -> bytes:
    """Return a TIFF header with one entry."""
    return b"II*\0" + struct.pack("<IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)


def marked(kind: str, data: bytes, orientation: int) -> bytes:
    """Return an image with an EXIF block, as cameras write it."""
    block = exif(orientation)
    if kind == "jpg":
        body = b"Exif\0\0" + block
        return data[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + data[2:]
    if kind == "png":
        chunk = struct.pack(">I", len(block)) + b"eXIf" + block + struct.pack(">I", zlib.crc32(b"eXIf" + block))
        return data[:33] + chunk + data[33:]
    width, height = 95, 63  # each minus one, as 24-bit numbers in VP8X
    sizes = struct.pack("<I", width)[:3] + struct.pack("<I", height)[:3]
    chunks = b"VP8X" + struct.pack("<I", 10) + bytes([0b1000, 0, 0, 0]) + sizes + data[12:]
    chunks += b"EXIF" + struct.pack("<I", len(block)) + block + b"\0" * (len(block) % 2)
    return b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WEBP" + chunks


def still(data: bytes, height: int, width: int) -> Pixels:
    return decoded(data, (1, height, width))[0]


def test_containers_and_pictures_become_one_dataset(tmp_path: Path) -> None:
    """Video containers, GIFs and images with upper-case names in one folder keep their own frames."""
    frames = frames_of("bikes", 96, 64, 9)
    files = {
        f"clip.{name.upper()}": gif(frames, [4 * n for n in range(9)])
        if name == "gif"
        else encode(frames, codec=codec, container=container, numbered=False)
        for name, (container, codec) in CONTAINERS.items()
    }
    files |= {f"still_{name}.{name.upper()}": picture(codec, frames[3]) for name, codec in PICTURES.items()}
    for number, (name, data) in enumerate(files.items()):
        write(tmp_path / str(number), {name: data, f"{name.rpartition('.')[0]}.txt": name.encode()})
    report = shard(tmp_path, tmp_path / "ds", buckets="96x64@9,96x64@1")
    assert (report["num_samples"], report["rejections"]) == (len(files), [])
    rows = streamvid.open_dataset(tmp_path / "ds").samples_table().to_pylist()
    found = {row["text"]: row["clip_extension"] for row in rows}
    assert {found[f"clip.{name.upper()}"] for name in CONTAINERS} == {*_STORED, "gif"}
    assert {found[f"still_{name}.{name.upper()}"] for name in PICTURES} == set(PICTURES)
    delivered = deliver(tmp_path / "ds")
    for name, data in files.items():
        shape = (9 if name.startswith("clip") else 1, 64, 96)
        np.testing.assert_array_equal(delivered[name], decoded(data, shape))
        # The frames match the input, except for the loss of its codec.
        original = frames if name.startswith("clip") else frames[3:4]
        loss = 40 if "gif" in name.lower() else 12
        assert np.abs(delivered[name].astype(int) - original).mean() < loss, name


@pytest.mark.parametrize("orientation", MARKS)
@pytest.mark.parametrize("kind", ["jpg", "png", "webp"])
def test_pictures_are_delivered_upright(kind: str, orientation: int) -> None:
    """EXIF orientation is applied, as in every viewer."""
    pixels = frames_of("carphone_pristine", 96, 64, 1)[0]
    plain = picture(PICTURES[kind], pixels)
    data = marked(kind, plain, orientation)
    turns, is_mirrored = MARKS[orientation]
    info = probe(data)
    assert (info.height, info.width) == ((96, 64) if turns % 2 else (64, 96)) and info.is_image
    upright = still(plain, 64, 96)
    upright = np.rot90(upright[:, ::-1] if is_mirrored else upright, turns)
    np.testing.assert_array_equal(still(data, info.height, info.width), upright)


@pytest.mark.slow
def test_a_gif_keeps_its_timestamps(tmp_path: Path) -> None:
    """Uneven delays are kept: a native clip with a fixed rate has the frames that are nearest in time."""
    frames = frames_of("bikes", 96, 64, 5)
    ticks = [0, 10, 50, 60, 70]
    data = gif(frames, ticks)
    info = probe(data)
    assert list(info.timestamps) == ticks and info.time_base == Fraction(1, 100) and not info.is_image
    write(tmp_path, {"a.gif": data, "a.txt": b"a"})
    report = shard(tmp_path, tmp_path / "ds", "--clips", "native", "--fps", "10", buckets="96x64@7")
    assert report["num_samples"] == 1
    ((_, shown),) = deliver(tmp_path / "ds", view={"temporal": "head"}).items()
    own = decoded(data, (5, 64, 96))
    nearest = [int(np.abs(own.astype(int) - picture).mean(axis=(1, 2, 3)).argmin()) for picture in shown]
    assert nearest == [0, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("share", [0.2, 0.6, 0.95])
@pytest.mark.parametrize("name", ["a.gif", "one.gif", "a.tif", "a.wmv"])
def test_truncated_files_are_refused(name: str, share: float) -> None:
    """SHARD-3: a truncated GIF, TIFF or WMV file is an error, never a shorter clip."""
    frames = frames_of("bikes", 96, 64, 9)
    whole = {
        "a.gif": lambda: gif(frames, list(range(0, 45, 5))),
        "one.gif": lambda: picture("gif", frames[0]),
        "a.tif": lambda: picture("tiff", frames[0]),
        "a.wmv": lambda: encode(frames, codec="wmv2", container="asf"),
    }[name]()
    assert probe(whole).num_frames == (9 if name in ("a.gif", "a.wmv") else 1)
    with pytest.raises(ProbeError):
        probe(whole[: int(share * len(whole))])


def test_garbage_in_gif_tiff_and_wmv_is_a_rejection_and_nothing_else() -> None:
    """SAFE-1."""
    frames = frames_of("bikes", 96, 64, 4)
    draw = np.random.default_rng(0)
    wmv = encode(frames, codec="wmv2", container="asf")
    for data in (gif(frames, [0, 5, 10, 15]), picture("tiff", frames[0]), wmv):
        for _ in range(60):
            broken = bytearray(data)
            for at in draw.integers(0, len(data), 6):
                broken[at] = draw.integers(256)
            try:
                info = probe(bytes(broken))
            except ProbeError:
                continue
            assert 1 <= info.num_frames <= 4
