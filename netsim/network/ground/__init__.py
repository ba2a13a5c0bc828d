"""Links held open for programs: where each program runs, and how the links change meanwhile."""
