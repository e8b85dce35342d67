"""Tests of `copy`, which copies a dataset completely or not at all, verifies every byte, and resumes after a kill."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import streamvid
from streamvid.dataset.upkeep.copy import copy_dataset
from streamvid.dataset.upkeep.copy_file import SCRATCH, scratch_folder
from streamvid.dataset.upkeep.verify import verify_dataset
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError, DatasetError, IntegrityError, SealedError, StorageError
from streamvid.storage import LocalStore, open_store
from tests.dataset.frozen import DATASETS, FROZEN, tree_of_newest
from tests.dataset.test_verify import tars
from tests.dataset.whole import Watched, flip, seal_whole
from tests.files import tree_of
from tests.processes import run_python
from tests.servers import ProxyFactory, Rgw, S3Env, S3Server

NATIVE = FROZEN / "native"
FILES = sorted(tree_of(NATIVE))


@pytest.mark.parametrize("name", DATASETS)
def test_a_copy_has_the_same_bytes(name: str, tmp_path: Path) -> None:
    """Every kind of clip is copied, without earlier versions. A second run copies nothing, and no temporary file
    remains."""
    report = copy_dataset(FROZEN / name, tmp_path / "to" / "dataset", journal=tmp_path / "journal")
    tree = tree_of_newest(FROZEN / name)
    assert tree_of(tmp_path / "to" / "dataset") == tree
    assert (report.state, report.num_files, report.num_copied, report.num_kept) == ("copied", len(tree), len(tree), 0)
    assert report.num_bytes == report.num_bytes_copied == sum(map(len, tree.values()))
    again = copy_dataset(FROZEN / name, tmp_path / "to" / "dataset", journal=tmp_path / "journal")
    assert (again.state, again.num_copied, again.num_kept) == ("already there", 0, len(tree))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal", "to"]
    assert not list((tmp_path / "journal").iterdir())
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["dataset"]


def test_a_copy_loads_the_same_batches(tmp_path: Path) -> None:
    """PLAN-1, FETCH-2: the copy has the same plan, keys, captions and pixels."""
    copy_dataset(NATIVE, tmp_path / "dataset", journal=tmp_path)
    settings = {"batch_size": 1, "num_epochs": 2, "num_workers": 0, "output": {"pixels": "yuv420p", "layout": "BTHWC"}}
    with (
        streamvid.VideoLoader(NATIVE, **settings) as one,
        streamvid.VideoLoader(tmp_path / "dataset", **settings) as two,
    ):
        for a, b in zip(one, two, strict=True):
            assert (a.sample_keys, a.text) == (b.sample_keys, b.text) and torch.equal(a.video, b.video)


def test_the_manifest_is_last_and_no_reader_sees_half_a_dataset(tmp_path: Path) -> None:
    """SHARD-2: dest is not a dataset until all other files are complete."""
    seal_whole(tmp_path / "source", 5)
    dest = Watched(LocalStore(tmp_path / "dest"))

    def looked_at(path: str) -> None:
        with pytest.raises(DatasetError, match="no dataset at"):
            open_dataset(tmp_path / "dest")

    dest.before_put = looked_at
    copy_dataset(LocalStore(tmp_path / "source"), dest, journal=tmp_path / "journal")
    assert dest.puts[-1] == "manifest.json" and len(set(dest.puts)) == len(tree_of(tmp_path / "source"))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from([name for name in FILES if name != "manifest.json"]), place=st.integers(0, 10**6))
def test_a_damaged_source_is_never_sealed(tmp_path_factory: pytest.TempPathFactory, name: str, place: int) -> None:
    """A damaged byte in any file raises an error that names the file, and seals nothing. After a repair the copy
    resumes."""
    base = tmp_path_factory.mktemp("damaged")
    source, dest = base / "source", base / "dest"
    shutil.copytree(NATIVE, source)
    size = (source / name).stat().st_size
    flip(source / name, place % size)
    with pytest.raises(IntegrityError, match=name.replace(".", r"\.")):
        copy_dataset(source, dest, journal=base / "journal")
    assert not (dest / "manifest.json").exists() and not (dest / SCRATCH).exists()
    flip(source / name, place % size)
    copy_dataset(source, dest, journal=base / "journal")
    assert tree_of(dest) == tree_of(NATIVE)
    shutil.rmtree(base)


def test_bytes_corrupted_in_transit_are_read_again(tmp_path: Path) -> None:
    """FETCH-1: a flipped byte costs a second read and never reaches dest."""
    seal_whole(tmp_path / "source", 5)
    source, seen = Watched(LocalStore(tmp_path / "source")), set()

    def flipped(path: str, buffer: memoryview) -> None:
        if path not in seen:
            seen.add(path)
            buffer[len(buffer) // 2] ^= 1

    source.after_read = flipped
    copy_dataset(source, LocalStore(tmp_path / "dest"), journal=tmp_path / "journal")
    assert tree_of(tmp_path / "dest") == tree_of(tmp_path / "source")
    assert seen >= set(tars(tmp_path / "source"))


def test_another_dataset_and_foreign_files_are_refused(tmp_path: Path) -> None:
    """A refused copy changes nothing at dest."""
    for name, error in (("other", SealedError), ("foreign", DatasetError)):
        dest = tmp_path / name
        if name == "other":
            seal_whole(dest, 3)
        else:
            dest.mkdir()
            (dest / "holiday.mp4").write_bytes(b"mine")
        before = tree_of(dest)
        with pytest.raises(error, match="another" if name == "other" else "holiday"):
            copy_dataset(NATIVE, dest, journal=tmp_path / "journal")
        assert tree_of(dest) == before
    (tmp_path / "file").touch()
    with pytest.raises(DatasetError, match="is a file"):
        copy_dataset(NATIVE, tmp_path / "file", journal=tmp_path / "journal")
    with pytest.raises(ConfigError, match="are both"):
        copy_dataset(NATIVE, f"{NATIVE}/../{NATIVE.name}", journal=tmp_path / "journal")
    with pytest.raises(DatasetError, match="no dataset at"):
        copy_dataset(tmp_path / "foreign", tmp_path / "dest", journal=tmp_path / "journal")
    assert not (tmp_path / "dest").exists()


def repaired(tmp_path: Path, damage: Callable[[Path], None], **options: bool) -> streamvid.Dataset:
    dest = tmp_path / "dest"
    shutil.copytree(NATIVE, dest)
    (dest / "notes.txt").write_text("mine")
    damage(dest)
    report = copy_dataset(NATIVE, dest, journal=tmp_path / "journal", **options)
    assert report.state == "repaired" and report.num_copied == 1
    assert (dest / "notes.txt").read_text() == "mine"
    assert verify_dataset(dest, deep=True, journal=tmp_path / "journal").is_right
    return open_dataset(dest)


def test_missing_and_short_files_of_the_same_dataset_are_repaired(tmp_path: Path) -> None:
    for number, name in enumerate(name for name in FILES if name != "manifest.json"):
        repaired(tmp_path / f"a{number}", lambda dest, name=name: (dest / name).unlink())  # type: ignore[misc]
        repaired(tmp_path / f"b{number}", lambda dest, name=name: (dest / name).write_bytes(b"x"))  # type: ignore[misc]


def test_wrong_bytes_of_the_right_size_are_repaired_with_check_existing(tmp_path: Path) -> None:
    (tar, *_) = tars(NATIVE)
    repaired(tmp_path, lambda dest: flip(dest / tar, 900), check_existing=True)


def test_a_damaged_manifest_is_repaired(tmp_path: Path) -> None:
    """The file names identify the dataset, so only the manifest is copied again."""
    dest = tmp_path / "dest"
    shutil.copytree(NATIVE, dest)
    flip(dest / "manifest.json", 300, 0x80)
    report = copy_dataset(NATIVE, dest, check_existing=True, journal=tmp_path / "journal")
    assert tree_of(dest) == tree_of(NATIVE) and report.num_copied == 1


def test_files_of_an_unsealed_dest_are_not_trusted(tmp_path: Path) -> None:
    """Leftover files are copied again; with `check_existing` they are read, and only wrong ones are copied."""
    for check in (False, True):
        dest = tmp_path / f"dest{check}"
        shutil.copytree(NATIVE, dest)
        (dest / "manifest.json").unlink()
        flip(dest / tars(NATIVE)[0], 900)
        report = copy_dataset(NATIVE, dest, check_existing=check, journal=tmp_path / "journal")
        assert tree_of(dest) == tree_of(NATIVE)
        assert report.num_copied == (2 if check else len(FILES))


def test_a_failed_copy_resumes(tmp_path: Path) -> None:
    seal_whole(tmp_path / "source", 8)
    dest = Watched(LocalStore(tmp_path / "dest"))

    def full(path: str) -> None:
        if path == tars(tmp_path / "source")[5]:
            raise StorageError("no space left")

    dest.before_put = full
    with pytest.raises(StorageError, match="no space left"):
        copy_dataset(LocalStore(tmp_path / "source"), dest, workers=1, journal=tmp_path / "journal")
    assert not (tmp_path / "dest" / SCRATCH).exists() and not (tmp_path / "dest" / "manifest.json").exists()
    dest.before_put = lambda path: None
    before = set(dest.puts)
    dest.puts = []
    report = copy_dataset(LocalStore(tmp_path / "source"), dest, workers=1, journal=tmp_path / "journal")
    assert tree_of(tmp_path / "dest") == tree_of(tmp_path / "source")
    assert report.num_kept == len(before) and not before & set(dest.puts)


def test_a_file_that_changed_after_an_interrupt_is_copied_again(tmp_path: Path) -> None:
    """The journal of an interrupted copy vouches only for files that have not changed since."""
    seal_whole(tmp_path / "source", 8)

    def stop(phase: str, done: int, total: int) -> None:
        if done == total - 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_dataset(tmp_path / "source", tmp_path / "dest", workers=1, journal=tmp_path / "journal", progress=stop)
    flip(tmp_path / "dest" / tars(tmp_path / "source")[2], 900)
    report = copy_dataset(tmp_path / "source", tmp_path / "dest", workers=1, journal=tmp_path / "journal")
    assert tree_of(tmp_path / "dest") == tree_of(tmp_path / "source")
    assert report.num_kept > 10 and report.num_copied >= 2


CODE = """
import os, signal, sys, threading
from streamvid.dataset.upkeep.copy import copy_dataset
source, dest, journal, temp_dir, number, delay = sys.argv[1:]
def progress(name, done, total):
    if done == int(number):
        threading.Timer(float(delay), os.kill, (os.getpid(), signal.SIGKILL)).start()
