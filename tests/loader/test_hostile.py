"""Tests of SAFE-1: wrong values in an index are a named error, never a hang, a crash or unbounded memory use."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import streamvid
from streamvid.buckets.bucket import Bucket
from streamvid.dataset import index, manifest
from streamvid.dataset import integrity as proof
from streamvid.errors import (
    ConfigError,
    DatasetError,
    LoaderError,
    ProbeError,
    SampleError,
    StorageError,
    StreamvidError,
)
from streamvid.storage import LocalStore
from tests.files import png_bytes
from tests.loader.conftest import SMALL, build_dataset, open_loader

pytestmark = pytest.mark.timeout(60)

Edit = Callable[[list[dict[str, Any]]], object]


def rewrite(root: Path, *, samples: Edit | None = None, shards: Edit | None = None) -> Path:
    """Change rows in the index of a dataset with one shard.

    Reseal it, so that the wrong values have correct checksums.
    """
    store = LocalStore(root)
    sealed = manifest.read_manifest(store)
    files: dict[str, Any] = {}
    for group, edit in (("samples", samples), ("shards", shards)):
        if edit is None:
            continue
        table = pq.read_table(io.BytesIO(store.read(getattr(sealed.files, group)[0].path)))
        rows = table.to_pylist()
        edit(rows)
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), sink, compression="zstd")
        file = index.named_by_content(group, 1, sink.getvalue())
        store.put(file.path, sink.getvalue())
        files[group] = (file,)
    changed = dataclasses.replace(sealed, files=dataclasses.replace(sealed.files, **files))
    with contextlib.suppress(StreamvidError):  # rows that no table can hold have no fingerprint
        infos = proof.read_shards(store, changed.files.shards)
        prints = manifest.Fingerprints.of(sealed.buckets, infos, changed.files.samples)
        counts = dataclasses.replace(sealed.counts, num_bytes=sum(info.num_bytes for info in infos))
        changed = dataclasses.replace(changed, fingerprints=prints, counts=counts)
    store.put(manifest.MANIFEST, manifest.manifest_to_json(changed))
    if samples is not None and shards is None:
        path = changed.files.samples[0].path
        rewrite(root, shards=lambda rows: [row.update(index_path=path) for row in rows])
    return root


def set_in_row(number: int, **values: object) -> Edit:
    return lambda rows: rows[number].update(values)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"clip_bytes": 1 << 50}, "bytes=1125899906842624 for the clip"),
        ({"clip_bytes": -1}, "bytes=-1 for the clip"),
        ({"clip_bytes": 0}, "bytes=0 for the clip"),
        ({"clip_bytes": None}, "bytes=None for the clip"),
        ({"clip_offset": -1}, "offset=-1 for the clip"),
        ({"clip_offset": 1 << 62}, "offset=4611686018427387904 for the clip"),
        ({"clip_offset": None}, "offset=None for the clip"),
        ({"window_num_frames": 4}, "frames=4 for the clip"),
        ({"window_num_frames": -7}, "frames=-7 for the clip"),
        ({"clip_sha256": None}, "checksum"),
        ({"key": None}, "the key 'None'"),
        ({"key": "\x1b[2J\n"}, r"the key '\\x1b\[2J\\n'"),
        ({"key": "x" * 10**6}, "the key 'x{100}',"),
    ],
)
def test_an_invalid_row_is_an_error_that_names_its_sample(
    tmp_path: Path, values: dict[str, object], says: str, num_workers: int
) -> None:
    """FETCH-1: the samples before it are still delivered."""
    root = rewrite(build_dataset(tmp_path, {SMALL: [3]}), samples=set_in_row(1, **values))
    received = []
    with open_loader(root, num_workers=num_workers, shuffle="none") as loader:
        with pytest.raises(SampleError, match=rf"index 1 in .*000000\.tar.*{says}"):
            received.extend(batch.sample_keys[0] for batch in loader)
        assert received == ["96x64-5f-0"]
        with pytest.raises(SampleError, match=says):  # the same error is raised again
            list(loader)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_row_with_a_wrong_frame_count_is_a_bad_sample(tmp_path: Path, num_workers: int) -> None:
    """BAD-1: the clip does not decode to what the index states, whichever of the two is wrong."""
    root = rewrite(build_dataset(tmp_path, {SMALL: [3]}), samples=set_in_row(1, window_num_frames=1 << 30))
    with open_loader(root, num_workers=num_workers, shuffle="none") as loader:
        received = [(batch.sample_keys[0], batch.is_repeat.tolist()) for batch in loader]
    assert received == [("96x64-5f-0", [False]), ("96x64-5f-2", [True]), ("96x64-5f-2", [False])]


@pytest.mark.parametrize("place", ["manifest.json/\x1b[2J", "\x1b]0;x\x07\r"])
def test_error_messages_contain_no_terminal_controls(tmp_path: Path, place: str) -> None:
    """SAFE-1: names in a message are escaped, also in logs and tracebacks."""
    (tmp_path / "manifest.json").touch()
    for error in (StorageError(f"cannot read {place}"), ProbeError(place), ConfigError(place)):
        assert str(error).isprintable() and "\\x1b" in str(error)
    with pytest.raises(StreamvidError) as caught:
        streamvid.open_dataset(tmp_path / place)
    assert "\\x1b" in str(caught.value) and "\x1b" not in "".join(traceback.format_exception(caught.value))


def test_missing_times_and_texts(tmp_path: Path) -> None:
    def edit(rows: list[dict[str, Any]]) -> None:
        rows[0].update(fps=float("nan"), text=None)
        rows[1].update(fps=None)
        rows[2].update(key=rows[1]["key"])

    root = rewrite(build_dataset(tmp_path, {SMALL: [3]}), samples=edit)
    with open_loader(root, batch_size=3) as loader:
        (batch,) = [batch.clone() for batch in loader]
    assert batch.fps.isnan().tolist() == [True, True, False]
    assert batch.text[0] == "" and batch.sample_keys[1] == batch.sample_keys[2]


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        ({"bucket_id": "nope"}, DatasetError, "bucket 'nope' is not in the manifest"),
        ({"index_path": "index/nope.parquet"}, DatasetError, "lists index/nope.parquet, which is not in the manifest"),
        ({"index_path": "../x"}, StreamvidError, "not allowed"),
        ({"index_row_group": 7}, StreamvidError, "row group 7"),
        ({"index_row_group": -1}, StreamvidError, "row group -1"),
        ({"max_clip_bytes": 1 << 60}, LoaderError, "memory"),
        ({"max_clip_bytes": 10 << 40}, LoaderError, "memory"),
        ({"max_clip_bytes": 3}, SampleError, "bytes=.*, but 1 to 3 is allowed;"),
        ({"max_clip_bytes": -3}, SampleError, "bytes=.*, but 1 to -3 is allowed;"),
        ({"num_bytes": 10}, SampleError, "bytes=.* for the clip, but 1 to 10 is allowed;"),
        ({"num_samples": 2}, StreamvidError, "samples is 2 in the shard table, but 3 in the manifest"),
    ],
)
def test_a_wrong_shard_table_is_an_error(
    tmp_path: Path, values: dict[str, object], error: type[Exception], says: str
) -> None:
    root = rewrite(build_dataset(tmp_path, {SMALL: [3]}), shards=set_in_row(0, **values))
    with pytest.raises(error, match=says), open_loader(root) as loader:
        list(loader)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (set_in_row(1, text=" " * (80 << 20)), r"the \d+-byte file unpacks to 8\d{7} bytes"),
        (
            lambda rows: rows.extend(rows * 20_000),
            r"the footer declares 60003 rows, and the row groups declare 60003 rows; .* must not exceed the size of the file \(\d+ bytes\)",
        ),
    ],
)
def test_an_index_of_gigabytes_is_refused_by_its_footer(tmp_path: Path, edit: Edit, says: str) -> None:
    root = rewrite(build_dataset(tmp_path, {SMALL: [3]}), samples=edit)
    with pytest.raises(StreamvidError, match=rf"samples-.*parquet.*{says}"), open_loader(root) as loader:
        list(loader)
    with pytest.raises(StreamvidError, match=rf"samples-.*parquet.*{says}"):
        streamvid.open_dataset(root).samples_table()


def test_a_ring_larger_than_memory_is_an_error_before_allocation(tmp_path: Path) -> None:
    """The kernel would grant terabytes of address space, but writing the frames would exhaust the machine's memory."""
    root = build_dataset(tmp_path, {SMALL: [2]})
    with (
        open_loader(root, batch_size=1 << 20, tail="pad", limits={"prefetch_bytes": 0}) as loader,
        pytest.raises(LoaderError, match=r"bytes of memory for the ring.*prefetch_bytes.*batch size"),
    ):
        next(iter(loader))
    with (
        open_loader(root, limits={"prefetch_bytes": 1 << 70}) as loader,
        pytest.raises(LoaderError, match="bytes of memory for "),
    ):
        next(iter(loader))


