"""streamvid plan in real processes: what it promises is what a loader over the same dataset announces."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import streamvid
from streamvid.buckets import Bucket
from streamvid.cli.plan import PlannedRun, collect, parse_sizes
from streamvid.errors import ConfigError
from streamvid.plan import PlanOptions, World
from streamvid.plan.cost import fit_costs
from tests.conftest import run_streamvid
from tests.loader.conftest import build_dataset

DATASET = Path(__file__).parents[1] / "data" / "dataset_v1"  # 3 samples of 96x64-5f in 3 shards, 1 of 96x64-1f


def facts(*arguments: str) -> dict[str, Any]:
    return facts_of(DATASET, *arguments)


def facts_of(dataset: Path, *arguments: str) -> dict[str, Any]:
    done = run_streamvid("plan", dataset, *arguments, "--json", check=False)
    assert done.returncode == 0, done.stderr
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def test_the_table_names_buckets_steps_and_all_tails() -> None:
    text = run_streamvid("plan", DATASET, "--num-ranks", "2", "--batch-size", "1", "--epochs", "3").stdout
    # 9 deliveries of the one bucket and 3 of the other, two a step: one of each is left for an epoch that is not run.
    assert re.search(r"^96x64-5f +3 +1 +2 +4 +8 +1 +0 +0$", text, re.MULTILINE)
    assert re.search(r"^96x64-1f +1 +1 +2 +1 +2 +1 +0 +0$", text, re.MULTILINE)
    assert "tail carry, sync bucket: 5 steps in 3 epoch(s): 1, 3, 1" in text
    assert re.search(r"^carry \* +5 +10 +16\.67% +0\.00% +0$", text, re.MULTILINE)
    assert re.search(r"^drop +3 +6 +50\.00% +0\.00% +1$", text, re.MULTILINE)
    assert re.search(r"^pad +9 +18 +0\.00% +33\.33% +0$", text, re.MULTILINE)


@pytest.mark.parametrize("tail", ["carry", "drop", "pad"])
def test_it_says_what_the_loader_announces(tail: Any) -> None:
    """PLAN-2 and PLAN-4: the same steps and the same counts, bucket by bucket, and no file but the index is read."""
    planned = facts("--num-ranks", "2", "--batch-size", "1", "--tail", tail)
    with streamvid.VideoLoader(DATASET, batch_size=1, world=World(0, 2), tail=tail, num_workers=0) as loader:
        assert planned["steps"] == [len(loader)]
        announced = {report.bucket_id: report for report in loader.plan_report()}
        assert planned["plan_fingerprint"] == loader.dataset.manifest.plan_fingerprint
    for row in planned["buckets"]:
        report = announced.pop(row["bucket"])
        for name in ("num_delivered", "num_carried", "num_dropped", "num_repeated", "global_batch"):
            assert row[name] == getattr(report, name)
        assert (row["samples"], row["steps"]) == (report.num_samples, report.num_steps_left)
    assert not announced
    (mine,) = [row for row in planned["tails"] if row["tail"] == tail]
    assert mine["steps"] == planned["steps"][0]


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_unsaid_tail_is_that_of_the_loader(tmp_path: Path, split: str) -> None:
    """PLAN-4: what the loader does with a split's rest if nobody says, with gradients accumulated too."""
    root = build_dataset(tmp_path, {Bucket(5, 64, 96): [3, 2]}, split=split)
    planned = facts_of(root, "--num-ranks", "2", "--batch-size", "2", "--split", split)
    with streamvid.VideoLoader(root, batch_size=2, world=World(0, 2), split=split, num_workers=0) as loader:
        assert planned["tail"] == loader.options.tail == {"train": "carry", "val": "uneven"}[split]
        (report,) = loader.plan_report()
        assert planned["steps"] == [report.num_steps_left]
        assert planned["buckets"][0]["num_delivered"] == report.num_delivered
    arguments = ("--num-ranks", "1", "--batch-size", "1", "--split", split, "--accumulate", "2")
    if split == "train":
        assert facts_of(root, *arguments)["tail"] == "carry"
        return
    done = run_streamvid("plan", root, *arguments, check=False)
    with pytest.raises(ConfigError) as refused:
        streamvid.VideoLoader(root, batch_size=1, world=World(0, 1), split=split, num_workers=0, accumulate=2)
    assert done.returncode == 2 and str(refused.value) in done.stderr


