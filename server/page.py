"""The web page at `/`: static files, and the headers that keep a page harmless.

Owns: which paths are the page and what a browser may do with it. Must not know: models, the API.
The files hold no secrets, so they need no key; the page asks for one when the API does.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse, Response
from starlette.exceptions import HTTPException

FOLDER = Path(__file__).parent / "static"
# Not the system's table: on some machines it has no JavaScript, which browsers then do not run.
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Small files, asked for again each time: after an upgrade no old script meets a new page.
    "Cache-Control": "no-cache",
}


def is_page(path: str) -> bool:
    return path == "/" or path.startswith("/static/")


def add_page(app: FastAPI) -> None:
    files = {path.name: path for path in FOLDER.iterdir() if path.suffix in TYPES}

    def answer(path: Path) -> Response:
        return FileResponse(path, media_type=TYPES[path.suffix], headers=HEADERS)

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        return answer(files["index.html"])

    @app.api_route("/static/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def part(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "no such file")
        return answer(files[name])
