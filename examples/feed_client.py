"""Follow a dashboard's feed and print each job's phase, round and loss when they change.

Usage: python feed_client.py ws://127.0.0.1:7780/feed TOKEN_FILE
"""

import asyncio
import json
import sys
from pathlib import Path

import websockets


def change(state: dict, kind: str, path: list, *values: object) -> None:
    """Apply one change of a delta to the state."""
    *way, last = path
    for key in way:
        state = state.setdefault(key, {})
    if kind == "set":
        state[last] = values[0]
    elif kind == "append":
        state[last] = (state.get(last, []) + values[0])[-values[1] :]
    else:
        state.pop(last, None)


async def follow(address: str, token: str) -> None:
    """Print until interrupted; a connection that breaks is opened again."""
    state, shown_lines = {}, {}
    headers = {"Authorization": f"Bearer {token}"}
    async for feed in websockets.connect(
        address, additional_headers=headers, max_size=None, proxy=None
    ):
        async for text in feed:
            frame = json.loads(text)
            state = frame.get("state", state)
            for each in frame.get("changes", ()):
                change(state, *each)
            for job in state.get("jobs", {}).values():
                line = f"{job['id']} {job['phase']} {job['round']}/{job['rounds']} {job['loss']}"
                if shown_lines.get(job["id"]) != line:
                    shown_lines[job["id"]] = line
                    print(line, flush=True)


if __name__ == "__main__":
    asyncio.run(follow(sys.argv[1], Path(sys.argv[2]).read_text("utf-8").strip()))
