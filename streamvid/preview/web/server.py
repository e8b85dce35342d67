"""HTTP server of the preview."""

from __future__ import annotations

import logging
import re
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from streamvid.credentials import hide_all_credentials
from streamvid.dataset.features.sidecar import Sidecar
from streamvid.dataset.reader import Dataset
from streamvid.errors import ConfigError, DatasetError, SampleError, StorageError, StreamvidError
from streamvid.preview.deliver import Frames
from streamvid.preview.find import SamplePlace
from streamvid.preview.options import PreviewOptions
from streamvid.preview.render import STATIC, static_file
from streamvid.preview.runs import sample_file
from streamvid.preview.sample import clip_range, read_clip, sample_facts
from streamvid.preview.web.pages import Link, Pages, media_type
from streamvid.preview.web.security import Guard
from streamvid.preview.web.settings import Values, whole
from streamvid.preview.web.steps import step_page
from streamvid.video.encode.showing import jpeg, png, strip

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_log = logging.getLogger(__name__)

MAX_RANGE = 8 * 2**20
"""Maximum number of bytes of a clip per response. Players request the remaining bytes separately."""

_STRIP_FRAMES, _STRIP_WIDTH, _POSTER_WIDTH = 8, 240, 480
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")
_KEPT = {"Cache-Control": "private, max-age=86400"}
_KEPT_A_MINUTE = {"Cache-Control": "private, max-age=60"}  # a run that starts again replaces its pictures


