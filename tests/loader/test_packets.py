"""Tests of loaders over datasets with packet indices: the same batches from fewer bytes, and only verified frames."""

from __future__ import annotations

import hashlib
import io
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import streamvid
from streamvid.buckets.bucket import Bucket, parse_buckets
from streamvid.dataset.manifest import FileInfo, Manifest, ShardInfo, base_digest, manifest_from_json, manifest_to_json
from streamvid.dataset.packets import encode_packets
from streamvid.dataset.reader import Dataset
from streamvid.dataset.sealed_json import MANIFEST
from streamvid.dataset.versions.open import open_dataset
from streamvid.errors import SampleError
from streamvid.sharder.sharder import shard
from streamvid.video.clip_index import KEY, ClipIndex
from tests.clips import encode, frames_of
from tests.loader.conftest import open_loader
from tests.loader.test_bad import Delivered, deliveries
from tests.shard_options import shard_options
from tests.video.clips import run_ffmpeg

pytestmark = pytest.mark.timeout(120)

NUM_FRAMES, WANTED = 120, 5
PLACE = ("packets_offset", "packets_bytes", "packets_sha256")
Row = dict[str, Any]
Clips = list[ClipIndex | None]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dataset in several shards with eight indexed clips of ten GOPs each and two clips without an index."""
    folder = tmp_path_factory.mktemp("long")
    frames = frames_of("bikes", 192, 128, NUM_FRAMES + 8)
    for number in range(8):
        container, suffix = [("mp4", "mp4"), ("matroska", "mkv")][number % 2]
        data = encode(frames[number : number + NUM_FRAMES], container=container)
        (folder / f"clip{number}.{suffix}").write_bytes(data)
    for number in range(2):
        data = encode(frames[number : number + NUM_FRAMES], container="mpegts")
        (folder / f"plain{number}.ts").write_bytes(data)
    root = folder / "dataset"
    shard(folder, root, shard_options(buckets=parse_buckets("96x64@5"), shard_size_bytes=400_000, workers=1))
    return root


@pytest.fixture(scope="module")
def undamaged(built: Path) -> list[Delivered]:
    return deliveries(built, num_epochs=2)


@pytest.fixture
def root(built: Path, tmp_path: Path) -> Path:
    """Copy of the dataset, to be damaged."""
    return Path(shutil.copytree(built, tmp_path / "dataset"))


def change_manifest(root: Path, change: Callable[[Manifest], Manifest]) -> None:
    path = root / MANIFEST
    path.write_bytes(manifest_to_json(change(manifest_from_json(path.read_bytes()))))


def without_packets(root: Path) -> Path:
    change_manifest(root, lambda manifest: replace(manifest, files=replace(manifest.files, packets=())))
    return root


def packets_of(source: Dataset, info: ShardInfo, rows: list[Row]) -> Clips:
    """Return the packets of each sample in a shard; a shard without packets has no table."""
    place = [rows[0][name] for name in PLACE]
    if None in place:
        return [None] * len(rows)
    tables = source.packets(info, *place)
    return [tables.clip(number) for number in range(len(rows))]


def rows_of(source: Dataset) -> list[tuple[Row, ClipIndex | None, str]]:
    """Return (index row, packets, path of the tar) of every sample."""
    found = []
    for info in source.shards:
        rows = source.samples(info).to_pylist()
        clips = packets_of(source, info, rows)
        found += [(row, clip, info.path) for row, clip in zip(rows, clips, strict=True)]
    return found


def rewrite(
    root: Path, change: Callable[[list[Row], Clips], Sequence[ClipIndex | None]], places: Row | None = None
) -> None:
    """Replace the packets of each shard, with correct checksums.

    places: values to store in the location columns instead.
    """
    source = open_dataset(root)
    manifest, samples, packets = source.manifest, [], []
    for samples_file, packet_file in zip(manifest.files.samples, manifest.files.packets, strict=True):
        groups = pq.ParquetFile(root / samples_file.path)
        infos = [info for info in source.shards if info.index_path == samples_file.path]
        sink, content = io.BytesIO(), b""
        with pq.ParquetWriter(sink, groups.schema_arrow) as writer:
            for number in range(groups.num_row_groups):
                (info,) = (info for info in infos if info.index_row_group == number)
                table = groups.read_row_group(number)
                rows = table.to_pylist()
                clips = change(rows, packets_of(source, info, rows))
                data = encode_packets(clips) if any(clip is not None for clip in clips) else b""
                new = (len(content), len(data), hashlib.sha256(data).digest()) if data else (None, None, None)
                for name, value in (dict(zip(PLACE, new, strict=True)) | (places or {})).items():
                    at = table.schema.get_field_index(name)
                    field = table.schema.field(at)
                    table = table.set_column(at, field, pa.array([value] * len(rows), field.type))
                writer.write_table(table, row_group_size=max(1, len(rows)))
                content += data
        for path, data, files in ((samples_file.path, sink.getvalue(), samples), (packet_file.path, content, packets)):
            (root / path).write_bytes(data)
            files.append(FileInfo.of(path, data))
    base = base_digest(source.shards.content_lines(), samples)
    change_manifest(
        root,
        lambda old: replace(
            old,
            files=replace(old.files, samples=tuple(samples), packets=tuple(packets)),
            fingerprints=replace(old.fingerprints, base=base, content=base),
        ),
    )


def substituted(root: Path, **options: Any) -> tuple[int, int]:
    """Return (number of substituted samples, bytes read) for one epoch."""
    with streamvid.VideoLoader(root, batch_size=2, num_epochs=1, **{"num_workers": 0} | options) as loader:
        for _ in loader:
            pass
        stats = loader.stats()
    return stats.work.num_substituted, stats.work.num_bytes_fetched


def test_the_dataset_has_clips_with_and_without_an_index(built: Path) -> None:
    found = rows_of(open_dataset(built))
    assert sorted(clip is None for _, clip, _ in found) == [False] * 8 + [True] * 2
    assert len({path for _, _, path in found}) >= 2
    assert all(row["clip_extension"] == "ts" for row, clip, _ in found if clip is None)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("pixels", ["rgb24", "yuv420p"])
def test_batches_are_the_same_with_and_without_packets(built: Path, root: Path, num_workers: int, pixels: str) -> None:
    """SAMPLE-2, PLAN-5: batches are bit-exact, also after a resume."""
    options = {"num_workers": num_workers, "num_epochs": 2, "output": {"pixels": pixels}}
    with_packets = deliveries(built, **options)
    assert len(with_packets) >= 18
    assert deliveries(without_packets(root), **options) == with_packets
    assert deliveries(root, 3, **options) == with_packets[9:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_only_the_bytes_of_the_windows_are_read(built: Path, root: Path, num_workers: int) -> None:
    """A window of 5 frames depends on at most two of ten GOPs. Clips without packets are read whole."""
    found = rows_of(open_dataset(built))
    plain = sum(row["clip_bytes"] for row, clip, _ in found if clip is None)
    everything = sum(row["clip_bytes"] for row, _, _ in found)
    num_bytes = substituted(built, num_workers=num_workers)[1]
    assert plain < num_bytes < plain + (everything - plain) / 3
    assert substituted(without_packets(root), num_workers=num_workers) == (0, everything)


def windows(root: Path, received: list[Delivered]) -> list[tuple[Row, Path, int, int]]:
    """Return (row, path of its tar, first byte, end) of each indexed clip's delivered window, as offsets in the tar."""
    starts = {item.key: item.first_frame for item in received}
    found = []
    for row, clip, path in rows_of(open_dataset(root)):
        if clip is not None:
            start = starts[row["key"]]
            assert start is not None
            window = clip.window(start, WANTED)
            first = row["clip_offset"] + window.first_byte
            found.append((row, root / path, first, first + window.num_bytes))
    return found


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_damage_that_is_read_is_replaced_and_other_damage_is_ignored(root: Path, num_workers: int) -> None:
    """BAD-1: the damage is at the first or last byte of a range, or just outside of a range."""
    expected = deliveries(root, batch_size=2, num_workers=num_workers)
    inside, outside = [], []
    for number, (row, path, first, end) in enumerate(windows(root, expected)):
        if number < 2:
            flip(path, (first, end - 1)[number])
            inside.append(row["key"])
        else:
            low, high = row["clip_offset"], row["clip_offset"] + row["clip_bytes"]
            places = [at for at in (first - 1, end, low + 10, high - 10) if low <= at < first or end <= at < high]
            for at in places:
                flip(path, at)
            outside.append(row["key"])
    found = deliveries(root, batch_size=2, num_workers=num_workers)
    assert len(found) == len(expected) and len(outside) == 6
    for before, after in zip(expected, found, strict=True):
        if before.key in inside:
            assert after.is_repeat and after.key != before.key
        else:
            assert after == before
    assert substituted(root, num_workers=num_workers)[0] >= 1


