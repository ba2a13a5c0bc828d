"""A served model whose files are no model: for nodes that load none."""

from pathlib import Path
from typing import Any

from hypergpu.serving.serve_request import ServeRequest
from hypergpu.user.client import AsyncCoordinator


async def serve_small_model(user: AsyncCoordinator, folder: Path, **request: Any) -> str:
    """Have it served as ``small``; returns its job."""
    index = folder / "base.index"
    index.write_bytes(b"nobody reads it")
    (blob,) = await user.send_blobs([index], step="sending")
    serve_request = ServeRequest(model="small", files={"base.index": blob}, **request)
    return await user.create_serve(serve_request)
