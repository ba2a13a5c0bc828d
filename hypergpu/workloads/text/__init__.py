"""Text of a local folder as blocks of bytes."""
