"""What cannot be is refused in one line with its fix, and nothing is left behind."""

from pathlib import Path

import pytest

from netsim.cli.app import app

JOB = '[job]\nworkload = "digits-softmax"\n[job.training]\nnodes = 1\n'
NODE = '[[nodes]]\nname = "a"\nprofile = "lan"\n'
LIE = '[[faults]]\nkind = "lie"\nnodes = "a"\nat = "1s"\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    worlds = {
        "impossible": NODE + "loss_percent = 101\n",
        "negative": NODE + "up_mbit_s = -1\n",
        "jobless": NODE,
        "small": JOB + NODE,
        "lying": JOB + NODE + LIE,
        "waiting": JOB.replace("nodes = 1", "nodes = 9") + NODE,
    }
    for name, text in worlds.items():
        (tmp_path / f"{name}.toml").write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "status", "what", "fix"),
    [
        ("shape fibre -- true", 16, 'no profile "fibre"', "home-fibre"),
        ("check fibre", 16, 'no profile "fibre"', "home-fibre"),
        ("shape nowhere.toml", 16, "nowhere.toml cannot be read", "check the path"),
        ("shape lan small.toml", 16, "beside other names", "one world file"),
        ("shape impossible.toml", 16, "impossible.toml", "loss_percent"),
        ("run negative.toml", 16, "negative.toml", "up_mbit_s"),
        ("run jobless.toml", 16, "has no job", "job = "),
        ("run waiting.toml", 16, "wants 9 nodes, and there is 1", "[[nodes]]"),
        ("run lying.toml", 16, "lie of a", "--backend world"),
        ("run small.toml --worker null", 16, "null worker cannot train", "--worker numpy"),
        ("run small.toml --worker jax", 16, 'no worker "jax"', "numpy"),
        ("run small.toml --out small.toml", 16, "nothing can be kept in small.toml", "--out"),
        ("run small.toml --give-up-after 0", 2, "--give-up-after", "--help"),
        ("run small.toml --backend ether", 2, "ether", "--help"),
        ("plot small.toml --out no/such/file.svg", 16, "cannot be written", "--out"),
        ("shape", 2, "WORLD.toml", "--help"),
        ("check lan --for 0", 2, "--for", "--help"),
        ("check lan --for 5m", 2, "5m is not in the range from 0.5s to 120s", "--help"),
        ("plot small.toml --for soon", 2, '"soon" is not a duration', "--help"),
    ],
)
def test_bad_input_is_one_line_with_its_fix(
    words: str, status: int, what: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(Path().iterdir())
    with pytest.raises(SystemExit) as left:
        app(args=words.split(), prog_name="hypergpu netsim")
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == status
    assert line.startswith("error 6")
    assert what in line
    assert fix in line
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize("span", ["2m", "120s", "120", "120000ms"])
def test_a_length_of_time_is_written_as_everywhere_else(span: str, folder: Path) -> None:
    drawn = []
    for given in (["--for", span], []):
        with pytest.raises(SystemExit) as left:
            app(args=["plot", "small.toml", *given], prog_name="hypergpu netsim")
        assert left.value.code in (0, None)
        drawn.append((folder / "small.svg").read_text("utf-8"))
    assert drawn[0] == drawn[1]
