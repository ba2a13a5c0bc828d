"""An adapter of a chat model from a script or notebook cell, saved as transformers loads it.

Start a cluster first (`hypergpu up`, and a node with its join line), then run this file with the
folder of a base, or its name on the hub: `python chat.py HuggingFaceTB/SmolLM2-135M-Instruct`.
"""

import sys

import hypergpu

rows = [
    {
        "messages": [
            {"role": "user", "content": f"What comes after {number}?"},
            {"role": "assistant", "content": f"After {number} comes {number + 1}."},
        ]
    }
    for number in range(200)
]
run = hypergpu.finetune(
    sys.argv[1],
    data=rows,
    allow_hub=True,  # downloads the base here if it is not in the cache; nodes never do
    steps=80,
    inner_steps=10,
    batch_size=4,
    name="counting",
    options={"rank": 8, "sequence_length": 128},
)
run.watch()
run.save("counting")  # counting/merged loads with AutoModelForCausalLM.from_pretrained
