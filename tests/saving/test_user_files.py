"""Files of users are never deleted or overwritten, and a write that fails or is killed leaves what was there."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from llamagym import AutoModelForCausalLMWithValueHead, CheckpointError, ConfigError, EvalCallback, train, write_report
from llamagym.saving import atomic, file_operations
from llamagym.saving.atomic import atomic_folder, replace_file, verify
from llamagym.saving.checkpoints import best, checkpoint_path, newest
from llamagym.saving.manifest import MANIFEST
from llamagym.saving.paths import file_inside, user_folder
from llamagym.training import tracking
from llamagym.training.tracking import CsvTracker, JsonlTracker, MultiTracker, default_tracker
from tests.helpers.agents import ChoiceAgent, WordAgent, make_agent
from tests.helpers.killed import killed_at
from tests.helpers.resumed_run import SIZES, DiceEnv
from tests.helpers.tiny import tiny_base_model, tiny_model

WRITERS = {
    "save": lambda agent, folder: agent.save(folder),
    "save_checkpoint": lambda agent, f: agent.save_checkpoint(f),
}


@pytest.fixture(scope="module")
def agent() -> Any:
    return make_agent(ChoiceAgent, ppo=SIZES, context="turn")


@pytest.fixture(params=WRITERS)
def save(request, agent) -> Any:
    """Saves the agent, or a checkpoint of it, to a folder."""
    return lambda folder: WRITERS[request.param](agent, folder)


def learning(folder: Path | None, episodes: int = 12, **options: Any) -> Any:
    return train(
        make_agent(ChoiceAgent, ppo=SIZES, context="turn"),
        DiceEnv,
        episodes=episodes,
        num_envs=2,
        seed=0,
        run_dir=folder,
        **options,
    )


def tree(folder: Path) -> dict[str, bytes | str]:
    """Everything below a folder, with contents."""
    return {
        path.relative_to(folder).as_posix(): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


# Saving


def test_rejects_a_folder_with_user_files(save, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=r"thesis' holds files \('chapter.tex'\) and no manifest of this version"):
        save(tmp_path / "thesis")
    assert tree(tmp_path) == before


def test_rejects_saving_over_a_run(save, tmp_path):
    learning(tmp_path / "run")
    before = tree(tmp_path)
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        with pytest.raises(CheckpointError, match="and no manifest of this version"):
            save(folder)
    assert tree(tmp_path) == before


def test_rejects_saving_over_a_file(save, tmp_path):
    (tmp_path / "notes").write_text("mine")
    for path in (tmp_path / "notes", tmp_path / "notes" / "below"):
        with pytest.raises(ConfigError, match=r"folder='.*notes.* is not a folder and cannot be created"):
            save(path)
    assert tree(tmp_path) == {"notes": b"mine"}


def test_rejects_saving_over_a_save_of_another_kind(agent, tmp_path):
    agent.save(tmp_path / "agent")
    agent.save_checkpoint(tmp_path / "checkpoint")
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match="agent' holds: agent; saving there would replace it with: checkpoint"):
        agent.save_checkpoint(tmp_path / "agent")
    with pytest.raises(
        CheckpointError, match="checkpoint' holds: checkpoint; saving there would replace it with: agent"
    ):
        agent.save(tmp_path / "checkpoint")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two renames"])
def test_saving_again_keeps_added_files(save, tmp_path, monkeypatch, exchanges):
    if not exchanges:
        monkeypatch.setattr(atomic, "exchange_folders", lambda *_: False)
    folder = tmp_path / "saved"
    save(folder)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "data").write_text("precious")
    (folder / "notes.txt").write_text("mine")
    (folder / "plots").mkdir()
    (folder / "plots" / "a.png").write_bytes(b"png")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / MANIFEST).with_name("dangling").symlink_to("nowhere")
    for _ in range(2):
        save(folder)
        found = tree(folder)
        assert found["notes.txt"] == b"mine"
        assert found["plots/a.png"] == b"png"
        assert found["link"] == str(tmp_path / "elsewhere")
        assert found["dangling"] == "nowhere"
    assert (tmp_path / "elsewhere" / "data").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "saved"]


def test_saving_again_rejects_an_added_file_of_the_same_name(tmp_path):
    with atomic_folder(tmp_path / "now", "agent") as whole:
        (whole / "a").write_text("1")
    (tmp_path / "now" / "README.md").write_text("mine")
    before = tree(tmp_path)
    message = r"'README.md' is in the way"
    with pytest.raises(CheckpointError, match=message), atomic_folder(tmp_path / "now", "agent") as whole:
        (whole / "README.md").write_text("ours")
    assert tree(tmp_path) == before


def test_rejects_a_bad_best_dir_before_training(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(CheckpointError, match="and no manifest of this version"):
        EvalCallback(DiceEnv, best_dir=tmp_path)
    with pytest.raises(ConfigError, match="best_dir="):
        EvalCallback(DiceEnv, best_dir=tmp_path / "notes")


def test_rejects_the_working_directory_as_best_dir(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    for best_dir in (".", "..", tmp_path / "in"):
        with pytest.raises(ConfigError, match="is the current working directory or contains it"):
            EvalCallback(DiceEnv, best_dir=best_dir)


def test_saving_to_a_link_keeps_the_link(save, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk", target_is_directory=True)
    save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / MANIFEST).is_file()


def test_saving_keeps_folders_that_look_like_temporary_ones(save, tmp_path):
    for name in (".writing-a-novel", ".writing-docs", ".replaced-saved"):
        (tmp_path / name).mkdir()
        if name == ".writing-docs":
            (tmp_path / name / "llamagym").write_text("a chapter")
        (tmp_path / name / "page").write_text("1")
        os.utime(tmp_path / name, (0, 0))
    before = tree(tmp_path)
    save(tmp_path / "saved")
    save(tmp_path / "saved")
    assert before.items() <= tree(tmp_path).items()


# Pruning


def test_pruning_deletes_only_checkpoints_of_this_run(agent, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("mine")
    root = tmp_path / "checkpoints"
    # Of another program; of the user, by hand; and of another run, behind a link.
    (root / "checkpoint-500").mkdir(parents=True)
    (root / "checkpoint-500" / "optimizer.pt").write_bytes(b"1")
    learning(None, episodes=4, checkpoint_dir=tmp_path / "other")
    other = newest(tmp_path / "other")
    before = tree(tmp_path)
    learning(None, episodes=4, checkpoint_dir=root, checkpoint_every=1, keep_checkpoints=1)
    agent.save_checkpoint(checkpoint_path(root, 1))
    (root / checkpoint_path(root, 2).name).symlink_to(other, target_is_directory=True)
    (root / checkpoint_path(root, 3).name).symlink_to(precious, target_is_directory=True)
    learning(None, episodes=12, checkpoint_dir=root, checkpoint_every=1, keep_checkpoints=1, resume=True)
    assert before.items() <= tree(tmp_path).items()
    assert (checkpoint_path(root, 1) / MANIFEST).is_file()
    assert checkpoint_path(root, 2).is_symlink()
    assert checkpoint_path(root, 3).is_symlink()
    ours = [
        path
        for path in root.iterdir()
        if not path.is_symlink() and path.name not in ("checkpoint-500", checkpoint_path(root, 1).name)
    ]
    assert 1 <= len(ours) <= 2


def test_pruning_keeps_what_the_user_added_to_a_checkpoint(tmp_path):
    learning(None, episodes=4, checkpoint_dir=tmp_path, checkpoint_every=1, keep_checkpoints=1)
    kept = newest(tmp_path)
    assert kept is not None
    (kept / "notes.txt").write_text("mine")
    (kept / "link").symlink_to(tmp_path)
    learning(None, episodes=12, checkpoint_dir=tmp_path, checkpoint_every=1, keep_checkpoints=1, resume=True)
    assert newest(tmp_path) != kept
    assert (kept / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["../precious", "/{root}/precious", "inner/../../precious", "link/precious"])
def test_removal_keeps_files_outside_of_the_folder(tmp_path, name):
    (tmp_path / "precious").write_text("mine")
    with atomic_folder(tmp_path / "own", "checkpoint") as whole:
        (whole / "a").write_text("1")
    (tmp_path / "own" / "link").symlink_to(tmp_path)
    manifest = json.loads((tmp_path / "own" / MANIFEST).read_text())
    manifest["files"][name.format(root=str(tmp_path).lstrip("/"))] = [4, "0"]
    (tmp_path / "own" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="lies outside of that folder"):
        verify(tmp_path / "own", "checkpoint")
    atomic.remove_saved(tmp_path / "own")
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "own" / "a").exists()


# A run's folder


@pytest.mark.parametrize("name", ["config.json", "notes.txt", "report.html"])
def test_a_run_rejects_a_folder_with_other_files(tmp_path, name):
    (tmp_path / name).write_text('{"my": "settings"}')
    for start in (learning, lambda folder: default_tracker(folder, {})):
        with pytest.raises(ConfigError, match=rf"run_dir='.*' contains files that llamagym did not write \('{name}'\)"):
            start(tmp_path)
    assert tree(tmp_path) == {name: b'{"my": "settings"}'}


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.csv", "transcripts.jsonl", "config.json"])
def test_a_resumed_run_rejects_linked_files(tmp_path, name):
    learning(tmp_path / "run", track=["csv"])
    (tmp_path / "precious").write_text("mine\n" * 1000)
    (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / name).symlink_to("../precious")
    with pytest.raises(ConfigError, match=rf"{name}' is a symbolic link"):
        learning(tmp_path / "run", episodes=20, track=["csv"], resume=True)
    assert (tmp_path / "precious").read_text() == "mine\n" * 1000


# A mark names the version and the id of a run.
OTHER_MARKS = [
    f'{{"llamagym": "{mark}"}}'
    for mark in ("0.2", "dry run only", "my run 0123456789abcdef", "0.2 run 7", "0.2 run 0123456789abcdef!")
]


@pytest.mark.parametrize("settings", ['{"my": "settings"}', '{"llamagym": {"episodes": 100}}', *OTHER_MARKS])
def test_rejects_a_folder_without_a_run_mark(tmp_path, settings):
    (tmp_path / "config.json").write_text(settings)
    (tmp_path / "metrics.jsonl").write_text("mine\n")
    learning(None, episodes=4, checkpoint_dir=tmp_path / "checkpoints")
    before = tree(tmp_path)
    for start in (lambda: learning(tmp_path, resume=True), lambda: default_tracker(tmp_path, {})):
        with pytest.raises(ConfigError, match="contains files that llamagym did not write"):
            start()
    assert tree(tmp_path) == before


def test_recognizes_the_mark_of_a_run(tmp_path, monkeypatch):
    for version in ("unknown", "0.2.0", "1.0rc1.dev3+g12ab.d2026"):
        monkeypatch.setattr("llamagym.training.run_folder.llamagym_version", lambda version=version: version)
        default_tracker(tmp_path / version, {}).close()
        default_tracker(tmp_path / version, {}).close()


def test_a_damaged_run_id_in_a_checkpoint_allows_resuming(tmp_path):
    learning(tmp_path, episodes=4)
    manifest = newest(tmp_path / "checkpoints") / MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"run": "a b"}))
    learning(tmp_path / "other", episodes=4, checkpoint_dir=tmp_path / "checkpoints", resume=True)
    learning(tmp_path / "other", episodes=4, checkpoint_dir=tmp_path / "checkpoints", resume=True)


def test_a_folder_of_checkpoints_alone_can_become_a_run(tmp_path):
    learning(None, episodes=4, checkpoint_dir=tmp_path / "checkpoints")
    assert len(learning(tmp_path, resume=True).returns) == 16
    assert len(learning(tmp_path, resume=True).returns) == 28


def test_rejects_resuming_in_the_folder_of_another_run(tmp_path):
    learning(tmp_path / "a", episodes=4)
    learning(tmp_path / "b", episodes=20)
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match=r"run_dir='.*b' belongs to run \w+, but the newest checkpoint in '.*a/che"):
        learning(tmp_path / "b", checkpoint_dir=tmp_path / "a" / "checkpoints", resume=True)
    assert tree(tmp_path) == before
    # A new folder takes the run, and can be resumed with it again.
    for _ in range(2):
        learning(tmp_path / "c", checkpoint_dir=tmp_path / "a" / "checkpoints", resume=True)


@pytest.mark.parametrize("kind", [JsonlTracker, CsvTracker])
@pytest.mark.parametrize("updates", [0, 2])
def test_a_resumed_run_truncates_only_its_own_files(tmp_path, caplog, kind, updates):
    own = kind(tmp_path / "own")
    precious = kind(tmp_path / "precious")
    for step in range(50):
        precious.log({"precious": float(step)}, step)
    for step in range(updates):
        own.log({"a": float(step)}, step)
    position = {**own.position()}
    own.log({"a": 9.0}, 9)
    before = (tmp_path / "precious").read_bytes()
    for saved in (position, 3, None, {"size": 3}, {"size": True, "sha256": []}, {}):
        with pytest.raises(CheckpointError, match="precious"):
            precious.rewind(saved)
    # A run goes on and appends to the file.
    MultiTracker(precious).rewind([[kind.__name__, position]])
    assert "is not the file of the checkpoint" in caplog.text
    assert (tmp_path / "precious").read_bytes() == before
    own.rewind(position)
    assert own.position() == position
    for tracker in (own, precious):
        tracker.close()


@pytest.mark.parametrize(
    "text", ["a;b\n1;2,3\n4;5,6,7\n", "a,a,b\n1,2,3\n", "step,a,a\n1,2,3\n", "step,a\n1,2,3\n", "x\n"]
)
def test_rejects_a_table_that_cannot_be_appended_to(tmp_path, text):
    (tmp_path / "data.csv").write_text(text)
    with pytest.raises(ConfigError, match=r"data.csv' cannot be read as a table: .*Move it away"):
        CsvTracker(tmp_path / "data.csv")
    assert (tmp_path / "data.csv").read_text() == text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs the limits of Unix")
@pytest.mark.parametrize("new", [{}, {"c": 7.0}], ids=["append", "rewrite"])
def test_drops_a_table_line_that_a_full_disk_truncated(tmp_path, new):
    import resource  # of Unix

    table = CsvTracker(tmp_path / "metrics.csv")
    table.log({"a": 1.0, "b": 2.0}, 1)
    position, soft_and_hard = table.position(), resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.csv").stat().st_size + 4, soft_and_hard[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            table.log({"a": 3.0, "b": 4.0, **new}, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft_and_hard)
        signal.signal(signal.SIGXFSZ, before)
    assert table.position() == position
    table.log({"a": 5.0, "b": 6.0}, 3)
    assert (tmp_path / "metrics.csv").read_text() == "step,a,b\n1,1.0,2.0\n3,5.0,6.0\n"


@pytest.mark.parametrize("name", ["checkpoints", "agent", "wandb"])
def test_a_run_does_not_write_through_linked_folders(tmp_path, name):
    learning(tmp_path / "mine", episodes=4)
    learning(tmp_path / "downloaded", episodes=4)
    shutil.rmtree(tmp_path / "downloaded" / name, ignore_errors=True)
    (tmp_path / "mine" / name).mkdir(exist_ok=True)
    (tmp_path / "downloaded" / name).symlink_to(f"../mine/{name}")
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match=rf"downloaded/{name}' is a symbolic link"):
        learning(tmp_path / "downloaded", episodes=20, keep_checkpoints=1, resume=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("project", ["lakes", "lakes/frozen"])
def test_services_reject_a_linked_folder(tmp_path, project):
    default_tracker(tmp_path / "run", {}).close()
    (tmp_path / "mine").mkdir()
    (tmp_path / "run" / "lakes").symlink_to("../mine")
    with pytest.raises(ConfigError, match=r"run/lakes' is a symbolic link"):
        default_tracker(tmp_path / "run", {}, project, track=["tensorboard"])
    assert list((tmp_path / "mine").iterdir()) == []


def test_ignores_a_checkpoint_that_is_a_link(tmp_path, caplog):
    learning(tmp_path / "mine", episodes=4)
    learning(tmp_path / "downloaded", episodes=4)
    mine = newest(tmp_path / "mine" / "checkpoints")
    before = tree(tmp_path / "mine")
    link = checkpoint_path(tmp_path / "downloaded" / "checkpoints", 10**6)
    link.symlink_to(f"../../mine/checkpoints/{mine.name}")
    assert newest(tmp_path / "downloaded" / "checkpoints") != link
    assert "lies outside of that folder" in caplog.text
    # The checkpoints that a run will write.
    for turns in range(1, 60):
        path = checkpoint_path(tmp_path / "downloaded" / "checkpoints", turns)
        if not path.exists():
            path.symlink_to(f"../../mine/checkpoints/{mine.name}")
    with pytest.raises(CheckpointError, match="lies outside of that folder"):
        learning(tmp_path / "downloaded", checkpoint_every=1, resume=True)
    assert tree(tmp_path / "mine") == before


def test_a_return_beyond_float_does_not_end_a_run(tmp_path):
    learning(None, episodes=4, checkpoint_dir=tmp_path)
    for path in tmp_path.glob("checkpoint-*"):
        manifest = json.loads((path / MANIFEST).read_text())
        (path / MANIFEST).write_text(json.dumps(manifest | {"return_mean": 10**400}))
    assert best(tmp_path) is None
    assert len(learning(None, episodes=4, checkpoint_dir=tmp_path, resume=True).returns) == 8


def test_a_report_error_does_not_fail_a_finished_run(tmp_path, caplog):
    (tmp_path / "run").mkdir()
    result = learning(
        tmp_path / "run", on_update=lambda _: (tmp_path / "run" / "report.html").write_text("mine") and None
    )
    assert result.report is None
    assert "cannot be written" in caplog.text
    assert (tmp_path / "run" / "report.html").read_text() == "mine"


# Models with a value head


def filled(model: Any, value: float) -> Any:
    """The model, all of whose weights have one value."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(value)
    return model


