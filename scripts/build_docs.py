"""Build the documentation into build/site; neither building nor reading needs a network.

    pip install -r requirements/docs.txt
    python scripts/build_docs.py

Files of the repository that pages link to are copied beside the pages. A broken link is an error, and so is every
warning of zensical.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
DOCS, SITE = ROOT / "docs", ROOT / "build" / "site"
FILES = "files"
_LINK = re.compile(r'((?:href|src)=")([^"#:?]+)((?:#[^"]*)?")')
_OUTSIDE = re.compile(r'<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"')


def main() -> int:
    """Build, then copy linked files; returns the exit code."""
    shutil.rmtree(SITE, ignore_errors=True)
    code = subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=ROOT, check=False).returncode
    if code:
        return code
    faults = [fault for page in sorted(SITE.rglob("*.html")) for fault in complete(page)]
    print("\n".join(faults) or f"{SITE / 'index.html'}: every link exists, nothing is fetched from other hosts")
    return 1 if faults else 0


def complete(page: Path) -> list[str]:
    """Copy the files that a page links to; returns its faults."""
    if page == SITE / "404.html":  # its links begin at the root of the future site
        return []
    html, faults = page.read_text(encoding="utf-8"), list[str]()

    def resolved(link: re.Match[str]) -> str:
        target = unquote(link[2])
        if (page.parent / target).exists():
            return link[0]
        source = (DOCS / page.relative_to(SITE).parent / target).resolve()
        if source.suffix == ".html":  # zensical's name for a page, also outside of docs
            source = source.with_name("README.md") if source.name == "index.html" else source.with_suffix(".md")
        if not source.is_relative_to(ROOT) or not source.exists():
            faults.append(f"{page.relative_to(SITE)}: {target} does not exist")
            return link[0]
        copy = SITE / FILES / source.relative_to(ROOT)
        # Browsers show .txt, but not sources.
        copy = copy.with_name(copy.name + ".txt") if copy.suffix in (".py", ".toml", ".md") else copy
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, copy)
        up = "../" * (len(page.relative_to(SITE).parts) - 1)
        return f"{link[1]}{up}{copy.relative_to(SITE).as_posix()}{link[3]}"

    page.write_text(_LINK.sub(resolved, html), encoding="utf-8")
    return faults + [f"{page.relative_to(SITE)}: {found}" for found in _OUTSIDE.findall(html)]


if __name__ == "__main__":
    sys.exit(main())
