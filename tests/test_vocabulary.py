"""Code, tests and pages use the field's words and American spelling.

Words that are to be replaced are listed with the words to use. `KNOWN` holds the places that do not comply yet. It may
only shrink: an entry that is no longer needed fails a test as well. `python -m tests.test_vocabulary` writes it again.
"""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# By file, the words that are still there. Generated.
KNOWN: dict[str, tuple[str, ...]] = {
    "examples/address_book.py": ("colour",),
    "examples/babyai.py": (
        "fulfil",
        "is said",
    ),
    "examples/blackjack_exact.py": ("docstring: What",),
    "examples/cartpole.py": ("centre",),
    "examples/frozenlake.py": ("neighbours",),
    "examples/mastermind.py": ("colours",),
    "examples/taxi.py": ("likewise",),
    "llamagym/agent/actor.py": (
        "name: seen",
        "there is none",
    ),
    "llamagym/agent/agent.py": ("name: given",),
    "llamagym/engine/weights.py": ("docstring: What",),
    "llamagym/envs/address_book.py": (
        "colour",
        "colours",
    ),
    "llamagym/envs/mastermind.py": (
        "colour",
        "colours",
    ),
    "llamagym/models/hub.py": ("there is none",),
    "llamagym/saving/atomic.py": ("name: listed",),
    "llamagym/saving/checkpoints.py": ("there is none",),
    "llamagym/training/loop.py": ("there is none",),
    "scripts/benchmarks/ablation.py": ("docstring: What",),
    "scripts/benchmarks/batch_sizes.py": ("docstring: What",),
    "scripts/benchmarks/common.py": ("docstring: What",),
    "scripts/benchmarks/cost_model.py": ("docstring: What",),
    "scripts/benchmarks/larger_models.py": (
        "docstring: What",
        "is said",
    ),
    "scripts/benchmarks/mastermind_memory.py": (
        "docstring: What",
        "was said",
    ),
    "scripts/benchmarks/sparse_rewards.py": ("docstring: What",),
    "scripts/benchmarks/workload.py": ("docstring: What",),
    "scripts/benchmarks/workloads.py": ("docstring: What",),
    "scripts/parity/record_trl_fixture.py": ("docstring: What",),
    "scripts/reliability/kill_and_resume.py": ("there is none",),
    "scripts/sweep.py": ("is none of",),
    "tests/everything.py": ("docstring: What",),
    "tests/faults.py": ("spoilt",),
    "tests/on_other_device.py": ("docstring: What",),
    "tests/other_device.py": ("docstring: What",),
    "tests/processes.py": ("docstring: What",),
    "tests/test_address_book.py": (
        "colour",
        "colours",
    ),
    "tests/test_any_option.py": ("docstring: What",),
    "tests/test_base_rewards.py": ("docstring: What",),
    "tests/test_benchmarks.py": ("docstring: What",),
    "tests/test_bootstrap.py": (
        "is said",
        "mended",
        "quantisation",
    ),
    "tests/test_call_order.py": ("docstring: What",),
    "tests/test_choices.py": ("docstring: What",),
    "tests/test_critic.py": ("unregularised",),
    "tests/test_damaged_files.py": ("docstring: What",),
    "tests/test_demos.py": ("colours",),
    "tests/test_embedded.py": ("learnt",),
    "tests/test_environments.py": ("docstring: What",),
    "tests/test_examples.py": (
        "centre",
        "docstring: What",
        "is said",
    ),
    "tests/test_export.py": ("docstring: What",),
    "tests/test_frozenlake_exact.py": ("that is none",),
    "tests/test_internals.py": ("docstring: What",),
    "tests/test_invariants.py": ("docstring: What",),
    "tests/test_late_rewards.py": ("learnt",),
    "tests/test_loading.py": ("that is none",),
    "tests/test_mastermind.py": ("colours",),
    "tests/test_no_traces.py": (
        "docstring: What",
        "was said",
    ),
    "tests/test_nothing_half_done.py": (
        "docstring: What",
        "learnt",
    ),
    "tests/test_nothing_nan.py": (
        "are said",
        "docstring: What",
        "spoilt",
    ),
    "tests/test_numpy_values.py": ("is no number",),
    "tests/test_other_device.py": ("docstring: What",),
    "tests/test_packaging.py": ("docstring: What",),
    "tests/test_ports.py": (
        "is said",
        "learnt",
        "quantising",
    ),
    "tests/test_private_apis.py": ("docstring: What",),
    "tests/test_reference.py": ("there is none",),
    "tests/test_sft.py": ("standardises",),
    "tests/test_textworld.py": ("recognise",),
    "tests/test_value_head.py": ("docstring: What",),
}

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
# Files that accept an old name with a hint, test it, or announce it.
SHIMS = {
    "microbatch nodes": (
        "llamagym/learners/config.py",
        "llamagym/learners/replay.py",
        "tests/test_ports.py",
        "tests/test_checkpoints.py",
        "CHANGELOG.md",
    )
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
    """The texts that have to comply: what git tracks in the folders below, but for results and this file."""
    folders = ["llamagym", "tests", "examples", "scripts", "docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
    listing = subprocess.run(["git", "ls-files", "--", *folders], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not in a git checkout")
    paths = [ROOT / name for name in listing.stdout.splitlines()]
    suffixes = {".py", ".md", ".yaml", ".html", ".ipynb", ".svg"}
    return [path for path in paths if path.suffix in suffixes and path != Path(__file__).resolve() and path.is_file()]


def words_in(text: str, name: str) -> dict[str, int]:
    """The words to be replaced in a text, each with the line where it stands first.

    Args:
        text: Source code or a page.
        name: The file's path below the repository.
    """
    found: dict[str, int] = {}
    for match in WORDS.finditer(text):
        word = re.sub(r"[\s_#]+", " ", match[0]).lower()
        if name not in SHIMS.get(word, ()):
            found.setdefault(word, text[: match.start()].count("\n") + 1)
    if name.endswith(".py"):
        for node in ast.walk(ast.parse(text)):
            for word, line in faults_of(node, is_library=name.startswith("llamagym/")):
                found.setdefault(word, line)
    return found


def faults_of(node: ast.AST, is_library: bool) -> list[tuple[str, int]]:
    """What is wrong with a docstring, or with a name that the library defines."""
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


@cache
def found_in_all() -> dict[str, dict[str, int]]:
    """By file, the words to be replaced and their lines."""
    names = {path.relative_to(ROOT).as_posix(): path for path in files()}
    found = {name: words_in(path.read_text(encoding="utf-8"), name) for name, path in names.items()}
    return {name: words for name, words in found.items() if words}


def instead_of(word: str) -> str:
    """What to write in place of a word."""
    if word in PHRASES:
        return PHRASES[word]
    return "a sentence that says what it is or does" if ":" in word else "American spelling"


def test_no_new_private_words():
    new = [
        f"{name}:{line}: {word!r}; write {instead_of(word)}"
        for name, words in found_in_all().items()
        for word, line in words.items()
        if word not in KNOWN.get(name, ())
    ]
    assert new == []


def test_known_places_only_shrink():
    found = found_in_all()
    stale = [(name, word) for name, words in KNOWN.items() for word in words if word not in found.get(name, {})]
    assert stale == [], "Remove these from KNOWN: python -m tests.test_vocabulary"


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
    assert words_in("microbatch_nodes = 1\n", SHIMS["microbatch nodes"][0]) == {}


def write_known() -> None:
    """Write `KNOWN` again, from the files as they are."""
    lines = [
        f"    {name!r}: ({', '.join(map(repr, sorted(words)))},),\n".replace("'", '"')
        for name, words in sorted(found_in_all().items())
    ]
    path = Path(__file__)
    text = path.read_text(encoding="utf-8")
    fresh = "KNOWN: dict[str, tuple[str, ...]] = {\n" + "".join(lines) + "}\n"
    changed = re.sub(
        r"^KNOWN: [^\n]*= \{(?:\}\n|\n.*?^\}\n)", lambda _: fresh, text, count=1, flags=re.DOTALL | re.MULTILINE
    )
    path.write_text(changed, encoding="utf-8")


if __name__ == "__main__":
    write_known()
