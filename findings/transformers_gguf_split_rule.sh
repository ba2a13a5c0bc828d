#!/usr/bin/env bash
# transformers 5.23.0 with gguf 0.19.0: a tokenizer made of a GGUF file passes over tokenizer.ggml.pre, the rule by which texts split.
#
# Two files have the same vocabulary of bytes with one merge, of a space and a digit. One says "gpt-2", whose rule leaves a space with
# the number behind it, so that the merge applies; one says "smollm", whose rule has each digit by itself, so that it does not.
# AutoTokenizer.from_pretrained(gguf_file=...) makes the same tokens of both.
#
# Prints the tokens of a text by both. Exits 0 while they are the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'transformers==5.23.0' 'gguf==0.19.0' 'torch==2.15.0'
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
from pathlib import Path

import gguf
import transformers
from tokenizers import pre_tokenizers

folder, tokens = Path(sys.argv[1]), {}
vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "\u01207", "<end>"]
for rule in ("gpt-2", "smollm"):
    path = folder / f"{rule}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(vocabulary)
    writer.add_token_types([1] * (len(vocabulary) - 1) + [3])
    writer.add_token_merges(["\u0120 7"])
    writer.add_eos_token_id(len(vocabulary) - 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
    tokens[rule] = tokenizer.convert_ids_to_tokens(tokenizer("is 7")["input_ids"])
    print(f"transformers {transformers.__version__}, {rule}: {tokens[rule]}")
sys.exit(tokens["gpt-2"] != tokens["smollm"] or "\u01207" not in tokens["smollm"])
PYTHON
