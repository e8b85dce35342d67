"""Tests of `verify`: it reports every problem and nothing else, and an interrupted run resumes."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamvid.dataset.upkeep.verify import MAX_PROBLEMS, VerifyReport, verify_dataset
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError, DatasetError, StorageError
from streamvid.storage import LocalStore
from tests.dataset.frozen import DATASETS, FROZEN, tree_of_newest
from tests.dataset.whole import Watched, flip, seal_whole
from tests.files import tree_of
from tests.processes import run_python
from tests.servers import S3Env, S3Server


def named(report: VerifyReport) -> set[str]:
    return {problem.path for problem in report.problems}


def tars(root: Path) -> list[str]:
    return sorted(path for path in tree_of(root) if path.endswith(".tar"))


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("deep", [False, True])
def test_an_intact_dataset_has_no_problems(name: str, deep: bool, tmp_path: Path) -> None:
    """This holds for every kind of clip. No file changes, and no journal remains."""
    before, newest = tree_of(FROZEN / name), tree_of_newest(FROZEN / name)
    seen: list[tuple[str, int, int]] = []
    report = verify_dataset(FROZEN / name, deep=deep, journal=tmp_path, progress=lambda *event: seen.append(event))
    dataset = open_dataset(FROZEN / name)
    assert report.is_right and not report.problems and not report.remedy and report.num_extra == 0
    assert (report.totals.num_shards, report.totals.num_files) == (len(dataset.shards), len(newest))
    assert report.totals.num_samples == dataset.manifest.counts.samples
    assert report.totals.num_bytes == sum(map(len, newest.values())) - len(newest["manifest.json"])
    assert seen[-1] == ("shards", len(dataset.shards), len(dataset.shards))
    assert tree_of(FROZEN / name) == before and not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dataset with clips, images and packets, which tests damage and restore."""
    root = tmp_path_factory.mktemp("native") / "dataset"
    shutil.copytree(FROZEN / "native", root)
    return root


FILES = sorted(tree_of(FROZEN / "native"))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), place=st.integers(0, 10**6), mask=st.integers(1, 255))
def test_a_changed_byte_is_named_with_its_file_and_sample(native: Path, name: str, place: int, mask: int) -> None:
    """The report names exactly the changed file and, for a clip or a packet table, exactly the affected samples."""
    path, data = native / name, (native / name).read_bytes()
    position = place % len(data)
    flip(path, position, mask)
    try:
        report = verify_dataset(native, deep=True, journal=native.parent / "journal")
        changed = path.read_bytes()
    finally:
        path.write_bytes(data)
    if name == "manifest.json" and report.is_right:  # a change of whitespace only
        assert json.loads(changed) == json.loads(data)
        return
    assert not report.is_right and named(report) == {name} and report.num_files_wrong == 1
    assert "--check-existing" in report.remedy
    keys = {key for problem in report.problems for key in problem.keys}
    dataset = open_dataset(native)
    for shard in dataset.shards:
        rows = dataset.samples(shard).to_pylist()
        if shard.path == name:
            hit = {r["key"] for r in rows if r["clip_offset"] <= position < r["clip_offset"] + r["clip_bytes"]}
            assert keys == hit and {problem.bucket_id for problem in report.problems} == {shard.bucket_id}
        if name.endswith(".arrows") and rows[0]["packets_offset"] is not None:
            is_hit = 0 <= position - rows[0]["packets_offset"] < rows[0]["packets_bytes"]
            assert is_hit == ({row["key"] for row in rows} <= keys)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("damage", [Path.unlink, truncated, longer, a_folder])