def test_a_bad_clip_is_counted_and_its_reason_names_the_checksum(root: Path, tmp_path: Path) -> None:
    """BAD-1: the packet index and the clip's own checksum detect the damage, and the quarantine file has one line."""
    row, path, first, _ = windows(root, deliveries(root, batch_size=2))[0]
    flip(path, first + 5)
    with open_loader(root, batch_size=2, num_epochs=1, limits={"quarantine": tmp_path / "quarantine"}) as loader:
        for _ in loader:
            pass
        assert loader.stats().work.num_substituted == 1
    (line,) = (tmp_path / "quarantine" / "quarantine-rank00000.jsonl").read_text().splitlines()
    assert row["key"] in line and "checksum" in line


def with_info(clip: ClipIndex | None, **values: Any) -> ClipIndex | None:
    return None if clip is None else replace(clip, info=replace(clip.info, **values))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("values", [{"extradata": bytes(60)}, {"codec": "hevc"}, {"coded_width": 2**30}])
def test_a_clip_whose_packets_fail_is_delivered_through_its_container(
    root: Path, undamaged: list[Delivered], caplog: pytest.LogCaptureFixture, num_workers: int, values: dict[str, Any]
) -> None:
    """BAD-1: the clip is not bad. Its frames do not change, and a warning names it."""
    victims: list[str] = []

    def change(rows: list[Row], clips: Clips) -> Clips:
        at = next((number for number, clip in enumerate(clips) if clip is not None), None)
        victims.extend([] if at is None else [rows[at]["key"]])
        return [with_info(clip, **values) if number == at else clip for number, clip in enumerate(clips)]

    rewrite(root, change)
    with caplog.at_level(logging.WARNING):
        assert deliveries(root, num_epochs=2, num_workers=num_workers) == undamaged
    texts = [record.getMessage() for record in caplog.records if "through its container" in record.getMessage()]
    assert len(texts) >= len(victims) >= 2
    assert all(any(victim in text for text in texts) for victim in victims)
    assert substituted(root, num_workers=num_workers)[0] == 0


