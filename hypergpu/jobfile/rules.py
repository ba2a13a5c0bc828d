"""Rules for a whole spec, wherever it came from: ranges, choices, combinations, pay, strategies,
workload.

What each strategy fixes: a file may leave these settings out or repeat them, not change them.

- ``sync``: every inner step is synchronised; everything travels whole and nobody is left behind.
- ``fedavg``: H inner steps, then a plain mean; everything travels whole and nobody is left behind.
- ``diloco``: H inner steps, compressed pseudo-gradients, Nesterov's outer step; all settings free.
- ``aware``: like ``diloco``, with H, codec and deadline planned for every node and round. A codec,
  connections or a deadline that the file states are kept, and the plan decides the rest.
"""

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from hypergpu.ids import DATA_NAME_FORM, is_data_name
from hypergpu.jobfile.keys import Scalar
from hypergpu.jobfile.limits import CHOICES, LIMITS, NAME_LENGTH_MOST
from hypergpu.jobfile.requirements import (
    REQUIREMENTS_MOST,
    RequirementError,
    parse_requirement,
)
from hypergpu.jobfile.spec import (
    MOMENTUM_MOST_OVERLAPPED,
    PLANNED,
    SPARSE_CODECS,
    Aware,
    Inner,
    JobSpec,
    Outer,
)
from hypergpu.jobfile.toml import (
    PROBLEMS_MOST,
    JobFileError,
    Problem,
    join_words,
    nearest,
    short_text,
    suggestion,
)
from hypergpu.ledger_terms import AMOUNT_MOST
from hypergpu.units import several
from hypergpu.workloads.entry import OptionError, WorkloadEntry, check_value, complete_options

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
    "aware": {},
}


def with_strategy(spec: JobSpec, strategy: str) -> JobSpec:
    """Return the same job under another strategy, with the settings that the strategy fixes. What
    was stated for fixed steps is no setting of a plan.
    """
    if spec.strategy == strategy:
        return spec
    sections = {table: getattr(spec, table) for table in ("training", "outer", "codec", "round")}
    for key, value in FIXED[strategy].items():
        table, _, name = key.partition(".")
        sections[table] = replace(sections[table], **{name: value})
    aware = spec.aware if strategy == "aware" else Aware()
    if strategy == "aware":
        sections["round"] = replace(sections["round"], deadline_ms=0)
        if spec.round.overlap != "none":
            aware = replace(aware, sparsest="int4")
    return replace(spec, strategy=strategy, aware=aware, **sections)


def strategy_problems(spec: JobSpec) -> Iterator[Problem]:
    """Yield settings that contradict the strategy."""
    for key, value in FIXED.get(spec.strategy, {}).items():
        table, _, name = key.partition(".")
        spec_value = getattr(getattr(spec, table), name)
        if spec_value != value:
            what = f'strategy "{spec.strategy}" has {value} here, not {spec_value}'
            yield Problem(key, what, 'remove it, or choose strategy = "diloco"')
    if spec.strategy != "aware" and spec.aware != Aware():
        yield unused_aware(spec.strategy)
    for key in spec.aware.stated_keys:
        if key not in PLANNED:
            what = f'"{short_text(key)}" is no key that a plan decides'
            yield Problem("aware.stated_keys", what, "remove stated_keys, and state the keys")


def unused_aware(strategy: str) -> Problem:
    """Yield a table ``aware`` in a job of another strategy."""
    what = f'it does nothing with strategy "{strategy}"'
    return Problem("aware", what, 'set strategy = "aware" on top, or remove [aware]')


def overlap_problems(spec: JobSpec) -> Iterator[Problem]:
    """Settings beside which rounds that overlap diverge, or take far more samples: sparse codecs,
    whose errors staleness multiplies (docs/decisions/0016-overlap.md), and much outer momentum.
    """
    if spec.round.overlap != "eager" or "round.overlap" in FIXED.get(spec.strategy, {}):
        return
    without = 'or remove overlap = "eager"'
    codecs = {"codec.up": spec.codec.up, "codec.down": spec.codec.down}
    if spec.strategy == "aware":
        codecs = {key: codecs[key] for key in codecs if spec.aware.takes_as_stated(key)}
        if "codec.up" not in codecs:
            codecs["aware.sparsest"] = spec.aware.sparsest
    for key, codec in codecs.items():
        if codec in SPARSE_CODECS:
            what = f'rounds that overlap are dense, and this is "{codec}"'
            yield Problem(key, what, f'set it to "int4", {without}')
    rate, momentum, most = spec.outer.learning_rate, spec.outer.momentum, MOMENTUM_MOST_OVERLAPPED
    if momentum is None and rate is not None:
        momentum = Outer().momentum
    if momentum is not None and momentum > most:
        what = f"rounds that overlap bear at most {most}, not {momentum}"
        yield Problem("outer.momentum", what, f"set it to at most {most}, {without}")


_ONLY_WITH: Mapping[str, tuple[str, ...]] = {
    "beta1": ("adamw", "muon"),
    "beta2": ("adamw", "muon"),
    "epsilon": ("adamw", "muon"),
    "momentum": ("sgd", "muon"),
    "muon_ratio": ("muon",),
}
"""Optimizers that look at a setting; beside Muon, AdamW steps all parameters but hidden weights."""


