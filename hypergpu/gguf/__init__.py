"""The format of GGUF files: their header, checked before any library opens them."""
