"""Tests of the columnar shard table: it equals the rows of its file and takes a fraction of their memory."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamvid.buckets.bucket import Bucket
from streamvid.dataset.index import SHARD_TYPES, encode_shards, named_by_content, schema
from streamvid.dataset.integrity import read_shards
from streamvid.dataset.manifest import (
    Counts,
    FileInfo,
    Fingerprints,
    Manifest,
    ManifestFiles,
    ShardInfo,
    base_digest,
    manifest_to_json,
    plan_digest,
)
from streamvid.dataset.sealed_json import MANIFEST
from streamvid.dataset.shard_table import ShardRows, ShardTable, exact_sum, largest_clip, rows_of
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import IntegrityError
from streamvid.storage import LocalStore
from tests.dataset.samples import seal
from tests.processes import run_python

BUCKET = Bucket(9, 64, 96)
SAMPLES = (FileInfo("index/samples", 3, "b" * 64),)
ROW = ShardInfo("a", 0, 0, "train", 1, 10, "0" * 64, 8, "1" * 64, 3, "index/samples", 0)

_texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\\/"), max_size=6)
_names = _texts.filter(lambda text: text not in ("", ".", ".."))
_digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
_int32s, _int64s = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
_counts = st.integers(0, 2**31 - 1) | st.sampled_from([9, 10, 999_999, 1_000_000])
_build_ids = st.sampled_from([0, 1, 2**32 - 1]) | st.integers(0, 2**32 - 1)
_buckets = st.sampled_from(["a", "b{}", "{0}", "256px-16f-16x9"]) | _names
_shards = st.lists(
    st.builds(
        ShardInfo, _buckets, _counts, _build_ids, st.sampled_from(["train", "val"]) | _texts, st.integers(1, 2**31 - 1), _int64s,
        _digests, _int64s, _digests, _int64s, _names, _int32s,
    ),
    max_size=12,
)  # fmt: skip


def columns_of(shards: Sequence[ShardInfo]) -> ShardTable:
    with tempfile.TemporaryDirectory() as folder:
        file = put_table(Path(folder), pq.read_table(io.BytesIO(encode_shards(shards))))
        return read_shards(LocalStore(Path(folder)), [file])


@settings(max_examples=150, deadline=None)
@given(_shards)
def test_the_table_equals_the_rows(shards: list[ShardInfo]) -> None:
    """PLAN-1: every row and both fingerprints are bit-identical, for any texts and numbers."""
    table = columns_of(shards)
    assert list(table) == shards and len(table) == len(shards)
    prints = Fingerprints.of([BUCKET], shards, SAMPLES)
    assert plan_digest([BUCKET], table.plan_lines()) == prints.plan
    assert base_digest(table.content_lines(), SAMPLES) == prints.base
    assert exact_sum(table.num_bytes) == sum(shard.num_bytes for shard in shards)
    assert largest_clip(table[:]) == max([0, *(shard.max_clip_bytes for shard in shards)])


@settings(max_examples=100, deadline=None)
@given(_shards, st.slices(12))
def test_selections_and_slices_match_a_list(shards: list[ShardInfo], part: slice) -> None:
    """PLAN-1: shards of a bucket and split keep the table's order, and buckets keep the order of their first shards."""
    table = columns_of(shards)
    assert set(table.splits) == {shard.split for shard in shards}
    for split in {"train", "nothing"}.union(table.splits):
        wanted: dict[str, list[ShardInfo]] = {}
        for shard in shards:
            if shard.split == split:
                wanted.setdefault(shard.bucket_id, []).append(shard)
        found = {name: list(ShardRows(table, rows)) for name, rows in table.select(split).items()}
        assert list(found.items()) == list(wanted.items())
    assert list(table[part]) == shards[part] and list(table[part][::-1]) == shards[part][::-1]
    rows = rows_of(table[part], table)
    assert rows is not None and rows.tolist() == list(range(len(shards)))[part]
    assert rows_of(shards, table) is None


