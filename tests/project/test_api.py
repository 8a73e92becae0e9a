"""The public interface: complete, documented (docs/api.md), and each documented example runs."""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
import typing
from typing import Any

import gymnasium as gym
import pytest

import llamagym as lg
from scripts.api_page import EXAMPLES, PAGE, page
from tests.helpers.agents import ChoiceAgent, CountdownEnv
from tests.helpers.tiny import tiny_base_model, tiny_model, tiny_tokenizer

ERRORS = {
    name for name in lg.__all__ if isinstance(getattr(lg, name), type) and issubclass(getattr(lg, name), Exception)
}
# Base classes and internals in annotations that users need no name for.
UNNAMED = {
    "llamagym.options.Options",  # what every configuration is
    "llamagym.trl_compat.ppo_trainer.Shuffler",  # a protocol that numpy's generators satisfy
}


def public_members(name: str) -> list[tuple[str, Any]]:
    """A public function, or a public class's constructor, methods and properties, by their names."""
    value = getattr(lg, name)
    if not inspect.isclass(value):
        return [(name, value)]
    members = []
    for member_name, member in inspect.getmembers(value):
        if member_name.startswith("_") and member_name != "__init__":
            continue
        function = member.fget if isinstance(member, property) else member
        is_ours = getattr(function, "__module__", "").startswith("llamagym")
        if is_ours and (inspect.isfunction(function) or inspect.ismethod(function)):
            members.append((f"{name}.{member_name}", function))
    return members


def annotated_classes(annotation: Any) -> set[type]:
    """The classes of this library in an annotation."""
    found: set[type] = set()
    for argument in typing.get_args(annotation):
        found |= annotated_classes(argument)
    origin = typing.get_origin(annotation) or annotation
    if inspect.isclass(origin) and origin.__module__.startswith("llamagym"):
        found.add(origin)
    return found


def test_page_lists_every_exported_name():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python scripts/api_page.py"
    listed = [name for examples in EXAMPLES.values() for name in examples]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(lg.__all__) - ERRORS


def test_every_type_of_a_public_signature_is_exported():
    exported = {getattr(lg, name) for name in lg.__all__}
    missing = set()
    for name in lg.__all__:
        for where, function in public_members(name):
            try:
                hints = typing.get_type_hints(function)
            except NameError:
                continue  # names a class of another library that is imported lazily
            for annotation in hints.values():
                for found in annotated_classes(annotation) - exported:
                    missing.add((f"{found.__module__}.{found.__qualname__}", where))
    assert {pair for pair in missing if pair[0] not in UNNAMED} == set()


@pytest.mark.parametrize("name", sorted(lg.__all__))
def test_help_has_summary_arguments_and_errors(name):
    text = pydoc.plain(pydoc.render_doc(getattr(lg, name)))
    assert name in text
    for where, function in public_members(name):
        doc = inspect.getdoc(function) or ""
        summary = doc.split("\n")[0]
        assert summary, where
        assert summary.endswith((".", ":")), f"{where}: the summary is not a sentence"
        parameters = [each for each in inspect.signature(function).parameters if each not in ("self", "cls")]
        is_generated = dataclasses.is_dataclass(getattr(lg, name)) and where.endswith(".__init__")
        if len(parameters) > 2 and "see `" not in doc and not is_generated:
            assert "Args:" in doc, f"{where}{parameters} has no Args section"
            for parameter in parameters:
                assert f"{parameter}:" in doc, f"{where} does not describe {parameter}"
        source = "" if is_generated else inspect.getsource(inspect.unwrap(function))
        raised = {each for each in ERRORS if f"raise {each}(" in source}
        assert all(error in doc or "see `" in doc for error in raised), f"{where} does not document {raised}"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gym.register("Countdown-v0", CountdownEnv)
    loaded = tiny_model("llama"), tiny_tokenizer("llama"), "cpu"
    names: dict[str, Any] = {
        "lg": lg,
        "gym": gym,
        "BlackjackAgent": ChoiceAgent,
        "env_id": "Countdown-v0",
        "base_model": tiny_base_model("llama"),
        "folder": tmp_path / "run",
    }
    # The embedded model's weights are not loaded for this.
    monkeypatch.setattr(lg, "load_model_and_tokenizer", lambda name: loaded)
    try:
        for examples in EXAMPLES.values():
            for code in examples.values():
                exec(code, names)
    finally:
        del gym.registry["Countdown-v0"]
    assert len(names["result"].returns) == 4
