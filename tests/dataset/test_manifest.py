"""Tests of manifest.json: round trips, the format version, and manifests that are refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamvid.buckets.bucket import Bucket
from streamvid.dataset.manifest import (
    FileInfo,
    Fingerprints,
    Manifest,
    ShardInfo,
    manifest_from_json,
    manifest_to_json,
    read_manifest,
)
from streamvid.dataset.sealed_json import MANIFEST, manifest_checksum
from streamvid.errors import DatasetError, IntegrityError, StorageError, StreamvidError
from streamvid.storage import LocalStore
from tests.dataset.samples import BUCKETS, seal, shard_info

LONE_SURROGATE = b'{"format": "streamvid", "format_version": 1, "clips": "\\ud800"}'


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return seal(tmp_path)


def changed(manifest: Manifest, **changes: Any) -> bytes:
    return resealed({**json.loads(manifest_to_json(manifest)), **changes})


def resealed(value: dict[str, Any]) -> bytes:
    """Return a manifest.json with a correct checksum, even of invalid contents."""
    return json.dumps(value | {"manifest_sha256": manifest_checksum(value)}).encode()


def test_round_trip(manifest: Manifest) -> None:
    again = manifest_from_json(manifest_to_json(manifest))
    assert again == manifest
    assert manifest_to_json(again) == manifest_to_json(manifest)


def test_a_newer_version_is_refused(manifest: Manifest) -> None:
    with pytest.raises(DatasetError, match=r"format_version 2 is newer than the supported version 1; update streamvid"):
        manifest_from_json(changed(manifest, format_version=2, from_the_future=1))


def test_an_unknown_field_is_refused(manifest: Manifest) -> None:
    with pytest.raises(DatasetError, match="field 'removed' is unknown; update streamvid"):
        manifest_from_json(changed(manifest, removed=["a-key"]))


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "other"},
        {"format_version": "1"},
        {"format_version": [1, 0]},
        {"format_version": True},
        {"format_version": 0},
        {"format_version": None},
        {"buckets": 3},
        {"buckets": [{"num_frames": 0, "height": 1, "width": 1}]},
        {"counts": {"samples": "many"}},
        {"counts": {"samples": 1}},
        {"frame_rate": {"rule": "warp", "fps": "1"}},
        {"model": {"name": "x"}},
        {"media": {"control": {"column": "c", "is_still": 1}}},
        {"draws": [{"buckets": [], "num_shards": 1}]},
        {"native": {}},
        {"files": {}},
        {"files": None},
        {"fingerprints": {}},
    ],
)
def test_damaged_fields_are_one_error(manifest: Manifest, changes: dict[str, Any]) -> None:
    with pytest.raises(DatasetError):
        manifest_from_json(changed(manifest, **changes))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"{}", LONE_SURROGATE])
def test_data_that_is_not_a_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(DatasetError):
        manifest_from_json(data)


def test_every_cut_of_a_manifest_is_refused(manifest: Manifest) -> None:
    data = manifest_to_json(manifest)
    for end in range(0, len(data) - 2, 97):
        with pytest.raises(DatasetError):
            manifest_from_json(data[:end])


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a\0", ""])
def test_listed_files_must_be_inside_the_dataset(manifest: Manifest, path: str) -> None:
    """SAFE-1."""
    files = json.loads(manifest_to_json(manifest))["files"]
    files["samples"][0]["path"] = path
    with pytest.raises(StreamvidError, match="stay inside"):
        manifest_from_json(changed(manifest, files=files))


def test_a_folder_without_a_manifest_is_not_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"no dataset at .*streamvid shard"):
        read_manifest(LocalStore(tmp_path))


def test_a_giant_manifest_is_not_read(tmp_path: Path) -> None:
    """SAFE-1."""
    with (tmp_path / MANIFEST).open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(DatasetError, match="are allowed"):
        read_manifest(LocalStore(tmp_path))


def test_manifest_holds_no_clock_host_or_path(tmp_path: Path) -> None:
    """SHARD-1."""
    assert manifest_to_json(seal(tmp_path / "a")) == manifest_to_json(seal(tmp_path / "b"))


def test_buckets_by_id(manifest: Manifest) -> None:
    assert manifest.bucket("96x64-9f") == BUCKETS[0]
    with pytest.raises(DatasetError, match=r"'1x1-1f' is not in the manifest, which lists 96x64-9f"):
        manifest.bucket("1x1-1f")


def test_plan_fingerprint_covers_everything_a_plan_depends_on() -> None:
    def info(**changes: Any) -> ShardInfo:
        return replace(shard_info(BUCKETS[0], 0, 2, b"tar", "index/x", 0), **changes)

    def plan_fingerprint(buckets: Sequence[Bucket], shards: list[ShardInfo]) -> str:
        return Fingerprints.of(buckets, shards, ()).plan

    base = plan_fingerprint(BUCKETS, [info()])
    assert plan_fingerprint(BUCKETS, [info(sha256="1" * 64, num_bytes=9)]) == base
    others = [info(num_samples=3), info(number=1), info(split="val"), info(bucket_id=BUCKETS[1].id)]
    prints = [plan_fingerprint(BUCKETS, [other]) for other in others]
    prints += [plan_fingerprint(BUCKETS, []), plan_fingerprint((Bucket(9, 64, 96),), [info()])]
    assert len({base, *prints}) == 7


def test_impossible_rows_are_refused() -> None:
    with pytest.raises(DatasetError, match="num_samples=0"):
        shard_info(BUCKETS[0], 0, 0, b"", "index/x", 0)
    with pytest.raises(StorageError, match="stay inside"):
        FileInfo("../x", 1, "0" * 64)


def test_json_formatting_does_not_matter(manifest: Manifest) -> None:
    value = json.loads(manifest_to_json(manifest))
    assert manifest_from_json(json.dumps(value, indent=7).encode()) == manifest_from_json(manifest_to_json(manifest))


def test_every_wrong_bit_of_a_manifest_is_found(manifest: Manifest) -> None:
    """Each flipped bit raises a DatasetError or, in whitespace only, leaves the manifest unchanged."""
    data = manifest_to_json(manifest)
    right, found, harmless = manifest_from_json(data), 0, 0
    for place in range(len(data)):
        for bit in range(8):
            wrong = bytearray(data)
            wrong[place] ^= 1 << bit
            try:
                again = manifest_from_json(bytes(wrong))
            except DatasetError:
                found += 1
            else:
                assert again == right and chr(data[place]).isspace()
                harmless += 1
    assert found > 50 * harmless


@pytest.mark.parametrize(
    "changes",
    [
        {"manifest_sha256": None},
        {"manifest_sha256": 3},
        {"manifest_sha256": "0" * 64},
        {"clips": "cozy"},
        {"format_version": 0},
        {"viewt": []},
    ],
)
def test_an_edited_manifest_is_found(manifest: Manifest, changes: dict[str, Any]) -> None:
    value = json.loads(manifest_to_json(manifest)) | changes
    with pytest.raises(IntegrityError, match="checksum mismatch: manifest_sha256 is .* damaged or was edited"):
        manifest_from_json(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_bytes": -1}, "num_bytes=-1"),
        ({"sha256": "0" * 63 + "g"}, "64 lowercase hex digits"),
        ({"path": "index/\n"}, "printable"),
    ],
)
def test_impossible_file_entries_are_refused(manifest: Manifest, changes: dict[str, Any], says: str) -> None:
    value = json.loads(manifest_to_json(manifest))
    value["files"]["samples"][0] |= changes
    with pytest.raises(DatasetError, match=f"^the/dataset.*{says}"):
        manifest_from_json(resealed(value), "the/dataset/manifest.json")


def test_a_deeply_nested_manifest_is_an_error() -> None:
    """SAFE-1."""
    with pytest.raises(DatasetError, match="damaged"):
        manifest_from_json(b'{"a":' * 200_000)
