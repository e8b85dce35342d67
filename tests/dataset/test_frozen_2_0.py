"""Datasets of format 1.3 and 2.0, sealed once: they load for ever, and mean the same (tests/data/README.md)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import streamvid
from streamvid.dataset.manifest import manifest_to_json

DATA = Path(__file__).resolve().parent.parent / "data"
VERSIONS = {"dataset_v1_3": (1, 3), "dataset_v2_0": (2, 0)}
OPTIONS: dict[str, Any] = {"batch_size": 1, "num_epochs": 4, "num_workers": 0, "seed": 3}


def expected(name: str) -> dict[str, Any]:
    return dict(json.loads((DATA / f"{name}_expected.json").read_text()))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list) else value


def facts(name: str) -> dict[str, Any]:
    """What a dataset says of itself."""
    dataset = streamvid.open_dataset(DATA / name)
    manifest = dataset.manifest
    return {
        "counts": dict(manifest.counts),
        "fingerprints": [manifest.plan_fingerprint, manifest.content_fingerprint],
        "fields": plain([manifest.frame_rate, manifest.media, manifest.draws]),
        "shards": {s.path: [s.split, s.num_samples, s.sha256] for s in dataset.shards},
        "samples": [plain(row) for row in dataset.samples_table().to_pylist()],
        "rejections": [plain(row) for row in dataset.rejections_table().to_pylist()],
    }


def received(name: str) -> list[Any]:
    """Of each batch of four epochs: bucket, key, text, rate, frames and the stored bytes that they are decoded from."""
    found = []
    with streamvid.VideoLoader(DATA / name, decode=False, **OPTIONS) as loader:
        for batch in loader:
            (clip,) = batch.clips
            numbers = None if clip.numbers is None else list(clip.numbers)
            rate = [round(value, 6) for value in batch.fps.tolist()]
            stored = sha256(clip.data.numpy().tobytes())
            found.append([batch.bucket.id, batch.sample_keys, batch.text, rate, clip.start, numbers, stored])
    return found


@pytest.mark.parametrize("name", VERSIONS)
def test_the_dataset_is_what_it_was(name: str) -> None:
    """SHARD-2: manifest, rows of the index with later columns, rejections, draws, and the bytes of every file."""
    assert facts(name) == expected(name)["facts"]
    dataset = streamvid.open_dataset(DATA / name)
    assert dataset.manifest.format_version == VERSIONS[name]
    assert manifest_to_json(dataset.manifest) == (DATA / name / "manifest.json").read_bytes()
    assert streamvid.verify_dataset(DATA / name, deep=True).is_right


@pytest.mark.parametrize("name", VERSIONS)
def test_batches_are_what_they_were(name: str) -> None:
    """PLAN-1, SAMPLE-1, SAMPLE-2: draws, order, captions, windows, rates and stored ranges of four epochs."""
    assert received(name) == expected(name)["batches"]


def test_an_old_state_goes_on() -> None:
    """PLAN-5 across the draws of the first two epochs."""
    frozen = expected("dataset_v2_0")
    with streamvid.VideoLoader(DATA / "dataset_v2_0", decode=False, **OPTIONS) as loader:
        loader.load_state_dict(frozen["state"])
        rest = [[batch.bucket.id, batch.sample_keys] for batch in loader]
    assert rest == [batch[:2] for batch in frozen["batches"][frozen["num_before_state"] :]]


def test_media_go_with_their_clip() -> None:
    """Two of three samples have a control video; columns put there later are delivered."""
    options = OPTIONS | {"num_epochs": 1, "columns": ("motion", "aesthetic"), "media": ("control",)}
    with streamvid.VideoLoader(DATA / "dataset_v1_3", **options) as loader:
        batches = [batch.clone() for batch in loader]
    assert sorted(batch.media_present["control"].tolist()[0] for batch in batches) == [False, True, True]
    assert all(batch.media["control"].shape == batch.video.shape == (1, 3, 5, 48, 64) for batch in batches)
    assert sorted(batch.aesthetic.tolist()[0] for batch in batches) == [4.0, 5.5, 6.25]
    assert sorted(value for batch in batches for value in batch.motion.tolist() if value == value) == [1.5, 3.5]
