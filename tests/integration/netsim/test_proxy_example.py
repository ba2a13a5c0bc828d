import re
import subprocess
import sys
from pathlib import Path

from hypergpu.wire.ports import free_ports

ROOT = Path(__file__).parents[3]


def test_the_example_of_the_manual_runs() -> None:
    manual = (ROOT / "docs/netsim/proxy.md").read_text("utf-8")
    example = re.search(r"^```python\n(.*?)^```", manual, re.MULTILINE | re.DOTALL)
    assert example
    port, node_port = free_ports(2)
    program = example[1].replace("7700", str(port)).replace("7701", str(node_port))
    child = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert f"('127.77.0.1', {port})" in child.stdout
    assert "VALID" in child.stdout
