"""How the repository is laid out, as data: what may import what, where private torch may be, sizes, folders."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from graphopt.passes import BY_NAME

ROOT = Path(__file__).resolve().parents[1]

# From each part of graphopt (a folder, or a file that lies directly in it), the parts it may import. Its own part is
# always allowed. Read from top to bottom, a part imports only what stands above it.
IMPORTS: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "version": frozenset(),
    "torch_range": frozenset(),
    "kernels": frozenset(),
    "operators": frozenset({"kernels"}),
    "fp8": frozenset({"errors"}),
    "ir": frozenset({"errors", "operators", "fp8"}),
    "loss_scale": frozenset({"errors"}),
    "precision": frozenset({"errors", "fp8"}),
    "optim": frozenset({"errors", "ir", "kernels", "operators"}),
    "checkpoint": frozenset({"errors", "ir"}),
    "planner": frozenset({"errors", "kernels", "operators", "fp8", "ir", "checkpoint"}),
    "pipeline": frozenset({"errors", "ir", "planner", "precision"}),
    "passes": frozenset({"errors", "operators", "fp8", "ir", "pipeline", "checkpoint", "planner"}),
    "options": frozenset({"errors", "optim", "loss_scale", "precision", "checkpoint", "planner", "pipeline"}),
    "user_files": frozenset({"errors", "pipeline"}),
    "capture": frozenset({"errors", "kernels", "fp8", "ir", "operators", "optim", "loss_scale"}),
    "execute": frozenset({"errors", "kernels", "fp8", "ir", "operators", "optim", "loss_scale", "capture"}),
    "report": frozenset({"errors", "kernels", "ir", "pipeline", "capture", "execute"}),
    "train": frozenset({"errors", "ir", "execute"}),
    "build": frozenset(
        {
            "errors",
            "ir",
            "optim",
            "precision",
            "checkpoint",
            "planner",
            "pipeline",
            "options",
            "capture",
            "execute",
            "report",
        }
    ),
    "api": frozenset(
        {
            "errors",
            "ir",
            "optim",
            "loss_scale",
            "fp8",
            "precision",
            "checkpoint",
            "planner",
            "pipeline",
            "options",
            "capture",
            "execute",
            "build",
        }
    ),
    "eligibility": frozenset({"fp8", "ir", "precision", "pipeline", "build"}),
    "autocast_table": frozenset({"ir", "precision", "api"}),
    "dry_run": frozenset({"ir", "precision", "pipeline", "options", "report", "build", "api"}),
    "graphopt": frozenset(
        {
            "errors",
            "version",
            "torch_range",
            "optim",
            "loss_scale",
            "fp8",
            "precision",
            "checkpoint",
            "pipeline",
            "passes",
            "options",
            "capture",
            "train",
            "api",
            "eligibility",
            "autocast_table",
        }
    ),
    "cli": frozenset(
        {"errors", "version", "fp8", "precision", "planner", "pipeline", "user_files", "train", "dry_run"}
    ),
    "__main__": frozenset({"cli"}),
}

# Imports against that order, by module and part, with the reason.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("graphopt.pipeline.default", "passes"): "the one ordered list of passes",
    ("graphopt.ir.program", "pipeline"): "a type alone: a Program carries its PassRecords and looks into none",
    ("graphopt.execute.step", "report"): "step.report() and step.explain(), loaded when called",
    ("graphopt.execute.module", "report"): "report() and explain(), loaded when called",
    ("graphopt.execute.step", "train"): "step.save(), loaded when called",
    ("graphopt.train.demo", "graphopt"): "the demo is a user's program",
}
# Of the exceptions, those that must stay inside a function (or under TYPE_CHECKING), because they close a circle.
NOT_AT_IMPORT = frozenset(EXCEPTIONS) - {("graphopt.pipeline.default", "passes"), ("graphopt.train.demo", "graphopt")}

# Passes know the IR, what a pass is and how memory is planned; not how a pipeline runs them, and not each other.
PASSES_MAY_IMPORT = re.compile(
    r"graphopt\.((ir|operators)(\.\w+)?|planner(\.\w+)?|fp8|checkpoint|pipeline\.pass_base|errors)"
)

# Where private torch modules may be imported.
PRIVATE_TORCH_PARTS = frozenset({"capture", "execute"})
PRIVATE_TORCH_FILES: dict[str, str] = {
    "graphopt.ir.fake": "values of a Program are fake tensors; this file is the IR's only door to them",
}
PRIVATE_TORCH = re.compile(r"torch\._|torch\.fx\.experimental|torch\.utils\._")
# Private attributes of the public ``torch``: how an operator overload is recognised; torch has no public name for it.
PRIVATE_ATTRIBUTES_ANYWHERE = frozenset({"torch._ops"})

MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 60

TOP_LEVEL = frozenset(
    {
        ".ci",
        ".gitignore",
        "CHANGELOG.md",
        "LICENSE",
        "Makefile",
        "README.md",
        "benchmarks",
        "constraints.txt",
        "docs",
        "graphopt",
        "kernels",
        "passes",
        "pyproject.toml",
        "tests",
    }
)
# Split so that this file does not find itself.
_MACHINE_FOLDERS = "|".join(("home", "root", "tmp", "Users", "mnt"))
MACHINE_PATH = re.compile(rf"(?<![\w.])/(?:{_MACHINE_FOLDERS})/\w")


@dataclass(frozen=True)
class Import:
    """One imported name; ``is_late``: inside a function or under TYPE_CHECKING."""

    module: str
    name: str
    line: int
    is_late: bool

    @property
    def part(self) -> str:
        return part_of(self.name)


def source_files() -> list[Path]:
    return sorted(path for folder in ("graphopt", "passes", "kernels") for path in (ROOT / folder).rglob("*.py"))


def all_python_files() -> list[Path]:
    tests = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    return sorted([*source_files(), *tests])


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "graphopt" else ("graphopt", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(name: str) -> str:
    """``ir`` for ``graphopt.ir.ops``; ``graphopt`` for the package itself and what it exports."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in IMPORTS else "graphopt"


