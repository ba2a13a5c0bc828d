"""Lines of homes against tokens a second and first tokens, beside llama.cpp alone."""

import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from benchmarks.ours.cluster import running
from benchmarks.ours.serving.gguf import llama_alone, llama_seconds
from benchmarks.ours.serving.random_model import save_random_gguf
from benchmarks.ours.serving.served import ServedModelRun, TimedAnswer
from benchmarks.ours.table import PartFigures
from hypergpu.serving.calls import ModelCall, Sampling
from hypergpu.wire.credentials import parse_token, token_text
from hypergpu.wire.free_ports import free_ports
from netsim.emulation.requests import SetShape
from netsim.network.profiles import profile
from netsim.proxy.process import Forward, ProxiedNode, ProxyPlan, ProxyProcess

_LINES = ("lan", "home-fibre", "home-cable", "home-dsl", "lte-moving", "geo-sat")
_HOME = "127.0.0.9"
_NODE = "one"
_TOKENS = 64
_CALLS = 3


class _LineFigures(NamedTuple):
    tokens_per_s: float
    first_ms: float


def lines_figures() -> PartFigures:
    """One node behind each line in turn: it joins over the first, and its line changes."""
    with tempfile.TemporaryDirectory() as name:
        return asyncio.run(_figures(Path(name)))


async def _figures(folder: Path) -> PartFigures:
    file = save_random_gguf(folder / "base", width=512, layers=8)
    alone = llama_alone(file)
    alone_per_s = _TOKENS / min(llama_seconds(alone, _TOKENS) for _ in range(_CALLS))
    (folder / "run").mkdir()
    main_ports = free_ports(2)
    with (
        running(
            folder / "run", is_plaintext=True, node_port=main_ports[0], bulk_port=main_ports[1]
        ) as cluster,
        cluster.client() as client,
    ):
        token = parse_token(cluster.node_token())
        port = int(token.addresses[0].rpartition(":")[2])
        forwards = tuple(Forward(target_port=each, port=each) for each in (port, *main_ports))
        shape = profile(_LINES[0]).shape
        node = ProxiedNode(name=_NODE, shape=shape, forwards=forwards, listen=_HOME)
        async with ProxyProcess(ProxyPlan(nodes=(node,), seed=1)) as proxies:
            run = ServedModelRun(cluster, client, {})
            own_token = token_text(replace(token, addresses=(f"{_HOME}:{port}",)))
            await asyncio.to_thread(run.add_node, _NODE, own_token)
            await asyncio.to_thread(lambda: run.serve(file, replicas=1))
            figures = {}
            for line in _LINES:
                await proxies.obey(SetShape(_NODE, profile(line).shape))
                figures[line] = await asyncio.to_thread(_measure, run)
    return _table(figures, alone_per_s)


def _measure(run: ServedModelRun) -> _LineFigures:
    answers: list[TimedAnswer] = []
    for number in range(_CALLS + 1):
        call = ModelCall(
            tokens=(number, *range(100, 163)),
            sampling=Sampling(temperature=0.0),
            new_tokens_most=_TOKENS,
        )
        answers.append(run.answer(call))
    paces = [(len(each.at_s) - 1) / (each.at_s[-1] - each.at_s[0]) for each in answers[1:]]
    firsts_ms = [1000 * each.at_s[0] for each in answers[1:]]
    return _LineFigures(statistics.median(paces), statistics.median(firsts_ms))


def _table(figures: dict[str, _LineFigures], alone_per_s: float) -> PartFigures:
    rows = [("llama.cpp alone, one thread: tokens/s", f"{alone_per_s:.1f}", "")]
    metrics: dict[str, float] = {}
    for line, each in figures.items():
        share = each.tokens_per_s / alone_per_s
        text = f"{each.tokens_per_s:.1f}/s, {share:.2f}, {each.first_ms:.0f} ms"
        rows.append((f"{line}: tokens/s, share of that, first token", text, ""))
        key = line.replace("-", "_")
        metrics |= {f"line_share_{key}": share, f"line_first_ms_{key}": each.first_ms}
    notes = [f"27M parameters, 64 + {_TOKENS} tokens, netsim's proxy, plain text."]
    return PartFigures(rows=rows, metrics=metrics, notes=notes)
