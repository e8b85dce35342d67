"""Tests of changes to datasets: removal, compaction, merging and versions."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import streamvid
from streamvid.dataset.removed import read_removed
from streamvid.dataset.versions.moved import read_moved
from streamvid.errors import ConfigError, DatasetError, SourceError, StorageError
from streamvid.storage import LocalStore
from tests.dataset.living import Seen, check_right, clip_of, expected, files_with, seal_drawn, seal_living, seen
from tests.dataset.samples import BUCKETS
from tests.files import read_webdataset, tree_of, write_rows
from tests.servers import ProxyFactory, Rgw, S3Env, S3Server

KEYS = [f"c{clip}" for clip in range(8)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Dataset of eight samples in four shards of two buckets."""
    seal_living(tmp_path / "dataset", range(8))
    return tmp_path / "dataset"


def number(url: str | Path) -> int:
    return streamvid.versions(url).newest.number


# Removal.


def test_removed_samples_are_gone_from_the_index_at_once(root: Path) -> None:
    before = tree_of(root)
    report = streamvid.remove(root, keys=["c0", "r3", "folder-1/5.mp4", "nothing"], reason="request 7")
    assert {clip.key for clip in report.removed} == {"c0", "c3", "c5"}
    assert (report.state, report.version, report.num_left, report.unmatched) == ("removed", 2, 5, ("nothing",))
    assert seen(root) == expected([key for key in KEYS if key not in ("c0", "c3", "c5")])
    assert seen(f"{root}@1") == expected(KEYS)
    assert set(report.stored_in) == {clip.path for clip in report.removed}
    after = tree_of(root)
    assert {path for path in before if after.get(path) != before[path]} == {"manifest.json"}
    assert streamvid.versions(root).newest.note == "request 7"
    check_right(root)
    assert set(streamvid.verify_dataset(root, deep=True).removed_in) == set(report.stored_in)


def test_removing_again_changes_nothing(root: Path) -> None:
    streamvid.remove(root, keys=["c0"])
    before = tree_of(root)
    report = streamvid.remove(root, keys=["c0", "c9"])
    assert (report.state, report.version, report.num_already_removed, report.num_unmatched) == (
        "already removed",
        None,
        1,
        1,
    )
    assert streamvid.remove(root, source="folder-9/*").state == "nothing selected"
    assert tree_of(root) == before


@pytest.mark.parametrize(
    ("selection", "gone"),
    [({"where": "score >= 6"}, {"c6", "c7"}), ({"source": "folder-1/*"}, {"c1", "c3", "c5", "c7"})],
)
def test_samples_are_selected_by_a_condition_or_a_pattern(
    root: Path, selection: dict[str, str], gone: set[str]
) -> None:
    shown = streamvid.remove(root, dry_run=True, **selection)
    assert {clip.key for clip in shown.removed} == gone and number(root) == 1
    streamvid.remove(root, **selection)
    assert seen(root) == expected([key for key in KEYS if key not in gone])


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".jsonl", ".parquet"])
def test_keys_are_read_from_a_file(root: Path, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"keys{suffix}"
    if suffix == ".txt":
        file.write_text("c1\n\n  r2 \n")
    else:
        write_rows(file, [{"record_key": "r1", "why": "a"}, {"record_key": "r2", "why": "b"}])
    assert {clip.key for clip in streamvid.remove(root, keys=file).removed} == {"c1", "c2"}


def test_an_invalid_selection_is_refused(root: Path, tmp_path: Path) -> None:
    before = tree_of(root)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "other.csv").write_text("name\nx\n")
    with pytest.raises(ConfigError, match="exactly one"):
        streamvid.remove(root)
    with pytest.raises(ConfigError, match="exactly one"):
        streamvid.remove(root, keys=["c0"], where="score > 1")
    with pytest.raises(ConfigError, match="scor"):
        streamvid.remove(root, where="scor > 1")
    with pytest.raises(SourceError, match="contains no keys"):
        streamvid.remove(root, keys=tmp_path / "empty.txt")
    with pytest.raises(ConfigError, match="no key column"):
        streamvid.remove(root, keys=tmp_path / "other.csv")
    with pytest.raises(ConfigError, match="only the newest version"):
        streamvid.remove(f"{root}@1", keys=["c0"])
    assert tree_of(root) == before


