"""What people see: figures in words, tables, and the live view of a job."""
