"""Tests of bucket assignment: runs of the command with each kind of configuration, and draws among several buckets."""

from __future__ import annotations

import json
import math
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streamvid import VideoLoader, World, open_dataset
from streamvid.buckets.bucket import Bucket
from streamvid.buckets.classes import Choices, ClipFacts
from streamvid.buckets.config import BucketConfig
from streamvid.buckets.document import bucket_config_from_json, load_bucket_config
from streamvid.buckets.opensora import OpenSoraConfig
from streamvid.dataset.draws import UNIT
from streamvid.dataset.tabular.rows import Rows
from streamvid.errors import ConfigError
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.planning.assign import Assignment, assign
from streamvid.sharder.planning.plan import weights_of
from streamvid.sharder.source.records import Record
from streamvid.sharder.units.probe_unit import Probe
from tests.conftest import run_streamvid
from tests.loader.conftest import new_keys
from tests.shard_options import shard_options

FORM = """
bucket_config: {
  "64px": {1: [1.0, 3]}, "80px": {9: [[0.5, 0.4], 2], 17: [0.75, 1], 5: [1.0, 4]},
  "64px_ar2:1": {5: [0.5, 2]},
}
probabilities: opensora-v2
frame_rate: {rule: cap, fps: 30}
"""
Z_AT_1E_6 = 4.892  # two-sided, of a normal distribution
CLIP_ROWS = 14


