"""From the click that starts a job to its first inner step on the page, with data of one's own."""

import asyncio
import io
import tempfile
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.ours.cluster import BenchmarkError, Running, running
from benchmarks.ours.page.browser import chromium, open_page, show
from benchmarks.ours.table import PartFigures
from hypergpu.jobfile.reading import parse_job
from hypergpu.user.client import JobEvent
from hypergpu.user.cluster.dashboard import DashboardProcess

PAGE_WITHIN_S = 60.0
STEP_WITHIN_MS = 60_000
TEXT = "A coordinator assigns work and aggregates updates; nodes train and send small ones.\n"
LINES = 4_000
JOB = """
workload = "text-gpt"
[training]
rounds = {rounds}
nodes = 1
"""
FIRST_STEP = """
() => [...document.querySelectorAll("td.result")]
  .some((each) => /(train [1-9])|accepted/.test(each.textContent))
"""


class SubmitTimes(NamedTuple):
    """Seconds."""

    upload_s: float
    """From the choice of the file to the job's check."""
    submit_s: float
    """From the click on Start to the first step on the page."""
    by_command_s: float
    """The same without page and data: from `submit` to the first event of progress."""


async def measure_submit() -> SubmitTimes:
    """Submit a job with data on the page of a cluster whose one node has trained before."""
    with tempfile.TemporaryDirectory() as name, running(Path(name), is_plaintext=True) as cluster:
        page = DashboardProcess(cluster.ready, Path(name) / "coordinator", 0)
        cluster.owner.callback(page.end)
        link = (await asyncio.to_thread(page.wait_for_line, PAGE_WITHIN_S)).link
        if not link:
            raise BenchmarkError(f"the page does not serve; see {name}")
        cluster.add_nodes(1, "torch")
        await asyncio.to_thread(_first_step_s, cluster)
        by_command_s = await asyncio.to_thread(_first_step_s, cluster)
        upload_s, submit_s = await _submit_on_page(link)
    return SubmitTimes(upload_s, submit_s, by_command_s)


async def _submit_on_page(link: str) -> tuple[float, float]:
    async with chromium() as context:
        page = await open_page(context, link)
        await show(page, "#/control", "section[aria-label='New job']")
        await page.click("text=Job file (TOML)")
        await page.fill("textarea", JOB.format(rounds=20))
        started_s = time.monotonic()
        content = {"name": "text.zip", "mimeType": "application/zip", "buffer": _archive()}
        await page.set_input_files("input[type=file]", content)  # type: ignore[arg-type]
        await page.wait_for_function(
            "() => /kB of .* kB sent/.test(document.body.textContent)"
            " || document.querySelector('input[type=file]').closest('label').nextElementSibling"
        )
        await page.click("button:text-is('Check')")
        await page.wait_for_selector("dl.spec", timeout=STEP_WITHIN_MS)
        upload_s = time.monotonic() - started_s
        started_s = time.monotonic()
        await page.click("text=Start the job")
        await page.wait_for_function(FIRST_STEP, timeout=STEP_WITHIN_MS)
        return upload_s, time.monotonic() - started_s


def _archive() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data/text.txt", TEXT * LINES)
    return target.getvalue()


def _first_step_s(cluster: Running) -> float:
    """Submit a short job by program and wait for its first step, then for its end."""
    with cluster.client() as client:
        started_s, first_s = time.monotonic(), None
        job_id = client.submit(parse_job(JOB.format(rounds=1)))
        for update in client.watch(job_id):
            has_step = (
                update.kind == "UpdateReceived"
                if isinstance(update, JobEvent)
                else any(each.steps_done for each in update.participants)
            )
            if has_step and first_s is None:
                first_s = time.monotonic() - started_s
        if first_s is None:
            raise BenchmarkError("a job ended without a step")
        return first_s


def submit_figures() -> PartFigures:
    """Time to the first step."""
    times = asyncio.run(measure_submit())
    ratio = times.submit_s / times.by_command_s
    return PartFigures(
        rows=[
            [
                "submit to first step, s",
                f"{times.submit_s:.1f}",
                f"{ratio:.1f}x by program",
            ],
            ["the same by program, without data, s", f"{times.by_command_s:.1f}", ""],
            ["upload and check before, s", f"{times.upload_s:.1f}", ""],
        ],
        metrics={"submit_to_first_step_s": times.submit_s, "submit_over_program": ratio},
        notes=["One warm node with torch; the text is the user's own, a zip of 340 kB unpacked."],
    )