print(copy_dataset(source, dest, workers=3, journal=journal, temp_dir=temp_dir, progress=progress).num_kept)
"""


def run(*order: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return run_python(CODE, *order, check=False, env={**os.environ, **(env or {})})


@pytest.mark.parametrize("count", [5, pytest.param(25, marks=pytest.mark.slow)])
def test_a_killed_copy_resumes(tmp_path: Path, count: int) -> None:
    """SHARD-2: after kill -9 at seeded moments there is no manifest before the end, and only files in flight are copied
    twice."""
    source, dest, rng = tmp_path / "source", tmp_path / "dest", random.Random(count)
    seal_whole(source, 60, clip_bytes=32_000)
    kills = 0
    for number in range(count):
        before = {path: path.stat() for path in dest.rglob("*.tar")}
        moment = 126 * (number + 1) // (count + 1)
        done = run(source, dest, tmp_path / "journal", tmp_path, moment, rng.choice([0.0, 0.002, 0.01]))
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        kills += done.returncode != 0
        if (dest / "manifest.json").exists():  # the kill may come after the manifest is written
            assert tree_of(dest) == tree_of(source)
        else:
            assert done.returncode != 0
        again = sum(path.stat().st_ino != status.st_ino for path, status in before.items())
        assert again <= 3  # one per worker: written, but not yet in the journal
    assert kills >= count // 2
    assert run(source, dest, tmp_path / "journal", tmp_path, -1, 0).returncode == 0
    assert tree_of(dest) == tree_of(source)
    assert not list((tmp_path / "journal").iterdir())


def test_two_copies_of_the_same_dataset_never_run_at_once(tmp_path: Path) -> None:
    seal_whole(tmp_path / "source")
    refused = []

    def second(phase: str, done: int, total: int) -> None:
        if not refused:
            with pytest.raises(DatasetError, match="already running") as caught:
                copy_dataset(tmp_path / "source", tmp_path / "dest", journal=tmp_path / "journal")
            refused.append(caught)

    copy_dataset(tmp_path / "source", tmp_path / "dest", journal=tmp_path / "journal", progress=second)
    assert refused and tree_of(tmp_path / "dest") == tree_of(tmp_path / "source")


def test_a_foreign_scratch_directory_is_not_deleted(tmp_path: Path) -> None:
    """A directory that has the name of the scratch directory but contains a user's files is refused."""
    (tmp_path / "dest" / SCRATCH).mkdir(parents=True)
    (tmp_path / "dest" / SCRATCH / "thesis.txt").write_text("mine")
    with pytest.raises(StorageError, match="is not the scratch directory of an earlier copy"):
        copy_dataset(NATIVE, tmp_path / "dest", journal=tmp_path / "journal")
    assert (tmp_path / "dest" / SCRATCH / "thesis.txt").read_text() == "mine"


