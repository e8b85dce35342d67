"""Tests of forecasts from metadata with sizes, against a row-by-row loop and the sharder's result."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamvid
from streamvid.buckets.bucket import Bucket
from streamvid.buckets.classes import ClipFacts
from streamvid.buckets.config import BucketConfig, SizeRule
from streamvid.buckets.frames import FrameRate, FrameRule
from streamvid.buckets.opensora import OpenSoraConfig
from streamvid.errors import SourceError
from streamvid.forecast.facts import is_metadata, open_facts
from streamvid.forecast.metadata import AssignedRows, assign_rows
from streamvid.forecast.run import LeftOutRow
from streamvid.sharder.planning.assign import record_key, stable_hash
from streamvid.sharder.sharder import dry_run
from tests.conftest import Corpus, Sharded
from tests.files import write_rows
from tests.shard_options import shard_options

OPENSORA = {"256px": {1: [1.0, 45], 17: [0.5, 12], 33: [[0.7, 0.4], 6]}, "512px": {1: [0.3, 8], 17: [[0.2, 0.9], 2]}}
CONFIGS = {
    "resolutions": BucketConfig(resolution=("256px", "480p"), num_frames=(1, 17, 33)),
    "explicit, capped": BucketConfig(
        buckets=(Bucket(17, 480, 832), Bucket(33, 480, 832), Bucket(81, 256, 256)),
        frame_rate=FrameRate("cap", Fraction(16)),
    ),
    "resampled": BucketConfig(
        resolution=("256px",), num_frames=(1, 5, 49), frame_rate=FrameRate("resample", Fraction(24))
    ),
    "probabilities": BucketConfig(opensora=OpenSoraConfig(bucket_config=OPENSORA, probabilities="opensora-v2")),
    "each its own size": BucketConfig(size=SizeRule(max_pixels=256 * 256, max_frames=33), frame_rule=FrameRule(4, 1)),
}


def rows_of(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    sizes = [(1080, 1920), (720, 1280), (1920, 1080), (64, 64), (300, 300), (481, 853), (16, 4000)]
    made = []
    for number in range(count):
        height, width = sizes[int(rng.integers(len(sizes)))]
        frames, fps = (
            int(rng.choice([1, 4, 5, 16, 17, 32, 33, 49, 81, 200, 300])),
            float(rng.choice([10, 24, 29.97, 60])),
        )
        made.append(
            {
                "path": f"a/{number}.mp4", "num_frames": frames, "height": height, "width": width, "fps": fps,
                "duration": frames / fps, "num_bytes": 1000 + number, "caption": "x, \"quoted\"\nand broken",
            }
        )  # fmt: skip
    return made


def forecast(source: Path, config: BucketConfig, seed: int = 7) -> AssignedRows:
    return assign_rows(open_facts(source).blocks(), config, seed)


def one_by_one(
    rows: list[dict[str, Any]], config: BucketConfig, seed: int = 7
) -> tuple[Counter[str], Counter[str], Any]:
    """Return (rows drawn per bucket, rows left out per kind, expected rows per bucket), computed by a plain loop."""
    drawn, left, expected = Counter[str](), Counter[str](), dict[str, Fraction]()
    for row in rows:
        seconds = Fraction(row["duration"]).limit_denominator(10**6)
        is_image = row["num_frames"] == 1
        choices = config.choices(
            ClipFacts(row["num_frames"], row["height"], row["width"], row["fps"], seconds, is_image)
        )
        for bucket, probability in choices.options:
            expected[bucket.id] = expected.get(bucket.id, Fraction(0)) + probability
        u = Fraction(stable_hash("bucket", str(seed), record_key(row["path"])), 2**64)
        bucket = choices.draw(u)
        if bucket is None:
            left[choices.kind] += 1
        else:
            drawn[bucket.id] += 1
    return drawn, left, expected


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_are_counted_as_in_a_row_by_row_loop(tmp_path: Path, name: str) -> None:
    """SHARD-3: each row gets a bucket or a kind of rejection, as in a plain loop over `choices`, including draws."""
    rows = rows_of(3000)
    found = forecast(write_rows(tmp_path / "m.parquet", rows), CONFIGS[name])
    drawn, left, expected = one_by_one(rows, CONFIGS[name])
    left_out = sum(one.num_rows for one in found.left_out.values())
    assert found.num_rows == len(rows) == sum(found.counts.values()) + left_out
    assert found.counts == dict(sorted(drawn.items()))
    assert {kind: one.num_rows for kind, one in found.left_out.items() if one.num_rows} == dict(left)
    assert {name: row.expected for name, row in found.buckets.items()} == expected
    assert sum(found.buckets[name].num_bytes for name in found.counts) <= sum(row["num_bytes"] for row in rows)
    for kind in found.left_out.values():
        assert kind.examples and all(one.reason for one in kind.examples)
        assert all(rows[one.row]["path"] == one.source for one in kind.examples)


def test_all_file_formats_give_the_same_forecast(tmp_path: Path) -> None:
    """CSV, JSON, JSON Lines, Parquet and a folder of Parquet files with the same rows give the same forecast."""
    rows = rows_of(500)
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(5):
        write_rows(folder / f"part-{number}.parquet", rows[100 * number : 100 * number + 100])
    sources = [write_rows(tmp_path / f"m.{kind}", rows) for kind in ("csv", "json", "jsonl", "parquet")] + [folder]
    found = [forecast(source, CONFIGS["probabilities"]) for source in sources]
    assert all(is_metadata(source) for source in sources)
    for other in found[1:]:
        assert (other.counts, other.left_out, other.num_groups) == (
            found[0].counts,
            found[0].left_out,
            found[0].num_groups,
        )
        for name, row in other.buckets.items():
            first = found[0].buckets[name]
            assert asdict(row.shape()) == pytest.approx(asdict(first.shape()))
            assert (row.expected, row.num_bytes) == (first.expected, first.num_bytes)


def test_broken_rows_and_values_are_left_out_with_a_reason(tmp_path: Path) -> None:
    """SHARD-3: no row is lost, even with non-numeric values, missing fields or lines that are not JSON objects."""
    text = (
        "path,num_frames,height,width,fps\n"
        "a.mp4,33,480,832,24\n"
        "b.mp4,many,480,832,24\n"
        "c.mp4,33,,832,24\n"
        "d.mp4,33,480\n"
        "e.mp4,33.5,480,832,24\n"
        'f.mp4," 33 ",480.0,832,24\n'
        "g.mp4,-3,480,832,24\n"
    )
    (tmp_path / "m.csv").write_text(text)
    found = forecast(tmp_path / "m.csv", CONFIGS["resolutions"])
    assert found.num_rows == 7 and found.counts == {"480p-33f-16x9": 2}
    assert {kind: one.num_rows for kind, one in found.left_out.items()} == {
        "no-size": 1, "no-frame-count": 3, "unreadable-row": 1,
    }  # fmt: skip
    reason = "height is missing or not a number; it must be a whole number from 1 to 1048575"
    assert found.left_out["no-size"].examples == [LeftOutRow(2, "c.mp4", reason)]
    (tmp_path / "m.jsonl").write_text('{"num_frames": 33, "height": 480, "width": 832}\nnot json\n[1]\n')
    found = forecast(tmp_path / "m.jsonl", CONFIGS["resolutions"])
    assert (found.num_rows, found.left_out["unreadable-row"].num_rows) == (3, 2)


def test_frames_may_be_given_by_duration_and_rate(tmp_path: Path) -> None:
    rows = [{"height": 480, "width": 832, "fps": 24.0, "duration": 2.0}] * 3
    found = forecast(write_rows(tmp_path / "m.csv", rows), CONFIGS["resolutions"])
    assert found.counts == {"480p-33f-16x9": 3} and found.frames_are_estimated


def test_a_rate_that_needs_a_duration_rejects_rows_without_one(tmp_path: Path) -> None:
    rows = [{"num_frames": 33, "height": 480, "width": 832}] * 2
    found = forecast(write_rows(tmp_path / "m.csv", rows), CONFIGS["resampled"])
    assert {kind: one.num_rows for kind, one in found.left_out.items()} == {"unknown-duration": 2}


def test_an_error_for_metadata_without_sizes_names_a_remedy(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "m.csv", [{"path": "a.mp4", "caption": "x"}])
    with pytest.raises(
        SourceError, match=r"no column for height, width, num_frames .*; its columns: path, caption.*--dry-run"
    ):
        open_facts(source)


@pytest.mark.parametrize("probabilities", [False, True])
def test_the_forecast_equals_the_sharders_result(
    corpus: Corpus, sharded: Sharded, tmp_path: Path, probabilities: bool
) -> None:
    """PLAN-4, SHARD-3: for the demo's corpus with its true sizes, the buckets equal the sharder's, including draws."""
    table = streamvid.open_dataset(sharded.root).samples_table().to_pylist()
    rows = [
        {
            "path": row["source"], "num_frames": row["window_num_frames"], "height": row["source_height"],
            "width": row["source_width"], "fps": row["fps"] or None, "duration": row["duration_seconds"],
        }
        for row in table
    ]  # fmt: skip
    source = write_rows(tmp_path / "m.parquet", rows)
    if not probabilities:
        config = BucketConfig(resolution=("128px", "256px"), num_frames=(1, 5, 17))
        assert forecast(source, config).counts == dict(sorted(Counter(row["bucket_id"] for row in table).items()))
        return
    config = BucketConfig(
        opensora=OpenSoraConfig(
            bucket_config={"128px": {5: [0.6, 1], 17: [0.5, 1]}, "256px": {1: [0.7, 1], 17: [0.4, 1]}}
        )
    )
    options = shard_options(
        metadata=write_rows(tmp_path / "paths.jsonl", [{"path": row["path"]} for row in rows]), bucket_config=config,
        seed=3, workers=2,
    )  # fmt: skip
    report = dry_run(corpus.root, tmp_path / "unused", options)
    found = forecast(source, config, seed=3)
    assert found.counts == {
        row.bucket_id: row.num_samples for row in sorted(report.buckets, key=lambda row: row.bucket_id)
    }
    assert sum(one.num_rows for one in found.left_out.values()) == report.num_rejected > 0