def values(model: Any) -> set[float]:
    """The values of all trained and frozen weights, the value head included."""
    return {value for weight in model.parameters() for value in weight.unique().tolist()}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("README.md", f"'README.md' is in the way: no {MANIFEST} lists it.*unchanged"),
        ("adapter_config.json", r"holds files \('adapter_config.json'\) and no manifest of this version"),
        ("other.safetensors", r"holds files \('other.safetensors'\) and no manifest of this version"),
    ],
)
def test_rejects_saving_a_model_over_user_files(agent, tmp_path, name, message):
    (tmp_path / name).write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        agent.policy.model.save_pretrained(tmp_path)
    assert tree(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_saves_a_model_beside_files_of_other_names(agent, tmp_path):
    names = ["tekken.json", "generation_config.json", "qwen.tiktoken", ".gitattributes", ".DS_Store", "notes.txt"]
    for name in names:
        (tmp_path / name).write_text("mine")
    (tmp_path / "link").symlink_to("notes.txt")
    before = tree(tmp_path)
    for _ in range(2):
        agent.policy.model.save_pretrained(tmp_path)
        assert before.items() < tree(tmp_path).items()


@pytest.mark.parametrize("name", ["runs", "linked", ".git"])
def test_rejects_saving_a_model_beside_other_folders(agent, tmp_path, name):
    (tmp_path / "model").mkdir()
    if name == "linked":
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "model" / name).symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / "model" / name).mkdir()
    with pytest.raises(CheckpointError, match=rf"model' .*\('{name}'\)"):
        agent.policy.model.save_pretrained(tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == [name]


def test_rejects_saving_over_a_model_without_manifest(agent, tmp_path):
    agent.policy.model.save_pretrained(tmp_path)
    (tmp_path / MANIFEST).unlink()
    before = tree(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"holds files \('adapter_config.json', .*\) and no manifest of this version"
    ):
        agent.policy.model.save_pretrained(tmp_path)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("nth", [1, 2])
def test_a_failed_save_beside_a_tokenizer_leaves_no_manifest(agent, tmp_path, monkeypatch, nth):
    monkeypatch.setattr(atomic, "exchange_folders", lambda *_: False)
    agent.tokenizer.save_pretrained(str(tmp_path / "model"))
    before = tree(tmp_path)
    usual, calls = Path.rename, []

    def rename(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == nth:
            raise OSError(errno.EIO, "Input/output error")
        return usual(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(CheckpointError, match="unchanged"):
        agent.policy.model.save_pretrained(tmp_path / "model")
    assert tree(tmp_path) == before


def test_the_advice_on_a_model_folder_names_its_kind(agent, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"current working directory.*such as 'my-model'"):
        agent.policy.model.save_pretrained(".")


@pytest.mark.parametrize("tokenizer_first", [True, False])
def test_saves_a_model_beside_its_tokenizer_and_over_an_older_save(agent, tmp_path, tokenizer_first):
    folder = tmp_path / "model"
    saves = [lambda: agent.tokenizer.save_pretrained(str(folder)), lambda: agent.policy.model.save_pretrained(folder)]
    for save in saves if tokenizer_first else saves[::-1]:
        save()
    (folder / "notes.txt").write_text("mine")
    before = tree(folder)
    agent.policy.model.save_pretrained(folder)
    assert tree(folder) == before
    assert {"value_head.safetensors", "tokenizer.json"} <= before.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_saved_again_in_shards_is_the_new_one(tmp_path):
    model = filled(AutoModelForCausalLMWithValueHead(tiny_base_model("llama")), 3.0)
    for value, options in ((3.0, {}), (7.0, {"max_shard_size": "20KB"}), (5.0, {})):
        filled(model, value).save_pretrained(tmp_path / "model", **options)
        assert values(AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "model")) == {value}


def test_full_weights_saved_over_an_adapter_are_the_new_ones(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    filled(AutoModelForCausalLMWithValueHead(tiny_base_model("llama")), 7.0).save_pretrained(tmp_path)
    assert not (tmp_path / "adapter_config.json").exists()
    assert values(AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)) == {7.0}


def test_rejects_full_weights_over_user_settings_beside_an_adapter(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"my": "experiment"}')
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=r"'config.json' is in the way"):
        AutoModelForCausalLMWithValueHead(tiny_base_model("llama")).save_pretrained(tmp_path)
    assert tree(tmp_path) == before


def test_loads_a_model_from_the_backup_of_a_killed_process(tmp_path):
    filled(AutoModelForCausalLMWithValueHead(tiny_base_model("llama")), 7.0).save_pretrained(tmp_path / "model")
    (tmp_path / "model").rename(tmp_path / ".replaced-model")
    assert values(AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "model")) == {7.0}


