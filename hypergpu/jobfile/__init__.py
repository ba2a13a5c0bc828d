"""Job files: TOML into a validated `JobSpec`, and changes of a running job.

The command line reads files with it and the coordinator judges specs and changes with it, so both
refuse the same things in the same words. It reads no file itself except in `reading.read_job_file`.
"""
