#!/usr/bin/env bash
# datasets 5.2.0, load_dataset("json") without data files: it reads whatever JSON lies below the working folder.
#
# The builders `json`, `csv` and `text` take `data_files`. Without any, load_dataset looks below the folder that the program was started in,
# however deep, and takes every file that it can read, without a word. A task of lm-eval whose file names `dataset_path: json` and forgets
# `dataset_kwargs` is so evaluated in other files, and starting it in a large tree takes minutes.
#
# Prints the rows that it finds in a folder where two files lie. Exits 0 while it finds them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "datasets==5.2.0"
mkdir -p "$folder/work/notes/deep"
echo '{"word": "one"}' >"$folder/work/rows.json"
echo '{"word": "two"}' >"$folder/work/notes/deep/rows.jsonl"
cd "$folder/work"
HF_HOME="$folder/cache" HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import sys

import datasets

found = datasets.load_dataset("json")
words = sorted(row["word"] for split in found.values() for row in split)
print(f"datasets {datasets.__version__}: {words}")
sys.exit(words != ["one", "two"])
PYTHON
