"""Tests of BAD-1: bad stored bytes change no plan and end no run, and the choice of substitutes is a pure function."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import streamvid
from streamvid.buckets.bucket import Bucket
from streamvid.dataset.reader import Dataset
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import ConfigError, SampleError, StorageError
from streamvid.loader.delivery.pending import PendingBatch
from streamvid.loader.delivery.pipeline import Pipeline, PipelineOptions
from streamvid.loader.delivery.requests import BatchRequest
from streamvid.loader.mix import MixPart, SampleRequest, Subset
from streamvid.loader.options import LimitOptions
from streamvid.loader.view.text import TextOptions, text_rule
from tests.files import tree_of
from tests.loader.conftest import SMALL, TALL, build_dataset, clip_bytes, open_loader, state_after
from tools import make_corpus

pytestmark = pytest.mark.timeout(120)

LAYOUT = {SMALL: [5, 4, 3], TALL: [6, 5]}
KINDS = ("flip", "zero", "cut", "undecodable", "other")


@cache
def undecodable(width: int, height: int) -> bytes:
    """Return the head of a clip, which does not decode although its checksum matches."""
    return clip_bytes(0, width, height, 24)[:3000]


def damaged(root: Path, layout: Mapping[Bucket, Sequence[int]], bad: Mapping[str, str]) -> Path:
    """Build a dataset in which the given samples are bad.

    bad: maps a key to the kind of damage; "cut" truncates the tar within the sample's clip.
    """
    bucket = {f"{b.id}-{i}": b for b, sizes in layout.items() for i in range(sum(sizes))}
    stored = {
        key: undecodable(bucket[key].width * 2, bucket[key].height * 2)
        if kind == "undecodable"
        else clip_bytes(1, 64, 64, 24)[:2000] + b"x" * 500
        for key, kind in bad.items()
        if kind in ("undecodable", "other")
    }
    build_dataset(root, layout, damage=stored)
    source = open_dataset(root)
    for shard in source.shards:
        path = root / shard.path
        data = bytearray(path.read_bytes())
        for row in source.samples(shard).to_pylist():
            start, end = row["clip_offset"], row["clip_offset"] + row["clip_bytes"]
            kind = bad.get(row["key"])
            if kind == "flip":
                data[(start + end) // 2] ^= 1
            elif kind == "zero":
                data[start:end] = bytes(end - start)
            elif kind == "cut":
                del data[end - 1 :]
                break
        path.write_bytes(data)
    return root


def keys_of(layout: Mapping[Bucket, Sequence[int]]) -> list[list[list[str]]]:
    """Return the keys by bucket, shard and position."""
    found = []
    for bucket, sizes in layout.items():
        numbers = iter(range(sum(sizes)))
        found.append([[f"{bucket.id}-{next(numbers)}" for _ in range(size)] for size in sizes])
    return found


def expected_substitute(key: str, bad: Collection[str], layout: Mapping[Bucket, Sequence[int]] = LAYOUT) -> str | None:
    """Return the first good sample after `key` in its shard (cyclically), then in the bucket's next shards, or None."""
    for shards in keys_of(layout):
        for number, shard in enumerate(shards):
            if key in shard:
                place = shard.index(key)
                order = shard[place + 1 :] + shard[:place]
                for step in range(1, len(shards)):
                    order += shards[(number + step) % len(shards)]
                return next((other for other in order if other not in bad), None)
    raise AssertionError(key)


@dataclass(frozen=True)
class Delivered:
    key: str
    is_repeat: bool
    text: str
    pixels: str
    first_frame: int | None


def deliveries(root: Path, skip: int = 0, **options: Any) -> list[Delivered]:
    """Return all delivered samples in order, resumed from a state that another loader saved after `skip` batches."""
    read_number = make_corpus.read_number
    found = []
    settings = {"batch_size": 3, "num_epochs": 1} | options
    state = state_after(skip, root, **settings | {"num_workers": 0}) if skip else None
    with open_loader(root, state, **settings) as loader:
        for batch in loader:
            for slot, video in enumerate(batch.video.permute(0, 2, 3, 4, 1).numpy()):
                numbers = [read_number(frame, 0.5) for frame in video]
                assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), numbers
                digest = hashlib.sha256(video.tobytes()).hexdigest()
                repeat = bool(batch.is_repeat[slot])
                found.append(Delivered(batch.sample_keys[slot], repeat, batch.text[slot], digest, numbers[0]))
    return found


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> list[Delivered]:
    """Deliveries from the same dataset without damage."""
    return deliveries(build_dataset(tmp_path_factory.mktemp("undamaged"), LAYOUT))


