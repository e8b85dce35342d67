"""End-to-end test on real clips, judged by its results: corpus → shard → dataset → loader → training."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamvid
from streamvid.dataset.tar import scan_tar
from streamvid.video.decode.file import decode_into
from streamvid.video.probe import probe
from streamvid.video.transform import Transform
from tests.clips import ROOT
from tests.conftest import SHARD_ARGUMENTS, Corpus, Sharded, run_streamvid
from tests.foreign import read_energon
from tests.loader.conftest import new_keys
from tests.processes import run_command, run_python
from tests.trainer.runs import losses_in, metrics_in
from tests.video.clips import FFMPEG, decode_with_ffmpeg, mean_square_errors, psnr
from tools import make_corpus


@pytest.mark.timeout(900)  # including building the corpus
def test_every_input_row_is_in_a_shard_or_rejected_for_a_reason(corpus: Corpus, sharded: Sharded) -> None:
    """SHARD-3, for a corpus that contains a truncated, an empty, a missing and a text file."""
    with (corpus.root / "metadata.csv").open(newline="", encoding="utf-8") as file:
        rows = [row["path"] for row in csv.DictReader(file)]
    dataset = streamvid.open_dataset(sharded.root)
    accepted = dataset.samples_table()["source"].to_pylist()
    rejected = {row["source"]: row["reason"] for row in dataset.rejections_table().to_pylist()}
    assert Counter([*accepted, *rejected]) == Counter(rows)
    assert sharded.report["num_records"] == len(rows) == len(accepted) + len(rejected)
    for path, entry in corpus.entries.items():
        if entry["expect"] == "reject":
            assert path in rejected, path
        elif entry["expect"] == "keep":
            assert path in accepted, f"{path}: {rejected.get(path)}"
    for name, reason in {
        "truncated": "ends early",
        "not_a_video": "not a video",
        "empty": "is empty",
        "missing": "No such",
    }.items():
        (found,) = [text for source, text in rejected.items() if name in source]
        assert reason in found


def stored_clips(root: Path) -> list[dict[str, Any]]:
    """Return the index row of every sample of a dataset, with the clip's bytes from the tar."""
    dataset = streamvid.open_dataset(root)
    found = []
    for shard in dataset.shards:
        data = (root / shard.path).read_bytes()
        bucket = dataset.manifest.bucket(shard.bucket_id)
        for row in dataset.samples(shard).to_pylist():
            clip = data[row["clip_offset"] : row["clip_offset"] + row["clip_bytes"]]
            found.append(row | {"clip": clip, "bucket": bucket})
    return found


def ffmpeg_timestamps(path: Path) -> list[float]:
    """Return the time in seconds of each frame in a full decode by the ffmpeg program."""
    command = [FFMPEG, "-nostdin", "-copyts", "-i", str(path), "-map", "0:V:0", "-fps_mode", "passthrough"]
    done = subprocess.run([*command, "-vf", "showinfo", "-f", "null", "-"], capture_output=True, check=True)
    return [float(time) for time in re.findall(r"pts_time:\s*(-?[\d.]+)", done.stderr.decode(errors="replace"))]