def node_problems(spec: JobSpec) -> Iterator[Problem]:
    """Yield settings of ``[nodes]`` that no node could meet, or that are no requirements."""
    most, least = spec.nodes.max, spec.training.nodes
    if 0 < most < least:
        what = f"at most {several(most, 'node')}, and training.nodes waits for {least}"
        yield Problem("nodes.max", what, f"set it to at least {least}, or lower training.nodes")
    if len(spec.nodes.labels) > REQUIREMENTS_MOST:
        what = f"there are {len(spec.nodes.labels)} requirements"
        yield Problem("nodes.labels", what, f"keep at most {REQUIREMENTS_MOST}")
        return
    for text in spec.nodes.labels:
        try:
            parse_requirement(text)
        except RequirementError as wrong:
            yield Problem("nodes.labels", str(wrong), wrong.fix)


def optimizer_problems(spec: JobSpec) -> Iterator[Problem]:
    """Yield settings of ``[inner]`` that its optimizer would not look at."""
    for name, optimizers in _ONLY_WITH.items():
        value = getattr(spec.inner, name)
        if spec.inner.optimizer not in optimizers and value != getattr(Inner(), name):
            what = f'it does nothing with optimizer "{short_text(spec.inner.optimizer)}"'
            fix = f'remove it, or set optimizer = "{optimizers[0]}"'
            yield Problem(f"inner.{name}", what, fix)


def pay_problems(spec: JobSpec) -> Iterator[Problem]:
    """Yield settings of ``[pay]`` that contradict each other or the work."""
    pay, training = spec.pay, spec.training
    if pay.unit_price <= 0:
        if pay.escrow:
            what = "escrow does nothing where nothing is paid"
            yield Problem("pay.escrow", what, "set unit_price in [pay], or remove escrow")
        return
    a_round = pay.most_for(training.inner_steps * training.batch_size * training.nodes)
    if 0 < pay.escrow < a_round:
        what = f"{pay.escrow} does not cover the first round, which may cost {a_round}"
        fix = f"set at least {a_round}, or 0 for what the whole job may cost; or lower unit_price"
        yield Problem("pay.escrow", what, fix)
    # One that is named has a range of its own.
    if not pay.escrow and spec.escrow > AMOUNT_MOST:
        what = (
            f"the whole job may cost {spec.escrow}, and the ledger holds an escrow of at most"
            f" {AMOUNT_MOST}"
        )
        most = AMOUNT_MOST * 100 // spec.stated_samples
        fix = f"set unit_price to at most {most}; or fewer rounds; or name an escrow in [pay]"
        yield Problem("pay.unit_price", what, fix)


