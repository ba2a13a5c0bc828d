"""`python -m gpu_node.shell.worker.chat_template` renders templates until its stdin closes.

It has little memory, and a rendering that takes too long ends it.
"""

import math
import os
import resource
import sys
import time

import msgspec

from gpu_node.shell.worker.chat_template.environment import chat_environment, rendered_text
from gpu_node.shell.worker.chat_template.messages import (
    MEMORY_BYTES_MOST,
    TIME_MOST_S,
    RenderedTemplate,
    RenderTemplate,
)
from hypergpu.frames import frame, read_frame

_REFUSAL_LENGTH_MOST = 400


def main() -> None:
    """Render what comes on stdin."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MOST, MEMORY_BYTES_MOST))
    environment = chat_environment()
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while (payload := read_frame(sys.stdin.buffer)) is not None:
        request = msgspec.msgpack.decode(payload, type=RenderTemplate)
        _limit_time()
        try:
            reply = RenderedTemplate(
                rendered_text(environment, request.template, request.variables)
            )
        except MemoryError:
            reply = RenderedTemplate(refusal="it takes too much memory")
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            text = f"{type(error).__name__}: {error}"[:_REFUSAL_LENGTH_MOST]
            reply = RenderedTemplate(refusal=text)
        replies.write(frame(msgspec.msgpack.encode(reply)))
        replies.flush()


def _limit_time() -> None:
    """Let the kernel end a rendering that goes on where nobody is left to end it."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
    seconds = math.ceil(time.process_time()) + TIME_MOST_S
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard_limit))


if __name__ == "__main__":
    main()
