"""Has chat templates rendered by a process that has little memory and time."""

import contextlib
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, cast

import msgspec

from gpu_node.shell.worker.chat_template.messages import (
    TEMPLATE_BYTES_MOST,
    TIME_MOST_S,
    RenderedTemplate,
    RenderTemplate,
)
from hypergpu.frames import FrameError, frame, read_frame

_COMMAND = (sys.executable, "-P", "-m", "gpu_node.shell.worker.chat_template")


class TemplateError(Exception):
    """A chat template gives no text. The message says why."""


class TemplateRenderer:
    """A process that renders; it is started when it is first needed, and anew where it ended.

    Args:
        time_most_s: Time for one rendering.
    """

    def __init__(self, time_most_s: float = TIME_MOST_S) -> None:
        self._time_most_s = time_most_s
        self._child: subprocess.Popen[bytes] | None = None
        self._end_child: Callable[[], object] = lambda: None

    def chat_text(
        self,
        template: str | None,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        marks: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt that a template makes of a chat, up to where the answer begins.

        Args:
            template: The model's chat template; None: it has none.
            messages: Turns of the chat.
            tools: Tools that the model may name.
            marks: Texts of the model's special tokens, such as ``bos_token``.

        Raises:
            TemplateError: There is no template, it is too long, takes too long or raises.
        """
        if not template:
            raise TemplateError(
                "the model has no chat template, so it takes no messages. Fix: send a plain prompt"
                " (/v1/completions), or serve a model that was made for chats"
            )
        if len(template.encode()) > TEMPLATE_BYTES_MOST:
            raise TemplateError(f"the chat template has more than {TEMPLATE_BYTES_MOST:,} bytes")
        variables = {
            **(marks or {}),
            "messages": [dict(message) for message in messages],
            "tools": [dict(tool) for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": True,
        }
        reply = self._ask(RenderTemplate(template, variables))
        if reply.refusal:
            raise TemplateError(f"the chat template refuses the messages: {reply.refusal}")
        return reply.text

    def close(self) -> None:
        """End the process."""
        self._end_child()

    def _ask(self, request: RenderTemplate) -> RenderedTemplate:
        if self._child is None or self._child.poll() is not None:
            self.close()
            self._child = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            # Also where nobody closes it: models are dropped as others take their place.
            self._end_child = weakref.finalize(self, _end, self._child)
        child = self._child
        is_late = threading.Event()

        def end_late() -> None:
            is_late.set()
            child.kill()

        timer = threading.Timer(self._time_most_s, end_late)
        timer.start()
        try:
            payload = _exchange(child, frame(msgspec.msgpack.encode(request)))
        finally:
            timer.cancel()
        if payload is None:
            self.close()
            why = f"more than {self._time_most_s:g} s" if is_late.is_set() else "too much"
            raise TemplateError(f"the chat template takes {why}: its process was ended")
        return msgspec.msgpack.decode(payload, type=RenderedTemplate)


def _end(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()


def _exchange(child: "subprocess.Popen[bytes]", request: bytes) -> bytes | None:
    """The child's answer to a request; None: it ended."""
    if child.stdin is None or child.stdout is None:
        return None
    try:
        child.stdin.write(request)
        child.stdin.flush()
        return read_frame(cast(BinaryIO, child.stdout))
    except (OSError, FrameError):
        return None