def test_packets_of_another_clip_are_not_decoded(root: Path, undamaged: list[Delivered]) -> None:
    """SAMPLE-2: with swapped rows, the checksums of the pieces do not match, but the clips themselves are good."""
    rewrite(root, lambda rows, clips: _rotated(clips))
    assert deliveries(root, num_epochs=2) == undamaged
    assert substituted(root)[0] == 0


def _rotated(clips: Clips) -> Clips:
    """Return the clips' indexes, where each clip has the index of the next shorter clip."""
    places = [number for number, clip in enumerate(clips) if clip is not None]
    ends = [clip.num_bytes for clip in clips if clip is not None]
    changed = list(clips)
    order = np.argsort(ends)
    for here, there in zip(order, [*order[:1], *order[:-1]], strict=True):  # a shorter clip's index for a longer clip
        changed[places[here]] = clips[places[there]]
    return changed


def test_packets_with_a_wrong_number_of_frames_or_bytes_are_an_error(built: Path, tmp_path: Path) -> None:
    """SAFE-1: the error gives the numbers in the index and in the packet table."""
    for number, change in enumerate((_fewer_frames, _far_away)):
        root = Path(shutil.copytree(built, tmp_path / str(number)))
        rewrite(root, lambda rows, clips, change=change: [change(clip) for clip in clips])  # type: ignore[misc]
        with pytest.raises(
            SampleError,
            match=r"the index lists 120 frames in \d+ bytes for the clip, but the clip's packet table lists",
        ):
            deliveries(root)


def _fewer_frames(clip: ClipIndex | None) -> ClipIndex | None:
    flags = None if clip is None else clip.flags.copy()
    if clip is None or flags is None:
        return None
    flags[-1] &= KEY
    return replace(clip, flags=flags)


