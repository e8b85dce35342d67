"""A native dataset of format 1.2, sealed once: it loads for ever, and means the same (tests/data/README.md).

H.264 decodes to the same planes everywhere, and planes become RGB by integer arithmetic: both are frozen bit for bit.
What FFmpeg's scaler and its JPEG decoder make is not, so it is compared with those within a few levels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import streamvid
from streamvid.dataset.manifest import content_fingerprint, manifest_to_json, plan_fingerprint

DATA = Path(__file__).resolve().parent.parent / "data"
ROOT = DATA / "dataset_v1_2"
BATCHES_BEFORE_STATE = 5
NUM_BATCHES = 12
PACKETS = ("packets_offset", "packets_bytes", "packets_sha256")


def expected() -> dict[str, Any]:
    return dict(json.loads((DATA / "dataset_v1_2_expected.json").read_text()))


@pytest.fixture(scope="module")
def dataset() -> streamvid.Dataset:
    return streamvid.open_dataset(ROOT)


def loader(**options: Any) -> streamvid.VideoLoader:
    settings = {"batch_size": 1, "num_epochs": 3, "num_workers": 0, "pixels": "yuv420p", "layout": "BTHWC"}
    return streamvid.VideoLoader(ROOT, **settings | options)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in row.items()}


def facts(dataset: streamvid.Dataset) -> dict[str, Any]:
    """What the dataset says of itself."""
    return {
        "counts": dict(dataset.manifest.counts),
        "plan_fingerprint": dataset.manifest.plan_fingerprint,
        "content_fingerprint": dataset.manifest.content_fingerprint,
        "manifest_sha256": json.loads((ROOT / "manifest.json").read_bytes())["manifest_sha256"],
        "shards": {s.path: [s.split, s.num_samples, s.sha256] for s in dataset.shards},
        "samples": [plain(row) for row in dataset.samples_table().to_pylist()],
        "rejections": [[r["row"], r["source"]] for r in dataset.rejections_table().to_pylist()],
    }


def packets_of(dataset: streamvid.Dataset) -> dict[str, Any]:
    """Key → its packet index, None for a sample that has none."""
    found: dict[str, Any] = {}
    for shard in dataset.shards:
        rows = dataset.samples(shard).to_pylist()
        place = [rows[0][name] for name in PACKETS]
        tables = None if None in place else dataset.packets(shard, *place)
        for number, row in enumerate(rows):
            clip = None if tables is None else tables.clip(number)
            found[row["key"]] = None if clip is None else {
                "stream": json.loads(clip.info.to_json()),
                "times": clip.times.tolist(),
                "offsets": clip.offsets.tolist(),
                "sizes": clip.sizes.tolist(),
                "flags": clip.flags.tolist(),
                "pieces": [[start, end, digest.hex()] for start, end, digest in clip.window(0, clip.num_frames).pieces],
            }  # fmt: skip
    return found


def received(batches: Iterable[tuple[streamvid.Batch, streamvid.Batch]] | None = None) -> list[Any]:
    """Of each batch: key, text, and for a video checksums of its RGB and of the stored bytes that its frames need."""
    found = []
    with loader() as decoded, loader(pixels=None, layout="BCTHW", decode=False) as stored:
        for batch, other in batches or zip(decoded, stored, strict=True):
            (clip,) = other.clips
            packets = None if clip.packets is None else clip.packets.tolist()
            is_video = batch.bucket.num_frames > 1
            rgb = sha256(batch.video.numpy().tobytes()) if is_video else None
            found.append([batch.sample_keys, batch.text, clip.start, rgb, sha256(clip.data.numpy().tobytes()), packets])
    return found


def test_the_dataset_is_what_it_was(dataset: streamvid.Dataset) -> None:
    """SHARD-2: manifest, checksums, rows of the index, rejections, and the bytes of every shard."""
    frozen = expected()
    assert facts(dataset) == {name: frozen[name] for name in facts(dataset)}
    manifest = dataset.manifest
    assert (manifest.format_version, manifest.clips) == ((1, 2), "native") and manifest.packet_files
    assert manifest_to_json(manifest) == (ROOT / "manifest.json").read_bytes()
    assert manifest.plan_fingerprint == plan_fingerprint(manifest.buckets, dataset.shards)
    assert manifest.content_fingerprint == content_fingerprint(dataset.shards, manifest.sample_files)
    for shard in dataset.shards:
        assert sha256((ROOT / shard.path).read_bytes()) == shard.sha256
    for file in manifest.files:
        assert sha256((ROOT / file.path).read_bytes()) == file.sha256


def test_packets_are_what_they_were(dataset: streamvid.Dataset) -> None:
    """PACKETS: of each clip what its decoder is told, and where each packet lies."""
    found = packets_of(dataset)
    assert found == expected()["packets"]
    assert sum(clip is not None for clip in found.values()) == 3 and len(found) == 4


def test_batches_are_what_they_were() -> None:
    """PLAN-1, SAMPLE-1, SAMPLE-2, YUV-1: order, windows, pixels and stored ranges of three epochs."""
    found = received()
    assert found == expected()["batches"] and len(found) == NUM_BATCHES


def test_rgb_of_decoders_is_near_to_that_of_planes() -> None:
    """ACCURACY: fast, the default of native clips, and exact. Planes of a still have a quarter of its chroma."""
    for accuracy, of_videos in ((None, 36), ("exact", 55)):
        with loader() as planes, loader(pixels="rgb24", accuracy=accuracy) as other:
            for batch, near in zip(planes, other, strict=True):
                assert batch.sample_keys == near.sample_keys
                least = of_videos if batch.bucket.num_frames > 1 else 36
                error = ((batch.video.double() - near.video.double()) ** 2).mean()
                assert 10 * torch.log10(255**2 / error.clamp(min=1e-9)) >= least, (accuracy, batch.sample_keys)


@pytest.mark.parametrize("decode", [True, False])
def test_a_saved_state_goes_on(decode: bool) -> None:
    """PLAN-5 over versions."""
    state = json.loads((DATA / "dataset_v1_2_state.json").read_text())
    with loader() if decode else loader(pixels=None, layout="BCTHW", decode=False) as resumed:
        resumed.load_state_dict(state)
        keys = [batch.sample_keys for batch in resumed]
    assert keys == [batch[0] for batch in expected()["batches"]][BATCHES_BEFORE_STATE:]


def test_a_state_is_saved_as_it_was() -> None:
    with loader() as batches:
        iterator = iter(batches)
        for _ in range(BATCHES_BEFORE_STATE):
            next(iterator)
        assert batches.state_dict() == json.loads((DATA / "dataset_v1_2_state.json").read_text())
