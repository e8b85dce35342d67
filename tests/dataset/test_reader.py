"""Tests of reading a sealed dataset and its index, and of damage to either."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from streamvid.dataset.index import MAX_SHARDS_PER_FILE
from streamvid.dataset.integrity import SamplesFile, StoreFile
from streamvid.dataset.manifest import FileInfo, manifest_to_json
from streamvid.dataset.reader import Dataset
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError, DatasetError, IntegrityError, StorageError, StreamvidError
from streamvid.storage import LocalStore
from tests.dataset.samples import seal
from tests.processes import run_python


def test_shards_samples_and_rejections(tmp_path: Path) -> None:
    seal(tmp_path, (2, 3, 1))
    dataset = open_dataset(tmp_path)
    assert [(s.bucket_id, s.number, s.num_samples) for s in dataset.shards] == [
        ("96x64-9f", 0, 2), ("96x64-9f", 1, 3), ("256px-16f-16x9", 0, 1),
    ]  # fmt: skip
    table = dataset.samples(dataset.shards[1], ["key", "shard", "user.score"])
    assert table.to_pydict() == {"key": ["a-0", "a-1", "a-2"], "shard": [1, 1, 1], "user.score": [0.0, 1.0, 2.0]}
    assert dataset.samples_table().num_rows == 6
    assert dataset.shards_table().num_rows == 3
    assert dataset.rejections_table().to_pylist() == [
        {"row": 7, "source": "b.mp4", "reason": "no video", "kind": "not-media"}
    ]
    assert dataset.url == str(tmp_path)


def test_columns(tmp_path: Path) -> None:
    seal(tmp_path)
    dataset = open_dataset(tmp_path)
    assert dataset.user_columns == ("score", "tag")
    assert (dataset.column("score"), dataset.column("fps")) == ("user.score", "fps")
    with pytest.raises(ConfigError, match=r"'nope' is not a column of the dataset.*fps.*score"):
        dataset.column("nope")
    schema = dataset.samples_table().schema
    assert (schema.field("user.tag").type, schema.field("clip_sha256").type) == (pa.string(), pa.binary(32))


def test_a_shard_with_many_rows_is_one_row_group(tmp_path: Path) -> None:
    seal(tmp_path, (5000, 2))
    dataset = open_dataset(tmp_path)
    assert dataset.samples(dataset.shards[0], ["index"])["index"].to_pylist() == list(range(5000))


def test_threads_share_a_dataset(tmp_path: Path) -> None:
    seal(tmp_path, tuple(range(1, 30)))
    dataset = open_dataset(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(lambda shard: dataset.samples(shard, ["key"]).num_rows, [*dataset.shards] * 3))
    assert counts == list(range(1, 30)) * 3


READING = """
import os, sys
import pyarrow.parquet
from streamvid import open_dataset
dataset = open_dataset(sys.argv[1])
before = len(os.listdir("/proc/self/task"))
for shard in dataset.shards:
    dataset.samples(shard)
dataset.samples_table(), dataset.rejections_table()
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in Linux's /proc")
def test_reading_leaves_no_thread_behind(tmp_path: Path) -> None:
    """An Arrow thread that still holds Python objects would abort the exiting process ("terminate called …", exit code
    134)."""
    seal(tmp_path, (3, 2))
    done = run_python(READING, tmp_path, check=False)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


