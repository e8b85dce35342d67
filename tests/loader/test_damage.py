"""Tests of damaged datasets: each sample is correct or replaced and reported, or the loader raises a StreamvidError.

Each seed damages a copy of one small dataset: its tars, its index, its manifest, or the files next to the tars. The
checks use only the undamaged dataset and the bytes on disk, and nothing from the loader.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import shutil
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import streamvid
from streamvid.errors import StreamvidError
from streamvid.video.decode.file import decode_into
from tests.loader.conftest import SMALL, TALL, build_dataset, clip_bytes
from tests.loader.test_bad import expected_substitute

pytestmark = pytest.mark.timeout(120)

# Ten samples in full batches: each is delivered once per epoch, and the default limit allows ten bad samples.
LAYOUT = {SMALL: [4, 2], TALL: [2, 2]}
CLIP_FRAMES = 24
KINDS = ("flip", "flip", "flips", "cut", "zero", "noise", "swap", "exchange", "longer", "gone")
TARGETS = ("tar", "tar", "tar", "tar", "samples", "shards", "manifest", "manifest", "beside")


@dataclass(frozen=True)
class Slot:
    """One delivered sample."""

    key: str
    text: str
    pixels: tuple[str, ...]  # digest of each frame
    is_repeat: bool


@dataclass
class Run:
    """Samples and warnings that a consumer received, up to the end or an error."""

    slots: list[Slot] = field(default_factory=list)
    listed: list[str] = field(default_factory=list)
    error: BaseException | None = None


@dataclass(frozen=True)
class Stored:
    """Location and original bytes of a sample's clip."""

    shard: str
    bucket_id: str
    start: int
    clip: bytes


@dataclass(frozen=True)
class Pristine:
    root: Path
    run: Run
    samples: dict[str, Stored]  # in index order

    def bad(self, root: Path) -> set[str]:
        """Return the samples whose clip bytes on disk differ from the original ones."""
        tars = {s.shard: (root / s.shard).read_bytes() for s in self.samples.values() if (root / s.shard).exists()}
        return {
            key for key, s in self.samples.items() if tars.get(s.shard, b"")[s.start : s.start + len(s.clip)] != s.clip
        }


def deliver(root: Path, num_workers: int = 0) -> Run:
    """Run one epoch and record its outcome, including an error."""
    run = Run()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: run.listed.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("streamvid")
    logger.addHandler(handler)
    try:
        with streamvid.VideoLoader(
            root, batch_size=2, num_workers=num_workers, limits={"prefetch_bytes": 1 << 22}
        ) as loader:
            for batch in loader:
                videos = batch.video.permute(0, 2, 3, 4, 1).numpy()
                for slot, video in enumerate(videos):
                    digests = tuple(digest(frame) for frame in video)
                    repeat = bool(batch.is_repeat[slot])
                    run.slots.append(Slot(batch.sample_keys[slot], batch.text[slot], digests, repeat))
                del batch, videos, video
    except Exception as error:
        run.error = error
    finally:
        logger.removeHandler(handler)
    return run


def digest(frame: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(frame).tobytes()).hexdigest()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Pristine:
    return known(build_dataset(tmp_path_factory.mktemp("pristine"), LAYOUT))


def known(root: Path) -> Pristine:
    dataset, samples = streamvid.open_dataset(root), {}
    for shard in dataset.shards:
        data = (root / shard.path).read_bytes()
        for row in dataset.samples(shard).to_pylist():
            start = row["clip_offset"]
            clip = data[start : start + row["clip_bytes"]]
            samples[row["key"]] = Stored(shard.path, shard.bucket_id, start, clip)
    run = deliver(root)
    assert run.error is None and not run.listed and sorted(slot.key for slot in run.slots) == sorted(samples)
    return Pristine(root, run, samples)