def covering(spec: JobSpec, nodes: int) -> JobSpec:
    """Return the job with an escrow for all known nodes, where its file names none.

    A plan divides the stated work among all nodes; else each adds as much as the others.

    Args:
        spec: Of the job.
        nodes: That could take work as it begins.
    """
    stated_nodes, most = spec.training.nodes, spec.nodes.max
    nodes = min(nodes, most) if most else nodes
    if (
        not spec.pay.unit_price
        or spec.pay.escrow
        or spec.strategy == "aware"
        or nodes <= stated_nodes
    ):
        return spec
    most = spec.pay.most_for(spec.stated_samples // stated_nodes * nodes)
    escrow = min(most, int(LIMITS["pay.escrow"].most))
    return replace(spec, pay=replace(spec.pay, escrow=escrow))


def workload_problems(spec: JobSpec) -> Iterator[Problem]:
    """Yield an unknown workload, unknown options, and data that the workload cannot take."""
    # numpy, which a core that reads specs has no use for.
    from hypergpu.workloads.registry import UnknownWorkloadError, entries, find

    if not spec.workload:
        fix = f"choose one of {join_words(entry.name for entry in entries())}"
        yield Problem("workload", "it is missing", fix)
        return
    try:
        entry = find(spec.workload)
    except UnknownWorkloadError:
        names = [entry.name for entry in entries()]
        what = f'there is no workload "{short_text(spec.workload)}"'
        yield Problem("workload", what, suggestion(spec.workload, names))
        return
    yield from _option_problems(entry, spec)
    if entry.metric == "accuracy" and spec.evaluation.target > 1:
        what = f"an accuracy is never above 1, so {spec.evaluation.target:g} is never reached"
        yield Problem("evaluation.target", what, "write 0.97 for 97 %")
    yield from _data_problems(entry, spec)


def usual_optimizer(workload: str) -> str:
    """Return the inner optimizer of a job file that names none."""
    from hypergpu.workloads.registry import UnknownWorkloadError, find  # as above

    try:
        return find(workload).optimizer
    except UnknownWorkloadError:
        return Inner().optimizer


def _option_problems(entry: WorkloadEntry, spec: JobSpec) -> Iterator[Problem]:
    names = [option.name for option in entry.options]
    known_options = {name: value for name, value in spec.options.items() if name in names}
    unknown_names = [name for name in spec.options if name not in known_options]
    for number, name in enumerate(unknown_names):
        nearest_name = nearest(name, names) if number < PROBLEMS_MOST else ""
        fix = (
            f"did you mean {nearest_name}?"
            if nearest_name
            else f"its options are {join_words(names)}"
        )
        yield Problem(f"options.{name}", f"{entry.name} has no such option", fix)
    for name, value in known_options.items():
        try:
            check_value(entry, name, value)
        except OptionError as wrong:
            yield Problem(f"options.{name}", str(wrong), wrong.fix)
            names.remove(name)
    if known_options.keys() <= set(names):
        try:
            complete_options(entry, known_options)
        except OptionError as wrong:
            option_names = [option.name for option in entry.options if option.name in known_options]
            yield Problem(f"options.{option_names[-1]}", str(wrong), wrong.fix)


def _data_problems(entry: WorkloadEntry, spec: JobSpec) -> Iterator[Problem]:
    if spec.data.stays_on_nodes:
        yield from _node_data_problems(entry, spec)
        return
    if spec.data.name:
        what = 'it does nothing where source is "shared"'
        yield Problem("data.name", what, 'set source = "node", or remove name')
    if spec.data.path and entry.takes_data == "never":
        what = f"{entry.name} trains on {entry.dataset} only"
        yield Problem("data.path", what, "remove path, or choose a workload that takes data")
    if not spec.data.path and entry.takes_data == "required":
        what = f"{entry.name} needs data of yours"
        yield Problem("data.path", what, 'add path = "FOLDER" in [data]')


def _node_data_problems(entry: WorkloadEntry, spec: JobSpec) -> Iterator[Problem]:
    """Yield problems of a job whose training samples stay on nodes."""
    if not entry.takes_node_data:
        what = f"{entry.name} cannot train on data that stay on nodes"
        yield Problem("data.source", what, 'choose another workload, or source = "shared"')
    if not is_data_name(spec.data.name):
        what = f'"{short_text(spec.data.name)}" is no name of a data set' if spec.data.name else ""
        what = what or "owners of nodes must know what is asked of them"
        yield Problem("data.name", what, f'write name = "chest-xrays" or alike: {DATA_NAME_FORM}')
    if not spec.data.path:
        what = "there are no held-out samples to judge the model and the nodes' updates by"
        yield Problem("data.path", what, 'add path = "FOLDER" in [data], with held-out samples')
    if spec.data.sharding != "iid":
        what = "each node trains on its own samples: there is nothing to divide"
        yield Problem("data.sharding", what, "remove it")


def checked_spec(spec: JobSpec) -> JobSpec:
    """Return the spec if it describes a job.

    Raises:
        JobFileError: It does not; all problems at once.
    """
    if problems := spec_problems(spec):
        raise JobFileError(problems)
    return spec


def spec_problems(spec: JobSpec) -> tuple[Problem, ...]:
    """Return all problems of a spec, in the job file's order."""
    return (
        *_name_problems(spec),
        *workload_problems(spec),
        *_range_problems(spec),
        *_choice_problems(spec),
        *strategy_problems(spec),
        *node_problems(spec),
        *optimizer_problems(spec),
        *overlap_problems(spec),
        *_pair_problems(spec),
        *pay_problems(spec),
    )


def _value(spec: JobSpec, key: str) -> object:
    table, _, name = key.partition(".")
    return getattr(getattr(spec, table), name) if name else getattr(spec, table)


def _name_problems(spec: JobSpec) -> Iterator[Problem]:
    if len(spec.name) > NAME_LENGTH_MOST:
        what = f"it has {len(spec.name)} characters"
        yield Problem("name", what, f"use at most {NAME_LENGTH_MOST}")
    if not spec.name.isprintable():
        yield Problem("name", "it holds characters that cannot be printed", "remove them")


def _range_problems(spec: JobSpec) -> Iterator[Problem]:
    for key, limit in LIMITS.items():
        value = _value(spec, key)
        if isinstance(value, int | float) and not limit.holds(value):
            what = f"{short_text(value)} is outside {limit}"
            yield Problem(key, what, f"choose a value in {limit}")


def _choice_problems(spec: JobSpec) -> Iterator[Problem]:
    for key, words in CHOICES.items():
        value = str(_value(spec, key))
        if value not in words:
            yield Problem(key, f'"{short_text(value)}" is unknown', suggestion(value, words))


def _pair_problems(spec: JobSpec) -> Iterator[Problem]:
    training, split = spec.training, spec.data
    if split.sharding == "dirichlet" and 0 < split.partitions < training.nodes:
        what = f"{several(split.partitions, 'partition')} cannot serve {training.nodes} nodes"
        fix = f"set partitions to at least {training.nodes}, or to 0 for one a node"
        yield Problem("data.partitions", what, fix)
    total_steps = training.rounds * training.inner_steps
    if total_steps > 0 and spec.inner.warmup_steps >= total_steps:
        what = f"a warm-up of {several(spec.inner.warmup_steps, 'step')} outlasts the job"
        fix = f"stay below rounds x inner_steps = {total_steps}"
        yield Problem("inner.warmup_steps", what, fix)
