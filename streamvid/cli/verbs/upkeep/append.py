"""streamvid append: add videos to a sealed dataset, as its next version."""

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
  streamvid append ds/ videos/
  streamvid append ds/ week-48/ week-49/ --dry-run
  streamvid append ds/ videos/ --metadata new.csv --caption-column prompt
  streamvid append s3://datasets/ds s3://videos/raw --workers 32
  streamvid append --status ds/
  streamvid append ds/ videos/ --engine slurm --num-tasks 64 --workers 32

SOURCE is the same as for `streamvid shard`, and may contain old and new videos: rows that DATASET already
contains are skipped without opening their files. A row is recognized by its file name, time range, captions
and conditioning inputs. Existing shards do not change. The options that determine the content of DATASET,
such as its buckets, keep the values with which it was built. All other options are the same as for `streamvid shard`.
If the command is stopped, run it again to resume."""

_FLAGS = [flag for flag in SHARD_FLAGS if flag.path != ("work", "overwrite")]


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@click.argument("dataset", type=LOCATION)
@click.argument("source", type=LOCATION, nargs=-1, metavar="SOURCE...")
@add_flags([*_FLAGS, *work_flags("DATASET", "added")])
def command(dataset: str, source: tuple[str, ...], as_json: bool, **given: Any) -> int:
    """Add the videos from SOURCE to the sealed DATASET, and publish its next version.

    SOURCE and DATASET can be s3:// URLs.
    """
    from streamvid.sharder.append import append_options, append_to, plan_append

    abandons, plans, shows_status = (given.pop(name) for name in ("abandon", "dry_run", "shows_status"))
    num_workers = given.get("work__workers")
    if not source and not (shows_status or abandons):
        raise click.UsageError("SOURCE is missing; run `streamvid append DATASET SOURCE`")

    def resolved(**tree: Any) -> ShardOptions:
        return append_options(dataset, tree)

    options = build(resolved, OPTION_FLAGS, take_tree(given))
    if shows_status:
        return show_status(dataset, options, as_json=as_json)
    if abandons:
        return abandon_work(dataset, options)
    if options.work.cluster.engine == "slurm" and not plans:
        return submit_work("append", dataset, options, num_workers or SLURM_CPUS, as_json=as_json)
    append_or_plan = plan_append if plans else append_to
    return run_work(
        lambda progress, tell: append_or_plan(source, dataset, options, progress, tell),
        dataset,
        as_json=as_json,
        needs_samples=False,
    )
