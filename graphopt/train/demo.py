"""The demo: train a small language model on real text through ``graphopt.compile``, and weigh it against plain PyTorch.

The recipe is bfloat16 compute, AdamW with 8-bit state, checkpoints and clipping; plain PyTorch trains in float32.
Everything a user would do is in ``_train``; the rest is reporting.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import graphopt
from graphopt.errors import UnsupportedError
from graphopt.execute.measure import measure_memory
from graphopt.ir.units import format_bytes, format_seconds
from graphopt.train.byte_gpt import ByteGPT, ByteGPTConfig
from graphopt.train.text_data import TextData, WindowShape, load_text, split_text

DEFAULT_STEPS = 350  # well under two minutes on two cores; more steps write better English
REPORT_NAME = "report.html"

_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.01
_CLIP_GRAD_NORM = 1.0
_NUM_HELD_OUT_BATCHES = 8
_NUM_TIMED_STEPS = 5
_NUM_SAMPLE_BYTES = 300
_LINES_PER_RUN = 10
_PROMPT = b"The "


@dataclass(frozen=True)
class DemoRecipe:
    """What is trained and how.

    ``lr`` is reached after ``warm_up_share`` of the steps and then falls along a cosine to a tenth.
    """

    model: ByteGPTConfig = field(default_factory=ByteGPTConfig)
    batch_size: int = 8
    lr: float = 2e-3
    warm_up_share: float = 0.1
    seed: int = 0


@dataclass(frozen=True)
class Footprint:
    """A training step's memory and time: ``rest_bytes`` stay between steps, ``peak_bytes`` come on top within one."""

    rest_bytes: int
    peak_bytes: int
    step_seconds: float


@dataclass(frozen=True)
class DemoResult:
    """What came of it. Losses are nats per byte on held-out text; ``dumps``: the folder of the step's dump."""

    steps: int
    num_parameters: int
    held_out_before: float
    held_out_after: float
    sample: str
    ours: Footprint
    eager: Footprint
    train_seconds: float
    dumps: tuple[Path, ...]
    report: Path


def run_demo(
    *, text: Path | None, steps: int = DEFAULT_STEPS, out: Path, quiet: bool = False, recipe: DemoRecipe | None = None
) -> DemoResult:
    """Train for ``steps`` steps on ``text`` (None: Python's own documentation), print what came of it, and return it.

    Dumps and the report go into ``out``. Raises DataError for a text that cannot be used, UnsupportedError for a
    number of steps below one.
    """
    if steps < 1:
        raise UnsupportedError(f"expected at least 1 step, came {steps}")
    recipe = recipe or DemoRecipe()
    console = Console(quiet=quiet, highlight=False, markup=False, emoji=False, soft_wrap=True)
    data = split_text(load_text(text), WindowShape(recipe.batch_size, recipe.model.max_length))
    model = _new_model(recipe)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"text: {len(data.train) + len(data.held_out):,} bytes of {text or 'the Python documentation'}; "
        f"model: {num_parameters:,} parameters; {steps} steps of {recipe.batch_size} x {recipe.model.max_length} bytes"
    )
    earlier_dumps = set(out.glob("*/"))
    step = _compile(model, recipe, out)
    held_out_before = _held_out_loss(step, data)
    console.print(f"held-out loss before: {held_out_before:.3f} nats/byte")
    start = time.perf_counter()
    _train(step, data, steps=steps, recipe=recipe, console=console)
    train_seconds = time.perf_counter() - start
    held_out_after = _held_out_loss(step, data)
    sample = _printable(model.generate(_PROMPT, _NUM_SAMPLE_BYTES, generator=_generator(recipe)))
    console.print(
        f"held-out loss after:  {held_out_after:.3f} nats/byte ({train_seconds:.1f} s)\n\nsample:\n{sample}\n"
    )
    ours, eager = _compare(step, model, data, recipe)
    step.report(measure=True).to_html(out / REPORT_NAME)
    result = DemoResult(
        steps=steps,
        num_parameters=num_parameters,
        held_out_before=held_out_before,
        held_out_after=held_out_after,
        sample=sample,
        ours=ours,
        eager=eager,
        train_seconds=train_seconds,
        dumps=tuple(sorted(set(out.glob("*/")) - earlier_dumps)),
        report=out / REPORT_NAME,
    )
    _print_comparison(console, step, result)
    return result


def _new_model(recipe: DemoRecipe) -> ByteGPT:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(recipe.seed)
        return ByteGPT(recipe.model)


def _compile(model: ByteGPT, recipe: DemoRecipe, out: Path) -> Any:
    return graphopt.compile(
        model,
        outputs=["loss"],
        optimizer=graphopt.optim.AdamW8bit(lr=recipe.lr, betas=_BETAS, weight_decay=_WEIGHT_DECAY),
        precision="bf16",
        checkpoint=graphopt.checkpoint.SqrtN(),
        clip_grad_norm=_CLIP_GRAD_NORM,
        dump=out,
    )


