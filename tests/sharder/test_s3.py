"""Tests of datasets and sources in a bucket: the bytes are the same as on a local disk."""

from __future__ import annotations

import json
import random
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamvid.errors import DatasetError, SealedError, SourceError, StorageError
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.sharder import abandon, dry_run, shard
from streamvid.sharder.source.media import Media
from streamvid.sharder.source.spool import FIRST_BYTES, SpooledFile
from streamvid.storage import StorageOptions, open_store
from tests.clips import encode, frames_of
from tests.conftest import run_streamvid
from tests.files import tree_of, write_rows
from tests.servers import ProxyFactory, S3Env, S3Server
from tests.shard_options import shard_options
from tests.sharder.conftest import BUCKETS, NATIVE, OPTIONS, Built, Stop, noted, rows_of, stop_at
from tests.sharder.test_kill import moments, native_moments, run
from tests.sharder.test_spool import late_index

QUICK = StorageOptions(deadline_seconds=3.0)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Default directory of unfinished work, in a cache of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "streamvid" / "shard"


@pytest.fixture
def bucket(moto_server: S3Server, s3_env: S3Env, work: Path) -> str:
    s3_env(moto_server)
    return moto_server.new_bucket()


def options(**changes: Any) -> ShardOptions:
    return shard_options(**{**OPTIONS, **changes})


def test_a_bucket_gets_the_same_bytes_as_a_folder(built: Built, bucket: str, moto_server: S3Server, work: Path) -> None:
    """SHARD-1: every object equals the local file; nothing else is left in the bucket or in the working directory."""
    report = shard(built.source, f"s3://{bucket}/ds", options(workers=2))
    assert report == built.report
    assert moto_server.tree(bucket, "ds") == built.tree
    assert moto_server.uploads(bucket) == [] and list(work.iterdir()) == []
    assert shard(built.source, f"s3://{bucket}/ds", options()).state == "already sealed"
    assert not dry_run(built.source, f"s3://{bucket}/ds", options()).probe_bytes_read


@pytest.mark.slow
def test_native_clips_of_a_bucket_equal_those_of_a_folder(
    native: Built, bucket: str, moto_server: S3Server, tmp_path: Path
) -> None:
    """SHARD-1: with sources and dataset in buckets, the encoded clips equal those of local folders."""
    moto_server.upload_folder(native.source, bucket, "videos/")
    chosen = shard_options(**{**NATIVE, "workers": 2, "work_dir": tmp_path / "work"})
    shard(f"s3://{bucket}/videos/", f"s3://{bucket}/ds", chosen)
    assert moto_server.tree(bucket, "ds") == native.tree
    assert list((tmp_path / "work").iterdir()) == []


def test_sources_in_a_bucket_give_the_same_dataset_as_a_folder(
    built: Built, bucket: str, moto_server: S3Server, tmp_path: Path
) -> None:
    """SHARD-1, SHARD-3: rows, names, rejections and bytes do not depend on the location of the files."""
    moto_server.upload_folder(built.source, bucket, "videos/")
    for number, source in enumerate((f"s3://{bucket}/videos", f"s3://{bucket}/videos/metadata.csv")):
        report = shard(source, tmp_path / str(number), options())
        assert tree_of(tmp_path / str(number)) == built.tree
        assert report.probe_bytes_read and report.rejections == built.report.rejections


def test_the_report_counts_the_bytes_read_by_probing(bucket: str, moto_server: S3Server, tmp_path: Path) -> None:
    """At most a twentieth is read of an MP4 of many MB with its index at the end."""
    data = late_index()
    moto_server.put(bucket, "v/late.mp4", data)
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "late.mp4").write_bytes(data)
    report = dry_run(f"s3://{bucket}/v", tmp_path / "ds", options())
    assert report.probe_bytes_read is not None and 0 < report.probe_bytes_read < len(data) / 20
    assert report.to_json()["probe_bytes_read"] == report.probe_bytes_read
    local = dry_run(tmp_path / "v", tmp_path / "ds", options())
    assert replace(report, probe_bytes_read=None) == local


