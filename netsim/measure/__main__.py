"""`python -m netsim.measure`: one end of one measurement. Its last line is the result, as JSON."""

import argparse
import sys

import msgspec

from netsim.measure import ends

_STALL_TIMEOUT_S = 10.0


def main() -> None:
    """Run the end that the command line names."""
    options = _arguments()
    address, port = options.address, options.port
    found: object = None
    match options.end:
        case "collect":
            found = ends.collect(address, port, options.stall_timeout_s)
        case "probe":
            found = ends.probe(
                address,
                port,
                count=options.count,
                gap_ns=options.gap_ns,
                payload_bytes=options.payload_bytes,
            )
        case "echo":
            ends.echo(address, port, options.protocol)
        case "round-trips":
            found = ends.round_trips(
                address,
                port,
                options.protocol,
                count=options.count,
                gap_ns=options.gap_ns,
                stall_timeout_s=options.stall_timeout_s,
            )
        case "swallow":
            found = ends.swallow(address, port, options.stall_timeout_s)
        case _:
            ends.pour(
                address, port, for_s=options.for_s, congestion_control=options.congestion_control
            )
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m netsim.measure", description=__doc__)
    parser.add_argument(
        "end", choices=["collect", "probe", "echo", "round-trips", "swallow", "pour"]
    )
    parser.add_argument("address")
    parser.add_argument("port", type=int)
    parser.add_argument("--protocol", choices=["udp", "tcp"], default="udp")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--gap-ns", type=int, default=10_000_000)
    parser.add_argument("--payload-bytes", type=int, default=64)
    parser.add_argument("--for-s", type=float, default=5.0)
    parser.add_argument("--congestion-control", default="")
    parser.add_argument("--stall-timeout-s", type=float, default=_STALL_TIMEOUT_S)
    return parser.parse_args()


if __name__ == "__main__":
    main()
