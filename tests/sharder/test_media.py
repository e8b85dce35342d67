"""Tests of conditioning inputs: which are accepted, which are rejected and why, and how they are stored."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import streamvid
from streamvid.buckets.bucket import parse_buckets
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError, SealedError, SourceError
from streamvid.sharder.media_columns import file_keys, media_columns
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.report import ShardReport
from streamvid.sharder.sharder import dry_run, shard
from tests.clips import frames_of
from tests.conftest import run_streamvid
from tests.files import read_webdataset, tree_of, write_rows
from tests.media_clips import MEDIA, clip_of, make_rows, uneven_clip
from tests.shard_options import shard_options

pytestmark = pytest.mark.timeout(180)

OPTIONS: dict[str, Any] = {"buckets": parse_buckets("96x64@9"), "workers": 1}


@dataclass(frozen=True)
class Source:
    """Rows of files in a folder, which also contains files that match no clip."""

    folder: Path
    rows: list[dict[str, Any]]

    def write(self, rows: list[dict[str, Any]] | None = None) -> Path:
        """Write the metadata of these rows, by default of all rows."""
        return write_rows(self.folder / "metadata.jsonl", self.rows if rows is None else rows)

    def reasons(self, rows: list[dict[str, Any]], dest: Path, media: dict[str, str]) -> dict[int, str]:
        """Return the reason of each rejected row; every row must be counted (SHARD-3)."""
        report: ShardReport = dry_run(self.write(rows), dest, options(media, whole_files=True))
        assert report.num_samples + report.num_rejected == len(rows)
        return {rejection.row: rejection.reason for rejection in report.rejections}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp("rows")
    rows = make_rows(folder, 4)
    frames = frames_of("bikes", 192, 128, 24)
    (folder / "slow.mp4").write_bytes(clip_of(frames, fps=23))
    (folder / "late.mkv").write_bytes(uneven_clip(frames, "matroska", [*(42 * i for i in range(23)), 2000]))
    (folder / "square.mp4").write_bytes(clip_of(frames_of("bikes", 64, 64, 24)))
    (folder / "text.mp4").write_bytes(b"no video at all\n" * 20)
    (folder / "empty.mp4").write_bytes(b"")
    return Source(folder, rows)


def options(media: dict[str, str] | None = None, **others: Any) -> ShardOptions:
    return shard_options(**OPTIONS | {"media": MEDIA if media is None else media} | others)


def test_mismatched_conditioning_inputs_are_rejected_with_a_reason(source: Source, tmp_path: Path) -> None:
    """SHARD-3: this includes inputs with other frames or another shape than the clip, and files that are not media."""
    rows = source.rows
    wrong = {
        "control1.mkv": "'control': control1.mkv has 25 frames, but the clip has 24 frames",
        "slow.mp4": "'control': a frame of slow.mp4 is 0.042 s away from the corresponding frame of the clip, but at most",
        "late.mkv": "'control': a frame of late.mkv is 1.042 s away from the corresponding frame",
        "square.mp4": "'control': square.mp4 is 64x64, but the clip is 192x128",
        "text.mp4": "'control': ",
        "empty.mp4": "'control' is empty",
        "missing.mp4": "'control': cannot be read: No such file",
        "../outside.mp4": "'control': the path points outside the source folder",
        "ref2-0.jpg": "'control': ref2-0.jpg is a still image, but the clip has 24 frames",
        "": "'control' is missing: column 'control_video' is empty in this row; to accept rows without it, use --media"
        " control?=control_video",
    }
    bad = [{**rows[0], "control_video": path} for path in wrong]
    found = source.reasons([*bad, rows[0]], tmp_path / "dataset", {"control": "control_video"})
    assert list(found) == list(range(len(bad)))
    for reason, expected in zip(found.values(), wrong.values(), strict=True):
        assert expected in reason


def test_kinds(source: Source, tmp_path: Path) -> None:
    """DIFFSYNTH row 4: single images are images, lists contain only images, and an explicit kind is enforced."""
    shard(source.write(), tmp_path / "dataset", options())
    media = open_dataset(tmp_path / "dataset").manifest.media
    flags = ("is_still", "is_mask", "is_list", "is_optional", "max_items")
    assert {name: tuple(getattr(facts, flag) for flag in flags) for name, facts in media.items()} == {
        "control": (False, False, False, False, 1),
        "matte": (False, True, False, False, 1),
        "reference": (True, False, True, True, 2),
    }
    row, clip, picture = source.rows[2], "control2.mkv", "ref2-0.jpg"
    for key, value, message in (
        ("image:control", clip, "is a video, but must be an image"),
        ("video:control", picture, "is a still image, but the clip has 26 frames"),
        ("control", [picture, clip], "a list must contain only images"),
        ("control", [picture] * 9, "lists 9 files; at most 8 are allowed"),
        ("control", [picture, 7], "item 1: the path has type int"),
        ("control", {"a": 1}, "the path has type dict"),
        ("control", [], "is missing"),
    ):
        found = source.reasons([{**row, "control_video": value}], tmp_path / "other", {key: "control_video"})
        assert message in found[0], (key, value)
    assert not source.reasons([{**row, "control_video": [picture] * 8}], tmp_path / "other", {"c?": "control_video"})


def test_lists_require_metadata_that_can_store_them(source: Source, tmp_path: Path) -> None:
    """DIFFSYNTH row 4: a list in a CSV file is a clear error; one path per cell works. Parquet can store lists."""
    folder, row = source.folder, source.rows[2]
    write_rows(folder / "a.csv", [{"path": row["path"], "caption": "a", "refs": row["refs"]}])
    with pytest.raises(SourceError, match=r"the column contains a list.*which CSV cannot store; use .jsonl"):
        dry_run(folder / "a.csv", tmp_path / "dataset", options({"reference": "refs"}))
    write_rows(folder / "b.csv", [{"path": row["path"], "caption": "a", "refs": row["refs"][0]}])
    assert dry_run(folder / "b.csv", tmp_path / "dataset", options({"reference": "refs"})).num_samples == 1
    kept = [{name: one[name] for name in ("path", "caption", "refs", "score")} for one in source.rows]
    report = shard(write_rows(folder / "c.parquet", kept), tmp_path / "dataset", options({"reference?": "refs"}))
    assert report.num_samples == len(kept)
    lengths = {len(items or []) for items in _column(tmp_path / "dataset", "media.reference")}
    assert lengths == {0, 1, 2}


def _column(root: Path, name: str) -> list[Any]:
    found: list[Any] = open_dataset(root).samples_table().column(name).to_pylist()
    return found


def test_invalid_media_options_are_refused(source: Source, tmp_path: Path) -> None:
    for given, message in (
        ({"control": "depth"}, "'depth' is not a column in the metadata; available columns: path, caption"),
        ({"Control": "refs"}, r"must be \[KIND:\]NAME\[\?\]=COLUMN"),
        ({"text:control": "refs"}, r"KIND is one of video, image, mask"),
        ({"txt": "refs"}, "media uses reserved or duplicate names: txt; give"),
        ({"a_b": "refs", "ab": "matte"}, "media uses reserved or duplicate names: ab; give"),
    ):
        with pytest.raises((ConfigError, SourceError), match=message):
            dry_run(source.write(), tmp_path / "dataset", options(given))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.mp4").write_bytes((source.folder / "clip0.mp4").read_bytes())
    with pytest.raises(SourceError, match="this source has no metadata"):
        dry_run(tmp_path / "folder", tmp_path / "dataset", options({"control": "refs"}))


def test_spellings() -> None:
    """The command line and Python share one grammar, and DiffSynth's list of keys has the same meaning."""
    columns = media_columns({"control": "c", "reference?": "r", "mask:m": "m", "image:i?": "i", "video:v": "v"})
    assert [(m.name, m.kind, m.is_mask, m.is_optional) for m in columns] == [
        ("control", None, False, False),
        ("reference", None, False, True),
        ("m", None, True, False),
        ("i", "image", False, True),
        ("v", "video", False, False),
    ]
    assert media_columns(dict(str(m).split("=") for m in columns)) == columns  # type: ignore[arg-type]
    media = {"control_video?": "control_video", "ref_image?": "Ref-Image"}
    assert file_keys("video,control_video, Ref-Image") == ("video", media)
    with pytest.raises(ConfigError, match="data_file_keys"):
        file_keys("video,,b")


