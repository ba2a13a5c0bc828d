from pathlib import Path

from coordinator.shell.commands.preparation import save_layout, stored_layout
from hypergpu.tensors.layout import TensorSpec, layout_of

LAYOUT = layout_of([TensorSpec("weight", (3, 4)), TensorSpec("bias", (4,))])


def test_a_damaged_layout_counts_as_missing(tmp_path: Path) -> None:
    assert stored_layout(tmp_path) is None
    save_layout(tmp_path, LAYOUT)
    assert stored_layout(tmp_path) == LAYOUT
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes().replace(b"bias", b"bibs"))
    assert stored_layout(tmp_path) is None


def test_saving_another_layout_replaces_the_first(tmp_path: Path) -> None:
    other = layout_of([TensorSpec("weight", (5,))])
    save_layout(tmp_path, LAYOUT)
    save_layout(tmp_path, other)
    assert stored_layout(tmp_path) == other
