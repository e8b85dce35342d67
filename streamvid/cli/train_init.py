"""streamvid train --init: a folder with a training module that works, its config, and what to type."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from streamvid.cli.console import printable
from streamvid.errors import ConfigError
from streamvid.shipped import shipped

FILES = ("training.py", "config.yaml", "README.md")


def init_project(folder: Path) -> int:
    """Write the project; its exit code. ConfigError where something else may be overwritten, or nothing written."""
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"init is {str(folder)!r}, which is not empty; allowed: a folder that is, or is not there yet"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.copyfile(shipped(f"configs/project/{name}"), folder / name)
    except OSError as error:
        raise ConfigError(
            f"init is {str(folder)!r}, where nothing can be written: {error.strerror}; give another folder"
        ) from error
    click.echo(printable(f"written: {', '.join(str(folder / name) for name in FILES)}"))
    click.echo(
        printable(f"next: cd {folder}, shard your videos as README.md says, streamvid train --config config.yaml")
    )
    return 0