def _train(step: Any, data: TextData, *, steps: int, recipe: DemoRecipe, console: Console) -> None:
    generator = _generator(recipe)
    schedule = torch.optim.lr_scheduler.LambdaLR(step.optimizer, _warm_up_then_cosine(steps, recipe.warm_up_share))

    def train_once() -> float:
        ids = data.train_batch(generator)
        loss = step(ids=ids, labels=ids).loss
        schedule.step()
        return float(loss)

    _repeat(train_once, steps=steps, console=console)


def _repeat(train_once: Callable[[], float], *, steps: int, console: Console) -> None:
    """Call ``train_once`` ``steps`` times under a progress bar, or with a line now and then where there is none."""
    if not console.is_terminal:
        every = math.ceil(steps / _LINES_PER_RUN)
        for position in range(1, steps + 1):
            loss = train_once()
            if position % every == 0 or position == steps:
                console.print(f"step {position:>5} of {steps}: loss {loss:.3f}")
        return
    columns = (
        BarColumn(),
        TextColumn("{task.completed}/{task.total}  loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=steps, loss=math.nan)
        for _ in range(steps):
            progress.update(task, advance=1, loss=train_once())


def _warm_up_then_cosine(steps: int, warm_up_share: float) -> Callable[[int], float]:
    """The factor of the learning rate at each step: up in a line, then down along a cosine to a tenth."""
    warm_up = max(1, round(steps * warm_up_share))

    def factor(position: int) -> float:
        if position < warm_up:
            return (position + 1) / warm_up
        done = min(1.0, (position - warm_up) / max(1, steps - warm_up))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return factor


def _held_out_loss(step: Any, data: TextData) -> float:
    batches = data.held_out_batches(_NUM_HELD_OUT_BATCHES)
    return statistics.fmean(float(step.eval(ids=ids, labels=ids).loss) for ids in batches)


def _compare(step: Any, model: ByteGPT, data: TextData, recipe: DemoRecipe) -> tuple[Footprint, Footprint]:
    """Memory and time of the compiled step and of the same step in plain PyTorch, on the same batch, in turns."""
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=recipe.lr, betas=_BETAS, weight_decay=_WEIGHT_DECAY)
    ids = data.train_batch(_generator(recipe))

    def run_ours() -> Any:
        return step(ids=ids, labels=ids)

    def run_eager() -> Any:
        out = plain(ids, labels=ids)
        out["loss"].backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), _CLIP_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return out

    run_eager()  # optimizer state comes into being
    ours_seconds, eager_seconds = [], []
    for _ in range(_NUM_TIMED_STEPS):
        ours_seconds.append(_seconds(run_ours))
        eager_seconds.append(_seconds(run_eager))
    ours_rest = _num_bytes([*model.parameters(), *model.buffers(), *_optimizer_tensors(step.optimizer)])
    eager_rest = _num_bytes([*plain.parameters(), *plain.buffers(), *_optimizer_tensors(optimizer)])
    return (
        Footprint(ours_rest, measure_memory(run_ours).peak_bytes, statistics.median(ours_seconds)),
        Footprint(eager_rest, measure_memory(run_eager).peak_bytes, statistics.median(eager_seconds)),
    )


def _printable(text: bytes) -> str:
    """``text`` without what a terminal would take for a command."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text.decode(errors="replace")
    )


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind ``tensors``, each counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _generator(recipe: DemoRecipe) -> torch.Generator:
    return torch.Generator().manual_seed(recipe.seed)


def _print_comparison(console: Console, step: Any, result: DemoResult) -> None:
    console.print(str(step.report()))
    table = Table("a whole training step", "at rest", "peak above rest", "time (median)")
    for name, footprint in (("plain PyTorch", result.eager), ("graphopt", result.ours)):
        at_rest, peak = format_bytes(footprint.rest_bytes), format_bytes(footprint.peak_bytes)
        table.add_row(name, at_rest, peak, format_seconds(footprint.step_seconds))
    whole = (result.ours.rest_bytes + result.ours.peak_bytes) / (result.eager.rest_bytes + result.eager.peak_bytes)
    console.print(table)
    console.print(
        f"whole step {1 - whole:+.1%} of memory saved, "
        f"peak above rest {1 - result.ours.peak_bytes / result.eager.peak_bytes:+.1%}, "
        f"step time {result.ours.step_seconds / result.eager.step_seconds:.2f} x; "
        "both measured in this run, as the allocator saw it"
    )
    for folder in result.dumps:
        console.print(f"dump: {folder / 'index.md'}")
    console.print(f"report: {result.report}")
