"""One HTML file with the page, its parts and a recording: it opens from disk, without a server."""

import re

import msgspec

RECORDING_ID = "recording"
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
PLAIN_PAGE = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>HyperGPU</title></head>'
    "<body><h1>HyperGPU</h1><p>The page was not built; this file holds the recording alone.</p>"
    "</body></html>\n"
)


class PageParts(msgspec.Struct, frozen=True):
    """The page as it was built for recordings: one script, one style."""

    html: str = PLAIN_PAGE
    script: str = ""
    style: str = ""


def page_with_recording(parts: PageParts, recording: bytes) -> str:
    """The page in one file.

    Args:
        parts: The built page; its HTML has a head and a body.
        recording: Frames as JSON.
    """
    policy = f'<meta http-equiv="content-security-policy" content="{POLICY}">'
    page = parts.html.replace("<head>", f"<head>{policy}", 1)
    page = page.replace("</head>", f"<style>{_escape(parts.style, 'style')}</style></head>", 1)
    # The script finds the frames before it; a "<" in them could end the element.
    frames = recording.decode("utf-8").replace("<", "\\u003c")
    tail = f'<script type="application/json" id="{RECORDING_ID}">{frames}</script>\n'
    if parts.script:
        tail += f'<script type="module">{_escape(parts.script, "script")}</script>\n'
    before, end, after = page.rpartition("</body>")
    return f"{before}{tail}{end}{after}" if end else page + tail


def _escape(text: str, element: str) -> str:
    """Text that cannot end the element that it stands in."""
    text = re.sub(rf"</({element})", r"<\\/\1", text, flags=re.IGNORECASE)
    return text.replace("<!--", "<\\!--")
