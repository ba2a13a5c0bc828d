"""What is sent without a journal: kept beforehand, and waited for."""