def test_disk_bucket_bucket_disk(tmp_path: Path, moto_server: S3Server, s3_env: S3Env) -> None:
    """SHARD-2, FETCH-2: bytes stay the same through two buckets and memory; no upload and no temporary file remains.

    The tars exceed the part size, so they are uploaded in parts.
    """
    s3_env(moto_server)
    seal_whole(tmp_path / "dataset", 2, clip_bytes=6 * 2**20)
    one, two = (f"s3://{moto_server.new_bucket()}/some/ds" for _ in range(2))
    (tmp_path / "temp").mkdir()
    tree = tree_of(tmp_path / "dataset")
    places = [tmp_path / "dataset", one, two, "memory://here/ds", tmp_path / "back"]
    for source, dest in itertools.pairwise(places):
        report = copy_dataset(source, dest, journal=tmp_path / "journal", temp_dir=tmp_path / "temp")
        assert (report.state, report.num_copied) == ("copied", len(tree))
    assert tree_of(tmp_path / "back") == tree
    bucket = one.split("/")[2]
    objects = moto_server.objects(bucket)
    assert objects == {f"some/ds/{path}": len(data) for path, data in tree.items()}
    assert not moto_server.uploads(bucket) and not list((tmp_path / "temp").iterdir())


def test_a_killed_copy_to_a_bucket_resumes(tmp_path: Path, moto_server: S3Server, s3_env: S3Env) -> None:
    """The copy is killed with kill -9 during uploads; unfinished uploads are aborted at the end."""
    env = s3_env(moto_server)
    seal_whole(tmp_path / "source", 20, clip_bytes=32_000)
    bucket = moto_server.new_bucket()
    moto_server.client.create_multipart_upload(Bucket=bucket, Key="ds/shards/left.tar")
    kept = 0
    for moment in (8, 20, 35):
        done = run(tmp_path / "source", f"s3://{bucket}/ds", tmp_path / "journal", tmp_path, moment, 0.01, env=env)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        assert ("ds/manifest.json" in moto_server.objects(bucket)) == (done.returncode == 0)
    done = run(tmp_path / "source", f"s3://{bucket}/ds", tmp_path / "journal", tmp_path, -1, 0, env=env)
    kept = int(done.stdout)
    tree = tree_of(tmp_path / "source")
    assert kept >= 8 and len(tree) == len(moto_server.objects(bucket)) and not moto_server.uploads(bucket)
    assert all(moto_server.read(bucket, f"ds/{path}") == data for path, data in tree.items())
    assert not [path for path in tmp_path.iterdir() if path.name not in ("source", "journal")]


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 23))])
def test_copy_and_verify_through_faults(
    tmp_path: Path, moto_server: S3Server, s3_env: S3Env, fault_proxy: ProxyFactory, seed: int
) -> None:
    """FETCH-1, SHARD-2: with every kind of proxy fault on a tenth of the requests, the copied bytes are correct and
    verify."""
    proxy = fault_proxy(moto_server, fault_rate=0.1, seed=seed, stall_s=0.5, slow_s=0.5)
    s3_env(moto_server.behind(proxy))
    seal_whole(tmp_path / "source", 12, clip_bytes=60_000)
    one, two = (f"s3://{moto_server.new_bucket()}/ds" for _ in range(2))
    copy_dataset(tmp_path / "source", one, journal=tmp_path / "journal", temp_dir=tmp_path)
    copy_dataset(one, two, journal=tmp_path / "journal", temp_dir=tmp_path)
    report = verify_dataset(two, deep=True, journal=tmp_path / "journal")
    assert report.is_right, report.problems
    bucket = two.split("/")[2]
    assert moto_server.tree(bucket, "ds") == tree_of(tmp_path / "source") and not moto_server.uploads(bucket)
    assert sum(proxy.counts().faults.values()) > 10


