"""A stand-in of the Hugging Face hub's HTTP API, as far as one commit to a model needs it."""

import base64
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

TOKEN = "hf_ofatest"


class HubServer:
    """Keeps what was committed by the paths of its files."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.repositories: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self._objects: dict[str, bytes] = {}
        self.app = Starlette(
            routes=[
                Route("/api/repos/create", self.create, methods=["POST"]),
                Route("/api/models/{name:path}/preupload/main", self.plan, methods=["POST"]),
                Route("/{name:path}/info/lfs/objects/batch", self.batch, methods=["POST"]),
                Route("/objects/{digest}", self.store, methods=["PUT"]),
                Route("/api/models/{name:path}/commit/main", self.commit, methods=["POST"]),
                Route("/api/validate-yaml", self.validate, methods=["POST"]),
            ]
        )

    async def create(self, request: Request) -> JSONResponse:
        """Make a repository for whoever has the token."""
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return JSONResponse({"error": "Invalid username or password."}, 401)
        self.repositories.append(await request.json())
        return JSONResponse({"url": f"{self.address}/you/model"})

    async def plan(self, request: Request) -> JSONResponse:
        """Weights travel by themselves, other files within the commit."""
        files = (await request.json())["files"]
        modes = {True: "lfs", False: "regular"}
        return JSONResponse(
            {
                "files": [
                    {
                        "path": each["path"],
                        "uploadMode": modes[each["path"].endswith(".safetensors")],
                        "shouldIgnore": False,
                    }
                    for each in files
                ]
            }
        )

    async def batch(self, request: Request) -> JSONResponse:
        """Say where large files go."""
        asked_objects = (await request.json())["objects"]
        return JSONResponse(
            {
                "transfer": "basic",
                "objects": [
                    {
                        **each,
                        "actions": {"upload": {"href": f"{self.address}/objects/{each['oid']}"}},
                    }
                    for each in asked_objects
                ],
            }
        )

    async def store(self, request: Request) -> JSONResponse:
        """Take a large file."""
        self._objects[request.path_params["digest"]] = await request.body()
        return JSONResponse({})

    async def commit(self, request: Request) -> JSONResponse:
        """Take a commit: one JSON object a line."""
        for line in (await request.body()).splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.files[value["path"]] = self._objects[value["oid"]]
        url = f"{self.address}/you/model/commit/{'a' * 40}"
        return JSONResponse({"success": True, "commitOid": "a" * 40, "commitUrl": url})

    async def validate(self, _request: Request) -> JSONResponse:
        """Find every card's front matter right."""
        return JSONResponse({"errors": [], "warnings": []})


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """A running stand-in."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hub = HubServer(f"http://127.0.0.1:{listener.getsockname()[1]}")
        server = uvicorn.Server(uvicorn.Config(hub.app, log_config=None))
        thread = Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.should_exit = True
            thread.join()
