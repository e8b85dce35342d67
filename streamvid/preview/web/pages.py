"""Pages of one dataset: each method reads what a page needs and renders its template.

The page of a step is in `steps.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from streamvid.dataset.features.sidecar import Sidecar
from streamvid.dataset.reader import Dataset
from streamvid.errors import ConfigError, SampleError, StreamvidError
from streamvid.forecast.contents import DatasetContents, contents_of
from streamvid.forecast.histograms import Histograms, figure_labels, histograms_of
from streamvid.loader.view.view import RandomChoices, Spatial, Temporal
from streamvid.preview import charts
from streamvid.preview.audio import waveform_of
from streamvid.preview.browse import Browser, RowPage, RowQuery
from streamvid.preview.deliver import DeliveredSample, Deliverer
from streamvid.preview.features import VisitFeatures, features_of, settings_of
from streamvid.preview.find import SamplePlace, find_keys, place_of
from streamvid.preview.render import path, query, render
from streamvid.preview.runs import read_run
from streamvid.preview.sample import SampleFacts, checksum_of, clip_range, read_clip, sample_facts, timeline_of
from streamvid.preview.web.settings import MAX_VISIT, Values, ViewQuery, row_query, view_query, whole

ROWS_PER_PAGE = 24
_MAX_CHECKED = 64 * 2**20
_PLAYABLE = {"mp4": {"h264", "av1", "vp9"}, "webm": {"vp8", "vp9", "av1"}, "mkv": {"h264", "vp8", "vp9", "av1"}}
_TYPES = {"mp4": "video/mp4", "webm": "video/webm", "mkv": "video/x-matroska"}


@dataclass(frozen=True, slots=True)
class Card:
    """One sample in a grid.

    visit: visit that the card links to; None for the default visit.
    """

    facts: SampleFacts
    link: str
    poster: str
    clip: str | None
    strip: str | None
    is_repeat: bool = False


@dataclass(frozen=True, slots=True)
class _Visit:
    """Visit that is shown on a sample's page, or the reason why the visit cannot be shown."""

    asked: ViewQuery
    problem: str | None
    features: VisitFeatures | None = None
    shown: DeliveredSample | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """Link in the page header to one of the server's datasets."""

    root: str
    name: str


