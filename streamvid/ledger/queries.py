"""Ledger queries: where a sample was delivered, and which samples a model saw before a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from streamvid.ledger.history import Attempt
from streamvid.ledger.log import END
from streamvid.ledger.records import LoggedSample, Position


@dataclass(frozen=True, slots=True)
class Sighting:
    """One delivery of a sample.

    counts: False if a later attempt delivered the step again, so that the final model did not see this delivery.
    planned_only: True if the sample was planned but bad, and another sample was delivered in its place.
    """

    session: str
    rank: int
    epoch: int
    step: int
    slot: int
    dataset: str
    sample: LoggedSample
    counts: bool
    planned_only: bool

    def to_json(self) -> dict[str, Any]:
        """Return the sighting as one flat mapping."""
        record = asdict(self)
        record.pop("sample")
        return record | {name: value for name, value in self.sample._asdict().items() if name != "dataset"}


def sightings(attempts: Sequence[Attempt], key: str) -> Iterator[Sighting]:
    """Yield every delivery of the sample with this key, attempt by attempt and rank by rank."""
    for attempt in attempts:
        for rank in sorted(attempt.logs):
            for log, batch, counts in attempt.batches(rank):
                for slot, sample in enumerate(batch.samples):
                    if key in (sample.key, sample.substituted_for):
                        yield Sighting(
                            session=log.session.name,
                            rank=rank,
                            epoch=batch.position.epoch,
                            step=batch.position.step,
                            slot=slot,
                            dataset=log.url(sample.dataset),
                            sample=sample,
                            counts=counts,
                            planned_only=sample.key != key,
                        )


def seen_before(attempts: Sequence[Attempt], end: Position) -> Counter[tuple[str, str]]:
    """Count the deliveries of each (dataset, key) before a position, except deliveries that were replaced later."""
    found: Counter[tuple[str, str]] = Counter()
    for attempt in attempts:
        for rank in sorted(attempt.logs):
            for stretch, batches in attempt.deliveries(rank):
                for batch in batches:
                    if batch.position < end:
                        found.update((stretch.log.url(sample.dataset), sample.key) for sample in batch.samples)
    return found


def position_of(attempts: Sequence[Attempt], num_steps: int) -> Position:
    """Return the position after the first `num_steps` steps of a run, counted over all epochs in the ledger.

    A step that was delivered several times counts once.
    """
    ends: dict[int, int] = {}
    stretches = [one for attempt in attempts for rank in attempt.logs for one in attempt.stretches(rank)]
    for one in stretches:
        for epoch, end in one.loop.ends.items():
            if epoch <= one.until.epoch:
                kept = end if epoch < one.until.epoch else min(end, one.until.step)
                ends[epoch] = max(ends.get(epoch, 0), kept)
    for epoch in sorted(ends):
        if num_steps <= ends[epoch]:
            return Position(epoch, num_steps)
        num_steps -= ends[epoch]
    return END
