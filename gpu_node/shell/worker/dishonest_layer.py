"""A worker that turns the sign of one layer of its updates.

A lie that one cosine over all coordinates does not see. It lies from the first round on: once
nearly nothing is left to gain such a lie costs next to nothing, and is hard to tell from noise.
"""

from gpu_node.shell.worker.dishonest import serve_lies, turn_first_matrix

if __name__ == "__main__":
    serve_lies(turn_first_matrix, 0)
