"""Tests of other sources: sealed datasets, several sources, damaged tars, containers and images."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamvid
from streamvid.buckets.bucket import parse_buckets
from streamvid.errors import ConfigError, SourceError
from streamvid.sharder.source.records import RecordSet, read_records
from tests.files import tree_of
from tests.servers import S3Env, S3Server
from tests.shard_options import shard_options
from tests.sharder.test_layouts import (
    BUCKETS,
    caption,
    clip,
    csv_of,
    decoded,
    deliver,
    jsonl_of,
    rows_of,
    shard,
    tar_of,
    videos,
    write,
)


def read(source: Path | list[Path], **changes: Any) -> RecordSet:
    return read_records(source, shard_options(buckets=parse_buckets(BUCKETS), **changes))


def index_of(dataset: Path) -> list[dict[str, Any]]:
    return sorted(streamvid.open_dataset(dataset).samples_table().to_pylist(), key=lambda row: row["text"])


def test_a_sealed_dataset_gets_other_buckets_and_keeps_its_metadata(tmp_path: Path) -> None:
    """Captions, columns, record keys and splits stay. Clips are read in place and delivered in the new shape."""
    rows = [{**row, "caption": [caption(n), f"other {n}"]} for n, row in enumerate(rows_of(videos(tmp_path, 6)))]
    write(tmp_path, {"metadata.jsonl": jsonl_of(rows)})
    shard(tmp_path, tmp_path / "old", "--val-fraction", "0.4")
    report = shard(tmp_path / "old", tmp_path / "new", "--clips", "native", "--codec", "ffv1", buckets="64x64@9")
    assert (report["num_samples"], report["num_rejected"]) == (6, 0)
    old, new = index_of(tmp_path / "old"), index_of(tmp_path / "new")
    assert {row["split"] for row in old} == {"train", "val"}
    for name in ("record_key", "split", "text", "captions", "user.score", "source", "window_num_frames"):
        assert [row[name] for row in new] == [row[name] for row in old]
    assert not {row["key"] for row in new} & {row["key"] for row in old}
    found = deliver(tmp_path / "new")
    for text, frames in found.items():
        (number,) = [n for n in range(6) if text in (caption(n), f"other {n}")]
        expected = decoded(clip(number), (9, 64, 64))
        assert np.abs(frames.astype(int) - expected).mean() < 3
    assert len(found) == sum(row["split"] == "train" for row in new)


def test_a_sealed_dataset_that_would_lose_something_is_refused(tmp_path: Path) -> None:
    """Native clips would lose quality and their quality figures; without explicit buckets, those of the dataset would
    change."""
    videos(tmp_path, 1)
    shard(tmp_path, tmp_path / "copy")
    shard(tmp_path, tmp_path / "native", "--clips", "native", "--codec", "ffv1")
    for clips in ("copy", "native"):
        with pytest.raises(SourceError, match="has native clips, .* shard the original videos, or copy the dataset"):
            shard(tmp_path / "native", tmp_path / "new", "--clips", clips)
    with pytest.raises(ConfigError, match="copy is a sealed dataset. .* set the buckets with --buckets"):
        streamvid.shard(tmp_path / "copy", tmp_path / "new", streamvid.ShardOptions())
    assert not (tmp_path / "new").exists()


def test_datasets_are_merged(tmp_path: Path) -> None:
    """Several sources are read in order; their columns are combined, and no sample leaves the validation split."""
    for name, numbers in {"a": (0, 1, 2), "b": (3, 4)}.items():
        rows = [
            {"path": f"{n}.mp4", "caption": caption(n), "score": 1 if name == "a" else 0.5, name: "x"} for n in numbers
        ]
        write(tmp_path / name, {**{f"{n}.mp4": clip(n) for n in numbers}, "metadata.jsonl": jsonl_of(rows)})
        shard(tmp_path / name, tmp_path / f"ds-{name}", "--val-fraction", "0.5")
    parts = index_of(tmp_path / "ds-a") + index_of(tmp_path / "ds-b")
    shard(tmp_path / "ds-a", tmp_path / "ds-b", tmp_path / "ds")
    both = index_of(tmp_path / "ds")
    for name in ("record_key", "split", "text", "clip_sha256"):
        assert [row[name] for row in both] == [row[name] for row in parts]
    assert [row["user.score"] for row in both] == [1.0, 1.0, 1.0, 0.5, 0.5]
    assert [(row["user.a"], row["user.b"]) for row in both] == [("x", None)] * 3 + [(None, "x")] * 2


@pytest.mark.slow
def test_a_damaged_clip_of_a_dataset_is_noticed(tmp_path: Path) -> None:
    """SAFE-1: sealed contents are verified when they are sealed again."""
    videos(tmp_path, 1)
    shard(tmp_path, tmp_path / "ds")
    (tar,) = (tmp_path / "ds").rglob("*.tar")
    data = bytearray(tar.read_bytes())
    (row,) = index_of(tmp_path / "ds")
    data[row["clip_offset"] + row["clip_bytes"] - 5] ^= 1
    tar.write_bytes(data)
    for clips in ("copy", "native"):
        with pytest.raises(SourceError, match="damaged"):
            shard(tmp_path / "ds", tmp_path / f"new-{clips}", "--clips", clips)


def test_a_dataset_is_not_built_over_its_source(tmp_path: Path) -> None:
    videos(tmp_path, 1)
    shard(tmp_path, tmp_path / "ds")
    (tmp_path / "other").symlink_to(tmp_path / "ds")
    for source in ("ds", "other"):
        with pytest.raises(SourceError, match="is also the destination"):
            shard(tmp_path / source, tmp_path / "ds", "--overwrite", buckets="64x64@5")


@pytest.mark.slow
def test_a_dataset_below_the_source_is_not_part_of_it(tmp_path: Path) -> None:
    """SHARD-1: a folder of tars is read the same way while a dataset is built inside it and afterwards."""
    write(tmp_path, {"0.tar": tar_of({"a.mp4": clip(0), "a.txt": b"x"})})
    assert shard(tmp_path, tmp_path / "deep" / "ds")["num_samples"] == 1
    assert shard(tmp_path, tmp_path / "deep" / "ds")["state"] == "already sealed"


def test_splits_stay_when_rows_are_added_and_in_every_layout(tmp_path: Path) -> None:
    """A file's split and record key depend only on its name, not on other files or on the layout."""
    names = videos(tmp_path, 8)
    write(tmp_path, {"few.csv": csv_of(rows_of(names[:5])), "all.jsonl": jsonl_of(rows_of(names)[::-1])})
    for name in ("few.csv", "all.jsonl"):
        shard(tmp_path / name, tmp_path / name.split(".")[0], "--val-fraction", "0.4")
    few, every = ({row["source"]: row for row in index_of(tmp_path / name)} for name in ("few", "all"))
    assert {row["split"] for row in few.values()} == {"train", "val"}
    for source, row in few.items():
        assert [row[k] for k in ("key", "record_key", "split")] == [
            every[source][k] for k in ("key", "record_key", "split")
        ]


