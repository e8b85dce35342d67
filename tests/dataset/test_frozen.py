"""Tests of the frozen datasets and features of format 1: they stay readable and keep their meaning (see frozen.py)."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

import streamvid
from streamvid.dataset.features.sidecar import open_sidecar
from streamvid.dataset.manifest import Fingerprints, manifest_to_json, offsets_path
from streamvid.dataset.tar import scan_tar
from tests.dataset.frozen import (
    BATCHES_BEFORE_STATE,
    DATASETS,
    EXPECTED,
    FROZEN,
    decoded_batches,
    facts,
    features,
    loader,
    plain,
    state_after,
    stored_batches,
)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(EXPECTED.read_text())
    return value


@pytest.mark.parametrize("name", DATASETS)
def test_manifest_index_and_packets(name: str, expected: dict[str, Any]) -> None:
    """SHARD-2: the fields of the manifest, every row of the index, and every packet are unchanged."""
    assert facts(name) == expected["facts"][name]
    assert streamvid.verify_dataset(FROZEN / name, deep=True).is_right


@pytest.mark.parametrize("name", DATASETS)
def test_a_manifest_is_written_unchanged(name: str) -> None:
    dataset = streamvid.open_dataset(FROZEN / name)
    manifest = dataset.manifest
    assert manifest_to_json(manifest) == (FROZEN / name / "manifest.json").read_bytes()
    rules = (manifest.frame_rate, manifest.media)
    found = Fingerprints.of(manifest.buckets, dataset.shards, manifest.files.samples, manifest.draws, *rules)
    assert (found.plan, found.base) == (manifest.fingerprints.plan, manifest.fingerprints.base)


@pytest.mark.parametrize("name", DATASETS)
def test_tars_match_the_index(name: str) -> None:
    dataset = streamvid.open_dataset(FROZEN / name)
    for shard in dataset.shards:
        data = (FROZEN / name / shard.path).read_bytes()
        assert hashlib.sha256(data).hexdigest() == shard.sha256
        offsets = (FROZEN / name / offsets_path(shard.path)).read_bytes()
        assert hashlib.sha256(offsets).hexdigest() == shard.offsets_sha256
        with (FROZEN / name / shard.path).open("rb") as file:
            members = {(m.key, m.extension): data[m.offset : m.offset + m.num_bytes] for m in scan_tar(file)}
        for row in dataset.samples(shard).to_pylist():
            clip = data[row["clip_offset"] : row["clip_offset"] + row["clip_bytes"]]
            assert clip == members[row["key"], row["clip_extension"]]
            assert hashlib.sha256(clip).digest() == row["clip_sha256"]


def test_the_copy_covers_the_format(expected: dict[str, Any]) -> None:
    """This dataset contains everything that makes it worth freezing."""
    manifest, samples = expected["facts"]["copy"]["manifest"], expected["facts"]["copy"]["samples"]
    assert manifest["draws"] and manifest["columns"] and manifest["frame_rate"]["fps"] == "12"
    assert set(manifest["media"]) == {"control", "matte"}
    assert {row["bucket_id"].split("-")[1] for row in samples} == {"1f", "5f", "9f"}
    assert any(row["captions"] for row in samples) and any(row["user.motion"] for row in samples)
    assert {row["kind"] for row in expected["facts"]["copy"]["rejections"]} == {"not-media", "missing-file", "where"}
    assert sum(one is not None for one in expected["facts"]["native"]["packets"].values()) == 3
    assert {row["split"] for row in expected["facts"]["text"]["shards"]} == {"train", "val"}


@pytest.mark.parametrize("name", DATASETS)
def test_batches_of_three_epochs(name: str, expected: dict[str, Any]) -> None:
    """PLAN-1, SAMPLE-1, SAMPLE-2: draws, order, captions, windows, rates and stored bytes are unchanged."""
    assert plain(stored_batches(name)) == expected["batches"][name]


def test_decoded_pictures(expected: dict[str, Any]) -> None:
    """YUV-1: H.264 decodes to the same planes everywhere, and integer arithmetic converts them to RGB."""
    assert plain(decoded_batches()) == expected["decoded"]


@pytest.mark.parametrize("name", DATASETS)
def test_a_saved_state_resumes(name: str, expected: dict[str, Any]) -> None:
    """PLAN-5: the state round-trips, and the remaining batches equal those of an uninterrupted run."""
    state = expected["states"][name]
    assert plain(state_after(name, BATCHES_BEFORE_STATE)) == state
    with loader(name) as batches:
        batches.load_state_dict(state)
        remaining = [[batch.bucket.id, batch.sample_keys] for batch in batches]
    assert remaining == [batch[:2] for batch in expected["batches"][name][BATCHES_BEFORE_STATE:]]


def test_conditioning_inputs_and_later_columns() -> None:
    """Each control video has its clip's shape, a mask has one channel, and columns added later are delivered."""
    asked = {"columns": ("motion", "aesthetic"), "media": ("control", "matte")}
    with loader("copy", output={"decode": True}, num_epochs=1, **asked) as batches:
        for batch in batches:
            assert batch.media["control"].shape == batch.video.shape
            assert batch.media["matte"].shape == (1, 1, *batch.video.shape[2:])
            has_control = batch.text != ["alone"]
            assert batch.media_present["control"].tolist() == [has_control]
            later = {"a later caption": (1.5, 4.0), "alone": (3.5, 9.0)}.get(batch.text[0])
            assert later is None or (batch.motion.item(), batch.aesthetic.item()) == later


def test_features_are_unchanged(expected: dict[str, Any]) -> None:
    assert plain(features()) == expected["features"]
    open_sidecar(FROZEN / "features").check_base(streamvid.open_dataset(FROZEN / "native"))
