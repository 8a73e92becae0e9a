"""What `--prompt FILE` says about an environment: a few words in YAML, or an agent of the user's own in Python."""

from __future__ import annotations

import sys
from dataclasses import fields
from importlib.util import module_from_spec, spec_from_file_location
from inspect import isabstract
from pathlib import Path
from typing import Any

import gymnasium
import yaml

from ..agent import Agent
from ..errors import ConfigError, LlamaGymError, did_you_mean
from .generic import Wording, generic_agent

_MODULE = "llamagym_prompt"


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
        # All is text to this loader, so that actions may be called yes, no or 1.
        said = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as YAML: {' '.join(str(error).split())}.") from error
    known = {field.name for field in fields(Wording)}
    if not isinstance(said, dict):
        raise ConfigError(f"{str(path)!r} holds {said!r}. Give it one or more of the keys {sorted(known)}.")
    for key, value in said.items():
        if key not in known:
            raise ConfigError(f"{str(path)!r} has an unknown key {key!r}. {did_you_mean(str(key), known)}")
        wanted = str if key in ("system_prompt", "observation") else list
        if not isinstance(value, wanted):
            kind = "a text" if wanted is str else "a list"
            raise ConfigError(f"{key} in {str(path)!r} is {value!r}. Pass {kind}.")
    if "{observation}" not in said.get("observation", "{observation}"):
        raise ConfigError(
            f"observation in {str(path)!r} is {said['observation']!r}, in which nothing depends on what is observed. "
            "Put {observation} where that goes."
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
