"""Flags of `streamvid shard` and `streamvid append`, and the code that both verbs share."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import click

from streamvid.cli.console import ProgressBar, run_and_print
from streamvid.cli.flags import Flag, Values, flags_of, take
from streamvid.cli.report import print_input, print_report, print_status
from streamvid.cli.shared_flags import BUCKET_FLAGS, take_buckets
from streamvid.errors import ConfigError, printable
from streamvid.sharder.media_columns import file_keys
from streamvid.sharder.options import ShardOptions

if TYPE_CHECKING:
    from streamvid.sharder.report import ShardReport
    from streamvid.sharder.sharder import OnInput
    from streamvid.sharder.source.summary import InputSummary

Work: TypeAlias = "Callable[[ProgressBar, OnInput], ShardReport]"
OPTION_FLAGS = flags_of(ShardOptions)
"""One flag for each option of ShardOptions, except for bucket options."""
_KEYS = Flag(
    ["--data-file-keys"],
    group="Source",
    metavar="LIST",
    help="Columns with media paths, such as 'video,control_video'; the clip's column comes first.",
)
SLURM_CPUS = 8
"""Default number of CPUs per task on Slurm. The CPUs of the login node say nothing about the compute nodes."""
_GROUPS = ("", "Source", "Captions", "Buckets", "Clips", "Curation", "Verification", "Work", "Storage")
SHARD_FLAGS = sorted([*OPTION_FLAGS, _KEYS, *BUCKET_FLAGS], key=lambda flag: _GROUPS.index(flag.group or ""))
"""All flags; `take_tree` reads their values."""


def work_flags(dest: str, built: str) -> list[Flag]:
    """Return the flags that select an operation instead of setting a build option.

    dest: name of the dataset argument in help texts, such as "DEST".
    built: past participle for help texts, such as "built".
    """
    return [
        Flag(["--dry-run"], is_flag=True, help=f"Show what would be {built}, without writing anything."),
        Flag(["--abandon"], is_flag=True, help=f"Remove unfinished work at {dest}, and do nothing else."),
        Flag(["--status", "shows_status"], is_flag=True, help=f"Show the progress of the work at {dest}."),
        Flag(["--json", "as_json"], is_flag=True, help="Print the report as JSON."),
    ]


def take_tree(given: Values) -> Values:
    """Remove the values of SHARD_FLAGS from `given`.

    Return them as nested mappings from the fields of ShardOptions to values.
    """
    keys = given.pop(str(_KEYS.name))
    buckets = take_buckets(given)
    tree = take(OPTION_FLAGS, given)
    if buckets is not None:
        tree["buckets"] = buckets
    if keys is not None:
        source = tree.setdefault("source", {})
        if source.keys() & {"media", "video_column"}:
            raise ConfigError(
                f"--data-file-keys {keys} cannot be combined with --media or --video-column; omit --data-file-keys, "
                "or omit the other flags"
            )
        source["video_column"], source["media"] = file_keys(keys)
    return tree


def run_work(work: Work, dest: str, *, as_json: bool, needs_samples: bool) -> int:
    """Run a build, print a summary of its input and then its report, and return the exit code.

    needs_samples: True to return a failure if all rows are rejected.
    """
    from streamvid.sharder.report import TASK_ENDED

    # Rows are created and freed without reference cycles, and searching them for cycles took 15 % of the CPU time.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)

    def run(progress: ProgressBar) -> ShardReport:
        def tell(summary: InputSummary) -> None:
            if not as_json:
                progress.pause()
                print_input(summary)

        return work(progress, tell)

    report = run_and_print(run, as_json, lambda done: print_report(done, dest))
    # A dry run that accepts no row fails, just as the build would.
    return 0 if report.num_samples or not needs_samples or report.state == TASK_ENDED else 1


def submit_work(verb: str, dest: str, options: ShardOptions, num_cpus: int, *, as_json: bool) -> int:
    """Submit one Slurm job array per phase, and a job that seals the dataset.

    Raises DatasetError if the destination is in use.
    """
    from streamvid.cli.slurm import submit_command
    from streamvid.cluster.slurm import SlurmJobs
    from streamvid.sharder.work.destination import find_destination
    from streamvid.sharder.work.staging import check_unused
    from streamvid.sharder.work.tasks import task_phases

    place = find_destination(dest, options)
    check_unused(place)
    workers = ["--workers", str(num_cpus)]
    num_arrays = len(task_phases(options))
    jobs = SlurmJobs(verb, place.url, num_cpus, arguments=workers, num_arrays=num_arrays, has_last=True)
    return submit_command(jobs, options.work.cluster, f"progress: streamvid {verb} --status {dest}", as_json=as_json)


def abandon_work(dest: str, options: ShardOptions) -> int:
    """Remove unfinished work at a destination, and print whether there was any work to remove."""
    from streamvid.sharder.sharder import abandon

    done = "removed the unfinished work at" if abandon(dest, options) else "there is no unfinished work at"
    click.echo(printable(f"{done} {dest}"))
    return 0


def show_status(dest: str, options: ShardOptions, *, as_json: bool) -> int:
    """Print the progress of the build at a destination."""
    from streamvid.sharder.sharder import status

    run_and_print(lambda _: status(dest, options), as_json, print_status)
    return 0
