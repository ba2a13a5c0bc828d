"""`python -m tests.gguf_bases FILE FOLDER` makes a folder for transformers of a GGUF file."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def write_base(file: Path, folder: Path) -> None:
    """Save model and tokenizer; the weights become float32, with the rounding that they have."""
    gguf_argument = {"gguf_file": file.name}
    packed_model = AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.float32, **gguf_argument
    )
    config = packed_model.config
    del config.quantization_config  # a model that says it is quantized cannot be saved
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    whole.load_state_dict(packed_model.state_dict())
    whole.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **gguf_argument).save_pretrained(folder)


if __name__ == "__main__":
    write_base(Path(sys.argv[1]), Path(sys.argv[2]))
