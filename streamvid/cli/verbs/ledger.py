"""streamvid ledger: verify a ledger of delivered samples, and show what a model saw."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streamvid.cli.console import print_json, print_table, run_and_print
from streamvid.cli.flags import LOCATION, GroupedCommand, Location
from streamvid.cli.shared_flags import storage_flags
from streamvid.errors import printable

if TYPE_CHECKING:
    from streamvid.forecast.ledger import LedgerReport
    from streamvid.ledger.history import Attempt
    from streamvid.ledger.queries import Sighting
    from streamvid.storage import StorageOptions

_FOLDER = Location(exists=True, file_okay=False)
_MAX_SHOWN = 20
_CHECK = """\b
Examples:
  streamvid ledger check run/ledger ds/
  streamvid ledger check run/ledger s3://bucket/ds --json | jq .differences

\b
Pass the datasets in the order in which the loader received them, each in the version that the loader
read or in a later version.

\b
Exit codes: 0 exactly the planned samples were delivered, as far as the run got; 1 something differs or was not
recorded; 2 incorrect usage."""
_SHOW = """\b
Examples:
  streamvid ledger show run/ledger
  streamvid ledger show run-1/ledger run-2/ledger --key KEY
  streamvid ledger show run/ledger --before-step 5000 --json | jq '.samples | length'

