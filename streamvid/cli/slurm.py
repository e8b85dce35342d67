"""Submission of Slurm jobs that run the command line of this process."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import click

from streamvid.cli.console import print_json
from streamvid.cluster.options import ClusterOptions
from streamvid.cluster.slurm import SlurmJobs, submit
from streamvid.errors import printable

_ENGINE_FLAGS = {"--engine", "--num-tasks", "--sbatch-option"}


def submit_command(jobs: SlurmJobs, cluster: ClusterOptions, follow_up: str, *, as_json: bool) -> int:
    """Submit jobs that run the command line of this process with --task instead of --engine. Return the exit code.

    jobs: jobs to submit. Their `arguments` come before the arguments of this command, which therefore take precedence.
    follow_up: advice on how to follow the progress.
    """
    words = sys.argv[1:]
    place = words.index(jobs.verb) + 1
    # A program that `python -m` runs has no start script.
    start = ["-m", "streamvid"] if sys.argv[0].endswith("__main__.py") else [sys.argv[0]]
    program = [sys.executable, *start, *words[:place], *jobs.program]
    ids = submit(
        replace(jobs, program=program, arguments=[*jobs.arguments, *_without(words[place:], _ENGINE_FLAGS)]), cluster
    )
    if as_json:
        print_json({"jobs": ids, "name": jobs.name})
    else:
        click.echo(printable(f"submitted Slurm jobs {', '.join(ids)}; their logs are written to {jobs.name}-*.log"))
        click.echo(printable(follow_up))
    return 0


def _without(words: Sequence[str], flags: Collection[str]) -> Iterator[str]:
    """Yield all words of a command line except `flags` and their values."""
    is_value = False
    for word in words:
        name, equals, _ = word.partition("=")
        if is_value or name in flags:
            is_value = not is_value and not equals
        else:
            yield word
