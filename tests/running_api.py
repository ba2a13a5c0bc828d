"""`hypergpu serve api` as a process of a user who has a home folder of its own."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import openai

from hypergpu.command_line import program
from hypergpu.user.client import Coordinator
from hypergpu.wire.credentials import Role
from tests.processes import ENVIRONMENT
from tests.warm_commands import command_output


class RunningApi(NamedTuple):
    """The process, and OpenAI's client of it."""

    process: "subprocess.Popen[str]"
    base_url: str
    client: openai.OpenAI
    home: dict[str, str]
    """Variables of its user."""

    @property
    def folder(self) -> Path:
        """Where its user's keys and batches lie."""
        return Path(self.home["XDG_CONFIG_HOME"]) / "hypergpu"

    def command(self, *words: str) -> str:
        """What a command of the same user says."""
        return command_output(*words, environment=self.home)


def home_of(folder: Path, coordinator: Coordinator) -> dict[str, str]:
    """Variables of an operator of the coordinator whose settings lie in a folder."""
    return {
        **ENVIRONMENT,
        "XDG_CONFIG_HOME": str(folder),
        "XDG_CACHE_HOME": str(folder),
        "HYPERGPU_TOKEN": coordinator.create_token(Role.OPERATOR, ttl_s=3600).token,
    }


@contextmanager
def running_api(home: dict[str, str], *words: str, key: str = "") -> Iterator[RunningApi]:
    """Run the API; its client has the key that it made, or the one that is given."""
    command = program("hypergpu.user.cli", "serve", "api", "--port", "0", *words)
    with subprocess.Popen(command, env=home, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        base_url = next(child.stdout).strip().removeprefix("OPENAI_BASE_URL=")
        # Where its user has a key already, it makes none.
        made_key = "" if key else next(child.stdout).strip().partition("OPENAI_API_KEY=")[2]
        try:
            with openai.OpenAI(
                base_url=base_url, api_key=key or made_key or "none", max_retries=0
            ) as client:
                yield RunningApi(child, base_url, client, home)
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
                assert child.wait(60) == 0
