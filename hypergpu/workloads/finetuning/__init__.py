"""Adapters of models that transformers loads: their rows, tokens and base, the workloads ``hf-*``,
and folders that peft and transformers load again. Needs the extra ``hf``.
"""