def test_a_bucket_that_stops_answering_is_an_error_within_the_deadline(
    tmp_path: Path, moto_server: S3Server, s3_env: S3Env, fault_proxy: ProxyFactory
) -> None:
    """FETCH-1: the source, dest or verified dataset stops answering. This is an error, not a finding, and the same call
    resumes."""
    proxy = fault_proxy(moto_server)
    s3_env(moto_server.behind(proxy))
    seal_whole(tmp_path / "source", 12)
    url, journal = f"s3://{moto_server.new_bucket()}/ds", tmp_path / "journal"
    storage = {"deadline_seconds": 2.0, "connect_seconds": 0.5, "stall_seconds": 0.5}

    def dies(phase: str, done: int, total: int) -> None:
        proxy.set(dead=phase != "index" and done >= 5)

    for run_once in (
        lambda progress: copy_dataset(tmp_path / "source", url, storage=storage, journal=journal, progress=progress),
        lambda progress: verify_dataset(url, deep=True, storage=storage, journal=journal, progress=progress),
        lambda progress: copy_dataset(url, tmp_path / "back", storage=storage, journal=journal, progress=progress),
    ):
        with pytest.raises(StorageError, match=url):
            run_once(dies)
        proxy.set(dead=False)
        run_once(None)
    assert tree_of(tmp_path / "back") == tree_of(tmp_path / "source")
    assert not list(journal.iterdir())