def check_windows(corpus: Corpus, dataset: Path, num_windows: int) -> int:
    """Compare random windows of every clip with ffmpeg's full decode; return how many burned-in numbers were read."""
    tool, draw = make_corpus, random.Random(0)
    num_burned = 0
    for sample in stored_clips(dataset):
        path, bucket = corpus.root / sample["source"], sample["bucket"]
        frames, height, width = bucket.shape
        assert sample["clip"] == path.read_bytes(), f"{path}: the copied clip differs from the original file"
        info = probe(sample["clip"])
        reference = decode_with_ffmpeg(path, Transform.cover(info, height, width).ffmpeg_filter, height, width)
        assert info.num_frames == len(reference) == sample["window_num_frames"], path
        if not info.is_image:
            ours = np.array(info.timestamps) * float(info.time_base)
            np.testing.assert_allclose(ours, ffmpeg_timestamps(path), atol=2e-4, err_msg=str(path))
        entry = corpus.entries[sample["source"]]
        for _ in range(num_windows if not info.is_image else 1):
            start = draw.randint(0, info.num_frames - frames)
            out = np.zeros((frames, height, width, 3), np.uint8)
            decode_into(sample["clip"], start, out, num_frames=info.num_frames)
            for number, picture in enumerate(out, start):
                error = mean_square_errors(reference[number : number + 1], picture)[0]
                assert psnr(error) >= 45, f"{path}: frame {number}: {psnr(error):.1f} dB"
                if entry.get("burned") and not info.is_image:
                    read = tool.read_number(picture, *tool.cover_geometry(entry, height, width))
                    assert read == number + entry.get("first_number", 0), f"{path}: frame {number} shows {read}"
                    num_burned += 1
    return num_burned


@pytest.mark.timeout(900)
def test_windows_of_every_clip_are_the_frames_that_ffmpeg_gives(corpus: Corpus, sharded: Sharded) -> None:
    """SAMPLE-2: frame numbers, timestamps and pixels of random windows equal those of ffmpeg."""
    assert check_windows(corpus, sharded.root, 2) > 200


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_windows_of_the_full_corpus(tmp_path: Path) -> None:
    """SAMPLE-2 for every codec, frame rate, GOP and size that the corpus builder supports."""
    described = make_corpus.make_corpus(tmp_path / "corpus", size="full")
    corpus = Corpus(tmp_path / "corpus", {entry["path"]: entry for entry in described["files"]})
    done = run_streamvid("shard", corpus.root, tmp_path / "dataset", *SHARD_ARGUMENTS, "--json")
    rejected = {row["source"]: row["reason"] for row in json.loads(done.stdout)["rejections"]}
    for path, entry in corpus.entries.items():
        assert entry["expect"] == "either" or (path in rejected) == (entry["expect"] == "reject"), rejected.get(path)
    assert check_windows(corpus, tmp_path / "dataset", 5) > 3000


