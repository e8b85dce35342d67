"""Tests of the shards in third-party readers."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import streamvid
from streamvid.dataset.versions.open import open_dataset
from tests.files import read_webdataset
from tests.foreign import Members, read_energon, read_wids
from tests.sharder.conftest import Built
from tests.sharder.test_append import Growing

Sample = dict[str, bytes]


def expected(built: Built) -> dict[str, dict[str, Sample]]:
    """Return the expected bytes by tar, key and extension, from the index and the source files."""
    dataset = open_dataset(built.dest)
    shards: dict[str, dict[str, Sample]] = {}
    for row in dataset.samples_table().to_pylist():
        tar = f"shards/{row['bucket_id']}/{row['bucket_id']}-{row['shard']:06d}.tar"
        clip = (built.source / row["source"]).read_bytes()
        shards.setdefault(tar, {})[row["key"]] = {row["clip_extension"]: clip, "txt": (row["text"] or "").encode()}
    return shards


def raw_members(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the members that a reader of plain headers gets: a 100-byte name, octal size, no prefix or extended
    headers."""
    offset = 0
    while data[offset] != 0:
        header = data[offset : offset + 512]
        size = int(header[124:136].rstrip(b"\0 "), 8)
        yield header[:100].split(b"\0")[0].decode("ascii"), data[offset + 512 : offset + 512 + size]
        offset += 512 + -(-size // 512) * 512


def test_webdataset_reads_every_member(built: Built) -> None:
    shards = expected(built)
    assert sum(map(len, shards.values())) == 14
    for tar, samples in shards.items():
        read = read_webdataset(built.dest / tar)
        assert [sample["__key__"] for sample in read] == list(samples)
        for sample in read:
            members = {name: data for name, data in sample.items() if not name.startswith("__")}
            about = json.loads(members.pop("json"))
            assert members == samples[sample["__key__"]]
            assert about["key"] == sample["__key__"]


def test_the_json_member_carries_the_columns(built: Built) -> None:
    tar = next(iter(expected(built)))
    about = next(
        json.loads(data) for name, data in raw_members((built.dest / tar).read_bytes()) if name.endswith("json")
    )
    assert set(about["columns"]) == {"score", "row_id"}
    assert {"source", "fps", "width", "height", "num_frames", "record_key"} <= set(about)


def test_plain_headers_are_enough(built: Built) -> None:
    for tar, samples in expected(built).items():
        data = (built.dest / tar).read_bytes()
        names = [name for name, _ in raw_members(data)]
        assert len(names) == 3 * len(samples) == len(set(names))
        assert [name.split(".", 1)[0] for name in names[::3]] == list(samples)
        assert len({tuple(name.split(".", 1)[1] for name in names[i : i + 3]) for i in range(0, len(names), 3)}) == 1
        assert all(name == name.lower().replace(name.split(".")[0].lower(), name.split(".")[0]) for name in names)
        for name, content in raw_members(data):
            key, _, extension = name.partition(".")
            assert extension == "json" or samples[key][extension] == content


def test_energon_offsets_point_at_samples(built: Built) -> None:
    info = json.loads((built.dest / ".nv-meta" / ".info.json").read_bytes())
    split = json.loads((built.dest / ".nv-meta" / "split.yaml").read_bytes())
    assert sorted(info["shard_counts"]) == sorted(split["split_parts"]["train"] + split["split_parts"]["val"])
    for tar, samples in expected(built).items():
        data, raw = (built.dest / tar).read_bytes(), Path(f"{built.dest / tar}.idx").read_bytes()
        offsets = struct.unpack(f"<{len(raw) // 8}Q", raw)
        assert offsets[0] == 0 and len(offsets) == len(samples) + 1
        assert [data[at : at + 100].split(b".")[0].decode() for at in offsets[:-1]] == list(samples)
        assert data[offsets[-1] :].strip(b"\0") == b""
        assert info["shard_counts"][tar] == len(samples)


def test_a_shard_has_one_bucket_split_and_extension(built: Built) -> None:
    rows = open_dataset(built.dest).samples_table().to_pylist()
    kinds: dict[tuple[str, int], set[tuple[str, str]]] = {}
    for row in rows:
        kinds.setdefault((row["bucket_id"], row["shard"]), set()).add((row["split"], row["clip_extension"]))
    assert all(len(kind) == 1 for kind in kinds.values())
    assert {split for kind in kinds.values() for split, _ in kind} == {"train", "val"}


def members_of(root: Path) -> Members:
    """Return the expected members, from the index."""
    found: Members = {}
    for row in open_dataset(root).samples_table().to_pylist():
        text = hashlib.sha256((row["text"] or "").encode()).hexdigest()
        found[row["key"]] = {row["clip_extension"]: row["clip_sha256"].hex(), "txt": text}
    return found


def test_each_version_is_read_by_third_party_readers(source: Path, tmp_path: Path) -> None:
    """The versions follow an append, a removal with compaction, and a merge. webdataset 1.0 no longer contains wids."""
    growing, more = Growing(source, tmp_path / "a"), Growing(source, tmp_path / "b")
    growing.build(growing.rows[:5])
    more.build(more.rows[8:])

    def remove() -> None:
        streamvid.remove(growing.dest, keys=sorted(members_of(growing.dest))[:3])
        streamvid.compact(growing.dest)

    changes: list[Callable[[], object]] = [
        lambda: growing.append(growing.rows[:8]),
        remove,
        lambda: streamvid.merge(growing.dest, more.dest),
    ]
    versions, expected = [], []
    for number, change in enumerate(changes):
        change()
        versions.append(Path(shutil.copytree(growing.dest, tmp_path / f"v{number}")))
        expected.append(members_of(versions[-1]))
        for shard in open_dataset(versions[-1]).shards:
            keys = open_dataset(versions[-1]).samples(shard, ["key"]).column("key").to_pylist()
            assert [sample["__key__"] for sample in read_webdataset(versions[-1] / shard.path)] == keys
    assert [len(one) for one in expected] == [8, 5, 11]
    read = (read_energon if importlib.util.find_spec("wids") is None else read_wids)(*versions)
    for samples in read:
        assert all(members.pop("json") for members in samples.values())
    assert read == expected
