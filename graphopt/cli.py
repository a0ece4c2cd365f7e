"""The command line: ``graphopt`` and ``python -m graphopt``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer
from rich.console import Console
from rich.table import Table

from graphopt.dry_run import bisect_model, dump_model
from graphopt.errors import DataError, GraphoptError, PassError
from graphopt.fp8 import recipe_of
from graphopt.pipeline.compare import compare_dumps
from graphopt.pipeline.parse import builtin_passes
from graphopt.pipeline.pass_base import Pass
from graphopt.pipeline.pipeline import Pipeline
from graphopt.precision import FULL, Compute, Precision, precision_of
from graphopt.user_files import load_model, load_passes
from graphopt.version import __version__

USER_MISTAKE = 2
_BROKEN_PASS = 1
_TRACEBACK = "--traceback"
# Tables in a pipe or a file have no terminal to fit into.
_WIDTH_WITHOUT_TERMINAL = 160
# typer's own exceptions for a wrong command line; the base class has no public name in all its versions.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]  # type: ignore[assignment]

app = typer.Typer(
    name="graphopt", add_completion=False, pretty_exceptions_enable=False, help="A compiler for PyTorch training steps."
)

Target = Annotated[
    str, typer.Argument(metavar="MODEL.py:make", help="A file and a function that returns (model, batch).")
]
Outputs = Annotated[str, typer.Option(help="Names of the outputs that are required, such as loss,logits.")]
Passes = Annotated[
    str | None,
    typer.Option(help="Passes to run in place of the default ones, such as drop-dead,dedupe; each at its own stage."),
]
LowPrecision = Annotated[str | None, typer.Option("--precision", help="fp32 (the default), bf16, fp16 or fp8.")]
Fp8Recipe = Annotated[str | None, typer.Option("--fp8", help="An FP8 recipe: tensorwise (the default), rowwise, ...")]
Plugin = Annotated[Path | None, typer.Option(help="A Python file whose Pass subclasses can be named in --passes.")]


def main() -> None:
    """Run the command line and exit: 0, 1 when a broken pass was found, 2 for a mistake of the user."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """The exit status of a command; a user's mistake is one line on stderr."""
    show_traceback = _TRACEBACK in arguments
    command = typer.main.get_command(app)
    try:
        status = command.main(
            args=[argument for argument in arguments if argument != _TRACEBACK],
            prog_name="graphopt",
            standalone_mode=False,
        )
    except GraphoptError as error:
        if show_traceback:
            raise
        return _say_mistake(one_line(error))
    except typer.Abort:
        return _say_mistake("stopped")
    except _UsageError as error:
        return _say_mistake(f"{_usage_message(error)} See graphopt --help.")
    return status if isinstance(status, int) else 0


def one_line(error: GraphoptError) -> str:
    """The message on one line; of a broken pass only what it broke, for the program text is long."""
    if isinstance(error, PassError):
        return f"{str(error).splitlines()[0]} ({_TRACEBACK} shows the program; graphopt bisect names the outputs)"
    return " ".join(str(error).split())


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    traceback: Annotated[bool, typer.Option(_TRACEBACK, help="Show the whole traceback of a mistake.")] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@app.command("passes")
def list_passes(plugin: Plugin = None) -> None:
    """List every pass: stage, numerics, options, and what it does."""
    table = Table("pass", "stage", "numerics", "options", "what it does")
    for name, kind in sorted(_registry(plugin).items()):
        table.add_row(name, str(kind.stage), str(kind.numerics), _options_text(kind), _sentence(kind))
    _console().print(table)


@app.command()
def dump(
    target: Target,
    outputs: Outputs = "loss",
    passes: Passes = None,
    plugin: Plugin = None,
    directory: Annotated[Path, typer.Option("--dir", help="Where the dump's folder is made.")] = Path("dumps"),
    explain_fp8: Annotated[bool, typer.Option("--explain-fp8", help="Print what runs in FP8, and why.")] = False,
    precision: LowPrecision = None,
    fp8: Fp8Recipe = None,
    device: Annotated[str | None, typer.Option("--target", help="Whose costs count for FP8, such as H100.")] = None,
) -> None:
    """Capture a model, train nothing, and write the dump: each stage and pass, the emitted code, memory and report."""

    pipeline = _pipeline(passes, plugin)
    wanted = _precision("fp8" if explain_fp8 and precision is None else precision, fp8, device)
    if explain_fp8 and wanted.fp8 is None:
        raise DataError(f"--explain-fp8 expects --precision fp8, came {precision!r}; leave --precision out")
    _refuse_both(pipeline, wanted)
    user = load_model(target)
    folder, report = dump_model(
        user.model, user.batch, outputs=_names(outputs), passes=pipeline, directory=directory, precision=wanted
    )
    # A table of products is wider than any terminal, and no line of it may be broken.
    typer.echo(report.fp8.text()) if explain_fp8 else _console().print(str(report))
    typer.echo(f"written to {folder}")


@app.command()
def diff(
    dir_a: Annotated[Path, typer.Argument(metavar="DIR_A", help="A dump.")],
    dir_b: Annotated[Path, typer.Argument(metavar="DIR_B", help="Another dump.")],
) -> None:
    """Say what differs between two dumps, pass by pass."""

    for comparison in compare_dumps(dir_a, dir_b):
        typer.echo(str(comparison))


@app.command()
def bisect(
    target: Target,
    outputs: Outputs = "loss",
    passes: Passes = None,
    plugin: Plugin = None,
    precision: LowPrecision = None,
    fp8: Fp8Recipe = None,
) -> None:
    """Find the first pass that breaks its contract or changes numbers beyond its declared numerics."""

    pipeline = _pipeline(passes, plugin)
    wanted = _precision(precision, fp8)
    _refuse_both(pipeline, wanted)
    user = load_model(target)
    result = bisect_model(user.model, user.batch, outputs=_names(outputs), passes=pipeline, precision=wanted)
    typer.echo(str(result))
    if result.broken is not None:
        raise typer.Exit(_BROKEN_PASS)


