"""The daemon's side of its worker: the process, and the trainings it is given."""
