"""manifest.json: round trips, versions, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamvid.buckets import Bucket
from streamvid.dataset.manifest import (
    MANIFEST,
    FileInfo,
    Manifest,
    ShardInfo,
    manifest_checksum,
    manifest_from_json,
    manifest_to_json,
    plan_fingerprint,
    read_manifest,
)
from streamvid.errors import DatasetError, IntegrityError, StorageError, StreamvidError
from streamvid.storage import LocalStore
from tests.dataset.samples import BUCKETS, seal, shard_info


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return seal(tmp_path)


def changed(manifest: Manifest, **changes: Any) -> bytes:
    return resealed({**json.loads(manifest_to_json(manifest)), **changes})


def resealed(value: dict[str, Any]) -> bytes:
    """manifest.json with a checksum that is right: what it covers may lie."""
    return json.dumps(value | {"manifest_sha256": manifest_checksum(value)}).encode()


def test_round_trip(manifest: Manifest) -> None:
    again = manifest_from_json(manifest_to_json(manifest))
    assert replace(again, unknown={}) == manifest
    assert manifest_to_json(again) == manifest_to_json(manifest)


def test_a_newer_minor_version_is_read_and_its_fields_are_kept(manifest: Manifest) -> None:
    data = changed(manifest, format_version=[1, 7], from_the_future={"x": [1]}, views=["a"])
    again = manifest_from_json(data)
    assert again.unknown["from_the_future"] == {"x": [1]}
    assert json.loads(manifest_to_json(again)) == json.loads(data)


def test_a_newer_major_version_is_refused(manifest: Manifest) -> None:
    with pytest.raises(DatasetError, match=r"format_version \[3, 0\] is newer.*update streamvid"):
        manifest_from_json(changed(manifest, format_version=[3, 0]))


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "other"},
        {"format_version": "1.0"},
        {"format_version": [1]},
        {"format_version": None},
        {"buckets": 3},
        {"buckets": [{"num_frames": 0, "height": 1, "width": 1}]},
        {"counts": {"samples": "many"}},
        {"files": {}},
        {"files": None},
        {"fingerprints": {}},
    ],
)
def test_damaged_fields_are_one_error(manifest: Manifest, changes: dict[str, Any]) -> None:
    with pytest.raises(DatasetError):
        manifest_from_json(changed(manifest, **changes))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"{}"])
def test_what_is_no_manifest(data: bytes) -> None:
    with pytest.raises(DatasetError):
        manifest_from_json(data)


def test_every_cut_of_a_manifest_is_refused(manifest: Manifest) -> None:
    data = manifest_to_json(manifest)
    for end in range(0, len(data) - 2, 97):
        with pytest.raises(DatasetError):
            manifest_from_json(data[:end])


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a\0", ""])
def test_no_named_file_is_outside(manifest: Manifest, path: str) -> None:
    """SAFE-1."""
    files = json.loads(manifest_to_json(manifest))["files"]
    files["samples"][0]["path"] = path
    with pytest.raises(StreamvidError, match="stay inside"):
        manifest_from_json(changed(manifest, files=files))


def test_a_folder_without_a_manifest_is_no_dataset(tmp_path: Path) -> None:
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
    with pytest.raises(DatasetError, match=r"'1x1-1f' is not in the manifest's table: 96x64-9f"):
        manifest.bucket("1x1-1f")


def test_plan_fingerprint_sees_what_a_plan_depends_on() -> None:
    def info(**changes: Any) -> ShardInfo:
        return replace(shard_info(BUCKETS[0], 0, 2, b"tar", "index/x", 0), **changes)

    base = plan_fingerprint(BUCKETS, [info()])
    assert plan_fingerprint(BUCKETS, [info(sha256="1" * 64, num_bytes=9)]) == base
    others = [info(num_samples=3), info(number=1), info(split="val"), info(bucket_id=BUCKETS[1].id)]
    prints = [plan_fingerprint(BUCKETS, [other]) for other in others]
    prints += [plan_fingerprint(BUCKETS, []), plan_fingerprint((Bucket(9, 64, 96),), [info()])]
    assert len({base, *prints}) == 7


def test_rows_that_cannot_be() -> None:
    with pytest.raises(DatasetError, match="num_samples=0"):
        shard_info(BUCKETS[0], 0, 0, b"", "index/x", 0)
    with pytest.raises(StorageError, match="stay inside"):
        FileInfo("../x", 1, "0" * 64)


def test_takedowns_that_this_version_would_deliver_are_refused(manifest: Manifest) -> None:
    with pytest.raises(DatasetError, match="names 1 samples that were taken down.*update streamvid"):
        manifest_from_json(changed(manifest, removed=["a-key"]))


def as_version_1_0(data: bytes) -> bytes:
    value = json.loads(data) | {"format_version": [1, 0]}
    del value["files"]["packets"]
    del value["manifest_sha256"]
    return json.dumps(value).encode()


def test_a_manifest_of_1_0_has_no_checksum_and_stays_as_it_is(manifest: Manifest) -> None:
    old = manifest_from_json(as_version_1_0(manifest_to_json(manifest)))
    assert old.format_version == (1, 0)
    assert json.loads(manifest_to_json(old)) == json.loads(as_version_1_0(manifest_to_json(manifest)))


def test_layout_is_no_content(manifest: Manifest) -> None:
    value = json.loads(manifest_to_json(manifest))
    assert manifest_from_json(json.dumps(value, indent=7).encode()) == manifest_from_json(manifest_to_json(manifest))


def test_every_wrong_bit_of_a_manifest_is_found(manifest: Manifest) -> None:
    """Each bit in turn: a DatasetError, or, in white space alone, the same manifest."""
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
        {"format_version": [1, 0]},
        {"format_version": [1, 4]},
        {"viewt": []},
    ],
)
def test_an_edited_manifest_is_found(manifest: Manifest, changes: dict[str, Any]) -> None:
    value = json.loads(manifest_to_json(manifest)) | changes
    with pytest.raises(IntegrityError, match="is damaged or was edited: its manifest_sha256"):
        manifest_from_json(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_bytes": -1}, "num_bytes=-1"),
        ({"sha256": "0" * 63 + "g"}, "64 hex digits"),
        ({"path": "index/\ud800"}, "printable|damaged|Unicode"),
        ({"path": "index/\n"}, "printable"),
    ],
)
def test_files_that_cannot_be(manifest: Manifest, changes: dict[str, Any], says: str) -> None:
    value = json.loads(manifest_to_json(manifest))
    value["files"]["samples"][0] |= changes
    with pytest.raises(DatasetError, match=f"^the/dataset.*{says}"):
        manifest_from_json(as_version_1_0(json.dumps(value).encode()), "the/dataset/manifest.json")


def test_a_manifest_nested_without_end_is_an_error() -> None:
    """SAFE-1."""
    with pytest.raises(DatasetError, match="damaged"):
        manifest_from_json(b'{"a":' * 200_000)
