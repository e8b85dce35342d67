"""Tests of masks: class ids and 0/255 are never mixed, for any file format and any storage."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

import streamvid
from streamvid.buckets.bucket import parse_buckets
from streamvid.errors import SourceError
from streamvid.sharder.sharder import shard
from tests.clips import frames_of
from tests.files import write_rows
from tests.media_clips import clip_of, png_of, turned
from tests.shard_options import shard_options

WIDTH, HEIGHT, NUM_FRAMES = 288, 192, 5
IDS = (0, 1, 2, 3, 7, 31, 200, 254, 255)
Values = np.ndarray[Any, np.dtype[np.uint8]]


def ids(ids: tuple[int, ...] = IDS, seed: int = 0) -> Values:
    """Return a mask of small blocks with random class ids."""
    coarse = np.random.default_rng(seed).choice(np.array(ids, np.uint8), (HEIGHT // 3, WIDTH // 3))
    return np.roll(coarse.repeat(3, 0).repeat(3, 1), (1, 2), (0, 1))


def nearest(values: Values) -> Values:
    """Return the mask at a third of its size, resized by another program."""
    return np.asarray(Image.fromarray(values).resize((WIDTH // 3, HEIGHT // 3), Image.Resampling.NEAREST))


def written(image: Image.Image, kind: str = "png", **options: Any) -> bytes:
    sink = io.BytesIO()
    image.save(sink, kind, **options)
    return sink.getvalue()


def palette(values: Values) -> bytes:
    """Encode ids as palette indices, as in DAVIS; the palette's colors have no meaning."""
    image = Image.fromarray(values, "P")
    image.putpalette(np.random.default_rng(3).integers(0, 256, 768, np.uint8).tobytes())
    return written(image)


STILLS: dict[str, tuple[Callable[[Values], bytes], tuple[int, ...]]] = {
    "gray": (lambda values: written(Image.fromarray(values)), IDS),
    "palette": (palette, IDS),
    "rgb": (lambda values: written(Image.fromarray(np.stack([values] * 3, -1))), IDS),
    "rgba": (lambda values: written(Image.fromarray(np.stack([values] * 3 + [255 - values], -1))), IDS),
    "gray-alpha": (lambda values: written(Image.fromarray(np.stack([values, 255 - values], -1), "LA")), IDS),
    "one-bit": (lambda values: written(Image.fromarray(values).convert("1", dither=Image.Dither.NONE)), (0, 255)),
    "webp": (lambda values: written(Image.fromarray(np.stack([values] * 3, -1)), "webp", lossless=True), IDS),
    "tiff": (lambda values: written(Image.fromarray(values), "tiff"), IDS),
}


def lossless(frames: list[Values], pixel_format: str = "gray", codec: str = "ffv1") -> bytes:
    sink = io.BytesIO()
    with av.open(sink, "w", format="matroska") as output:
        stream: Any = output.add_stream(codec, rate=24)
        stream.height, stream.width = frames[0].shape
        stream.pix_fmt = pixel_format
        for values in frames:
            frame = av.VideoFrame.from_ndarray(values, "gray")
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return sink.getvalue()


def delivered(folder: Path, rows: list[dict[str, str]], bucket: str, kind: str, **options: Any) -> dict[str, Values]:
    """Shard the rows and return the delivered masks, (T, H, W) by caption."""
    media = {"mask:matte": "matte"}
    report = shard(
        write_rows(folder / "metadata.jsonl", rows),
        folder / f"dataset-{kind}",
        shard_options(buckets=parse_buckets(bucket), workers=1, media=media, clips=kind),
    )
    assert report.num_samples == len(rows)
    found: dict[str, Values] = {}
    settings: dict[str, Any] = {"batch_size": 2, "num_workers": 0, "num_epochs": 1, "tail": "uneven"}
    output = {"layout": "BTHWC", **options}
    with streamvid.VideoLoader(folder / f"dataset-{kind}", media=("matte",), output=output, **settings) as loader:
        for batch in loader:
            masks = batch.media["matte"]
            assert masks.shape == (*batch.video.shape[:-1], 1)
            found |= {text: masks[i, ..., 0].numpy().copy() for i, text in enumerate(batch.text)}
    return found


@pytest.mark.parametrize(("kind", "pixels"), [("copy", "yuv420p"), ("native", "rgb24")])
def test_class_ids_of_images_are_kept(tmp_path: Path, kind: str, pixels: str) -> None:
    """SAMPLE: for every stored form of a mask, the ids of the nearest pixels are delivered."""
    rows, expected = [], {}
    for number, (name, (write, allowed)) in enumerate(STILLS.items()):
        values = ids(allowed, number)
        (tmp_path / f"{name}.mask").write_bytes(write(values))
        (tmp_path / f"{name}.png").write_bytes(png_of(frames_of("bikes", WIDTH, HEIGHT, 1)[0]))
        rows.append({"path": f"{name}.png", "caption": name, "matte": f"{name}.mask"})
        expected[name] = nearest(values)
    found = delivered(tmp_path, rows, "96x64@1", kind, pixels=pixels)
    wrong = {name: int((found[name][0] != expected[name]).sum()) for name in STILLS}
    assert not any(wrong.values()), wrong


@pytest.mark.parametrize("kind", ["copy", "native"])
def test_class_ids_of_videos_are_kept(tmp_path: Path, kind: str) -> None:
    """SAMPLE-2: ids are kept in each frame, also in a stored video that players rotate."""
    frames = [ids(seed=number) for number in range(NUM_FRAMES)]
    clip = frames_of("bikes", WIDTH, HEIGHT, NUM_FRAMES)
    (tmp_path / "clip.mp4").write_bytes(clip_of(clip))
    (tmp_path / "mask.mkv").write_bytes(lossless(frames))
    rows = [{"path": "clip.mp4", "caption": "upright", "matte": "mask.mkv"}]
    white = np.where(frames[0] > 99, 255, 0).astype(np.uint8)
    lying = turned(tmp_path, np.stack([white] * 3, -1)[None].repeat(NUM_FRAMES, 0))
    rows.append({"path": "clip2.mp4", "caption": "turned", "matte": lying.name})
    (tmp_path / "clip2.mp4").write_bytes(clip_of(clip[::-1]))
    found = delivered(tmp_path, rows, f"96x64@{NUM_FRAMES}", kind)
    assert (found["upright"] == np.stack([nearest(values) for values in frames])).all()
    assert ((found["turned"] > 127) == (nearest(frames[0]) > 99)).mean() > 0.97


def test_a_mask_with_more_than_8_bits_is_rejected(tmp_path: Path) -> None:
    """Its ids would be truncated, so the error names its bit depth."""
    (tmp_path / "deep.png").write_bytes(written(Image.fromarray(ids().astype(np.uint16) * 256)))
    (tmp_path / "clip.png").write_bytes(png_of(frames_of("bikes", WIDTH, HEIGHT, 1)[0]))
    rows = write_rows(tmp_path / "metadata.jsonl", [{"path": "clip.png", "caption": "deep", "matte": "deep.png"}])
    options = shard_options(buckets=parse_buckets("96x64@1"), workers=1, media={"mask:matte": "matte"})
    with pytest.raises(SourceError, match="the mask has 16 bits per value"):
        shard(rows, tmp_path / "dataset", options)
