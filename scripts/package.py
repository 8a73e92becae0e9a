"""Build wheel and source distribution, with a README that reads well on a package index, and check both.

    python scripts/package.py --url https://example.org/you/llamagym

The README's links and its picture are files of the repository, which an index does not have. With --url they lead to
where it is published; without, links become text and the picture is left out. Needs the packages build
and twine; what is built lies in dist/.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|#)([^)\s]+)\)")


def readme_for_an_index(text: str, url: str | None, branch: str) -> str:
    """The README with links that work away from the repository.

    Args:
        text: The README.
        url: Where the repository is published; None takes links to its files away.
        branch: Which of its branches links lead to.

    >>> readme_for_an_index("![plot](a.png) [b](c.md) [d](https://e.org)", "https://h.org/me/it", "main")
    '![plot](https://h.org/me/it/raw/main/a.png) [b](https://h.org/me/it/blob/main/c.md) [d](https://e.org)'
    >>> readme_for_an_index("![plot](a.png)[b](c.md) [d](https://e.org)", None, "main")
    'b [d](https://e.org)'
    """

    def link(found: re.Match[str]) -> str:
        picture, label, target = found.groups()
        if url is None:
            return "" if picture else label
        return f"{picture}[{label}]({url}/{'raw' if picture else 'blob'}/{branch}/{target})"

    return _LINK.sub(link, text)


def with_addresses(project: str, url: str) -> str:
    """pyproject.toml with the addresses of a published repository."""
    table = (
        f'[project.urls]\nHomepage = "{url}"\nDocumentation = "{url}/tree/main/docs"\nSource = "{url}"\n'
        f'Issues = "{url}/issues"\nChangelog = "{url}/blob/main/CHANGELOG.md"\n\n'
    )
    mark = "[project.optional-dependencies]\n"
    if project.count(mark) != 1:
        raise ValueError(f"pyproject.toml must hold the line {mark!r} once.")
    return project.replace(mark, table + mark)


def main(argv: list[str]) -> int:
    """Build and check; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="where the repository is published")
    parser.add_argument("--branch", default="main", help="which links lead to; default: main")
    args = parser.parse_args(argv)
    url = args.url and args.url.rstrip("/")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "llamagym"
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, copy / name)
        readme, project = copy / "README.md", copy / "pyproject.toml"
        text = readme_for_an_index(readme.read_text(encoding="utf-8"), url, args.branch)
        readme.write_text(text, encoding="utf-8")
        if url:
            project.write_text(with_addresses(project.read_text(encoding="utf-8"), url), encoding="utf-8")
        shutil.rmtree(DIST, ignore_errors=True)
        for command in (
            ["build", "--outdir", str(DIST), str(copy)],
            ["twine", "check", "--strict", *(str(DIST / name) for name in ("*.whl", "*.tar.gz"))],
        ):
            code = subprocess.run([sys.executable, "-m", *command], check=False).returncode
            if code:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