@pytest.mark.parametrize("seed", range(4))
def test_every_bad_sample_is_replaced_and_all_others_are_unchanged(
    tmp_path: Path, undamaged: list[Delivered], seed: int
) -> None:
    """BAD-1, SAMPLE-1, PLAN-5: for any damage, deliveries do not depend on the number of workers or on a resume."""
    choose = random.Random(seed)
    keys = [key for shards in keys_of(LAYOUT) for shard in shards for key in shard]
    kinds = ["cut", *choose.choices([kind for kind in KINDS if kind != "cut"], k=2)]
    bad = dict(zip(choose.sample(keys, 3), kinds, strict=True))
    root = damaged(tmp_path / "dataset", LAYOUT, bad)
    for shards in keys_of(LAYOUT):
        for shard in shards:  # a truncated tar has also lost all later samples
            cut = [place for place, key in enumerate(shard) if bad.get(key) == "cut"]
            bad |= dict.fromkeys(shard[min(cut) :], "cut") if cut else {}
    received = deliveries(root)
    assert len(received) == len(undamaged)
    for before, after in zip(undamaged, received, strict=True):
        if before.key in bad:
            assert after.key == expected_substitute(before.key, bad) and after.is_repeat
        else:
            assert after == before
    assert deliveries(root, num_workers=2) == received
    skip = choose.randint(1, len(received) // 3 - 1)
    rest = deliveries(root, skip, num_workers=choose.choice([0, 2]))
    assert rest == received[3 * skip :]


def test_substitutes_have_visits_of_their_own(tmp_path: Path) -> None:
    """SAMPLE-1: each epoch draws a new window for a substitute, independent of the sample's own delivery."""
    root = damaged(tmp_path, {SMALL: [2]}, {"96x64-5f-0": "flip"})
    received = deliveries(root, batch_size=1, num_epochs=8, shuffle="none")
    assert {item.key for item in received} == {"96x64-5f-1"}
    substitutes = [item.first_frame for item in received[::2]]
    own = [item.first_frame for item in received[1::2]]
    assert all(item.is_repeat for item in received[::2]) and not any(item.is_repeat for item in received[1::2])
    assert len(set(substitutes)) > 3 and len(set(own)) > 3 and substitutes != own


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_entirely_bad_shard_is_replaced_from_the_next_one(tmp_path: Path, num_workers: int) -> None:
    """BAD-1: the minimum size of the ring and of the clip buffer is enough."""
    layout = {SMALL: [3, 2]}
    bad = {f"96x64-5f-{i}": kind for i, kind in enumerate(("zero", "undecodable", "cut"))}
    root = damaged(tmp_path, layout, bad)
    received = deliveries(
        root, batch_size=5, num_workers=num_workers, limits={"prefetch_bytes": 0}, shuffle="none", num_epochs=3
    )
    assert [item.key for item in received] == (["96x64-5f-3"] * 4 + ["96x64-5f-4"]) * 3
    assert len({item.first_frame for item in received if item.is_repeat}) > 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bucket_without_a_good_sample_is_an_error(tmp_path: Path, num_workers: int) -> None:
    """BAD-1: samples that precede the error in the plan may still be delivered."""
    layout = {TALL: [2], SMALL: [2, 1]}
    root = damaged(tmp_path, layout, {f"96x64-5f-{i}": KINDS[i] for i in range(3)})
    received = []
    with streamvid.VideoLoader(root, batch_size=1, num_workers=num_workers, shuffle="none") as loader:
        for _ in range(2):
            says = r"sample 96x64-5f-\d .*000000.tar.*96x64-5f\).*No other sample in its"
            with pytest.raises(SampleError, match=says):
                for batch in loader:
                    received += batch.sample_keys
    assert set(received) <= {"64x96-9f-0", "64x96-9f-1"}


def run(
    root: Path, order: Sequence[tuple[int, int]], *, batch_size: int = 1, num_workers: int = 0, **options: Any
) -> tuple[list[PendingBatch], Pipeline]:
    """Run samples (shard, position) of the only bucket through a new pipeline and close it.

    Return (batches, pipeline).
    """
    part, bucket = part_of(open_dataset(root), **options.pop("part", {}))
    samples = [SampleRequest(part, bucket.id, *place, visit, False) for visit, place in enumerate(order)]
    frame_bytes = batch_size * (int(np.prod(bucket.shape)) * 3 + 4096)
    size = {"clip_bytes": 1 << 20, "frame_bytes": (len(order) + 3) * frame_bytes, "num_workers": num_workers} | options
    limits = LimitOptions(**size.pop("limits", {}))
    pipeline = Pipeline((part,), PipelineOptions(**size, limits=limits))
    try:
        pipeline.open()
        steps = range(0, len(samples), batch_size)
        number = pipeline.stop()
        pipeline.start(number, (BatchRequest(bucket, tuple(samples[i : i + batch_size]), i) for i in steps))
        batches = list(handed_over(pipeline, number))
        assert pipeline.queue_depth == 0
        return batches, pipeline
    finally:
        pipeline.close()


def handed_over(pipeline: Pipeline, number: int) -> Iterator[PendingBatch]:
    """Yield the batches of a run, and count each one as it is handed over."""
    while (batch := pipeline.next_batch(number)) is not None:
        pipeline.count(batch)
        yield batch


def part_of(source: Dataset, **settings: Any) -> tuple[MixPart, Bucket]:
    """Return all samples of a dataset with one bucket, and this bucket."""
    (bucket,) = source.manifest.buckets
    counts = {bucket.id: np.array([shard.num_samples for shard in source.shards], np.int64)}
    subset = Subset({bucket.id: tuple(source.shards)}, counts)
    return MixPart(0, source, 0, subset, **settings), bucket


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_quarantine_file_lists_each_delivery_of_a_bad_sample(tmp_path: Path, num_workers: int) -> None:
    """BAD-1: one line per delivery, in order of delivery. The next run appends, and the dataset is not modified."""
    root = damaged(tmp_path / "dataset", {SMALL: [3, 2]}, {"96x64-5f-1": "flip", "96x64-5f-4": "undecodable"})
    before = tree_of(root)
    order = [(0, 0), (0, 1), (1, 1), (0, 1), (1, 0)]
    folder = tmp_path / "not" / "there"
    options = {"batch_size": 5, "num_workers": num_workers, "limits": {"quarantine": folder}, "rank": 3}
    (batch,), pipeline = run(root, order, **options)
    lines = (folder / "quarantine-rank00003.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [(r["key"], r["place"], r["substitute_key"]) for r in records] == [
        ("96x64-5f-1", 1, "96x64-5f-2"),
        ("96x64-5f-4", 1, "96x64-5f-3"),
        ("96x64-5f-1", 1, "96x64-5f-2"),
    ]
    assert records[0]["dataset"] == str(root) and records[0]["bucket_id"] == "96x64-5f"
    assert records[0]["shard"] == "shards/96x64-5f/96x64-5f-000000.tar"
    assert "checksum" in records[0]["reason"] and "DecodeError" in records[1]["reason"]
    assert [record.to_json() for record in pipeline.substituted] == lines
    assert [one.key for one in batch.deliveries] == [f"96x64-5f-{i}" for i in (0, 2, 3, 2, 3)]
    assert [one.sample.is_repeat for one in batch.deliveries] == [False, True, True, True, False]
    run(root, order[:2], **options)
    assert (folder / "quarantine-rank00003.jsonl").read_text().splitlines() == lines + lines[:1]
    assert tree_of(root) == before


def test_cost_of_a_batch(tmp_path: Path) -> None:
    """A bad clip is read twice, but only the first time in a run.

    A substitute's cost counts towards the batch of its slot.
    """
    root = damaged(tmp_path, {SMALL: [3]}, {"96x64-5f-1": "flip"})
    sizes = [row["clip_bytes"] for row in open_dataset(root).samples_table().to_pylist()]
    batches, _ = run(root, [(0, 0), (0, 1), (0, 1)], num_workers=1, clip_bytes=8192 + max(sizes))
    stats = [batch.stats for batch in batches]
    assert [s.num_substituted for s in stats] == [0, 1, 1]
    assert stats[0].num_bytes_fetched == sizes[0] and stats[0].num_retries == 0
    assert stats[1].num_bytes_fetched == 2 * sizes[1] + sizes[2] and stats[1].num_retries == 1
    assert stats[1].fetch_seconds > 0 and all(s.decode_seconds > 0 for s in stats)
    last = stats[2].num_bytes_fetched - sizes[2]
    assert last in (0, 2 * sizes[1])  # the second visit may be read before the first is found to be bad


def test_a_share_of_bad_samples_fails_the_run(tmp_path: Path) -> None:
    """BAD-1: the share is relative to at least 1000 samples, so the first bad sample does not fail a run.

    Batches before the failing one are delivered.
    """
    root = damaged(tmp_path / "dataset", {SMALL: [3]}, {"96x64-5f-1": "zero"})
    for fraction, allowed in ((0.0, 0), (0.002, 2)):
        folder = tmp_path / str(fraction)
        part, bucket = part_of(open_dataset(root))
        samples = [SampleRequest(part, bucket.id, 0, place % 3, place, False) for place in range(12)]
        limits = LimitOptions(quarantine=folder, max_bad_fraction=fraction)
        options = PipelineOptions(num_workers=0, clip_bytes=1 << 20, frame_bytes=1 << 22, limits=limits)
        pipeline = Pipeline((part,), options)
        try:
            pipeline.open()
            number = pipeline.stop()
            pipeline.start(number, (BatchRequest(bucket, (sample,), None) for sample in samples))
            keys = []
            says = (
                rf"^{allowed + 1} of {3 * allowed + 2} samples were bad.*max_bad_fraction={fraction} .*rank00000.jsonl"
            )
            for _ in range(2):  # the error is raised again
                with pytest.raises(SampleError, match=says):
                    for batch in handed_over(pipeline, number):
                        keys.append(batch.deliveries[0].key)
            assert len(keys) == 3 * allowed + 1
            assert len((folder / "quarantine-rank00000.jsonl").read_text().splitlines()) == allowed + 1
        finally:
            pipeline.close()


def slowly(loader: streamvid.VideoLoader) -> Iterator[streamvid.Batch]:
    """Yield the batches, but request the next one only when two more are ready, or all of the remaining ones."""
    for batch in loader:
        yield batch
        until = time.monotonic() + 30
        while loader.stats().queue_depth < min(2, loader.num_steps_left - 1) and time.monotonic() < until:
            time.sleep(0.005)


BAD = {f"96x64-5f-{i}": "flip" for i in (2, 5, 6, 9)}  # two samples per batch, unshuffled: in batches 2, 3, 4 and 5


@pytest.fixture(scope="module")
def with_bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damaged(tmp_path_factory.mktemp("with_bad"), {SMALL: [8, 8]}, BAD)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_batch_copied_ahead_is_not_counted_yet(with_bad: Path, tmp_path: Path, device: Any) -> None:
    """BAD-1: the loader, its statistics and the file agree at each batch.

    The limit ends the run at the batch that exceeds it.
    """
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 0, "shuffle": "none", "device": device}
    file = tmp_path / "quarantine-rank00000.jsonl"
    with streamvid.VideoLoader(with_bad, limits={"max_bad_fraction": 1.0, "quarantine": tmp_path}, **options) as loader:
        for number, _ in enumerate(slowly(loader), 1):
            expected = min(max(number - 1, 0), 4)
            lines = file.read_text().splitlines() if file.exists() else []
            assert len(loader.substituted) == loader.stats().work.num_substituted == len(lines) == expected
        assert number == 8
    for allowed in range(4):
        with streamvid.VideoLoader(with_bad, limits={"max_bad_fraction": allowed / 1000}, **options) as loader:
            received = 0
            with pytest.raises(SampleError, match=f"^{allowed + 1} of {2 * allowed + 4} samples were bad"):
                for _ in slowly(loader):
                    received += 1
            assert received == allowed + 1


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_run_that_is_resumed_writes_each_line_once(with_bad: Path, tmp_path: Path, device: Any) -> None:
    """BAD-1, PLAN-5: the file has no line for a delivery that the state does not count."""
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 0, "shuffle": "none", "device": device}
    for stop in (1, 2, 3):
        folder = tmp_path / str(stop)
        with streamvid.VideoLoader(with_bad, limits={"quarantine": folder}, **options) as loader:
            for number, _ in enumerate(slowly(loader), 1):
                state = loader.state_dict()
                if number == stop:
                    break
        with streamvid.VideoLoader(with_bad, limits={"quarantine": folder}, **options) as loader:
            loader.load_state_dict(state)
            assert sum(1 for _ in loader) == 8 - stop
        lines = (folder / "quarantine-rank00000.jsonl").read_text().splitlines()
        assert [json.loads(line)["key"] for line in lines] == list(BAD)


