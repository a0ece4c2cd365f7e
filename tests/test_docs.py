"""What README.md and docs/ say is run: every Python block, the marked shell commands, every relative link.

A comment on its own line before a fenced block says what is done with it:

- nothing, before ``python``: the block runs; the blocks of a page share one namespace and one empty folder
- ``<!-- file: name.py -->``: the block is written to that file; the tests in it, if there are any, run
- ``<!-- run -->``, before ``sh``: each ``graphopt`` command runs; ``# exit 1`` behind one is the status expected
- ``<!-- not run: reason -->``: the block is only counted
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import graphopt
from graphopt.cli import run
from graphopt.passes import BY_NAME
from graphopt.user_files import load_file

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
CAPABILITIES = (
    "capture",
    "training-step",
    "optimizers",
    "passes",
    "memory",
    "looking-inside",
    "saving",
    "benchmarks",
    "precision",
    "fp8",
)

# How many blocks of Python may stay unrun, by page; each says why where it stands.
NOT_RUN = {"writing-a-pass.md": 1}

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n+)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_EXPECTED_STATUS = re.compile(r"#\s*exit (?P<status>\d+)")


@dataclass(frozen=True)
class Block:
    """A fenced block: the comment before it, its language, its text and the line it starts at."""

    mark: str
    language: str
    code: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(found["mark"] or "", found["language"], found["code"], text[: found.start("code")].count("\n"))
        for found in _BLOCK.finditer(text)
    ]


def page_id(page: Path) -> str:
    return page.name


@pytest.fixture
def reader_folder(tmp_path, monkeypatch):
    """An empty current folder; modules imported from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GRAPHOPT_DUMP", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_block_does_what_it_says(page, reader_folder):
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in blocks_of(page):
        if block.mark.startswith("file: "):
            write_and_test(Path(block.mark.removeprefix("file: ")), block.code)
        elif block.language == "python" and not block.mark:
            # The empty lines make the line numbers of a traceback those of the page.
            exec(compile("\n" * block.line + block.code, str(page), "exec"), namespace)
        elif block.mark == "run":
            run_commands(block.code)


def is_name_of_graphopt(name: str) -> bool:
    """Whether ``graphopt.name`` is an attribute or a module."""
    value: object = graphopt
    for part in name.split("."):
        if not hasattr(value, part):
            return importlib.util.find_spec(f"graphopt.{name}") is not None
        value = getattr(value, part)
    return True


def write_and_test(path: Path, code: str) -> None:
    path.write_text(code)
    module = load_file(str(path))
    for name in [name for name in vars(module) if name.startswith("test_")]:
        getattr(module, name)()


def run_commands(text: str) -> None:
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["graphopt"]:
            expected = _EXPECTED_STATUS.search(line)
            assert run(words[1:]) == (int(expected["status"]) if expected else 0), line


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_blocks_that_are_not_run_are_counted(page):
    skipped = [block for block in blocks_of(page) if block.language == "python" and block.mark.startswith("not run: ")]
    assert len(skipped) == NOT_RUN.get(page.name, 0)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_marks_are_known_and_every_shell_block_has_one(page):
    for block in blocks_of(page):
        assert re.fullmatch(r"run|file: [\w.-]+|not run: .+|", block.mark), block
        if block.language == "sh" and not block.code.startswith("make demo"):
            assert block.mark, f"{page.name}:{block.line} neither runs nor says why not"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_relative_links_lead_somewhere(page):
    without_code = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = [found["target"].partition("#")[0] for found in _LINK.finditer(without_code)]
    local = [target for target in targets if target and "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_names_of_graphopt_in_running_text_exist(page):
    names = re.findall(r"`graphopt\.([A-Za-z_][\w.]*)", page.read_text())
    assert [name for name in names if not is_name_of_graphopt(name.rstrip("."))] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_paths_in_running_text_exist(page):
    names = re.findall(r"`((?:graphopt|passes|kernels|tests|benchmarks|docs)/[\w/.-]*)`", page.read_text())
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_readme_starts_with_the_two_commands():
    code = blocks_of(README)[0].code
    commands = [line.partition("#")[0].strip() for line in code.splitlines()]
    assert commands == ["make demo", "make test"]
    title, sentence, *rest = README.read_text().split("\n\n")
    assert title == "# graphopt" and "\n```sh\nmake demo" in "\n" + rest[0]
    assert sentence.count("\n") <= 1


def test_the_readme_example_has_eight_lines():
    example = next(block.code for block in blocks_of(README) if block.language == "python")
    assert len([line for line in example.splitlines() if line.strip()]) == 8


def test_every_capability_has_a_page():
    assert [name for name in CAPABILITIES if not (ROOT / "docs" / f"{name}.md").is_file()] == []


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_every_pass_is_described_as_it_is(name):
    _, heading, section = (ROOT / "docs" / "passes.md").read_text().partition(f"\n## {name}\n")
    assert heading, f"docs/passes.md has no section {name}"
    kind = BY_NAME[name]
    options = ", ".join(f"`{field}={default}`" for field, default in vars(kind()).items()) or "none"
    assert section.lstrip().startswith(f"Stage {kind.stage}, numerics {kind.numerics}, options: {options}.")


def test_a_pass_is_written_in_under_sixty_lines():
    files = [block for block in blocks_of(ROOT / "docs" / "writing-a-pass.md") if block.mark.startswith("file: ")]
    own = [block.code for block in files if block.mark.removeprefix("file: ") in ("fold_relu.py", "test_fold_relu.py")]
    assert len(own) == 2
    assert sum(len(code.splitlines()) for code in own) < 60