def test_a_dataset_can_lose_all_samples(root: Path) -> None:
    streamvid.remove(root, where="score >= 0")
    assert seen(root) == {} and streamvid.open_dataset(root).samples_table().num_rows == 0
    check_right(root)
    streamvid.compact(root)
    check_right(root)
    assert not [path for path in tree_of(root) if path.endswith(".tar")]


def test_other_samples_with_the_same_clip_are_named(tmp_path: Path) -> None:
    """A takedown of a clip must account for its copies."""
    seal_drawn(tmp_path / "d", range(2))
    shutil.copytree(tmp_path / "d", tmp_path / "e")
    report = streamvid.remove(tmp_path / "d", keys=["c0-b0"])
    assert report.num_same_clips == 0  # copies in other buckets are removed too
    assert {clip.key for clip in report.removed} == {"c0-b0", "c0-b1"}


# Takedown: no byte remains.


def test_after_a_compaction_no_file_contains_the_bytes(root: Path, tmp_path: Path) -> None:
    """The bytes are also removed from a tar of an earlier version and from a tar that an earlier compaction wrote."""
    cache = tmp_path / "cache"
    storage: dict[str, Any] = {"cache_dir": str(cache), "cache_bytes": 10**9}
    streamvid.compact(root)  # merges all shards of a bucket; the old shards stay for version 1
    streamvid.remove(root, keys=["c0", "c5"])
    assert len(files_with(root, clip_of("c0"))) == 2
    report = streamvid.compact(root, storage=storage)
    assert report.deleted and report.has_dropped_cache
    for key in ("c0", "c5"):
        assert files_with(tmp_path, clip_of(key)) == []
    assert seen(root) == expected([key for key in KEYS if key not in ("c0", "c5")])
    check_right(root)
    assert streamvid.verify_dataset(root, deep=True).removed_in == ()
    old = streamvid.verify_dataset(f"{root}@1", deep=True)
    assert old.is_right and (old.num_removed, old.num_moved) == (2, 2)  # two other tars remain
    again = streamvid.compact(root)
    assert (again.state, again.deleted, number(root)) == ("nothing to do", (), 4)


def test_the_cache_of_a_machine_loses_the_bytes(
    root: Path, tmp_path: Path, moto_server: S3Server, s3_env: S3Env
) -> None:
    s3_env(moto_server)
    bucket = moto_server.new_bucket()
    moto_server.upload_folder(root, bucket, "ds/")
    url, cache = f"s3://{bucket}/ds", tmp_path / "cache"
    storage = {"cache_dir": str(cache), "cache_bytes": 10**9}
    dataset = streamvid.open_dataset(url, storage=storage)
    for shard in dataset.shards:  # as a loader reads tars
        from streamvid.storage import read_content

        data = bytearray(shard.num_bytes)
        read_content(dataset.store, shard.path, (shard.sha256, shard.num_bytes), [(0, memoryview(data))])
    assert files_with(cache, clip_of("c0"))
    streamvid.remove(url, keys=["c0"])
    streamvid.compact(url)
    assert files_with(cache, clip_of("c0"))
    streamvid.compact(url, cache_only=True, storage=storage)
    assert not files_with(cache, clip_of("c0"))
    assert not [path for path, data in moto_server.tree(bucket, "ds").items() if clip_of("c0") in data]
    assert seen(url) == expected(KEYS[1:])
    check_right(url)


# Compaction.


def test_small_shards_become_one_per_bucket(root: Path) -> None:
    shown = streamvid.compact(root, dry_run=True)
    assert (shown.num_shards_before, shown.num_shards, number(root)) == (4, 2, 1)
    report = streamvid.compact(root)
    assert (report.num_shards_before, report.num_shards, report.num_rewritten) == (4, 2, 4)
    assert seen(root) == seen(f"{root}@1") == expected(KEYS)
    for version in (1, 2):
        check_right(f"{root}@{version}")
    moved = read_moved(LocalStore(root), streamvid.open_dataset(root).manifest.files.moved)
    assert {row.path for row in moved} == {shard.path for shard in streamvid.open_dataset(f"{root}@1").shards}
    assert {row.new_path for row in moved} == {shard.path for shard in streamvid.open_dataset(root).shards}
    assert streamvid.compact(root).state == "nothing to do"


