#!/usr/bin/env bash
# transformers 5.23.0 with gguf 0.19.0: from_pretrained(gguf_file=...) passes over biases and scaled frequencies of a Llama's file.
#
# A file of a tiny Llama has what llama.cpp computes with: biases of its attention (blk.N.attn_*.bias) and the factors of Llama 3's
# frequencies (rope_freqs.weight). transformers loads it without a word; the model has neither, and its configuration says
# attention_bias = False and the default frequencies. Changing both in the file changes nothing in the logits.
#
# Prints what the configuration says and the difference of logits. Exits 0 while both are passed over.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'transformers==5.23.0' 'gguf==0.19.0' 'accelerate==1.15.0' 'torch==2.15.0'
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

folder, heads, width, inner, words, layers = Path(sys.argv[1]), 4, 32, 64, 16, 2
draws = np.random.default_rng(1)


def weight(*shape):
    return draws.normal(0, 0.2, shape).astype(np.float32)


def write(path, bias, factor):
    global draws
    draws = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(words)
    writer.add_tensor("token_embd.weight", weight(words, width))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    writer.add_tensor("output.weight", weight(words, width))
    writer.add_tensor("rope_freqs.weight", np.full(width // heads // 2, factor, np.float32))
    for layer in range(layers):
        for name, shape in (
            ("attn_q", (width, width)), ("attn_k", (width, width)), ("attn_v", (width, width)),
            ("attn_output", (width, width)), ("ffn_gate", (inner, width)),
            ("ffn_up", (inner, width)), ("ffn_down", (width, inner)),
        ):
            writer.add_tensor(f"blk.{layer}.{name}.weight", weight(*shape))
            if name.startswith("attn"):
                writer.add_tensor(f"blk.{layer}.{name}.bias", np.full(width, bias, np.float32))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name)
    with torch.inference_mode():
        return model.config, model(input_ids=torch.arange(12)[None]).logits


config, logits = write(folder / "one.gguf", 0.0, 1.0)
_, other_logits = write(folder / "other.gguf", 3.0, 8.0)
difference = float((logits - other_logits).abs().max())
rope = config.rope_parameters["rope_type"]
print(f"transformers {transformers.__version__}: attention_bias {config.attention_bias}, frequencies {rope}")
print(f"logits differ by {difference} between biases of 0 and 3 and factors of 1 and 8")
sys.exit(not (difference == 0.0 and not config.attention_bias and rope == "default"))
PYTHON