def test_rejects_saving_a_model_over_an_agent(save, agent, tmp_path):
    save(tmp_path / "saved")
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds: (agent|checkpoint); saving there would replace it with: model"):
        agent.policy.model.save_pretrained(tmp_path / "saved")
    assert tree(tmp_path) == before


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_during_a_model_save_leaves_the_old_or_the_new_model(tmp_path, monkeypatch):
    model = filled(AutoModelForCausalLMWithValueHead(tiny_base_model("llama")), 3.0)
    folder = tmp_path / "saves" / "model"
    model.save_pretrained(folder)
    filled(model, 7.0)
    found = []
    for point in range(1000):
        is_over = killed_at(point, lambda: model.save_pretrained(folder))
        found.append(values(AutoModelForCausalLMWithValueHead.from_pretrained(folder)))
        assert found[-1] in ({3.0}, {7.0})
        if is_over:
            break
    assert found[0] == {3.0}
    assert found[-1] == {7.0}
    monkeypatch.setattr(atomic, "STALE_S", -1.0)
    model.save_pretrained(folder)
    # A folder whose process was killed before it could mark it stays, but it is empty.
    assert {name.split("/")[0] for name in tree(folder.parent)} == {"model"}


# Paths


@pytest.mark.parametrize("name", ["x" * 300, "a/" * 3000 + "b"], ids=["name", "path"])
def test_rejects_paths_that_are_too_long(agent, tmp_path, name):
    path = tmp_path / name
    for use in (
        agent.save,
        agent.load_checkpoint,
        ChoiceAgent.load,
        agent.policy.model.save_pretrained,
        agent.sft_from_jsonl,
        JsonlTracker,
        CsvTracker,
        lambda path: default_tracker(path, {}),
        lambda path: learning(path, episodes=2),
        lambda path: write_report([path], tmp_path / "report.html"),
        lambda path: EvalCallback(DiceEnv, best_dir=path),
    ):
        with pytest.raises(ConfigError, match="File name too long") as error:
            use(path)
        assert len(str(error.value)) < 1000
    assert list(tmp_path.iterdir()) == []