def test_shards_of_half_the_target_stay(root: Path) -> None:
    assert streamvid.compact(root, shard_size_bytes=10_240).state == "nothing to do"
    with pytest.raises(ConfigError, match="shard_size_bytes=5"):
        streamvid.compact(root, shard_size_bytes=5)


def test_other_readers_read_every_version(root: Path) -> None:
    """webdataset reads the tars, and Megatron-Energon's files match them."""
    streamvid.remove(root, keys=["c0"])
    streamvid.compact(root)
    for version in (1, 3):
        for shard in streamvid.open_dataset(f"{root}@{version}").shards:
            if not (root / shard.path).exists():
                continue  # deleted by the compaction
            rows = streamvid.open_dataset(f"{root}@{version}").samples(shard).to_pylist()
            read = read_webdataset(root / shard.path)
            assert [sample["__key__"] for sample in read] == [row["key"] for row in rows]
            assert all(sample["mp4"] == clip_of(sample["__key__"]) for sample in read)
            offsets = (root / f"{shard.path}.idx").read_bytes()
            assert len(offsets) == 8 * (len(rows) + 1)
    info = json.loads((root / ".nv-meta" / ".info.json").read_bytes())
    counts = {shard.path: shard.num_samples for shard in streamvid.open_dataset(root).shards}
    assert info["shard_counts"] == counts


# Draw sets.


def test_draw_sets_stay_consistent(tmp_path: Path) -> None:
    """A clip leaves all buckets of its set, an emptied shard splits the set, and shards are rewritten one to one."""
    root = tmp_path / "d"
    seal_drawn(root, range(6))
    streamvid.remove(root, keys=["c2-b0", "r3", "c4-b1"])  # all samples of the second shard, one of the third
    dataset = streamvid.open_dataset(root)
    assert [(one.num_shards, [first for _, _, first in one.buckets]) for one in dataset.manifest.draws] == [
        (1, [0, 0]),
        (1, [2, 2]),
    ]
    left = [f"c{clip}-b{bucket}" for bucket in (0, 1) for clip in (0, 1, 5)]
    assert seen(root) == expected(left)
    streamvid.compact(root)
    assert seen(root) == expected(left)
    assert [shard.number for shard in streamvid.open_dataset(root).shards] == [0, 2, 0, 2]
    check_right(root)
    seal_drawn(tmp_path / "e", range(10, 13))
    streamvid.merge(root, tmp_path / "e")
    added = [f"c{clip}-b{bucket}" for bucket in (0, 1) for clip in (10, 11, 12)]
    assert seen(root) == expected([*left, *added])
    assert [one.num_shards for one in streamvid.open_dataset(root).manifest.draws] == [1, 1, 2]
    check_right(root)


# Merging.


def test_a_new_dataset_is_merged_from_others(root: Path, tmp_path: Path) -> None:
    seal_living(tmp_path / "other", range(8, 13))
    streamvid.annotate(
        tmp_path / "other", write_rows(tmp_path / "a.csv", [{"key": "c8", "tag": "x", "score": 80}]), overwrite=True
    )
    for _ in range(2):
        report = streamvid.merge(tmp_path / "all", root, tmp_path / "other", journal=tmp_path / "j")
    assert (report.state, number(tmp_path / "all")) == ("already merged", 2)
    rows = seen(tmp_path / "all", ("score", "tag"))
    assert {key: row.columns["tag"] for key, row in rows.items() if row.columns["tag"]} == {"c8": "x"}
    assert rows["c8"].columns["score"] == 80 and rows["c9"].columns["score"] == 9
    assert {key: row.clip for key, row in rows.items()} == {f"c{n}": clip_of(f"c{n}") for n in range(13)}
    check_right(tmp_path / "all")
    tar = next(path for path in (tmp_path / "all").rglob("*.tar") if clip_of("c8") in path.read_bytes())
    assert tar.stat().st_nlink == 2  # a hard link, not a copy
    # Merged datasets stay known after the versions that merged them have been deleted.
    assert streamvid.compact(tmp_path / "all", expire=0).expired.versions == (1, 2)
    assert streamvid.merge(tmp_path / "all", root, tmp_path / "other").state == "already merged"


