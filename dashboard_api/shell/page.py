"""The built page, or a plain one that says how to build it."""

from pathlib import Path
from typing import Any

from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles

PLAIN = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>HyperGPU</title></head>
<body><h1>HyperGPU</h1>
<p>The server runs, and the page was not built. In the repository:</p>
<pre>make web</pre>
<p>The feed is at <code>/feed</code>, the API at
<a href="/api/v1/openapi.json">/api/v1/openapi.json</a>.</p>
</body></html>
"""


PAGE_FOLDER = Path(__file__).parents[1] / "dist"


def page_response(folder: Path) -> Response:
    """The page itself."""
    index = folder / "index.html"
    if not index.is_file():
        return HTMLResponse(PLAIN, headers={"cache-control": "no-store"})
    return FileResponse(index, headers={"cache-control": "no-cache"})


class AssetFiles(StaticFiles):
    """Files with a digest in their names: what a name stands for never changes."""

    def file_response(self, *given: Any, **more: Any) -> Response:
        """A file that may be kept for ever."""
        response = super().file_response(*given, **more)
        response.headers["cache-control"] = "public, max-age=31536000, immutable"
        return response


def asset_routes(folder: Path) -> list[BaseRoute]:
    """Where the page's parts are, compressed; none of an unbuilt page."""
    assets = folder / "assets"
    if not assets.is_dir():
        return []
    return [Mount("/assets", GZipMiddleware(AssetFiles(directory=assets)))]
