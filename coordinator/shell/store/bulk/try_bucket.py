"""`python -m coordinator.shell.store.bulk.try_bucket ADDRESS` writes, reads and deletes one object,
or says why that cannot be done: for `hypergpu doctor`.
"""

import sys

from hypergpu.errors import HyperGPUError, missing_extra


def main() -> int:
    """Try the object store that the argument names; returns the exit status."""
    try:
        from coordinator.shell.store.bulk.bucket import S3Bucket

        S3Bucket(sys.argv[1], "doctor").check()
    except HyperGPUError as error:
        sys.stdout.write(error.detail)
        return 1
    except ModuleNotFoundError as error:
        if (extra := missing_extra(error)) is None:
            raise
        sys.stdout.write(f"{extra.detail}: {extra.fix}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