@pytest.mark.parametrize("on_duplicate", ["first", "last"])
def test_duplicates_are_resolved_as_configured(root: Path, tmp_path: Path, on_duplicate: Any) -> None:
    seal_living(tmp_path / "other", [6, 7, 8], size=3)
    streamvid.annotate(tmp_path / "other", write_rows(tmp_path / "a.csv", [{"key": "c6", "score": 66}]), overwrite=True)
    with pytest.raises(DatasetError, match="2 source files.*r6, r7"):
        streamvid.merge(root, tmp_path / "other")
    report = streamvid.merge(root, tmp_path / "other", on_duplicate=on_duplicate)
    is_last = on_duplicate == "last"
    assert (report.num_duplicates, report.num_replaced, report.num_samples) == (0 if is_last else 2, 2 * is_last, 9)
    assert seen(root)["c6"].columns["score"] == (66 if is_last else 6)
    assert set(seen(root)) == {f"c{n}" for n in range(9)}
    check_right(root)
    streamvid.remove(root, keys=["c6"])
    streamvid.compact(root)
    assert files_with(root, clip_of("c6")) == []


def test_a_merge_starts_from_the_given_version(root: Path, tmp_path: Path) -> None:
    before = set(seen(root))
    streamvid.remove(root, keys=["c7"])
    assert streamvid.merge(tmp_path / "new", f"{root}@1").num_samples == len(before)
    assert set(seen(tmp_path / "new")) == before


def test_removed_samples_do_not_come_back(root: Path, tmp_path: Path) -> None:
    streamvid.remove(root, keys=["c7"])
    seal_living(tmp_path / "other", [7, 8, 9])
    streamvid.remove(tmp_path / "other", keys=["c9"])
    report = streamvid.merge(root, tmp_path / "other", on_duplicate="first")
    assert (report.num_kept_out, report.num_added) == (1, 1)
    assert set(seen(root)) == {*KEYS[:7], "c8"}
    files = streamvid.open_dataset(root).manifest.files
    assert set(read_removed(LocalStore(root), files.removed).column("key").to_pylist()) == {"c7", "c9"}
    streamvid.compact(root)
    assert files_with(root, clip_of("c7")) == files_with(root, clip_of("c9")) == []
    check_right(root)


def test_incompatible_datasets_are_refused(root: Path, tmp_path: Path) -> None:
    seal_living(tmp_path / "other", [8])
    before = tree_of(root)
    streamvid.annotate(tmp_path / "other", write_rows(tmp_path / "a.csv", [{"key": "c8", "tag": 1}]))
    streamvid.annotate(root, write_rows(tmp_path / "b.csv", [{"key": "c0", "tag": "text"}]))
    with pytest.raises(DatasetError, match="type of column 'tag' is string.*int64"):
        streamvid.merge(root, tmp_path / "other")
    with pytest.raises(ConfigError, match="on_duplicate='newest'"):
        streamvid.merge(root, tmp_path / "other", on_duplicate="newest")  # type: ignore[arg-type]
    assert {path: data for path, data in tree_of(root).items() if path.endswith(".tar")} == {
        path: data for path, data in before.items() if path.endswith(".tar")
    }


# Versions.


