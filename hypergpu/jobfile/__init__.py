"""Job files: TOML into a validated `JobSpec`, and changes of a running job.

The command line reads files with it and the coordinator judges specs and changes with it, so both
refuse the same things in the same words. It reads no file itself except in `read_job_file`.
"""

from hypergpu.jobfile.reading import (
    check_data_folder,
    data_folder,
    parameter_words,
    parse_job,
    parse_job_table,
    parse_spec_json,
    read_job_file,
    spec_json,
    with_parameters,
)
from hypergpu.jobfile.rules import checked_spec, covering, spec_problems, with_strategy
from hypergpu.jobfile.spec import LIMITS, NumberRange
from hypergpu.jobfile.toml import JobFileError, Problem

__all__ = [
    "LIMITS",
    "JobFileError",
    "NumberRange",
    "Problem",
    "check_data_folder",
    "checked_spec",
    "covering",
    "data_folder",
    "parameter_words",
    "parse_job",
    "parse_job_table",
    "parse_spec_json",
    "read_job_file",
    "spec_json",
    "spec_problems",
    "with_parameters",
    "with_strategy",
]