Steps that were delivered again after a resume count once, as the final model saw them."""


@click.group()
def command() -> None:
    """Verify and search the ledgers that VideoLoader writes with output={"ledger": DIR}."""


@command.command(cls=GroupedCommand, epilog=_CHECK)
@click.argument("folder", type=_FOLDER, metavar="DIR")
@click.argument("datasets", type=LOCATION, nargs=-1, required=True, metavar="DATASET...")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@storage_flags
def check(folder: str, datasets: tuple[str, ...], as_json: bool, storage: StorageOptions) -> int:
    """Verify that the ledger in DIR matches the plan of the loader that wrote it.

    In each epoch, the loader must have delivered every planned sample once, and nothing else.
    """
    from streamvid.dataset.versions.open import open_dataset
    from streamvid.forecast.ledger import check_ledger
    from streamvid.ledger.history import read_history

    opened = [open_dataset(dataset, storage=storage) for dataset in datasets]
    attempts = read_history(Path(folder))
    report = run_and_print(lambda progress: check_ledger(attempts, opened, progress), as_json, _print_check)
    return 0 if report.is_right else 1


def _print_check(report: LedgerReport) -> None:
    rows = [(one.epoch, one.num_samples, one.num_repeats, one.num_substituted) for one in report.epochs]
    print_table(["epoch", "samples", "repeats", "substitutes"], rows)
    click.echo("")
    for text in report.differences[:_MAX_SHOWN]:
        click.echo(printable(text))
    if report.num_differences > _MAX_SHOWN:
        click.echo(f"… and {report.num_differences - _MAX_SHOWN} more differences; --json shows more")
    if report.num_unrecorded:
        click.echo(
            f"not recorded: {report.num_unrecorded} batches before a resume; their ranks had no ledger, or their "
            "files are damaged or missing"
        )
    again = f"; {report.num_replaced} batches were delivered again after a resume" if report.num_replaced else ""
    if report.is_right:
        click.echo(f"OK: {report.num_batches} batches, exactly as planned{again}")
    else:
        click.echo(f"{report.num_differences} difference(s) in {report.num_batches} batches{again}")


@command.command(cls=GroupedCommand, epilog=_SHOW)
@click.argument("folders", type=_FOLDER, nargs=-1, required=True, metavar="DIR...")
@click.option("--key", help="Show every delivery of the sample with this key.")
@click.option("--before-step", type=click.IntRange(min=0), metavar="N", help="Count deliveries in the first N steps.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def show(folders: tuple[str, ...], key: str | None, before_step: int | None, as_json: bool) -> None:
    """Show the runs in each DIR, the deliveries of one sample, or the samples that a model saw before a step."""
    from streamvid.ledger.history import read_history

    if key is not None and before_step is not None:
        raise click.UsageError("--key cannot be combined with --before-step; omit one of them")
    histories = {folder: read_history(Path(folder)) for folder in folders}
    if key is not None:
        _show_key(histories, key, as_json)
    elif before_step is not None:
        _show_seen(histories, before_step, as_json)
    else:
        _show_runs(histories, as_json)


def _show_key(histories: dict[str, tuple[Attempt, ...]], key: str, as_json: bool) -> None:
    from streamvid.ledger.queries import sightings

    found = {folder: list(sightings(attempts, key)) for folder, attempts in histories.items()}
    if as_json:
        print_json(
            {"key": key, "ledgers": {name: [one.to_json() for one in several] for name, several in found.items()}}
        )
        return
    rows = [_sighting_row(folder, one) for folder, several in found.items() for one in several]
    if rows:
        headers = ["ledger", "session", "epoch", "step", "rank", "slot", "visit", "frames from", "caption", "note"]
        print_table(headers, rows)
        click.echo("")
    for folder, several in found.items():
        num_seen = sum(one.counts and not one.planned_only for one in several)
        click.echo(printable(f"{folder}: the final model saw {key} {num_seen} time(s)"))


def _sighting_row(folder: str, one: Sighting) -> tuple[object, ...]:
    sample = one.sample
    notes = {
        "replaced by a later run": not one.counts,
        "a repeat": sample.is_repeat,
        f"bad; {sample.key} was delivered instead": one.planned_only,
        f"in place of {sample.substituted_for}": sample.substituted_for is not None and not one.planned_only,
    }
    note = "; ".join(text for text, applies in notes.items() if applies)
    frames = f"{sample.start}" if sample.stride <= 1 else f"{sample.start}, every {sample.stride}"
    return folder, one.session, one.epoch, one.step, one.rank, one.slot, sample.visit, frames, sample.caption, note


def _show_seen(histories: dict[str, tuple[Attempt, ...]], num_steps: int, as_json: bool) -> None:
    from streamvid.ledger.queries import position_of, seen_before

    seen: Counter[tuple[str, str]] = Counter()
    for attempts in histories.values():
        seen += seen_before(attempts, position_of(attempts, num_steps))
    if as_json:
        samples = [{"dataset": dataset, "key": key, "count": count} for (dataset, key), count in seen.most_common()]
        print_json({"before_step": num_steps, "deliveries": seen.total(), "samples": samples})
        return
    times = sorted(Counter(seen.values()).items())
    print_table(["times seen", "samples"], times)
    click.echo("")
    for (dataset, key), count in seen.most_common(_MAX_SHOWN):
        click.echo(printable(f"{count} x {key} of {dataset}"))
    if len(seen) > _MAX_SHOWN:
        click.echo(f"… and {len(seen) - _MAX_SHOWN} more samples; --json lists all")
    click.echo(f"{seen.total()} deliveries of {len(seen)} samples in the first {num_steps} steps")


@dataclass(frozen=True, slots=True)
class _RunRow:
    """One attempt of a run, for display."""

    ledger: str
    sessions: str
    ranks: int
    epoch: int
    step: int
    batches: int
    counted: int
    until: str


def _run_row(folder: str, attempt: Attempt) -> _RunRow:
    from streamvid.ledger.log import END

    counted = sum(counts for rank in attempt.logs for _, _, counts in attempt.batches(rank))
    until = "" if attempt.until == END else f"epoch {attempt.until.epoch}, step {attempt.until.step}"
    sessions = ", ".join(map(str, attempt.sessions))
    start = attempt.start
    return _RunRow(folder, sessions, attempt.num_ranks, start.epoch, start.step, attempt.num_logged, counted, until)


def _show_runs(histories: dict[str, tuple[Attempt, ...]], as_json: bool) -> None:
    rows = [_run_row(folder, attempt) for folder, attempts in histories.items() for attempt in attempts]
    if as_json:
        print_json({"runs": [asdict(row) for row in rows]})
        return
    headers = ["ledger", "sessions", "ranks", "from epoch", "step", "batches", "that count", "continued by a run from"]
    print_table(headers, [tuple(asdict(row).values()) for row in rows])