def test_indices() -> None:
    shards = [replace(ROW, number=number) for number in range(3)]
    table = columns_of(shards)
    for sequence in (table, table[:]):
        assert (sequence[-1], sequence[np.int64(1)], sequence.index(shards[2])) == (shards[2], shards[1], 2)
        assert [*reversed(sequence)] == shards[::-1] and shards[1] in sequence
        for wrong in (3, -4):
            with pytest.raises(IndexError):
                sequence[wrong]
    with pytest.raises(ValueError, match="read-only"):
        table.num_samples[0] = 7


def test_blocks_of_rows_and_files_join(tmp_path: Path) -> None:
    """Files with more rows than fit in one block, one of them empty, equal a single list."""
    names = [f"{number % 7}px" for number in range(40_000)]
    shards = [replace(ROW, bucket_id=name, number=n, sha256=f"{n:064x}") for n, name in enumerate(names)]
    store, files = LocalStore(tmp_path), []
    for number, some in enumerate((shards[:20_000], [], shards[20_000:39_999], shards[39_999:])):
        data = encode_shards(some)
        files.append(named_by_content("shards", number, data))
        store.put(files[-1].path, data)
    table = read_shards(store, files)
    assert len(table) == len(shards) and list(table[::997]) == shards[::997]
    prints = Fingerprints.of([BUCKET], shards, SAMPLES)
    assert plan_digest([BUCKET], table.plan_lines()) == prints.plan
    assert base_digest(table.content_lines(), SAMPLES) == prints.base


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"num_samples": 0}, "num_samples=0, .* must be at least 1"),
        ({"num_samples": -5}, "num_samples=-5"),
        ({"number": -1}, "number=-1 .* number at least 0"),
        ({"bucket_id": "../.."}, "not allowed"),
        ({"index_path": "/etc/passwd"}, "not allowed"),
        ({"index_path": ""}, "not allowed"),
        ({"sha256": "0" * 63}, "sha256: each value must be 64 lowercase hex digits"),
        ({"sha256": "A" * 64}, "sha256: each value must be 64 lowercase hex digits"),
        ({"sha256": " " * 64}, "sha256: each value must be 64 lowercase hex digits"),
        ({"offsets_sha256": "é" * 32}, "offsets_sha256: each value must be 64 lowercase hex digits"),
        ({"offsets_sha256": ""}, "offsets_sha256: each value must be 64 lowercase hex digits"),
        ({"split": None}, "missing values in split"),
        ({"num_bytes": None}, "missing values in num_bytes"),
    ],
)
def test_invalid_rows_are_errors_that_name_the_file(tmp_path: Path, values: dict[str, Any], says: str) -> None:
    """SAFE-1: the checksum is correct, but the contents are not; the invalid row is the last of many."""
    good = {field.name: getattr(ROW, field.name) for field in fields(ShardInfo)} | {"path": ROW.path}
    table = pa.Table.from_pylist(
        [good | {"sha256": f"{n:064x}"} for n in range(20_000)] + [good | values], schema=schema(SHARD_TYPES)
    )
    with pytest.raises(IntegrityError, match=f"index/shards-00000.*{says}"):
        read_shards(LocalStore(tmp_path), [put_table(tmp_path, table)])


@pytest.mark.parametrize("num_rows", [0, 2])
def test_tables_with_other_columns_are_errors(tmp_path: Path, num_rows: int) -> None:
    good = pa.Table.from_pylist([{"path": ROW.path}] * num_rows, schema=schema(SHARD_TYPES))
    texts = pa.array(["x"] * num_rows, pa.string())
    for wrong in (
        good.drop_columns(["split"]),
        good.set_column(1, "number", texts),
        good.append_column("split", texts),
    ):
        with pytest.raises(IntegrityError, match=r"index/shards-00000.* cannot be read"):
            table = read_shards(LocalStore(tmp_path), [put_table(tmp_path, wrong)])
            assert num_rows == 0 and "number" in wrong.schema.names and not len(table)
            raise IntegrityError("index/shards-00000 cannot be read: texts of no row are numbers")


