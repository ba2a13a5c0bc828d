"""A pipeline of diffusers with random weights, small enough to draw in a second."""

import json
from pathlib import Path

import torch
import transformers


def save_pipeline(folder: Path) -> Path:
    """Save a Stable Diffusion of a few thousand numbers, as people save them."""
    from diffusers import (
        AutoencoderKL,
        DDIMScheduler,
        StableDiffusionPipeline,
        UNet2DConditionModel,
    )

    torch.manual_seed(7)
    pipeline = StableDiffusionPipeline(
        vae=AutoencoderKL(
            block_out_channels=[8, 16],
            down_block_types=["DownEncoderBlock2D", "DownEncoderBlock2D"],
            up_block_types=["UpDecoderBlock2D", "UpDecoderBlock2D"],
            latent_channels=4,
            norm_num_groups=4,
        ),
        text_encoder=_text_encoder(),
        tokenizer=_tokenizer(folder.parent / "tokenizer"),
        unet=UNet2DConditionModel(
            block_out_channels=(8, 16),
            layers_per_block=1,
            sample_size=16,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=16,
            norm_num_groups=4,
            attention_head_dim=4,
        ),
        scheduler=DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder)
    return folder


def save_clip(folder: Path) -> Path:
    """Save a CLIP of one layer of 16 numbers each, with random weights."""
    tokenizer = _tokenizer(folder.parent / "clip-tokenizer")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    torch.manual_seed(3)
    config = transformers.CLIPConfig(
        text_config=_text_encoder().config.to_dict(),
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
        projection_dim=12,
    )
    transformers.CLIPModel(config).save_pretrained(folder)
    pictures = transformers.CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    transformers.CLIPProcessor(pictures, tokenizer).save_pretrained(folder)
    return folder


def _text_encoder() -> "transformers.CLIPTextModel":
    config = transformers.CLIPTextConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return transformers.CLIPTextModel(config)


def _tokenizer(folder: Path) -> "transformers.CLIPTokenizer":
    """Letters alone, each with and without the mark of a word's end."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{each}</w>" for each in letters)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({word: n for n, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return transformers.CLIPTokenizer.from_pretrained(folder, model_max_length=16)
