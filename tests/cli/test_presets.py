"""Tests of streamvid presets: the list, a single preset with its sources, and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from streamvid.buckets.document import load_bucket_config
from streamvid.buckets.presets import preset_names
from streamvid.cli.main import cli
from streamvid.errors import ConfigError


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["presets", *arguments], catch_exceptions=False, standalone_mode=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_list_names_every_preset_with_its_rule_and_tokens() -> None:
    lines = run().splitlines()
    rows = {line.split()[0]: line for line in lines if line and line.split()[0] in preset_names()}
    assert set(rows) == set(preset_names())
    assert "832x480 and 4 more" in rows["wan2.1-480p"]
    assert "4k+1, sides of 16" in rows["wan2.1-480p"]
    assert "32760" in rows["wan2.1-480p"]
    assert [row["name"] for row in json.loads(run("--json"))] == list(preset_names())


def test_show_prints_the_file_with_its_sources_and_the_cost_of_each_bucket() -> None:
    shown = run("show", "wan2.1-480p", "--max-tokens-per-batch", "70000")
    assert "Wan-Video/Wan2.1, wan/configs/shared_config.py: sample_fps 16" in shown
    row = next(line for line in shown.splitlines() if line.startswith("832x480-81f "))
    assert row.split() == ["832x480-81f", "832x480@81", "32760", "97.0", "MB", "2", "194.1", "MB"]
    assert next(line for line in shown.splitlines() if line.startswith("624x624-81f ")).endswith("ours")


def test_a_copy_of_a_preset_can_be_changed(tmp_path: Path) -> None:
    """--yaml prints a file that --bucket-config accepts."""
    (tmp_path / "my.yaml").write_text(
        run("show", "wan2.1-480p", "--yaml").replace("buckets: [", "buckets: [832x480@1,")
    )
    mine, theirs = load_bucket_config(tmp_path / "my.yaml"), load_bucket_config("wan2.1-480p")
    assert {bucket.id for bucket in mine.buckets} == {bucket.id for bucket in theirs.buckets} | {"832x480-1f"}


def test_a_long_table_shows_the_largest_bucket_of_each_kind_without_all() -> None:
    shown, every = run("show", "opensora2-256"), run("show", "opensora2-256", "--all")
    assert "363 buckets; for each resolution and frame count, the table shows the bucket with the most" in shown
    assert sum(line.startswith("256px-") for line in shown.splitlines()) == 33
    assert sum(line.startswith("256px-") for line in every.splitlines()) == 363
    assert "searched on an H200 of 140 GB" in shown


def test_show_as_json_has_fields_and_costs() -> None:
    value = json.loads(run("show", "mochi", "--json", "--max-tokens-per-batch", "24000"))
    assert value["model"]["frame_rule"] == "6k+1"
    assert value["frame_rate"] == {"rule": "resample", "fps": "30"}
    largest = max(value["costs"], key=lambda cost: cost["tokens"])
    assert largest == {
        "bucket": "848x480-85f", "shape": [85, 480, 848], "tokens": 23850, "sample_bytes": 85 * 480 * 848 * 3,
        "batch_size": 1, "batch_bytes": 85 * 480 * 848 * 3, "own_choice": False,
    }  # fmt: skip


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'wan2.1' is neither a file nor a preset; presets: cogvideox"):
        run("show", "wan2.1")
