#!/usr/bin/env bash
# transformers 5.23.0, AutoTokenizer beside a config.json of the model type qwen2: the model in tokenizer.json is passed over.
#
# A folder has a tokenizer.json with a word-level model, saved by PreTrainedTokenizerFast.save_pretrained. AutoTokenizer gives it back
# beside a config of llama or qwen3; beside one of qwen2 it gives a Qwen2Tokenizer, a byte-level BPE of its own, which makes no token
# of any text and says nothing.
#
# Prints the tokens of a text by both. Exits 0 while they differ so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'transformers==5.23.0'
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
from pathlib import Path

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

tokens = {}
for kind in ("Llama", "Qwen2"):
    folder = Path(sys.argv[1]) / kind
    words = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    getattr(transformers, f"{kind}Config")().save_pretrained(folder)
    found = transformers.AutoTokenizer.from_pretrained(folder)
    tokens[kind] = found("one two")["input_ids"]
    print(f"transformers {transformers.__version__}, {kind}: {type(found).__name__} gives {tokens[kind]}")
sys.exit(not (tokens["Llama"] == [1, 2] and tokens["Qwen2"] == []))
PYTHON
