"""Time from a finished fine-tuning to the first token of what it gave."""

import tempfile
import time
from pathlib import Path

import hypergpu
from benchmarks.ours.serving.random_model import save_random_base
from benchmarks.ours.serving.served import served_model
from benchmarks.ours.table import PartFigures
from hypergpu.serving.calls import AnswerToken, ModelCall, Sampling

_WANTED_S = 20.0
_ROWS = [{"prompt": f"w{number} w{number + 1}", "completion": " w3 w4"} for number in range(40)]


def finetune_figures() -> PartFigures:
    """Fine-tune on a node that has the base, and have the same node answer."""
    with tempfile.TemporaryDirectory() as name:
        base = save_random_base(Path(name) / "base", width=512, layers=8)
        with served_model(Path(name) / "run", base, ("one",)) as run:
            run.client.stop(run.job)
            tuned_run = hypergpu.finetune(
                base,
                data=_ROWS[:-8],
                held_out=_ROWS[-8:],
                coordinator=run.client,
                steps=2,
                inner_steps=1,
                batch_size=4,
                options={"sequence_length": 32, "rank": 4, "packing": False},
            )
            tuned_run.result()
            began_s = time.monotonic()
            model = hypergpu.serve(tuned_run, coordinator=run.client, name="tuned")
            ready_s = time.monotonic() - began_s
            call = ModelCall(
                tokens=(5, 6, 7), sampling=Sampling(temperature=0.0), new_tokens_most=2
            )
            parts = run.client.answer(model.job, call)
            next(part for part in parts if isinstance(part, AnswerToken))
            first_s = time.monotonic() - began_s
            parts.close()
    return PartFigures(
        rows=[
            ("from a finished fine-tuning to the first token", f"{first_s:.1f} s", "20 s"),
            ("of it fetching and loading", f"{ready_s:.1f} s", ""),
        ],
        metrics={"first_token_after_finetune_s": first_s},
        notes=["27M parameters in float32; the worker starts anew, as the job is another."],
    )