def test_one_sample_in_a_batch_far_larger_than_its_bucket(tmp_path: Path) -> None:
    """PLAN-4: samples are repeated within a batch, each repeat is a separate visit, and the ring has room for them."""
    root = build_dataset(tmp_path, {Bucket(num_frames=5, height=64, width=96): [1]})
    with streamvid.VideoLoader(root, batch_size=40, tail="pad", num_workers=2, limits={"prefetch_bytes": 0}) as loader:
        batches = [batch.clone() for batch in loader]
        assert len(batches) == 1 == len(loader)
    assert sum(batches[0].is_repeat.tolist()) == 39
    assert len({video.numpy().tobytes() for video in batches[0].video}) > 5


def test_a_sealed_decompression_bomb_is_a_bad_sample_and_takes_no_memory(tmp_path: Path) -> None:
    """BAD-1: the sealed dataset contains a PNG of 1 MB that unpacks to 900 MB of text."""
    bomb = png_bytes(96, 64, *[(b"zTXt", 300 << 20)] * 3)
    root = build_dataset(tmp_path, {SMALL: [3]}, damage={"96x64-5f-1": bomb})
    with open_loader(root, num_workers=1, shuffle="none") as loader:
        keys = [batch.sample_keys[0] for batch in loader]
        process = Path(f"/proc/{loader.worker_pids[0]}")
        peak = int(re.findall(r"VmHWM:\s+(\d+)", (process / "status").read_text())[0]) << 10
        limit = re.findall(r"Max data size\s+(\d+)", (process / "limits").read_text())
    assert keys == ["96x64-5f-0", "96x64-5f-2", "96x64-5f-2"]
    assert peak < 500 << 20
    assert int(limit[0]) <= 8 << 30