@cache
def frames_of(key: str) -> tuple[str, ...]:
    """Return the digest of every frame of a sample's clip, at its bucket's size."""
    bucket_id, _, number = key.rpartition("-")
    (bucket,) = (bucket for bucket in LAYOUT if bucket.id == bucket_id)
    clip = clip_bytes(int(number) % 3, bucket.width * 2, bucket.height * 2, CLIP_FRAMES)
    out = np.zeros((CLIP_FRAMES, bucket.height, bucket.width, 3), np.uint8)
    decode_into(memoryview(clip), 0, out, num_frames=CLIP_FRAMES)
    return tuple(digest(frame) for frame in out)


def damage(root: Path, choose: random.Random) -> set[str]:
    """Damage one or two files. Return the names of the affected groups."""
    files = {
        "tar": sorted(root.glob("shards/*/*.tar")),
        "samples": sorted(root.glob("index/samples-*")),
        "shards": sorted(root.glob("index/shards-*")),
        "manifest": [root / "manifest.json"],
        "beside": sorted(root.glob("shards/*/*.idx")) + sorted(root.glob("index/rejections-*")),
    }
    hit = set()
    for _ in range(choose.choice([1, 1, 2])):
        group = choose.choice(TARGETS)
        hit.add(group)
        path = choose.choice(files[group])
        if not path.exists():
            continue
        other = choose.choice([p for group in files.values() for p in group if p.exists()])
        data = spoil(path.read_bytes(), choose.choice(KINDS), other.read_bytes(), choose)
        path.unlink()  # this is a hard link to the pristine file
        if data is not None:
            path.write_bytes(data)
    return hit


def spoil(data: bytes, kind: str, other: bytes, choose: random.Random) -> bytes | None:
    """Return the damaged content of a file, or None if the file is deleted."""
    wrong = bytearray(data)
    if not wrong or kind == "gone":
        return None
    start = choose.randrange(len(wrong))
    length = min(len(wrong) - start, choose.choice([1, 16, 512, 4096, 1 << 20]))
    if kind in ("flip", "flips"):
        for _ in range(1 if kind == "flip" else choose.randint(2, 9)):
            wrong[choose.randrange(len(wrong))] ^= 1 << choose.randrange(8)
    elif kind == "cut":
        del wrong[start:]
    elif kind == "zero":
        wrong[start : start + length] = bytes(length)
    elif kind == "noise":
        wrong[start : start + length] = choose.randbytes(length)
    elif kind == "swap":
        second = choose.randrange(len(wrong) - length + 1)
        a, b = bytes(wrong[start : start + length]), bytes(wrong[second : second + length])
        wrong[start : start + length], wrong[second : second + length] = b, a
    elif kind == "exchange":
        piece = other[start % max(1, len(other)) :][:length]
        wrong[start : start + len(piece)] = piece
    else:
        wrong += choose.randbytes(choose.choice([1, 512, 10240]))
    return bytes(wrong)


def check(pristine: Pristine, root: Path, run: Run) -> None:
    """Check that no error is unexpected, no sample or plan is wrong, and each bad sample is reported."""
    bad = pristine.bad(root)
    assert len(run.slots) <= len(pristine.run.slots)
    if run.error is not None:
        assert isinstance(run.error, StreamvidError), repr(run.error)
        assert "failed unexpectedly" not in str(run.error) and len(str(run.error)) < 2000, str(run.error)
        assert str(root) in str(run.error)
        assert is_to_fail(pristine, root, bad), str(run.error)
    else:
        assert len(run.slots) == len(pristine.run.slots)
        assert not is_index_changed(pristine, root)
    replaced = []
    for planned, received in zip(pristine.run.slots, run.slots, strict=False):
        if planned.key not in bad:
            assert received == planned
            continue
        assert received.key == expected_substitute(planned.key, bad, LAYOUT) and received.is_repeat
        windows = frames_of(received.key)
        start = windows.index(received.pixels[0])
        assert windows[start : start + len(received.pixels)] == received.pixels
        (own,) = (slot for slot in pristine.run.slots if slot.key == received.key)
        assert received.text == own.text
        replaced.append((planned.key, received.key))
    listed = [line for line in run.listed if "takes its place" in line]
    assert len(listed) == len(replaced)
    for (key, substitute), line in zip(replaced, listed, strict=True):
        assert f"bad sample {key} " in line and f"{substitute} takes its place" in line


