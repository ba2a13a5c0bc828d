"""Commands of netsim: their arguments, what they refuse with its fix, docs/netsim/README.md."""

import re
from pathlib import Path
from typing import get_args

import pytest

from hypergpu.sites import Site, Sites
from netsim.cli.app import app
from netsim.cli.links import distinct_links, greeting, links_by_name
from netsim.link import NetsimError
from netsim.network.backends import choose_backend, node_address, profile_links
from netsim.network.options import Backend, Fallback
from netsim.network.profiles import PROFILES
from netsim.network.timeline import WorldCourse
from netsim.network.world import CHURN_CLASSES, FaultEntry
from netsim.network.world_file import parse_world

WORLD = """
seed = 9
hour = 20
[coordinator]
up_mbit_s = 7
[[nodes]]
name = "attic"
profile = "home-dsl"
count = 2
[[nodes]]
name = "cellar"
profile = "wifi-bad"
"""


@pytest.fixture
def world(tmp_path: Path) -> str:
    (tmp_path / "home.toml").write_text(WORLD, "utf-8")
    return str(tmp_path / "home.toml")


def test_profiles_become_nodes_of_their_names() -> None:
    links = links_by_name(["lan", "wifi-bad"], seed=4)
    assert list(links.nodes) == ["lan", "wifi-bad"]
    assert links.nodes["wifi-bad"].link == PROFILES["wifi-bad"].shape.link
    assert links.nodes["wifi-bad"].variation == PROFILES["wifi-bad"].shape.variation
    assert links.seed == 4


def test_a_profile_that_comes_again_is_numbered() -> None:
    assert list(links_by_name(["lan", "D", "lan"], seed=0).nodes) == ["lan-1", "D", "lan-2"]


def test_a_world_file_gives_its_nodes_its_coordinator_and_its_seed(world: str) -> None:
    links = links_by_name([world], seed=4)
    assert list(links.nodes) == ["attic-1", "attic-2", "cellar"]
    assert links.coordinator.link.up.bits_per_s == 7_000_000
    assert links.seed == 9
    assert links.nodes["cellar"].starts_at_hour == 20


def test_equal_links_are_measured_once(world: str) -> None:
    assert list(distinct_links(links_by_name([world], seed=0).nodes)) == [
        "attic-1 and 1 like it",
        "cellar",
    ]


def test_every_node_of_a_proxy_has_an_address_of_its_own() -> None:
    addresses = [node_address(number) for number in range(62_500)]
    assert len(set(addresses)) == len(addresses)
    assert addresses[0] == "127.77.0.1"
    assert addresses[-1] == "127.77.249.250"


@pytest.mark.parametrize("backend", [Backend.PROXY, Backend.TUNNEL])
def test_only_the_kernels_queues_have_a_fallback(backend: Backend) -> None:
    links = profile_links(["home-dsl"], 0)
    assert choose_backend(backend, links, Fallback.REFUSE) == (backend, "")
    with pytest.raises(NetsimError, match=f"{backend} has no fallback"):
        choose_backend(backend, links, Fallback.TUNNEL)


def test_greeting_says_who_dials_whom() -> None:
    sites = Sites(
        backend="proxy",
        coordinator=Site(dials="127.0.0.1"),
        nodes={"lan": Site(dials="127.77.0.1")},
        ports=(4000, 4001),
    )
    assert greeting(sites) == [
        "1 link is open (proxy); the coordinator listens on 127.0.0.1, ports 4000 and 4001 only",
        "  lan dials 127.77.0.1",
    ]


def test_greeting_says_how_to_run_something_inside() -> None:
    inside = Site(prefix=("ip", "netns", "exec", "x"), dials="10.77.0.1")
    sites = Sites(backend="tunnel", coordinator=inside, nodes={"a": inside, "b": inside})
    assert greeting(sites)[0].startswith("2 links are open (tunnel)")
    assert greeting(sites)[1].endswith("from inside: ip netns exec x COMMAND")


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
    with pytest.raises(SystemExit) as program_exit:
        app(args=words.split(), prog_name="hypergpu netsim")
    (line,) = capsys.readouterr().err.splitlines()
    assert program_exit.value.code == status
    assert line.startswith("error 6")
    assert what in line
    assert fix in line
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize("span", ["2m", "120s", "120", "120000ms"])
def test_a_length_of_time_is_written_as_everywhere_else(span: str, folder: Path) -> None:
    pictures = []
    for options in (["--for", span], []):
        with pytest.raises(SystemExit) as program_exit:
            app(args=["plot", "small.toml", *options], prog_name="hypergpu netsim")
        assert program_exit.value.code in (0, None)
        pictures.append((folder / "small.svg").read_text("utf-8"))
    assert pictures[0] == pictures[1]


PAGE = (Path(__file__).parents[3] / "docs" / "netsim" / "README.md").read_text("utf-8")


def test_page_names_every_profile() -> None:
    assert [name for name in PROFILES if f"`{name}`" not in PAGE and name not in "BC"] == []


def test_example_of_a_world_file_is_one() -> None:
    (example,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    world = parse_world(example, source="docs/netsim/README.md")
    assert [node.name for node in world.nodes] == ["attic", "lab-1", "lab-2", "van"]
    assert world.job is not None


def test_example_of_the_python_interface_runs() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(example, "docs/netsim/README.md", "exec"), names)  # noqa: S102 - our own page
    assert isinstance(names["course"], WorldCourse)
    assert str(names["picture"]).startswith("<svg")


def test_page_names_every_fault_and_every_churn() -> None:
    assert [
        each for each in get_args(FaultEntry) if f"| `{each.__struct_config__.tag}` |" not in PAGE
    ] == []
    assert [name for name in CHURN_CLASSES if f"`{name}`" not in PAGE] == []
