"""Tests of near-duplicates: copies are found among different scenes, kept or removed, and never divided by splits."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamvid
from streamvid.buckets.bucket import parse_buckets
from streamvid.cli.report import print_input
from streamvid.errors import ConfigError, SourceError
from streamvid.sharder.curation.groups import MOST_DIFFERENT, find_leaders, similar
from streamvid.sharder.curation.signature import NUM_APPEARANCE_WORDS, NUM_WORDS
from streamvid.sharder.planning.assign import record_key, split_of
from streamvid.sharder.sharder import dry_run, shard
from tests.clips import encode, frames_of
from tests.files import write_rows
from tests.planted import HEIGHT, NUM_FRAMES, WIDTH, plant, scenes
from tests.shard_options import shard_options
from tests.sharder.conftest import Built, build
from tests.sharder.test_tasks import do_task

OPTIONS: dict[str, Any] = {
    "buckets": parse_buckets(f"48x32@{NUM_FRAMES}"),
    "dedup": "mark",
    "caption_column": "",
    "val_fraction": 0.5,
    "workers": 1,
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, dict[str, str]]:
    """Dataset with marked groups, and the original of each copy."""
    folder = tmp_path_factory.mktemp("planted")
    originals = plant(folder / "source", 24, 8)
    return build(folder / "source", folder / "dataset", OPTIONS), originals


def columns(dest: Path, *names: str) -> dict[str, Any]:
    rows = streamvid.open_dataset(dest).samples_table().to_pylist()
    return {row["source"]: tuple(row[name] for name in names) for row in rows}


def accuracy(groups: dict[str, str | None], originals: dict[str, str]) -> tuple[float, float]:
    """Return recall and precision of pairs: a copy and its original, and two different originals in one group."""
    members: dict[str, set[str]] = defaultdict(set)
    for source, group in groups.items():
        if group is not None:
            members[group].add(originals.get(source, source))
    right = sum(groups[copy] is not None and groups[copy] == groups[own] for copy, own in originals.items())
    wrong = sum(len(several) * (len(several) - 1) // 2 for several in members.values())
    return right / len(originals), right / (right + wrong)


def marked(dest: Path) -> dict[str, str | None]:
    return {source: group for source, (group,) in columns(dest, "user.duplicate_group").items()}


def test_planted_copies_are_grouped_with_their_originals(planted: tuple[Built, dict[str, str]]) -> None:
    """A group is named after its largest row, and the loader can select by it."""
    built, originals = planted
    groups, sizes = marked(built.dest), columns(built.dest, "source_width", "source_height")
    recall, precision = accuracy(groups, originals)
    assert recall >= 0.8 and precision == 1
    assert groups["00023.mp4"] is None
    for source, group in groups.items():
        assert group is None or np.prod(sizes[group]) >= np.prod(sizes[source])
    with streamvid.VideoLoader(built.dest, batch_size=1, where="duplicate_group is None", num_workers=0) as loader:
        assert sum(1 for _ in loader) == sum(
            group is None and split == "train"
            for group, (split,) in zip(groups.values(), columns(built.dest, "split").values(), strict=True)
        )


def test_the_largest_row_of_a_group_is_kept(
    planted: tuple[Built, dict[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SHARD-3: every other row is a rejection that names the kept row."""
    built, _ = planted
    report = dry_run(built.source, tmp_path / "dest", shard_options(**{**OPTIONS, "dedup": "keep-largest"}))
    groups = marked(built.dest)
    expected = {source: group for source, group in groups.items() if group not in (None, source)}
    rows = {source: row for row, source in enumerate(sorted(groups))}
    assert {rejection.source: rejection.reason for rejection in report.rejections if rejection.kind == "duplicate"} == {
        source: f"near-duplicate of {group} (row {rows[str(group)]}), which is kept"
        for source, group in expected.items()
    }
    assert report.num_samples == len(groups) - len(expected) and report.num_rejected == len(expected)
    assert report.input is not None and report.input.near_duplicates is not None
    assert report.input.near_duplicates.rows.count == len(expected)
    print_input(report.input)
    num_groups = len({*groups.values()} - {None})
    assert f"larger or earlier video, in {num_groups} groups: {len(expected)}" in capsys.readouterr().out


def test_a_group_is_in_one_split(planted: tuple[Built, dict[str, str]]) -> None:
    """Without groups, some copies would be in different splits."""
    built, _ = planted
    alone, together = defaultdict(set), defaultdict(set)
    for source, (group, split) in columns(built.dest, "user.duplicate_group", "split").items():
        alone[group].add(split_of(record_key(source), 0.5))
        together[group].add(split)
    assert any(len(alone[group]) > 1 for group in alone if group is not None)
    assert all(len(together[group]) == 1 for group in together if group is not None)
    assert len(together[None]) == 2


def test_tasks_find_the_same_groups(planted: tuple[Built, dict[str, str]], tmp_path: Path) -> None:
    """SHARD-1."""
    built, _ = planted
    for task in ("0/2", "1/2", None):
        do_task(built, tmp_path / "dataset", task)
    assert columns(tmp_path / "dataset", "user.duplicate_group", "split", "key") == columns(
        built.dest, "user.duplicate_group", "split", "key"
    )