class Pages:
    """Pages of one dataset. Thread-safe.

    features: features that a loader delivers in place of the clips, or None.
    root: prefix of the paths of all pages.
    datasets: links to the pages of all datasets on the server.
    """

    def __init__(
        self,
        dataset: Dataset,
        run: Path | None = None,
        features: Sidecar | None = None,
        root: str = "",
        datasets: Sequence[Link] = (),
    ) -> None:
        self.dataset, self.run, self.features, self.root = dataset, run, features, root
        self.browser, self.deliverer = Browser(dataset), Deliverer(dataset)
        self._datasets = tuple(datasets)
        self._lock = threading.Lock()
        self._version = dataset.manifest.fingerprints.content[:12]

    @property
    def name(self) -> str:
        """Short name of the dataset, unique on this server."""
        return next((link.name for link in self._datasets if link.root == self.root), self.dataset.url)

    @cached_property
    def contents(self) -> DatasetContents:
        """Summary of the dataset's contents, read on first use."""
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
        return self.page(
            "overview.html",
            "Overview",
            "overview",
            contents=contents,
            areas=charts.bucket_areas(contents.buckets),
            labels=figure_labels(self.dataset),
        )

    def figures(self) -> str:
        """Return the part of the overview that shows the histograms."""
        return render("figures.html", histograms=self.histograms(), bars=charts.bars)

    def samples(self, values: Values) -> str:
        """Return the grid page for one bucket or for all samples."""
        problem, page, asked = None, RowPage((), 0, 0), row_query(values)
        try:
            page = self._rows(values)
        except ConfigError as error:
            problem = str(error)
        return self.page(
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
        """Return the part of a page that contains the next rows of a grid."""
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
        """Return the card for a sample.

        visit: visit whose first frame is shown instead of a frame from the clip.
        """
        place, extension = facts.place, str(facts.values.get("clip_extension"))
        at = (place.shard.bucket_id, place.shard.number, place.index)
        shown = {} if asked is None else asked.to_query()
        has_pictures = self.dataset.manifest.bucket(place.shard.bucket_id).has_pictures
        version = query({"v": self._version})
        plays = facts.values.get("codec") in _PLAYABLE.get(extension, set())
        poster = self.path("poster", *at) + version
        if visit is not None:
            poster = self.path("frame", *at, 0) + query({**shown, "visit": visit, "width": 320, "v": self._version})
        return Card(
            facts,
            self.path("sample", *at) + query({**shown, "visit": visit or None}),
            poster if has_pictures else "",
            self.path("clip", *at) + version if plays else None,
            None if plays or not has_pictures or not facts.values.get("fps") else self.path("strip", *at) + version,
        )

    def sample(self, place: SamplePlace, values: Values) -> str:
        """Return the page of one sample."""
        dataset, facts, found = self.dataset, sample_facts(self.dataset, place), self._visit(place, values)
        asked, shown, part = found.asked, found.shown, clip_range(facts)
        bucket = dataset.manifest.bucket(place.shard.bucket_id)
        at = (place.shard.bucket_id, place.shard.number, place.index)
        is_checked = part.num_bytes <= _MAX_CHECKED or values.get("verify")
        settings = {"visit": asked.visit or None} if self.features else asked.to_query()
        return self.page(
            "sample.html",
            facts.key,
            "samples",
            facts=facts,
            asked=asked,
            problem=found.problem,
            shown=shown,
            features=found.features,
            made_with=self.features,
            noise_seed=RandomChoices.of(asked.settings.seed, facts.key, asked.visit).sample_seed(),
            bucket=bucket,
            part=part,
            checksum=checksum_of(dataset, part) if is_checked else None,
            timeline=timeline_of(dataset, facts) if bucket.has_pictures else None,
            geometry=None if shown is None or shown.frames is None else self._geometry(facts, shown, asked),
            card=self.card(facts),
            frame=self.path("frame", *at),
            audio=self.path("audio", *at) if facts.values.get("has_audio") is True else None,
            settings=settings,
            values=settings | {"v": self._version},
            temporals=get_args(Temporal),
            spatials=get_args(Spatial),
            neighbors=self._neighbors(place),
            caption_columns=self._caption_columns(),
            is_native=dataset.manifest.clips == "native",
        )

    def _visit(self, place: SamplePlace, values: Values) -> _Visit:
        try:
            asked = self.asked(values)
        except ConfigError as error:
            return _Visit(view_query({}), str(error))
        features = None
        try:
            features = self._features(place, asked.visit)
            return _Visit(asked, None, features, self.deliver(place, asked))
        except StreamvidError as error:
            return _Visit(asked, str(error), features)

    def asked(self, values: Values) -> ViewQuery:
        """Return the visit and settings that a URL specifies. With features, only the visit can be chosen.

        Raises ConfigError for values that a loader would reject.
        """
        if self.features is None:
            return view_query(values)
        visit = whole(values, "visit", 0, -MAX_VISIT, MAX_VISIT)
        return replace(view_query(settings_of(self.features.manifest.made_with)), visit=visit)

    def deliver(self, place: SamplePlace, asked: ViewQuery) -> DeliveredSample:
        """Return one delivery of a sample or, with features, the frames from which the features were made.

        Raises SampleError if the sample is bad, and ConfigError for an invalid view.
        """
        return self.deliverer.deliver(place, self.shown_visit(asked.visit), asked.settings)

    def shown_visit(self, visit: int) -> int:
        """Return the visit whose frames are delivered. With features, this is one of the stored visits."""
        return visit if self.features is None else visit % self.features.manifest.num_visits

    def _features(self, place: SamplePlace, visit: int) -> VisitFeatures | None:
        is_text = self.dataset.manifest.bucket(place.shard.bucket_id).is_text
        return None if self.features is None or is_text else features_of(self.features, place, visit)

    def _geometry(self, facts: SampleFacts, shown: DeliveredSample, asked: ViewQuery) -> dict[str, Any]:
        """Return the size of the source's frames, the crop, and the part of a frame that every visit keeps."""
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
        """Return the columns from which captions can be taken: `text`, and the user's own text columns."""
        schema = self.dataset.samples_schema
        own = (
            name for name in self.dataset.user_columns if str(schema.field(self.dataset.column(name)).type) == "string"
        )
        return ("text", *(name for name in own if name != "text"))

    def _neighbors(self, place: SamplePlace) -> tuple[str | None, str | None]:
        """Return the paths of the pages for the previous and the next sample in the shard, within the view."""
        at, members = (place.shard.bucket_id, place.shard.number), self.browser.members(place.row)
        before, after = members[members < place.index], members[members > place.index]
        return (
            self.path("sample", *at, before[-1]) if len(before) else None,
            self.path("sample", *at, after[0]) if len(after) else None,
        )

    def audio(self, place: SamplePlace) -> str:
        """Return the part of a sample's page that shows the waveform of its clip."""
        facts = sample_facts(self.dataset, place)
        part, duration, found, problem = clip_range(facts), facts.values.get("duration_seconds"), None, None
        if part.num_bytes <= _MAX_CHECKED and isinstance(duration, float):
            try:
                found = waveform_of(read_clip(self.dataset, part), duration)
            except SampleError as error:
                problem = str(error)
        return render("audio.html", waveform=found, problem=problem)

    def key(self, key: str) -> str:
        """Return the path of the page for the sample with this key."""
        (place,) = find_keys(self.dataset, [key])
        return self.path("sample", place.shard.bucket_id, place.shard.number, place.index)

    def training(self) -> str:
        """Return the page that shows the training run."""
        return self.page("run.html", "Run", "run", body=self.training_figures())

    def training_figures(self) -> Any:
        """Return the part of a page that shows the run's curves and samples."""
        from markupsafe import Markup

        assert self.run is not None, "pages of a run are served only with --run"
        return Markup(render("curves.html", run=read_run(self.run), folder=self.run))  # noqa: S704 - rendered with escapes

    def failure(self, message: str) -> str:
        """Return a page that shows an error."""
        return self.page("error.html", "Error", "", message=message)

    def place(self, bucket_id: str, number: int, index: int) -> SamplePlace:
        """Return the location of a sample. Raises ConfigError if the sample does not exist or is not in the view."""
        dataset = self.dataset
        place = place_of(dataset, bucket_id, number, index)
        if dataset.where is not None and index not in self.browser.members(place.row):
            raise ConfigError(
                f"sample {index} of {place.shard.path} is not in the view ({dataset.where}) of {dataset.url}; open the "
                "dataset without the view"
            )
        return place

    def path(self, *parts: object) -> str:
        """Return the path of a page or picture of this dataset."""
        return self.root + path(*parts)

    def page(self, template: str, title: str, active: str, **values: Any) -> str:
        """Render a whole page.

        active: page to highlight in the navigation.
        """
        return render(template, title=title, active=active, **values, **self._common())

    def _common(self) -> dict[str, Any]:
        return {
            "url": self.dataset.url,
            "has_run": self.run is not None,
            "version": self._version,
            "root": self.root,
            "datasets": self._datasets,
        }


def row_values(asked: RowQuery) -> dict[str, object]:
    """Return the URL parameters for this selection."""
    named = asdict(asked)
    return {**{name: named[name] for name in ("bucket", "split", "where", "sort")}, "desc": asked.descending}


def media_type(extension: str) -> str | None:
    """Return the media type with which a stored clip is served, or None if browsers cannot play it."""
    return _TYPES.get(extension)
