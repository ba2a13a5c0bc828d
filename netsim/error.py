"""Why netsim cannot do what it was asked, and what would help."""


class NetsimError(Exception):
    """Nothing was started, or everything that was started is gone again.

    Args:
        what: What is impossible and where: a file's key, a device, a number.
        fix: What the reader should do.
    """

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}. Fix: {fix}")
        self.what = what
        self.fix = fix