def test_flat_frames_and_parts_of_a_fixed_view_are_not_duplicates(tmp_path: Path) -> None:
    """Parts of one view differ in moving objects, and a fade is compared by its clear frames. Images are not videos."""
    black, size = np.zeros((NUM_FRAMES, HEIGHT, WIDTH, 3), np.uint8), 16
    view = np.repeat(frames_of("bikes", WIDTH, HEIGHT, 1), 2 * NUM_FRAMES, axis=0)
    for number, frame in enumerate(view):
        left = 2 * number if number < NUM_FRAMES else WIDTH - 2 * (number - NUM_FRAMES + 8)
        frame[20 : 20 + size, left : left + size] = (200, 80, 40)
    scene = next(scenes(3))
    fade = np.concatenate([black[:5], scene[5:]])
    parts = {"black": black, "gray": black + 90, "view": view, "scene": scene, "fade": fade, "still": scene[4:5]}
    for name, frames in parts.items():
        write = {"codec": "mjpeg", "container": "image2pipe", "options": {"strict": "-1"}} if name == "still" else {}
        file = tmp_path / f"{name}.{'jpg' if write else 'mp4'}"
        file.write_bytes(encode(frames, fps=NUM_FRAMES, numbered=False, **write))
    (tmp_path / "again.mp4").write_bytes((tmp_path / "black.mp4").read_bytes())
    rows: list[dict[str, Any]] = [{"path": file.name} for file in sorted(tmp_path.iterdir()) if file.stem != "view"]
    rows += [{"path": "view.mp4", "start": start, "end": end} for start, end in ((0, 1), (1, 2), (0, 0.9))]
    write_rows(tmp_path / "metadata.jsonl", rows)
    buckets = parse_buckets("48x32@9,48x32@1")
    changes = {"clips": "native", "time_columns": ("start", "end"), "dedup": "keep-largest", "buckets": buckets}
    report = shard(tmp_path, tmp_path / "dest", shard_options(**{**OPTIONS, **changes}))
    assert [(row.source, row.reason) for row in report.rejections] == [
        ("fade.mp4", "near-duplicate of scene.mp4 (row 4), which is kept"),
        ("view.mp4", "near-duplicate of view.mp4 (0 to 1 s) (row 6), which is kept"),
    ]


def signatures_of(rng: np.random.Generator, num_rows: int) -> Any:
    """Return random signatures without any motion."""
    words = rng.integers(0, 2**63, (NUM_WORDS, num_rows), np.uint64) << np.uint64(1)
    words[NUM_APPEARANCE_WORDS:] = 0
    return words


def changed(rng: np.random.Generator, row: Any, num_bits: int) -> Any:
    """Return the signature with this number of bits flipped."""
    bits = rng.choice(NUM_APPEARANCE_WORDS * 63, num_bits, replace=False)
    row = row.copy()
    np.bitwise_xor.at(row, bits // 63, np.uint64(1) << (bits % 63 + 1).astype(np.uint64))
    return row


def test_a_row_follows_only_a_row_that_is_similar_to_it() -> None:
    """A chain of small changes does not join its ends, and a large group has one leader, wherever its rows are."""
    rng = np.random.default_rng(0)
    words = signatures_of(rng, 1000)
    for row in range(101, 110):
        words[:, row] = changed(rng, words[:, row - 1], MOST_DIFFERENT * 3 // 5)
    crowd = rng.permutation(np.arange(200, 1000))[:400]
    for row in crowd:
        words[:, row] = changed(rng, words[:, 150], int(rng.integers(0, MOST_DIFFERENT // 3)))
    leaders = find_leaders(words)
    followers = np.flatnonzero(leaders != np.arange(1000))
    assert (leaders[leaders] == leaders).all() and (leaders[followers] < followers).all()
    assert similar(words, leaders[followers], followers).all()
    assert set(leaders[crowd].tolist()) == {150}
    assert leaders[100:104].tolist() == [100, 100, 102, 102]
    assert set(followers) - set(crowd.tolist()) <= set(range(101, 110))


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"dedup": "largest"}, ConfigError, "dedup='largest'.*keep-largest"),
        ({"where": "duplicate_group is None"}, ConfigError, "grouped after the rows are selected"),
        ({"trust_metadata": True}, ConfigError, "dedup='mark'.*trust_metadata"),
        ({"metadata": "taken.jsonl"}, SourceError, "already has a column named .duplicate_group.*--dedup"),
    ],
)
def test_invalid_requests_are_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    (tmp_path / "a.mp4").write_bytes(encode(frames_of("bikes", WIDTH, HEIGHT, NUM_FRAMES)))
    if "metadata" in changes:
        rows = [{"path": "a.mp4", "duplicate_group": 1}]
        changes = {"metadata": write_rows(tmp_path / "taken.jsonl", rows)}
    with pytest.raises(error, match=says):
        dry_run(tmp_path, tmp_path / "dest", shard_options(**{**OPTIONS, **changes}))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_200_copies_among_2000_clips(tmp_path: Path) -> None:
    originals = plant(tmp_path / "source", 2000, 200, seed=1)
    shard(tmp_path / "source", tmp_path / "dest", shard_options(**{**OPTIONS, "workers": 2}))
    recall, precision = accuracy(marked(tmp_path / "dest"), originals)
    print(f"recall {recall:.3f}, precision {precision:.3f}")
    assert recall >= 0.95 and precision >= 0.99
