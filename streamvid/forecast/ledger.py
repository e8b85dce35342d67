"""Ledger verification: logged deliveries are compared, batch by batch, with the plan that the loader computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

from streamvid.dataset.manifest import Manifest, read_manifest
from streamvid.dataset.reader import Dataset
from streamvid.dataset.versions.open import history
from streamvid.errors import ConfigError, SourceError, StateError, StreamvidError
from streamvid.ledger.history import Attempt, Stretch
from streamvid.ledger.log import END
from streamvid.ledger.records import LoggedBatch, LoggedSample, Position
from streamvid.loader.delivery.index_rows import IndexRows
from streamvid.loader.delivery.requests import BatchRequest, Selection
from streamvid.loader.mix import DataArguments, DatasetConfig
from streamvid.loader.options import ScheduleOptions
from streamvid.loader.setup import DeliveryArguments, PlanArguments, Setup, set_up
from streamvid.loader.state import differences
from streamvid.loader.versions import after, start_in, with_earlier
from streamvid.plan import PLAN_VERSION, Cursor, PlanOptions, World
from streamvid.plan.versions.continued import AnyPlan

Progress: TypeAlias = Callable[[str, int, int], None]

MAX_DIFFERENCES = 1000
"""Maximum number of differences that a report lists. All differences are counted."""

_OTHER_DATA = (
    "the ledger belongs to different data: {}. Pass the datasets and versions that the run used, in the order in which "
    "its loader received them"
)
_DIGITS = 12  # of a fingerprint in a message
_MAX_EPOCHS = 10_000  # between the end of a log and the position of the next attempt


@dataclass(frozen=True, slots=True)
class EpochTotals:
    """Totals for one epoch, without replaced deliveries. `num_samples` includes repeats and substitutes."""

    epoch: int
    num_samples: int = 0
    num_repeats: int = 0
    num_substituted: int = 0


@dataclass(frozen=True, slots=True)
class LedgerReport:
    """Result of verifying a ledger.

    num_replaced: number of batches that are ignored, because a later attempt delivered them again.
    num_unrecorded: number of batches that a resumed run counts as delivered, but that are missing at the end of the
        log.
    differences: deliveries that differ from the plan, as text; at most 1,000.
    """

    num_attempts: int
    num_batches: int
    num_replaced: int
    num_unrecorded: int
    epochs: tuple[EpochTotals, ...]
    num_differences: int
    differences: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """True if the run delivered exactly the planned samples, up to the step that it reached."""
        return not self.num_differences and not self.num_unrecorded

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {**asdict(self), "is_right": self.is_right}


@dataclass(slots=True)
class _Findings:
    num_batches: int = 0
    num_unrecorded: int = 0
    num_differences: int = 0
    epochs: dict[int, EpochTotals] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)

    def differ(self, text: str) -> None:
        self.num_differences += 1
        if len(self.differences) < MAX_DIFFERENCES:
            self.differences.append(text)

    def count(self, batch: LoggedBatch) -> None:
        epoch = batch.position.epoch
        before = self.epochs.get(epoch, EpochTotals(epoch))
        self.num_batches += 1
        self.epochs[epoch] = EpochTotals(
            epoch,
            before.num_samples + len(batch.samples),
            before.num_repeats + sum(sample.is_repeat for sample in batch.samples),
            before.num_substituted + sum(sample.substituted_for is not None for sample in batch.samples),
        )


def check_ledger(attempts: Sequence[Attempt], datasets: Sequence[Dataset], progress: Progress) -> LedgerReport:
    """Verify that the deliveries match the plan, and that each attempt begins where the previous attempt ended.

    Deliveries that a later attempt replaced are ignored. If all deliveries from an attempt were replaced, its start
    is not verified either. Memory use does not grow with the size of the ledger.

    datasets: the datasets of the run, in the order in which its loader received them.
    Raises SourceError if the ledger belongs to different datasets. Also raises the same errors as VideoLoader.
    """
    findings, versions = _Findings(), [_Versions(dataset) for dataset in datasets]
    total, done = sum(attempt.num_ranks for attempt in attempts), 0
    before: tuple[Attempt, Selection] | None = None
    for attempt in attempts:
        selection, rows = _planned_selection(attempt, versions), IndexRows()  # rows of other versions differ
        counts = attempt.start < attempt.until  # else everything was delivered again
        if before is not None and counts:
            _check_start(findings, *before, attempt, selection)
        for rank in range(attempt.num_ranks):
            progress("ledger", done, total)
            world = World(rank, attempt.num_ranks)
            _check_rank(findings, attempt, replace(selection, world=world), rows)
            done += 1
        if counts:
            before = attempt, selection
    progress("ledger", total, total)
    return LedgerReport(
        num_attempts=len(attempts),
        num_batches=findings.num_batches,
        num_replaced=sum(attempt.num_logged for attempt in attempts) - findings.num_batches,
        num_unrecorded=findings.num_unrecorded,
        epochs=tuple(findings.epochs[epoch] for epoch in sorted(findings.epochs)),
        num_differences=findings.num_differences,
        differences=tuple(findings.differences),
    )


# ---------------------------------------------------------------------------------------------- the plan


def _planned_selection(attempt: Attempt, versions: Sequence[_Versions]) -> Selection:
    """Return the inputs for the plan that an attempt used.

    Raises SourceError if the run used different datasets.
    """
    setup, earlier = _planned_setup(attempt, attempt.plan, versions), attempt.plan.get("earlier")
    return (setup if earlier is None else after(setup, _planned_setup(attempt, earlier, versions))).selection


def _planned_setup(attempt: Attempt, plan: Mapping[str, Any], versions: Sequence[_Versions]) -> Setup:
    if plan.get("plan_version") != PLAN_VERSION:
        raise SourceError(
            f"the ledger was written with plan version {plan.get('plan_version')!r}, but only version {PLAN_VERSION} "
            "can be verified; use the streamvid version that wrote the ledger"
        )
    try:
        found = [dict(one) for one in plan["datasets"]]
        configs = _configs(found, versions)
        arguments = _arguments(PlanOptions(**plan["options"]), plan["batch_sizes"], attempt.num_ranks)
        setup = set_up(DataArguments(configs, plan["split"]), arguments, DeliveryArguments(num_workers=0))
        costs = plan["costs"] or setup.selection.costs
    except (KeyError, TypeError, AttributeError, ConfigError) as error:
        raise SourceError(f"session {attempt.sessions[0]} of the ledger is damaged: {error}") from error
    if differing := differences({"datasets": found}, {"datasets": setup.mix.identity()}):
        raise SourceError(_OTHER_DATA.format("; ".join(differing).replace("in the state", "in the ledger")))
    return replace(setup, selection=replace(setup.selection, costs=costs))


def _configs(found: Sequence[Mapping[str, Any]], versions: Sequence[_Versions]) -> list[DatasetConfig]:
    if len(found) != len(versions):
        raise SourceError(
            f"the number of datasets must be {len(found)}, as in the run, but is {len(versions)}; pass the datasets "
            "of the run in the order in which its loader received them"
        )
    return [
        DatasetConfig(
            of_dataset.with_samples(one["samples_fingerprint"]),
            num_repeats=one["num_repeats"],
            where=one["where"],
            name=one.get("name"),
        )
        for of_dataset, one in zip(versions, found, strict=True)
    ]


@dataclass(frozen=True)
class _Versions:
    """Versions of a dataset that have not been deleted."""

    dataset: Dataset

    @cached_property
    def _kept(self) -> Mapping[str, Manifest]:
        """Mapping from each samples fingerprint to the newest version that has it.

        The history is read only once, because a run may have followed many versions.
        """
        found: dict[str, Manifest] = {}
        for manifest in history(self.dataset.store, read_manifest(self.dataset.store)):
            found.setdefault(manifest.fingerprints.samples, manifest)
        return found

    def with_samples(self, fingerprint: str) -> Dataset:
        """Return the version with this samples fingerprint. Raises SourceError if no such version exists."""
        mine = self.dataset.manifest.fingerprints.samples
        if mine == fingerprint:
            return self.dataset
        if fingerprint in self._kept:
            return Dataset(self.dataset.store, manifest=self._kept[fingerprint])
        shown = f"{mine[:_DIGITS]!r}, not {fingerprint[:_DIGITS]!r}"
        raise SourceError(_OTHER_DATA.format(f"samples_fingerprint of {self.dataset.url} is {shown}"))


def _arguments(options: PlanOptions, batch_sizes: Mapping[str, int], num_ranks: int) -> PlanArguments:
    return PlanArguments(
        batch_size=batch_sizes,
        world=World(0, num_ranks),
        seed=options.seed,
        shuffle=options.shuffle,
        tail=options.tail,
        sync=options.sync,
        accumulate=options.accumulate,
        schedule=ScheduleOptions(options.window, options.order, options.shard_locality),
    )


def _check_start(
    findings: _Findings, earlier: Attempt, selection: Selection, attempt: Attempt, later: Selection
) -> None:
    """Verify that an attempt began at a position that the earlier attempt reached, so that no sample is lost.

    If the two attempts use different dataset versions, the later attempt must begin where an epoch begins.
    """
    try:
        plan = _plan_of(selection, _last_start(earlier, attempt.start), attempt.start)
        cursor = Cursor.from_json(attempt.cursor)
        is_other = attempt.plan["datasets"] != earlier.plan["datasets"]
        if not cursor.step and (is_other or cursor.carried):  # an epoch carries only from another version
            here = _start_in(later, selection, plan)
        else:
            here = plan.cursor_after(attempt.start.step - plan.cursor.step)
        start = later.plan(cursor).cursor_after(0)
    except StreamvidError as error:
        findings.differ(f"attempt {attempt.number}: its position does not exist: {error}")
        return
    pairs = ((start.positions, here.positions), (start.carried, here.carried), (here.carried, start.carried))
    wrong = sorted({name for found, right in pairs for name, place in found.items() if right.get(name) != place})
    if wrong:
        findings.differ(
            f"attempt {attempt.number} began at epoch {attempt.start.epoch}, step {attempt.start.step}, but its "
            f"positions differ from the previous attempt's positions at this step (buckets: "
            f"{', '.join(wrong[:5])}); it started from another run's state, from an earlier attempt's "
            "state, or without a state"
        )


def _start_in(later: Selection, before: Selection, plan: AnyPlan) -> Cursor:
    """Return the starting position of the epoch in `plan` if the epoch uses a later dataset version.

    The position omits samples that the later version removed.
    """
    if later.earlier is None:  # no carried sample was left in the state from which the attempt resumed
        later = with_earlier(later, before)
    return later.plan(start_in(later, plan)).cursor_after(0)


def _last_start(attempt: Attempt, before: Position) -> Cursor:
    """Return the last position before `before` at which the attempt switched to another dataset version.

    A switch between two versions that contain the same samples does not begin a new attempt.
    """
    loops = [one.loop for rank in attempt.logs for one in attempt.stretches(rank)]
    begun = [
        loop.start
        for loop in loops
        if loop.start.cursor.get("carried") and not loop.start.position.step and loop.start.position < before
    ]
    last = max(begun, key=lambda start: start.position, default=None)
    return Cursor.from_json(attempt.cursor if last is None else last.cursor)


def _plan_of(selection: Selection, cursor: Cursor, position: Position) -> AnyPlan:
    """Return the plan for the epoch that contains `position`, in a run that began at `cursor`."""
    plan = selection.plan(cursor)
    if position.epoch - cursor.epoch > _MAX_EPOCHS:
        raise StateError(
            f"epoch {position.epoch} cannot be verified, because it is more than {_MAX_EPOCHS} epochs after epoch "
            f"{cursor.epoch}"
        )
    while plan.cursor.epoch < position.epoch:
        plan = selection.plan(plan.next_epoch())
    return plan


# ---------------------------------------------------------------------------------------------- one rank


def _check_rank(findings: _Findings, attempt: Attempt, selection: Selection, rows: IndexRows) -> None:
    rank, reached = selection.world.rank, attempt.start
    for stretch, batches in attempt.deliveries(rank):
        reached = max(reached, _check_stretch(findings, stretch, batches, selection, rows))
    if attempt.until == END or reached >= attempt.until:
        return
    findings.num_unrecorded += _num_batches(selection, attempt, reached, attempt.until)


def _num_batches(selection: Selection, attempt: Attempt, start: Position, until: Position) -> int:
    """Return how many batches are planned for a rank between two positions."""
    plan, rank = selection.plan(Cursor.from_json(attempt.cursor)), selection.world.rank
    total = 0
    while plan.cursor.epoch <= until.epoch and plan.cursor.epoch - attempt.start.epoch < _MAX_EPOCHS:
        first = start.step if plan.cursor.epoch == start.epoch else 0
        ends_here = plan.cursor.epoch == until.epoch
        last = until.step if ends_here else plan.num_steps
        if plan.cursor.epoch >= start.epoch:
            left = [plan.num_batches_left(rank, _clipped(plan, step)) for step in (first, last)]
            total += left[0] - left[1]
        plan = selection.plan(plan.next_epoch())
    return total


def _clipped(plan: AnyPlan, step: int) -> int:
    return min(max(0, step - plan.cursor.step), plan.num_steps_left)


def _check_stretch(
    findings: _Findings, stretch: Stretch, batches: Iterator[LoggedBatch], selection: Selection, rows: IndexRows
) -> Position:
    """Compare the deliveries from one loop with the plan. Return the position after the last delivery."""
    where = f"rank {stretch.log.rank}, session {stretch.log.session.name}"
    reached = stretch.start
    try:
        plan = selection.plan(Cursor.from_json(stretch.loop.start.cursor))
        planned = _planned(selection, plan)
        position, request = next(planned, (END, None))
        for batch in batches:
            findings.count(batch)
            while position < batch.position:
                if position >= stretch.start:
                    findings.differ(f"{where}: {_at(position)} is missing")
                position, request = next(planned, (END, None))
            if request is None or position != batch.position:
                findings.differ(f"{where}: {_at(batch.position)} is not in the plan")
                continue
            _check_batch(findings, where, batch, request, rows)
            reached = Position(position.epoch, position.step + 1)
            position, request = next(planned, (END, None))
    except StateError as error:
        findings.differ(f"{where}: its position does not exist: {error}")
    return reached


def _planned(selection: Selection, plan: AnyPlan) -> Iterator[tuple[Position, BatchRequest]]:
    for request in selection.requests(plan, None):
        own, num_done = request.position
        yield Position(own.cursor.epoch, own.cursor.step + num_done - 1), request


def _check_batch(findings: _Findings, where: str, batch: LoggedBatch, request: BatchRequest, rows: IndexRows) -> None:
    if len(batch.samples) != len(request.samples):
        findings.differ(
            f"{where}: {_at(batch.position)} has {len(batch.samples)} samples, but {len(request.samples)} are planned"
        )
        return
    for slot, (logged, sample) in enumerate(zip(batch.samples, request.samples, strict=True)):
        part = sample.part
        wanted = (
            part.number if part.later is None else part.later,
            rows.row(sample, request.bucket).key,
            sample.visit,
            sample.is_repeat,
        )
        if _identity(logged) != wanted:
            findings.differ(
                f"{where}: {_at(batch.position)}, slot {slot} delivered {_named(_identity(logged))} instead of "
                f"{_named(wanted)}"
            )


_Identity: TypeAlias = tuple[int, str, int, bool]


def _identity(logged: LoggedSample) -> _Identity:
    return logged.dataset, logged.substituted_for or logged.key, logged.visit, logged.is_repeat


def _named(identity: _Identity) -> str:
    dataset, key, visit, is_repeat = identity
    return f"{key} (dataset {dataset}, visit {visit}{', a repeat' if is_repeat else ''})"


def _at(position: Position) -> str:
    return f"epoch {position.epoch}, step {position.step}"