def test_batch_sizes_by_bucket_or_by_tokens() -> None:
    by_bucket = facts("--batch-size", "96x64-5f=3", "--batch-size", "*-1f=1")
    assert {row["bucket"]: row["batch_size"] for row in by_bucket["buckets"]} == {"96x64-1f": 1, "96x64-5f": 3}
    with_default = facts("--batch-size", "*=2", "--batch-size", "*-1f*=1")
    assert {row["bucket"]: row["batch_size"] for row in with_default["buckets"]} == {"96x64-1f": 1, "96x64-5f": 2}
    by_tokens = facts("--max-tokens-per-batch", "96")  # 4 x 6 tokens an image, 2 * 4 x 6 for 5 frames
    assert {row["bucket"]: row["batch_size"] for row in by_tokens["buckets"]} == {"96x64-1f": 4, "96x64-5f": 2}


def test_a_run_without_a_step_fails_and_still_shows_the_tails() -> None:
    done = run_streamvid("plan", DATASET, "--num-ranks", "64", "--batch-size", "4", check=False)
    assert done.returncode == 1
    assert "error: no bucket can fill one step" in done.stderr and "Traceback" not in done.stderr
    assert re.search(r"^pad +2 +512 +0\.00% ", done.stdout, re.MULTILINE)
    assert "starved: 96x64-5f has 3 sample(s), a step takes 256. Take 86 epochs, or --tail pad" in done.stdout


def run_of(num_ranks: int = 2, size: int = 2, epochs: int = 1, **options: Any) -> PlannedRun:
    return PlannedRun(num_ranks, size, None, PlanOptions(**options), epochs, "train")


def test_each_remedy_is_one() -> None:
    """A starved bucket is told what to take; taken, each of them gives it a step, and one less does not."""
    dataset = streamvid.open_dataset(DATASET)
    starved = {row["bucket"]: row for row in collect(dataset, run_of())[0]["starved"]}
    assert starved["96x64-5f"]["remedies"] == ["batch size 1", "1 rank(s)", "2 epochs", "--tail pad or shrink"]
    assert starved["96x64-1f"]["remedies"] == ["4 epochs", "--tail pad or shrink"]
    cured = {
        "96x64-5f": [run_of(size=1), run_of(num_ranks=1), run_of(epochs=2), run_of(tail="pad"), run_of(tail="shrink")],
        "96x64-1f": [run_of(epochs=4), run_of(tail="pad"), run_of(tail="shrink")],
    }
    for bucket_id, runs in cured.items():
        for run in runs:
            assert bucket_id not in {row["bucket"] for row in collect(dataset, run)[0]["starved"]}, run
    assert "96x64-1f" in {row["bucket"] for row in collect(dataset, run_of(epochs=3))[0]["starved"]}


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
        (("--batch-size", "4", "--max-tokens-per-batch", "9"), 2, "give exactly one"),
        (("--batch-size", "four"), 2, "'four': expected N"),
        (("--batch-size", "=4"), 2, "'=4': expected N"),
        (("--batch-size", "4", "--batch-size", "*=4"), 2, "beside others"),
        (("--batch-size", "0"), 2, "batch_size=0"),
        (("--batch-size", "1", "--num-ranks", "0"), 2, "num_ranks=0"),
        (("--batch-size", "1", "--split", "test"), 1, "split='test' has no samples"),
        (("--batch-size", "1", "--costs", "missing.json", "--sync", "cost"), 2, "--costs missing.json"),
        (
            ("--batch-size", "1", "--costs", "any.json"),
            2,
            "--costs any.json does nothing with --sync bucket; add --sync",
        ),
        (("--batch-size", "1", "--tail", "cary"), 2, "'carry'"),
    ],
)
def test_what_is_wrong_is_named(arguments: tuple[str, ...], code: int, message: str) -> None:
    done = run_streamvid("plan", DATASET, *arguments, check=False)
    assert done.returncode == code and message in done.stderr, done.stderr
    assert not done.stdout and "Traceback" not in done.stderr


def test_sizes_are_read_strictly() -> None:
    assert parse_sizes(["4"]) == 4
    assert parse_sizes(["a=1", "b=c=2"]) == {"a": 1, "b=c": 2}
    for bad in (["a="], ["a=1", "a=2"], ["-1"], ["1", "2"], ["٤"]):
        with pytest.raises(ConfigError):
            parse_sizes(bad)
