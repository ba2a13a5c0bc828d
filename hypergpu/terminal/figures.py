"""Numbers as people read them."""


def size(count: int) -> str:
    """Bytes, in the unit that leaves at most four digits."""
    if count < 1000:
        return f"{count} B"
    value = float(count)
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        if value < 999.5 or unit == "TB":
            return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{count} B"


def span(seconds: float) -> str:
    """A duration."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24} h"


def milliseconds(value_us: float) -> str:
    """A short time, to three digits."""
    return f"{value_us / 1000:.3g} ms" if value_us < 1e6 else span(value_us / 1e6)


def mbit_s(bits_per_s: float) -> str:
    """A rate in Mbit/s, without its unit."""
    value = bits_per_s / 1e6
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def percent(share: float) -> str:
    """A share, small ones to two digits."""
    return f"{share * 100:.2g} %" if share < 0.1 else f"{share:.0%}"


def score(value: float | None) -> str:
    """A loss or metric; a dash before the first."""
    return "-" if value is None else f"{value:.4f}"


def short(name: str) -> str:
    """A node's id or a digest, cut to what tells it apart."""
    return name if len(name) <= 14 else f"{name[:10]}..."


def short_id(name: str) -> str:
    """The beginning of a job's or node's id that commands take for the whole."""
    return name[: (4 if name.startswith("job-") else 2) + 8]


def name_or_id(name: str, identifier: str) -> str:
    """What a person calls it; where nobody named it, its short id."""
    return name or short_id(identifier)