def test_a_file_that_is_missing_or_has_another_size_is_reported(
    tmp_path: Path, damage: Callable[[Path], None], deep: bool
) -> None:
    """No shard has to be read. For a tar, the keys of all its samples are reported."""
    root = tmp_path / "dataset"
    for name in FILES:
        if name == "manifest.json":
            continue
        shutil.copytree(FROZEN / "native", root)
        damage(root / name)
        report = verify_dataset(root, deep=deep, journal=tmp_path)
        assert not report.is_right and named(report) == {name}, (name, report)
        assert report.problems[0].what in ("missing", "size")
        assert f"streamvid copy SRC {root}" in report.remedy and "--check-existing" not in report.remedy
        if name.endswith(".tar"):
            shard = next(s for s in open_dataset(root).shards if s.path == name)
            assert report.problems[0].num_keys == len(report.problems[0].keys) == shard.num_samples
        shutil.rmtree(root)


def test_a_missing_index_reports_the_number_of_affected_samples(tmp_path: Path) -> None:
    seal_whole(tmp_path / "dataset", 4)
    for path in (tmp_path / "dataset").glob("index/samples-*"):
        path.unlink()
    for deep in (False, True):
        report = verify_dataset(tmp_path / "dataset", deep=deep, journal=tmp_path)
        assert report.num_problems == 1 and report.problems[0].num_keys == 12 and report.is_complete


def test_a_damaged_shard_table_ends_the_run(tmp_path: Path) -> None:
    seal_whole(tmp_path / "dataset")
    (path,) = (tmp_path / "dataset").glob("index/shards-*")
    flip(path, 10)
    report = verify_dataset(tmp_path / "dataset", deep=True, journal=tmp_path)
    assert not report.is_complete and not report.is_right and report.totals.num_shards == 0
    assert named(report) == {f"index/{path.name}"}


def test_extra_files_are_reported_and_kept(tmp_path: Path) -> None:
    root = tmp_path / "dataset"
    shutil.copytree(FROZEN / "native", root)
    (root / "notes.txt").write_text("mine")
    (root / ".staging").mkdir()
    (root / ".staging" / "lock").touch()
    report = verify_dataset(root, deep=True, journal=tmp_path)
    assert report.is_right and report.extra == (".staging/lock", "notes.txt") and report.num_extra == 2
    assert (root / "notes.txt").read_text() == "mine"


def test_captions_with_a_wrong_checksum_are_content_problems(tmp_path: Path) -> None:
    """All intact copies share this problem, so no copy repairs it, and the remedy says so."""
    seal_whole(tmp_path / "dataset", 2, caption="other words {}")
    assert verify_dataset(tmp_path / "dataset").is_right
    report = verify_dataset(tmp_path / "dataset", deep=True, journal=tmp_path)
    assert [(problem.what, problem.num_keys) for problem in report.problems] == [("content", 3)] * 2
    assert report.problems[0].path.startswith("index/samples") and report.problems[0].keys == ("s0-0", "s0-1", "s0-2")
    assert "rebuild" in report.remedy


def test_all_problems_are_counted_and_the_first_are_kept(tmp_path: Path) -> None:
    root, num_shards = tmp_path / "dataset", MAX_PROBLEMS // 2 + 4
    seal_whole(root, num_shards, clip_bytes=32, has_shards=False)
    report = verify_dataset(root)
    assert report.num_problems == report.num_files_wrong == 2 * num_shards
    assert len(report.problems) == MAX_PROBLEMS
    assert json.loads(json.dumps(report.to_json()))["num_problems"] == 2 * num_shards


def test_a_missing_dataset_is_an_error_and_not_a_finding(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"manifest\.json is missing"):
        verify_dataset(tmp_path)
    with pytest.raises(ConfigError, match="workers=0"):
        verify_dataset(FROZEN / "native", workers=0)


