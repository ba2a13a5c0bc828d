"""All workloads that import torch."""
