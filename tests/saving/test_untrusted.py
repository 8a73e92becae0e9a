"""Untrusted files are data: none of them executes code, or makes the library read another file."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import peft
import pytest
from safetensors.torch import load_file

from llamagym import (
    AutoModelForCausalLMWithValueHead,
    CheckpointError,
    ConfigError,
    LlamaGymError,
    ModelLoadError,
    load_model_and_tokenizer,
)
from llamagym.__main__ import main
from llamagym.cli.prompts import agent_class, read_wording
from llamagym.cli.runs import load_agent
from llamagym.models.transformers_internals import attention_name
from llamagym.saving.manifest import MANIFEST
from tests.helpers import ROOT
from tests.helpers.tiny import tiny_base_model, tiny_tokenizer
from tests.saving.test_damaged_files import reseal

LAKE = "FrozenLake-v1"
# Leaves a trace wherever it is executed.
EVIL = "from pathlib import Path\nPath(__file__).with_suffix('.executed').touch()\n"
WALKER = """
from llamagym.cli.generic import GenericAgent

class Walker(GenericAgent):
    pass
"""


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """Writes the folder of a run without training."""
    folder = tmp_path_factory.mktemp("original")
    tiny_base_model("llama").save_pretrained(folder / "base")
    tiny_tokenizer("llama").save_pretrained(folder / "base")
    model, tokenizer, device = load_model_and_tokenizer(folder / "base", "cpu", "float32")
    env = gym.make(LAKE)
    agent_class(env, None)(model, tokenizer, device, context="turn", seed=0).save(folder / "run" / "agent")
    (folder / "run" / "config.json").write_text(json.dumps({"env_id": LAKE, "prompt": None}))
    return folder / "run"


@pytest.fixture
def run(original, tmp_path, monkeypatch) -> Path:
    """Returns a copy of the run, as if downloaded; removes modules that it imports."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return shutil.copytree(original, tmp_path / "downloaded")


def settings(run: Path, **changes: Any) -> None:
    (run / "config.json").write_text(json.dumps({"env_id": LAKE, "prompt": None} | changes))