def imports_of(path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text())
    early = {id(statement) for statement in tree.body}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            yield Import(module_name(path), name, node.lineno, id(node) not in early)


OUR_IMPORTS = [item for path in source_files() for item in imports_of(path) if item.name.split(".")[0] == "graphopt"]


def test_every_part_is_in_the_table():
    assert {part_of(module_name(path)) for path in source_files()} == set(IMPORTS)


def test_the_table_has_no_circle():
    above: set[str] = set()
    for part, allowed in IMPORTS.items():
        assert allowed <= above, f"{part} imports {sorted(allowed - above)}, which stand below it"
        above.add(part)


def test_imports_run_one_way():
    wrong = [
        item
        for item in OUR_IMPORTS
        if item.part not in IMPORTS[part_of(item.module)] | {part_of(item.module)}
        and (item.module, item.part) not in EXCEPTIONS
    ]
    assert wrong == []


def test_every_allowed_import_is_used():
    used = {(part_of(item.module), item.part) for item in OUR_IMPORTS}
    assert [(part, other) for part, allowed in IMPORTS.items() for other in allowed if (part, other) not in used] == []
    assert set(EXCEPTIONS) <= {(item.module, item.part) for item in OUR_IMPORTS}


def test_imports_that_close_a_circle_stay_late():
    early = [item for item in OUR_IMPORTS if (item.module, item.part) in NOT_AT_IMPORT and not item.is_late]
    assert early == []


def test_a_pass_knows_the_ir_and_no_other_pass():
    wrong = [
        item
        for item in OUR_IMPORTS
        if part_of(item.module) == "passes" and item.module != "graphopt.passes"
        if not PASSES_MAY_IMPORT.fullmatch(item.name) and not PASSES_MAY_IMPORT.fullmatch(item.name.rpartition(".")[0])
    ]
    assert wrong == []


def test_only_the_default_list_and_the_registry_name_passes():
    naming = {item.module for item in OUR_IMPORTS if item.name.startswith("graphopt.passes.")}
    assert naming == {"graphopt.passes", "graphopt.pipeline.default"}


def test_private_torch_is_imported_by_adapters_alone():
    wrong = [
        item
        for path in source_files()
        for item in imports_of(path)
        if PRIVATE_TORCH.match(item.name)
        and part_of(item.module) not in PRIVATE_TORCH_PARTS
        and item.module not in PRIVATE_TORCH_FILES
    ]
    assert wrong == []


def test_private_torch_is_not_reached_through_attributes_either():
    wrong = []
    for path in source_files():
        if part_of(module_name(path)) in PRIVATE_TORCH_PARTS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if re.fullmatch(r"torch\._(?!_)\w+", name) and name not in PRIVATE_ATTRIBUTES_ANYWHERE:
                wrong.append((module_name(path), node.lineno, name))
    assert wrong == []


@pytest.mark.parametrize("path", all_python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MOST_LINES_OF_A_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert num_lines <= MOST_LINES_OF_A_FUNCTION, f"{node.name} has {num_lines} lines"


def files_in_git(*options: str) -> list[str]:
    """Paths that ``git ls-files`` lists; the test is skipped where this is no checkout."""
    done = subprocess.run(["git", "-C", str(ROOT), "ls-files", *options], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"not a git checkout: {done.stderr.strip()}")
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def test_the_top_level_is_what_is_listed():
    assert {name.partition("/")[0] for name in files_in_git()} - {".github"} <= TOP_LEVEL
    assert [name for name in TOP_LEVEL if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_every_pass_has_a_file_and_a_test_of_its_name(name):
    stem = name.replace("-", "_")
    assert BY_NAME[name].name == name
    assert (ROOT / "passes" / f"{stem}.py").is_file()
    assert (ROOT / "tests" / "passes" / f"test_{stem}.py").is_file()


def test_every_file_of_passes_is_registered():
    stems = {path.stem for path in (ROOT / "passes").glob("*.py")} - {"__init__"}
    assert stems == {name.replace("-", "_") for name in BY_NAME}


def test_no_file_names_a_path_of_some_machine():
    found = []
    for name in files_in_git("--cached", "--others", "--exclude-standard"):
        text = (ROOT / name).read_text(errors="replace")
        found += [f"{name}: {match.group()}" for match in MACHINE_PATH.finditer(text)]
    assert found == []


def test_importing_graphopt_is_quiet_and_starts_no_device():
    code = "import graphopt, torch; assert not torch.cuda.is_initialized()"
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
