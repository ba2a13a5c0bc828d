"""The tensors of models and updates: their layout, and how they are encoded as bytes."""
