"""Tests of `annotate`, which adds captions and columns to a sealed dataset without changing its tars and index."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import streamvid
from streamvid.dataset.filter.filter import count_matches, parse_filter
from streamvid.dataset.manifest import content_digest
from streamvid.dataset.sealed_json import MANIFEST, manifest_checksum
from streamvid.errors import ConfigError, DatasetError, IntegrityError, SealedError, SourceError
from tests.dataset.frozen import DATASETS, FROZEN
from tests.dataset.samples import edit_manifest
from tests.dataset.whole import flip, seal_whole
from tests.files import tree_of, write_rows
from tests.processes import run_python
from tests.servers import S3Env, S3Server

KEYS = [f"s{shard}-{index}" for shard in range(6) for index in range(3)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Dataset of six shards of three samples each, with a column `score`."""
    seal_whole(tmp_path / "dataset")
    return tmp_path / "dataset"


def rows_of(root: Path) -> dict[str, dict[str, Any]]:
    return {row["key"]: row for row in streamvid.open_dataset(root).samples_table().to_pylist()}


ROWS = [
    {"key": key, "motion": number / 4, "people": number, "is_day": number % 2 == 0, "place": f"007-{number}"}
    for number, key in enumerate(KEYS[:10])
]


@pytest.mark.parametrize("suffix", [".csv", ".json", ".jsonl", ".parquet"])
def test_columns_of_every_format_are_added(root: Path, tmp_path: Path, suffix: str) -> None:
    """Format 1.3: added columns are aligned row by row and typed as by the sharder; only the manifest is replaced."""
    before, old = tree_of(root), streamvid.open_dataset(root).manifest
    report = streamvid.annotate(root, write_rows(tmp_path / f"a{suffix}", ROWS))
    assert (report.state, report.num_annotated, report.num_samples, report.num_unmatched) == ("annotated", 10, 18, 0)
    after, dataset = tree_of(root), streamvid.open_dataset(root)
    assert {path: data for path, data in after.items() if path in before and path != MANIFEST} == {
        path: data for path, data in before.items() if path != MANIFEST
    }
    versions = ["versions/manifest-000001.json", "versions/manifest-000002.json"]
    assert sorted(after.keys() - before.keys()) == [dataset.manifest.columns[0].known_files[0].path, *versions]
    assert (after[versions[0]], after[versions[1]]) == (before[MANIFEST], after[MANIFEST])
    assert dataset.manifest.fingerprints.plan == old.fingerprints.plan
    assert dataset.manifest.fingerprints.content == report.content_fingerprint != old.fingerprints.content
    types = {name: str(dataset.samples_schema.field(f"user.{name}").type) for name in ROWS[0] if name != "key"}
    assert types == {"motion": "double", "people": "int64", "is_day": "bool", "place": "string"}
    assert set(dataset.user_columns) >= set(types) and dataset.is_numeric("user.motion")
    for key, row in rows_of(root).items():
        said = {name: row[f"user.{name}"] for name in types}
        expected = next((r for r in ROWS if r["key"] == key), {})
        assert said == {name: expected.get(name) for name in types}
    assert streamvid.verify_dataset(root, deep=True).is_right


def test_shards_and_the_whole_table_agree(root: Path, tmp_path: Path) -> None:
    streamvid.annotate(root, write_rows(tmp_path / "a.csv", ROWS))
    dataset = streamvid.open_dataset(root)
    whole = dataset.samples_table()
    parts = pa.concat_tables([dataset.samples(shard) for shard in dataset.shards])
    assert parts.to_pylist() == whole.to_pylist() and parts.column_names == whole.column_names
    for columns in (["user.motion"], ["user.motion", "key", "user.score"], ["key"], []):
        shard = dataset.shards[1]
        assert (
            dataset.samples(shard, columns).select(columns).to_pylist()
            == [{name: row[name] for name in columns} for row in whole.slice(3, 3).to_pylist()]
            or not columns
        )


