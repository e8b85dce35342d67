"""Page of one step of a run. Its samples come from all datasets on the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from streamvid.errors import ConfigError
from streamvid.plan.options import Shuffle, Sync
from streamvid.plan.tail import Tail
from streamvid.preview.sample import sample_facts
from streamvid.preview.steps import StepSample, step_of
from streamvid.preview.web.pages import Card, Pages
from streamvid.preview.web.settings import Values, step_query, view_query

_NAMES = (
    "epoch",
    "step",
    "ranks",
    "batch",
    "accumulate",
    "repeats",
    "seed",
    "shuffle",
    "tail",
    "sync",
    "split",
    "where",
)


def step_page(several: Sequence[Pages], values: Values) -> str:
    """Return the page of one step.

    several: the pages of each dataset.
    """
    asked, problem, view, batches = step_query({}), None, None, []
    try:
        asked = step_query(values)
        view = step_of([pages.dataset for pages in several], asked)
        batches = [(batch, [_card(several[one.dataset], one) for one in batch.samples]) for batch in view.batches]
    except ConfigError as error:
        problem = str(error)
    first = several[0]
    return first.page(
        "step.html",
        "Step",
        "step",
        asked=asked,
        problem=problem,
        view=view,
        batches=batches,
        names=[pages.name for pages in several],
        features=[pages.features for pages in several],
        shuffles=get_args(Shuffle),
        tails=get_args(Tail),
        syncs=get_args(Sync),
        splits=list(dict.fromkeys(split for pages in several for split in pages.dataset.shards.splits)),
        values={name: values[name] for name in _NAMES if values.get(name)},
    )


def _card(pages: Pages, sample: StepSample) -> Card:
    """Return the card for a slot of the batch. It shows the first frame of the slot's visit."""
    return pages.card(sample_facts(pages.dataset, sample.place), sample.visit, view_query({"seed": str(sample.seed)}))
