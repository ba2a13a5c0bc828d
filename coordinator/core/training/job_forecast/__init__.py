"""How long a job will take, what it will move and cost, by what is known of its nodes."""