class Preview:
    """Routes for the pages of one dataset. Each method handles one kind of request, in a separate thread."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    def routes(self) -> list[Route]:
        """Return all routes."""
        pages, at = self._pages, "{bucket}/{number:int}/{index:int}"
        return [
            Route("/", _html(lambda _: pages.overview())),
            Route("/figures", _html(lambda _: pages.figures())),
            Route("/samples", _html(lambda request: pages.samples(_values(request)))),
            Route("/rows", _html(lambda request: pages.rows(_values(request)))),
            Route("/run", self._of_run(pages.training)),
            Route("/curves", self._of_run(pages.training_figures)),
            Route("/key/{key}", self.key),
            Route(f"/sample/{at}", _html(lambda request: pages.sample(self._place(request), _values(request)))),
            Route(f"/audio/{at}", _html(lambda request: pages.audio(self._place(request)))),
            Route(f"/poster/{at}", self.poster),
            Route(f"/strip/{at}", self.strip),
            Route(f"/frame/{at}/{{frame:int}}", self.frame),
            Route(f"/clip/{at}", self.clip),
            Route("/run/{name}", self.run_sample),
        ]

    def _place(self, request: Request) -> SamplePlace:
        given = request.path_params
        with _missing_is_404():
            return self._pages.place(given["bucket"], given["number"], given["index"])

    def _of_run(self, page: Callable[[], str]) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            if self._pages.run is None:
                raise HTTPException(404, "no training run was selected; restart `streamvid preview` with --run DIR")
            return HTMLResponse(page())

        return answer

    def key(self, request: Request) -> Response:
        """Redirect a request for a key to the page of the sample with that key."""
        with _missing_is_404():
            return RedirectResponse(self._pages.key(request.path_params["key"]), 302)

    def poster(self, request: Request) -> Response:
        """Respond with one frame from the middle of the clip, as the loader crops it."""
        settings = self._pages.asked({}).settings
        try:
            (picture,) = self._pages.deliverer.poster(self._place(request), settings)
        except SampleError as error:
            return _bad(error)
        return Response(jpeg(picture, _POSTER_WIDTH), media_type="image/jpeg", headers=_KEPT)

    def strip(self, request: Request) -> Response:
        """Respond with several frames of the first visit side by side, for clips that browsers cannot play."""
        try:
            found = self._pages.deliver(self._place(request), self._pages.asked({})).frames
        except SampleError as error:
            return _bad(error)
        data, _ = strip(_pictures(found), _STRIP_FRAMES, _STRIP_WIDTH)
        return Response(data, media_type="image/jpeg", headers=_KEPT)

    def frame(self, request: Request) -> Response:
        """Respond with one frame of a visit: as PNG, exactly as the model gets it, or as a smaller JPEG.

        URL parameters: `of` is "model" (the default), "source" (the uncropped frame), or the name of a conditioning
        input; `item` is the index of the item in that input; `width` requests a JPEG of that width.
        """
        values = _values(request)
        frames = self._frames(self._place(request), values)
        number = request.path_params["frame"]
        if number >= len(frames):
            raise HTTPException(404, f"frame {number}: the sample has only {len(frames)} frames, numbered from 0")
        if "width" in values or values.get("of") == "source":
            data = jpeg(frames[number], whole(values, "width", frames.shape[2], 1, 4096))
            return Response(data, media_type="image/jpeg", headers=_KEPT)
        return Response(png(frames[number]), media_type="image/png", headers=_KEPT)

    def _frames(self, place: SamplePlace, values: Values) -> Frames:
        pages, asked, kind = self._pages, self._pages.asked(values), values.get("of", "model")
        if kind == "source":
            facts = sample_facts(pages.dataset, place)
            size = facts.number("clip_width"), facts.number("clip_height")
            return pages.deliverer.uncropped(place, pages.shown_visit(asked.visit), asked.settings, *size)
        found = pages.deliver(place, asked)
        if kind == "model":
            return _pictures(found.frames)
        items = found.media.get(kind, ())
        return _pictures(items[whole(values, "item", 0, 0, len(items) - 1)] if items else None)

    def clip(self, request: Request) -> Response:
        """Respond with the stored bytes of a clip, or with the range that the player requests."""
        dataset = self._pages.dataset
        facts = sample_facts(dataset, self._place(request))
        part = clip_range(facts)
        kind = media_type(part.extension)
        if kind is None:
            raise HTTPException(404, f"browsers do not play {part.extension} files")
        asked = _RANGE.fullmatch(request.headers.get("range", ""))
        first = int(asked[1]) if asked else 0
        if first >= max(1, part.num_bytes):
            return Response(status_code=416, headers={"Content-Range": f"bytes */{part.num_bytes}"})
        last = min(int(asked[2]) if asked and asked[2] else part.num_bytes - 1, part.num_bytes - 1)
        if not asked and part.num_bytes <= MAX_RANGE:
            return Response(read_clip(dataset, part), media_type=kind, headers={**_KEPT, "Accept-Ranges": "bytes"})
        last = min(last, first + MAX_RANGE - 1)
        headers = {**_KEPT, "Accept-Ranges": "bytes", "Content-Range": f"bytes {first}-{last}/{part.num_bytes}"}
        return Response(read_clip(dataset, part, first, last + 1), 206, headers, kind)

    def run_sample(self, request: Request) -> Response:
        """Respond with a picture or a video that the model generated."""
        name, folder = request.path_params["name"], self._pages.run
        found = None if folder is None else sample_file(folder, name)
        if found is None:
            raise HTTPException(404, "the run has no generated sample with this name")
        kind = "image/png" if found.suffix == ".png" else "video/mp4"
        return FileResponse(found, media_type=kind, headers=_KEPT_A_MINUTE)


def app_of(
    datasets: Sequence[Dataset], features: Sequence[Sidecar | None], options: PreviewOptions, token: str | None
) -> Guard:
    """Return the ASGI application.

    token: token that requests must present; None to require no token.
    """
    several = _pages_of(datasets, features, options)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        for pages in several:
            pages.deliverer.close()

    def failed(request: Request, error: Exception) -> Response:
        return _failure(several[0], error)

    kinds = (StreamvidError, OSError, HTTPException, Exception)  # the last one is logged, too
    app = Starlette(routes=_routes(several), exception_handlers=dict.fromkeys(kinds, failed), lifespan=lifespan)
    _prepare(several[0])
    return Guard(app, options.host, token)


def _pages_of(datasets: Sequence[Dataset], features: Sequence[Sidecar | None], options: PreviewOptions) -> list[Pages]:
    """Return the pages of each dataset. The paths of the first dataset's pages have no prefix."""
    run = None if options.run is None else Path(options.run)
    links = [Link(f"/dataset/{number}" if number else "", _name(one.url)) for number, one in enumerate(datasets)]
    return [
        Pages(dataset, run, sidecar, link.root, links)
        for dataset, sidecar, link in zip(datasets, features, links, strict=True)
    ]


