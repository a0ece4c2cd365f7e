"""What the benchmark commands share: options, the console, the progress line, mistakes as one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import track

from benchmarks.models import BenchmarkModel, model_named
from graphopt.cli import USER_MISTAKE
from graphopt.errors import GraphoptError

Item = TypeVar("Item")

WEIGHT_SEED = 0
# Tables in a pipe or a file have no terminal to fit into.
_WIDTH_WITHOUT_TERMINAL = 200

ModelName = Annotated[str, typer.Option("--model", help="A name in benchmarks/models.py, such as gpt2-124m.")]
Layers = Annotated[int | None, typer.Option(min=1, help="Another number of layers than the model has.")]
Outputs = Annotated[str | None, typer.Option(help="Names of the required outputs, such as loss,logits.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds of timing; each runs every contender once.")]
Results = Annotated[Path, typer.Option(help="The folder that rows are written to.")]


def run_command(main: Callable[..., Any]) -> None:
    """Run ``main`` with the command line's options and exit; a user's mistake is one line on stderr, exit 2."""
    quiet_transformers()
    try:
        typer.run(main)
    except GraphoptError as error:
        typer.echo(f"benchmarks: {' '.join(str(error).split())}", err=True)
        sys.exit(USER_MISTAKE)


def chosen_model(name: str, outputs: str | None) -> BenchmarkModel:
    """The model called ``name``, asked for the outputs named in ``outputs`` (None: its own)."""
    model = model_named(name)
    names = tuple(filter(None, (part.strip() for part in (outputs or "").split(","))))
    return replace(model, outputs=names) if names else model


def console() -> Console:
    """Where tables go."""
    found = Console(markup=False, highlight=False, emoji=False)
    if not found.is_terminal:
        found.width = _WIDTH_WITHOUT_TERMINAL
    return found


def with_progress(items: Iterable[Item], *, total: int, description: str) -> Iterator[Item]:
    """``items``, with a bar on a terminal's stderr while they come."""
    stderr = Console(stderr=True)
    return iter(track(items, description, total=total, console=stderr, disable=not stderr.is_terminal))


def quiet_transformers() -> None:
    """Keep transformers' hints about configs to itself: they are for people who load weights. It may be missing."""
    if find_spec("transformers") is None:
        return
    import transformers

    transformers.logging.set_verbosity_error()


def seed_weights() -> None:
    """Let the model made next have the same weights in every run."""
    torch.manual_seed(WEIGHT_SEED)
