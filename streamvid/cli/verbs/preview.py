"""streamvid preview: show a dataset in the browser, as the model sees it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from streamvid.cli.console import is_quiet
from streamvid.cli.flags import LOCATION, GroupedCommand, option_flags
from streamvid.cli.shared_flags import storage_flags
from streamvid.errors import ConfigError
from streamvid.preview.options import PreviewOptions

if TYPE_CHECKING:
    from streamvid.storage import StorageOptions

_EPILOG = """\b
Examples:
  streamvid preview ds/
  streamvid preview s3://bucket/ds --port 0
  streamvid preview ds/ --run runs/first

The server only reads. It needs the packages of the extra: pip install 'streamvid[preview]'."""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@click.argument("dataset", type=LOCATION)
@option_flags(PreviewOptions, "options")
@storage_flags
def command(dataset: str, options: PreviewOptions, storage: StorageOptions) -> None:
    """Show a dataset in the browser: its contents, its samples with the frames that a model gets, the batches of any
    step, and the metrics of a run.
    """
    from streamvid.dataset.versions.open import open_dataset

    try:
        from streamvid.preview.web.server import serve
    except ImportError as error:
        raise ConfigError(
            f"the preview needs the package {error.name}; install it with: pip install 'streamvid[preview]'"
        ) from error
    opened = open_dataset(dataset, storage=storage)

    def started(address: str) -> None:
        click.echo(address if is_quiet() else f"preview of {opened.url} at {address}; press Ctrl-C to stop")

    with contextlib.suppress(KeyboardInterrupt):  # the usual end
        serve(opened, options, started)
