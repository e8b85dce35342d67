"""streamvid shard: turn a folder of videos, or a metadata file, into a sealed dataset."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import click

from streamvid.cli.console import ProgressBar, run_and_print
from streamvid.cli.flags import LOCATION, Flag, GroupedCommand, Values, add_flags, build, flags_of, take
from streamvid.cli.report import print_input, print_report, print_status
from streamvid.cli.shared_flags import BUCKET_FLAGS, take_buckets
from streamvid.errors import ConfigError, printable
from streamvid.sharder.media_columns import file_keys
from streamvid.sharder.options import ShardOptions

if TYPE_CHECKING:
    from streamvid.sharder.report import ShardReport
    from streamvid.sharder.source.summary import InputSummary

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

_OPTIONS = flags_of(ShardOptions)
_KEYS = Flag(
    ["--data-file-keys"],
    group="Source",
    metavar="LIST",
    help="Columns with media paths, beginning with the clip's column, such as 'video,control_video'.",
)
_SLURM_CPUS = 8
"""Default number of CPUs per task on Slurm. The CPUs of the login node say nothing about the compute nodes."""
_GROUPS = ("", "Source", "Captions", "Buckets", "Clips", "Curation", "Verification", "Work", "Storage")
_FLAGS = sorted([*_OPTIONS, _KEYS, *BUCKET_FLAGS], key=lambda flag: _GROUPS.index(flag.group or ""))


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@click.argument("source", type=LOCATION, nargs=-1, metavar="SOURCE...")
@click.argument("dest", type=LOCATION)
@add_flags(_FLAGS)
@click.option("--dry-run", is_flag=True, help="Show what would be built, without writing anything.")
@click.option("--abandon", is_flag=True, help="Remove unfinished work at DEST, without building anything.")
@click.option("--status", "shows_status", is_flag=True, help="Show the progress of the build at DEST.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(source: tuple[str, ...], dest: str, as_json: bool, **given: Any) -> int:
    """Turn SOURCE, such as a folder of videos, into a sealed dataset at DEST. Both may be s3:// URLs."""
    from streamvid.sharder.report import TASK_ENDED
    from streamvid.sharder.sharder import dry_run, shard

    abandons, plans, shows_status = (given.pop(name) for name in ("abandon", "dry_run", "shows_status"))
    if shows_status:
        _show_status(dest, _options(given), as_json)
        return 0
    num_workers = given.get("work__workers")
    if not source:
        raise click.UsageError("SOURCE or DEST is missing; pass both: `streamvid shard SOURCE DEST`")
    options = _options(given)
    if abandons:
        _abandon(dest, options)
        return 0
    if options.work.cluster.engine == "slurm" and not plans:
        return _submit(dest, options, num_workers or _SLURM_CPUS, as_json=as_json)
    build_or_plan = dry_run if plans else shard
    # Rows are created and freed without reference cycles, and searching them for cycles took 15 % of the CPU time.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)

    def work(progress: ProgressBar) -> ShardReport:
        def tell(summary: InputSummary) -> None:
            if not as_json:
                progress.pause()
                print_input(summary)

        return build_or_plan(source, dest, options, progress, tell)

    report = run_and_print(work, as_json, lambda done: print_report(done, dest))
    # A dry run that accepts no row fails, just as the build would.
    return 0 if report.num_samples or report.state == TASK_ENDED else 1


def _submit(dest: str, options: ShardOptions, num_cpus: int, *, as_json: bool) -> int:
    """Submit one array per phase and a job that seals the dataset."""
    from streamvid.cli.slurm import submit_command
    from streamvid.cluster.slurm import SlurmJobs
    from streamvid.sharder.work.destination import find_destination
    from streamvid.sharder.work.staging import check_unused
    from streamvid.sharder.work.tasks import task_phases

    place = find_destination(dest, options)
    place.check_free()
    check_unused(place)
    workers = ["--workers", str(num_cpus)]
    num_arrays = len(task_phases(options))
    jobs = SlurmJobs("shard", place.url, num_cpus, arguments=workers, num_arrays=num_arrays, has_last=True)
    return submit_command(jobs, options.work.cluster, f"progress: streamvid shard --status {dest}", as_json=as_json)


def _abandon(dest: str, options: ShardOptions) -> None:
    from streamvid.sharder.sharder import abandon

    done = "removed the unfinished work at" if abandon(dest, options) else "there is no unfinished work at"
    click.echo(printable(f"{done} {dest}"))


def _show_status(dest: str, options: ShardOptions, as_json: bool) -> None:
    from streamvid.sharder.sharder import status

    run_and_print(lambda _: status(dest, options), as_json, print_status)


def _options(given: Values) -> ShardOptions:
    keys = given.pop(str(_KEYS.name))
    buckets = take_buckets(given)
    tree = take(_OPTIONS, given)
    if buckets is not None:
        tree["buckets"] = buckets
    if keys is not None:
        source = tree.setdefault("source", {})
        if source.keys() & {"media", "video_column"}:
            raise ConfigError(
                f"--data-file-keys {keys}: cannot be combined with --media or --video-column; omit one of them"
            )
        source["video_column"], source["media"] = file_keys(keys)
    return build(ShardOptions, _OPTIONS, tree)
