"""Reads the file of `--prompt`: a user's wording for an environment in YAML, or an agent in Python."""

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
# Far more than a model can read.
_MAX_FILE_BYTES = 2**20


class _WordingLoader(yaml.BaseLoader):
    """Loads all scalars as strings, so that actions may be named yes, no or 1, and rejects aliases.

    A few nested aliases can expand to billions of words.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Composes a node; raises for an alias."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not supported")
        return super().compose_node(parent, index)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_actions(value: object) -> bool:
    return isinstance(value, list) and all(_is_text(item) or _are_texts(item) for item in value)


# The type of each key's value, as a description and a check.
_VALUE_TYPES: dict[str, tuple[str, Callable[[object], bool]]] = {
    "system_prompt": ("a text", _is_text),
    "observation": ("a text", _is_text),
    "observation_names": ("a list of texts", _are_texts),
    "actions": ("a list of texts, or for MultiDiscrete a list of such lists", _are_actions),
}


def agent_class(env: gymnasium.Env[Any, Any], prompt: Path | None) -> type[Agent]:
    """Returns a class of agents for an environment.

    Args:
        env: The environment.
        prompt: The user's YAML or Python file; None uses a default wording from the spaces.

    Raises:
        ConfigError: The file cannot be read, or does not fit the environment.
    """
    if prompt is None:
        return generic_agent(env, Wording())
    if not prompt.is_file():
        raise ConfigError(f"There is no file {str(prompt)!r}. Pass a .yaml or .py file.")
    if prompt.suffix == ".py":
        return _load_agent_class(prompt)
    if prompt.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{str(prompt)!r} is neither YAML nor Python. Pass a .yaml or .py file.")
    wording = read_wording(prompt)
    try:
        return generic_agent(env, wording)
    except ConfigError as error:
        raise ConfigError(f"{prompt}: {error}") from error


def read_wording(path: Path) -> Wording:
    """Reads a wording from a YAML file.

    Raises:
        ConfigError: The file is not YAML, or has unknown keys or wrong values.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError(f"it has more than {_MAX_FILE_BYTES} bytes")
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_WordingLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as YAML: {reason_of(error)}.") from error
    known = {field.name for field in fields(Wording)}
    if not isinstance(values, dict):
        raise ConfigError(f"{str(path)!r} holds {shortened(values)}. Give it one or more of the keys {sorted(known)}.")
    for key, value in values.items():
        if key not in known:
            raise ConfigError(
                f"{str(path)!r} has an unknown key {shortened(key)}. {did_you_mean(str(key)[:80], known)}"
            )
        expected, is_valid = _VALUE_TYPES[key]
        if not is_valid(value):
            raise ConfigError(f"{key} in {str(path)!r} is {shortened(value)}. Pass {expected}.")
    if "{observation}" not in values.get("observation", "{observation}"):
        raise ConfigError(
            f"observation in {str(path)!r} is {shortened(values['observation'])}, which does not contain the "
            "observation. Insert the placeholder {observation}."
        )
    return Wording(**values)


def _load_agent_class(path: Path) -> type[Agent]:
    """Executes a Python file, as `python FILE` would except for `__name__`, and returns the one agent it defines."""
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
    classes = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Agent)]
    own = [defined for defined in classes if defined.__module__ == _MODULE and not isabstract(defined)]
    if len(own) != 1:
        found = ", ".join(defined.__name__ for defined in own) or "none"
        raise ConfigError(
            f"{str(path)!r} must define one subclass of llamagym.Agent with its three methods; found: {found}."
        )
    return own[0]
