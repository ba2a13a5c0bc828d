"""One HTML file with the page, its parts and a recording: it opens from disk, without a server."""

import re
from collections.abc import Mapping

RECORDING_ID = "recording"
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
PLAIN_PAGE = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>HyperGPU</title></head>'
    "<body><h1>HyperGPU</h1><p>The page was not built; this file holds the recording alone.</p>"
    "</body></html>\n"
)
_SCRIPT = re.compile(r'<script\b[^>]*\bsrc="([^"]+)"[^>]*>\s*</script>')
_STYLE = re.compile(r'<link\b(?=[^>]*\brel="stylesheet")[^>]*\bhref="([^"]+)"[^>]*>')
_PRELOAD = re.compile(r'<link\b(?=[^>]*\brel="(?:modulepreload|preload|icon)")[^>]*>\s*')


def page_with_recording(index: str, parts: Mapping[str, str], recording: bytes) -> str:
    """The page in one file.

    Args:
        index: HTML of the built page; empty: it was not built.
        parts: Text of scripts and styles by the address that the HTML gives.
        recording: Frames as JSON.

    Raises:
        KeyError: The HTML names a part that is not there.
    """
    page = _PRELOAD.sub("", index or PLAIN_PAGE)
    page = _STYLE.sub(lambda found: f"<style>{_style(parts[found[1]])}</style>", page)
    scripts = [_script(parts[found]) for found in _SCRIPT.findall(page)]
    page = _SCRIPT.sub("", page)
    policy = f'<meta http-equiv="content-security-policy" content="{POLICY}">'
    page = page.replace("<head>", f"<head>{policy}", 1)
    # What the script reads stands before it; a "<" in the frames could end the element.
    frames = recording.decode("utf-8").replace("<", "\\u003c")
    held = f'<script type="application/json" id="{RECORDING_ID}">{frames}</script>\n'
    tail = held + "".join(f'<script type="module">{each}</script>\n' for each in scripts)
    before, end, after = page.rpartition("</body>")
    return f"{before}{tail}{end}{after}" if end else page + tail


def _script(text: str) -> str:
    return re.sub(r"</(script)", r"<\\/\1", text, flags=re.IGNORECASE).replace("<!--", "<\\!--")


def _style(text: str) -> str:
    return re.sub(r"</(style)", r"<\\/\1", text, flags=re.IGNORECASE)
