"""Embed texts on the nodes of a cluster, then find the nearest one to a question.

Start a cluster first: `hypergpu up`, and a node with `hypergpu join LINE --kinds training,embed`.
Then run this file with the folder of a model: `python embed_texts.py FOLDER`.
"""

import sys

import numpy as np

import hypergpu

texts = [f"what comes after {number}?" for number in range(200)]
run = hypergpu.map("embed", data=texts, base=sys.argv[1], name="texts")
run.watch()
vectors = run.result()  # float32[200, dimension], in the order of the texts
similarities = vectors @ vectors[17]
print("nearest to text 17:", np.argsort(-similarities)[:3].tolist())
