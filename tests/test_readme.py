"""README.md and docs/: every code block runs as it stands, and what it shows is what comes out.

Each section has an empty folder and a namespace of its own, and its blocks run in order.

`python` runs in the namespace; with a first line `# name.py` it is written to that file instead.
`pycon` is a session in the namespace, and its results must be those shown.
`console` is a session of a shell, and its output must be that shown; `make` and `pip` are not
called, but what they are asked for must exist. `text` is not run. Any other block fails.
"""

from __future__ import annotations

import doctest
import itertools
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
EXECUTED = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [
    *EXECUTED,
    *(ROOT / f"{name}.md" for name in ("README.zh", "ARCHITECTURE", "CONTRIBUTING")),
]

_FENCED = re.compile(r"^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (?P<name>\w+\.py)\n")
_TIME_STAMP = re.compile(r"(?<!\d)\d{20}(?!\d)")
_OPTIONS = doctest.ELLIPSIS
_ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "COLUMNS": "100",  # tables are as wide as a page
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}


@dataclass(frozen=True)
class Block:
    document: Path
    language: str
    code: str
    section: str
    line: int

    def __str__(self) -> str:
        return f"{self.document.name}, line {self.line}"


def blocks_of(document: Path) -> list[Block]:
    return list(_blocks_of(document, document.read_text(encoding="utf-8")))


def _blocks_of(document: Path, text: str) -> Iterator[Block]:
    section, end = "top", 0
    for match in _FENCED.finditer(text):
        headings = re.findall(r"^## (.+)$", text[end : match.start()], re.MULTILINE)
        section, end = (headings or [section])[-1], match.end()
        line = text.count("\n", 0, match.start()) + 2
        yield Block(document, match["language"], match["code"], section, line)


BLOCKS = [block for document in EXECUTED for block in blocks_of(document)]
SECTIONS = list(dict.fromkeys((block.document, block.section) for block in BLOCKS))