def test_lists_of_unequal_length_name_both_counts(tmp_path: Path) -> None:
    write(tmp_path, {"videos.txt": b"a.mp4\nb.mp4\nc.mp4\n", "prompts.txt": b"one\n\ntwo\nthree\n"})
    with pytest.raises(SourceError, match=r"prompts.txt has 4 lines, but videos.txt has 3"):
        read(tmp_path)


def test_an_ambiguous_layout_must_be_chosen(tmp_path: Path) -> None:
    """SHARD-3: if a folder contains both media files and tars, neither is dropped silently."""
    videos(tmp_path, 1)
    write(tmp_path, {"0.tar": tar_of({"a.mp4": clip(1)})})
    with pytest.raises(SourceError, match=r"\(folder, tars\), .*; choose one with --layout"):
        read(tmp_path)
    assert [record.source for record in read(tmp_path, layout="tars").records] == ["0.tar/a.mp4"]
    assert [record.source for record in read(tmp_path, layout="folder").records] == ["videos/0.mp4"]


def test_base_path_applies_only_to_relative_paths(tmp_path: Path) -> None:
    names = videos(tmp_path / "media", 2)
    paths = [names[0], str(tmp_path / "media" / names[1]), "../x.mp4"]
    write(tmp_path, {"rows.jsonl": jsonl_of(rows_of(paths))})
    records = read(tmp_path / "rows.jsonl", base_path=tmp_path / "media")
    assert [record.source for record in records.records] == names
    assert "points outside the source folder" in records.rejections[0].reason
    with pytest.raises(SourceError, match="is not an existing folder"):
        read(tmp_path / "rows.jsonl", base_path=tmp_path / "nowhere")
    with pytest.raises(SourceError, match="such a source contains its own files"):
        read(tmp_path / "media", base_path=tmp_path)


def test_wrong_layouts_are_named(tmp_path: Path) -> None:
    names = videos(tmp_path, 2)
    with pytest.raises(ConfigError, match="layout='wds': must be 'metadata', 'folder'"):
        read(tmp_path, layout="wds")
    for layout, message in {
        "lists": "requires a list of captions",
        "imagefolder": "contains no metadata.csv",
        "parquet": "contains no .parquet file",
        "tars": "contains no .tar file",
        "metadata": "contains no metadata file",
        "dataset": "cannot be read as a source",
    }.items():
        with pytest.raises(SourceError, match=message):
            read(tmp_path, layout=layout)
    write(tmp_path, {"videos/metadata.csv": csv_of(rows_of(names))})
    with pytest.raises(SourceError, match="has no 'file_name' column"):
        read(tmp_path)


def test_files_with_the_same_name_in_two_sources_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        videos(tmp_path / name, 1)
    with pytest.raises(SourceError, match="videos/0.mp4 is in .*/a and in .*/b"):
        read([tmp_path / "a", tmp_path / "b"])


