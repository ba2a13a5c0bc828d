"""Datasets as all processes see them: their files, and the samples of each participant."""