def test_invalid_options_are_refused(tmp_path: Path) -> None:
    root = build_dataset(tmp_path / "dataset", {SMALL: [1]})
    (tmp_path / "link").symlink_to(root)
    part, _ = part_of(open_dataset(root))
    for options, says in (
        ({"max_bad_fraction": 1.5}, "max_bad_fraction=1.5"),
        ({"max_bad_fraction": True}, "max_bad_fraction=True"),
        ({"sample_timeout_seconds": 0}, "sample_timeout_seconds=0"),
        ({"sample_timeout_seconds": -1.0}, "sample_timeout_seconds=-1.0"),
        ({"quarantine": "s3://bucket/bad"}, "quarantine='s3://bucket/bad': must be the path to a local folder"),
        ({"quarantine": root}, "quarantine=.*inside the dataset"),
        ({"quarantine": root / "shards" / "x"}, "quarantine=.*inside the dataset"),
        ({"quarantine": tmp_path / "link" / "x"}, "quarantine=.*inside the dataset"),
    ):
        with pytest.raises(ConfigError, match=says):
            limits = LimitOptions(**options)  # type: ignore[arg-type]
            Pipeline((part,), PipelineOptions(num_workers=0, clip_bytes=1, frame_bytes=1, limits=limits))


def test_a_quarantine_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    root = damaged(tmp_path / "dataset", {SMALL: [2]}, {"96x64-5f-0": "flip"})
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="quarantine: cannot write .*rank00000.jsonl"):
        run(root, [(0, 0)], limits={"quarantine": tmp_path / "file" / "folder"})