@pytest.fixture(scope="module")
def built(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    shard(source.write(), folder / "dataset", options())
    return folder / "dataset"


def test_members_match_the_index(built: Path, source: Source) -> None:
    """Copies have the sources' bytes at the indexed offsets, and all samples of a tar have the same members."""
    dataset, names = open_dataset(built), []
    for info in dataset.shards:
        data = (built / info.path).read_bytes()
        members = {}
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            for member in tar:
                key, _, extension = member.name.partition(".")
                members.setdefault(key, []).append(extension)
        assert len({tuple(extensions) for extensions in members.values()}) == 1
        assert all(extensions == sorted(extensions) for extensions in members.values())
        for row in dataset.samples(info).to_pylist():
            given = next(one for one in source.rows if one["path"] == row["source"])
            wanted = {"control": [given["control_video"]], "matte": [given["matte"]], "reference": given["refs"]}
            total = row["clip_bytes"]
            for name, paths in wanted.items():
                items = row[f"media.{name}"] or []
                assert [item["source"] for item in items] == paths
                for item, path in zip(items, paths, strict=True):
                    stored = data[item["offset"] : item["offset"] + item["num_bytes"]]
                    assert stored == (source.folder / path).read_bytes()
                    assert hashlib.sha256(stored).digest() == item["sha256"]
                    assert item["extension"] in members[row["key"]]
                    total += item["num_bytes"]
            assert total <= info.max_clip_bytes
            names.append(tuple(sorted(members[row["key"]])))
    assert ("control.mkv", "json", "matte.mp4", "mp4", "reference.0.jpg", "reference.1.jpg", "txt") in names
    assert ("control.mkv", "json", "matte.mp4", "mp4", "txt") in names


def test_third_party_readers_read_conditioning_inputs(built: Path, source: Source) -> None:
    """webdataset reads the tars unchanged."""
    read = [sample for path in sorted(built.rglob("*.tar")) for sample in read_webdataset(path)]
    assert len(read) == len(source.rows)
    for sample in read:
        value = json.loads(sample["json"])
        row = next(one for one in source.rows if one["path"] == value["source"])
        assert sample["control.mkv"] == (source.folder / row["control_video"]).read_bytes()
        assert [medium["extension"] for medium in value["media"]][:2] == ["control.mkv", "matte.mp4"]
        assert "control_video" not in value["columns"] and value["columns"]["score"] == row["score"]


def test_equal_builds_give_equal_datasets(source: Source, built: Path, tmp_path: Path) -> None:
    """SHARD-1: this holds for any number of workers and for native clips; changed inputs or options give another
    dataset."""
    metadata = source.write()
    shard(metadata, tmp_path / "again", options(workers=2))
    assert tree_of(tmp_path / "again") == tree_of(built)
    source.write(source.rows[:2])
    for workers in (1, 2):
        shard(metadata, tmp_path / f"native{workers}", options(clips="native", workers=workers))
    assert tree_of(tmp_path / "native1") == tree_of(tmp_path / "native2")
    source.write()
    assert shard(metadata, tmp_path / "again", options()).state == "already sealed"
    with pytest.raises(SealedError, match="media"):
        shard(metadata, tmp_path / "again", options({"control": "control_video"}))
    other = [{**source.rows[0], "control_video": "matte0.mp4"}, *source.rows[1:]]
    with pytest.raises(SealedError, match="but files, sizes"):
        shard(source.write(other), tmp_path / "again", options())


def test_native_conditioning_inputs_have_the_size_of_the_bucket(source: Source, tmp_path: Path) -> None:
    """They share the clip's frames and times. Masks are lossless. Images are stored once per clip, for any window."""
    shard(source.write(), tmp_path / "dataset", options(clips="native", max_clip_seconds=0.5, fps=20))
    table = open_dataset(tmp_path / "dataset").samples_table().to_pylist()
    assert len(table) > len(source.rows)  # long clips are split
    for row in table:
        control, matte = row["media.control"][0], row["media.matte"][0]
        for item in (control, matte):
            assert (item["num_frames"], item["width"], item["height"]) == (row["window_num_frames"], 96, 64)
            assert item["fps"] == row["fps"]
        assert (control["codec"], matte["codec"]) == ("h264", "ffv1")
        for item in row["media.reference"] or []:
            assert (item["num_frames"], item["width"], item["height"], item["extension"][-3:]) == (1, 96, 64, "jpg")


def test_verify_finds_damage_and_copy_copies_everything(built: Path, tmp_path: Path) -> None:
    """VERIFY: a flipped byte of a conditioning input is found, and a copy has every byte."""
    run_streamvid("copy", built, tmp_path / "copy")
    assert tree_of(tmp_path / "copy") == tree_of(built)
    assert run_streamvid("verify", tmp_path / "copy", "--deep").returncode == 0
    dataset = open_dataset(tmp_path / "copy")
    info = dataset.shards[0]
    item = dataset.samples(info).to_pylist()[0]["media.control"][0]
    data = bytearray((tmp_path / "copy" / info.path).read_bytes())
    data[item["offset"] + 7] ^= 1
    (tmp_path / "copy" / info.path).write_bytes(data)
    done = run_streamvid("verify", tmp_path / "copy", "--deep", check=False)
    assert done.returncode == 1 and info.path in done.stdout + done.stderr


def test_the_command(source: Source, tmp_path: Path) -> None:
    """DIFFSYNTH row 3: --media, and data_file_keys as DiffSynth spells them, in one command each."""
    metadata = source.write()
    flags = ["--media", "control=control_video", "--media", "mask:matte=matte", "--media", "reference?=refs"]
    run_streamvid("shard", metadata, tmp_path / "one", "--buckets", "96x64@9", "--workers", 1, *flags)
    flags = ("--buckets", "96x64@9", "--workers", 1, "--data-file-keys", "path,control_video,refs")
    run_streamvid("shard", metadata, tmp_path / "two", *flags)
    for root, names in (("one", ("control", "matte", "reference")), ("two", ("control_video", "refs"))):
        with streamvid.VideoLoader(tmp_path / root, batch_size=2, num_workers=0, media=names) as loader:
            assert set(next(_batches(loader)).media) == set(names)
    for wrong in (["--media", "control"], ["--data-file-keys", "path,refs", "--media", "a=matte"]):
        done = run_streamvid("shard", metadata, tmp_path / "three", *wrong, check=False)
        assert done.returncode == 2 or "omit one" in done.stderr


def _batches(loader: streamvid.VideoLoader) -> Iterator[streamvid.Batch]:
    yield from loader
