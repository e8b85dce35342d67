"""Tests of streamvid plan in real processes: its plan is the one that a loader announces for the same dataset."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

import streamvid
from streamvid.buckets.bucket import Bucket
from streamvid.cli.verbs.plan import parse_sizes
from streamvid.errors import ConfigError
from streamvid.forecast.dataset import forecast_dataset
from streamvid.forecast.run import PlannedRun
from streamvid.plan import PlanOptions, World
from streamvid.plan.cost import fit_costs
from tests.cli.conftest import Call
from tests.conftest import run_streamvid
from tests.dataset.frozen import FROZEN
from tests.loader.conftest import build_dataset

DATASET = FROZEN / "native"  # 3 samples of 96x64-5f, 1 of 96x64-1f


def facts(*arguments: str) -> dict[str, Any]:
    return facts_of(DATASET, *arguments)


def facts_of(dataset: Path, *arguments: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(run_streamvid("plan", dataset, *arguments, "--json").stdout)
    return value


def test_the_table_names_buckets_steps_and_all_tails() -> None:
    text = run_streamvid("plan", DATASET, "--num-ranks", "2", "--batch-size", "1", "--epochs", "3").stdout
    # 9 deliveries of one bucket and 3 of the other, two per step: one of each is carried beyond the last epoch.
    assert re.search(r"^96x64-5f +3 +1 +2 +4 +8 +1 +0 +0$", text, re.MULTILINE)
    assert re.search(r"^96x64-1f +1 +1 +2 +1 +2 +1 +0 +0$", text, re.MULTILINE)
    assert "tail carry, sync bucket: 5 steps in 3 epoch(s): 1, 3, 1" in text
    assert re.search(r"^carry \* +5 +10 +16\.67% +0\.00% +0$", text, re.MULTILINE)
    assert re.search(r"^drop +3 +6 +50\.00% +0\.00% +1$", text, re.MULTILINE)
    assert re.search(r"^pad +9 +18 +0\.00% +33\.33% +0$", text, re.MULTILINE)


@pytest.mark.parametrize("tail", ["carry", "drop", "pad"])
def test_the_plan_equals_that_of_the_loader(tail: Any) -> None:
    """PLAN-2 and PLAN-4: steps and counts are the same for every bucket, and only the index is read."""
    planned = facts("--num-ranks", "2", "--batch-size", "1", "--tail", tail)
    with streamvid.VideoLoader(DATASET, batch_size=1, world=World(0, 2), tail=tail, num_workers=0) as loader:
        assert planned["steps"] == [len(loader)]
        announced = {report.bucket_id: report for report in loader.plan_report()}
        assert planned["dataset"]["plan_fingerprint"] == loader.dataset.manifest.fingerprints.plan
    for row in planned["buckets"]:
        report = announced.pop(row["bucket_id"])
        assert row == dataclasses.asdict(report)
    assert not announced
    (mine,) = [row for row in planned["tails"] if row["tail"] == tail]
    assert mine["num_steps"] == planned["steps"][0]


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_default_tail_is_that_of_the_loader(tmp_path: Path, split: str) -> None:
    """PLAN-4: plan and loader use the same default tail for each split, also with gradient accumulation."""
    root = build_dataset(tmp_path, {Bucket(5, 64, 96): [3, 2]}, split=split)
    planned = facts_of(root, "--num-ranks", "2", "--batch-size", "2", "--split", split)
    with streamvid.VideoLoader(root, batch_size=2, world=World(0, 2), split=split, num_workers=0) as loader:
        assert planned["tail"] == loader.options.tail == {"train": "carry", "val": "uneven"}[split]
        (report,) = loader.plan_report()
        assert planned["steps"] == [report.num_steps]
        assert planned["buckets"][0]["num_delivered"] == report.num_delivered
    arguments = ("--num-ranks", "1", "--batch-size", "1", "--split", split, "--accumulate", "2")
    if split == "train":
        assert facts_of(root, *arguments)["tail"] == "carry"
        return
    done = run_streamvid("plan", root, *arguments, check=False)
    with pytest.raises(ConfigError) as refused:
        streamvid.VideoLoader(root, batch_size=1, world=World(0, 1), split=split, num_workers=0, accumulate=2)
    reason = str(refused.value).removeprefix("accumulate=2 ")
    assert done.returncode == 2 and f"--accumulate 2 {reason}" in done.stderr


def test_batch_sizes_by_bucket_or_by_tokens() -> None:
    by_bucket = facts("--batch-size", "96x64-5f=3", "--batch-size", "*-1f=1")
    assert {row["bucket_id"]: row["batch_size"] for row in by_bucket["buckets"]} == {"96x64-1f": 1, "96x64-5f": 3}
    with_default = facts("--batch-size", "*=2", "--batch-size", "*-1f*=1")
    assert {row["bucket_id"]: row["batch_size"] for row in with_default["buckets"]} == {"96x64-1f": 1, "96x64-5f": 2}
    by_tokens = facts("--max-tokens-per-batch", "96")  # 4 x 6 tokens per image, 2 * 4 x 6 for 5 frames
    assert {row["bucket_id"]: row["batch_size"] for row in by_tokens["buckets"]} == {"96x64-1f": 4, "96x64-5f": 2}


def test_a_run_without_a_step_fails_and_still_shows_the_tails() -> None:
    done = run_streamvid("plan", DATASET, "--num-ranks", "64", "--batch-size", "4", check=False)
    assert done.returncode == 1
    assert "error: no bucket can fill one step" in done.stderr and "Traceback" not in done.stderr
    assert re.search(r"^pad +2 +512 +0\.00% ", done.stdout, re.MULTILINE)
    assert "starved: 96x64-5f has 3 sample(s), but a step needs 256. Remedies: 86 epochs, or --tail pad" in done.stdout


def run_of(num_ranks: int = 2, size: int = 2, epochs: int = 1, **options: Any) -> PlannedRun:
    return PlannedRun(num_ranks, size, None, PlanOptions(**options), epochs, "train")


def starved_of(dataset: streamvid.Dataset, run: PlannedRun) -> dict[str, tuple[str, ...]]:
    return {bucket.bucket_id: bucket.remedies for bucket in forecast_dataset(dataset, run).counts.starved}


def test_each_remedy_works() -> None:
    """Each suggested remedy gives a starved bucket a step, and one epoch less than suggested does not."""
    dataset = streamvid.open_dataset(DATASET)
    assert starved_of(dataset, run_of()) == {
        "96x64-5f": ("batch size 1", "1 rank(s)", "2 epochs", "--tail pad or shrink"),
        "96x64-1f": ("4 epochs", "--tail pad or shrink"),
    }
    cured = {
        "96x64-5f": [run_of(size=1), run_of(num_ranks=1), run_of(epochs=2), run_of(tail="pad"), run_of(tail="shrink")],
        "96x64-1f": [run_of(epochs=4), run_of(tail="pad"), run_of(tail="shrink")],
    }
    for bucket_id, runs in cured.items():
        for run in runs:
            assert bucket_id not in starved_of(dataset, run), run
    assert "96x64-1f" in starved_of(dataset, run_of(epochs=3))


def test_cost_classes_come_from_tokens_or_a_file(tmp_path: Path) -> None:
    arguments = ("--batch-size", "96x64-5f=1", "--batch-size", "96x64-1f=2", "--sync", "cost")
    predicted = facts(*arguments)
    assert predicted["cost_classes"] == {"96x64-1f": 0, "96x64-5f": 0} and not predicted["costs_are_measured"]
    buckets = streamvid.open_dataset(DATASET).manifest.buckets
    table = fit_costs([("96x64-5f", 1, 1.0)] * 3 + [("96x64-1f", 2, 2.0)] * 3, buckets)
    (tmp_path / "costs.json").write_text(json.dumps(table.to_json()))
    measured = facts(*arguments, "--costs", str(tmp_path / "costs.json"))
    assert measured["cost_classes"] == {"96x64-5f": 0, "96x64-1f": 1} and measured["costs_are_measured"]
    text = run_streamvid("plan", DATASET, *arguments).stdout
    assert "predicted from tokens, not measured" in text and "  0: 96x64-1f, 96x64-5f" in text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "batch_size=None"),
        (("--batch-size", "4", "--max-tokens-per-batch", "9"), 2, "set exactly one"),
        (("--batch-size", "four"), 2, "'four': must be N"),
        (("--batch-size", "=4"), 2, "'=4': must be N"),
        (("--batch-size", "4", "--batch-size", "*=4"), 2, "cannot be combined"),
        (("--batch-size", "0"), 2, "batch_size=0"),
        (("--batch-size", "1", "--num-ranks", "0"), 2, "--num-ranks 0: must be"),
        (("--batch-size", "1", "--split", "test"), 1, "split='test' has no samples"),
        (("--batch-size", "1", "--costs", "missing.json", "--sync", "cost"), 2, "--costs missing.json"),
        (("--batch-size", "1", "--costs", "any.json", "--counts-only"), 2, "has no effect with --sync bucket"),
        (("--batch-size", "1", "--cost-table", "missing.yaml"), 2, "missing.yaml"),
        (("--batch-size", "1", "--where", "no_such > 1"), 2, "no_such"),
        (("--batch-size", "1", "--resolution", "480p"), 2, "--resolution is for metadata"),
        (("--batch-size", "1", "--preset", "wan9"), 2, "wan2.1-480p"),
        (("--batch-size", "1", "--tail", "cary"), 2, "'carry'"),
    ],
)
def test_mistakes_are_named(call: Call, arguments: tuple[str, ...], code: int, message: str) -> None:
    done = call("plan", DATASET, *arguments)
    assert done.returncode == code and message in done.stderr, done.stderr
    assert not done.stdout and "Traceback" not in done.stderr


def test_sizes_are_read_strictly() -> None:
    assert parse_sizes(["4"]) == 4
    assert parse_sizes(["a=1", "b=c=2"]) == {"a": 1, "b=c": 2}
    for bad in (["a="], ["a=1", "a=2"], ["-1"], ["1", "2"], ["٤"]):
        with pytest.raises(ConfigError):
            parse_sizes(bad)


def test_details_come_from_the_samples_index() -> None:
    """The report includes shapes, loads and times as well as counts, and marks estimates."""
    told = facts("--batch-size", "1", "--num-ranks", "2")
    assert told["kind"] == "dataset"
    details = told["details"]
    assert told["shapes"]["96x64-5f"]["crop_mean"] == 0 and told["shapes"]["96x64-5f"]["upscale_mean"] == 0.5
    loads = details["loads"]
    assert len(loads["member_bytes_by_rank"]) == 2 and not loads["bytes_are_estimate"]
    assert loads["imbalance_tokens"] == 1.0
    assert details["estimates"]["epoch"]["parts"]["gpu"] is None
    assert facts("--batch-size", "1", "--num-ranks", "2", "--counts-only")["details"] is None
    text = run_streamvid("plan", DATASET, "--batch-size", "1").stdout
    assert "host memory per rank: ring" in text
    assert re.search(r"^  an epoch: ~[0-9.]+ s, limited by \w+ .*gpu not measured", text, re.MULTILINE)


def test_a_cost_table_changes_the_estimates_and_nothing_else(tmp_path: Path) -> None:
    """Measured step costs determine the GPU time, and a table of the host determines the decoding time."""
    (tmp_path / "host.yaml").write_text("decode_ms: {'*': 250}\nnum_workers: 1\n")
    buckets = streamvid.open_dataset(DATASET).manifest.buckets
    table = fit_costs([("96x64-5f", 1, 3.0)] * 3 + [("96x64-1f", 1, 2.0)] * 3, buckets)
    (tmp_path / "costs.json").write_text(json.dumps(table.to_json()))
    plain = facts("--batch-size", "1")
    told = facts(
        "--batch-size", "1", "--cost-table", str(tmp_path / "host.yaml"), "--costs", str(tmp_path / "costs.json")
    )
    epoch = told["details"]["estimates"]["epoch"]
    assert epoch["parts"]["decode"] == pytest.approx(4 * 0.25)
    assert epoch["parts"]["gpu"] == pytest.approx(3 * 3.0 + 2.0) == epoch["seconds"]
    assert epoch["bound_by"] == "gpu"
    assert told["tails"] == plain["tails"]
    assert (told["shapes"], told["details"]["loads"]) == (plain["shapes"], plain["details"]["loads"])


def test_a_filter_leaves_samples_out_as_the_loader_does(tmp_path: Path) -> None:
    """PLAN-4: --where selects the same samples as VideoLoader(where=…)."""
    root = build_dataset(tmp_path, {Bucket(5, 64, 96): [4, 4]})
    told = facts_of(root, "--batch-size", "1", "--where", "score >= 1.5")
    with streamvid.VideoLoader(root, batch_size=1, world=World(0, 1), where="score >= 1.5", num_workers=0) as loader:
        assert told["steps"] == [len(loader)]
        assert told["buckets"][0]["num_samples"] == loader.plan_report()[0].num_samples < 8


def test_keys_are_written_in_the_order_of_delivery(tmp_path: Path) -> None:
    """PLAN-1: there is one line per batch and rank, with the keys that the loader of that rank delivers."""
    run_streamvid("plan", DATASET, "--num-ranks", "2", "--batch-size", "1", "--tail", "pad", "--keys", tmp_path / "k")
    lines = [json.loads(line) for line in (tmp_path / "k").read_text().splitlines()]
    for rank in range(2):
        with streamvid.VideoLoader(DATASET, batch_size=1, world=World(rank, 2), tail="pad", num_workers=0) as loader:
            delivered = [batch.sample_keys for batch in loader]
        assert [line["keys"] for line in lines if line["rank"] == rank] == delivered


def test_a_preset_that_does_not_fit_is_refused() -> None:
    """As with VideoLoader(preset=…), a run that could not start is not planned."""
    done = run_streamvid("plan", DATASET, "--batch-size", "1", "--preset", "wan2.1-480p", check=False)
    assert done.returncode == 2 and "wan2.1" in done.stderr and "Traceback" not in done.stderr
    assert not done.stdout


METADATA = "path,num_frames,height,width,fps\n" + "".join(
    f"v/{number}.mp4,{frames},{height},{width},16\n"
    for number, (frames, height, width) in enumerate([(81, 480, 832)] * 6 + [(81, 832, 480)] * 2 + [(3, 480, 832)])
)


def test_metadata_is_planned_without_media_files(tmp_path: Path) -> None:
    """Buckets, tails and the reasons for excluded rows come from the metadata only; no media file exists."""
    (tmp_path / "meta.csv").write_text(METADATA)
    told = facts_of(tmp_path / "meta.csv", "--preset", "wan2.1-480p", "--num-ranks", "2", "--batch-size", "1")
    assert told["kind"] == "metadata"
    counts = {row["bucket_id"]: (row["num_samples"], row["num_steps"]) for row in told["buckets"]}
    assert counts == {"832x480-81f": (6, 3), "480x832-81f": (2, 1)}
    (left,) = told["metadata"]["left_out"]
    assert (left["kind"], left["num_rows"], left["examples"][0]["source"]) == ("too-few-frames", 1, "v/8.mp4")
    assert told["shapes"]["832x480-81f"]["crop_mean"] == 0
    text = run_streamvid("plan", tmp_path / "meta.csv", "--preset", "wan2.1-480p", "--batch-size", "1").stdout
    assert "9 rows, 8 with a bucket, 1 without" in text and "too-few-frames: 1 rows" in text
    explicit = facts_of(
        tmp_path / "meta.csv", "--buckets", "832x480@17", "--fps", "4", "--fps-rule", "cap", "--batch-size", "1"
    )
    assert [row["num_samples"] for row in explicit["buckets"]] == [8]  # 81 frames at 16 fps are 20 frames at 4 fps


def test_the_summary_of_the_source_comes_first(tmp_path: Path) -> None:
    rows = "path,caption,n_frames,height,width,fps,score\n" + "".join(
        f"{number}.mp4,{'x' if number else ''},81,480,832,{fps},1\n" for number, fps in enumerate((8, 15.9, 30, ""))
    )
    (tmp_path / "meta.csv").write_text(rows + "4.mp4,x,3,480,832,16,1\n")
    arguments = ("--preset", "wan2.1-480p", "--batch-size", "1", "--counts-only")
    text = run_streamvid("plan", tmp_path / "meta.csv", *arguments).stdout
    assert text.startswith(f"input: {tmp_path / 'meta.csv'}: 5 rows in layout 'metadata'\n")
    assert "columns: video: path; caption; num_frames: n_frames; height; width; fps; ignored: score\n" in text
    assert "  captions: 4 of 5 usable rows; without a caption: 1\n" in text
    assert (
        "  frames per second: 8 to 30, read at 16; videos with a higher rate, some of whose frames are dropped: 1\n"
        in text
    )
    assert "whose frames are repeated: 1; reject them with --min-fps 16\n" in text
    found = facts_of(tmp_path / "meta.csv", *arguments)["input"]
    assert [found["repeated"]["count"], found["num_dropped"], found["num_without_bucket"]] == [1, 1, 2]
    sealed = facts("--batch-size", "1", "--counts-only")["input"]["sources"][0]
    assert (
        sealed["layout"] == "dataset"
        and sealed["num_rows"] == json.loads((DATASET / "manifest.json").read_text())["counts"]["records"]
    )


def test_metadata_takes_the_flags_of_shard(tmp_path: Path) -> None:
    """The bucket options of `streamvid shard` apply: sizes that follow clips, policies and --assign."""
    (tmp_path / "meta.csv").write_text(METADATA)
    sizes = facts_of(tmp_path / "meta.csv", "--max-pixels", "399360", "--max-frames", "81", "--batch-size", "1")
    assert {row["bucket_id"]: row["num_samples"] for row in sizes["buckets"]} == {"832x480-81f": 6, "480x832-81f": 2}
    small = ("--resolution", "720p", "--num-frames", "3,81", "--batch-size", "1", "--counts-only")
    assert facts_of(tmp_path / "meta.csv", *small, "--min-area", "0.3")["metadata"]["left_out"] == []
    config = tmp_path / "buckets.yaml"
    config.write_text("bucket_config: {480p: {17: [0.5, 2], 81: [0.5, 1]}}\nprobabilities: opensora-v2\n")
    every = facts_of(tmp_path / "meta.csv", "--bucket-config", config, "--assign", "all")
    assert any("--assign all stores a clip in each bucket" in note for note in every["notes"])
    assert {row["batch_size"] for row in every["buckets"]} <= {1, 2}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--batch-size", "1", "--keys", "k"), 2, "--keys and --where are for sealed datasets"),
        (
            ("--batch-size", "1", "--buckets", "832x480@81", "--resolution", "480p"),
            2,
            "buckets and resolution cannot be combined",
        ),
        (("--batch-size", "1", "--buckets", "4096x4096@81"), 1, "no row"),
        (("--batch-size", "1", "--num-frames", "x"), 2, "--num-frames"),
    ],
)
def test_mistakes_with_metadata_are_named(tmp_path: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    (tmp_path / "meta.csv").write_text(METADATA)
    done = run_streamvid("plan", tmp_path / "meta.csv", *arguments, check=False)
    assert done.returncode == code and message in done.stderr, done.stderr
    assert not done.stdout and "Traceback" not in done.stderr


def test_a_folder_of_videos_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"")
    done = run_streamvid("plan", tmp_path, "--batch-size", "1", check=False)
    assert done.returncode == 1 and "--dry-run" in done.stderr and "Traceback" not in done.stderr
