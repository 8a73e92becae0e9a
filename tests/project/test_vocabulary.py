"""Code, tests and pages use the field's words and American spelling.

Rejected words are listed with the words to use. `EXCEPTIONS` names the files in which a rejected word is data.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers import ROOT

# Phrases in any text, names included, and their replacements. A space also matches an underscore or a line's end.
PHRASES = {
    "anew": "again",
    "likewise": "also, the same",
    "mend": "fix",
    "mends": "fixes",
    "mended": "fixed",
    "mending": "fixing",
    "whichever way": "either way",
    "is no number": "is not a number",
    "are no numbers": "are not numbers",
    "that are none": "invalid, missing",
    "that is none": "invalid, missing",
    "there is none": "there is no ...",
    "that there are not": "missing",
    "is none of": "is not one of",
    "are none of": "are not among",
    "is said": "is logged, is reported",
    "are said": "are logged, are reported",
    "was said": "was logged, was reported",
    "rings": "fires",
    "wing": "package",
    "wings": "packages",
    "copies at rest": "paused environments",
    "what a turn costs": "cost per turn",
    "not as it should be": "failed",
    "microbatch nodes": "max_tokens_per_pass",
}
# By file, the rejected words that it may contain.
EXCEPTIONS = {
    # Observations, prompts and names of arguments. Trained agents, demonstrations in sft_data/ and measured results
    # depend on these texts; another spelling would invalidate them.
    "llamagym/envs/address_book.py": {"colour", "colours"},
    "llamagym/envs/mastermind.py": {"colour", "colours"},
    "examples/address_book.py": {"colour"},
    "examples/babyai.py": {"fulfil"},
    "examples/cartpole.py": {"centre"},
    "examples/mastermind.py": {"colours"},
    # Tests that quote them.
    "tests/envs/test_address_book.py": {"colour", "colours"},
    "tests/text/test_demos.py": {"colours"},
    "tests/examples/test_examples.py": {"centre"},
    "tests/envs/test_mastermind.py": {"colours"},
    # Replies of the TextWorld interpreter.
    "tests/envs/test_textworld.py": {"recognise"},
    # The old name of an option: accepted with a hint, tested, announced.
    "llamagym/learners/config.py": {"microbatch nodes"},
    "llamagym/learners/replay.py": {"microbatch nodes"},
    "tests/agent/test_ports.py": {"microbatch nodes"},
    "tests/training/test_checkpoints.py": {"microbatch nodes"},
    "CHANGELOG.md": {"microbatch nodes"},
}
# Names that say nothing, wherever the library defines them.
NAMES = {"alone", "asked", "given", "held", "informed", "keeps", "listed", "made", "opened", "seen", "told", "turned"}
NAMES |= {"of_asked", "of_result", "one_each", "turnings", "undecided"}
# How docstrings and descriptions of arguments must not begin.
DOCSTRING = re.compile(r"What(?:ever)?\b")
ARGUMENT = re.compile(r"^\s+\w+: (?:Theirs|Whose|Its own)\.", re.MULTILINE)

_STEMS = (
    "apolog|author|capital|categor|central|character|custom|discret|emphas|equal|factor|familiar|final|formal|general|"
    "initial|legal|linear|local|material|maxim|memor|minim|mobil|modern|modular|neutral|normal|optim|organ|parallel|"
    "parameter|penal|polar|prior|priorit|quant|random|real|recogn|regular|sanit|serial|special|stabil|standard|"
    "summar|symbol|synchron|token|union|util|vector|visual"
)
BRITISH = (
    rf"(?:un|re|de|pre)?(?:{_STEMS})is(?:e|ed|es|er|ers|ing|ation|ations|able)",
    r"(?:anal|paral|catal)ys(?:e|ed|es|ing)",
    r"(?:behavi|col|fav|neighb|hon|lab|flav|hum|rum|endeav|harb|od|tum|vig)our[a-z]*",
    r"(?:cent|met|lit|fib|theat)re[ds]?",
    r"(?:defen|offen|licen|preten)ce[ds]?",
    r"(?:label|model|travel|signal|channel|level|total|tunnel|fuel)l(?:ed|ing|er)",
    r"(?:learn|spel|spoil|burn|dream|lean)t",
    r"(?:whil|among)st",
    r"programme[sd]?|artefacts?|judgements?|fulfils?|practis(?:e|ed|ing)|ageing|sceptic[a-z]*|mould[a-z]*",
)


def pattern(alternatives: tuple[str, ...]) -> re.Pattern[str]:
    """Matches any of some words as a whole word; underscores separate words, as in names."""
    found = "|".join(alternatives).replace(" ", r"[\s_]+(?:# )?")
    return re.compile(rf"(?<![A-Za-z])(?:{found})(?![A-Za-z])", re.IGNORECASE)


WORDS = pattern((*PHRASES, *BRITISH))


def files() -> list[Path]:
    """All files that must comply: those that git tracks in the folders below, without results and this file."""
    folders = ["llamagym", "tests", "examples", "scripts", "docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
    listing = subprocess.run(["git", "ls-files", "--", *folders], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not in a git checkout")
    paths = [ROOT / name for name in listing.stdout.splitlines()]
    suffixes = {".py", ".md", ".yaml", ".html", ".ipynb", ".svg"}
    return [path for path in paths if path.suffix in suffixes and path != Path(__file__).resolve() and path.is_file()]


def words_in(text: str, name: str) -> dict[str, int]:
    """The rejected words of a text, each with the line of its first occurrence.

    Args:
        text: Source code or a page.
        name: The file's path below the repository.
    """
    found: dict[str, int] = {}
    for match in WORDS.finditer(text):
        word = re.sub(r"[\s_#]+", " ", match[0]).lower()
        if word not in EXCEPTIONS.get(name, ()):
            found.setdefault(word, text[: match.start()].count("\n") + 1)
    if name.endswith(".py"):
        for node in ast.walk(ast.parse(text)):
            for word, line in faults_of(node, is_library=name.startswith("llamagym/")):
                found.setdefault(word, line)
    return found


def faults_of(node: ast.AST, is_library: bool) -> list[tuple[str, int]]:
    """Rejected beginnings of a docstring, and rejected names that the library defines, each with its line."""
    found: list[tuple[str, int]] = []
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        docstring = ast.get_docstring(node, clean=False) or ""
        if DOCSTRING.match(docstring):
            found.append(("docstring: What", getattr(node, "lineno", 1)))
        if ARGUMENT.search(docstring):
            found.append(("argument: Theirs", getattr(node, "lineno", 1)))
    if is_library:
        for name in names_defined_by(node) & NAMES:
            found.append((f"name: {name}", getattr(node, "lineno", 1)))
    return found


def names_defined_by(node: ast.AST) -> set[str]:
    """The names that a node defines, without leading underscores."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        names = {node.name}
    elif isinstance(node, ast.arg):
        names = {node.arg}
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        names = {node.id}
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        names = {node.attr}
    else:
        names = set()
    return {name.lstrip("_") for name in names}


