"""`python -m netsim.measure`: one end of one measurement; what it found is its last line, JSON."""

import argparse
import sys

import msgspec

from netsim.measure import programs

PATIENCE_S = 10.0


def main() -> None:
    """Run the end that the command line names."""
    options = _arguments()
    address, port = options.address, options.port
    found: object = None
    match options.end:
        case "collect":
            found = programs.collect(address, port, options.patience_s)
        case "probe":
            found = programs.probe(
                address,
                port,
                count=options.count,
                gap_ns=options.gap_ns,
                payload_bytes=options.payload_bytes,
            )
        case "echo":
            programs.echo(address, port, options.protocol)
        case "round-trips":
            found = programs.round_trips(
                address,
                port,
                options.protocol,
                count=options.count,
                gap_ns=options.gap_ns,
                patience_s=options.patience_s,
            )
        case "swallow":
            found = programs.swallow(address, port, options.patience_s)
        case _:
            programs.pour(
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
    parser.add_argument("--patience-s", type=float, default=PATIENCE_S)
    return parser.parse_args()


if __name__ == "__main__":
    main()
