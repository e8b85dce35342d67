"""Datasets and states of the past: what was sealed and saved once loads for ever, and means the same.

tests/data/README.md says how the frozen files were made. Do not make them anew to get a test to pass.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import streamvid
from streamvid.dataset.manifest import content_fingerprint, offsets_path, plan_fingerprint
from streamvid.dataset.tar import scan_tar
from tests.clips import corpus_tool

DATA = Path(__file__).resolve().parent.parent / "data"
ROOT = DATA / "dataset_v1"
EXPECTED: dict[str, Any] = json.loads((DATA / "dataset_v1_expected.json").read_text())
STATE: dict[str, Any] = json.loads((DATA / "dataset_v1_state.json").read_text())
STATE_V2: dict[str, Any] = json.loads((DATA / "dataset_v1_state_v2.json").read_text())
BATCHES_BEFORE_STATE = 5


@pytest.fixture(scope="module")
def dataset() -> streamvid.Dataset:
    return streamvid.open_dataset(ROOT)


def loader(**options: Any) -> streamvid.VideoLoader:
    return streamvid.VideoLoader(ROOT, batch_size=1, num_epochs=3, num_workers=0, **options)


def keys_of(loader: streamvid.VideoLoader) -> list[str]:
    with loader:
        return [key for batch in loader for key in batch.sample_keys]


def test_manifest(dataset: streamvid.Dataset) -> None:
    manifest = dataset.manifest
    assert manifest.format_version == (1, 0) and manifest.clips == "copy"
    assert [bucket.id for bucket in manifest.buckets] == EXPECTED["buckets"]
    assert dict(manifest.counts) == EXPECTED["counts"]
    assert manifest.build["options"]["val_fraction"] == 0.3
    for file in manifest.files:
        data = (ROOT / file.path).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file.num_bytes, file.sha256)


def test_fingerprints_are_computed_as_they_were(dataset: streamvid.Dataset) -> None:
    manifest = dataset.manifest
    assert manifest.plan_fingerprint == EXPECTED["plan_fingerprint"]
    assert plan_fingerprint(manifest.buckets, dataset.shards) == EXPECTED["plan_fingerprint"]
    assert manifest.content_fingerprint == EXPECTED["content_fingerprint"]
    assert content_fingerprint(dataset.shards, manifest.sample_files) == EXPECTED["content_fingerprint"]


def test_rows(dataset: streamvid.Dataset) -> None:
    rows = dataset.samples_table().to_pylist()
    found = [{name: value.hex() if isinstance(value, bytes) else value for name, value in row.items()} for row in rows]
    assert found == EXPECTED["samples"]
    assert dataset.user_columns == ("score", "place", "year")
    assert [[r["row"], r["source"]] for r in dataset.rejections_table().to_pylist()] == EXPECTED["rejections"]


def test_tars(dataset: streamvid.Dataset) -> None:
    """Every shard is the bytes it was, and the index finds in it the clip and caption of each sample."""
    assert {s.path: [s.split, s.num_samples, s.sha256] for s in dataset.shards} == EXPECTED["shards"]
    for shard in dataset.shards:
        data = (ROOT / shard.path).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (shard.num_bytes, shard.sha256)
        assert hashlib.sha256((ROOT / offsets_path(shard.path)).read_bytes()).hexdigest() == shard.offsets_sha256
        with (ROOT / shard.path).open("rb") as file:
            members = {(m.key, m.extension): data[m.offset : m.offset + m.num_bytes] for m in scan_tar(file)}
        for row in dataset.samples(shard).to_pylist():
            clip = data[row["clip_offset"] : row["clip_offset"] + row["clip_bytes"]]
            assert clip == members[row["key"], row["clip_extension"]]
            assert hashlib.sha256(clip).digest() == row["clip_sha256"]
            assert members[row["key"], "txt"].decode() == (row["text"] or "")


def test_order_and_windows_of_three_epochs() -> None:
    """PLAN-1 and SAMPLE-1: the same samples in the same order, and of each clip the same frames, for ever."""
    keys, first_frames = [], []
    with loader(columns=("year", "place")) as batches:
        for batch in batches:
            keys += batch.sample_keys
            numbers = [read_number(picture) for picture in batch.video[0].permute(1, 2, 3, 0).numpy()]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            first_frames.append(numbers[0])
            (row,) = (row for row in EXPECTED["samples"] if row["key"] == batch.sample_keys[0])
            assert (batch.text[0] or None, batch.place[0]) == (row["text"], row["user.place"])
    assert hashlib.sha256("\n".join(keys).encode()).hexdigest() == EXPECTED["keys_sha256"]
    assert keys == EXPECTED["keys"]
    assert first_frames == EXPECTED["first_frames"]


def read_number(picture: Any) -> int:
    number = corpus_tool().read_number(picture)
    assert number is not None
    return int(number)


def test_order_of_two_ranks() -> None:
    """PLAN-1, with repeats by tail="pad"."""
    found = [keys_of(loader(tail="pad", world=streamvid.World(rank, 2))) for rank in range(2)]
    assert found == EXPECTED["keys_of_two_padded_ranks"]


@pytest.mark.parametrize("state", [STATE, STATE_V2], ids=["version 1", "version 2"])
def test_a_saved_state_goes_on(state: dict[str, Any]) -> None:
    """PLAN-5 over versions: a checkpoint of the past goes on with the batches that would have come then."""
    resumed = loader()
    resumed.load_state_dict(state)
    assert keys_of(resumed) == EXPECTED["keys"][BATCHES_BEFORE_STATE:]


def test_a_state_is_saved_as_it_was() -> None:
    with loader() as batches:
        iterator = iter(batches)
        for _ in range(BATCHES_BEFORE_STATE):
            next(iterator)
        assert batches.state_dict() == STATE_V2
