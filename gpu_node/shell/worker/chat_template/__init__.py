"""Chat templates of models, which are programs of strangers: rendered in a process of their own."""
