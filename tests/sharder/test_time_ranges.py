"""Tests of clips from long videos: rows with time ranges, stored as copies and as native clips (SAMPLE-2)."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

import streamvid
from streamvid.buckets.bucket import parse_buckets
from streamvid.dataset.versions.open import open_dataset
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.sharder import dry_run, shard
from tests.clips import encode, frames_of
from tests.files import tree_of, write_rows
from tests.shard_options import shard_options
from tests.sharder.conftest import Stop, rows_of, stop_at
from tests.video.clips import decode_with_ffmpeg, run_ffmpeg
from tools.make_corpus import read_number

WIDTH, HEIGHT, NUM_FRAMES, LONGEST = 128, 96, 100, 30
# One bucket per length, so that a loader delivers all frames of every clip.
BUCKETS = parse_buckets(",".join(f"{WIDTH}x{HEIGHT}@{count}" for count in range(2, LONGEST + 1)))
OPTIONS: dict[str, Any] = {"buckets": BUCKETS, "workers": 1, "verify": None, "whole_files": False}

OPEN_GOP = {"x264-params": "open-gop=1:keyint=24:bframes=4:b-pyramid=normal", "crf": "20"}
ENCODED: dict[str, dict[str, Any]] = {
    "open_gop.mp4": {"options": OPEN_GOP},
    "tv.ts": {"container": "mpegts", "options": {"g": "25", "bf": "3"}, "fps": 25},
    "old.avi": {"codec": "mpeg4", "container": "avi", "options": {"g": "20", "bf": "2", "b": "3M"}, "fps": 25},
    "web.webm": {
        "codec": "libvpx-vp9",
        "container": "webm",
        "options": {"deadline": "realtime", "cpu-used": "8", "g": "40", "crf": "20"},
        "fps": 30,
    },
}
_UNEVEN = "select='mod(n,7)*mod(n,3)'"
# Film → (film that it is made from, ffmpeg's options for input and output).
CHANGED: dict[str, tuple[str, str, str]] = {
    "edit_list.mp4": ("open_gop.mp4", "-ss 1.1", "-c copy"),
    "later.mkv": ("open_gop.mp4", "-itsoffset 2.5", "-c copy -copyts"),
    "uneven.mp4": ("open_gop.mp4", "", f"-vf {_UNEVEN} -fps_mode passthrough -g 20 -bf 3"),
}
FILMS = (*ENCODED, *CHANGED)
Span = tuple[Fraction, Fraction]


@dataclass(frozen=True)
class Film:
    """Film as the ffmpeg program shows it."""

    path: Path

    @cached_property
    def numbers(self) -> list[int | None]:
        """Numbers burned into the frames."""
        return [read_number(frame) for frame in decode_with_ffmpeg(self.path, "null", HEIGHT, WIDTH)]

    @cached_property
    def seconds(self) -> list[Fraction]:
        """Times of the frames after the first frame."""
        show = ("-map", "0:V:0", "-fps_mode", "passthrough", "-enc_time_base", "demux", "-f", "framecrc", "-")
        lines = run_ffmpeg("-copyts", "-i", self.path, *show).decode().splitlines()
        (base,) = (Fraction(line.split()[-1]) for line in lines if line.startswith("#tb"))
        times = [int(line.split(",")[2]) * base for line in lines if not line.startswith("#")]
        return [time - times[0] for time in times]

    def shown_in(self, span: Span) -> list[int | None]:
        return [number for number, time in zip(self.numbers, self.seconds, strict=True) if span[0] <= time < span[1]]

    def draw(self, draw: random.Random) -> Span:
        """Return a span of 2 to LONGEST frames, whose ends are often frame times to the millisecond."""
        while True:
            first = draw.randrange(len(self.seconds) - 2)
            last = draw.randint(first + 2, min(first + LONGEST, len(self.seconds) - 1))
            noise = draw.choice([0.0, 0.001, -0.001, draw.random() / 25])
            start, end = (Fraction(round(1000 * max(0, float(self.seconds[n]) + noise)), 1000) for n in (first, last))
            if 2 <= len(self.shown_in((start, end))) <= LONGEST:
                return start, end


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Film]:
    folder = tmp_path_factory.mktemp("films")
    for name, options in ENCODED.items():
        (folder / name).write_bytes(encode(frames_of("bikes", WIDTH, HEIGHT, NUM_FRAMES), **options))
    for name, (origin, before, after) in CHANGED.items():
        run_ffmpeg(*before.split(), "-i", folder / origin, *after.split(), folder / name)
    return {name: Film(folder / name) for name in FILMS}


def clock(seconds: Fraction) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes) // 60}:{int(minutes) % 60:02d}:{float(rest):06.3f}"


def clocks(span: Span) -> list[str]:
    return [clock(seconds) for seconds in span]


Row = dict[str, object]
Spans = dict[str, list[Span]]


def panda(spans: Spans) -> list[Row]:
    """Return rows as in Panda-70M: lists of ranges and of captions in one row per video."""
    return [
        {
            "videoID": name,
            "url": "https://example.com/watch",
            "timestamp": str([clocks(span) for span in mine]),
            "caption": str([f"{name} {number}" for number in range(len(mine))]),
            "matching_score": str([0.5] * len(mine)),
        }
        for name, mine in spans.items()
    ]


def each(spans: Spans, row: Callable[[str, Span, str], Row]) -> list[Row]:
    """Return one row per range."""
    return [row(name, span, f"{name} {number}") for name, mine in spans.items() for number, span in enumerate(mine)]


def koala(spans: Spans) -> list[Row]:
    """Return rows as in Koala-36M: a range as a list of two times."""
    return each(spans, lambda name, span, text: {"videoID": name, "timestamp": str(clocks(span)), "caption": text})


def open_vid(spans: Spans) -> list[Row]:
    """Return rows as in OpenVid: columns of numbers."""
    return each(
        spans,
        lambda name, span, text: {
            "video": name,
            "caption": text,
            "aesthetic score": 5.1,
            "motion score": 3.2,
            "start_seconds": float(span[0]),
            "end_seconds": float(span[1]),
        },
    )


def mira(spans: Spans) -> list[Row]:
    """Return rows as in MiraData: two columns of times, and several captions."""
    return each(
        spans,
        lambda name, span, text: {
            "video_id": name,
            "start_timestamp": clock(span[0]),
            "end_timestamp": clock(span[1]),
            "short_caption": text,
            "dense_caption": f"{text}, at length",
        },
    )


def lists(spans: Spans) -> list[Row]:
    """Return rows with lists of starts and of ends."""
    return [
        {
            "video": name,
            "start_seconds": json.dumps([float(start) for start, _ in mine]),
            "end_seconds": json.dumps([float(end) for _, end in mine]),
            "caption": json.dumps([f"{name} {number}" for number in range(len(mine))]),
        }
        for name, mine in spans.items()
    ]


# Style → (function that returns metadata, options).
STYLES: dict[str, tuple[Callable[[Spans], list[Row]], dict[str, Any]]] = {
    "Panda-70M": (panda, {"video_column": "videoID", "time_columns": ("timestamp",)}),
    "Koala-36M": (koala, {"video_column": "videoID", "time_columns": ("timestamp",)}),
    "OpenVid": (open_vid, {"time_columns": ("start_seconds", "end_seconds")}),
    "MiraData": (
        mira,
        {
            "video_column": "video_id",
            "caption_column": "short_caption",
            "time_columns": ("start_timestamp", "end_timestamp"),
        },
    ),
    "lists": (lists, {"time_columns": ("start_seconds", "end_seconds")}),
}


def options_of(films: dict[str, Film], **changes: Any) -> ShardOptions:
    return shard_options(**{**OPTIONS, "base_path": films["tv.ts"].path.parent, **changes})


def delivered(dataset: Path) -> dict[str, list[int | None]]:
    """Return the numbers of the frames that a loader delivers, by caption."""
    loader = streamvid.VideoLoader(
        dataset, batch_size=1, num_workers=0, tail="pad", view={"temporal": "full"}, output={"layout": "BTHWC"}
    )
    with loader:
        return {str(batch.text[0]): [read_number(frame) for frame in batch.video[0].numpy()] for batch in loader}


def check(films: dict[str, Film], spans: Spans, dataset: Path) -> None:
    """Assert that the clips, the index and the ffmpeg program show exactly the frames of each range."""
    shown = delivered(dataset)
    rows = {row["text"]: row for row in rows_of(dataset)}
    assert len(rows) == sum(map(len, spans.values()))
    for name, mine in spans.items():
        for number, span in enumerate(mine):
            text, film = f"{name} {number}", films[name]
            expected, row = film.shown_in(span), rows[f"{name} {number}"]
            assert shown[text] == expected, (text, span)
            assert row["window_num_frames"] == row["window_source_frames"] == len(expected)
            first = row["window_start"]
            assert film.numbers[first : first + len(expected)] == expected
            after = [*film.seconds, film.seconds[-1] + 1][first + len(expected)]
            if first + len(expected) < len(film.seconds):
                assert row["duration_seconds"] == pytest.approx(float(after - film.seconds[first]))


@pytest.mark.parametrize("clips", ["copy", "native"])
@pytest.mark.parametrize("style", STYLES)
def test_metadata_of_well_known_datasets(films: dict[str, Film], tmp_path: Path, style: str, clips: str) -> None:
    """SAMPLE-2: copied packets and encoded frames give the same frames, and all clips of a film share a split."""
    make, options = STYLES[style]
    draw = random.Random(style)
    spans = {name: [films[name].draw(draw) for _ in range(2)] for name in ("open_gop.mp4", "uneven.mp4")}
    write_rows(tmp_path / "metadata.csv", make(spans))
    report = shard(tmp_path / "metadata.csv", tmp_path / "out", options_of(films, clips=clips, **options))
    assert (report.num_samples, report.num_rejected, report.clips) == (4, 0, clips)
    check(films, spans, tmp_path / "out")


def build(films: dict[str, Film], spans: Spans, folder: Path, **changes: Any) -> Path:
    """Build the dataset of these ranges."""
    write_rows(folder / "metadata.csv", open_vid(spans))
    options = {"time_columns": ("start_seconds", "end_seconds"), **changes}
    shard(folder / "metadata.csv", folder / "out", options_of(films, **options))
    return folder / "out"


def test_random_ranges_of_several_containers(films: dict[str, Film], tmp_path: Path) -> None:
    """SAMPLE-2: copies handle open GOPs, B-frames, edit lists, late starts, uneven times, transport streams and AVI."""
    spans = {name: [film.draw(random.Random(f"{name} {n}")) for n in range(3)] for name, film in films.items()}
    dataset = build(films, spans, tmp_path, verify="decode")
    check(films, spans, dataset)
    assert {row["clip_extension"] for row in rows_of(dataset)} == {"mp4"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("clips", ["copy", "native"])
def test_many_random_ranges(films: dict[str, Film], tmp_path: Path, clips: str) -> None:
    spans = {name: [film.draw(random.Random(f"{name} {n}")) for n in range(80)] for name, film in films.items()}
    check(films, spans, build(films, spans, tmp_path, clips=clips, workers=2))


def test_a_stopped_build_ends_with_the_same_bytes(films: dict[str, Film], tmp_path: Path) -> None:
    """SHARD-1: a row without times is its whole file, and no source is ever changed."""
    film, whole = films["open_gop.mp4"], films["tv.ts"]
    before = tree_of(film.path.parent)
    spans = [film.draw(random.Random(number)) for number in range(3)]
    rows: list[Row] = [
        {"video": film.path.name, "caption": str(number), "start": float(span[0]), "end": float(span[1])}
        for number, span in enumerate(spans)
    ]
    rows += [{"video": film.path.name, "caption": "gone", "start": 900, "end": 901}]
    rows += [{"video": whole.path.name, "caption": "whole", "start": "", "end": ""}]
    write_rows(tmp_path / "metadata.csv", rows)
    source, options = tmp_path / "metadata.csv", {"time_columns": ("start", "end"), "shard_size_bytes": 20_000}
    planned = dry_run(source, tmp_path / "out", options_of(films, **options))
    assert (planned.is_sized, planned.num_samples, planned.num_bytes) == (False, 4, 0)
    report = shard(source, tmp_path / "out", options_of(films, **options))
    assert (report.num_samples, report.num_rejected, report.encode_seconds) == (4, 1, None)
    stored = {row["text"]: row for row in rows_of(tmp_path / "out")}
    assert stored["whole"]["clip_sha256"] == hashlib.sha256(whole.path.read_bytes()).digest()
    assert [row["kind"] for row in open_dataset(tmp_path / "out").rejections_table().to_pylist()] == ["time-range"]
    expected = tree_of(tmp_path / "out")
    with pytest.raises(Stop):
        shard(source, tmp_path / "stopped", options_of(films, **options), stop_at("encode", 2))
    with pytest.raises(Stop):
        shard(source, tmp_path / "stopped", options_of(films, **options), stop_at("build", 1))
    shard(source, tmp_path / "stopped", options_of(films, **options))
    assert tree_of(tmp_path / "stopped") == expected
    assert tree_of(film.path.parent) == before


@pytest.mark.slow
def test_tasks_cut_the_same_bytes(films: dict[str, Film], tmp_path: Path) -> None:
    """SHARD-1: two tasks share the films and the ranges of a long film."""
    spans = {name: [films[name].draw(random.Random(n)) for n in range(70)] for name in ("open_gop.mp4", "old.avi")}
    expected = tree_of(build(films, spans, tmp_path))
    options = {"time_columns": ("start_seconds", "end_seconds")}
    for number in (0, 1, 0, 1, 0, 1):  # probing, cutting and building
        shard(tmp_path / "metadata.csv", tmp_path / "tasks", options_of(films, **options, task=f"{number}/2"))
    shard(tmp_path / "metadata.csv", tmp_path / "tasks", options_of(films, **options))
    assert tree_of(tmp_path / "tasks") == expected


@pytest.mark.parametrize("fps", [None, 10])
def test_long_copies_are_split(films: dict[str, Film], tmp_path: Path, fps: int | None) -> None:
    """SHARD-3: every frame is in one clip. With a frame rate, the loader finds as many frames as the plan counted."""
    names = ("uneven.mp4", "old.avi")
    write_rows(tmp_path / "metadata.csv", [{"video": name, "caption": name} for name in names])
    options = options_of(films, max_clip_seconds=0.8, fps=fps)
    report = shard(tmp_path / "metadata.csv", tmp_path / "out", options)
    rows = sorted(rows_of(tmp_path / "out"), key=lambda row: (row["source"], row["window_start"]))
    assert report.num_rejected == 0 and report.num_windows == len(rows) > 8
    for name in names:
        mine = [row for row in rows if row["source"] == name]
        covered = [
            n for row in mine for n in range(row["window_start"], row["window_start"] + row["window_num_frames"])
        ]
        assert covered == list(range(len(films[name].numbers)))
        assert all(row["duration_seconds"] <= 0.8 for row in mine)
    with streamvid.VideoLoader(tmp_path / "out", batch_size=1, num_workers=0, tail="pad") as loader:
        assert {key for batch in loader for key in batch.sample_keys} == {row["key"] for row in rows}


def test_ranges_that_cannot_be_cut_are_rejected_with_a_remedy(films: dict[str, Film], tmp_path: Path) -> None:
    """SHARD-3: MP4 cannot store Theora, so its range is a rejection, and the other rows stay."""
    run_ffmpeg("-i", films["open_gop.mp4"].path, *["-c:v", "libtheora", "-q:v", "8", "-g", "12"], tmp_path / "film.ogv")
    (tmp_path / "film.mp4").write_bytes(films["open_gop.mp4"].path.read_bytes())
    rows: list[Row] = [{"video": f"film.{kind}", "caption": kind, "start": 1, "end": 2} for kind in ("ogv", "mp4")]
    write_rows(tmp_path / "metadata.csv", rows)
    report = shard(tmp_path, tmp_path / "out", shard_options(**OPTIONS, time_columns=("start", "end")))
    (rejection,) = report.rejections
    assert (rejection.source, rejection.kind, report.num_samples) == ("film.ogv", "cut", 1)
    assert rejection.reason.startswith("frames 24 to 47: ") and rejection.reason.endswith("use --clips native")
    assert [kind.remedy for kind in report.rejected_by_kind if kind.kind == "cut"] != ["see the reason"]