def test_versions_are_listed_named_and_opened(root: Path) -> None:
    streamvid.remove(root, keys=["c0"], reason="first")
    streamvid.tag(root, "v1", 1)
    streamvid.tag(root, "v1", 1)  # repeating it publishes nothing
    report = streamvid.tag(root, "now")
    assert [(info.number, info.verb, info.tags) for info in report.versions] == [
        (4, "tag", ()),
        (3, "tag", ("now",)),
        (2, "remove", ()),
        (1, "shard", ("v1",)),
    ]
    assert [info.num_samples for info in report.versions] == [7, 7, 7, 8]
    assert all(info.modified > 1.6e9 for info in report.versions)
    assert seen(f"{root}@v1") == expected(KEYS) and seen(f"{root}@latest") == expected(KEYS[1:])
    with pytest.raises(ConfigError, match=r"tag 'v1' already points to version 1 .*--move.*version 4"):
        streamvid.tag(root, "v1")
    assert streamvid.tag(root, "v1", move=True).versions[1].tags == ("v1",)
    assert number(f"{root}") == 5
    streamvid.tag(root, "v1", None)
    with pytest.raises(ConfigError, match="has no version 'v1'"):
        streamvid.open_dataset(f"{root}@v1")
    with pytest.raises(ConfigError, match="no tag named 'v1'"):
        streamvid.tag(root, "v1", None)
    for name in ("7", "latest", "a b", ""):
        with pytest.raises(ConfigError, match="tag"):
            streamvid.tag(root, name)


def test_a_folder_named_like_a_version_is_ambiguous(root: Path) -> None:
    """Neither dataset is ever opened in place of the other."""
    streamvid.remove(root, keys=["c0"])
    folder = Path(shutil.copytree(root, f"{root}@1"))
    streamvid.remove(f"{folder}/", keys=["c1"])
    for url in (folder, str(folder)):
        with pytest.raises(ConfigError, match=r"dataset@1' is ambiguous.*dataset@1/' for the folder"):
            streamvid.open_dataset(url)
    assert seen(f"{folder}/") == expected(KEYS[2:]) and seen(root) == expected(KEYS[1:])


def test_a_dataset_that_cannot_be_written_is_read_only(root: Path) -> None:
    """The error names the cause, and a dry run works."""
    with tempfile.TemporaryDirectory() as name:  # other users have no access to pytest's folders
        copy = shutil.copytree(root, Path(name) / "ds")
        Path(name).chmod(0o755)
        for path in (copy, *copy.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        user = os.geteuid()
        os.seteuid(user or 65534)
        try:
            with pytest.raises(StorageError, match="ds is read-only for this process"):
                streamvid.remove(copy, keys=["c0"])
            assert streamvid.remove(copy, keys=["c0"], dry_run=True).state == "would be removed"
        finally:
            os.seteuid(user)
            for path in (copy, *copy.rglob("*")):
                path.chmod(0o755)


def test_a_bucket_that_may_only_be_read_is_read_only(root: Path, rgw: Rgw, s3_env: S3Env) -> None:
    bucket = rgw.new_bucket()
    rgw.upload_folder(root, bucket, "ds/")
    policy = {"Principal": "*", "Effect": "Allow", "Action": ["s3:GetObject", "s3:ListBucket"]}
    policy["Resource"] = [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]
    rgw.client.put_bucket_policy(Bucket=bucket, Policy=json.dumps({"Version": "2012-10-17", "Statement": [policy]}))
    s3_env(rgw.other)
    assert seen(f"s3://{bucket}/ds") == expected(KEYS)
    with pytest.raises(StorageError, match=f"s3://{bucket}/ds is read-only for this process"):
        streamvid.remove(f"s3://{bucket}/ds", keys=["c0"])


def test_views_are_valid_conditions(root: Path) -> None:
    with pytest.raises(ConfigError, match="scor"):
        streamvid.view(root, "hq", "scor > 5")
    report = streamvid.view(root, "hq", "score > 5")
    assert report.views == {"hq": "score > 5"} and report.newest.verb == "view"
    assert streamvid.open_dataset(f"{root}#hq").where == "score > 5"
    assert streamvid.view(root, "hq", None).views == {}


def test_old_versions_expire_with_their_files(root: Path) -> None:
    """Tagged versions stay complete, and no file that a kept version lists is deleted."""
    streamvid.tag(root, "keep", 1)
    streamvid.compact(root)
    streamvid.annotate(root, write_rows(root.parent / "a.csv", [{"key": "c1", "motion": 1}]))
    shown = streamvid.compact(root, expire=0, dry_run=True).expired
    report = streamvid.compact(root, expire=0).expired
    assert shown == report and report.versions == (2, 3)
    assert [info.number for info in streamvid.versions(root).versions] == [4, 1]
    for version in ("keep", "latest"):
        assert set(seen(f"{root}@{version}")) == set(KEYS)
        check_right(f"{root}@{version}")
    with pytest.raises(DatasetError, match="no version 2"):
        streamvid.open_dataset(f"{root}@2")
    streamvid.tag(root, "keep", None)
    streamvid.compact(root, expire="0s")
    check_right(root)
    assert len([path for path in tree_of(root) if path.endswith(".tar")]) == 2


def test_unknown_files_are_not_deleted_at_once(root: Path) -> None:
    """A file that no version lists may belong to a running writer, unless it is old."""
    (root / "index" / "columns-00000-0123456789ab.parquet").write_bytes(b"new")
    old = root / "shards" / "lost.tar"
    old.write_bytes(b"old")
    import os

    os.utime(old, (1, 1))
    (root / ".staging" / "plan").mkdir(parents=True)
    (root / ".staging" / "plan" / "marker").write_bytes(b"")
    report = streamvid.compact(root, expire="1d").expired
    assert report.has_unfinished_build and not report.files and old.exists()
    shutil.rmtree(root / ".staging")
    assert streamvid.compact(root, expire="1d").expired.files == ("shards/lost.tar",)
    with pytest.raises(ConfigError, match="expire='1 year'"):
        streamvid.compact(root, expire="1 year")


# Any sequence of changes.

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("remove"), st.sets(st.integers(0, 15), min_size=1, max_size=3)),
        st.tuples(st.just("annotate"), st.sets(st.integers(0, 15), min_size=1, max_size=4)),
        st.tuples(st.just("compact"), st.sampled_from([set(), {1}])),
        st.tuples(st.just("merge"), st.sets(st.integers(4, 15), min_size=1, max_size=5)),
    ),
    min_size=1,
    max_size=4,
)