def hostile_tar() -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as file:

        def add(name: str, data: bytes = b"", **facts: Any) -> None:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for key, value in facts.items():
                setattr(info, key, value)
            file.addfile(info, io.BytesIO(data))

        add("good.mp4", clip(0))
        add("good.txt", caption(0).encode())
        add("link.mp4", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add("hard.mp4", type=tarfile.LNKTYPE, linkname="good.mp4")
        add("pipe.mp4", type=tarfile.FIFOTYPE)
        add("../../../etc/cron.mp4", clip(1))
        add("good.mp4", clip(2))
        add("both.mp4", clip(1))
        add("both.webm", clip(2))
        add("json.mp4", clip(1))
        add("json.json", b"{broken")
        add("list.mp4", clip(1))
        add("list.json", b"[1]")
        add("notes.md", b"no media")
    return sink.getvalue()


def test_hostile_tars_end_in_rejections(tmp_path: Path) -> None:
    """SAFE-1, SHARD-3: links, pipes, paths that lead outside, and duplicates are not followed, and all are reported."""
    write(tmp_path, {"t.tar": hostile_tar()})
    records = read(tmp_path, caption_column="")
    sources = {
        record.source: record.media(shard_options(buckets=parse_buckets(BUCKETS)).storage).read()
        for record in records.records
    }
    assert sources.pop("t.tar/good.mp4") == clip(0)
    assert set(sources) == {"t.tar/json.mp4", "t.tar/list.mp4", "t.tar/../../../etc/cron.mp4"}
    reasons = " | ".join(rejection.reason for rejection in records.rejections)
    for part in (
        *("link.mp4 is a symbolic link", "hard.mp4 is a hard link", "pipe.mp4 is not a regular file"),
        *(
            "good.mp4 is another .mp4 member of the same sample",
            "both: the sample has several media members (mp4, webm)",
            "json.json: the file is not valid JSON",
            "list.json: the file contains a value of type list",
        ),
    ):
        assert part in reasons


@pytest.mark.parametrize("cut", [700, 1024, -1024, -600])
def test_a_truncated_tar_gives_its_complete_members_and_a_rejection(tmp_path: Path, cut: int) -> None:
    """SHARD-3: a tar that ends early is never read as a shorter one."""
    whole = tar_of({"a.mp4": clip(0), "a.txt": b"x", "b.mp4": clip(1)})
    assert len(whole) % 10240 == 0
    end = whole.rstrip(b"\0")
    write(tmp_path, {"t.tar": whole[:cut] if cut > 0 else end[:cut]})
    records = read(tmp_path, caption_column="")
    assert len(records.records) == (0 if cut > 0 else 1)
    assert "truncated" in records.rejections[-1].reason


def test_an_unreadable_tar_names_a_remedy(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as file:
        file.addfile(tarfile.TarInfo("a.mp4"))
    write(tmp_path, {"a.tar": packed.getvalue(), "b.tar": b"no tar at all" * 100})
    one, other = read(tmp_path).rejections
    assert "compressed (gzip)" in one.reason and "decompress it first" in one.reason
    assert "no valid tar header at byte 0" in other.reason


def test_members_of_a_tar_can_be_named_as_columns(tmp_path: Path) -> None:
    """Extensions select which member is the clip and which members are conditioning inputs."""
    members = {"k.mp4": clip(0), "k.control.mp4": clip(1), "k.jpg": b"x", "k.txt": b"words"}
    write(tmp_path, {"t.tar": tar_of(members)})
    (plain,) = read(tmp_path).records
    assert (plain.source, plain.caption, plain.extra) == ("t.tar/k.mp4", "words", ())
    (asked,) = read(tmp_path, video_column="mp4", media={"control": "control.mp4"}).records
    assert [file.source for file in asked.extra] == ["t.tar/k.control.mp4"]
    (turned,) = read(tmp_path, video_column="control.mp4").records
    assert turned.source == "t.tar/k.control.mp4" and turned.columns == {}


@pytest.mark.slow
def test_tars_in_a_bucket_are_read_by_range(moto_server: S3Server, s3_env: S3Env, tmp_path: Path) -> None:
    """The dataset equals that of local tars, and only headers, captions and clips are read."""
    s3_env(moto_server)
    bucket = moto_server.new_bucket()
    useless = {"z.bin": bytes(4 * 2**20)}
    members = {f"{n}.{kind}": data for n in range(2) for kind, data in (("mp4", clip(n)), ("txt", caption(n).encode()))}
    write(tmp_path / "source", {"video/0.tar": tar_of({**members, **useless, "2.mp4": clip(2)})})
    note = json.dumps({"caption": caption(2), "score": 3})
    write(tmp_path / "source", {"metas/0.tar": tar_of({"2.json": note.encode()})})
    moto_server.upload_folder(tmp_path / "source", bucket, "in/")
    shard(tmp_path / "source", tmp_path / "local")
    report = shard(f"s3://{bucket}/in", f"s3://{bucket}/ds", "--work-dir", tmp_path / "work")
    assert report["probe_bytes_read"] < 2 * 2**20
    assert moto_server.tree(bucket, "ds") == tree_of(tmp_path / "local")
    shard(f"s3://{bucket}/ds", tmp_path / "again", "--clips", "native", buckets="64x64@9")
    assert sorted(deliver(tmp_path / "again")) == sorted(caption(number) for number in range(3))
