#!/usr/bin/env bash
# llama.cpp of xllamacpp 2026.10.11549: an answer ends at a token because of its name, whatever the file says ends one.
#
# A GGUF file of a llama with four plain letters and two control tokens states eos_token_id = the token "<|stop|>". Its weights
# make "<|end|>" the likeliest token always. llama.cpp ends at the first one and says "stop": the name is on a list of its own. Under the
# name "<|fin|>" the same weights write until the limit.
#
# Prints why each answer ended, and after how many tokens. Exits 0 while they differ so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'numpy' 'gguf==0.19.0' 'xllamacpp==2026.10.11549'
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
from pathlib import Path

import gguf
import numpy as np
import xllamacpp

WIDTH, HEADS = 32, 4


def write(path: Path, name: str) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    tokens = ["a", "b", "ab", "c", "<|stop|>", name]
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1, 1, 1, 1, 3, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(4)
    zeros, ones = np.zeros((WIDTH, WIDTH), np.float32), np.ones(WIDTH, np.float32)
    output = np.zeros((len(tokens), WIDTH), np.float32)
    output[5] = 1
    writer.add_tensor("token_embd.weight", np.ones((len(tokens), WIDTH), np.float32))
    writer.add_tensor("output_norm.weight", ones)
    writer.add_tensor("output.weight", output)
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{part}.weight", zeros)
    for part in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{part}.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


ends = {}
for name in ("<|end|>", "<|fin|>"):
    path = Path(sys.argv[1]) / f"{name.strip('<|>')}.gguf"
    write(path, name)
    settings = xllamacpp.CommonParams()
    settings.model.path = str(path)
    settings.n_ctx, settings.warmup, settings.fit_params, settings.verbosity = 256, False, False, -1
    server = xllamacpp.Server(settings)
    answer = server.handle_completions({"prompt": [0, 1], "max_tokens": 7, "top_k": 1})
    ends[name] = (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"])
    print(f"llama.cpp of xllamacpp {xllamacpp.__version__}, likeliest token {name}: {ends[name]}")
sys.exit(not (ends["<|end|>"][0] == "stop" and ends["<|fin|>"] == ("length", 7)))
PYTHON
