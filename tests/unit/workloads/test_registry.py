import subprocess
import sys

import pytest

from hypergpu.workloads.entries import BUILT_IN
from hypergpu.workloads.entry import WorkloadEntry, complete_options
from hypergpu.workloads.registry import UnknownWorkloadError, build, find


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(
        UnknownWorkloadError, match="there is no workload 'mnsit'; there are: digits"
    ):
        find("mnsit")


@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda entry: entry.name)
def test_defaults_satisfy_their_own_limits(entry: WorkloadEntry) -> None:
    defaults = {option.name: option.default for option in entry.options}
    assert complete_options(entry, defaults) == defaults


@pytest.mark.parametrize("name", [entry.name for entry in BUILT_IN if entry.name != "null"])
def test_every_entry_builds(name: str) -> None:
    assert callable(build(find(name), {}).load)


def test_the_catalogue_is_read_without_torch() -> None:
    program = (
        "import sys; from hypergpu.workloads.registry import entries; entries();"
        "sys.exit('torch' in sys.modules or 'sklearn' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
