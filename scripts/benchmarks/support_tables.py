"""Tables of the architectures and adapters that were compared with plain transformers and PEFT."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from runs import table_row

RESULTS = Path(__file__).resolve().parent.parent / "results"
_DIFFERENCES = ("acting", "choosing", "learning", "gradient", "reference", "loading")
# Patterns of the text around the reason in an error message.
_FRAMES = (
    r"^\w+Error: ",
    r"^\w+ computes in a way that llamagym does not reproduce \((?P<reason>.*?)\)\. It needs.*$",
    r"^The adapter '\w+' \((?P<reason>.*?)\. Use a method.*$",
    r"^\w+ (?P<reason>bounds how far back its layers see) by .*$",
    r"^\w+ (?P<reason>has no length of context): .*$",
    r" by up to [\d.e+-]+",
)


def architectures() -> str:
    """All architectures of transformers by result."""
    whole = json.loads((RESULTS / "models.json").read_text(encoding="utf-8"))
    groups: dict[str, list[str]] = defaultdict(list)
    for name, found in whole["architectures"].items():
        plain = found.get("plain", found)
        activated = found.get("activated", plain)
        groups[_outcome(plain, activated)].append(f"`{name}`")
    if missing := [f"`{name}`" for name in whole["all"] if name not in whole["architectures"]]:
        groups["not compared yet"] = missing
    return "\n".join([_versions(whole["versions"]), "", *_table("architectures", groups)])


def adapters() -> str:
    """All methods and options of PEFT by result."""
    whole = json.loads((RESULTS / "adapters.json").read_text(encoding="utf-8"))
    groups: dict[str, list[str]] = defaultdict(list)
    for name, found in whole["cases"].items():
        groups[_outcome(found, found)].append(f"`{name}`")
    return "\n".join([_versions(whole["versions"]), "", *_table("methods and options", groups)])


def _versions(versions: dict[str, str]) -> str:
    return "Compared with " + ", ".join(f"{name} {version}" for name, version in versions.items()) + "."


def _table(subject: str, groups: dict[str, list[str]]) -> list[str]:
    """One row per outcome, with equal ones first."""
    order = sorted(groups, key=lambda outcome: (not outcome.startswith("equal"), outcome))
    rows = [table_row(outcome, str(len(groups[outcome])), ", ".join(groups[outcome])) for outcome in order]
    return [table_row("result", "number", subject), "|---|---|---|", *rows]


def _outcome(found: dict[str, Any], activated: dict[str, Any]) -> str:
    result = str(found["result"])
    if result == "equal":
        return "equal" if activated["result"] == "equal" else "equal with a plain LoRA; an activated one is rejected"
    if result == "differs":
        return f"differs by up to {max(found[key] for key in _DIFFERENCES if key in found):.2g}"
    return f"{result}: {reason_in(found['reason'])}" if result == "rejected" else result


def reason_in(message: str) -> str:
    """The reason in an error message, without its frame.

    >>> reason_in("ModelLoadError: XForCausalLM has no length of context: its config has none of n. Set it.")
    'has no length of context'
    """
    for frame in _FRAMES:
        found = re.search(frame, message)
        if found and "reason" in found.groupdict():
            message = found["reason"]
        elif found:
            message = message.replace(found[0], "")
    message = re.sub(r"^(\w+)( with [^)]*)?\) is not supported: it ", "", message)
    # Shorten errors of other libraries, which describe tensors of the probe.
    if re.match(r"\w+Error: ", message):
        return "its forward pass fails in the probe"
    if message.startswith("cannot attach the adapter"):
        return "PEFT cannot attach the adapter"
    return message.replace("|", "\\|")[:160].rstrip(". ")