@pytest.mark.slow
def test_time_ranges_of_a_film_in_a_bucket_equal_those_of_a_folder(
    bucket: str, moto_server: S3Server, tmp_path: Path
) -> None:
    """SHARD-1: time ranges are stored as copies, with sources and dataset in a bucket."""
    rows = [
        {"path": "late.mp4", "caption": number, "start": number / 5, "end": number / 5 + 0.6} for number in range(4)
    ]
    own = tmp_path / "own"
    own.mkdir()
    (own / "late.mp4").write_bytes(encode(frames_of("bikes", 96, 64, 60)))
    write_rows(own / "metadata.csv", rows)
    moto_server.upload_folder(own, bucket, "own/")
    changes = {"time_columns": ("start", "end"), "val_fraction": 0.0, "whole_files": False}
    shard(own, tmp_path / "local", options(**changes))
    far = shard_options(**{**OPTIONS, **changes, "workers": 2, "work_dir": tmp_path / "work"})
    shard(f"s3://{bucket}/own", f"s3://{bucket}/ds", far)
    assert moto_server.tree(bucket, "ds") == tree_of(tmp_path / "local")
    assert len(rows_of(tmp_path / "local")) == 4 and list((tmp_path / "work").iterdir()) == []


@pytest.mark.slow
def test_captions_in_text_objects_are_read(bucket: str, moto_server: S3Server, built: Built, tmp_path: Path) -> None:
    """In a folder without metadata, captions come from .txt files, and hidden names are skipped."""
    own = tmp_path / "own"
    (own / ".hidden").mkdir(parents=True)
    for name in ("b.mp4", "a/clip.mp4", ".hidden/x.mp4"):
        (own / name).parent.mkdir(exist_ok=True)
        (own / name).write_bytes((built.source / "a/clip_1.5s_a.mp4").read_bytes())
    (own / "a" / "clip.txt").write_text("  a dog, é\n")
    moto_server.upload_folder(own, bucket, "own/")
    shard(own, tmp_path / "local", options())
    shard(f"s3://{bucket}/own", tmp_path / "far", options())
    assert tree_of(tmp_path / "local") == tree_of(tmp_path / "far")


def test_rows_of_a_local_file_may_name_objects(
    bucket: str, moto_server: S3Server, built: Built, tmp_path: Path
) -> None:
    """SHARD-3: a row whose object is missing is a rejection."""
    key = "raw/ä b?#%41.mp4"
    moto_server.put(bucket, key, (built.source / "a/clip_1.5s_a.mp4").read_bytes())
    rows = [{"path": f"s3://{bucket}/{name}", "caption": "x"} for name in (key, "gone.mp4")]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = shard(tmp_path / "m.jsonl", tmp_path / "ds", options())
    assert report.num_samples == 1
    assert [row.reason for row in report.rejections] == ["cannot be read: No such file or directory"]


def test_metadata_in_a_bucket_names_other_buckets_only_on_request(
    bucket: str, moto_server: S3Server, built: Built, tmp_path: Path
) -> None:
    """SAFE-1: the author of the metadata does not choose what is read with the caller's credentials."""
    data, other = (built.source / "a/clip_1.5s_a.mp4").read_bytes(), moto_server.new_bucket()
    for place, key in ((bucket, "v/a.mp4"), (bucket, "w/b.mp4"), (other, "c.mp4")):
        moto_server.put(place, key, data)
    names = ["a.mp4", f"s3://{bucket}/w/b.mp4", f"s3://{other}/c.mp4"]
    moto_server.put(bucket, "v/metadata.csv", "\n".join(["path", *names]).encode())
    report = dry_run(f"s3://{bucket}/v", tmp_path / "ds", options())
    (rejection,) = report.rejections
    assert report.num_samples == 2 and rejection.source == names[2]
    assert re.search(f"refers to a file in another bucket, s3://{other}, .*--other-buckets", rejection.reason)
    moto_server.put(bucket, "m.csv", "\n".join(["path", *names[1:]]).encode())
    assert dry_run(built.source, tmp_path / "ds", options(metadata=f"s3://{bucket}/m.csv")).num_samples == 1
    trusted = dry_run(f"s3://{bucket}/v", tmp_path / "ds", options(other_buckets=True))
    assert trusted.num_samples == 3 and not trusted.rejections


@pytest.mark.slow
def test_an_object_that_changes_between_probe_and_build_is_noticed(
    bucket: str, moto_server: S3Server, built: Built, tmp_path: Path
) -> None:
    """SHARD-1: a replaced object is never used silently; the same command then uses the new object."""
    data = {name: (built.source / name).read_bytes() for name in ("a/clip_1.5s_a.mp4", "a/clip_1.5s_b.mp4")}
    first, second = data.values()
    moto_server.put(bucket, "v/x.mp4", first)

    def change(phase: str, done: int, total: int) -> None:
        if (phase, done) == ("build", 0):
            moto_server.put(bucket, "v/x.mp4", second)

    with pytest.raises(SourceError, match="changed after it was probed"):
        shard(f"s3://{bucket}/v", tmp_path / "ds", options(), change)
    assert shard(f"s3://{bucket}/v", tmp_path / "ds", options()).num_samples == 1
    with pytest.raises(SourceError, match="can no longer be read .the object no longer exists"):
        shard(f"s3://{bucket}/v", tmp_path / "b", options(), _removing(moto_server, bucket))


