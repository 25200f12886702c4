"""The server: which address answers what, who may ask, and how what goes wrong is said.

Invariant: every answer under ``/api`` is JSON; a request that makes no sense gets 4xx and one sentence. A
page of another site gets nothing: a request must carry a header that such a page cannot send, and name a host
that is this machine, or, where the server listens to others, the token that its address has.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from counterflow.drawing.page import asset
from counterflow.errors import CounterflowError
from counterflow.schedule.formats import dumps

from . import form
from .address import is_here
from .follow import FollowedRuns, Pace
from .jobs import Jobs
from .plan_answers import config_of, task_of
from .plan_answers import known as example_records
from .requests import (
    Check,
    CompareRequest,
    Download,
    File,
    JobRequest,
    LookRequest,
    OrderRequest,
    PlanReference,
    PlanRequest,
    RequestModel,
    RunsRequest,
    SearchInput,
)
from .saved_plans import written
from .schedules import Schedules

STATIC = Path(__file__).parent / "static"
HEADER = "X-Counterflow"
"""Sent with every request to ``/api``, with the token in it where there is one."""

PAGES = ("schedules", "compare", "plans", "runs")
MOST_BYTES = 8_000_000
"""Maximum size of a request."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_SENT = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]

_JSON = "application/json"

_Model = TypeVar("_Model", bound=RequestModel)
_Scope = dict[str, Any]


class RefusedError(Exception):
    """A request that is answered with this status and sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def application(
    token: str | None = None,
    places: Sequence[Path] = (Path("runs"),),
    pace: Pace = Pace(),  # noqa: B008 - it is frozen
) -> Starlette:
    """The server's application.

    Args:
        token: what requests must carry; None: the server listens to this machine alone.
        places: folders of runs, or of several runs, that may be looked at.
        pace: how much may be taken from runs that are followed.
    """
    known, jobs = Schedules(), Jobs()
    followed = FollowedRuns(places, pace)
    app = Starlette(
        routes=[
            *_pages(),
            *_of_schedules(known),
            *_searches(known, jobs),
            *_followed(followed),
        ],
        exception_handlers=_SAID,
        lifespan=_ending(jobs),
    )
    app.add_middleware(_RequestGuard, token=token)
    return app


def _answers(path: str, model: type[_Model], answer: Callable[[_Model], Any]) -> Route:
    async def handler(request: Request) -> Response:
        content = await run_in_threadpool(answer, _read(model, await _body(request)))
        return content if isinstance(content, Response) else JSONResponse(content)

    return Route(path, handler, methods=["POST"])


def _attached(content: str | bytes, media: str, name: str) -> Response:
    attached = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(content, media_type=media, headers=attached)


def _of_schedules(known: Schedules) -> list[Route]:
    async def schemes(_request: Request) -> Response:
        return JSONResponse({"schemes": form.schemes(), "costs": form.costs()})

    return [
        Route("/api/schemes", schemes),
        _answers("/api/look", LookRequest, known.look),
        _answers("/api/check", Check, known.check),
        _answers("/api/file", File, lambda file: known.add(file.text, file.name, file.like)),
        _answers("/api/download", Download, lambda request: _attached(*known.download(request))),
    ]


def _searches(known: Schedules, jobs: Jobs) -> list[Route]:
    def order(request: OrderRequest) -> dict[str, str]:
        """Start a search for an order; errors in the costs are reported immediately."""
        known_schedule = known.find(request.subject)
        known_schedule.costs(request.subject)
        planned = None if known_schedule.planned is None else written(known_schedule.planned)
        return jobs.start(
            SearchInput(order=request, schedule=dumps(known_schedule.schedule), planned=planned)
        )

    def plan(request: PlanRequest) -> dict[str, str]:
        """Start planning; errors in the files are reported immediately."""
        task_of(request)
        return jobs.start(SearchInput(plan=request))

    def compare(request: CompareRequest) -> dict[str, str]:
        """Start a comparison; errors in the costs are reported immediately."""
        request.costs.costs()
        request.memory_bytes()
        return jobs.start(SearchInput(compare=request))

    def open_plan(reference: PlanReference) -> dict[str, Any]:
        """Take a plan among the files, with its costs."""
        plan = jobs.plans(reference).plans[reference.plan]
        name = f"plan, {plan.schedule.scheme}"
        return known.add_planned(plan, name) | {"name": name}

    def save_plan(reference: PlanReference) -> Response:
        text = config_of(jobs.plans(reference), reference.plan)
        return _attached(text, "application/toml", "plan.toml")

    async def examples(_request: Request) -> Response:
        return JSONResponse({"examples": await run_in_threadpool(example_records)})

    return [
        Route("/api/examples", examples),
        _answers("/api/order", OrderRequest, order),
        _answers("/api/plan", PlanRequest, plan),
        _answers("/api/plan/open", PlanReference, open_plan),
        _answers("/api/plan/save", PlanReference, save_plan),
        _answers("/api/compare", CompareRequest, compare),
        _answers("/api/job", JobRequest, jobs.look),
    ]


def _followed(runs: FollowedRuns) -> list[Route]:
    one_at_a_time = asyncio.Lock()

    async def listed(_request: Request) -> Response:
        return Response(await run_in_threadpool(runs.listed), media_type=_JSON)

    async def follow(request: Request) -> Response:
        """The first page that asks waits for the answer, and the others for the first."""
        body = await _body(request)
        async with one_at_a_time:
            answer = runs.cached_answer(body)
            if answer is None:
                answer = await run_in_threadpool(runs.answer, body, _read(RunsRequest, body))
        return Response(answer, media_type=_JSON)

    return [Route("/api/run", follow, methods=["POST"]), Route("/api/runs", listed)]


def _ending(jobs: Jobs) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        jobs.end()

    return lifespan


def _pages() -> list[Route]:
    async def first(request: Request) -> Response:
        query = f"?{request.url.query}" if request.url.query else ""
        return RedirectResponse(f"/{PAGES[0]}{query}")

    async def page(_request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name in ("timeline.js", "timeline.css"):
            media = "text/javascript" if name.endswith("js") else "text/css"
            return Response(asset(name), media_type=media)
        if name not in {path.name for path in STATIC.iterdir()}:
            raise RefusedError(404, f"there is no file {name}")
        return FileResponse(STATIC / name)

    return [
        Route("/", first),
        *(Route(f"/{name}", page) for name in PAGES),
        Route("/static/{name}", static),
    ]


# -- reading


async def _body(request: Request) -> bytes:
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > MOST_BYTES:
            raise RefusedError(413, f"more than {MOST_BYTES:,} bytes; the page sends less")
    return bytes(content)


def _read(model: type[_Model], body: bytes) -> _Model:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the request"
        limit = first.get("ctx", {})
        said = _WRONG[first["type"]].format(**limit) if first["type"] in _WRONG else first["msg"]
        raise RefusedError(422, f"{place[:200]}: {said}") from None


_WRONG = {
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be {ge:g} or more",
    "less_than_equal": "must be {le:g} or less",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
}
"""What people meet who fill in a form, by pydantic's name."""


