"""streamvid shard: turn a folder of videos, or a metadata file, into a sealed dataset."""

from __future__ import annotations

from typing import Any

import click

from streamvid.cli.flags import LOCATION, GroupedCommand, add_flags, build
from streamvid.cli.shard_flags import (
    OPTION_FLAGS,
    SHARD_FLAGS,
    SLURM_CPUS,
    abandon_work,
    run_work,
    show_status,
    submit_work,
    take_tree,
    work_flags,
)
from streamvid.sharder.options import ShardOptions

_EPILOG = """\b
Examples:
  streamvid shard videos/ ds/ --dry-run
  streamvid shard videos/ ds/ --resolution 256px --num-frames 1,17,33
  streamvid shard videos/ ds/ --metadata videos/meta.csv --caption-column prompt \\
      --buckets "832x480@81,480x832@81" --val-fraction 0.01 --shard-size 512MB
  streamvid shard videos/ ds/ --clips native --resolution 480p --num-frames 17,81
  streamvid shard videos/ ds/ --preset wan2.1-480p
  streamvid shard videos/ ds/ --bucket-config opensora.yaml --assign all
  streamvid shard films/ ds/ --clips native --fps 16 --max-clip-seconds 20 --min-psnr 38
  streamvid shard videos/ ds/ --scores motion,blur --where "motion > 0.5 and blur < 0.6"
  streamvid shard prompts.jsonl ds/ --clips text
  streamvid shard speech/ ds/ --clips audio --buckets 2s,5s,10s
  streamvid shard old-ds/ more-ds/ ds/ --resolution 480p --num-frames 17,81
  streamvid shard s3://videos/raw s3://datasets/ds --clips native --work-dir /scratch
  streamvid shard --status ds/
  streamvid shard /data/videos /data/ds --engine slurm --num-tasks 64 --workers 32
  streamvid shard /data/videos /data/ds --task $JOB_COMPLETION_INDEX/16

SOURCE is a folder of videos, a metadata file (CSV, JSONL, JSON or Parquet), a folder of Parquet
files, a folder of tars (webdataset, video2dataset, cosmos-curate), or a sealed dataset. Captions of
a folder come from metadata.csv, .jsonl, .json or .parquet in it or in its subfolders, from prompt.txt
next to videos.txt, or from a .txt file next to each video. Several sources become one dataset.
If the command is stopped, run it again to resume."""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@click.argument("source", type=LOCATION, nargs=-1, metavar="SOURCE...")
@click.argument("dest", type=LOCATION)
@add_flags([*SHARD_FLAGS, *work_flags("DEST", "built")])
def command(source: tuple[str, ...], dest: str, as_json: bool, **given: Any) -> int:
    """Turn SOURCE, such as a folder of videos, into a sealed dataset at DEST. Both may be s3:// URLs."""
    from streamvid.sharder.sharder import dry_run, shard
    from streamvid.sharder.work.destination import find_destination

    abandons, plans, shows_status = (given.pop(name) for name in ("abandon", "dry_run", "shows_status"))
    num_workers = given.get("work__workers")
    if not source and not shows_status:
        raise click.UsageError("SOURCE or DEST is missing; pass both: `streamvid shard SOURCE DEST`")
    options = build(ShardOptions, OPTION_FLAGS, take_tree(given))
    if shows_status:
        return show_status(dest, options, as_json=as_json)
    if abandons:
        return abandon_work(dest, options)
    if options.work.cluster.engine == "slurm" and not plans:
        find_destination(dest, options).check_free()
        return submit_work("shard", dest, options, num_workers or SLURM_CPUS, as_json=as_json)
    build_or_plan = dry_run if plans else shard
    return run_work(
        lambda progress, tell: build_or_plan(source, dest, options, progress, tell),
        dest,
        as_json=as_json,
        needs_samples=True,
    )