@pytest.fixture(scope="session")
def form(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "opensora.yaml"
    path.write_text(FORM)
    return path


def sharded(source: Path, dest: Path, *arguments: object) -> dict[str, Any]:
    done = run_streamvid("shard", source, dest, "--workers", 1, "--shard-size", "12KB", "--json", *arguments)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def delivered(dest: Path, batch_size: int | dict[str, int]) -> dict[str, Bucket]:
    """Return the bucket of each delivered key in one pass, after checking the shape of its pixels."""
    found: dict[str, Bucket] = {}
    sizes = {"batch_size": batch_size, "tail": "pad", "num_workers": 0, "world": World(0, 1)}
    with VideoLoader(dest, **sizes) as loader:  # type: ignore[arg-type]
        for batch in loader:
            assert tuple(batch.video.shape[1:]) == (3, *batch.bucket.shape)
            keys = new_keys(batch)
            assert not set(keys) & set(found)
            found |= dict.fromkeys(keys, batch.bucket)
    return found


def rows_of(dest: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = open_dataset(dest).samples_table().to_pylist()
    return rows


def choices_of(config: BucketConfig, row: dict[str, Any]) -> Choices:
    is_image = row["clip_extension"] == "jpg"
    facts = ClipFacts(row["window_num_frames"], row["source_height"], row["source_width"], row["fps"], None, is_image)
    return config.choices(facts)


def test_opensoras_form_with_probabilities(source: Path, form: Path, tmp_path: Path) -> None:
    """Open-Sora's checklist 3, 6, 7, 9, 10, 14, 15: from the command to batches of the configured sizes."""
    report = sharded(source, tmp_path / "ds", "--bucket-config", form, "--seed", 1)
    config, rows = load_bucket_config(form), rows_of(tmp_path / "ds")
    drawn_out = [row for row in report["rejections"] if "excluded at random" in row["reason"]]
    assert report["num_samples"] + report["num_rejected"] == report["num_records"] == 19
    assert len(rows) + len(drawn_out) == CLIP_ROWS
    there = {bucket.id for bucket in open_dataset(tmp_path / "ds").manifest.buckets}
    buckets = delivered(tmp_path / "ds", {name: size for name, size in config.batch_sizes.items() if name in there})
    assert set(buckets) == {row["key"] for row in rows}
    for row in rows:
        assert buckets[row["key"]] in choices_of(config, row).buckets
        own = buckets[row["key"]]
        scale = max(Fraction(own.height, row["source_height"]), Fraction(own.width, row["source_width"]))
        kept = own.height * own.width / (scale**2 * row["source_height"] * row["source_width"])
        assert row["upscale"] == float(scale)
        assert row["crop_fraction"] == pytest.approx(float(1 - kept), abs=1e-12)
    # Clips excluded at random are distinct from clips that fit no bucket.
    short = next(row for row in report["rejections"] if row["source"] == "bad/short.mp4")
    assert short["reason"].startswith("the clip has 3 frames, but the shortest bucket has 5")


def test_a_draw_depends_only_on_seed_and_record(source: Path, form: Path, tmp_path: Path) -> None:
    """Open-Sora's checklist 13: draws do not depend on other clips, their order or the name of the source folder."""
    few = tmp_path / "few"
    (few / "more").mkdir(parents=True)
    for name in ("3", "1", "5"):
        (few / f"more/{name}.mp4").write_bytes((source / f"more/{name}.mp4").read_bytes())
    sharded(source, tmp_path / "all", "--bucket-config", form, "--seed", 1)
    sharded(few, tmp_path / "ds", "--bucket-config", form, "--seed", 1, "--caption-column", "")
    everything = {row["key"]: row["source"] for row in rows_of(tmp_path / "all")}
    mine = {row["key"]: row["source"] for row in rows_of(tmp_path / "ds")}
    assert mine == {key: name for key, name in everything.items() if name in ("more/1.mp4", "more/3.mp4", "more/5.mp4")}


@pytest.mark.parametrize("clips", ["copy", "native"])
def test_sizes_that_follow_the_clips(source: Path, tmp_path: Path, clips: str) -> None:
    """DiffSynth's checklist 10 to 12: max_pixels, sides of 16, short clips by 4k+1, images as one frame."""
    arguments = ("--max-pixels", 3000, "--max-frames", 17, "--frame-rule", "4k+1", "--clips", clips)
    report = sharded(source, tmp_path / "ds", *arguments)
    pixels = [bucket.num_pixels for bucket in open_dataset(tmp_path / "ds").manifest.buckets]
    assert len(pixels) == len(report["buckets"]) >= 3 and pixels == sorted(pixels, reverse=True)
    buckets = delivered(tmp_path / "ds", 2)
    for row in rows_of(tmp_path / "ds"):
        bucket = buckets[row["key"]]
        scale = math.sqrt(row["source_height"] * row["source_width"] / 3000)
        sides = [int(row[name] / scale) // 16 * 16 for name in ("source_height", "source_width")]
        assert [bucket.height, bucket.width] == sides
        frames = row["window_num_frames"]
        is_image = row["source"].endswith(".jpg")
        assert bucket.num_frames == (1 if is_image else min(17, frames - (frames - 1) % 4))
    assert len(buckets) == CLIP_ROWS


def test_one_fixed_size(source: Path, tmp_path: Path) -> None:
    """DiffSynth's checklist 9: every clip has the given height and width."""
    sharded(source, tmp_path / "ds", "--height", 48, "--width", 80, "--max-frames", 9)
    buckets = delivered(tmp_path / "ds", 3)
    assert len(buckets) == CLIP_ROWS
    assert {bucket.shape for bucket in buckets.values()} == {(1, 48, 80), (9, 48, 80)}


def test_policies_reach_the_command(source: Path, tmp_path: Path) -> None:
    """A limit on cropping keeps the upright clip and the square image out of wide buckets; rejections say so."""
    arguments = ("--buckets", "96x64@9,64x48@1", "--max-crop", 0.2, "--ratio-policy", "log")
    report = sharded(source, tmp_path / "ds", *arguments)
    reasons = {row["source"]: row["reason"] for row in report["rejections"]}
    assert reasons["c/still.jpg"] == "64x64 would lose 0.25 of its picture in 64x48-1f; at most max_crop=0.2 is allowed"
    lost = "64x96 would lose 0.556 of its picture in 96x64-9f; at most max_crop=0.2 is allowed"
    assert reasons["c/deep/tall.mkv"] == lost
    assert report["num_samples"] == CLIP_ROWS - 2


# ---------------------------------------------------------------- draws over more records than there are files


def made_up(count: int, options: ShardOptions) -> tuple[Assignment, Choices]:
    """Return the assignment of records that differ only in their names."""
    probe = Probe(1920, 1080, 40, 24.0, 40 / 24, "h264", "mp4", False)
    records = [
        Record(row, f"{row}.mp4", f"/none/{row}.mp4", 1000, "1", caption=None, columns={}) for row in range(count)
    ]
    facts = ClipFacts(probe.num_frames, probe.height, probe.width, probe.fps)
    return assign(Rows.of(Record, records), lambda _: probe, options), options.config.choices(facts)


SEED = {"256px": {16: (0.9, 2)}, "512px": {16: (1.0, 1), 32: (0.8, 1)}}


def test_clips_are_drawn_with_the_configured_probabilities() -> None:
    """Checklist 6, at alpha = 1e-6 with a fixed seed; clips excluded at random are counted as rejections (SHARD-3)."""
    options = shard_options(bucket_config=BucketConfig(opensora=OpenSoraConfig(bucket_config=SEED)), seed=3)
    found, choices = made_up(10_000, options)
    counts: Counter[str | None] = Counter(sample.bucket.id for sample in found.samples)
    counts[None] = len(found.rejections)
    assert sum(counts.values()) == 10_000
    assert {rejection.kind for rejection in found.rejections} == {"probability"}
    expected: dict[str | None, Fraction] = {bucket.id: share for bucket, share in choices.options}
    for name, share in {**expected, None: choices.rest}.items():
        assert abs(counts[name] - 10_000 * share) <= Z_AT_1E_6 * math.sqrt(10_000 * share * (1 - share)) + 0.5
    fewer, _ = made_up(100, options)
    assert list(fewer.samples) == list(found.samples)[: len(fewer.samples)]
    other, _ = made_up(100, shard_options(bucket_config=options.config, seed=4))
    assert [sample.bucket for sample in other.samples] != [sample.bucket for sample in fewer.samples]


def test_assign_all_stores_every_clip_in_each_of_its_buckets() -> None:
    """Each sample names its draw set, and the set has the exact probabilities."""
    options = shard_options(bucket_config=BucketConfig(opensora=OpenSoraConfig(bucket_config=SEED)), assign="all")
    found, choices = made_up(50, options)
    assert not found.rejections
    assert len(found.samples) == 50 * len(choices.options) == 100
    (name,) = found.draw_sets
    assert {sample.draw_set for sample in found.samples} == {name}
    assert dict(found.draw_sets[name]) == {bucket.id: share for bucket, share in choices.options}
    assert len({sample.key for sample in found.samples}) == 100
    # If there is nothing to draw, there is no set.
    plain, _ = made_up(5, shard_options(resolution=("256px",), num_frames=(17,), assign="all"))
    assert (plain.draw_sets, {sample.draw_set for sample in plain.samples}) == ({}, {""})


def test_clips_stored_in_all_their_buckets_are_drawn_in_each_pass(source: Path, form: Path, tmp_path: Path) -> None:
    """Open-Sora's checklist 13, from the command on: a clip comes once per pass, or never if it may be excluded."""
    told = sharded(source, tmp_path / "ds", "--bucket-config", form, "--assign", "all")
    config, rows = load_bucket_config(form), {row["key"]: row for row in rows_of(tmp_path / "ds")}
    by_record: dict[str, list[dict[str, Any]]] = {}
    for row in rows.values():
        by_record.setdefault(row["record_key"], []).append(row)
    assert len(by_record) == CLIP_ROWS
    for several in by_record.values():
        assert len(several) == len(choices_of(config, several[0]).options)
    several_times = [len(several) for several in by_record.values() if len(several) > 1]
    assert told["stored_clips"] == [len(several_times), sum(several_times)]
    assert told["num_windows"] == told["num_records"] == CLIP_ROWS + told["num_rejected"]
    counts_text = f"{len(several_times)} clips are stored as {sum(several_times)} samples"
    line = f"{counts_text}, one in every bucket that accepts the clip"
    stats, again = run_streamvid("stats", tmp_path / "ds").stdout, [source, tmp_path / "ds", "--bucket-config", form]
    assert line in stats and " windows " not in stats
    text = run_streamvid("shard", *again, "--assign", "all", "--shard-size", "12KB", "--workers", 1).stdout
    assert line in text and " windows " not in text and "already sealed" in text
    num_passes, counts = 6, Counter[str]()
    went: dict[str, set[str]] = {}
    sizes = {"batch_size": 1, "num_epochs": num_passes, "tail": "pad", "num_workers": 0, "world": World(0, 1)}
    with VideoLoader(tmp_path / "ds", **sizes) as loader:  # type: ignore[arg-type]
        for batch in loader:
            assert tuple(batch.video.shape[1:]) == (3, *batch.bucket.shape)
            if not batch.is_repeat[0]:
                record = rows[batch.sample_keys[0]]["record_key"]
                counts[record] += 1
                went.setdefault(record, set()).add(batch.bucket.id)
    for name, several in by_record.items():
        always = choices_of(config, several[0]).rest == 0
        assert counts[name] == num_passes if always else counts[name] <= num_passes
    assert any(len(buckets) > 1 for buckets in went.values())


# ---------------------------------------------------------------- options


def test_existing_options_keep_their_recorded_form() -> None:
    """SHARD-1: options of earlier versions are still recorded in the same form."""
    assert shard_options(resolution=("256px",), num_frames=(17,), multiple=32).to_json()["buckets"][:2] == [
        "256px-17f-2.39x1 416x160@17",
        "256px-17f-2x1 352x192@17",
    ]
    plain = shard_options(buckets=(Bucket(81, 480, 832),), workers=3).to_json()
    assert plain == {
        "buckets": ["832x480-81f 832x480@81"],
        "clips": "copy",
        "max_clip_bytes": 2 * 2**30,
        "seed": 0,
        "shard_size_bytes": 512 * 10**6,
        "val_fraction": 0.0,
    }


def test_a_configuration_is_in_the_manifest_and_reads_back(form: Path) -> None:
    options = shard_options(bucket_config=form, policy={"max_crop": 0.2}, assign="all")
    value = json.loads(json.dumps(options.to_json()))["bucket_config"]
    assert bucket_config_from_json(value) == options.config
    assert (options.config.assign, options.config.policy.max_crop) == ("all", Fraction(1, 5))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"buckets": ()}, "no buckets are given"),
        ({"buckets": (Bucket(81, 480, 832),), "resolution": ("256px",)}, "buckets and resolution cannot be combined"),
        ({"bucket_config": "wan2.1-480p", "max_frames": 81}, "max_frames=81 cannot be combined with buckets"),
        ({"bucket_config": "wan2.1-481p"}, "neither a file nor a preset; presets: "),
        ({"height": 480, "max_frames": 81}, "height=480 requires width"),
        ({"max_pixels": 0, "max_frames": 81}, "max_pixels=0: must be an integer from 1 to"),
        ({"resolution": ("256px",), "num_frames": (17,), "min_ar": 3.0}, "256px has no ratio from min_ar=3"),
        (
            {"resolution": ("256px",), "num_frames": (18,), "frame_rule": "4k+1"},
            r"a count of 18 frames does not follow the rule 4k\+1",
        ),
        ({"resolution": ("256px",), "num_frames": (17,), "assign": "some"}, "assign='some'"),
        ({"resolution": ("256px",), "num_frames": (17,), "policy": {"crop": 1}}, "policy has no field 'crop'"),
    ],
)
def test_invalid_options_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shard_options(**given)


@given(st.lists(st.integers(1, 10**8), min_size=1, max_size=20), st.integers(0, 10**8))
@example([10**8 - 2, 1, 1], 0)
def test_probabilities_of_a_draw_set_fit_the_unit(parts: list[int], rest: int) -> None:
    """However small a probability is, its weight is at least 1, and all weights are within rounding of the exact
    shares."""
    whole = sum(parts) + rest
    weights = weights_of([(f"b{number:02d}", Fraction(part, whole)) for number, part in enumerate(parts)])
    assert min(weights.values()) >= 1 and sum(weights.values()) <= UNIT
    for weight, part in zip(weights.values(), parts, strict=True):
        assert abs(Fraction(weight, UNIT) - Fraction(part, whole)) <= Fraction(len(parts), UNIT)
