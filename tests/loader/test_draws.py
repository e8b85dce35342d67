"""Tests of `--assign all`: clips are stored in all suitable buckets, and each epoch draws at most one per clip."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from streamvid.buckets.config import BucketConfig
from streamvid.buckets.opensora import OpenSoraConfig
from streamvid.dataset.annotate.annotate import annotate
from streamvid.dataset.upkeep.copy import copy_dataset
from streamvid.dataset.upkeep.verify import verify_dataset
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError
from streamvid.loader.loader import VideoLoader
from streamvid.plan import World
from streamvid.sharder.sharder import shard
from tests.clips import encode, frames_of
from tests.loader.conftest import open_loader
from tests.shard_options import shard_options

NUM_CLIPS = 12
FORM = {"64px": {9: [0.5, 2], 17: [0.75, 1]}, "96px": {9: [0.5, 1]}}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("draws")
    videos = folder / "videos"
    videos.mkdir()
    for number in range(NUM_CLIPS):
        frames = frames_of("bikes", 144, 96, 19)[number % 2 : (12 if number % 3 else 19)]
        (videos / f"clip{number:02d}.mp4").write_bytes(encode(frames))
        (videos / f"clip{number:02d}.txt").write_text(f"clip {number}")
    config = BucketConfig(opensora=OpenSoraConfig(bucket_config=FORM, probabilities="opensora-v2"), assign="all")
    shard(videos, folder / "ds", shard_options(bucket_config=config, shard_size_bytes=40_000, workers=1))
    return str(folder / "ds")


def epochs(dataset: str, count: int, num_ranks: int = 1, batch_size: int = 1, **options: object) -> list[list[str]]:
    """Return the sorted "text@bucket" entries of all `num_ranks` ranks, one list per epoch."""
    found: list[list[str]] = [[] for _ in range(count)]
    for rank in range(num_ranks):
        world = World(rank, num_ranks)
        with open_loader(
            dataset, batch_size=batch_size, world=world, tail="uneven", output={"decode": False}, **options
        ) as loader:
            for epoch in range(count):
                for batch in loader:
                    found[epoch] += [f"{text}@{batch.bucket.id}" for text in batch.text]
    return [sorted(one) for one in found]


def test_each_epoch_draws_at_most_one_bucket_per_clip(dataset: str) -> None:
    """PLAN-4: three ranks draw the same as one rank, and no clip is delivered twice in an epoch."""
    alone, three = epochs(dataset, 6), epochs(dataset, 6, num_ranks=3, batch_size=2)
    assert alone == three
    assert len({tuple(epoch) for epoch in alone}) > 1
    buckets = Counter()
    for epoch in alone:
        texts = [name.split("@")[0] for name in epoch]
        assert len(set(texts)) == len(texts) <= NUM_CLIPS
        buckets.update(name.split("@")[1].rsplit("-", 1)[0] for name in epoch)
    assert set(buckets) == {"96px-9f", "64px-9f", "64px-17f"}
    lengths = [len(epoch) for epoch in alone]
    assert max(lengths) - min(lengths) <= 6  # two sets, of three and two buckets; each rounds by one


def test_probabilities_match_the_config(dataset: str) -> None:
    """Over 120 epochs, draws without replacement keep the shares within the rounding of the two sets."""
    num_epochs = 120
    counts = Counter(
        (int(name.split("@")[0].removeprefix("clip ")) % 3 == 0, name.split("@")[1].rsplit("-", 1)[0])
        for epoch in epochs(dataset, num_epochs)
        for name in epoch
    )
    num_long = sum(number % 3 == 0 for number in range(NUM_CLIPS))
    # A clip that 96px rejects is tried at 64px, but only with its longest frame count (Open-Sora 2).
    expected = {
        (True, "96px-9f"): 0.5 * num_long,
        (True, "64px-17f"): 0.5 * 0.75 * num_long,
        (False, "96px-9f"): 0.5 * (NUM_CLIPS - num_long),
        (False, "64px-9f"): 0.5 * 0.5 * (NUM_CLIPS - num_long),
    }
    assert counts.keys() == expected.keys()
    for name, share in expected.items():
        assert abs(counts[name] - share * num_epochs) <= 4


def test_a_run_resumes_at_its_position(dataset: str) -> None:
    """PLAN-5: the remaining batches are the same, across the draws of several epochs."""
    options = {"batch_size": 1, "world": World(0, 1), "num_workers": 0, "output": {"decode": False}, "num_epochs": 3}
    with VideoLoader(dataset, **options) as loader:
        whole = [(batch.bucket.id, *batch.sample_keys) for batch in loader]
    for stop in (1, len(whole) // 2, len(whole) - 1):
        with VideoLoader(dataset, **options) as loader:
            batches = iter(loader)
            first = [(batch.bucket.id, *batch.sample_keys) for batch in (next(batches) for _ in range(stop))]
            state = loader.state_dict()
        with VideoLoader(dataset, **options) as loader:
            loader.load_state_dict(state)
            assert first + [(batch.bucket.id, *batch.sample_keys) for batch in loader] == whole


def test_filters_apply_unless_they_distinguish_copies(dataset: str) -> None:
    kept = epochs(dataset, 4, where="contains(source, 'clip00') or contains(source, 'clip04')")
    assert {name.split("@")[0] for epoch in kept for name in epoch} <= {"clip 0", "clip 4"}
    with pytest.raises(ConfigError, match="clip_bytes differs between the buckets"):
        open_loader(dataset, where="clip_bytes > 3")


def test_each_clip_is_stored_in_two_buckets(dataset: str) -> None:
    opened = open_dataset(dataset)
    assert len(opened.manifest.draws) == 2
    assert opened.manifest.counts.samples == 2 * NUM_CLIPS
    assert verify_dataset(dataset, deep=True).is_right


def test_decoded_batches_have_the_shape_of_the_bucket(dataset: str) -> None:
    with open_loader(dataset, world=World(0, 1)) as loader:
        for batch in loader:
            assert batch.video.shape == (1, 3, *batch.bucket.shape)


def test_buckets_do_not_change_the_stored_order(dataset: str, tmp_path: Path) -> None:
    """The shards of all buckets hold the same clips at the same positions."""
    opened = open_dataset(dataset)
    table = opened.samples_table().to_pylist()
    for one in opened.manifest.draws:
        orders = []
        for bucket_id, _, first in one.buckets:
            numbers = range(first, first + one.num_shards)
            mine = [row for row in table if row["bucket_id"] == bucket_id and row["shard"] in numbers]
            orders.append([(row["shard"] - first, row["index"], row["source"]) for row in mine])
        assert all(order == orders[0] for order in orders)


def test_copies_of_a_clip_must_be_annotated_together(dataset: str, tmp_path: Path) -> None:
    """PLAN-4: if only one copy had a value, a filter could separate the copies, and a clip could be delivered twice."""
    copied = tmp_path / "ds"
    copy_dataset(dataset, copied)
    rows = open_dataset(copied).samples_table().to_pylist()
    by_key, by_source = tmp_path / "key.jsonl", tmp_path / "source.jsonl"
    by_key.write_text(
        "".join(json.dumps({"key": row["key"], "good": number % 2}) + "\n" for number, row in enumerate(rows))
    )
    with pytest.raises(ConfigError, match="use record_key or source"):
        annotate(copied, by_key)
    sources = sorted({row["source"] for row in rows})
    by_source.write_text(
        "".join(json.dumps({"source": name, "good": number % 2}) + "\n" for number, name in enumerate(sources))
    )
    assert annotate(copied, by_source).num_annotated == len(rows)
    for epoch in epochs(str(copied), 4, where="good == 1"):
        texts = [name.split("@")[0] for name in epoch]
        assert len(set(texts)) == len(texts) <= NUM_CLIPS // 2