def test_a_real_object_store(tmp_path: Path, rgw: Rgw, s3_env: S3Env) -> None:
    """SHARD-2 with multipart uploads on Ceph RGW; missing read or write permission is reported at once."""
    s3_env(rgw)
    seal_whole(tmp_path / "source", 2, clip_bytes=6 * 2**20)
    bucket = rgw.new_bucket()
    url = f"s3://{bucket}/ds"
    rgw.client.create_multipart_upload(Bucket=bucket, Key="ds/shards/left.tar")
    report = copy_dataset(tmp_path / "source", url, journal=tmp_path / "journal", temp_dir=tmp_path)
    assert report.num_uploads_aborted == 1 and not rgw.uploads(bucket)
    assert rgw.tree(bucket, "ds") == tree_of(tmp_path / "source")
    assert verify_dataset(url, deep=True, journal=tmp_path / "journal").is_right
    s3_env(rgw.other)
    for refused in (
        lambda: verify_dataset(url, journal=tmp_path / "journal"),
        lambda: copy_dataset(url, tmp_path / "back", journal=tmp_path / "journal"),
        lambda: copy_dataset(tmp_path / "source", f"s3://{bucket}/mine", journal=tmp_path / "journal"),
    ):
        with pytest.raises(StorageError, match=r"403|AccessDenied"):
            refused()


def test_a_foreign_temporary_directory_is_not_used(tmp_path: Path) -> None:
    """SAFE-1: a symbolic link in place of the directory, which any user can create in /tmp, is refused."""
    (tmp_path / "temp").mkdir()
    (tmp_path / "elsewhere").mkdir()
    seal_whole(tmp_path / "source", 1, clip_bytes=8 * 2**20)

    def names(phase: str, done: int, total: int) -> None:
        found.update(path.name for path in (tmp_path / "temp").iterdir())

    found: set[str] = set()
    copy_dataset(
        tmp_path / "source", "memory://linked/ds", temp_dir=tmp_path / "temp", journal=tmp_path / "j", progress=names
    )
    (name,) = found
    open_store("memory://linked/ds").remove("manifest.json")
    (tmp_path / "temp" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="is not the scratch directory of an earlier copy"):
        copy_dataset(tmp_path / "source", "memory://linked/ds", temp_dir=tmp_path / "temp", journal=tmp_path / "j")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_equal_datasets_in_two_places_do_not_share_a_scratch_folder(tmp_path: Path) -> None:
    """Equal datasets may be compacted or merged on one machine at the same time."""
    stores = [open_store(f"memory://scratch-{name}") for name in "ab"]
    with scratch_folder(stores[0], "same", tmp_path) as first, scratch_folder(stores[1], "same", tmp_path) as second:
        assert first.is_dir() and second.is_dir() and first != second
    assert list(tmp_path.iterdir()) == []
