"""Models and datasets by name: plain data here, torch only inside `networks`, which builders import
lazily.
"""