@app.command()
def calibrate() -> None:
    """Measure how fast this machine computes and moves bytes, once: plans for a memory budget then use it."""
    from graphopt.planner.machine_rates import measure_rates, write_rates

    rates = measure_rates()
    path = write_rates(rates)
    _console().print(
        f"{rates.flops / 1e9:.1f} GFLOP/s, {rates.bytes / 1e9:.2f} GB/s, {rates.host_bytes / 1e9:.2f} GB/s to host, "
        f"{rates.call_seconds * 1e6:.1f} us a call ({rates.name}); written to {path}, delete it for the default rates"
    )


@app.command("measure-fp8")
def measure_fp8() -> None:
    """Measure products in bfloat16 and FP8 on this GPU, once: what runs in FP8 is then decided by these times."""
    from graphopt.planner.fp8_measure import measure_device
    from graphopt.planner.fp8_measured import write_table

    table = measure_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    shown = Table("M", "N", "K", "bf16 us", "tensorwise us", "rowwise us", "blockwise us")
    for row in table.products:
        times = (row.bf16, row.tensorwise, row.rowwise, row.blockwise)
        sizes = (row.rows, row.columns, row.contraction)
        shown.add_row(*map(str, sizes), *(f"{seconds * 1e6:.1f}" for seconds in times))
    _console().print(shown)
    path = write_table(table)  # behind what is shown: half a minute's times are not lost with a folder
    _console().print(
        f"{table.device}: {table.pass_bytes / 1e9:.0f} GB/s in a pass, {table.call_seconds * 1e6:.1f} us a call; "
        f"written to {path}, delete it for estimated rates"
    )


@app.command()
def demo(
    text: Annotated[Path | None, typer.Option(help="A text file; default: Python's own documentation.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="How many steps to train.")] = None,
    out: Annotated[Path, typer.Option(help="A folder for the report and the dumps.")] = Path("graphopt-demo"),
) -> None:
    """Train a small language model on real text with the whole recipe, and show it before and after."""
    if text is not None and not text.is_file():
        raise DataError(
            f"expected a text file, came {str(text)!r}, which does not exist; leave --text out for the default"
        )
    # The demo brings a model and its training loop along, which no other command needs.
    from graphopt.train.demo import DEFAULT_STEPS, run_demo

    run_demo(text=text, steps=DEFAULT_STEPS if steps is None else steps, out=out)


def _precision(name: str | None, recipe: str | None, target: str | None = None) -> Precision:
    """What ``--precision``, ``--fp8`` and ``--target`` mean together; the last two mean FP8 by themselves."""
    if name is not None and name not in get_args(Compute):
        known = ", ".join(get_args(Compute))
        raise DataError(f"--precision expects one of {known}, came {name!r}; a recipe of FP8 is given by --fp8")
    if recipe is None and target is None:
        return precision_of(name or "fp32")
    if name not in (None, "fp8"):
        raise DataError(f"--fp8 and --target expect --precision fp8, came {name!r}; leave --precision out")
    found = recipe_of(recipe or "tensorwise")
    return Precision(compute="fp8", fp8=found if target is None else replace(found, target=target))


def _refuse_both(pipeline: Pipeline | None, precision: Precision) -> None:
    if pipeline is not None and precision is not FULL:
        raise DataError(
            "--precision, --explain-fp8, --fp8 and --target expect the default passes, came --passes; leave one out"
        )


def _pipeline(passes: str | None, plugin: Path | None) -> Pipeline | None:
    registry = _registry(plugin)
    if passes is not None:
        return Pipeline.parse(passes, registry=registry)
    if plugin is not None:
        added = ",".join(name for name in registry if name not in builtin_passes())
        raise DataError(
            f"--plugin expects --passes that says what to run; add, for example, --passes drop-dead,{added}"
        )
    return None


def _registry(plugin: Path | None) -> Mapping[str, type[Pass]]:
    known = builtin_passes()
    if plugin is None:
        return known

    added = load_passes(str(plugin))
    taken = [name for name in added if name in known]
    if taken:
        raise DataError(f"{plugin} defines {', '.join(taken)}, names that passes of graphopt have; choose other names")
    return {**known, **added}


def _names(outputs: str) -> tuple[str, ...]:
    names = tuple(filter(None, (name.strip() for name in outputs.split(","))))
    if not names:
        raise DataError(f"--outputs expects names separated by commas, such as loss,logits; came {outputs!r}")
    return names


def _options_text(kind: type[Pass]) -> str:
    return ", ".join(f"{field.name}: {_type_text(field.type)}{_default_text(field.default)}" for field in fields(kind))


def _type_text(kind: Any) -> str:
    # A file without `from __future__ import annotations` has the types themselves.
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _default_text(default: Any) -> str:
    return "" if default is MISSING else f" = {default!r}"


def _sentence(kind: type[Pass]) -> str:
    """What a pass does: the first paragraph of its file, if the file is named as the pass, or of its class."""
    is_own_file = kind.__module__.rpartition(".")[2] == kind.name.replace("-", "_")
    text = sys.modules[kind.__module__].__doc__ if is_own_file else kind.__doc__
    return " ".join((text or "").strip().partition("\n\n")[0].split())


def _console() -> Console:
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH_WITHOUT_TERMINAL
    return console


def _usage_message(error: Any) -> str:
    return str(error.format_message())


def _say_mistake(message: str) -> int:
    typer.echo(f"graphopt: {message}", err=True)
    return USER_MISTAKE