def _removing(server: S3Server, bucket: str) -> Any:
    def remove(phase: str, done: int, total: int) -> None:
        if (phase, done) == ("build", 0):
            server.remove(bucket, "v/x.mp4")

    return remove


def test_an_object_that_is_replaced_while_it_is_read_is_an_error(bucket: str, moto_server: S3Server) -> None:
    """SHARD-1: two versions are never mixed. Even if the reader ignores the error, the file keeps it."""
    data = random.Random(1).randbytes(4 * FIRST_BYTES)
    url = f"s3://{bucket}/clip"
    moto_server.put(bucket, "clip", data)
    state = open_store(f"s3://{bucket}").state("clip")
    assert state is not None
    with SpooledFile(Media(url, "clip", len(data), state.version, StorageOptions()), None) as file:
        assert file.read(10) == data[:10]
        moto_server.put(bucket, "clip", data[::-1])
        file.seek(3 * FIRST_BYTES)
        with pytest.raises(SourceError, match="changed after it was probed"):
            file.read(10)
        assert isinstance(file.error, SourceError)
        assert file.seek(0) == 0 and file.read(10) == data[:10]
        moto_server.remove(bucket, "clip")
        file.seek(3 * FIRST_BYTES)
        with pytest.raises(SourceError, match="can no longer be read .the object no longer exists"):
            file.read(10)


@pytest.mark.slow
def test_another_dataset_is_refused_and_overwritten_only_on_request(
    built: Built, bucket: str, moto_server: S3Server, tmp_path: Path
) -> None:
    """SHARD-2: a bucket behaves like a folder."""
    dest = f"s3://{bucket}/ds"
    shard(built.source, dest, options(buckets=BUCKETS[:1]))
    with pytest.raises(SealedError, match="contains another sealed dataset"):
        shard(built.source, dest, options())
    shard(built.source, dest, options(overwrite=True))
    assert moto_server.tree(bucket, "ds") == built.tree


def test_foreign_objects_are_refused(built: Built, bucket: str, moto_server: S3Server) -> None:
    moto_server.put(bucket, "ds/notes.txt", b"mine")
    with pytest.raises(DatasetError, match="is not empty, but does not contain a dataset"):
        shard(built.source, f"s3://{bucket}/ds", options())
    assert moto_server.tree(bucket, "ds") == {"notes.txt": b"mine"}


@pytest.mark.slow
def test_an_unfinished_build_with_other_options_leaves_nothing(
    built: Built, bucket: str, moto_server: S3Server, tmp_path: Path
) -> None:
    """SHARD-2: a build with other options replaces it, even on another machine with another working directory."""
    dest = f"s3://{bucket}/ds"
    with pytest.raises(Stop):
        shard(built.source, dest, options(buckets=BUCKETS[:1], seed=9), stop_at("seal", 4))
    shard(built.source, dest, options(work_dir=tmp_path / "other"))
    assert moto_server.tree(bucket, "ds") == built.tree


def test_a_concurrent_run_is_refused_without_a_shared_disk(
    built: Built, bucket: str, moto_server: S3Server, tmp_path: Path
) -> None:
    """SHARD-2: the lease in the bucket refuses a second run, with equal or other options, and `abandon`."""
    dest, refusals = f"s3://{bucket}/ds", []

    def second(phase: str, done: int, total: int) -> None:
        if phase == "build" and done == 1:
            for changes in ({}, {"seed": 9}, {"task": "0/2"}):
                with pytest.raises(DatasetError, match="another run, process .*, is working on s3://") as caught:
                    shard(built.source, dest, options(**changes, work_dir=tmp_path / "other"))
                refusals.append(caught)
            with pytest.raises(DatasetError, match="is working on s3://"):
                abandon(dest, options(work_dir=tmp_path / "other"))

    shard(built.source, dest, options(), second)
    assert len(refusals) == 3 and moto_server.tree(bucket, "ds") == built.tree


