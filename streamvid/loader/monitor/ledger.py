"""Entries in the delivery ledger, created from the batches that a loader hands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from streamvid.ledger.records import LoggedBatch, LoggedSample, Position
from streamvid.ledger.writer import LedgerWriter
from streamvid.loader.delivery.delivery import Delivery, caption_variant
from streamvid.loader.delivery.pending import PendingBatch
from streamvid.loader.delivery.quarantine import refuse_inside
from streamvid.loader.delivery.requests import Selection
from streamvid.loader.mix import SampleRequest
from streamvid.loader.setup import uses_costs
from streamvid.plan import PLAN_VERSION


def open_ledger(folder: str | Path | None, selection: Selection) -> LedgerWriter | None:
    """Return the writer for a loader's ledger, or None if the loader has no ledger.

    Nothing is written before the first loop. Raises ConfigError if the folder is inside a dataset.
    """
    if folder is None:
        return None
    datasets = [part.dataset for part in selection.mix.parts]
    refuse_inside("output.ledger", Path(folder), datasets)
    return LedgerWriter(Path(folder), selection.world.rank, [dataset.url for dataset in datasets])


def plan_facts(selection: Selection, split: str) -> Mapping[str, Any]:
    """Return, as JSON, all values that determine the plan. `forecast/ledger.py` rebuilds the plan from these values."""
    earlier = selection.earlier
    return {
        "plan_version": PLAN_VERSION,
        "datasets": selection.mix.identity(),
        "split": split,
        "options": asdict(selection.options),
        "batch_sizes": dict(selection.batch_sizes),
        "costs": dict(selection.costs) if uses_costs(selection.options) else {},
        "num_ranks": selection.world.num_ranks,
        **({} if earlier is None else {"earlier": plan_facts(earlier.selection, split)}),
    }


def logged_batch(pending: PendingBatch, planned_keys: Mapping[int, str]) -> LoggedBatch:
    """Return the ledger's entry for a batch.

    planned_keys: maps the slot of each substitute to the key of the bad sample that it replaces.
    """
    plan, num_done = pending.request.position
    position = Position(plan.cursor.epoch, plan.cursor.step + num_done - 1)
    pairs = enumerate(zip(pending.request.samples, pending.deliveries, strict=True))
    return LoggedBatch(position, tuple([_logged(*pair, planned_keys.get(slot)) for slot, pair in pairs]))


def _logged(planned: SampleRequest, delivery: Delivery, planned_key: str | None) -> LoggedSample:
    part, is_text = planned.part, not delivery.part.num_bytes
    pick, row = delivery.view.pick, delivery.row
    return LoggedSample(
        part.number if part.later is None else part.later,
        row.key,
        planned.visit,
        0 if is_text else pick.start,
        0 if is_text else pick.stride,
        caption_variant(delivery),
        planned.is_repeat,
        planned_key,
    )