def test_an_unreadable_file_is_a_finding_and_an_unreachable_store_an_error(tmp_path: Path) -> None:
    """FETCH-1: a network failure is never reported as damage."""
    seal_whole(tmp_path / "dataset")
    store = Watched(LocalStore(tmp_path / "dataset"))
    first = tars(tmp_path / "dataset")[0]

    def bad_sector(path: str, buffer: memoryview) -> None:
        if path == first:
            raise StorageError("cannot read it: Input/output error")

    store.after_read = bad_sector
    report = verify_dataset(store, deep=True, journal=tmp_path)
    assert [(problem.path, problem.what) for problem in report.problems] == [(first, "unreadable")]
    assert report.problems[0].num_keys == 3

    def away(path: str) -> None:
        if path.endswith(".tar"):
            raise StorageError("the store is away")

    store.before_read = away
    with pytest.raises(StorageError, match="is away"):
        verify_dataset(store, deep=True, journal=tmp_path)


def stopping_at(number: int) -> Callable[[str, int, int], None]:
    def progress(phase: str, done: int, total: int) -> None:
        if phase == "shards" and done == number:
            raise KeyboardInterrupt

    return progress


def test_an_interrupted_run_resumes(tmp_path: Path) -> None:
    """Verified shards are read again only if they have changed since. A completed run leaves nothing to resume."""
    root, journal = tmp_path / "dataset", tmp_path / "journal"
    seal_whole(root, 12)
    paths = tars(root)
    for stop in (3, 7):
        with pytest.raises(KeyboardInterrupt):
            verify_dataset(LocalStore(root), deep=True, workers=1, journal=journal, progress=stopping_at(stop))
    flip(root / paths[1], 700)  # already read
    store = Watched(LocalStore(root))
    report = verify_dataset(store, deep=True, workers=1, journal=journal)
    assert named(report) == {paths[1]}
    assert report.num_shards_resumed >= 6
    assert [path for path in paths if path in store.bytes_read] == [paths[1], *paths[report.num_shards_resumed + 1 :]]
    assert not list(journal.iterdir())
    again = verify_dataset(LocalStore(root), deep=True, journal=journal)
    assert again.num_shards_resumed == 0 and named(again) == {paths[1]}


def test_fresh_reads_everything(tmp_path: Path) -> None:
    seal_whole(tmp_path / "dataset", 8)
    with pytest.raises(KeyboardInterrupt):
        verify_dataset(tmp_path / "dataset", deep=True, journal=tmp_path / "journal", progress=stopping_at(6))
    report = verify_dataset(tmp_path / "dataset", deep=True, journal=tmp_path / "journal", fresh=True)
    assert report.is_right and report.num_shards_resumed == 0


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dataset of five shards, which tests damage and restore."""
    root = tmp_path_factory.mktemp("five") / "dataset"
    seal_whole(root, 5, clip_bytes=64)
    return root


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10**5), mask=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_journal_never_vouches_for_a_shard(five: Path, place: int, mask: int, cut: bool) -> None:
    """A torn or changed line counts as not written and never causes an error."""
    root, journal = five, five.parent / "journal"
    with pytest.raises(KeyboardInterrupt):
        verify_dataset(root, deep=True, workers=1, journal=journal, progress=stopping_at(4))
    (path,) = journal.iterdir()
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= mask
    path.write_bytes(data[: place % len(data)] if cut else data)
    flip(root / tars(root)[4], 600)
    report = verify_dataset(root, deep=True, workers=1, journal=journal)
    flip(root / tars(root)[4], 600)
    assert named(report) == {tars(root)[4]}
    assert report.num_shards_resumed <= 4


def test_an_unwritable_journal_does_not_stop_the_run(tmp_path: Path) -> None:
    seal_whole(tmp_path / "dataset")
    (tmp_path / "journal").write_text("a file where a folder should be")
    assert verify_dataset(tmp_path / "dataset", deep=True, journal=tmp_path / "journal").is_right


def test_reads_are_small_and_each_byte_is_read_once(tmp_path: Path) -> None:
    """No request exceeds 16 MiB, however large a tar is. Clips that span several requests are verified too."""
    root = tmp_path / "dataset"
    seal_whole(root, 1, clip_bytes=12 * 2**20)
    store = Watched(LocalStore(root))
    assert verify_dataset(store, deep=True, journal=tmp_path / "journal").is_right
    (tar,) = tars(root)
    assert store.largest_read <= 16 * 2**20
    assert store.bytes_read[tar] == (root / tar).stat().st_size > 36 * 2**20
    flip(root / tar, 20 * 2**20)
    report = verify_dataset(root, deep=True, journal=tmp_path / "journal")
    assert [problem.keys for problem in report.problems] == [("s0-1",)]


def test_bytes_corrupted_in_transit_are_read_again(tmp_path: Path) -> None:
    """FETCH-1: only wrong bytes in the store itself are reported."""
    seal_whole(tmp_path / "dataset")
    store, seen = Watched(LocalStore(tmp_path / "dataset")), set()

    def flipped(path: str, buffer: memoryview) -> None:
        if path not in seen and not path.startswith("index/"):
            seen.add(path)
            buffer[len(buffer) // 3] ^= 64

    store.after_read = flipped
    assert verify_dataset(store, deep=True, journal=tmp_path / "journal").is_right
    assert seen > set(tars(tmp_path / "dataset"))


CODE = """
import os, signal, sys, threading
from streamvid.dataset.upkeep.verify import verify_dataset
root, journal, phase, number, delay = sys.argv[1:]
def progress(name, done, total):
    if name == phase and done == int(number):
        threading.Timer(float(delay), os.kill, (os.getpid(), signal.SIGKILL)).start()