def executed(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*.executed")]


def test_an_untouched_run_is_loaded(run):
    agent, env_id = load_agent(run, None, None)
    assert env_id == LAKE
    assert type(agent).__name__ == "GenericAgent"


@pytest.mark.parametrize(
    "name", ["{root}/evil.py", "../evil.py", "agent/../../evil.py", "evil.py", "prompt.toml", 3, ["prompt.py"]]
)
def test_a_prompt_elsewhere_is_neither_read_nor_executed(run, tmp_path, name):
    for folder in (tmp_path, run):
        (folder / "evil.py").write_text(EVIL + WALKER)
    settings(run, prompt=name.format(root=tmp_path) if isinstance(name, str) else name)
    for trust in (False, True):
        with pytest.raises(ConfigError, match=r"names the prompt .*; a run has one of"):
            load_agent(run, None, None, trust)
    assert executed(tmp_path) == []


@pytest.mark.parametrize("suffix", [".py", ".yaml"])
def test_a_prompt_that_is_a_link_to_a_file_elsewhere_is_not_read(run, tmp_path, suffix):
    (tmp_path / "secret").write_text(EVIL)
    (run / f"prompt{suffix}").symlink_to("../secret")
    settings(run, prompt=f"prompt{suffix}")
    with pytest.raises(CheckpointError, match="lies outside of that folder"):
        load_agent(run, None, None, trust=True)
    assert executed(tmp_path) == []


def test_python_prompts_are_executed_only_with_trust_which_prints_them(run, capsys):
    (run / "prompt.py").write_text(EVIL + WALKER)
    settings(run, prompt="prompt.py")
    with pytest.raises(ConfigError, match=r"prompt.py' is Python code by the run's author.*--trust"):
        load_agent(run, None, None)
    assert executed(run) == []
    with pytest.raises(ConfigError, match="would be loaded as a Walker"):
        load_agent(run, None, None, trust=True)
    assert executed(run) == ["prompt.executed"]
    assert f"--trust: executing {run / 'prompt.py'}" in capsys.readouterr().err


def test_settings_next_to_an_agent_that_is_passed_alone_are_ignored(run):
    (run / "prompt.py").write_text(EVIL + WALKER)
    settings(run, prompt="prompt.py")
    with pytest.raises(ConfigError, match="Nothing says which environment"):
        load_agent(run / "agent", None, None, trust=True)
    assert load_agent(run / "agent", LAKE, None)[1] == LAKE
    assert executed(run) == []


@pytest.mark.parametrize("module", ["evil_module", "evil_module.inner", "antigravity", "..evil_module"])
def test_the_module_of_an_environment_is_executed_only_with_trust(run, monkeypatch, module):
    (run / "evil_module.py").write_text(EVIL)
    settings(run, env_id=f"{module}:Evil-v0")
    monkeypatch.chdir(run)
    monkeypatch.syspath_prepend("")
    with pytest.raises(ConfigError, match=rf"Gymnasium would execute the module '{module}'.*--trust"):
        load_agent(run, None, None)
    assert executed(run) == []
    assert "antigravity" not in sys.modules


def test_trust_executes_the_module_and_prints_it(run, monkeypatch, capsys):
    (run / "evil_module.py").write_text(EVIL)
    settings(run, env_id="evil_module:Evil-v0")
    monkeypatch.syspath_prepend(str(run))
    with pytest.raises(ConfigError, match="cannot be made"):
        load_agent(run, None, None, trust=True)
    assert executed(run) == ["evil_module.executed"]
    assert "--trust: executing the module evil_module" in capsys.readouterr().err


def test_an_environment_of_an_installed_package_needs_no_trust(run):
    settings(run, env_id=f"gymnasium:{LAKE}")
    assert load_agent(run, None, None)[1] == f"gymnasium:{LAKE}"


def test_modules_in_the_run_s_folder_are_not_imported_from_there(run, monkeypatch):
    (run / "textarena.py").write_text(EVIL)
    monkeypatch.chdir(run)
    monkeypatch.syspath_prepend("")
    load_agent(Path("."), None, None)
    assert "" not in sys.path
    assert str(run) not in sys.path


@pytest.mark.parametrize(
    ("command", "module"), [("agent", "peft"), ("agent", "bitsandbytes"), ("agent/../agent", "numba"), (".", "peft")]
)
@pytest.mark.long
def test_modules_beside_an_agent_are_not_imported_later(run, command, module):
    (run / f"{module}.py").write_text(EVIL)
    words = [sys.executable, "-m", "llamagym", "eval", command, LAKE, "--episodes", "1"]
    done = subprocess.run(words, cwd=run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert executed(run) == []


def test_the_search_path_keeps_nothing_around_an_agent(run, monkeypatch):
    monkeypatch.chdir(run)
    for place in ("", str(run), str(run.parent), str(run / "agent")):
        monkeypatch.syspath_prepend(place)
    load_agent(Path("agent"), LAKE, None)
    assert not {"", str(run), str(run.parent), str(run / "agent")} & set(sys.path)


def test_a_module_that_the_user_names_is_imported_from_beside_the_run(run, monkeypatch):
    (run.parent / "my_lakes.py").write_text("import gymnasium\n")
    monkeypatch.chdir(run.parent)
    monkeypatch.syspath_prepend("")
    assert load_agent(run, f"my_lakes:{LAKE}", None)[1] == f"my_lakes:{LAKE}"


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "chat_template.jinja",
        "adapter_config.json",
        "adapter_model.safetensors",
        "additional_chat_templates/x.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
        "value_head.safetensors",
        "unknown.json",
    ],
)
def test_an_agent_with_links_out_of_its_folder_is_not_read(run, tmp_path, name, is_listed):
    path = run / "agent" / name
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename(tmp_path / "outside")
    else:
        (tmp_path / "outside").write_text("secret")
    path.symlink_to(tmp_path / "outside")
    manifest = json.loads((run / "agent" / MANIFEST).read_text())
    if not is_listed:
        manifest["files"].pop(name, None)
    (run / "agent" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=rf"refers to the file '{name}', which lies outside"):
        load_agent(run, None, None)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_an_agent_with_a_pipe_in_its_folder_is_rejected(run):
    os.mkfifo(run / "agent" / "additional.jinja")
    with pytest.raises(CheckpointError, match="neither a file nor a folder"):
        load_agent(run, None, None)


@pytest.mark.parametrize(
    "env_id", ["gymnasium:a:b", "GymV21Environment-v0", "x" * 100_000, "gymnasium:" + "x" * 150, "\x1b[31mX-v0"]
)
def test_rejects_a_strange_environment_id_with_a_short_error(run, env_id):
    settings(run, env_id=env_id)
    with pytest.raises(ConfigError) as error:
        load_agent(run, None, None)
    assert len(str(error.value)) < 1000


def test_what_trust_executes_cannot_be_hidden(run, monkeypatch, capsys):
    settings(run, env_id="evil_module:Evil-v0\x1b[1A\x1b[2K\r\nall is well")
    with pytest.raises(ConfigError):
        load_agent(run, None, None, trust=True)
    printed = capsys.readouterr().err
    assert "\x1b" not in printed
    assert "\\x1b[1A\\x1b[2K\\r\\nall is well" in printed
    assert len(printed.splitlines()) == 1


