"""A worker that turns the sign of one layer from its job's third round on.

A lie that one cosine over all coordinates does not see.
"""

from gpu_node.shell.worker.dishonest import serve_lies, turn_first_matrix

if __name__ == "__main__":
    serve_lies(turn_first_matrix)