def _prepare(pages: Pages) -> None:
    """Load the data of the first page, so that the page is ready when the address is printed.

    No HTTP request is made.
    """
    pages.failure("")
    if pages.dataset.store.is_local and pages.dataset.where is None:
        with suppress(StreamvidError):  # the page will say it
            pages.overview()


def _routes(several: Sequence[Pages]) -> list[BaseRoute]:
    """Return the routes of all datasets. The paths of the first dataset's pages have no prefix."""
    first, *others = several
    return [
        Route("/step", _html(lambda request: step_page(several, _values(request)))),
        Route("/static/{name}", static),
        *(Mount(pages.root, routes=Preview(pages).routes()) for pages in others),
        *Preview(first).routes(),
    ]


def _name(url: str) -> str:
    """Return the last part of a dataset's location."""
    return url.rstrip("/").rpartition("/")[2] or url


def serve(
    datasets: Sequence[Dataset],
    features: Sequence[Sidecar | None],
    options: PreviewOptions,
    started: Callable[[str], None],
) -> None:
    """Serve the preview until the process is interrupted.

    features: features that a loader delivers in place of each dataset's clips, or None.

    started: function that receives the address once the port is open.
    Raises ConfigError if the port is not available.
    """
    import uvicorn

    token = None if options.is_loopback and not options.token else secrets.token_urlsafe(24)
    app = app_of(datasets, features, options, token)
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listening = socket.create_server((options.host, options.port), family=family)
    except OSError as error:
        raise ConfigError(
            f"--port {options.port}: cannot listen on {options.host}: {error.strerror}; choose another --port or --host"
        ) from error
    with listening:
        host = f"[{options.host}]" if ":" in options.host else options.host
        port = listening.getsockname()[1]
        started(f"http://{host}:{port}/" + (f"?token={token}" if token else ""))
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
        )
        uvicorn.Server(config).run(sockets=[listening])


def static(request: Request) -> Response:
    """Respond with a static file."""
    name = request.path_params["name"]
    if name not in STATIC:
        raise HTTPException(404, "no such file")
    return Response(static_file(name), media_type=STATIC[name], headers={"Cache-Control": "no-cache"})


def _bad(error: SampleError) -> Response:
    """Return the picture that is shown for a bad sample. The sample's page states the reason."""
    _log.info("%s", error)
    return Response(static_file("bad.svg"), media_type=STATIC["bad.svg"])


def _html(page: Callable[[Request], str]) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        return HTMLResponse(page(request))

    return answer


@contextmanager
def _missing_is_404() -> Iterator[None]:
    """Convert a ConfigError to a 404 response."""
    try:
        yield
    except ConfigError as error:
        raise HTTPException(404, str(error)) from error


def _values(request: Request) -> Values:
    return dict(request.query_params)


def _pictures(frames: Frames | None) -> Frames:
    if frames is None:
        raise HTTPException(404, "the sample has no frames of the requested kind")
    return np.asarray(frames)


def _failure(pages: Pages, error: Exception) -> Response:
    """Return a page that shows an error."""
    status: Any = 500
    if isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    else:
        is_known = isinstance(error, StreamvidError | OSError)
        message = (
            hide_all_credentials(str(error))
            if is_known
            else (f"{type(error).__name__}; see the server's log for details")
        )
        status = 400 if isinstance(error, ConfigError) else 502 if isinstance(error, StorageError | OSError) else 500
        level = logging.INFO if isinstance(error, ConfigError | DatasetError) else logging.WARNING
        _log.log(level, "%s", message)
    try:
        return HTMLResponse(pages.failure(message), status)
    except StreamvidError:
        return Response(message, status, media_type="text/plain; charset=utf-8")