class SameButForTimes(doctest.OutputChecker):
    """Output is as shown if only time stamps differ; `...` stands for anything."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return super().check_output(_timeless(want), _timeless(got), optionflags)


def _timeless(text: str) -> str:
    """Without time stamps, and without the spaces that tables are filled up with."""
    return _TIME_STAMP.sub("<time>", re.sub(r" +$", "", text, flags=re.MULTILINE))


@dataclass
class Session:
    """What the blocks of one section share."""

    folder: Path
    namespace: dict[str, Any]
    not_yet_run: set[str] = field(default_factory=set)

    def python(self, block: Block) -> None:
        name = _FILE.match(block.code)
        path = self.folder / (name["name"] if name else f"readme_{block.line}.py")
        path.write_text(block.code, encoding="utf-8")
        if name:
            self.not_yet_run.add(path.name)
        else:
            exec(compile(block.code, str(path), "exec"), self.namespace)

    def pycon(self, block: Block) -> None:
        test = doctest.DocTestParser().get_doctest(
            block.code, self.namespace, str(block), str(block.document), block.line - 1
        )
        assert test.examples, f"{block}: no >>> in a block of language pycon"
        test.globs = self.namespace
        report: list[str] = []
        runner = doctest.DocTestRunner(SameButForTimes(), verbose=False, optionflags=_OPTIONS)
        runner.run(test, out=report.append, clear_globs=False)
        assert not report, "".join(report)

    def console(self, block: Block) -> None:
        assert block.code.startswith("$ "), f"{block}: a block of language console begins with $"
        for entry in re.split(r"^\$ ", block.code, flags=re.MULTILINE)[1:]:
            command, _, shown = entry.partition("\n")
            if command.startswith(("make ", "pip ")):
                _assert_can_be_asked_for(command, block)
                assert not shown.strip(), f"{block}: the output of {command!r} cannot be checked"
            else:
                self._shell(command, shown, block)

    def _shell(self, command: str, shown: str, block: Block) -> None:
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        finished = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env={**os.environ, "PATH": path, **_ENVIRONMENT},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        printed = finished.stdout
        failed = finished.returncode != 0 and not shown.startswith("error: ")
        assert not failed, f"{block}: {command!r} fails:\n{printed}"
        same = SameButForTimes().check_output(shown, printed, _OPTIONS)
        assert same, f"{block}: {command!r} prints\n{printed}and not\n{shown}"
        self.not_yet_run.difference_update(command.split())

    def text(self, block: Block) -> None:
        """Plain text is for people only."""


def _assert_can_be_asked_for(command: str, block: Block) -> None:
    program, *arguments = command.partition("  #")[0].split()
    if program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for target in arguments:
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{block}: no target {target}"
        return
    match = re.fullmatch(r"'?\.(?:\[(\w+)\])?'?", arguments[-1])
    known = arguments[:-1] == ["install"] and match is not None
    assert known, f"{block}: {command!r} is not known to this test"
    if match is not None and match[1]:
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert re.search(rf"^{match[1]} = \[", project, re.MULTILINE), f"{block}: no {match[1]}"


_number = itertools.count()


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.syspath_prepend(tmp_path)
    # A module that can be imported, as Dynamo does with that of a function it traces. It keeps
    # what it has imported by name, so each has a name of its own.
    module = types.ModuleType(f"readme_{next(_number)}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield Session(tmp_path, vars(module))
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("document", "section"), SECTIONS, ids=[f"{path.stem}: {title}" for path, title in SECTIONS]
)
def test_the_code_of_a_section_runs_and_does_what_it_shows(
    document: Path, section: str, session: Session
) -> None:
    run: dict[str, Callable[[Block], None]] = {
        "python": session.python,
        "pycon": session.pycon,
        "console": session.console,
        "text": session.text,
    }
    for block in BLOCKS:
        if (block.document, block.section) == (document, section):
            assert block.language in run, f"{block}: the language is none of {', '.join(run)}"
            run[block.language](block)
    assert not session.not_yet_run, f"no console block runs {session.not_yet_run}"


@pytest.mark.parametrize("document", EXECUTED, ids=lambda path: path.name)
def test_no_code_block_is_overlooked(document: Path) -> None:
    fences = re.findall(r"^\s*(?:```|~~~)", document.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) == 2 * len(blocks_of(document))


@pytest.mark.parametrize("document", LINKING, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", document.read_text(encoding="utf-8"))
    dead = []
    for link in links:
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        path = document.parent / name if name else document
        if not path.exists() or (anchor and anchor not in _anchors(path)):
            dead.append(link)
    assert dead == []


def _anchors(document: Path) -> set[str]:
    """The anchors that a forge makes of the headings of a document."""
    text = _FENCED.sub("", document.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def test_readme_leads_to_every_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = [document.relative_to(ROOT).as_posix() for document in EXECUTED[1:]]
    assert [page for page in pages if f"({page})" not in text] == []


def test_the_chinese_page_has_the_code_of_the_english_one() -> None:
    pages = ROOT / "docs" / "npu.md", ROOT / "README.zh.md"
    english, chinese = (
        [re.sub(r"  # .*", "", block.code) for block in blocks_of(page)] for page in pages
    )
    assert chinese == english


def test_the_architecture_names_every_file_of_the_package() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    (house,) = re.findall(r"^```text\n(torchair_scope/\n.*?)^```$", text, re.MULTILINE | re.DOTALL)
    named = [line.split()[0] for line in house.splitlines() if line.split()[0].endswith(".py")]
    assert sorted(named) == sorted(path.name for path in _files_of_the_package())


def _files_of_the_package() -> list[Path]:
    """What git knows, since a file that it does not know may be half done; else what is there."""
    if not (ROOT / ".git").exists():
        return list((ROOT / "torchair_scope").rglob("*.py"))
    listed = subprocess.run(
        ["git", "ls-files", "torchair_scope/*.py"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [Path(line) for line in listed.stdout.splitlines()]
