import importlib
import tomllib
from pathlib import Path

import pytest

from hypergpu.extras import missing_extra

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))


@pytest.mark.parametrize(
    ("package", "extra"),
    [("web3.auto", "chain"), ("psycopg", "postgresql"), ("torch", "torch")],
)
def test_missing_package_of_an_extra_names_its_pip_line(package: str, extra: str) -> None:
    error = missing_extra(ModuleNotFoundError(name=package))
    assert error
    assert error.fix == f"install the extra: pip install 'hypergpu[{extra}]'"
    assert package.partition(".")[0] in error.detail
    assert extra in PROJECT["project"]["optional-dependencies"]


def test_missing_module_of_no_extra_is_a_defect() -> None:
    with pytest.raises(ModuleNotFoundError) as broken:
        importlib.import_module("hypergpu.absent")
    assert missing_extra(broken.value) is None