@pytest.mark.parametrize("kind", ["shards", "samples", "rejections"])
def test_a_changed_index_file_is_noticed(tmp_path: Path, kind: str) -> None:
    seal(tmp_path)
    path = next(tmp_path.glob(f"index/{kind}-*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    dataset = open_dataset(tmp_path)
    with pytest.raises(IntegrityError, match="checksum mismatch"):
        getattr(dataset, f"{kind}_table")()


def test_truncated_or_missing_index_files_are_noticed(tmp_path: Path) -> None:
    seal(tmp_path)
    shard = open_dataset(tmp_path).shards[0]
    path = next(tmp_path.glob("index/samples-*"))
    data = path.read_bytes()
    for change in (lambda: path.write_bytes(data[:-1]), path.unlink):
        change()
        with pytest.raises(IntegrityError, match="is missing|bytes instead of"):
            open_dataset(tmp_path).samples(shard)


@pytest.mark.parametrize("noise", [b"\xff", b"PAR1", bytes(1)])
def test_a_sealed_file_full_of_noise_is_an_error_that_names_it(tmp_path: Path, noise: bytes) -> None:
    """SAFE-1: a correct checksum does not make a file valid Parquet."""
    store, data = LocalStore(tmp_path), noise * 2000
    store.put("index/x", data)
    with pytest.raises(IntegrityError, match="index/x.* cannot be read"):
        SamplesFile(store, FileInfo.of("index/x", data)).rows(0, None)


def test_every_wrong_byte_of_the_samples_index_is_found_before_a_row_is_read(tmp_path: Path) -> None:
    """FETCH-1: unverified bytes never determine a caption, key or window."""
    manifest = seal(tmp_path)
    path = tmp_path / manifest.files.samples[0].path
    data = path.read_bytes()
    for place in range(0, len(data), 31):
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
        dataset = open_dataset(tmp_path)
        for read in (lambda d=dataset: d.samples(d.shards[0], ["key"]), lambda d=dataset: d.column("score")):
            with pytest.raises(IntegrityError, match="checksum mismatch in .*samples-00000"):
                read()


def test_bytes_that_rot_after_verification_are_found_by_page_checksums(tmp_path: Path) -> None:
    manifest = seal(tmp_path, (400, 400))
    dataset = open_dataset(tmp_path)
    right = dataset.samples(dataset.shards[1])
    path = tmp_path / manifest.files.samples[0].path
    data, found = path.read_bytes(), 0
    for place in range(4, len(data) * 3 // 4, 61):
        path.write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
        try:
            assert dataset.samples(dataset.shards[1]).equals(right)  # in the other row group, or in a page's statistics
        except IntegrityError as error:
            assert "samples-00000" in str(error) and "row group 1" in str(error)
            found += 1
    assert found > 5


def test_forgotten_footers_are_read_again(tmp_path: Path) -> None:
    manifest = seal(tmp_path)
    file = SamplesFile(LocalStore(tmp_path), manifest.files.samples[0])
    first = file.rows(1, ["key"])
    file.forget()
    assert file.rows(1, ["key"]).equals(first)


@pytest.mark.parametrize("name", ["plan", "base"])
def test_fingerprints_are_verified_against_the_tables(tmp_path: Path, name: str) -> None:
    """PLAN-1: the fingerprint that a saved state is bound to matches the tables."""
    zeros = {"plan": {"plan": "0" * 64}, "base": {"base": "0" * 64, "content": "0" * 64}}
    seal(tmp_path, manifest_fingerprints=zeros[name])
    with pytest.raises(IntegrityError, match=f"the {name} fingerprint in the manifest is 0000"):
        _ = open_dataset(tmp_path).shards


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("shards", lambda dataset: dataset.shards),
        ("num_bytes", lambda dataset: dataset.shards),
        ("rejections", lambda dataset: dataset.rejections_table()),
    ],
)
def test_counts_are_verified_against_the_tables(tmp_path: Path, name: str, read: Callable[[Dataset], object]) -> None:
    """SHARD-3."""
    manifest = seal(tmp_path)
    changed = replace(manifest, counts=replace(manifest.counts, **{name: 77}))
    LocalStore(tmp_path).put("manifest.json", manifest_to_json(changed))
    with pytest.raises(IntegrityError, match=f"{name} is [0-9]+ in .*, but 77 in the manifest"):
        read(open_dataset(tmp_path))


def test_a_manifest_with_other_counts_is_noticed(tmp_path: Path) -> None:
    seal(tmp_path, (1, 1), manifest_counts={"samples": 3})
    with pytest.raises(IntegrityError, match="in the manifest; copy the dataset again"):
        _ = open_dataset(tmp_path).shards


def test_a_shard_table_that_names_an_unlisted_file_is_refused(tmp_path: Path) -> None:
    seal(tmp_path, manifest_files={"samples": ()})
    with pytest.raises(DatasetError, match="which is not in the manifest"):
        _ = open_dataset(tmp_path).shards


def test_only_local_urls_are_opened(tmp_path: Path) -> None:
    seal(tmp_path)
    assert open_dataset(tmp_path.as_uri()).manifest == open_dataset(str(tmp_path)).manifest
    with pytest.raises(StreamvidError, match="no dataset at"):
        open_dataset(tmp_path / "nowhere")


def test_store_file_is_a_file(tmp_path: Path) -> None:
    store, data = LocalStore(tmp_path), bytes(range(256))
    store.put("x", data)
    file = StoreFile(store, "x", 256)
    assert file.readable() and file.seekable()
    assert (file.read(3), file.tell()) == (data[:3], 3)
    assert (file.seek(-6, io.SEEK_END), file.read()) == (250, data[250:])
    assert file.read(5) == b""
    file.seek(10)
    assert (file.seek(5, io.SEEK_CUR), file.read(1)) == (15, data[15:16])
    with pytest.raises(StorageError, match="ends at byte"):
        StoreFile(store, "x", 300).readall()


def test_footers_stay_small() -> None:
    """PLAN-6: a sample file never holds more row groups than this."""
    assert MAX_SHARDS_PER_FILE <= 256
