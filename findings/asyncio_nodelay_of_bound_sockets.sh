#!/usr/bin/env bash
# asyncio: connections that a server accepts on a socket of the caller's send small writes late, unless
# that socket was made with its protocol named.
#
# Seen with CPython 3.11 and uvicorn 0.54.0 on Linux. `socket.socket(AF_INET, SOCK_STREAM)` has proto 0,
# and so have the sockets that it accepts; asyncio sets TCP_NODELAY on those alone whose proto is
# IPPROTO_TCP. uvicorn given such a socket (`Server.serve(sockets=[...])`) therefore streams with Nagle's
# algorithm: the second small chunk of an answer waits for the acknowledgement of the first, which a
# client on Linux delays by 40 ms once a connection is no longer new. With `IPPROTO_TCP` as the third
# argument it does not.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'uvicorn==0.54.0'
cat >"$folder/try.py" <<'PYTHON'
import asyncio, http.client, platform, socket, statistics, sys, threading, time

import uvicorn


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
    for place in range(3):
        await send({"type": "http.response.body", "body": b"x", "more_body": place < 2})
        await asyncio.sleep(0.002)


def milliseconds(protocol):
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol)
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    client = http.client.HTTPConnection(*listener.getsockname())
    took = []
    for _ in range(40):
        began = time.monotonic()
        client.request("GET", "/")
        client.getresponse().read()
        took.append(1000 * (time.monotonic() - began))
    client.close()
    server.should_exit = True
    thread.join()
    return statistics.median(took[20:])


print("CPython", platform.python_version(), "uvicorn", uvicorn.__version__)
unnamed, named = milliseconds(0), milliseconds(socket.IPPROTO_TCP)
print(f"three chunks of a byte: proto 0: {unnamed:.1f} ms, IPPROTO_TCP: {named:.1f} ms")
if not (unnamed > 25 and named < 20):
    sys.exit("the behaviour has changed")
PYTHON
"$folder/venv/bin/python" "$folder/try.py"
