"""``python -m netsim.tc.guard DESCRIPTOR``: outlives a network's owner and removes what is left.

The owner hands over the locked record of what it made and holds our standard input open. The kernel
closes it when the owner is gone, however it went.
"""

import sys

from netsim.emulation.namespaces import SlotClaim


def main() -> None:
    """Wait for the owner's end."""
    claim = SlotClaim.inherit(int(sys.argv[1]))
    sys.stdin.buffer.read()
    # An owner that ended in order has removed everything and emptied the record.
    if claim.remove_everything():
        claim.release()


if __name__ == "__main__":
    main()
