"""Tests of streamvid ledger on the ledgers of real loaders."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

import streamvid
from tests.cli.conftest import Call, Tiny
from tests.dataset.frozen import FROZEN

NATIVE = FROZEN / "native"


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ledger of two runs from the start: one of two batches, then one of two epochs."""
    folder = tmp_path_factory.mktemp("run") / "ledger"
    for num_batches in (2, None):
        with streamvid.VideoLoader(
            NATIVE, batch_size=1, num_workers=0, num_epochs=2, output={"ledger": folder}
        ) as loader:
            keys = [batch.sample_keys[0] for batch in islice(loader, num_batches)]
    assert len(keys) == 8
    return folder


def test_a_right_ledger_is_exit_code_0(ledger: Path, call: Call) -> None:
    done = call("ledger", "check", ledger, NATIVE)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == (
        "OK: 8 batches, exactly as planned; 2 batches were delivered again after a resume"
    )
    report = json.loads(call("ledger", "check", ledger, NATIVE, "--json").stdout)
    assert report["is_right"] and [epoch["num_samples"] for epoch in report["epochs"]] == [4, 4]


def test_a_difference_is_exit_code_1(ledger: Path, tiny: Tiny, call: Call) -> None:
    done = call("ledger", "check", ledger, tiny.dataset)
    assert done.returncode == 1 and "error: the ledger belongs to different data: " in done.stderr
    done = call("ledger", "check", ledger, tiny.dataset / "absent")
    assert done.returncode == 1 and "Traceback" not in done.stderr


def test_runs_samples_and_sightings_are_shown(ledger: Path, call: Call) -> None:
    (row,) = json.loads(call("ledger", "show", ledger, "--json").stdout)["runs"]
    assert (row["sessions"], row["ranks"], row["batches"], row["counted"]) == ("1, 2", 1, 10, 8)
    seen = json.loads(call("ledger", "show", ledger, "--before-step", 5, "--json").stdout)
    assert seen["deliveries"] == 5 and [one["count"] for one in seen["samples"]] == [2, 1, 1, 1]
    assert all(one["dataset"] == str(NATIVE) for one in seen["samples"])
    key = seen["samples"][0]["key"]
    (found,) = json.loads(call("ledger", "show", ledger, "--key", key, "--json").stdout)["ledgers"].values()
    assert sorted((one["epoch"], one["counts"]) for one in found if one["counts"]) == [(0, True), (1, True)]
    text = call("ledger", "show", ledger, ledger, "--key", key).stdout
    assert text.count(f"{ledger}: the final model saw {key} 2 time(s)") == 1, (
        "a folder that is given twice must count once"
    )
    assert "5 deliveries of 4 samples in the first 5 steps" in call("ledger", "show", ledger, "--before-step", 5).stdout
    assert "the final model saw nobody 0 time(s)" in call("ledger", "show", ledger, "--key", "nobody").stdout


def test_wrong_usage_is_exit_code_2(ledger: Path, call: Call) -> None:
    for arguments in (("check", ledger), ("show",), ("show", ledger / "absent"), ("check", ledger / "absent", NATIVE)):
        assert call("ledger", *arguments).returncode == 2
    assert call("ledger", "show", ledger, "--key", "k", "--before-step", 1).returncode == 2
    assert call("ledger", "show", NATIVE).returncode == 1
