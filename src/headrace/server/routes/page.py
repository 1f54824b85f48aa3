"""The page at `/`, its explanations at `/explain`, and their files, which ship with the package."""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request, Response

router = APIRouter(include_in_schema=False)

_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json; charset=utf-8",
    "svg": "image/svg+xml",
}
CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class PageFile:
    """One file of the page, its media type and its tag."""

    content: bytes
    media_type: str
    tag: str


@cache
def page_files() -> dict[str, PageFile]:
    """Return every file of the page by its path below the folder, e.g. `js/main.js`."""
    found: dict[str, PageFile] = {}
    _gather(files("headrace.server") / "page", "", found)
    return found


def _gather(folder: Traversable, prefix: str, found: dict[str, PageFile]) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            _gather(entry, f"{prefix}{entry.name}/", found)
            continue
        media_type = _MEDIA_TYPES.get(entry.name.rpartition(".")[2])
        if media_type is not None:
            content = entry.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
            found[prefix + entry.name] = PageFile(content, media_type, tag)


def _answer(request: Request, name: str) -> Response:
    file = page_files().get(name)
    if file is None:
        return Response("There is no such file.\n", status_code=404, media_type="text/plain", headers=_HEADERS)
    headers = _HEADERS | {"ETag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


@router.get("/")
def page(request: Request) -> Response:
    """Return the page."""
    return _answer(request, "index.html")


@router.get("/explain")
def explain(request: Request) -> Response:
    """Return the explanations that the page links to."""
    return _answer(request, "explain.html")


@router.get("/page/{name:path}")
def file(request: Request, name: str) -> Response:
    """Return a file of the page."""
    return _answer(request, name)