# -- refusing


def _said(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status)


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return _said(error.status, str(error))


async def _wrong(_request: Request, error: Exception) -> Response:
    return _said(422, str(error))


async def _no_route(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _said(error.status_code, error.detail)


_SAID: dict[Any, Any] = {RefusedError: _refused, CounterflowError: _wrong, HTTPException: _no_route}


class _RequestGuard:
    def __init__(self, app: Any, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: _Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sends(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_SENT]
            await send(message)

        refusal = self._refusal(scope["path"], Headers(scope=scope))
        await (self._app if refusal is None else refusal)(scope, receive, sends)

    def _refusal(self, path: str, headers: Headers) -> JSONResponse | None:
        host = _host(headers.get("host", ""))
        if self._token is None and not is_here(host):
            return _said(403, f"host {host[:100]!r}: this server answers this machine alone")
        if not path.startswith("/api"):
            return None
        token = headers.get(HEADER)
        if token is None:
            return _said(403, f"the header {HEADER} is missing; only the page itself may ask")
        if self._token is not None and not hmac.compare_digest(token.encode(), self._token.encode()):
            return _said(401, "wrong token; open the address that counterflow explore printed")
        origin = headers.get("origin")
        if origin is not None and _host(urlsplit(origin).netloc) != host:
            return _said(403, f"origin {origin[:100]!r}: only the page itself may ask")
        return None


@lru_cache(maxsize=100)
def _host(text: str) -> str:
    """Host without its port.

    >>> _host("localhost:8000"), _host("[::1]:80"), _host("[x")
    ('localhost', '::1', '[x')
    """
    try:
        return urlsplit(f"//{text}").hostname or ""
    except ValueError:
        return text
