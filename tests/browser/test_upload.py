"""Data sent from the browser: interrupted, resumed, refused."""

import io
import tarfile
import zipfile
from pathlib import Path
from random import Random

import pytest
from playwright.async_api import Page, Request, async_playwright

from dashboard_api.shell.uploads import PIECE_BYTES_MAX
from tests.browser_page import launch_options
from tests.integration.dashboard.test_live import bearer, page_beside
from tests.processes import Cluster

pytestmark = pytest.mark.needs("chromium")


def write_npz(path: Path, size_bytes: int) -> None:
    """An archive of one array that no compression shortens."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", Random(1).randbytes(size_bytes))


def write_leading_out(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../outside.txt", "x")


def write_link(path: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        link = tarfile.TarInfo("words/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link, io.BytesIO())


def write_words(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("words/a.txt", "to be or not to be " * 500)


class ControlPage:
    """The form for a new job, and the pieces that it sends."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.offsets: list[int] = []
        page.on("request", self._note)

    def _note(self, request: Request) -> None:
        if request.method == "PUT":
            self.offsets.append(int(request.url.partition("offset=")[2]))

    async def open(self) -> None:
        await self.page.get_by_label("Workload").select_option("text-gpt")

    async def choose(self, path: Path) -> None:
        await self.page.get_by_label("Data").set_input_files(path)

    async def expect(self, text: str) -> None:
        await self.page.get_by_text(text).wait_for()

    async def check(self) -> None:
        await self.page.get_by_role("button", name="Check", exact=True).click()


async def send_interrupted(control: ControlPage, npz: Path) -> None:
    """Send two pieces; between them the connection breaks and the page is loaded anew."""
    second = f"**/uploads/*?offset={PIECE_BYTES_MAX}"
    await control.page.route(second, lambda route: route.abort())
    await control.choose(npz)
    await control.expect("8.39 MB of 16.8 MB")
    await control.page.reload()
    await control.page.unroute(second)
    control.offsets.clear()
    await control.open()
    await control.choose(npz)
    await control.expect("16.8 MB of 16.8 MB, complete")


async def expect_refusals(control: ControlPage, folder: Path) -> None:
    """Archives that lead out of their folder or hold links, and a file above the limit."""
    leading_out, link, large = (folder / name for name in ("out.zip", "link.tar.gz", "large.npz"))
    write_leading_out(leading_out)
    write_link(link)
    with large.open("wb") as file:
        file.truncate(501_000_000)
    for path, why in ((leading_out, "leads out of its folder"), (link, "no regular file")):
        await control.choose(path)
        await control.expect(", complete")
        await control.check()
        await control.expect(why)
    control.offsets.clear()
    await control.choose(large)
    await control.expect("501000000 bytes are not from 1 to 500000000")
    assert control.offsets == []


async def test_data_is_sent_from_the_browser_resumed_and_refused(tmp_path: Path) -> None:
    npz, words = tmp_path / "data (1).npz", tmp_path / "words.zip"
    write_npz(npz, 2 * PIECE_BYTES_MAX)
    write_words(words)
    with Cluster(tmp_path / "cluster") as cluster, page_beside(cluster) as origin:
        token = bearer(cluster)["authorization"].removeprefix("Bearer ")
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(**launch_options())
            page = await browser.new_page()
            await page.request.post(
                f"{origin}/api/v1/session", data={"token": token}, headers={"origin": origin}
            )
            await page.goto(f"{origin}/#/control")
            control = ControlPage(page)
            await control.open()
            await send_interrupted(control, npz)
            assert control.offsets == [PIECE_BYTES_MAX, 2 * PIECE_BYTES_MAX]
            await expect_refusals(control, tmp_path)
            await control.choose(words)
            await control.expect(", complete")
            await control.check()
            await control.expect("Checked: these are all its settings")
            await browser.close()