@dataclass(frozen=True, slots=True)
class EveryOther:
    """Filter like those in dataset/filter/filter.py; it keeps samples with an odd year."""

    text: str = "year % 2 == 1"
    columns: tuple[str, ...] = ("user.year",)

    def matching(self, table: Any) -> npt.NDArray[np.int32]:
        years = np.array(table.column("user.year").to_pylist())
        return np.flatnonzero(years % 2 == 1).astype(np.int32)


def test_substitutes_pass_the_filter(tmp_path: Path) -> None:
    """BAD-1: positions count matching samples, in the shard and in the following ones. A changed filter is an error."""
    root = damaged(tmp_path, {SMALL: [4, 6]}, {"96x64-5f-3": "flip", "96x64-5f-1": "undecodable", "96x64-5f-5": "zero"})
    counts = {"96x64-5f": np.array([2, 3], np.int64)}

    def filtered(order: Sequence[tuple[int, int]], counts: Mapping[str, npt.NDArray[np.int64]]) -> Iterator[Any]:
        source = open_dataset(root)
        (bucket,) = source.manifest.buckets
        subset = Subset({bucket.id: tuple(source.shards)}, counts, filter=EveryOther())  # type: ignore[arg-type]
        mixed = MixPart(0, source, 0, subset, columns={"year": "user.year"})
        pipeline = Pipeline((mixed,), PipelineOptions(num_workers=0, clip_bytes=1 << 20, frame_bytes=1 << 22))
        try:
            pipeline.open()
            samples = [SampleRequest(mixed, bucket.id, *place, 0, False) for place in order]
            number = pipeline.stop()
            pipeline.start(number, (BatchRequest(bucket, (sample,), None) for sample in samples))
            for batch in handed_over(pipeline, number):
                yield batch.deliveries[0].key, batch.deliveries[0].row.columns["year"]
        finally:
            pipeline.close()

    order = [(1, 2), (1, 0), (0, 1), (0, 0)]
    assert list(filtered(order, counts)) == [("96x64-5f-9", 2005), *[("96x64-5f-7", 2003)] * 3]
    with pytest.raises(SampleError, match=r"2 samples in .*000000.tar pass the filter .*, but 3 were counted"):
        list(filtered([(0, 0)], {"96x64-5f": np.array([3, 3], np.int64)}))