def test_choices_for_a_person_cannot_control_the_terminal(run, monkeypatch, capsys):
    (run / "prompt.yaml").write_text('actions: ["\\e]0;owned\\a", "\\e[31mdown", right, up]\n')
    settings(run, prompt="prompt.yaml")
    monkeypatch.setattr(sys, "argv", ["llamagym", "play", str(run), "--human", "--seed", "0"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("nope\n\\x1b[31mdown\nright\n"))
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr()
    assert not {"\x1b", "\x07"} & set(printed.out + printed.err)
    assert "\\x1b]0;owned\\x07" in printed.out


def test_a_response_prefix_of_an_agent_does_not_hide_its_actions(original, run):
    path = run / "agent" / "agent.json"
    state = json.loads(path.read_text())
    state["options"]["response_prefix"] = "I go "
    path.write_text(json.dumps(state))
    reseal(run / "agent")
    agent, _ = load_agent(run, None, None)
    assert agent.act(0) in range(4)


@pytest.mark.parametrize("what", ["config.json", "agent"])
def test_links_out_of_a_run_are_not_followed(run, tmp_path, what):
    (run / what).rename(tmp_path / "elsewhere")
    (run / what).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=rf"refers to the file '{what}', which lies outside"):
        load_agent(run, None, None)


@pytest.mark.parametrize(
    "content", ["[]", "3", "{", "[" * 100_000, "\xff", "null", '{"env_id": 3}', '{"env_id": null}', "{}", "1" * 5000]
)
def test_damaged_settings_are_named(run, content):
    (run / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config.json' cannot be read|Nothing says which environment") as error:
        load_agent(run, None, None)
    assert len(str(error.value)) < 1000


def test_errors_of_the_command_line_are_one_line(run, monkeypatch, capsys):
    (run / "prompt.py").write_text(EVIL)
    settings(run, prompt="prompt.py")
    for command in ("eval", "play"):
        monkeypatch.setattr(sys, "argv", ["llamagym", command, str(run)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 1
        said = capsys.readouterr().err
        assert "pass --trust" in said
        assert len(said.splitlines()) == 1
    assert executed(run) == []


# Models and adapters


@pytest.mark.parametrize(
    "changes",
    [
        {"megatron_config": {"a": 1}, "megatron_core": "evil_module"},
        {"prompt_tuning_init_state_dict_path": "../secret"},
    ],
)
def test_an_adapter_cannot_name_code_or_files(run, changes):
    path = run / "agent" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelLoadError, match=rf"adapter_config.json.*{next(iter(changes))}"):
        load_model_and_tokenizer(run / "agent", "cpu")


@pytest.mark.parametrize("task", ["CAUSAL_LM", None])
def test_a_module_that_an_adapter_names_as_its_base_s_is_not_imported(run, tmp_path, monkeypatch, task):
    (tmp_path / "evil_module.py").write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    agent = run / "agent"
    mapping = {"base_model_class": "Model", "parent_library": "evil_module"}
    changes = {"auto_mapping": mapping, "task_type": task, "alora_invocation_tokens": None}
    config = json.loads((agent / "adapter_config.json").read_text())
    (agent / "adapter_config.json").write_text(json.dumps(config | changes))
    reseal(agent)
    for load in LOADERS:
        load(agent)
    model = load_agent(run, None, None)[0].policy.model
    assert "evil_module" not in sys.modules
    assert executed(tmp_path) == []
    # Nor passed on to others.
    model.save_pretrained(tmp_path / "saved")
    assert "evil_module" not in (tmp_path / "saved" / "adapter_config.json").read_text()


LOADERS = [
    lambda folder: load_model_and_tokenizer(folder, "cpu", "float32"),
    AutoModelForCausalLMWithValueHead.from_pretrained,
]


@pytest.mark.parametrize("load", LOADERS, ids=["load_model_and_tokenizer", "from_pretrained"])
@pytest.mark.parametrize(
    "changes",
    [
        {"peft_type": "SHADOW", "shadow_model": "{secret}"},
        {"peft_type": "XLORA", "hidden_size": 32, "adapters": {"0": "{secret}"}},
        {"peft_type": "PROMPT_TUNING", "tokenizer_name_or_path": "{secret}", "prompt_tuning_init": "TEXT"},
        {"peft_type": "NOPE"},
        {"peft_type": None},
        {"peft_type": ["LORA"]},
    ],
)
def test_rejects_an_adapter_of_another_method_before_peft_reads_it(run, tmp_path, monkeypatch, load, changes):
    agent = run / "agent"
    shutil.copytree(agent, tmp_path / "secret")
    config = json.loads((agent / "adapter_config.json").read_text())
    kept = {name: config[name] for name in ("base_model_name_or_path", "task_type")}
    text = json.dumps(kept | changes).replace("{secret}", str(tmp_path / "secret"))
    (agent / "adapter_config.json").write_text(text)
    reseal(agent)
    for part in (peft.PeftConfig, peft.PeftModel):
        monkeypatch.setattr(part, "from_pretrained", lambda *_, **__: pytest.fail("PEFT was asked"))
    with pytest.raises(ModelLoadError, match=r"adapter_config.json.*peft_type"):
        load(agent)
    with pytest.raises(LlamaGymError, match=r"adapter_config.json.*peft_type"):
        load_agent(run, None, None)


@pytest.mark.parametrize("load", LOADERS, ids=["load_model_and_tokenizer", "from_pretrained"])
@pytest.mark.parametrize("name", ["../private/weights.safetensors", "{private}/weights.safetensors"])
@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_an_index_cannot_name_weights_elsewhere(tmp_path, load, name, index):
    folder, private = tmp_path / "model", tmp_path / "private"
    tiny_base_model("llama").save_pretrained(folder)
    tiny_tokenizer("llama").save_pretrained(folder)
    private.mkdir()
    (folder / "model.safetensors").rename(private / "weights.safetensors")
    keys = load_file(private / "weights.safetensors")
    weight_map = {key: name.replace("{private}", str(private)) for key in keys}
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(ModelLoadError, match=rf"{index}.*weights.safetensors'.*outside"):
        load(folder)


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        (
            "config.json",
            {"auto_map": {"AutoModelForCausalLM": "evil_module.Model", "AutoConfig": "evil_module.Config"}},
        ),
        ("config.json", {"model_type": "evil", "auto_map": {"AutoConfig": "evil_module.Config"}}),
        ("config.json", {"attn_implementation": "somebody/kernel"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil_module.T", None]}, "tokenizer_class": "T"}),
    ],
)
def test_a_model_s_own_code_is_never_executed(run, monkeypatch, file, changes):
    base = shutil.copytree(run.parent / "downloaded", run.parent / "model") / "agent"
    shutil.rmtree(base)
    tiny_base_model("llama").save_pretrained(base)
    tiny_tokenizer("llama").save_pretrained(base)
    (base / "evil_module.py").write_text(EVIL + "Model = Config = T = dict\n")
    (base / file).write_text(json.dumps(json.loads((base / file).read_text()) | changes))
    monkeypatch.chdir(base)
    try:
        model, _, _ = load_model_and_tokenizer(base, "cpu")
    except ModelLoadError:
        pass
    else:
        assert attention_name(model.config) in ("sdpa", "eager")
    assert executed(run.parent) == []


# Wordings


@pytest.mark.long
@pytest.mark.parametrize(
    "text",
    [
        "system_prompt:\n- &a0 [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"- &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 7)),
        "actions: " + "[" * 5000 + "]" * 5000,
        "system_prompt: " + "x" * 2_000_000,
        "observation_names: [[a]]",
        "actions: [{a: b}]",
        "actions: [[[a]]]",
        "!!python/object/apply:os.system [echo]",
        "? [a, b]\n: c",
        "a: 1\n" * 100_000,
    ],
    ids=["aliases", "nested", "long", "names", "actions", "deep actions", "tag", "key", "keys"],
)
def test_rejects_a_hostile_wording_with_a_short_line(tmp_path, text):
    path = tmp_path / "prompt.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_wording(path)
    assert len(str(error.value)) < 1000
    assert "\n" not in str(error.value)


