"""Implementation of the `streamvid` command: verbs, exit codes and error output."""

from __future__ import annotations

import importlib
import io
import logging
import os
import sys
from difflib import get_close_matches

import click

from streamvid import __version__
from streamvid.credentials import hide_all_credentials, hide_credentials
from streamvid.errors import ConfigError, StreamvidError, printable

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_VERBS = {
    "annotate": "Add captions and columns to a sealed dataset.",
    "append": "Add videos to a sealed dataset, as its next version.",
    "bench": "Measure samples per second on this machine and find the bottleneck.",
    "compact": "Delete the bytes of removed samples, and merge small shards.",
    "copy": "Copy a dataset between disks and object stores, verifying every checksum.",
    "demo": "Build a small corpus, shard it, stream it, and train on it.",
    "encode": "Encode a dataset with a model's encoders and store the features.",
    "export": "Convert trained weights to the file formats of other tools.",
    "extract": "Write single samples to files: the clip, the frames that the model gets, and the caption.",
    "ledger": "Verify and search the log of delivered samples.",
    "merge": "Add the samples from other datasets to a dataset.",
    "plan": "Show what a run would deliver before you rent a GPU.",
    "presets": "List the bucket configurations of known models, with sources.",
    "preview": "Show a dataset in the browser, as the model sees it.",
    "remove": "Remove samples from a dataset, for example after a takedown request.",
    "report": "Write an HTML report on the contents of a dataset.",
    "shard": "Turn a folder of videos into a sealed dataset.",
    "stats": "Show what a dataset contains and what was rejected.",
    "train": "Train your model, or a small built-in one, on a dataset.",
    "verify": "Check a dataset against its manifest and list problems.",
    "versions": "List and tag the versions of a dataset, and store views.",
}
_UPKEEP = frozenset(("annotate", "append", "compact", "copy", "merge", "remove", "verify", "versions"))
"""Verbs whose modules are in `verbs/upkeep/`."""


class _Verbs(click.Group):
    """Group of verbs. The module of a verb is imported when the verb runs or its help is shown."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        folder = "verbs.upkeep" if cmd_name in _UPKEEP else "verbs"
        command: click.Command = importlib.import_module(f"streamvid.cli.{folder}.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _VERBS and (near := get_close_matches(args[0], _VERBS, n=1)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_VERBS.items()))


class _Formatter(logging.Formatter):
    """Log formatter that removes credentials from paths and URLs in messages and tracebacks (SAFE-1)."""

    def format(self, record: logging.LogRecord) -> str:
        return hide_all_credentials(super().format(record))


class _StderrHandler(logging.Handler):
    """Log handler that writes to the current `sys.stderr`.

    While a progress bar is shown, `sys.stderr` is replaced, so that log messages appear above the bar.
    """

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


@click.command(
    cls=_Verbs,
    epilog="Exit codes: 0 success, 1 failure (the last line explains it), 2 incorrect usage, 130 interrupted.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="streamvid")
@click.option("-v", "--verbose", is_flag=True, help="Show log messages and tracebacks.")
@click.option("-q", "--quiet", is_flag=True, help="Show only results, warnings and errors.")
def cli(verbose: bool, quiet: bool) -> None:
    """Turn videos into shards, and stream them to GPUs in uniform batches, with exact resume.

    \b
    streamvid demo                          run everything once, on real clips
    streamvid shard videos/ ds/ --dry-run   preview the dataset for your own folder
    streamvid stats ds/                     show what a dataset contains
    """
    if verbose and quiet:
        raise click.UsageError("--quiet cannot be combined with --verbose; omit one of them")
    handler = _StderrHandler()
    handler.setFormatter(_Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        handlers=[handler],
        force=True,
    )


def run(command: click.Command) -> None:
    """Run `command`, and exit with its exit code. An error is printed as one message; --verbose adds the traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the encoding may lack characters of a name
    try:
        sys.exit(command.main(standalone_mode=False) or 0)
    except (click.Abort, KeyboardInterrupt):
        going_on = "append, copy, encode, shard, train and verify resume their work"
        click.echo(f"interrupted; run the same command again ({going_on})", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        click.echo(_without_credentials(shown.getvalue()), nl=False, err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The program that read the output, such as a pager or head, has ended, so there is nothing to report.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)
    except (StreamvidError, OSError, MemoryError) as error:  # an OSError's message names the cause, such as a full disk
        if logging.getLogger().isEnabledFor(logging.INFO):
            logging.getLogger(__name__).exception("failed")
        text = _without_credentials(str(error))
        if isinstance(error, MemoryError):
            reason = f" ({text})" if text else ""
            text = f"out of memory{reason}; use a machine with more memory, or raise the memory limit"
        lines = map(printable, text.splitlines())
        click.echo("\n".join(["error: " + next(lines, ""), *lines]), err=True)
        sys.exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED)


def _without_credentials(message: str) -> str:
    """Return a message with all credentials removed.

    A credential that contains spaces cannot be recognized in a message, so the program's arguments are searched for it.
    """
    for argument in sys.argv[1:]:
        hidden = hide_credentials(argument)
        if hidden != argument:
            message = message.replace(argument, hidden).replace(repr(argument)[1:-1], hidden)
    return hide_all_credentials(message)
