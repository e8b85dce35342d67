"""Tests of `streamvid append`: it adds new rows of real clips in the next version of a dataset."""

from __future__ import annotations

import csv
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import streamvid
from streamvid.buckets.config import BucketConfig
from streamvid.buckets.opensora import OpenSoraConfig
from streamvid.dataset.index import named_by_content
from streamvid.dataset.manifest import Change
from streamvid.dataset.removed import Removals, RemovedSample, encode_removed
from streamvid.dataset.versions.publish import writing
from streamvid.errors import ConfigError, DatasetError, SealedError, SourceError
from streamvid.sharder.append import append
from streamvid.sharder.report import ShardReport
from streamvid.sharder.sharder import abandon, check_apart, shard
from streamvid.storage import open_store
from tests.conftest import run_streamvid
from tests.files import Tree, read_webdataset, tree_of, write_rows
from tests.media_clips import MEDIA, make_rows
from tests.shard_options import shard_options
from tests.sharder.conftest import OPTIONS, Stop, rows_of, stop_at

PLAIN: dict[str, Any] = {**OPTIONS, "val_fraction": 0.0}
ONE: dict[str, Any] = {"work": {"workers": 1}}
NUM_OLD, NUM_GOOD = 9, 14


class Growing:
    """Folder of videos whose metadata lists only the given rows, and a dataset of these rows."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.dest = folder / "source", folder / "ds"
        shutil.copytree(source, self.source)
        with (source / "metadata.csv").open(newline="", encoding="utf-8") as file:
            self.rows = list(csv.DictReader(file))

    def write(self, rows: Sequence[dict[str, Any]]) -> Path:
        write_rows(self.source / "metadata.csv", rows)
        return self.source

    def build(self, rows: Sequence[dict[str, Any]], **options: Any) -> ShardReport:
        return shard(self.write(rows), self.dest, shard_options(**{**PLAIN, **options}))

    def append(self, rows: Sequence[dict[str, Any]], **options: Any) -> ShardReport:
        return append(self.dest, self.write(rows), {**ONE, **options})


@pytest.fixture
def growing(source: Path, tmp_path: Path) -> Growing:
    return Growing(source, tmp_path)


def delivered(dataset: Path, **options: Any) -> list[str]:
    """Return the keys of all samples that an epoch delivers."""
    with streamvid.VideoLoader(
        dataset, batch_size=1, num_workers=0, num_epochs=1, output={"decode": False}, **options
    ) as loader:
        return sorted(key for batch in loader for key in batch.sample_keys)


def keys_of(dataset: Path) -> list[str]:
    return sorted(row["key"] for row in rows_of(dataset))


def assert_kept(before: Tree, after: Tree) -> None:
    """Assert that files of an earlier version are unchanged, except those that each version replaces."""
    replaced = ("manifest.json", ".nv-meta/.info.json", ".nv-meta/split.yaml")
    assert {path: data for path, data in before.items() if path not in replaced}.items() <= after.items()


@pytest.mark.parametrize("options", [{}, {"clips": "native"}], ids=["copies", "native"])
def test_new_rows_are_added_and_existing_files_stay(growing: Growing, tmp_path: Path, options: dict[str, Any]) -> None:
    """SHARD-2, SHARD-3, PLAN-4: the dataset has the same samples as a single build, and each is delivered once."""
    growing.build(growing.rows[:NUM_OLD], **options)
    before = tree_of(growing.dest)
    planned = append(growing.dest, growing.write(growing.rows), ONE, dry_run=True)
    assert tree_of(growing.dest) == before
    report = growing.append(growing.rows)
    assert (report.state, report.num_samples, report.num_known) == ("appended", NUM_GOOD - NUM_OLD, NUM_OLD)
    assert report.num_records == len(growing.rows) - NUM_OLD == report.num_samples + report.num_rejected
    assert (planned.num_samples, planned.num_known) == (report.num_samples, NUM_OLD)
    after = tree_of(growing.dest)
    assert_kept(before, after)
    whole = tmp_path / "whole"
    together = shard(growing.source, whole, shard_options(**PLAIN, **options))
    assert delivered(growing.dest) == keys_of(growing.dest) == keys_of(whole)
    dataset, at_once = streamvid.open_dataset(growing.dest), streamvid.open_dataset(whole)
    assert sorted(dataset.rejections_table().to_pylist(), key=str) == sorted(
        at_once.rejections_table().to_pylist(), key=str
    )
    counts = dataset.manifest.counts
    assert (counts.records, counts.samples) == (together.num_records, together.num_samples)
    if dataset.manifest.native is not None:
        assert at_once.manifest.native is not None
        assert dataset.manifest.native.quality["psnr_y"] == at_once.manifest.native.quality["psnr_y"]
    assert streamvid.verify_dataset(growing.dest, deep=True).num_problems == 0
    assert keys_of(Path(f"{growing.dest}@1")) == sorted(
        row["key"] for row in rows_of(whole) if row["user.row_id"] < NUM_OLD
    )
    tars = [str(path) for path in sorted(growing.dest.glob("shards/*/*.tar"))]
    assert sorted(sample["__key__"] for tar in tars for sample in read_webdataset(tar)) == keys_of(whole)
    again = growing.append(growing.rows)
    assert (again.state, again.num_samples, again.num_known) == ("already there", 0, len(growing.rows))
    assert tree_of(growing.dest) == after


def test_a_known_row_is_recognized_without_opening_its_file(growing: Growing) -> None:
    growing.build(growing.rows[:NUM_OLD])
    for row in growing.rows[: NUM_OLD - 1]:
        path = growing.source / row["path"]
        path.write_bytes(bytes(path.stat().st_size))
    (growing.source / growing.rows[NUM_OLD - 1]["path"]).unlink()
    report = growing.append(growing.rows[: NUM_OLD + 1])
    assert (report.num_known, report.num_samples, report.rejections) == (NUM_OLD, 1, ())


def test_rows_of_one_file_are_distinguished_by_captions_and_time_ranges(growing: Growing) -> None:
    """Keys stay unique, and another file with the same name is not mistaken for the known one."""
    columns = {"time_columns": ("start", "end")}
    row = {"path": "b/long.MP4", "caption": "a", "start": 0, "end": 0.36}
    growing.build([row, row], **columns, buckets=OPTIONS["buckets"])
    rows = [row, {**row, "caption": "b"}, {**row, "start": 0.36, "end": 0.72}]
    assert (growing.append(rows).num_samples, growing.append(rows).num_samples) == (2, 0)
    assert max(Counter(keys_of(growing.dest)).values()) == 1 and len(delivered(growing.dest)) == 4
    shutil.copy(growing.source / "more/0.mp4", growing.source / "b/long.MP4")
    report = growing.append([{**row, "caption": "c"}, {"path": "more/0.mp4", "caption": "d", "start": 0, "end": 0.36}])
    assert report.num_samples == 1 and [one.kind for one in report.rejections] == ["other-file"]


def test_a_file_that_was_incomplete_is_added_when_it_is_complete(growing: Growing, tmp_path: Path) -> None:
    """SHARD-3: a rejected row stays known only while its file keeps its size, unless the file has samples."""
    paths = [growing.source / row["path"] for row in growing.rows[:3]]
    complete = [path.read_bytes() for path in paths]
    for path, data in zip(paths[1:], complete[1:], strict=True):
        path.write_bytes(data[: len(data) // 2])
    assert growing.build(growing.rows[:2]).num_rejected == 1
    first, second = (growing.append(growing.rows[:3]) for _ in range(2))
    assert [one.kind for one in first.rejections] == ["not-media"]
    assert (second.num_known, second.num_rejected) == (3, 0)
    for path, data in zip(paths, complete, strict=True):
        path.write_bytes(data)
    report = growing.append(growing.rows[:3])
    assert json.loads(run_streamvid("stats", growing.dest, "--json").stdout)["rejections"] == []
    assert len(json.loads(run_streamvid("stats", f"{growing.dest}@2", "--json").stdout)["rejections"]) == 2
    assert (report.num_samples, report.num_known, report.rejections) == (2, 1, ())
    shard(growing.source, tmp_path / "whole", shard_options(**PLAIN))
    assert delivered(growing.dest) == keys_of(growing.dest) == keys_of(tmp_path / "whole")
    assert growing.append(growing.rows[:3]).num_known == 3
    paths[1].write_bytes(complete[1][:-1])
    assert [one.kind for one in growing.append(growing.rows[:3]).rejections] == ["other-file"]


@pytest.mark.parametrize("inner", ["shards", "linked", "."])
def test_a_source_inside_the_dataset_is_refused(growing: Growing, inner: str) -> None:
    growing.build(growing.rows[:2])
    before = tree_of(growing.dest)
    (growing.dest.parent / "linked").symlink_to(growing.dest / "shards")
    source = growing.dest.parent / inner if inner == "linked" else growing.dest / inner
    for dry_run in (False, True):
        with pytest.raises(SourceError, match="source .* is (inside|also) the destination"):
            append(growing.dest, source, ONE, dry_run=dry_run)
    with pytest.raises(SourceError, match="source .* is (inside|also) the destination"):
        shard(source, growing.dest, shard_options(**PLAIN, overwrite=True))
    assert tree_of(growing.dest) == before


def test_only_a_source_below_the_destination_is_inside_it() -> None:
    dest, options = open_store("s3://videos/ds"), shard_options(**PLAIN)
    check_apart(["s3://videos/ds2", "s3://videos", "s3://others/ds/shards"], dest, options)
    with pytest.raises(SourceError, match="s3://videos/ds/shards is inside the destination s3://videos/ds"):
        check_apart(["s3://videos/ds2", "s3://videos/ds/shards"], dest, options)


def test_shard_names_append_as_the_way_to_add_rows(growing: Growing) -> None:
    growing.build(growing.rows[:2])
    with pytest.raises(
        SealedError,
        match="built from 2 rows, but the input now has 3 rows.*to add new rows to it, use `streamvid append`",
    ):
        growing.build(growing.rows[:3])


def take_down(dataset: Path, source: str) -> None:
    """Publish a version without the samples of a source file."""
    with writing(open_store(dataset)) as held:
        removed: list[RemovedSample] = []
        for one in held.dataset.shards:
            for row in held.dataset.samples(one).to_pylist():
                if row["source"] == source:
                    name = (row["key"], row["record_key"], one.bucket_id, one.number, one.build_id)
                    removed.append(RemovedSample(*name, row["index"], row["clip_sha256"], 2))
        data = encode_removed(removed)
        file = named_by_content("removed", 0, data)
        held.store.put(file.path, data)
        draft = replace(held.newest, files=replace(held.newest.files, removed=(file,)))
        left = Removals.read(held.store, [file]).applied(held.dataset.shards)
        held.publish(draft, Change("remove", num_removed=len(removed)), left)


def test_a_file_whose_samples_were_removed_is_not_added_again(growing: Growing) -> None:
    """After a takedown, neither the same row nor another row of the file returns."""
    growing.build(growing.rows[:NUM_OLD])
    taken = growing.rows[2]
    take_down(growing.dest, taken["path"])
    report = growing.append(growing.rows[: NUM_OLD + 1])
    assert report.num_samples == 1 and [one.kind for one in report.rejections] == ["removed"]
    assert growing.append([growing.rows[0], {**taken, "caption": "another"}]).num_samples == 0
    assert taken["path"] not in [row["source"] for row in rows_of(growing.dest)]
    assert len(delivered(growing.dest)) == NUM_OLD
    again = growing.append(growing.rows[: NUM_OLD + 1])
    assert (again.state, again.num_known, again.rejections) == ("already there", NUM_OLD + 1, ())


def test_columns_may_be_new_missing_or_wider(growing: Growing, tmp_path: Path) -> None:
    """Samples have values for the columns of their own rows; all other values are missing."""
    old, new = growing.rows[:2], growing.rows[2:4]
    growing.build([{**row, "motion": number} for number, row in enumerate(old)])
    later = write_rows(tmp_path / "later.csv", [{"source": row["path"], "nsfw": 0.5} for row in old])
    streamvid.annotate(growing.dest, later)
    added = [
        {"path": row["path"], "caption": "new", "motion": 2.5 + number, "nsfw": number, "mood": "calm"}
        for number, row in enumerate(new)
    ]
    assert growing.append(added).num_samples == 2
    names = ("motion", "nsfw", "mood", "score")
    found = {row["source"]: tuple(row[f"user.{name}"] for name in names) for row in rows_of(growing.dest)}
    assert found == {
        old[0]["path"]: (0.0, 0.5, None, 0.0),
        old[1]["path"]: (1.0, 0.5, None, 0.5),
        new[0]["path"]: (2.5, 0.0, "calm", None),
        new[1]["path"]: (3.5, 1.0, "calm", None),
    }
    assert len(delivered(growing.dest, where="motion > 0.5 and nsfw > 0")) == 2
    with pytest.raises(ConfigError, match="column 'motion' has type double .* and type string in the input"):
        growing.append([{"path": growing.rows[4]["path"], "caption": "new", "motion": "much"}])
    write_rows(later, [{"source": row["path"], "nsfw": 0.25} for row in [*old, *new]])
    streamvid.annotate(growing.dest, later, overwrite=True)
    one = {"path": growing.rows[4]["path"], "caption": "new", "motion": "", "mood": 1}
    assert growing.append([*added, one]).num_samples == 1
    assert Counter(row["user.nsfw"] for row in rows_of(growing.dest)) == {0.25: 4, None: 1}
    assert Counter(row["user.mood"] for row in rows_of(growing.dest)) == {None: 2, "calm": 2, "1": 1}


def test_options_that_differ_from_the_dataset_are_refused(growing: Growing) -> None:
    growing.build(growing.rows[:NUM_OLD])
    with pytest.raises(ConfigError, match=r"seed: the dataset at .* has 5, but 6 was given"):
        growing.append(growing.rows, seed=6)
    with pytest.raises(ConfigError, match='clips: the dataset at .* has "copy", but "native" was given'):
        growing.append(growing.rows, clips={"kind": "native"})
    with pytest.raises(ConfigError, match="refers to a version or a view"):
        append(f"{growing.dest}@1", growing.source, ONE)
    with pytest.raises(DatasetError, match="no dataset at"):
        append(growing.dest.with_name("none"), growing.source, ONE)
    assert growing.append(growing.rows, seed=5, shard_size_bytes=12_000).num_known == NUM_OLD
    refused = run_streamvid("append", growing.dest, growing.source, "--seed", 6, check=False)
    assert refused.returncode == 2 and "has 5, but 6 was given" in refused.stderr
    said = run_streamvid("append", growing.dest, growing.source).stdout
    assert f"already in the dataset: {len(growing.rows)} rows" in said and "no new samples" in said


def test_a_dataset_whose_near_duplicates_were_dropped_is_refused(growing: Growing, tmp_path: Path) -> None:
    """The error names a remedy, and the remedy works."""
    growing.build(growing.rows[:2], dedup="mark")
    with pytest.raises(
        ConfigError, match=f"only if all rows are compared with each other.*streamvid merge {growing.dest} DEST"
    ):
        growing.append(growing.rows[:3])
    shard(growing.write(growing.rows[2:4]), tmp_path / "new", shard_options(**PLAIN, dedup="mark"))
    assert streamvid.merge(growing.dest, tmp_path / "new").num_samples == 4


def test_rows_that_are_all_rejected_are_recorded_once(growing: Growing) -> None:
    """SHARD-3: these rows are not probed again, whether or not the input also has known rows."""
    growing.build(growing.rows[:1])
    bad = {row["path"]: row for row in growing.rows if row["path"].startswith("bad/")}
    first, second = (growing.append([growing.rows[0], bad["bad/text.mp4"]]) for _ in range(2))
    assert (first.state, first.num_rejected, second.num_rejected) == ("already there", 1, 0)
    source = growing.write([bad["bad/short.mp4"]])
    runs = [("--dry-run", 1, 2), ("--json", 1, 3), ("--json", 0, 3)]
    for flag, num_new, version in runs:
        said = run_streamvid("append", growing.dest, source, flag).stdout
        if flag == "--json":
            report = json.loads(said)
            assert (report["num_rejected"], report["num_known"]) == (num_new, 1 - num_new)
        dataset = streamvid.open_dataset(growing.dest)
        assert dataset.manifest.version == version
        assert not (growing.dest / ".staging").exists()
    assert dataset.manifest.counts.rejections == 2 and len(delivered(growing.dest)) == 1


def test_unfinished_work_of_one_verb_refuses_the_other(growing: Growing) -> None:
    """Nothing is lost: abandoning an append keeps the dataset, and overwriting removes all of its versions."""
    growing.build(growing.rows[:NUM_OLD])
    before = tree_of(growing.dest)
    with pytest.raises(Stop):
        append(growing.dest, growing.write(growing.rows), ONE, progress=stop_at("build", 1))
    with pytest.raises(DatasetError, match="unfinished work from `streamvid append`"):
        shard(growing.source, growing.dest, shard_options(**PLAIN, overwrite=True))
    assert abandon(growing.dest, shard_options(**PLAIN)) and tree_of(growing.dest) == before
    with pytest.raises(Stop):
        shard(growing.source, growing.dest, shard_options(**PLAIN, overwrite=True), stop_at("probe", 1))
    with pytest.raises(DatasetError, match="unfinished work from `streamvid shard`"):
        growing.append(growing.rows)
    assert abandon(growing.dest, shard_options(**PLAIN)) and tree_of(growing.dest) == before
    assert growing.append(growing.rows).num_samples == NUM_GOOD - NUM_OLD
    shard(growing.source, growing.dest, shard_options(**PLAIN, overwrite=True))
    assert not (growing.dest / "versions").exists()
    assert growing.append(growing.rows).state == "already there"
    assert streamvid.open_dataset(growing.dest).manifest.version == 1


def test_tasks_share_an_append(growing: Growing, tmp_path: Path) -> None:
    """SHARD-1: two tasks and a run that publishes write the same files as a single run."""
    growing.build(growing.rows[:NUM_OLD])
    shutil.copytree(growing.dest, tmp_path / "shared")
    growing.append(growing.rows)
    for number in (0, 1, 0, 1):
        work = {"workers": 1, "cluster": {"task": f"{number}/2"}}
        report = append(tmp_path / "shared", growing.source, {"work": work})
        assert report.state == "task ended"
    assert report.remaining is None
    assert append(tmp_path / "shared", growing.source, ONE).state == "appended"
    assert tree_of(tmp_path / "shared") == tree_of(growing.dest)


def test_conditioning_inputs_are_appended(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, 4)
    source, dest = tmp_path / "metadata.jsonl", tmp_path / "ds"
    options = shard_options(buckets=OPTIONS["buckets"][:1], workers=1, media=MEDIA)
    shard(write_rows(source, rows[:2]), dest, options)
    assert append(dest, write_rows(source, rows), ONE).num_samples == 2
    assert streamvid.open_dataset(dest).manifest.media["reference"].max_items == 2
    with streamvid.VideoLoader(dest, batch_size=1, num_workers=0, num_epochs=1, media=("control",)) as loader:
        assert sorted(text for batch in loader for text in batch.text) == [f"clip {k}" for k in range(4)]


def test_clips_in_several_buckets_are_appended(growing: Growing) -> None:
    """PLAN-4: the append adds draw sets, and each clip is delivered from at most one bucket."""
    form = {"64px": {9: [0.5, 2]}, "32px": {9: [1.0, 1]}}
    config = BucketConfig(opensora=OpenSoraConfig(bucket_config=form), assign="all")
    growing.build(growing.rows[:4], buckets=None, bucket_config=config)
    growing.append(growing.rows[:6])
    dataset = streamvid.open_dataset(growing.dest)
    assert len({one.name for one in dataset.manifest.draws}) == len(dataset.manifest.draws) >= 2
    assert dataset.stored_clips == (6, 12)
    sources = {row["key"]: row["source"] for row in rows_of(growing.dest)}
    for _ in range(2):
        counts = Counter(sources[key] for key in delivered(growing.dest))
        assert max(counts.values()) == 1


def test_texts_are_appended(tmp_path: Path) -> None:
    texts = [{"caption": f"a prompt of number {number}"} for number in range(6)]
    source, dest = tmp_path / "texts.jsonl", tmp_path / "ds"
    shard(write_rows(source, texts[:4]), dest, shard_options(clips="text", workers=1))
    report = append(dest, write_rows(source, texts), ONE)
    assert (report.num_samples, report.num_known) == (2, 4)
    assert sorted(row["text"] for row in rows_of(dest)) == [row["caption"] for row in texts]