@pytest.mark.parametrize("tail", ["carry", "drop", "pad"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_an_epoch_over_ranks(sharded: Sharded, num_ranks: int, tail: Any) -> None:
    """PLAN-2, PLAN-3, PLAN-4 on real clips: equal steps, one bucket per step, and only announced repeats."""
    sequences, seen, repeats, announced = [], Counter[str](), 0, None
    for rank in range(num_ranks):
        world = streamvid.World(rank, num_ranks)
        with streamvid.VideoLoader(sharded.root, batch_size=1, world=world, tail=tail, num_workers=0) as loader:
            announced, num_steps, steps = loader.plan_report(), len(loader), []
            for batch in loader:
                steps.append(batch.bucket.id)
                assert batch.video.shape == (1, 3, *batch.bucket.shape)
                repeats += int(batch.is_repeat.sum())
                seen.update(new_keys(batch))
            assert len(steps) == num_steps
            sequences.append(steps)
    assert all(steps == sequences[0] for steps in sequences)
    assert set(seen.values()) == {1}
    assert announced is not None
    assert repeats == sum(row.num_repeated for row in announced)
    left_out = sum(row.num_carried + row.num_dropped for row in announced)
    assert len(seen) == sharded.report["num_samples"] - left_out


def test_captions_and_columns_arrive_with_their_own_clip(corpus: Corpus, sharded: Sharded) -> None:
    with (corpus.root / "metadata.csv").open(newline="", encoding="utf-8") as file:
        wanted = {row["path"]: row for row in csv.DictReader(file)}
    rows = {row["key"]: row for row in streamvid.open_dataset(sharded.root).samples_table().to_pylist()}
    options: dict[str, Any] = {"batch_size": 2, "tail": "pad", "num_workers": 2, "columns": ("aesthetic", "category")}
    num_captions = 0
    with streamvid.VideoLoader(sharded.root, **options) as loader:
        for batch in loader:
            for key, text, score, category in zip(
                batch.sample_keys, batch.text, batch.aesthetic.tolist(), batch.category, strict=True
            ):
                row = wanted[rows[key]["source"]]
                assert text == row["caption"] and (category or "") == row["category"]
                assert score == pytest.approx(float(row["aesthetic"] or "nan"), nan_ok=True)
                num_captions += bool(text)
    assert num_captions > 20


def test_megatron_energon_reads_every_shard(sharded: Sharded) -> None:
    """Energon finds its metadata and offsets, and returns every member of every sample byte for byte."""
    expected: dict[str, dict[str, str]] = {}
    for path in (sharded.root / "shards").rglob("*.tar"):
        data = path.read_bytes()
        with path.open("rb") as file:
            for member in scan_tar(file):
                content = data[member.offset : member.offset + member.num_bytes]
                expected.setdefault(member.key, {})[member.extension] = hashlib.sha256(content).hexdigest()
    assert read_energon(sharded.root) == [expected]


def train(output: Path, dataset: Path, *overrides: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    settings = [f"data.dataset={dataset}", f"output={output}", "model.args.dim=48", "model.args.depth=1", *overrides]
    arguments = ["--config", str(ROOT / "configs/train/tiny.yaml"), *(part for s in settings for part in ("--set", s))]
    if ranks == 1:
        return run_streamvid("train", *arguments)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return run_command(
        [*launcher, str(ROOT / "configs/accelerate/cpu_2ranks.yaml"), "-m", "streamvid", "train", *arguments],
        env=environment,
        cwd=ROOT,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_training_resumes_with_the_loaders_cursor(sharded: Sharded, tmp_path: Path) -> None:
    """PLAN-5 through the trainer: 12 steps in one process, or 6 and 6 in two, have the same losses."""
    common = ("logging.steps=1", "checkpoints.steps=6", "eval.steps=6", "eval.num_batches=1")
    train(tmp_path / "whole", sharded.root, "max_steps=12", *common)
    train(tmp_path / "parts", sharded.root, "max_steps=6", *common)
    train(tmp_path / "parts", sharded.root, "max_steps=12", *common, "data.num_workers=0")
    assert losses_in(tmp_path / "parts") == losses_in(tmp_path / "whole")
    assert list(losses_in(tmp_path / "whole")) == list(range(1, 13))
    assert (tmp_path / "whole" / "step-12.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_train_together(sharded: Sharded, tmp_path: Path) -> None:
    """PLAN-2 in real processes: a missing step or another bucket on one rank would hang or fail the all-reduce."""
    train(
        tmp_path / "run",
        sharded.root,
        "max_steps=null",
        "num_epochs=1",
        "data.batch_size=1",
        "logging.steps=1",
        "eval.num_batches=0",
        ranks=2,
    )
    found = metrics_in(tmp_path / "run")
    with streamvid.VideoLoader(sharded.root, batch_size=1, world=streamvid.World(0, 2), num_workers=0) as loader:
        assert len(losses_in(tmp_path / "run")) == loader.num_steps(1)
    assert found[-1]["samples"] == 2 * len(losses_in(tmp_path / "run"))


@pytest.mark.slow
def test_a_wheel_runs_the_demo_outside_the_checkout(tmp_path: Path) -> None:
    """The wheel contains the presets and the corpus builder."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run_command([*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(ROOT)])
    (wheel,) = tmp_path.glob("streamvid-*.whl")
    run_command([*pip, "install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = run_streamvid("demo", "--steps", "4", cwd=elsewhere, env=environment)
    assert "39 input rows" in done.stdout and "held-out loss" in done.stdout and "next steps" in done.stdout
    where = run_python("import streamvid; print(streamvid.__file__)", cwd=elsewhere, env=environment)
    assert str(tmp_path / "site") in where.stdout
    assert sorted(p.name for p in elsewhere.iterdir()) == ["streamvid-demo"]
