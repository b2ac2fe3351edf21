"""Serve the page of `kvspec view` and its answers.

Invariant: the server listens only on the loopback, answers only requests for its own host names,
and only reads. So a page of another site in the same browser cannot use it under another name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from kvspec.cli.answer import answer, page

if TYPE_CHECKING:
    from starlette.requests import Request

HOSTS = ("127.0.0.1", "localhost")


# Functions without `async` run in threads, so that a slow answer does not stop the others.
def _page(_: Request) -> Response:
    return HTMLResponse(page())


def _answer(request: Request) -> Response:
    return JSONResponse(answer(request.query_params))


page_app = Starlette(
    routes=[Route("/", _page), Route("/answer", _answer)],
    middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)],
)