def test_rejects_a_demonstrations_path_with_a_nul_byte(agent):
    with pytest.raises(ConfigError, match="NUL byte"):
        agent.sft_from_jsonl("a\0b")


def test_rejects_an_unreadable_run_folder(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()

    def closed(path: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", closed)
    for start in (lambda: default_tracker(tmp_path / "run", {}), lambda: learning(tmp_path / "run", resume=True)):
        with pytest.raises(ConfigError, match=r"run_dir='.*run' cannot be read: .*Permission denied"):
            start()


@pytest.mark.parametrize(
    "path", ["", ".", "sub/..", "..", "/", "a\0b", "~nobody_of_this_name/x", b"bytes", 3, None, "\ud800"]
)
def test_rejects_paths_that_cannot_be_saved_to(save, tmp_path, monkeypatch, path):
    (tmp_path / "here" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConfigError, match="folder"):
        save(path)
    assert tree(tmp_path) == {}
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["here", "sub"]


def test_expands_the_home_folder(save, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    save("~/saved")
    assert (tmp_path / "home" / "saved" / MANIFEST).is_file()
    assert user_folder("a/../b") == tmp_path / "b"
    tracker = JsonlTracker("~/logs/metrics.jsonl")
    tracker.close()
    CsvTracker("~/logs/metrics.csv").log({"a": 1.0}, 1)
    default_tracker("~/run", {}).close()
    assert {path.name for path in (tmp_path / "home").iterdir()} == {"saved", "logs", "run"}
    assert not (tmp_path / "~").exists()


@pytest.mark.skipif(not hasattr(os, "seteuid") or os.geteuid() != 0, reason="only root can act as somebody else")
def test_rejects_a_folder_that_cannot_be_written(save, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    os.seteuid(65534)
    try:
        with pytest.raises(CheckpointError, match=r"cannot write the .*closed/saved'.*Permission"):
            save(tmp_path / "closed" / "saved")
    finally:
        os.seteuid(0)
    assert tree(tmp_path) == {}


class SmallDisk:
    """Takes a number of writes, then it is full."""

    def __init__(self, write: Any) -> None:
        self._write, self.size, self._left = write, 0, 0

    def write(self, descriptor: int, data: Any) -> int:
        self._left -= 1
        if self._left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._write(descriptor, data)

    def enlarge(self) -> None:
        self.size += 1
        self._left = self.size


def raised_by(do: Any) -> Exception | None:
    try:
        do()
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("existed", [True, False], ids=["second save", "first save"])
def test_a_full_disk_at_any_write_leaves_the_previous_save(save, tmp_path, monkeypatch, existed):
    folder = tmp_path / "parent" / "saved"
    if existed:
        save(folder)
    before = tree(tmp_path)
    monkeypatch.setattr(file_operations, "BLOCK_BYTES", 4096)
    disk = SmallDisk(os.write)
    monkeypatch.setattr(os, "write", disk.write)
    while (error := raised_by(lambda: save(folder))) is not None:
        assert isinstance(error, CheckpointError)
        assert re.search(rf"cannot write the .*{folder}'.*No space left.*unchanged", str(error))
        assert tree(tmp_path) == before
        assert existed or list(tmp_path.iterdir()) == []
        disk.enlarge()
    assert disk.size >= 2
    verify(folder, json.loads((folder / MANIFEST).read_text())["kind"])


def test_write_errors_of_libraries_name_path_and_reason(agent, tmp_path, monkeypatch):
    agent.save(tmp_path / "saved")
    before = tree(tmp_path)
    for error in (OSError(errno.ENOSPC, "No space left on device"), Exception("No space left on device (os error 28)")):

        def full(*_: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(type(agent.tokenizer), "save_pretrained", full)
        with pytest.raises(CheckpointError, match=r"cannot write the agent '.*saved': .*No space left.*unchanged"):
            agent.save(tmp_path / "saved")
        assert tree(tmp_path) == before


def _save_often(folder: Path, text: str, exchanges: bool) -> None:
    if not exchanges:
        atomic.exchange_folders = lambda *_: False  # type: ignore[assignment]
    for number in range(40):
        with atomic_folder(folder, "checkpoint") as whole:
            (whole / f"{text}.txt").write_text(text * number)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two renames"])
def test_two_processes_can_save_to_one_folder(tmp_path, exchanges):
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=_save_often, args=(tmp_path / "now", text, exchanges)) for text in ("a", "b")]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert len(verify(tmp_path / "now", "checkpoint")["files"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["now"]


@pytest.mark.parametrize("saves", [True, False], ids=["save", "check"])
def test_checks_a_folder_only_under_its_lock(tmp_path, monkeypatch, saves):
    with atomic_folder(tmp_path / "now", "checkpoint") as whole:
        (whole / "a.txt").write_text("a")
    events: list[str] = []
    is_locked = threading.Event()

    def rename() -> None:
        with file_operations.locked(tmp_path):
            (tmp_path / "now" / "manifest.json").rename(tmp_path / "aside")
            is_locked.set()
            time.sleep(0.3)
            (tmp_path / "aside").rename(tmp_path / "now" / "manifest.json")
            events.append("renamed")

    usual = atomic.check_replaceable
    monkeypatch.setattr(atomic, "check_replaceable", lambda *args: events.append("looked") or usual(*args))
    other = threading.Thread(target=rename)
    other.start()
    is_locked.wait()
    if saves:
        with atomic_folder(tmp_path / "now", "checkpoint") as whole:
            (whole / "a.txt").write_text("b")
    else:
        atomic.require_replaceable(tmp_path / "now", "checkpoint")
    other.join()
    assert events == ["renamed", "looked", "looked"][: 3 if saves else 2]


def test_a_save_whose_last_flush_fails_is_reported_as_written(tmp_path, monkeypatch):
    usual = atomic.flush

    def flush(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EIO, "Input/output error")
        usual(path)

    monkeypatch.setattr(atomic, "flush", flush)
    with (
        pytest.raises(CheckpointError, match=r"now' is written, but the disk reports an error: .*Input/output"),
        atomic_folder(tmp_path / "now", "agent") as whole,
    ):
        (whole / "a").write_text("new")
    assert (tmp_path / "now" / "a").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["now"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("is_edited", [False, True])
def test_a_kill_between_two_renames_does_not_stop_later_saves(tmp_path, monkeypatch, is_edited):
    monkeypatch.setattr(atomic, "exchange_folders", lambda *_: False)

    def write(text: str) -> None:
        with atomic_folder(tmp_path / "now", "agent") as whole:
            (whole / "a").write_text(text)

    write("old")
    (tmp_path / "now" / "notes.txt").write_text("mine")
    point = 0
    while not killed_at(point, lambda: write("new")):
        if (tmp_path / ".replaced-now").exists() and (tmp_path / "now").exists() and is_edited:
            # Another file of the same name.
            (tmp_path / "now" / "notes.txt").unlink()
            (tmp_path / "now" / "notes.txt").write_text("edited")
        for text in ("newer", "old"):
            write(text)
            assert (tmp_path / "now" / "a").read_text() == text
            assert not (tmp_path / ".replaced-now").exists()
        point += 1
    assert point > 10
    kept = [path.read_text() for path in tmp_path.glob("now-replaced-*/notes.txt")]
    assert ("mine" in kept) == is_edited


def test_keeps_empty_user_folders(save, tmp_path):
    save(tmp_path / "saved")
    (tmp_path / "saved" / "plots" / "later").mkdir(parents=True)
    save(tmp_path / "saved")
    assert (tmp_path / "saved" / "plots" / "later").is_dir()
    atomic.remove_saved(tmp_path / "saved")
    assert [path.name for path in (tmp_path / "saved").rglob("*")] == ["plots", "later"]


# Files of a run, killed while they are written


class Service:
    """Stands for a service that writes files when it starts."""

    def __init__(self, name: str, folder: Path, *_: Any, **__: Any) -> None:
        (folder / f"{name}.events").write_text("started")

    def log(self, metrics: Any, step: int) -> None:
        """Nothing is sent."""

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("name", ["new", "continued"])
def test_a_killed_tracker_can_be_started_again(tmp_path, monkeypatch, name):
    monkeypatch.setattr(tracking, "ServiceTracker", Service)

    def start(folder: Path) -> None:
        tracker = default_tracker(folder, {"seed": 0}, track=["csv", "tensorboard"])
        tracker.log({"a": 1.0}, 1)
        tracker.log({"a": 2.0, "b": 1.0}, 2)
        tracker.close()

    point = 0
    folder = tmp_path / "0"
    if name == "continued":
        start(folder)
    while not killed_at(point, lambda folder=folder: start(folder)):
        start(folder)
        assert json.loads((folder / "config.json").read_text())["seed"] == 0
        steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows = (folder / "metrics.csv").read_text().splitlines()
        assert rows[0] == "step,a,b"
        assert steps[-2:] == [1, 2]
        assert rows[-2:] == ["1,1.0,", "2,2.0,1.0"]
        point += 1
        folder = tmp_path / str(point)
        if name == "continued":
            start(folder)
    assert point > 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_keeps_the_old_or_the_new_report(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"entropy": 1.0}\n')
    report = write_report([tmp_path], tmp_path / "report.html")
    old, point = report.read_text(), 0
    (tmp_path / "metrics.jsonl").write_text('{"entropy": 2.0}\n')
    while not killed_at(point, lambda: write_report([tmp_path], report)):
        assert report.read_text() == old or '"entropy":2.0' in report.read_text()
        point += 1
    # Temporary files of killed processes are deleted once no process can be using them.
    scratch = [path for path in tmp_path.iterdir() if atomic.is_scratch_file(path.name)]
    assert scratch
    for path in scratch:
        os.utime(path, (0, 0))
    (tmp_path / ".llamagym-report.html-notes").write_text("mine")
    write_report([tmp_path], report)
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "report.html", ".llamagym-report.html-notes"}


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_run_can_be_started_again(tmp_path):
    def start(folder: Path) -> Any:
        return learning(folder, episodes=6, track=["csv"], resume=True)

    def steps(folder: Path) -> list[int]:
        return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]

    start(tmp_path / "whole")
    expected, point = steps(tmp_path / "whole"), 0
    while not killed_at(point, lambda: start(tmp_path / "run")):
        start(tmp_path / "run")
        found = steps(tmp_path / "run")
        # Killed after its end, it is a finished run, and the second call has a budget of its own.
        assert found[: len(expected)] == expected
        assert found == sorted(set(found))
        assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == len(found) + 1
        assert newest(tmp_path / "run" / "checkpoints") is not None
        shutil.rmtree(tmp_path / "run")
        # Early points are those of the run's files; later ones repeat in each checkpoint.
        point += 1 if point < 40 else 7
    assert point > 100


def test_replaces_a_file_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    replace_file(tmp_path / "a", "old")
    (tmp_path / "link").symlink_to("a")
    monkeypatch.setattr(os, "fsync", lambda _: exec("raise OSError('full')"))
    with pytest.raises(OSError, match="full"):
        replace_file(tmp_path / "a", "new")
    monkeypatch.undo()
    assert tree(tmp_path) == {"a": b"old", "link": "a"}
    # What a link points to may belong to somebody else.
    replace_file(tmp_path / "link", "new")
    assert tree(tmp_path) == {"a": b"old", "link": b"new"}
    assert (tmp_path / "link").stat().st_mode == (tmp_path / "a").stat().st_mode


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_keeps_the_old_or_the_new_table(tmp_path):
    path = tmp_path / "metrics.csv"
    tracker = CsvTracker(path)
    for step in range(3):
        tracker.log({"a": float(step)}, step)
    old, point = path.read_text(), 0

    def rewrite() -> None:
        CsvTracker(path).log({"a": 9.0, "b": 1.0}, 9)

    while not killed_at(point, rewrite):
        assert path.read_text() in (old, "step,a,b\n0,0.0,\n1,1.0,\n2,2.0,\n9,9.0,1.0\n")
        if path.read_text() != old:
            path.write_text(old)
        point += 1
    assert point > 4


def test_appends_after_an_incomplete_last_line(tmp_path):
    metrics, table = tmp_path / "metrics.jsonl", tmp_path / "metrics.csv"
    metrics.write_text('{"step": 1}\n{"step": 2, "ent')
    table.write_text("step,a\n1,1.0\n2,2.")
    tracker = JsonlTracker(metrics)
    tracker.log({"a": 3.0}, 3)
    tracker.close()
    CsvTracker(table).log({"a": 3.0}, 3)
    assert metrics.read_text() == '{"step": 1}\n{"step": 2, "ent\n{"step": 3, "a": 3.0}\n'
    assert table.read_text() == "step,a\n1,1.0\n2,2.\n3,3.0\n"


@pytest.mark.parametrize("content", [b"\xff\xfe", b"step,a\n1,2,3,4\n", b"\0\n", b'"unclosed'])
def test_appends_to_a_damaged_table_or_names_it(tmp_path, content):
    (tmp_path / "metrics.csv").write_bytes(content)
    error = raised_by(lambda: CsvTracker(tmp_path / "metrics.csv").log({"b": 1.0}, 1))
    if error is not None:
        assert isinstance(error, ConfigError)
        assert "metrics.csv' cannot be read as a table" in str(error)
        assert (tmp_path / "metrics.csv").read_bytes() == content


class KilledError(BaseException):
    """Stands for kill -9: no checkpoint is written."""


def test_a_run_killed_before_its_first_update_s_checkpoint_restarts_without_duplicates(tmp_path):
    def killed(stats: Any) -> None:
        if stats["updates"] == 2:
            raise KilledError

    whole = learning(tmp_path / "whole", track=["csv"])
    with pytest.raises(KilledError):
        learning(tmp_path / "run", on_update=killed, track=["csv"], resume=True)
    # A part of a line.
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9')
    resumed = learning(tmp_path / "run", track=["csv"], resume=True)
    assert resumed.returns == whole.returns
    for name in ("metrics.jsonl", "metrics.csv"):
        lines = [(tmp_path / folder / name).read_text().splitlines() for folder in ("whole", "run")]
        assert len(lines[0]) == len(lines[1])
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))


def test_file_inside_allows_links_in_the_hub_cache(tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    (blobs / "1").write_text("data")
    (snapshot / "a").symlink_to("../../blobs/1")
    assert file_inside(snapshot, "a").read_text() == "data"
    (tmp_path / "secret").write_text("mine")
    (snapshot / "b").symlink_to("../../secret")
    with pytest.raises(CheckpointError, match="outside"):
        file_inside(snapshot, "b")


def test_saving_an_agent_again_replaces_its_weights(tmp_path):
    """Evidence that carrying files over does not keep old weights."""
    agent = make_agent(WordAgent)
    agent.save(tmp_path / "agent")
    first = verify(tmp_path / "agent", "agent")["files"]
    agent.policy.rng.manual_seed(5)
    agent.save(tmp_path / "agent")
    assert verify(tmp_path / "agent", "agent")["files"] != first
