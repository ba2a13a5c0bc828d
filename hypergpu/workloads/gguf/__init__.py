"""Models of transformers as GGUF files, which llama.cpp and its relatives load."""