def instead_of(word: str) -> str:
    """The replacement of a rejected word."""
    if word in PHRASES:
        return PHRASES[word]
    return "a sentence that says what it is or does" if ":" in word else "American spelling"


def test_all_files_use_the_words():
    faults = []
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        for word, line in words_in(path.read_text(encoding="utf-8"), name).items():
            faults.append(f"{name}:{line}: {word!r}; write {instead_of(word)}")
    assert faults == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Measured anew, and likewise\nmended.", ["anew", "likewise", "mended"]),
        ("def test_rewards_that_are_none(): ...", ["that are none"]),
        ("It is none\n    of these, whichever\n# way.", ["is none of", "whichever way"]),
        ("The tokeniser's normalised behaviour was learnt at the centre.",
         ["tokeniser", "normalised", "behaviour", "learnt", "centre"]),
        ("recommend, amendment, otherwise, noise, exercise, four hours, entered, raise, promised", []),
        ("microbatch_nodes=None", ["microbatch nodes"]),
    ],
)  # fmt: skip
def test_finds_words(text, words):
    assert list(words_in(text, "page.md")) == words


def test_finds_docstrings_and_names():
    docstring = '"""Keep.\n\n    Args:\n        value: Theirs.\n    """'
    code = f'"""What it is."""\ndef keeps(value):\n    {docstring}\n    _made = 1\n'
    faults = {"docstring: What", "name: keeps", "argument: Theirs", "name: made"}
    assert set(words_in(code, "llamagym/a.py")) == faults
    assert set(words_in(code, "tests/a.py")) == {"docstring: What", "argument: Theirs"}