def is_index_changed(pristine: Pristine, root: Path) -> bool:
    """Return whether anything that a plan, a caption or a clip depends on differs.

    This covers all bytes of the index, and the content of manifest.json apart from its formatting.
    """
    for before in pristine.root.glob("index/s*"):
        after = root / before.relative_to(pristine.root)
        if not after.exists() or after.read_bytes() != before.read_bytes():
            return True
    try:
        content = json.loads((root / "manifest.json").read_bytes())
    except (OSError, ValueError):
        return True
    return bool(content != json.loads((pristine.root / "manifest.json").read_bytes()))


def is_to_fail(pristine: Pristine, root: Path, bad: set[str]) -> bool:
    is_tar_gone = any(not (root / stored.shard).exists() for stored in pristine.samples.values())
    is_bucket_bad = any(expected_substitute(key, bad, LAYOUT) is None for key in bad)
    return is_index_changed(pristine, root) or is_tar_gone or is_bucket_bad


def link_copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target, copy_function=os.link))


def campaign(pristine: Pristine, folder: Path, seeds: range) -> dict[str, int]:
    """Return the number of runs per outcome. A campaign without a substitute would test nothing."""
    counts = {"errors": 0, "substituted": 0, "untouched": 0}
    for seed in seeds:
        root = link_copy(pristine.root, folder / str(seed))
        damage(root, random.Random(seed))
        run = deliver(root, num_workers=2 if seed % 10 == 0 else 0)
        try:
            check(pristine, root, run)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        counts["errors"] += run.error is not None
        counts["substituted"] += any("takes its place" in line for line in run.listed)
        counts["untouched"] += run == pristine.run
        shutil.rmtree(root)
    return counts


@pytest.mark.parametrize("first", range(0, 60, 15))
def test_damaged_datasets(pristine: Pristine, tmp_path: Path, first: int) -> None:
    """BAD-1, FETCH-1, SAFE-1, PLAN-1: each damaged dataset passes `check`."""
    counts = campaign(pristine, tmp_path, range(first, first + 15))
    assert counts["errors"] and counts["substituted"], counts


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(1000, 2000, 100))
def test_a_thousand_damaged_datasets(pristine: Pristine, tmp_path: Path, first: int) -> None:
    """BAD-1, FETCH-1, SAFE-1, PLAN-1: each of 1000 damaged datasets passes `check`."""
    counts = campaign(pristine, tmp_path, range(first, first + 100))
    assert all(count > 4 for count in counts.values()), counts


def test_bytes_of_a_tar_outside_of_clips_have_no_effect(pristine: Pristine, tmp_path: Path) -> None:
    """BAD-1: headers, captions, padding and the .idx files are copies for other readers."""
    root = link_copy(pristine.root, tmp_path / "dataset")
    for path in sorted(root.glob("shards/*/*.tar")):
        name, data = path.relative_to(root).as_posix(), path.read_bytes()
        wrong = bytearray(byte ^ 0xFF for byte in data)
        for stored in pristine.samples.values():
            if stored.shard == name:
                wrong[stored.start : stored.start + len(stored.clip)] = stored.clip
        path.unlink()
        path.write_bytes(wrong)
        path.with_name(f"{path.name}.idx").unlink()
    run = deliver(root)
    assert run == pristine.run


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_first_and_the_last_byte_of_a_clip_count(pristine: Pristine, tmp_path: Path, num_workers: int) -> None:
    """BAD-1: damage to the first or the last byte of a clip is detected."""
    root = link_copy(pristine.root, tmp_path / "dataset")
    for key, place in (("96x64-5f-1", 0), ("64x96-9f-3", -1)):
        stored = pristine.samples[key]
        path = root / stored.shard
        wrong = bytearray(path.read_bytes())
        wrong[stored.start + (place if place >= 0 else len(stored.clip) + place)] ^= 1
        path.unlink()
        path.write_bytes(wrong)
    run = deliver(root, num_workers)
    check(pristine, root, run)
    assert run.error is None and len([line for line in run.listed if "takes its place" in line]) == 2