def test_captions_have_their_column_prefix_and_dropout(tmp_path: Path) -> None:
    """SAMPLE-1: a drop depends only on (seed, key, visit), has the requested frequency, and changes no other choice."""
    root = build_dataset(tmp_path, {SMALL: [6]})
    order = [(0, place) for place in range(6)] * 20
    options: dict[str, Any] = {"batch_size": 6}

    def texts(**part: Any) -> list[str]:
        rule = text_rule(TextOptions(**part), open_dataset(root))
        batches, _ = run(root, order, part={"text": rule}, limits={"max_bad_fraction": 0.0}, **options)
        return [one.caption for batch in batches for one in batch.deliveries]

    plain = texts()
    assert plain[:6] == ["", "clip 1", "clip 2", "clip 3", "clip 4", ""]
    placed = texts(column="place", prefix="at ")
    assert placed[:6] == [f"at p{i}" for i in range(6)]
    dropped = texts(column="place", prefix="at ", dropout=0.25)
    assert {a for a, b in zip(dropped, placed, strict=True) if a != b} == {""}
    assert 15 <= dropped.count("") <= 45  # 30 of 120 expected, with a standard deviation of 4.7
    assert len({tuple(dropped[i : i + 6]) for i in range(0, 120, 6)}) > 5
    assert texts(column="place", prefix="at ", dropout=0.25) == dropped
    assert texts(dropout=1.0) == [""] * 120
