"""Fixtures and helpers that build sealed datasets of real clips with any shard layout."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import streamvid
from streamvid.buckets.bucket import Bucket
from streamvid.dataset.index import ClipEntry, SampleRow, SourceEntry
from tests.clips import encode, frames_of
from tests.dataset.samples import Part, clip_offsets, seal_parts, tar_bytes
from tests.loader.s3_run import Source, make_sources
from tests.servers import Rgw

SMALL = Bucket(num_frames=5, height=64, width=96)
TALL = Bucket(num_frames=9, height=96, width=64)
LONG = Bucket(num_frames=17, height=64, width=96)


@cache
def clip_bytes(variant: int, width: int, height: int, num_frames: int) -> bytes:
    """Return an encoded clip with numbered frames. Different values of `variant` give different content."""
    names = ("bikes", "carphone_pristine", "bigbuckbunny")
    frames = frames_of(names[variant % 3], width, height, num_frames + variant)
    return encode(frames[variant:], fps=24)


def build_dataset(
    root: Path,
    layout: Mapping[Bucket, Sequence[int]],
    *,
    clip_frames: int = 24,
    split: str = "train",
    variants: int = 3,
    damage: Mapping[str, bytes] | None = None,
) -> Path:
    """Build a sealed dataset with the given shard sizes per bucket.

    damage: maps a key to clip bytes that are stored instead of the sample's own clip.
    """
    parts = []
    for bucket, sizes in layout.items():
        first = 0
        for number, size in enumerate(sizes):
            samples = []
            for i in range(first, first + size):
                key = f"{bucket.id}-{i}"
                clip = clip_bytes(i % variants, bucket.width * 2, bucket.height * 2, clip_frames)
                members = {"json": b"{}", "mp4": (damage or {}).get(key, clip), "txt": f"clip {i}".encode()}
                samples.append((key, members))
            tar = tar_bytes(samples)
            rows = [
                row_of(bucket, key, members["mp4"], offset, clip_frames, i, first + i)
                for i, ((key, members), offset) in enumerate(zip(samples, clip_offsets(tar), strict=True))
            ]
            parts.append(Part(bucket, number, tar, rows, split))
            first += size
    seal_parts(root, tuple(layout), parts, {"score": "double", "place": "string", "year": "int64"})
    return root


def row_of(bucket: Bucket, key: str, clip: bytes, offset: int, num_frames: int, index: int, number: int) -> SampleRow:
    """Return the index row of a sample. Every fifth sample of a shard has no caption, and every third has no score.

    index: position in the shard.
    number: position in the bucket.
    """
    width, height = bucket.width * 2, bucket.height * 2
    return SampleRow(
        key=key,
        record_key=key,
        index=index,
        text=f"clip {number}" if index % 5 else None,
        clip=ClipEntry(
            extension="mp4",
            offset=offset,
            num_bytes=len(clip),
            sha256=hashlib.sha256(clip).digest(),
            num_frames=num_frames,
            width=width,
            height=height,
            fps=24.0,
            duration_seconds=num_frames / 24,
            codec="h264",
        ),
        source=SourceEntry(key, width, height, len(clip), 0, num_frames),
        columns={"score": number / 2 if index % 3 else None, "place": f"p{index}", "year": 2000 + index},
    )


def open_loader(dataset: Any, state: Any = None, **options: Any) -> streamvid.VideoLoader:
    """Open a loader and load `state` if given. Without `options`, it has one sample per batch and no workers."""
    loader = streamvid.VideoLoader(dataset, **{"batch_size": 1, "num_workers": 0, **options})
    if state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def state_after(num_steps: int, dataset: Any, **options: Any) -> dict[str, Any]:
    """Return the state of a loader from `open_loader` after `num_steps` batches."""
    with open_loader(dataset, **options) as loader:
        for _ in islice(loader, num_steps):
            pass
        return loader.state_dict()


def in_legs(
    dataset: Any, legs: Sequence[tuple[int, int, int]], **options: Any
) -> Iterator[tuple[streamvid.VideoLoader, streamvid.Batch]]:
    """Yield (loader, batch) for each batch of each rank.

    legs: (ranks, batch size, steps) of consecutive runs, each of which resumes where the previous one stopped.
    """
    state = None
    for num_ranks, batch_size, num_steps in legs:
        states = []
        for rank in range(num_ranks):
            world = streamvid.World(rank, num_ranks)
            with open_loader(dataset, state, batch_size=batch_size, world=world, **options) as loader:
                for batch in islice(loader, num_steps):
                    yield loader, batch
                states.append(loader.state_dict())
        assert all(other == states[0] for other in states), "PLAN-5: the state is the same on all ranks"
        state = states[0]


def new_slots(batch: streamvid.Batch) -> list[int]:
    """Return the positions of the samples in a batch that are not repeats."""
    return [slot for slot, again in enumerate(batch.is_repeat.tolist()) if not again]


def new_keys(batch: streamvid.Batch) -> list[str]:
    return [batch.sample_keys[slot] for slot in new_slots(batch)]


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dataset with two buckets, five shards and 23 samples."""
    return build_dataset(tmp_path_factory.mktemp("dataset"), {SMALL: [5, 4, 3], TALL: [6, 5]})


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory, rgw: Rgw) -> dict[str, Source]:
    """Two datasets, each stored on disk and in a Ceph RGW bucket."""
    return make_sources(tmp_path_factory.mktemp("sources"), rgw)