@pytest.mark.slow
def test_another_machine_repeats_no_finished_shard(
    built: Built, bucket: str, moto_server: S3Server, tmp_path: Path
) -> None:
    """SHARD-1: markers in the bucket record the finished shards."""
    dest, client = f"s3://{bucket}/ds", moto_server.client
    with pytest.raises(Stop):
        shard(built.source, dest, options(), stop_at("build", 3))
    keys = [key for key in moto_server.objects(bucket, "ds/shards") if key.endswith(".tar")]
    before = {key: client.head_object(Bucket=bucket, Key=key)["LastModified"] for key in keys}
    assert len(keys) >= 3
    counts: list[int] = []
    shard(built.source, dest, options(work_dir=tmp_path / "other"), noted("build", counts))
    assert counts[0] >= 3
    assert moto_server.tree(bucket, "ds") == built.tree
    done = sorted(before)[: counts[0]]
    assert [client.head_object(Bucket=bucket, Key=key)["LastModified"] for key in done] == [before[key] for key in done]


def test_unfinished_work_can_be_abandoned(built: Built, bucket: str, moto_server: S3Server, work: Path) -> None:
    """SHARD-2: --abandon leaves no objects, upload parts or files."""
    dest = f"s3://{bucket}/ds"
    moto_server.client.create_multipart_upload(Bucket=bucket, Key="ds/shards/x.tar")
    with pytest.raises(Stop):
        shard(built.source, dest, options(), stop_at("seal", 2))
    assert moto_server.tree(bucket, "ds")
    assert abandon(dest, options()) is True
    assert moto_server.tree(bucket, "ds") == {} and moto_server.uploads(bucket) == [] and list(work.iterdir()) == []
    assert abandon(dest, options()) is False


@pytest.mark.parametrize("finish", ["shard", "abandon"])
def test_planted_notes_remove_nothing_else(
    built: Built, bucket: str, moto_server: S3Server, work: Path, finish: str
) -> None:
    """SAFE-1: a cleanup deletes only keys that a plan can contain, inside the dataset's own folders."""
    work.parent.mkdir(parents=True, exist_ok=True)
    (work.parent / "keep.txt").write_text("mine")
    names = json.dumps(["keep.txt", "shards/keep.txt"])
    for key in (
        "keep.txt",
        "shards/keep.txt",
        ".staging//files.json",
        ".staging/./files.json",
        f".staging/{'a' * 32}/files.json",
    ):
        moto_server.client.put_object(Bucket=bucket, Key=f"ds/{key}", Body=names.encode())
    if finish == "shard":
        shard(built.source, f"s3://{bucket}/ds", options())
    else:
        assert abandon(f"s3://{bucket}/ds", options())
    tree = moto_server.tree(bucket, "ds")
    assert tree.pop("keep.txt") == tree.pop("shards/keep.txt") == names.encode()
    assert tree == (built.tree if finish == "shard" else {})
    assert list(work.iterdir()) == [] and (work.parent / "keep.txt").exists()


def test_leftover_uploads_are_aborted_after_success(built: Built, bucket: str, moto_server: S3Server) -> None:
    """SHARD-2: no invisible upload parts remain that incur storage costs."""
    moto_server.client.create_multipart_upload(Bucket=bucket, Key="ds/shards/killed.tar")
    shard(built.source, f"s3://{bucket}/ds", options())
    assert moto_server.uploads(bucket) == []


@pytest.mark.slow
def test_a_store_that_becomes_unreachable_is_an_error_that_explains_how_to_resume(
    built: Built, moto_server: S3Server, s3_env: S3Env, fault_proxy: ProxyFactory, work: Path
) -> None:
    """SHARD-2, SHARD-3: nothing is rejected or sealed, and the same command then ends with the same bytes."""
    proxy = fault_proxy(moto_server)
    server = moto_server.behind(proxy)
    s3_env(server)
    bucket = moto_server.new_bucket()
    moto_server.upload_folder(built.source, bucket, "videos/")
    chosen = options(storage=QUICK)

    def die(when: tuple[str, int]) -> Any:
        return lambda phase, done, total: proxy.set(dead=True) if (phase, done) == when else None

    for when in (("probe", 2), ("build", 1), ("seal", 1)):
        with pytest.raises(StorageError, match=re.escape(f"s3://{bucket}")) as caught:
            shard(f"s3://{bucket}/videos", f"s3://{bucket}/ds", chosen, die(when))
        assert "Run the same command again to resume" in str(caught.value) and "--abandon" in str(caught.value)
        assert server.secret_key not in str(caught.value)
        proxy.set(dead=False)
        assert "manifest.json" not in moto_server.tree(bucket, "ds")
    shard(f"s3://{bucket}/videos", f"s3://{bucket}/ds", chosen)
    assert moto_server.tree(bucket, "ds") == built.tree


