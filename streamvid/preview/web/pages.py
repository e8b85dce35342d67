"""Pages of the preview: each method reads what a page needs and renders its template."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from streamvid.dataset.reader import Dataset
from streamvid.errors import ConfigError, SampleError, StreamvidError
from streamvid.forecast.contents import DatasetContents, contents_of
from streamvid.forecast.histograms import Histograms, figure_labels, histograms_of
from streamvid.loader.view.view import Spatial, Temporal
from streamvid.plan.options import Shuffle, Sync
from streamvid.plan.tail import Tail
from streamvid.preview import charts
from streamvid.preview.audio import waveform_of
from streamvid.preview.browse import Browser, RowPage, RowQuery
from streamvid.preview.deliver import DeliveredSample, Deliverer
from streamvid.preview.find import SamplePlace, find_keys, place_of
from streamvid.preview.render import path, query, render
from streamvid.preview.runs import read_run
from streamvid.preview.sample import SampleFacts, checksum_of, clip_range, read_clip, sample_facts, timeline_of
from streamvid.preview.steps import step_of
from streamvid.preview.web.settings import Values, ViewQuery, row_query, step_query, view_query, whole

ROWS_PER_PAGE = 24
_MAX_CHECKED = 64 * 2**20
_PLAYABLE = {"mp4": {"h264", "av1", "vp9"}, "webm": {"vp8", "vp9", "av1"}, "mkv": {"h264", "vp8", "vp9", "av1"}}
_TYPES = {"mp4": "video/mp4", "webm": "video/webm", "mkv": "video/x-matroska"}


@dataclass(frozen=True, slots=True)
class Card:
    """One sample of a grid. visit: visit that a link shows; None for the default."""

    facts: SampleFacts
    link: str
    poster: str
    clip: str | None
    strip: str | None
    is_repeat: bool = False


class Pages:
    """Pages of one dataset. Thread-safe."""

    def __init__(self, dataset: Dataset, run: Path | None = None) -> None:
        self.dataset, self.run = dataset, run
        self.browser, self.deliverer = Browser(dataset), Deliverer(dataset)
        self._lock = threading.Lock()
        self._version = dataset.manifest.fingerprints.content[:12]

    @cached_property
    def contents(self) -> DatasetContents:
        """Contents of the dataset."""
        return contents_of(self.dataset)

    def histograms(self) -> Histograms:
        """Return the histograms, which are computed on first use."""
        with self._lock:  # two requests would read the index twice
            return self._histograms

    @cached_property
    def _histograms(self) -> Histograms:
        return histograms_of(self.dataset)

    # Pages.

    def overview(self) -> str:
        """Return the page that shows the whole dataset."""
        contents = self.contents
        return self._page(
            "overview.html",
            "Overview",
            "overview",
            contents=contents,
            areas=charts.bucket_areas(contents.buckets),
            labels=figure_labels(self.dataset),
        )

    def figures(self) -> str:
        """Return the histograms as a part of the overview."""
        return render("figures.html", histograms=self.histograms(), bars=charts.bars)

    def samples(self, values: Values) -> str:
        """Return the page of a bucket, or of all samples, as a grid."""
        problem, page, asked = None, RowPage((), 0, 0), row_query(values)
        try:
            page = self._rows(values)
        except ConfigError as error:
            problem = str(error)
        return self._page(
            "samples.html",
            asked.bucket or "Samples",
            "samples",
            asked=asked,
            where=self.dataset.where,
            problem=problem,
            buckets=self.dataset.shards.bucket_id.names,
            splits=self.dataset.shards.splits,
            columns=self.browser.sort_columns,
            **self._grid(values, page),
        )

    def rows(self, values: Values) -> str:
        """Return the next rows of a grid, as a part of the page."""
        return render("rows.html", **self._grid(values, self._rows(values)), **self._common())

    def _rows(self, values: Values) -> RowPage:
        first = whole(values, "from", 0, 0, 1 << 40)
        return self.browser.page(row_query(values), first, ROWS_PER_PAGE)

    def _grid(self, values: Values, page: RowPage) -> dict[str, Any]:
        asked, bucket = row_query(values), None
        if asked.bucket is not None and page.rows:
            bucket = self.dataset.manifest.bucket(asked.bucket)
        more = None
        if page.next_first is not None:
            more = query(row_values(asked) | {"from": page.next_first})
        return {"page": page, "cards": [self.card(one) for one in page.rows], "bucket": bucket, "more": more}

    def card(self, facts: SampleFacts, visit: int | None = None, asked: ViewQuery | None = None) -> Card:
        """Return the card of a sample. visit: visit whose first frame is shown, in place of a frame of the clip."""
        place, extension = facts.place, str(facts.values.get("clip_extension"))
        at = (place.shard.bucket_id, place.shard.number, place.index)
        shown = {} if asked is None else asked.to_query()
        is_text = self.dataset.manifest.bucket(place.shard.bucket_id).is_text
        version = query({"v": self._version})
        plays = facts.values.get("codec") in _PLAYABLE.get(extension, set())
        poster = path("poster", *at) + version
        if visit is not None:
            poster = path("frame", *at, 0) + query({**shown, "visit": visit, "width": 320, "v": self._version})
        return Card(
            facts,
            path("sample", *at) + query({**shown, "visit": visit or None}),
            "" if is_text else poster,
            path("clip", *at) + version if plays else None,
            None if plays or is_text or facts.values.get("fps") in (0.0, None) else path("strip", *at) + version,
        )

    def sample(self, place: SamplePlace, values: Values) -> str:
        """Return the page of one sample."""
        dataset, facts, problem, shown = self.dataset, sample_facts(self.dataset, place), None, None
        try:
            asked = view_query(values)
        except ConfigError as error:
            asked, problem = view_query({}), str(error)
        if problem is None:
            try:
                shown = self.deliverer.deliver(place, asked.visit, asked.settings)
            except StreamvidError as error:
                problem = str(error)
        bucket = dataset.manifest.bucket(place.shard.bucket_id)
        at = (place.shard.bucket_id, place.shard.number, place.index)
        part = clip_range(facts)
        is_small = part.num_bytes <= _MAX_CHECKED
        return self._page(
            "sample.html",
            facts.key,
            "samples",
            facts=facts,
            asked=asked,
            problem=problem,
            shown=shown,
            bucket=bucket,
            part=part,
            checksum=checksum_of(dataset, part) if is_small or values.get("verify") else None,
            timeline=None if bucket.is_text else timeline_of(dataset, facts),
            geometry=None if shown is None or shown.frames is None else self._geometry(facts, shown, asked),
            card=self.card(facts),
            frame=path("frame", *at),
            audio=path("audio", *at)
            if dataset.manifest.clips == "copy" and facts.number("window_num_frames") > 1
            else None,
            values=asked.to_query(v=self._version),
            temporals=get_args(Temporal),
            spatials=get_args(Spatial),
            neighbors=self._neighbors(place),
            caption_columns=self._caption_columns(),
            is_native=dataset.manifest.clips == "native",
        )

    def _geometry(self, facts: SampleFacts, shown: DeliveredSample, asked: ViewQuery) -> dict[str, Any]:
        """Return the size of the source's frames, the crop, and the part that every visit keeps."""
        width, height = facts.number("clip_width"), facts.number("clip_height")
        assert shown.frames is not None
        target, view = (shown.frames.shape[1], shown.frames.shape[2]), asked.settings.view
        kept = None
        if view.spatial in ("random_crop", "rand_size_crop"):
            smallest = 1.0 if view.spatial_scale is None else view.spatial_scale[0]
            kept = charts.kept_box(width, height, target, smallest)
        crop = charts.crop_box(width, height, target, shown.delivery.view.crop)
        return {"width": width, "height": height, "crop": crop, "kept": kept, "target": target}

    def _caption_columns(self) -> tuple[str, ...]:
        """Return the columns from which captions can be taken: `text`, and the user's own columns of texts."""
        schema = self.dataset.samples_schema
        own = (
            name for name in self.dataset.user_columns if str(schema.field(self.dataset.column(name)).type) == "string"
        )
        return ("text", *(name for name in own if name != "text"))

    def _neighbors(self, place: SamplePlace) -> tuple[str | None, str | None]:
        """Return the paths of the previous and the next sample of the shard, within the view."""
        at, members = (place.shard.bucket_id, place.shard.number), self.browser.members(place.row)
        before, after = members[members < place.index], members[members > place.index]
        return (
            path("sample", *at, before[-1]) if len(before) else None,
            path("sample", *at, after[0]) if len(after) else None,
        )

    def audio(self, place: SamplePlace) -> str:
        """Return the waveform of a sample's clip, as a part of its page."""
        facts = sample_facts(self.dataset, place)
        part, duration, found, problem = clip_range(facts), facts.values.get("duration_seconds"), None, None
        if part.num_bytes <= _MAX_CHECKED and isinstance(duration, float):
            try:
                found = waveform_of(read_clip(self.dataset, part), duration)
            except SampleError as error:
                problem = str(error)
        return render("audio.html", waveform=found, problem=problem)

    def key(self, key: str) -> str:
        """Return the path of the page of the sample with this key."""
        (place,) = find_keys(self.dataset, [key])
        return path("sample", place.shard.bucket_id, place.shard.number, place.index)

    def step(self, values: Values) -> str:
        """Return the page of one step."""
        asked, problem, view = step_query({}), None, None
        cards: list[tuple[Any, list[Card]]] = []
        try:
            asked = step_query(values)
            view = step_of(self.dataset, asked)
            of_seed = view_query({"seed": str(asked.seed)})
            cards = [
                (batch, [self._step_card(one.place, one.visit, of_seed) for one in batch.samples])
                for batch in view.batches
            ]
        except ConfigError as error:
            problem = str(error)
        return self._page(
            "step.html",
            "Step",
            "step",
            asked=asked,
            problem=problem,
            view=view,
            batches=cards,
            shuffles=get_args(Shuffle),
            tails=get_args(Tail),
            syncs=get_args(Sync),
            splits=self.dataset.shards.splits,
            values=step_values(values),
        )

    def _step_card(self, place: SamplePlace, visit: int, asked: ViewQuery) -> Card:
        return self.card(sample_facts(self.dataset, place), visit, asked)

    def training(self) -> str:
        """Return the page of the run."""
        return self._page("run.html", "Run", "run", body=self.training_figures())

    def training_figures(self) -> Any:
        """Return the run's curves and samples, as a part of the page."""
        from markupsafe import Markup

        assert self.run is not None, "the server answers without a page if there is no run"
        return Markup(render("curves.html", run=read_run(self.run), folder=self.run))  # noqa: S704 - rendered with escapes

    def failure(self, message: str) -> str:
        """Return a page that shows an error."""
        return self._page("error.html", "Error", "", message=message)

    def place(self, bucket_id: str, number: int, index: int) -> SamplePlace:
        """Return the location of a sample."""
        return place_of(self.dataset, bucket_id, number, index)

    def _page(self, template: str, title: str, active: str, **values: Any) -> str:
        return render(template, title=title, active=active, **values, **self._common())

    def _common(self) -> dict[str, Any]:
        return {"url": self.dataset.url, "has_run": self.run is not None, "version": self._version}


def row_values(asked: RowQuery) -> dict[str, object]:
    """Return the values of an address that name this selection."""
    named = asdict(asked)
    return {**{name: named[name] for name in ("bucket", "split", "where", "sort")}, "desc": asked.descending}


def step_values(values: Values) -> dict[str, object]:
    """Return the values of an address that name a step, without those that are not known."""
    names = ("epoch", "step", "ranks", "batch", "seed", "shuffle", "tail", "sync", "split", "where")
    return {name: values[name] for name in names if values.get(name)}


def media_type(extension: str) -> str | None:
    """Return the type under which a stored clip is served, or None if browsers cannot play it."""
    return _TYPES.get(extension)
