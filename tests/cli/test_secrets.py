"""Tests of SAFE-1: a secret in a mistyped URL never appears in output or stored files, and no folder is created."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings

from tests.cli.conftest import OPTIONS, Call, Tiny
from tests.conftest import run_streamvid
from tests.locations import CANARY, STARTS, mistyped

#: Commands in which URL stands for a mistyped location; VIDEOS and DATASET exist.
COMMANDS = (
    *("verify URL", "verify URL --json", "-v verify URL", "stats URL", "stats URL --json", "bench URL", "URL"),
    *("copy URL out", "copy DATASET URL", "copy DATASET out --temp-dir URL", "stats DATASET URL"),
    *("annotate DATASET URL", "annotate URL rows.csv", "demo --dir URL", "demo --dir=URL"),
    *("plan URL", "plan DATASET --keys URL", "plan DATASET --costs URL", "plan DATASET --cost-table URL"),
    *(
        "shard URL out",
        "shard VIDEOS URL",
        "-v shard VIDEOS URL",
        "shard VIDEOS URL out",
        "shard VIDEOS out --json URL",
    ),
    *(f"shard VIDEOS out --{name} URL" for name in ("metadata", "base-path", "work-dir", "bucket-config")),
    *("train --config URL", "train --init URL", "train --set URL", "encode --config URL"),
    *("train --output_path URL", "train --dataset_base_path URL --output_path out", "-v train --config URL"),
    *(
        f"{verb} --config tiny --set data.dataset=DATASET --set output=out --set {name}"
        for verb in ("train", "encode")
        for name in ("output=URL", "data.dataset=URL", "data.dataset=[DATASET, {url: URL}]", "data.features.url=URL")
    ),
    *(
        f"train --config tiny --set data.dataset=DATASET --set output=out --set {name}"
        for name in (
            *("model.weights.paths=[URL]", "model.weights.paths={a: URL}", "checkpoints.resume=URL", "output=[URL"),
            *("data.storage={cache_dir: URL, cache_bytes: 1}", "URL=1", "output={URL: 1}", "max_steps=URL"),
        )
    ),
)


def words(command: str, tiny: Tiny, url: str) -> list[str]:
    """Split the command into arguments; values of --set may contain spaces."""
    first, *overrides = (part.strip() for part in command.split("--set "))
    arguments = [*first.split(), *(word for override in overrides for word in ("--set", override))]
    known = {"VIDEOS": str(tiny.videos), "DATASET": str(tiny.dataset), "URL": url}
    return [re.sub("|".join(known), lambda name: known[name[0]], word) for word in arguments]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistyped_url_shows_no_secret_and_creates_nothing(
    command: str, tiny: Tiny, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    @settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(mistyped)
    @example(f"s3://KEY:a {CANARY} b@bucket/ds")
    @example(f"s3://KEY:a\t{CANARY}@bucket/ds")
    def check(url: str) -> None:
        done = call(*words(command, tiny, url))
        assert done.returncode and not done.stdout, done
        assert CANARY not in done.stderr
        assert not list(tmp_path.iterdir())

    check()


def test_rows_with_mistyped_urls_are_rejected_without_their_secrets(tiny: Tiny, tmp_path: Path) -> None:
    """Existing files become samples, even if their names resemble credentials."""
    videos = tmp_path / "videos"
    good = ("12:30@home.mp4", "video@2x.mp4", "KEY:SECRET@home.mp4", "day/KEY:SECRET@home.mp4")
    for name in good:
        (videos / name).parent.mkdir(parents=True, exist_ok=True)
        (videos / name).write_bytes((tiny.videos / "wide.mp4").read_bytes())
    bad = [f"{start}KEY:{secret}@b/clip.mp4" for start in STARTS for secret in (CANARY, f"a/{CANARY}+b/c=")]
    with (videos / "metadata.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "caption"])
        rows.writerows([name, "contact:somebody@example.com"] for name in (*good, *bad))
    done = run_streamvid("-v", "shard", videos, tmp_path / "ds", *OPTIONS, "--json")
    report = json.loads(done.stdout)
    shown = run_streamvid("stats", tmp_path / "ds", "--rejections")
    facts = run_streamvid("stats", tmp_path / "ds", "--json")
    assert report["num_samples"] == len(good) and len(json.loads(facts.stdout)["rejections"]) == len(bad)
    for one in (done, shown, facts):
        assert CANARY not in one.stdout + one.stderr
    for path in (tmp_path / "ds").rglob("*"):
        assert CANARY not in path.name and not (path.is_file() and CANARY.encode() in path.read_bytes())
    captions = run_streamvid("shard", videos, tmp_path / "again", *OPTIONS, check=False)
    assert captions.returncode == 0 and CANARY not in captions.stdout + captions.stderr


@pytest.mark.parametrize("name", ["video@2x", "12:30@home", "a person: me@home", "day/KEY:SECRET@b"])
def test_ordinary_names_work_for_every_location(
    name: str, tiny: Tiny, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copied = call("copy", tiny.dataset, name, "--json")
    assert json.loads(copied.stdout)["dest"] == name and (tmp_path / name / "manifest.json").is_file()
    assert call("verify", name).returncode == 0 and call("plan", name, "--batch-size", 1).returncode == 0
    missing = call("stats", f"{name}.gone")
    assert missing.returncode == 1 and f"{name}.gone" in missing.stderr
