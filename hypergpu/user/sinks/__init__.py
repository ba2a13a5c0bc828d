"""Programs that keep and draw the course of trainings, as sinks of a watched job."""
