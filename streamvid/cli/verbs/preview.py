"""streamvid preview: show a dataset in the browser, as the model sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from streamvid.cli.console import is_quiet
from streamvid.cli.flags import LOCATION, GroupedCommand, option_flags
from streamvid.cli.main import EXIT_INTERRUPTED
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
  streamvid preview ds/ --features latents/
  streamvid preview movies/ photos/

The server only reads. It requires the `preview` extra: pip install 'streamvid[preview]'."""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@click.argument("datasets", type=LOCATION, nargs=-1, required=True, metavar="DATASET...")
@option_flags(PreviewOptions, "options")
@storage_flags
def command(datasets: tuple[str, ...], options: PreviewOptions, storage: StorageOptions) -> None:
    """Show a dataset in the browser: its contents, its samples with the frames that a model gets, the batches of any
    step, and the metrics of a run.

    With several datasets, a step mixes samples from all of them.
    """
    from streamvid.dataset.versions.open import open_dataset
    from streamvid.preview.features import open_features

    try:
        from streamvid.preview.web.server import serve
    except ImportError as error:
        raise ConfigError(
            f"the preview requires the {error.name} package; install it with: pip install 'streamvid[preview]'"
        ) from error
    opened = [open_dataset(dataset, storage=storage) for dataset in datasets]
    features = open_features(opened, options, storage)

    def started(address: str) -> None:
        names = " and ".join(one.url for one in opened)
        click.echo(address if is_quiet() else f"preview of {names} at {address}; press Ctrl-C to stop")

    try:
        serve(opened, features, options, started)
    except KeyboardInterrupt:
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from None  # the usual end, which needs no message
