"""What `--prompt FILE` says about an environment: a few words in YAML, or an agent of the user's own in Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from importlib.util import module_from_spec, spec_from_file_location
from inspect import isabstract
from pathlib import Path
from typing import Any

import gymnasium
import yaml

from ..agent.agent import Agent
from ..errors import ConfigError, LlamaGymError, did_you_mean, reason_of
from ..options import shortened
from .generic import Wording, generic_agent

_MODULE = "llamagym_prompt"
# Bytes of a wording: far more than a model reads.
_LARGEST = 2**20


class _WordingLoader(yaml.BaseLoader):
    """Reads everything as text, so that actions may be called yes, no or 1; rejects aliases.

    A few nested aliases stand for billions of words.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """A node; an alias is an error."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not supported")
        return super().compose_node(parent, index)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_actions(value: object) -> bool:
    return isinstance(value, list) and all(_is_text(each) or _are_texts(each) for each in value)


# What each key takes, in words and as a check.
_KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "system_prompt": ("a text", _is_text),
    "observation": ("a text", _is_text),
    "observation_names": ("a list of texts", _are_texts),
    "actions": ("a list of texts, or for MultiDiscrete a list of such lists", _are_actions),
}


def agent_class(env: gymnasium.Env[Any, Any], prompt: Path | None) -> type[Agent]:
    """The class of an agent for an environment.

    Args:
        env: The environment.
        prompt: A YAML or Python file of the user's; None describes the spaces.

    Raises:
        ConfigError: The file cannot be read, or says something that does not fit the environment.
    """
    if prompt is None:
        return generic_agent(env, Wording())
    if not prompt.is_file():
        raise ConfigError(f"There is no file {str(prompt)!r}. Pass a .yaml or .py file.")
    if prompt.suffix == ".py":
        return _defined_in(prompt)
    if prompt.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{str(prompt)!r} is neither YAML nor Python. Pass a .yaml or .py file.")
    wording = read_wording(prompt)
    try:
        return generic_agent(env, wording)
    except ConfigError as error:
        raise ConfigError(f"{prompt}: {error}") from error


def read_wording(path: Path) -> Wording:
    """The wording that a YAML file holds.

    Raises:
        ConfigError: It is no YAML, or holds something else.
    """
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST} bytes")
        said = yaml.load(path.read_text(encoding="utf-8"), Loader=_WordingLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as YAML: {reason_of(error)}.") from error
    known = {field.name for field in fields(Wording)}
    if not isinstance(said, dict):
        raise ConfigError(f"{str(path)!r} holds {shortened(said)}. Give it one or more of the keys {sorted(known)}.")
    for key, value in said.items():
        if key not in known:
            raise ConfigError(
                f"{str(path)!r} has an unknown key {shortened(key)}. {did_you_mean(str(key)[:80], known)}"
            )
        if not _KINDS[key][1](value):
            raise ConfigError(f"{key} in {str(path)!r} is {shortened(value)}. Pass {_KINDS[key][0]}.")
    if "{observation}" not in said.get("observation", "{observation}"):
        raise ConfigError(
            f"observation in {str(path)!r} is {shortened(said['observation'])}, in which nothing depends on what is "
            "observed. Put {observation} where that goes."
        )
    return Wording(**said)


def _defined_in(path: Path) -> type[Agent]:
    """The one agent that a Python file defines; it is run as `python FILE` would run it, but for its name."""
    spec = spec_from_file_location(_MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[_MODULE] = module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except LlamaGymError:
        raise
    except Exception as error:
        raise ConfigError(f"{str(path)!r} cannot be run: {type(error).__name__}: {error}") from error
    defined = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Agent)]
    own = [kind for kind in defined if kind.__module__ == _MODULE and not isabstract(kind)]
    if len(own) != 1:
        found = ", ".join(kind.__name__ for kind in own) or "none"
        raise ConfigError(
            f"{str(path)!r} must define one subclass of llamagym.Agent with its three methods; found: {found}."
        )
    return own[0]
