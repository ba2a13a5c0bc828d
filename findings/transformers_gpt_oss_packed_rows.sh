#!/usr/bin/env bash
# transformers 5.23.0, GptOssForCausalLM: position_ids that begin anew do not keep packed rows apart.
#
# Llama, Mistral, Qwen2 and others of the same version take such position_ids for rows of one sample and mask them
# (transformers.masking_utils.find_packed_sequence_indices). GptOssModel.forward builds its masks without position_ids, so that
# the second row sees the first: its logits change with the first row's tokens. Nothing is told.
#
# Prints the largest change of the second row's logits, in their standard deviations. Exits 0 while Llama's is 0 and GPT-OSS's is not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'transformers==5.23.0' 'torch==2.15.0'
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
import transformers

sizes = dict(
    vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128,
)
kinds = {
    "LlamaForCausalLM": transformers.LlamaConfig(**sizes),
    "GptOssForCausalLM": transformers.GptOssConfig(**sizes, head_dim=8, num_local_experts=4, sliding_window=64),
}
changes = {}
for name, config in kinds.items():
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
        first, other, second = torch.randint(3, 300, (3, 1, 9))
        positions = torch.arange(9).repeat(2)[None]
        packed, changed = (
            model(input_ids=torch.cat([row, second], 1), position_ids=positions, use_cache=False).logits[:, 9:]
            for row in (first, other)
        )
    changes[name] = float((packed - changed).abs().max() / packed.std())
    print(f"transformers {transformers.__version__} {name}: the second row's logits change by {changes[name]:.2g}")
sys.exit(not (changes["LlamaForCausalLM"] == 0 and changes["GptOssForCausalLM"] > 1e-3))
PYTHON