@pytest.mark.parametrize("options", [{"world": streamvid.World(7, 8)}, {"batch_size": 3, "num_epochs": None}])
def test_one_sample_over_many_ranks(tmp_path: Path, options: dict[str, Any]) -> None:
    """PLAN-2, PLAN-4: epochs without a step are skipped, and later epochs are delivered."""
    root = build_dataset(tmp_path, {SMALL: [1]})
    with streamvid.VideoLoader(root, **{"batch_size": 1, "num_workers": 0, "num_epochs": 40} | options) as loader:
        seen = []
        for batch in loader:
            seen.append(loader.epoch)
            assert batch.sample_keys == ["96x64-5f-0"] * len(batch.sample_keys)
            if len(seen) == 4:
                break
    step = 8 if "world" in options else 3
    assert seen == [step * n - 1 for n in range(1, 5)]


def test_options_of_the_wrong_type(dataset: Path) -> None:
    for options in (
        {"limits": {"prefetch_bytes": 1e9}},
        {"limits": {"prefetch_bytes": -1}},
        {"num_workers": True},
        {"num_workers": "4"},
    ):
        with pytest.raises(ConfigError, match=next(iter(options))):
            streamvid.VideoLoader(dataset, batch_size=1, **options)  # type: ignore[arg-type]
