"""`python -m netsim.measure END ARGUMENTS`: one end of a measurement; prints the result as JSON."""

import sys

import msgspec

from netsim.measure.ends import ENDS

if __name__ == "__main__":
    result = ENDS[sys.argv[1]](**msgspec.json.decode(sys.argv[2]))
    sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