def test_a_caption_column_may_be_an_ordinary_column(root: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.csv", [{"key": KEYS[0], "caption": "one"}])
    report = streamvid.annotate(root, file, caption_column="")
    assert not report.has_captions and report.columns == ("caption",)


def test_captions_change_where_the_file_has_one(root: Path, tmp_path: Path) -> None:
    """Samples without a row or with an empty cell keep their captions; caption checksums change with the captions."""
    file = write_rows(
        tmp_path / "a.jsonl",
        [
            {"key": KEYS[0], "caption": "one"},
            {"key": KEYS[1], "caption": ["first", {"text": "second", "weight": 3}]},
            {"key": KEYS[2], "caption": None},
            {"key": KEYS[3], "caption": [["a", 1.0], ["b", 0.5]]},
        ],
    )
    before = rows_of(root)
    report = streamvid.annotate(root, file)  # a column named "caption" holds captions
    assert report.has_captions and report.columns == ()
    after = rows_of(root)
    assert [after[key]["text"] for key in KEYS[:5]] == ["one", "first", "words s0-2", "a", "words s1-1"]
    assert json.loads(after[KEYS[1]]["captions"]) == [["first", 1.0], ["second", 3.0]]
    assert json.loads(after[KEYS[3]]["captions"]) == [["a", 1.0], ["b", 0.5]]
    for key in KEYS[:5]:
        assert after[key]["text_sha256"] == hashlib.sha256(after[key]["text"].encode()).digest()
    same = [name for name in before[KEYS[0]] if name not in ("text", "text_sha256", "captions")]
    assert all(before[key][name] == after[key][name] for key in KEYS for name in same)
    # One caption replaces several, which are removed.
    streamvid.annotate(root, write_rows(tmp_path / "b.csv", [{"key": KEYS[1], "t": "12"}]), caption_column="t")
    row = rows_of(root)[KEYS[1]]
    assert (row["text"], row["captions"]) == ("12", None)
    assert streamvid.verify_dataset(root, deep=True).is_right


def test_a_row_may_apply_to_all_samples_of_a_source(root: Path, tmp_path: Path) -> None:
    report = streamvid.annotate(root, write_rows(tmp_path / "a.csv", [{"path": "a.mp4", "motion": 1.5}]))
    assert report.num_annotated == 18 and report.num_rows == 1
    assert {row["user.motion"] for row in rows_of(root).values()} == {1.5}


def test_existing_values_change_only_with_overwrite(root: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.csv", [{"key": KEYS[0], "score": 7}, {"key": KEYS[1], "score": ""}])
    before = tree_of(root)
    with pytest.raises(ConfigError, match="already has a 'score' column.*overwrite"):
        streamvid.annotate(root, file)
    assert tree_of(root) == before
    streamvid.annotate(root, file, overwrite=True)
    rows = rows_of(root)
    assert [rows[key]["user.score"] for key in KEYS[:3]] == [7.0, 1.0, 1.0]
    assert streamvid.open_dataset(root).samples_schema.names.count("user.score") == 1
    with pytest.raises(ConfigError, match="'score' has type double.*and type string in"):
        streamvid.annotate(root, write_rows(tmp_path / "b.csv", [{"key": KEYS[0], "score": "high"}]), overwrite=True)


def test_later_annotations_win_and_repeating_one_changes_nothing(root: Path, tmp_path: Path) -> None:
    first = write_rows(tmp_path / "a.csv", [{"key": key, "motion": 1} for key in KEYS])
    second = write_rows(tmp_path / "b.csv", [{"key": key, "motion": 2} for key in KEYS[:4]])
    streamvid.annotate(root, first)
    done = tree_of(root)
    again = streamvid.annotate(root, first)
    assert (again.state, again.num_annotated, tree_of(root)) == ("already annotated", 18, done)
    streamvid.annotate(root, second, overwrite=True)
    assert [row["user.motion"] for row in rows_of(root).values()] == [2] * 4 + [1] * 14
    assert len(streamvid.open_dataset(root).manifest.columns) == 2
    assert streamvid.verify_dataset(root, deep=True).is_right


def test_rows_that_match_no_sample_are_reported(root: Path, tmp_path: Path) -> None:
    rows = [{"key": KEYS[5], "motion": 1}, {"key": "gone-1", "motion": 2}, {"key": "gone-2", "motion": 3}]
    report = streamvid.annotate(root, write_rows(tmp_path / "a.csv", rows))
    assert (report.num_rows, report.num_annotated, report.num_unmatched) == (3, 1, 2)
    assert report.unmatched == ("gone-1", "gone-2")


@pytest.mark.parametrize(
    ("text", "options", "error", "says"),
    [
        ("key,motion\nx,1\n", {}, SourceError, "no row matches a sample.*'x'.*'s0-0'"),
        ("kye,motion\ns0-0,1\n", {}, ConfigError, "no key column.*did you mean 'kye'"),
        ("key,motion\ns0-0,1\n", {"columns": ["moton"]}, ConfigError, "columns: 'moton'.*did you mean 'motion'"),
        ("key,caption\ns0-0,1\n", {"caption_column": "captoin"}, ConfigError, "did you mean 'caption'"),
        ("key,motion\ns0-0,1\n", {"key_column": "keys"}, ConfigError, "key_column='keys'.*did you mean 'key'"),
        ("key,motion\ns0-0,1\ns0-0,2\n", {}, SourceError, "more than one row for 's0-0'"),
        ("key\ns0-0\n", {}, ConfigError, "no columns to add"),
        ("key,a,a\ns0-0,1,2\n", {}, SourceError, "duplicate column names"),
        ("key,a\ns0-0\n", {}, SourceError, "row 0: line 2 has 1 fields"),
        ("key,t\ns0-0,a\0b\n", {"caption_column": "t"}, SourceError, "NUL"),
        ('key,t\ns0-0,"[""\\ud800"", ""b""]"\n', {"caption_column": "t"}, SourceError, "not valid UTF-8"),
        ("", {}, SourceError, "has no columns: it is empty"),
    ],
)
def test_invalid_input_is_refused_before_anything_is_written(
    root: Path, tmp_path: Path, text: str, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    before = tree_of(root)
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(error, match=says):
        streamvid.annotate(root, tmp_path / "a.csv", **options)
    assert tree_of(root) == before


def test_filter_counts_use_the_current_values(root: Path, tmp_path: Path) -> None:
    """PLAN-6: counts are cached by content fingerprint, which an annotation changes."""

    def counted() -> int:
        dataset = streamvid.open_dataset(root)
        found = count_matches(dataset, dataset.shards, parse_filter("score > 5", dataset), tmp_path / "cache")
        return int(found.sum())

    assert counted() == 0
    streamvid.annotate(
        root, write_rows(tmp_path / "a.csv", [{"key": key, "score": 9} for key in KEYS[:4]]), overwrite=True
    )
    assert counted() == 4


def test_the_sealed_index_does_not_change(root: Path, tmp_path: Path) -> None:
    """SHARD-2: the manifest lists the new files, and the fingerprints `plan` and `base` do not change."""
    before = json.loads((root / MANIFEST).read_bytes())
    streamvid.annotate(root, write_rows(tmp_path / "a.csv", ROWS))
    after = json.loads((root / MANIFEST).read_bytes())
    assert after["fingerprints"] | {"content": ""} == before["fingerprints"] | {"content": ""}
    assert after["fingerprints"]["content"] != before["fingerprints"]["content"]
    assert after["files"]["samples"] == before["files"]["samples"]
    (group,) = after["columns"]
    assert set(group["files"]) <= {file["path"] for file in after["files"]["other"]}
    assert after["manifest_sha256"] == manifest_checksum(after)


@pytest.mark.parametrize("name", DATASETS)
def test_every_kind_of_dataset_can_be_annotated(tmp_path: Path, name: str) -> None:
    shutil.copytree(FROZEN / name, tmp_path / "dataset")
    root = tmp_path / "dataset"
    rows = rows_of(root)
    first = next(iter(rows))
    changes = [{"source": rows[first]["source"], "speed": 3, "t": "new"}]
    streamvid.annotate(root, write_rows(tmp_path / "a.csv", changes), caption_column="t")
    rows = rows_of(root)
    assert (rows[first]["user.speed"], rows[first]["text"]) == (3, "new")
    assert None in {row["user.speed"] for row in rows.values()}
    assert streamvid.verify_dataset(root, deep=True).is_right


def test_copies_take_later_columns_along(root: Path, tmp_path: Path) -> None:
    """Copying again adds later columns; columns that only the copy has are never lost silently."""
    copy = tmp_path / "copy"
    streamvid.copy_dataset(root, copy, journal=tmp_path / "j")
    streamvid.annotate(root, write_rows(tmp_path / "a.csv", ROWS))
    report = streamvid.copy_dataset(root, copy, journal=tmp_path / "j")
    assert (report.state, report.num_copied) == ("repaired", 2)  # the columns file and the manifest
    assert rows_of(copy) == rows_of(root) and streamvid.verify_dataset(copy, deep=True).is_right
    assert streamvid.copy_dataset(root, copy, journal=tmp_path / "j").state == "already there"
    streamvid.annotate(copy, write_rows(tmp_path / "b.csv", [{"key": KEYS[0], "more": 1}]))
    with pytest.raises(SealedError, match="different columns"):
        streamvid.copy_dataset(root, copy, journal=tmp_path / "j")
    assert "user.more" in rows_of(copy)[KEYS[0]]


def test_damage_to_a_columns_file_is_found(root: Path, tmp_path: Path) -> None:
    """SAFE-1: a damaged byte never changes a value silently."""
    streamvid.annotate(root, write_rows(tmp_path / "a.csv", ROWS))
    (path,) = root.glob("index/columns-*.parquet")
    flip(path, path.stat().st_size // 3)
    with pytest.raises(IntegrityError, match="columns-"):
        rows_of(root)
    dataset = streamvid.open_dataset(root)
    with pytest.raises(IntegrityError, match="columns-"):
        dataset.samples(dataset.shards[0], ["user.motion"])
    assert dataset.samples(dataset.shards[0], ["key"]).num_rows == 3  # undamaged columns can still be read
    for deep in (False, True):
        report = streamvid.verify_dataset(root, deep=deep)
        assert [(p.path, p.what, p.num_keys) for p in report.problems] == [(f"index/{path.name}", "checksum", 18)]
    path.unlink()
    assert [p.what for p in streamvid.verify_dataset(root).problems] == ["missing"]


def test_a_columns_file_with_swapped_rows_is_found(root: Path, tmp_path: Path) -> None:
    """All checksums are correct, but the rows belong to other samples: `verify --deep` reports them."""
    streamvid.annotate(root, write_rows(tmp_path / "a.csv", ROWS))
    (path,) = root.glob("index/columns-*.parquet")
    table = pq.ParquetFile(path)
    swapped = [table.read_row_group(number) for number in (1, 0, 2, 3, 4, 5)]
    with pq.ParquetWriter(tmp_path / "new.parquet", swapped[0].schema) as writer:
        for part in swapped:
            writer.write_table(part)
    data = (tmp_path / "new.parquet").read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    name = f"index/columns-00000-{digest[:12]}.parquet"
    (root / name).write_bytes(data)

    def change(value: dict[str, Any]) -> None:
        value["columns"][0]["files"] = [name]
        value["files"]["other"] = [f for f in value["files"]["other"] if "columns-" not in f["path"]]
        value["files"]["other"].append({"path": name, "num_bytes": len(data), "sha256": digest})
        base = f"{value['fingerprints']['base']}\n{name} {digest}\n"
        value["fingerprints"]["content"] = hashlib.sha256(base.encode()).hexdigest()

    value = edit_manifest(root, change)
    assert streamvid.open_dataset(root).manifest.fingerprints.content == value["fingerprints"]["content"]
    report = streamvid.verify_dataset(root, deep=True)
    assert {(p.path, p.what) for p in report.problems} == {(name, "content")}
    assert sorted(key for p in report.problems for key in p.keys) == KEYS[:6]


RUN = """
import os, signal, sys
from streamvid.dataset.annotate.annotate import annotate
from streamvid.storage import LocalStore
moment, seen = int(sys.argv[3]), 0
def counted(name):
    real = getattr(LocalStore, name)
    def call(self, *args):
        global seen
        for after in (False, True):
            seen += 1
            if seen == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            if not after:
                result = real(self, *args)
        return result
    setattr(LocalStore, name, call)
for name in ("put", "create", "remove"):
    counted(name)
annotate(sys.argv[1], sys.argv[2], caption_column="t")
print(seen)
"""


def run(root: Path, file: Path, moment: int) -> subprocess.CompletedProcess[str]:
    return run_python(RUN, root, file, moment, check=False)


def test_a_kill_at_any_write_leaves_the_old_dataset_or_the_new_one(root: Path, tmp_path: Path) -> None:
    """SHARD-2: after kill -9 before or after any write, the same command ends with exactly the same files."""
    file = write_rows(tmp_path / "a.csv", [{"key": key, "motion": 1, "t": f"new {key}"} for key in KEYS])
    before, ends = tree_of(root), set()
    for moment in range(1, 20):
        done = run(root, file, moment)
        texts = {row["text"] for row in rows_of(root).values()}  # complete, either old or new
        assert texts in ({f"words {key}" for key in KEYS}, {f"new {key}" for key in KEYS})
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        streamvid.annotate(root, file, caption_column="t")
        after = tree_of(root)
        report = streamvid.verify_dataset(root, deep=True)
        assert report.is_right and not report.extra
        ends.add(tuple(sorted(after.items())))
        for path in set(tree_of(root)) - set(before):
            (root / path).unlink()
        (root / MANIFEST).write_bytes(before[MANIFEST])
    assert len(ends) == 1 and moment >= 11  # lease, columns file, both versions, manifest, removal of the lease


def test_concurrent_annotations_succeed_or_are_refused(root: Path, tmp_path: Path) -> None:
    """Only one manifest is published at a time: a late writer raises, and its command succeeds when run again."""
    files = [
        write_rows(tmp_path / f"{n}.csv", [{"key": key, f"column_{n}": number} for number, key in enumerate(KEYS)])
        for n in range(4)
    ]
    errors: dict[Path, BaseException] = {}

    def work(file: Path) -> None:
        try:
            streamvid.annotate(root, file)
        except DatasetError as error:
            errors[file] = error

    threads = [threading.Thread(target=work, args=(file,)) for file in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(re.search("another run|another process", str(error)) for error in errors.values())
    groups = streamvid.open_dataset(root).manifest.columns
    assert len(groups) == len(files) - len(errors)
    for file in errors:
        streamvid.annotate(root, file)
    assert {f"column_{n}" for n in range(4)} <= set(streamvid.open_dataset(root).user_columns)
    report = streamvid.verify_dataset(root, deep=True)
    assert report.is_right and not report.extra


def test_a_manifest_with_wrong_groups_is_refused(root: Path, tmp_path: Path) -> None:
    """SAFE-1: missing files, too few files, and invalid column types are refused."""
    streamvid.annotate(root, write_rows(tmp_path / "a.csv", ROWS))
    whole = (root / MANIFEST).read_bytes()
    changes: list[dict[str, Any]] = [{"files": files} for files in (["index/none.parquet"], [], 5)]
    changes += [{"columns": columns} for columns in ({}, {"user.a": "list"}, ["user.a"])]
    for change in changes:
        (root / MANIFEST).write_bytes(whole)
        edit_manifest(root, lambda value, change=change: value["columns"][0].update(change))
        if change == {"files": []}:
            content = content_digest(json.loads(whole)["fingerprints"]["content"], ())
            edit_manifest(root, lambda value, content=content: value["fingerprints"].update(content=content))
        with pytest.raises(DatasetError, match=re.escape(str(root))):
            streamvid.open_dataset(root)


def test_a_dataset_in_a_bucket_is_annotated_like_one_on_disk(
    root: Path, tmp_path: Path, moto_server: S3Server, s3_env: S3Env
) -> None:
    """The bucket contains the same files and the same manifest as the folder, and nothing else."""
    s3_env(moto_server)
    bucket = moto_server.new_bucket()
    moto_server.upload_folder(root, bucket, "ds/")
    url, file = f"s3://{bucket}/ds", write_rows(tmp_path / "a.csv", ROWS)
    for _ in range(2):
        far = streamvid.annotate(url, file)
    near = streamvid.annotate(root, file)
    assert (far.state, far.content_fingerprint) == ("already annotated", near.content_fingerprint)
    assert moto_server.tree(bucket, "ds") == tree_of(root)
    assert streamvid.verify_dataset(url, deep=True).is_right
    assert rows_of(Path(root)) == {r["key"]: r for r in streamvid.open_dataset(url).samples_table().to_pylist()}