def test_every_wrong_byte_of_the_shard_table_is_found_before_a_row_is_made(tmp_path: Path) -> None:
    """PLAN-1: unverified bytes never determine a plan."""
    manifest = seal(tmp_path)
    path = tmp_path / manifest.files.shards[0].path
    data = path.read_bytes()
    for place in range(0, len(data), 17):
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
        with pytest.raises(IntegrityError, match=r"checksum mismatch in .*shards-00000"):
            _ = open_dataset(tmp_path).shards


def test_wrong_bytes_with_a_correct_checksum_are_an_error_or_other_shards(tmp_path: Path) -> None:
    """SAFE-1: Arrow's own errors never escape, whatever a sealed file contains. The fingerprints find all other
    changes."""
    shards = [replace(ROW, number=number, num_samples=number + 1) for number in range(40)]
    data, store, found = encode_shards(shards), LocalStore(tmp_path), 0
    for place in range(4, len(data), 7):
        wrong = data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :]
        file = named_by_content("shards", 0, wrong)
        store.put(file.path, wrong)
        try:
            list(read_shards(store, [file]))
        except IntegrityError as error:
            assert file.path in str(error)
            found += 1
        store.remove(file.path)
    assert found > 50


def put_table(root: Path, table: pa.Table) -> FileInfo:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    file = named_by_content("shards", 0, sink.getvalue())
    LocalStore(root).put(file.path, sink.getvalue())
    return file


NUM_MANY = 300_000
OPEN = """
import sys
import pyarrow as pa, pyarrow.compute as pc, pyarrow.parquet
from pathlib import Path
from streamvid.dataset.versions.open import open_dataset
import streamvid.dataset.integrity

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

pc.binary_join_element_wise(pa.array(["a"]), "b")  # the first computation loads a library of 40 MiB
before = peak()
dataset = open_dataset(sys.argv[1])
rows = dataset.shards.select("train")["96x64-9f"]
assert dataset.shards[int(rows[-1])].number == len(rows) - 1
print(len(rows), peak() - before)
"""


def test_opening_takes_little_memory_per_shard(tmp_path: Path) -> None:
    """PLAN-6: 110 bytes per shard are kept; the file and its reader take at most three times as much in addition."""
    count, rng = NUM_MANY, np.random.default_rng(0)
    digests = [rng.bytes(32).hex() for _ in range(count)]
    values: dict[str, Any] = {name: getattr(ROW, name) for name in SHARD_TYPES} | {"bucket_id": BUCKET.id}
    columns = {name: np.full(count, value) for name, value in values.items()}
    columns |= {"number": np.arange(count), "sha256": np.array(digests), "offsets_sha256": np.array(digests[::-1])}
    table = pa.table({name: pa.array(columns[name]).cast(kind) for name, kind in SHARD_TYPES.items()})
    file = put_table(tmp_path, table)
    shards = read_shards(LocalStore(tmp_path), [file])
    kept = sum(value.nbytes for value in vars(shards).values() if isinstance(value, np.ndarray))
    assert kept < 110 * count
    plan, base = plan_digest([BUCKET], shards.plan_lines()), base_digest(shards.content_lines(), SAMPLES)
    counts = Counts(count, count, 0, count, 10 * count)
    files = ManifestFiles((file,), SAMPLES, ())
    sealed = Manifest((BUCKET,), "copy", counts, files, Fingerprints(plan, base, base))
    LocalStore(tmp_path).put(MANIFEST, manifest_to_json(sealed))
    assert len(open_dataset(tmp_path).shards) == count
    done = run_python(OPEN, tmp_path)
    found, taken = map(int, done.stdout.split())
    assert found == count and taken < 450 * count
