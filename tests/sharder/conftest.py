"""Small source folder of real clips, and the datasets that an undisturbed run builds from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from streamvid.buckets.bucket import parse_buckets
from streamvid.dataset.versions.open import open_dataset
from streamvid.sharder.report import ShardReport
from streamvid.sharder.sharder import shard
from tests.clips import encode, frames_of
from tests.files import Tree, tree_of, write_rows
from tests.shard_options import shard_options

BUCKETS = parse_buckets("96x64@9,64x96@9,96x64@17,64x64@1")
OPTIONS: dict[str, Any] = {"buckets": BUCKETS, "shard_size_bytes": 12_000, "val_fraction": 0.3, "seed": 5, "workers": 1}
NATIVE = {**OPTIONS, "clips": "native"}


@dataclass(frozen=True)
class Built:
    """Dataset, with its source, options and report."""

    source: Path
    dest: Path
    report: ShardReport
    tree: Tree
    options: dict[str, Any]


class Stop(Exception):
    """Exception raised in a caller's own callback."""


def stop_at(phase: str, done: int) -> Callable[[str, int, int], None]:
    """Return a callback that stops a run once this number of units of a phase is done."""

    def progress(now: str, count: int, total: int) -> None:
        if now == phase and count >= done:
            raise Stop

    return progress


def noted(phase: str, counts: list[int]) -> Callable[[str, int, int], None]:
    """Return a callback that appends the number of completed units of a phase at each event."""
    return lambda now, done, total: counts.append(done) if now == phase else None


def rows_of(dest: Path) -> list[dict[str, Any]]:
    return list(open_dataset(dest).samples_table().to_pylist())


def make_source(folder: Path) -> None:
    """Write 14 good files, 5 that must be rejected, and a metadata.csv with awkward captions."""
    wide, tall = frames_of("bikes", 96, 64, 20), frames_of("carphone_pristine", 64, 96, 12)
    files = {
        "a/clip_1.5s_a.mp4": encode(wide[:10]),
        "a/clip_1.5s_b.mp4": encode(wide[4:14]),
        "b/clip_1.5s_a.mp4": encode(wide[8:18]),
        "b/long.MP4": encode(wide),
        "b/long two.mov": encode(wide[:18], container="mov"),
        "vélo.webm": encode(wide[:11], codec="libvpx-vp9", container="webm"),
        "c/deep/tall.mkv": encode(tall, container="matroska"),
        "c/still.jpg": encode(
            frames_of("bigbuckbunny", 64, 64, 1), codec="mjpeg", container="image2pipe", options={"strict": "-1"}
        ),
        **{f"more/{number}.mp4": encode(wide[number : number + 10]) for number in range(6)},
        "bad/text.mp4": b"no video at all, only text\n" * 20,
        "bad/empty.mp4": b"",
        "bad/short.mp4": encode(wide[:3]),
    }
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    rows: list[dict[str, object]] = [
        {"path": name, "caption": f'number {row}, with "quotes"\nand\ta new line é', "score": row / 2, "row_id": row}
        for row, name in enumerate(files)
    ]
    rows.append({"path": "not/there.mp4", "caption": "missing", "score": "", "row_id": 100})
    rows.append({"path": "../outside.mp4", "caption": "outside", "score": "nan", "row_id": 101})
    write_rows(folder / "metadata.csv", rows)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    make_source(folder)
    return folder


def build(source: Path, dest: Path, options: dict[str, Any]) -> Built:
    report = shard(source, dest, shard_options(**options))
    return Built(source, dest, report, tree_of(dest), options)


@pytest.fixture(scope="session")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(source, tmp_path_factory.mktemp("built") / "dataset", OPTIONS)


@pytest.fixture(scope="session")
def native(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Dataset of the same source with native clips."""
    return build(source, tmp_path_factory.mktemp("native") / "dataset", NATIVE)


@pytest.fixture(params=["built", "native"])
def either(request: pytest.FixtureRequest) -> Built:
    """Dataset of copies or of native clips, in turn."""
    return cast(Built, request.getfixturevalue(request.param))