@pytest.mark.slow
def test_faults_change_no_byte(
    built: Built, moto_server: S3Server, s3_env: S3Env, fault_proxy: ProxyFactory, work: Path
) -> None:
    """FETCH-1, SHARD-1: one in five read and write requests fails."""
    kinds = ("status_500", "slow_down", "too_many", "refused", "lost_answer", "reset", "truncated")
    s3_env(moto_server.behind(fault_proxy(moto_server, fault_rate=0.2, seed=5, faults=kinds)))
    bucket = moto_server.new_bucket()
    moto_server.upload_folder(built.source, bucket, "videos/")
    shard(f"s3://{bucket}/videos", f"s3://{bucket}/ds", options(workers=2))
    assert moto_server.tree(bucket, "ds") == built.tree


def check_kills(
    built: Built, server: S3Server, tmp_path: Path, kills: list[tuple[str, int, float]], clips: str = "copy"
) -> None:
    bucket, rng = server.new_bucket(), random.Random(len(kills))
    dest: Any = f"s3://{bucket}/ds"
    num_killed = 0
    for moment in kills:
        result = run(built, dest, kill=moment, options={"clips": clips, "workers": rng.choice([1, 2])})
        assert result.returncode in (0, -signal.SIGKILL), result.stderr
        num_killed += result.returncode != 0
        assert ("ds/manifest.json" in server.objects(bucket)) >= (result.returncode == 0)
    assert num_killed
    result = run(built, dest, options={"clips": clips, "workers": 2})
    assert result.returncode == 0, result.stderr
    assert server.tree(bucket, "ds") == built.tree
    assert server.uploads(bucket) == []


@pytest.mark.slow
def test_a_run_killed_against_moto_ends_with_the_same_bytes(
    built: Built, bucket: str, moto_server: S3Server, tmp_path: Path, work: Path
) -> None:
    """SHARD-1, SHARD-2: the run is killed with kill -9 and repeated."""
    kills = random.Random(3).sample(moments(built.report.num_shards, random.Random(1)), 4)
    check_kills(built, moto_server, tmp_path, kills)
    assert list(work.iterdir()) == []


@pytest.mark.parametrize("count", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_killed_against_ceph_ends_with_the_same_bytes(
    built: Built, rgw: S3Server, s3_env: S3Env, tmp_path: Path, work: Path, count: int
) -> None:
    """SHARD-1, SHARD-2: kill -9 comes at seeded moments of every phase, in the order of a run."""
    s3_env(rgw)
    kills = moments(built.report.num_shards, random.Random(7))
    check_kills(built, rgw, tmp_path, kills[:: len(kills) // count])
    assert list(work.iterdir()) == []


@pytest.mark.slow
def test_native_clips_killed_against_ceph_end_with_the_same_bytes(
    native: Built, rgw: S3Server, s3_env: S3Env, tmp_path: Path, work: Path
) -> None:
    """SHARD-1, SHARD-2: encoded clips are staged on this machine, and their shards are uploaded to the bucket."""
    s3_env(rgw)
    kills = native_moments(native.report.num_shards, random.Random(8), 10)
    check_kills(native, rgw, tmp_path, kills, "native")


@pytest.mark.slow
def test_the_command_shards_to_a_bucket_and_reports_bad_credentials(
    built: Built, rgw: S3Server, s3_env: S3Env, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SAFE-1: a bad secret is an immediate error that shows no credentials; then --abandon and the build succeed."""
    s3_env(rgw)
    bucket = rgw.new_bucket()
    command = ["shard", built.source, f"s3://{bucket}/ds", "--buckets", "96x64@9", "--workers", "1"]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-of-a-secret")
    done = run_streamvid(*command, check=False)
    assert done.returncode == 1
    assert f"s3://{bucket}/ds" in done.stderr and "AWS_SECRET_ACCESS_KEY" in done.stderr
    assert "canary" not in done.stderr + done.stdout
    s3_env(rgw)
    assert "no unfinished work" in run_streamvid(*command, "--abandon").stdout
    assert json.loads(run_streamvid(*command, "--json").stdout)["state"] == "built"
    assert "ds/manifest.json" in rgw.objects(bucket)
