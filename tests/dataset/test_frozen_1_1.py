"""A dataset of format 1.1, sealed once: it loads for ever, and means the same (tests/data/README.md).

What 1.1 shares with 1.0, order and windows among it, is in test_frozen.py.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import streamvid
from streamvid.dataset.manifest import content_fingerprint, manifest_to_json, plan_fingerprint

DATA = Path(__file__).resolve().parent.parent / "data"
ROOT = DATA / "dataset_v1_1"
EXPECTED: dict[str, Any] = json.loads((DATA / "dataset_v1_1_expected.json").read_text())


@pytest.fixture(scope="module")
def dataset() -> streamvid.Dataset:
    return streamvid.open_dataset(ROOT)


def test_manifest_and_its_checksum_are_written_as_they_were(dataset: streamvid.Dataset) -> None:
    manifest, data = dataset.manifest, (ROOT / "manifest.json").read_bytes()
    assert manifest.format_version == (1, 1)
    assert json.loads(data)["manifest_sha256"] == EXPECTED["manifest_sha256"]
    assert manifest_to_json(manifest) == data
    assert dict(manifest.counts) == EXPECTED["counts"]


def test_fingerprints_are_computed_as_they_were(dataset: streamvid.Dataset) -> None:
    manifest = dataset.manifest
    plan, content = EXPECTED["plan_fingerprint"], EXPECTED["content_fingerprint"]
    assert manifest.plan_fingerprint == plan == plan_fingerprint(manifest.buckets, dataset.shards)
    assert manifest.content_fingerprint == content == content_fingerprint(dataset.shards, manifest.sample_files)


def test_rows(dataset: streamvid.Dataset) -> None:
    rows = dataset.samples_table().to_pylist()
    found = [{name: value.hex() if isinstance(value, bytes) else value for name, value in row.items()} for row in rows]
    assert found == EXPECTED["samples"]
    by_shard = [row for shard in dataset.shards for row in dataset.samples(shard).to_pylist()]
    assert by_shard == rows
    assert [[r["row"], r["source"]] for r in dataset.rejections_table().to_pylist()] == EXPECTED["rejections"]


def test_tars_and_what_is_delivered_of_them(dataset: streamvid.Dataset) -> None:
    assert {s.path: [s.split, s.num_samples, s.sha256] for s in dataset.shards} == EXPECTED["shards"]
    for shard in dataset.shards:
        assert hashlib.sha256((ROOT / shard.path).read_bytes()).hexdigest() == shard.sha256
    with streamvid.VideoLoader(ROOT, batch_size=1, num_workers=0) as loader:
        keys = [batch.sample_keys[0] for batch in loader]
    assert sorted(keys) == sorted(row["key"] for row in EXPECTED["samples"])