def _far_away(clip: ClipIndex | None) -> ClipIndex | None:
    return None if clip is None else replace(clip, offsets=clip.offsets + (1 << 50))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_damaged_packet_file_is_an_error(root: Path, num_workers: int) -> None:
    """SHARD-2: checksums cover each byte. The error names the file and the remedy."""
    (file,) = open_dataset(root).manifest.files.packets
    size = (root / file.path).stat().st_size
    for at in (0, size // 2, size - 1):
        flip(root / file.path, at)
        with pytest.raises(
            SampleError, match=r"packets of .* in index/packets.*: checksum mismatch; copy the dataset again"
        ):
            deliveries(root, num_workers=num_workers)
        flip(root / file.path, at)
    deliveries(root, num_workers=num_workers)
    (root / file.path).write_bytes((root / file.path).read_bytes()[: size // 2])
    with pytest.raises(streamvid.StreamvidError):
        deliveries(root, num_workers=num_workers)
    (root / file.path).unlink()
    with pytest.raises(streamvid.StreamvidError, match="No such file"):
        deliveries(root, num_workers=num_workers)


@pytest.mark.slow
def test_substitution_does_not_depend_on_earlier_deliveries(tmp_path: Path) -> None:
    """BAD-1, PLAN-5: a partly damaged clip is delivered whenever its window is intact, with or without a resume."""
    root = tmp_path / "dataset"
    for number in range(6):
        (tmp_path / "videos").mkdir(exist_ok=True)
        (tmp_path / f"videos/{number}.mp4").write_bytes(encode(frames_of("bikes", 96, 64, 60 + number)))
    options = shard_options(buckets=(Bucket(5, 64, 96),), clips="native", workers=1)
    streamvid.shard(tmp_path / "videos", root, options)
    dataset = streamvid.open_dataset(root)
    (shard,) = dataset.shards
    tar = root / shard.path
    data = bytearray(tar.read_bytes())
    for row in dataset.samples(shard).to_pylist()[:3]:
        place = row["clip_offset"] + row["clip_bytes"] // 3
        data[place : place + 60] = bytes(byte ^ 255 for byte in data[place : place + 60])
    tar.write_bytes(data)

    def received(epochs: int, state: dict[str, Any] | None = None, **settings: Any) -> list[tuple[str, bool]]:
        settings = {
            "batch_size": 1,
            "num_epochs": None,
            "num_workers": 0,
            "limits": {"max_bad_fraction": 1.0},
        } | settings
        with streamvid.VideoLoader(root, **settings) as loader:
            if state is not None:
                loader.load_state_dict(state)
            batches = [(b.sample_keys[0], bool(b.is_repeat[0])) for b in islice(loader, epochs * 6)]
            states.append(loader.state_dict())
            return batches

    states: list[dict[str, Any]] = []
    whole = received(8)
    assert {key for key, _ in whole} and 0 < sum(is_repeat for _, is_repeat in whole) < len(whole)
    received(3)
    assert received(5, states[-1]) == whole[18:]
    assert (
        received(8, limits={"prefetch_bytes": 1000})
        == received(8, output={"decode": False})
        == received(8, num_workers=2)
        == whole
    )


PLACES: dict[str, dict[str, Any]] = {
    "beyond the file": {"packets_offset": 10**9},
    "before the file": {"packets_offset": -5},
    "more than fits into memory": {"packets_bytes": 2**62},
    "none": {"packets_bytes": 0},
    "no offset": {"packets_offset": None},
    "no checksum": {"packets_sha256": None},
}


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("name", PLACES)
def test_an_invalid_location_of_a_packet_table_is_an_error(root: Path, name: str, decode: bool) -> None:
    """SAFE-1: the error is raised before any byte is read or memory is allocated, with and without decoding."""
    rewrite(root, lambda rows, clips: clips, PLACES[name])
    with (
        open_loader(root, output={"decode": decode}) as loader,
        pytest.raises(
            SampleError, match="the index gives a wrong location for the packets of .* copy the dataset again"
        ),
    ):
        list(loader)


def test_a_window_of_very_many_key_frames_reaches_a_worker(tmp_path: Path) -> None:
    """One checksum per key frame would make the message too large for a socket."""
    num_frames = 1700
    (tmp_path / "videos").mkdir()
    noise = ("-f", "lavfi", "-i", f"testsrc=s=32x32:r=100:d={num_frames / 100}")
    run_ffmpeg(*noise, "-c:v", "libx264", "-g", 1, "-pix_fmt", "yuv420p", tmp_path / "videos/intra.mp4")
    shard(tmp_path / "videos", tmp_path / "dataset", shard_options(buckets=(Bucket(num_frames, 32, 32),), workers=1))
    dataset = open_dataset(tmp_path / "dataset")
    (info,) = dataset.shards
    (row,) = dataset.samples(info).to_pylist()
    index = dataset.packets(info, *(row[name] for name in PLACE)).clip(0)
    assert index is not None and len(index.window(0, num_frames).pieces) == num_frames
    frames = []
    for num_workers in (0, 1):
        with open_loader(dataset, num_workers=num_workers, tail="uneven") as loader:
            frames += [batch.video.clone() for batch in loader]
    assert len(frames) == 2 and frames[0].equal(frames[1])