class Model:
    """Expected contents of a dataset after changes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root, self.step = folder, folder / "d", 0
        seal_living(self.root, range(8))
        self.rows = {key: dict(seen.columns) | {"motion": None} for key, seen in expected(KEYS).items()}
        self.removed: set[str] = set()

    def remove(self, clips: set[int]) -> None:
        keys = {f"c{clip}" for clip in clips}
        streamvid.remove(self.root, keys=sorted(keys))
        self.removed |= keys & self.rows.keys()
        self.rows = {key: row for key, row in self.rows.items() if key not in keys}

    def annotate(self, clips: set[int]) -> None:
        keys = [f"c{clip}" for clip in sorted(clips) if f"c{clip}" in self.rows]
        if keys:
            rows = [{"key": key, "motion": self.step} for key in keys]
            streamvid.annotate(self.root, write_rows(self.folder / f"{self.step}.csv", rows), overwrite=True)
            for key in keys:
                self.rows[key]["motion"] = self.step

    def compact(self, clips: set[int]) -> None:
        streamvid.compact(self.root, shard_size_bytes=30_000 if clips else None)
        for key in self.removed:
            assert files_with(self.root, clip_of(key)) == []

    def merge(self, clips: set[int]) -> None:
        source = self.folder / f"source-{self.step}"
        seal_living(source, sorted(clips))
        streamvid.merge(self.root, source, on_duplicate="first")
        shutil.rmtree(source)
        for key in {f"c{clip}" for clip in clips} - self.rows.keys() - self.removed:
            self.rows[key] = {"score": float(key[1:]), "motion": None}

    def check(self) -> None:
        def wanted(key: str) -> Seen:
            return Seen(clip_of(key), f"words {key}", self.rows[key])

        found = seen(self.root, ("score", "motion"))
        found = {key: Seen(one.clip, one.text, {"motion": None} | dict(one.columns)) for key, one in found.items()}
        assert found == {key: wanted(key) for key in self.rows}
        check_right(self.root)
        for version in streamvid.versions(self.root).versions:
            assert streamvid.verify_dataset(f"{self.root}@{version.number}").is_right


def run_steps(steps: list[tuple[str, set[int]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Model(Path(folder))
        for verb, clips in steps:
            model.step += 1
            change: Callable[[set[int]], None] = getattr(model, verb)
            change(clips)
            model.check()


@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_any_sequence_of_changes_keeps_the_samples(steps: list[tuple[str, set[int]]]) -> None:
    """Each sample that was not removed keeps its values and bytes in every version that contains it."""
    run_steps(steps)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=2000, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_many_sequences_of_changes_keep_the_samples(steps: list[tuple[str, set[int]]]) -> None:
    run_steps(steps)


# Two writers.


def race(url: str | Path, rounds: int) -> None:
    """Run two writers at once; each change must be in the newest version, or its writer must get an error."""
    done: set[str] = set()

    def work(name: str) -> None:
        try:
            streamvid.tag(url, name, 1)
            done.add(name)
        except DatasetError as error:
            assert "another" in str(error)

    for turn in range(rounds):
        threads = [threading.Thread(target=work, args=(f"t{turn}-{writer}",)) for writer in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    tags = {tag for info in streamvid.versions(url).versions for tag in info.tags}
    assert tags == done and len(done) >= rounds // 2
    assert number(url) == 1 + len(done)


def test_concurrent_writers_lose_no_change(root: Path) -> None:
    race(root, 5)
    check_right(root)


@pytest.mark.slow
def test_concurrent_writers_on_ceph_lose_no_change(root: Path, rgw: Rgw, s3_env: S3Env) -> None:
    s3_env(rgw)
    bucket = rgw.new_bucket()
    rgw.upload_folder(root, bucket, "ds/")
    race(f"s3://{bucket}/ds", 50)
    check_right(f"s3://{bucket}/ds")


@pytest.mark.parametrize("kind", ["moto_server", "rgw"])
@pytest.mark.parametrize("refused", ["", "x-amz-copy-source"])
def test_a_merge_within_a_store_does_not_download_tars(
    kind: str,
    refused: str,
    root: Path,
    tmp_path: Path,
    s3_env: S3Env,
    fault_proxy: ProxyFactory,
    request: pytest.FixtureRequest,
) -> None:
    """If the store cannot copy, the tars are downloaded and uploaded, with the same result."""
    server: S3Server = request.getfixturevalue(kind)
    proxy = fault_proxy(server, unknown_header=refused)
    s3_env(server.behind(proxy))
    bucket, other = server.new_bucket(), tmp_path / "other"
    seal_living(other, range(20, 140), size=40)
    server.upload_folder(root, bucket, "ds/")
    server.upload_folder(other, bucket, "other/")
    report = streamvid.merge(f"s3://{bucket}/ds", f"s3://{bucket}/other")
    counts = proxy.counts()
    is_copied = max(counts.bytes_up, counts.bytes_down) < report.num_bytes // 2
    assert (is_copied, "unknown_header" in counts.faults) == (not refused, bool(refused))
    streamvid.merge(root, other)
    assert server.tree(bucket, "ds") == tree_of(root)
    check_right(f"s3://{bucket}/ds")


def test_everything_works_in_a_bucket(root: Path, tmp_path: Path, moto_server: S3Server, s3_env: S3Env) -> None:
    """FETCH-2: the same changes produce the same files in a folder and in an object store."""
    s3_env(moto_server)
    bucket = moto_server.new_bucket()
    moto_server.upload_folder(root, bucket, "ds/")
    seal_living(tmp_path / "other", [7, 8, 9])
    for url in (str(root), f"s3://{bucket}/ds"):
        streamvid.remove(url, keys=["c0"])
        streamvid.merge(url, tmp_path / "other", on_duplicate="last")
        streamvid.compact(url, temp_dir=tmp_path)
        assert all(info.modified > 1.6e9 for info in streamvid.versions(url).versions)
        check_right(url)
    assert moto_server.tree(bucket, "ds") == tree_of(root)
    assert streamvid.compact(f"s3://{bucket}/ds", expire=0).expired.versions == (1, 2, 3)
    check_right(f"s3://{bucket}/ds")
    assert BUCKETS[0].id in {shard.bucket_id for shard in streamvid.open_dataset(root).shards}
