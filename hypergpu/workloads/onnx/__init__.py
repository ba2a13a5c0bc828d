"""Own programs as ONNX files, which runtimes without torch run."""
