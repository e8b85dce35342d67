"""Tests of streamvid encode, in this process where possible, because importing torch takes long."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from streamvid.cli.main import cli
from streamvid.cluster.lease import held
from streamvid.errors import ConfigError
from streamvid.storage import LocalStore
from tests.cli.conftest import Tiny
from tests.clips import ROOT
from tests.conftest import run_streamvid
from tests.files import tree_of

# The small module of the package with one visit and no workers, because the dataset has only two samples.
SETTINGS = (
    "data.batch_size=1",
    "data.num_workers=0",
    "accelerate.cpu=true",
    "max_steps=2",
    "eval.num_batches=0",
    "model.args={dim: 12, heads: 2}",
)


def arguments(tiny: Tiny, folder: Path) -> list[str]:
    own = (f"data.dataset={tiny.dataset}", f"data.features.url={folder / 'sidecar'}", f"output={folder / 'out'}")
    return [word for one in (*SETTINGS, *own) for word in ("--set", one)]


def invoke(*words: str, exit_code: int = 0) -> str:
    """Run the streamvid command in this process and return its standard output."""
    done = CliRunner().invoke(cli, list(words))
    assert done.exit_code == exit_code, done.output
    return done.stdout


def test_a_second_driver_on_ray_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    """SHARD-1: a second driver is refused before it connects to a cluster, and leaves nothing behind."""
    with held(LocalStore(tmp_path / "sidecar"), ".staging/leases", "run"):
        done = run_streamvid("encode", *arguments(tiny, tmp_path), "--engine", "ray", check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    said = " ".join(done.stderr.split())
    assert f"another run, process {os.getpid()} on " in said and f"is working on {tmp_path / 'sidecar'}; wait" in said
    assert not (tmp_path / "sidecar").exists()


def test_encoding_in_tasks_and_training_on_the_features(tiny: Tiny, tmp_path: Path) -> None:
    """SHARD-1: a dry run writes nothing, the last task seals the features, training reads them, and a rerun does
    nothing."""
    given = arguments(tiny, tmp_path)
    survey = invoke("encode", *given, "--dry-run").splitlines()
    assert survey[0] == f"2 samples in 2 shards → {tmp_path / 'sidecar'}" and "estimated once" in survey[1]
    assert not (tmp_path / "sidecar").exists() and not (tmp_path / "out").exists()
    first = run_streamvid("encode", *given, "--task", "1/2")
    assert (
        first.stdout.splitlines()[0] == "encoded 1 samples in 1 shards"
        and "the last task to finish seals" in first.stdout
    )
    assert "encode 1/1" in first.stderr
    half = json.loads(invoke("encode", *given, "--dry-run", "--json"))
    assert (half["num_samples_done"], half["is_sealed"]) == (1, False)
    second = json.loads(invoke("encode", *given, "--task", "0/2", "--json"))
    assert second["is_sealed"] and second["num_samples"] == 1
    written = tree_of(tmp_path / "sidecar")
    size = sum(len(data) for path, data in written.items() if path.startswith("shards/"))
    whole = json.loads(invoke("encode", *given, "--dry-run", "--json"))
    assert json.loads(written["train.json"])["dataset"] == str(tiny.dataset)  # read by --dataset_base_path
    assert whole["is_sealed"] and whole["num_bytes_expected"] == size
    assert (
        "encoded 0 samples in 0 shards\nsealed" in invoke("encode", *given) and tree_of(tmp_path / "sidecar") == written
    )
    trained = invoke("train", *given, "--set", "task=sft:train", "--set", "model.args={dim: 24, heads: 2}")
    assert "step 2: loss" in trained


def test_mistakes_are_named_before_anything_is_written(tiny: Tiny, tmp_path: Path) -> None:
    given = arguments(tiny, tmp_path)
    for more, said in (
        (["--task", "2/2"], "--task '2/2': must be I/N"),
        (
            ["--set", "model.weights.paths={autoencoder: nowhere.safetensors}", "--dry-run"],
            "nowhere.safetensors does not exist",
        ),
        (["--set", "data.batch_size=null"], "set exactly one of them"),
    ):
        with pytest.raises((ConfigError, click.UsageError), match=re.escape(said)):
            cli.main(["encode", *given, *more], standalone_mode=False)
    assert not (tmp_path / "sidecar").exists()


@pytest.mark.slow
def test_an_interrupted_encoding_resumes_with_the_same_command(tiny: Tiny, tmp_path: Path) -> None:
    """STOP-1: the exit code is 130, and finished work is kept."""
    slow = ["--set", "model.factory=tests.trainer.encoders:build", "--set", "data.features.num_visits=3"]
    given = arguments(tiny, tmp_path) + slow
    args = ["--set", f"model.args={{log: '{tmp_path}', pause: 0.3}}"]
    command = [sys.executable, "-m", "streamvid", "encode", *given, *args]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    while process.poll() is None and not list(tmp_path.glob("encoded-*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=200)[0]
    assert process.returncode == 130 and "run the same command again to resume" in told
    assert not list((tmp_path / "sidecar").rglob("spool*"))
    assert "sealed: " in invoke("encode", *given, "--set", "model.args={}")
