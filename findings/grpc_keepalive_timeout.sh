#!/usr/bin/env bash
# grpcio: `grpc.keepalive_timeout_ms` does not bound how long a keepalive ping's answer is waited for.
#
# Seen with grpcio 1.76.0 on Linux: a channel with keepalive_time_ms 1,000 and keepalive_timeout_ms 1,000
# to a server that is stopped (SIGSTOP: its kernel still acknowledges) ends its stream only after about
# 60 s. With `grpc.http2.ping_timeout_ms` 1,000 beside them it ends after about 2 s. The keepalive
# timeout is applied as TCP_USER_TIMEOUT, which a peer whose kernel acknowledges never meets.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'grpcio==1.76.0'
cat >"$folder/try.py" <<'PYTHON'
import os, signal, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor

import grpc


def serve():
    def echo(requests, context):
        yield from requests

    server = grpc.server(ThreadPoolExecutor(4))
    handlers = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", handlers),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    threading.Event().wait()


def seconds_until_noticed(*more):
    child = subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE, text=True)
    ended = threading.Event()

    def requests():
        yield b"x"
        ended.wait()

    options = [("grpc.keepalive_time_ms", 1000), ("grpc.keepalive_timeout_ms", 1000), *more]
    with grpc.insecure_channel(f"127.0.0.1:{int(child.stdout.readline())}", options=options) as channel:
        call = channel.stream_stream("/t/Echo")(requests(), timeout=120)
        next(call)
        os.kill(child.pid, signal.SIGSTOP)
        began = time.monotonic()
        try:
            next(call)
        except grpc.RpcError as error:
            took = time.monotonic() - began
            print(f"{more or 'as documented'}: {error.code().name} after {took:.0f} s: {error.details()}", flush=True)
        ended.set()
        child.kill()
        return took


if sys.argv[1:]:
    serve()
print("grpcio", grpc.__version__)
plain = seconds_until_noticed()
bounded = seconds_until_noticed(("grpc.http2.ping_timeout_ms", 1000))
if not (45 < plain < 90 and bounded < 10):
    sys.exit("the behaviour has changed")
PYTHON
"$folder/venv/bin/python" "$folder/try.py"
