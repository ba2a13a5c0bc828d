"""Install the packages of lock files into an environment, with uv where it works, else with pip.

uv installs them several times faster and keeps a cache, but does not read pip's configuration: this
hands it the indexes, wheels and certificates that the user configured for pip.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

UV_LOCK = Path(__file__).parents[1] / "locks" / "uv.txt"
PIP_OPTIONS = ["install", "-qq", "--disable-pip-version-check"]
ALONE = "--no-deps"
# A file whose hash the lock does not name is not installed, and neither is a line without hashes.
LOCKED = [ALONE, "--require-hashes", "-r"]
HASH = re.compile(r"[ \\]*\n? +--hash=\S+")
# pip's setting, uv's variable, and what uv puts between several values.
SETTINGS = (
    ("index-url", "UV_DEFAULT_INDEX", ""),
    ("extra-index-url", "UV_INDEX", " "),
    ("find-links", "UV_FIND_LINKS", ","),
    ("trusted-host", "UV_INSECURE_HOST", " "),
    ("no-index", "UV_NO_INDEX", ""),
    ("cert", "SSL_CERT_FILE", ""),
    ("default-timeout", "UV_HTTP_TIMEOUT", ""),
    ("timeout", "UV_HTTP_TIMEOUT", ""),
)


def main() -> int:
    """Install locks without what they depend on, the project, and packages with that; returns 0."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("environment", type=Path, help="its folder")
    parser.add_argument("locks", type=Path, nargs="*")
    parser.add_argument("--editable", type=Path, metavar="PROJECT")
    parser.add_argument("--package", metavar="REQUIREMENT", help="with all that it depends on")
    parser.add_argument(
        "--constraint", type=Path, metavar="LOCK", default=os.devnull, help="versions it may get"
    )
    options = parser.parse_args()
    python = options.environment / "bin" / "python"
    for lock in options.locks:
        install(python, [*LOCKED, str(lock)])
    if options.editable:
        install(python, [ALONE, "--no-build-isolation", "-e", str(options.editable)])
    if options.package:
        with versions_of(options.constraint) as bounds:
            install(python, ["-c", bounds, options.package])
    return 0


@contextmanager
def versions_of(lock: Path) -> Iterator[str]:
    """Path of a lock without its hashes: with them pip would ask for the package's own hash too."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as bare:
        bare.write(HASH.sub("", lock.read_text(encoding="utf-8")))
        bare.flush()
        yield bare.name


def install(python: Path, arguments: list[str]) -> None:
    """Install into the environment of ``python`` what the arguments of pip and uv say.

    Raises:
        SystemExit: pip failed too.
    """
    uv = bootstrapped_uv()
    if uv is not None:
        command = [uv, "pip", "install", "-q", "--python", str(python), *arguments]
        if not subprocess.run(command, check=False, env=uv_environment()).returncode:
            return
        print("uv could not install the packages: pip is tried", file=sys.stderr)
    pip = [sys.executable, "-m", "pip", "--python", str(python), *PIP_OPTIONS, *arguments]
    if status := subprocess.run(pip, check=False).returncode:
        sys.exit(status)


def bootstrapped_uv() -> str | None:
    """Path of the pinned uv beside this interpreter, installed by pip first; None: it has no uv."""
    command = [sys.executable, "-m", "pip", *PIP_OPTIONS, *LOCKED, str(UV_LOCK)]
    has_uv = subprocess.run(command, check=False, capture_output=True).returncode == 0
    uv = Path(sys.executable).with_name("uv")
    return str(uv) if has_uv and uv.exists() else None


def uv_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment, with pip's settings in uv's variables where the user set none of them."""
    # pip takes the best version that any index has, uv the first index that knows the name.
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    pip_values = dict(pip_settings(environment))
    for name, variable, separator in SETTINGS:
        values = pip_values.get(name, "").split()
        if values and values != ["0"]:
            variables[variable] = separator.join(values) if separator else values[0]
    return {**variables, **environment}


def pip_settings(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield pip's settings by name, the environment's last: they count."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    output = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment
    ).stdout
    parts = [line.partition("=") for line in output.splitlines()]
    for key, _, value in sorted(parts, key=lambda part: part[0].startswith(":env:")):
        section, _, name = key.rpartition(".")
        if section in ("global", "install", ":env:"):
            yield name, str(ast.literal_eval(value))


if __name__ == "__main__":
    sys.exit(main())
