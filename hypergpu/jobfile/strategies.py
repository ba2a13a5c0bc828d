"""What each strategy fixes: a file may leave these settings out or repeat them, not change them.

- ``sync``: every inner step is synchronised; everything travels whole and nobody is left behind.
- ``fedavg``: H inner steps, then a plain mean; everything travels whole and nobody is left behind.
- ``diloco``: H inner steps, compressed pseudo-gradients, Nesterov's outer step; all settings free.
- ``aware``: like ``diloco``, with H, codec and deadline planned for every node and round.
"""

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from hypergpu.jobfile.problem import Problem
from hypergpu.jobfile.schema import Scalar
from hypergpu.jobfile.spec import SPARSE_SCHEMES, Aware, JobSpec

_PLAIN: Mapping[str, Scalar] = {
    "outer.learning_rate": 1.0,
    "outer.momentum": 0.0,
    "codec.up": "fp32",
    "codec.down": "fp32",
    "round.deadline_ms": 0,
    "round.overlap": "none",
}

FIXED: Mapping[str, Mapping[str, Scalar]] = {
    "sync": {"training.inner_steps": 1, **_PLAIN},
    "fedavg": _PLAIN,
    "diloco": {},
    "aware": {"round.deadline_ms": 0},
}

PLANNED = ("codec.up", "codec.down", "round.connections")
"""Keys that ``aware`` ignores: each node's plan decides them."""


def with_strategy(spec: JobSpec, strategy: str) -> JobSpec:
    """Return the same job under another strategy, with the settings that the strategy fixes."""
    sections = {table: getattr(spec, table) for table in ("training", "outer", "codec", "round")}
    for key, value in FIXED[strategy].items():
        table, _, name = key.partition(".")
        sections[table] = replace(sections[table], **{name: value})
    aware = spec.aware if strategy == "aware" else Aware()
    if strategy == "aware" and spec.round.overlap != "none":
        aware = replace(aware, sparsest="int4")
    return replace(spec, strategy=strategy, aware=aware, **sections)


def strategy_problems(spec: JobSpec) -> Iterator[Problem]:
    """Yield settings that contradict the strategy."""
    for key, value in FIXED.get(spec.strategy, {}).items():
        table, _, name = key.partition(".")
        given = getattr(getattr(spec, table), name)
        if given != value:
            yield Problem(key, *_contradiction(spec.strategy, value, given))
    if spec.strategy != "aware" and spec.aware != Aware():
        yield unused_aware(spec.strategy)


def _contradiction(strategy: str, value: Scalar, given: Scalar) -> tuple[str, str]:
    if strategy == "aware":
        what = f'strategy "aware" plans the deadline of each round; {given} ms contradicts it'
        return what, 'remove it, or choose strategy = "diloco"'
    what = f'strategy "{strategy}" has {value} here, not {given}'
    return what, 'remove it, or choose strategy = "diloco"'


def unused_aware(strategy: str) -> Problem:
    """Yield a table ``aware`` in a job of another strategy."""
    what = f'it does nothing with strategy "{strategy}"'
    return Problem("aware", what, 'set strategy = "aware" on top, or remove [aware]')


_MOMENTUM_MOST = 0.5
"""Most outer momentum beside overlapping rounds: stale updates with more of it diverge."""


def overlap_problems(spec: JobSpec) -> Iterator[Problem]:
    """Settings beside which rounds that overlap diverge, or take far more samples: sparse codecs,
    whose errors staleness multiplies (docs/decisions/0016-overlap.md), and much outer momentum.
    """
    if spec.round.overlap != "eager" or "round.overlap" in FIXED.get(spec.strategy, {}):
        return
    without = 'or remove overlap = "eager"'
    is_planned = spec.strategy == "aware"
    codecs = {"aware.sparsest": spec.aware.sparsest} if is_planned else {}
    codecs |= {} if is_planned else {"codec.up": spec.codec.up, "codec.down": spec.codec.down}
    for key, codec in codecs.items():
        if codec in SPARSE_SCHEMES:
            what = f'rounds that overlap are dense, and this is "{codec}"'
            yield Problem(key, what, f'set it to "int4", {without}')
    if spec.outer.momentum > _MOMENTUM_MOST:
        what = f"rounds that overlap bear at most {_MOMENTUM_MOST}, not {spec.outer.momentum}"
        yield Problem("outer.momentum", what, f"set it to at most {_MOMENTUM_MOST}, {without}")
