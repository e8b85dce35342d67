"""Tests of clips that workers read from the page cache: the same batches, whatever is in the page cache (FETCH-1)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from streamvid.buckets.bucket import parse_buckets
from streamvid.dataset.reader import Dataset
from streamvid.dataset.versions.open import open_dataset
from streamvid.host.page_cache import is_cached
from streamvid.loader.stats import BatchStats
from streamvid.loader.workers.pool import DecodePool
from streamvid.sharder.sharder import shard
from streamvid.storage import LocalStore
from tests.clips import encode, frames_of
from tests.loader.conftest import open_loader
from tests.shard_options import shard_options

NUM_CLIPS, NUM_EPOCHS = 6, 8
Delivered = list[tuple[str, bytes]]


@dataclass(frozen=True)
class CachedStore(LocalStore):
    """Store that takes another folder for the page cache; without one, nothing is in the page cache."""

    cache: Path | None = None

    def cached_path(self, path: str, ranges: Sequence[tuple[int, int]]) -> str | None:
        return None if self.cache is None else str(self.cache / path)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cached")
    frames = frames_of("bikes", 192, 128, 40 + NUM_CLIPS)
    for number in range(NUM_CLIPS):
        (folder / f"clip{number}.mp4").write_bytes(encode(frames[number : number + 40], container="mp4"))
    return folder


def build(source: Path, root: Path) -> Path:
    shard(source, root, shard_options(buckets=parse_buckets("96x64@5"), shard_size_bytes=50_000, workers=1))
    return root


@pytest.fixture(scope="module")
def root(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, tmp_path_factory.mktemp("root") / "dataset")


def deliver(source: Path | Dataset, **options: Any) -> tuple[Delivered, BatchStats]:
    """Return the keys and pictures of several epochs, in order, and the statistics."""
    with open_loader(source, batch_size=2, num_epochs=NUM_EPOCHS, **options) as loader:
        found = [
            (key, video.numpy().tobytes())
            for batch in loader
            for key, video in zip(batch.sample_keys, batch.video, strict=True)
        ]
        assert not loader.substituted
        return found, loader.stats().work


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2}, {"limits": {"prefetch_bytes": 1 << 19}}])
@pytest.mark.parametrize("cache", ["nothing", "no tars", "short tars", "wrong bytes", "everything"])
def test_batches_do_not_depend_on_the_page_cache(
    root: Path, tmp_path: Path, options: dict[str, Any], cache: str
) -> None:
    """Bytes that left the page cache are read by a fetch thread, and wrong bytes are read again.

    With much memory, the workers receive several tasks in a message; with little, one at a time.
    """
    copied = shutil.copytree(root, tmp_path / "cache")
    wanted, direct = deliver(root, num_workers=0)
    tars = list(copied.rglob("*.tar"))
    assert len(tars) > 1
    for tar in tars:
        data = tar.read_bytes()
        if cache == "no tars":
            tar.unlink()
        elif cache != "everything":
            tar.write_bytes(data[: len(data) // 2] if cache == "short tars" else bytes(byte ^ 1 for byte in data))
    store = CachedStore(root, None if cache == "nothing" else copied)
    found, work = deliver(Dataset(store), **{"num_workers": 2} | options)
    assert found == wanted and len(found) == NUM_EPOCHS * NUM_CLIPS
    assert work.num_bytes_fetched == direct.num_bytes_fetched * (2 if cache == "wrong bytes" else 1)
    assert work.num_retries == (len(found) if cache == "wrong bytes" else 0)
    assert (work.fetch_seconds > 0) == (cache != "everything")


def test_a_worker_decodes_all_samples_of_a_light_batch_ahead(root: Path) -> None:
    """Their tasks are one message. The first batches, which the caller needs soon, are shared by the workers."""
    workers: dict[int, dict[int, int]] = {}  # batch → task → worker
    with open_loader(root, batch_size=4, num_workers=2, num_epochs=None, limits={"prefetch_bytes": 1 << 23}) as loader:
        batches = iter(loader)
        next(batches)
        decoder = loader._pipeline._flight.decoder
        assert isinstance(decoder, DecodePool)
        while sum(len(tasks) > 1 for batch, tasks in workers.items() if batch > 4) < 10:
            until = time.monotonic() + 0.02
            while time.monotonic() < until:
                for pid, task_id in decoder._current().items():
                    workers.setdefault(task_id // 4, {})[task_id] = pid
            next(batches)
    assert all(len({*tasks.values()}) == 1 for batch, tasks in workers.items() if batch > 4), workers


@pytest.mark.parametrize("folder", ["dataset", "/".join(["x" * 200] * 6)])
def test_workers_read_what_is_in_the_page_cache(source: Path, tmp_path: Path, folder: str) -> None:
    """Clips whose path does not fit into a message are read by fetch threads."""
    root = build(source, tmp_path / folder)
    are_cached = {is_cached(str(tar), [(0, tar.stat().st_size)]) for tar in root.rglob("*.tar")}
    sizes = {row["key"]: row["clip_bytes"] for row in open_dataset(root).samples_table().to_pylist()}
    found, work = deliver(root, num_workers=1)
    assert 0 < work.num_bytes_fetched <= sum(sizes[key] for key, _ in found)
    if len(are_cached) == 1:
        assert (work.fetch_seconds == 0) == (folder == "dataset" and are_cached == {True})