def test_tags_in_a_wording_are_text(tmp_path):
    (tmp_path / "prompt.yaml").write_text("system_prompt: !!python/name:os.system x")
    assert read_wording(tmp_path / "prompt.yaml").system_prompt == "x"


def test_a_wording_cannot_control_the_terminal(run, monkeypatch, capsys):
    (run / "prompt.yaml").write_text('system_prompt: "\\e]0;owned\\a \\e[31mred \\u202e"\n')
    settings(run, prompt="prompt.yaml")
    monkeypatch.setattr(sys, "argv", ["llamagym", "play", str(run), "--seed", "0"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert "\\x1b]0;owned\\x07 \\x1b[31mred \\u202e" in printed.splitlines()[0]


def test_every_row_of_the_threat_model_names_tests_that_exist():
    files = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    page = (ROOT / "docs" / "security.md").read_text()
    rows = re.search(r"## Threat model\n\n(?:.*\n){2}((?:\|.*\n)+)", page).group(1).splitlines()
    assert len(rows) > 10
    for row in rows:
        *_, named = row.strip("|").split(" | ")
        found = re.findall(r"`(test_\w+\.py)::(test_\w+)`", named)
        # Code that the user passes has no limits.
        assert found or "any code: they run as your program does" in row, row
        for file, name in found:
            assert f"def {name}(" in files[file].read_text(), f"{file}::{name}"