report = verify_dataset(root, deep=True, workers=2, journal=journal, progress=progress)
print(len(report.problems), report.num_shards_resumed, flush=True)
"""


def test_killed_runs_resume_with_the_same_findings(tmp_path: Path) -> None:
    """After kill -9 at seeded moments, the next run reports the only existing problem."""
    root, journal, rng = tmp_path / "dataset", tmp_path / "journal", random.Random(5)
    seal_whole(root, 150)
    flip(root / tars(root)[60], 800)
    killed = 0
    for phase, number in (("index", 1), ("shards", 1), ("shards", 20), ("shards", 60), ("shards", 80)):
        done = run_python(CODE, root, journal, phase, number, rng.choice([0.0, 0.001, 0.003]), check=False)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        killed += done.returncode != 0
        assert done.returncode or done.stdout.startswith("1 ")
    assert killed >= 3
    report = verify_dataset(root, deep=True, journal=journal)
    assert named(report) == {tars(root)[60]} and not list(journal.iterdir())
    assert report.num_extra == 0


@pytest.mark.parametrize("deep", [False, True])
def test_a_dataset_in_a_bucket(tmp_path: Path, moto_server: S3Server, s3_env: S3Env, deep: bool) -> None:
    """A real server gives the same findings as a disk, and an interrupted run resumes there too."""
    s3_env(moto_server)
    seal_whole(tmp_path / "dataset", 9)
    bucket = moto_server.new_bucket()
    moto_server.upload_folder(tmp_path / "dataset", bucket, "a/ds/")
    url, journal = f"s3://{bucket}/a/ds", tmp_path / "journal"
    report = verify_dataset(url, deep=deep, journal=journal)
    assert report.is_right and report.num_extra == 0 and report.totals.num_shards == 9
    first, second, *_ = tars(tmp_path / "dataset")
    data = bytearray((tmp_path / "dataset" / first).read_bytes())
    data[1000] ^= 1
    moto_server.put(bucket, f"a/ds/{first}", bytes(data))
    moto_server.remove(bucket, f"a/ds/{second}")
    moto_server.put(bucket, "a/ds/notes.txt", b"mine")
    moto_server.put(bucket, "a/dsx/other.txt", b"of a neighbour whose name begins alike")
    if deep:
        with pytest.raises(KeyboardInterrupt):
            verify_dataset(url, deep=True, workers=1, journal=journal, progress=stopping_at(6))
    report = verify_dataset(url, deep=deep, journal=journal)
    assert named(report) == ({first, second} if deep else {second}) and report.extra == ("notes.txt",)
    assert (report.num_shards_resumed >= 4) == deep
