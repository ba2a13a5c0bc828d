"""Pictures of prompts through a real coordinator and real nodes."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import hypergpu
from tests.processes import Cluster
from tests.tiny_pipelines import save_pipeline

PROMPTS = ["a cat", "two dogs on a hill", "a cat", "a house"]
RULES = {"width": 48, "height": 32, "steps": 3, "guidance_scale": 4.0}


# Each worker imports diffusers, which takes 22 s of processor time where nothing is compiled yet.
@pytest.mark.full
def test_pictures_of_many_nodes_are_those_of_diffusers(tmp_path: Path) -> None:
    import torch
    from diffusers import DiffusionPipeline

    from gpu_node.shell.worker.farm.image import item_seed

    base = save_pipeline(tmp_path / "pipeline" / "base")
    with Cluster(tmp_path / "cluster", is_plaintext=False) as cluster:
        for _ in range(2):  # each by a token of its own, so that they check each other
            cluster.add_nodes(1, "torch", kinds=("training", "image"))
        with cluster.client() as coordinator:
            run = hypergpu.map(
                "image",
                data=PROMPTS,
                base=str(base),
                out=tmp_path / "art.parquet",
                seed=9,
                parameters=RULES,
                checks=0.5,
                coordinator=coordinator,
            )
            frame = run.result()
            bundles = run.detail().job.bundles
    assert bundles is not None
    assert (bundles.settled_items, bundles.failed_items) == (len(PROMPTS), 0)
    assert bundles.paid_units > bundles.units
    pipeline = DiffusionPipeline.from_pretrained(base)
    pipeline.set_progress_bar_config(disable=True)
    for position, prompt in enumerate(PROMPTS):
        generator = torch.Generator("cpu").manual_seed(item_seed(9, position))
        plain = pipeline(
            prompt,
            width=48,
            height=32,
            num_inference_steps=3,
            guidance_scale=4.0,
            generator=generator,
        ).images[0]
        row = frame.iloc[position]
        assert (row["width"], row["height"]) == (48, 32)
        with Image.open(tmp_path / row["image"]) as picture:
            difference = np.abs(np.asarray(picture).astype(int) - np.asarray(plain).astype(int))
        assert difference.max() <= 1
