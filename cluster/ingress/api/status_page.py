"""The status page at ``/``: one HTML file and one small script, from this server alone.

Holds no facts: the script asks ``/internal/status``, with a key where one is needed. The policy that goes with it lets
the browser load nothing from anywhere else, so the page works without a network.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent / "page"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FILES = {"/": ("index.html", "text/html"), "/status.js": ("status.js", "text/javascript")}


def status_page_routes() -> list[Route]:
    """Returns the routes of the page. Raises: OSError if its files are missing."""
    return [
        Route(path, _answer_with((_FOLDER / name).read_bytes(), kind), methods=["GET"])
        for path, (name, kind) in _FILES.items()
    ]


def _answer_with(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    headers = {
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
    }

    async def answer(request: Request) -> Response:
        return Response(content, media_type=f"{kind}; charset=utf-8", headers=headers)

    return answer
