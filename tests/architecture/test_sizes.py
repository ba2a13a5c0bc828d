from benchmarks.house.tree import ROOT

README_LINES = 150


def test_the_readme_fits_its_limit() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= README_LINES
