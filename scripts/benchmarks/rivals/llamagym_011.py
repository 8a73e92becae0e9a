"""LlamaGym 0.1.1 on the same weights: turns a second while acting, samples a second while learning.

It needs an environment of its own (Python 3.10 or 3.11):

    python -m venv old && old/bin/pip install torch==2.13.0
    old/bin/pip install transformers==4.38.2 trl==0.7.11 peft==0.9.0 accelerate==0.27.2 gymnasium==0.29.1 "numpy<2" \
        "pyarrow<20" "datasets<3" "pandas<2.3" wandb scipy tqdm
    old/bin/pip install llamagym==0.1.1 --no-deps
    old/bin/python scripts/benchmarks/rivals/llamagym_011.py FOLDER act|learn|script

FOLDER is the embedded model's (`llamagym.models.loading.embedded_model_folder()` in the usual environment). Its files
are rewritten for the old tokenizers library, and its template for LlamaGym, which finds replies behind "[/INST]". Its
batches are of 16 samples, as it has them by default; it learns from one in about a minute, in 12 GB of memory. `script`
is LlamaGym's own example, in `blackjack_script.py`.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from blackjack_script import LORA, script_work
from peft import LoraConfig
from prompt import STATES, SYSTEM, observed
from transformers import AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead

from llamagym import Agent

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import rate_of, serve

BATCH = 16
PACKAGES = ("llamagym", "torch", "transformers", "trl", "peft")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + '\n' }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]\n' }}{% endif %}{% endfor %}"
)


class BlackjackAgent(Agent):
    """The same prompt as in the other measurements."""

    def get_system_prompt(self):
        """The rules, in a line."""
        return SYSTEM

    def format_observation(self, observation):
        """Sum and dealer's card."""
        return observed(observation)

    def extract_action(self, response):
        """1 hits, 0 sticks."""
        return 1 if "hit" in response.lower() else 0


def convert(source: Path, target: Path) -> None:
    """Write the model's files as libraries of early 2024 read them."""
    shutil.copytree(source, target)
    path = target / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"].pop("ignore_merges", None)
    tokenizer["model"]["merges"] = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]
    ]
    path.write_text(json.dumps(tokenizer))
    path = target / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    settings.pop("extra_special_tokens", None)
    path.write_text(json.dumps(settings))
    (target / "chat_template.jinja").unlink(missing_ok=True)
    path = target / "config.json"
    config = json.loads(path.read_text())
    config["rope_theta"] = 100_000.0
    config["torch_dtype"] = config.pop("dtype", "float32")
    path.write_text(json.dumps(config))


def main() -> None:
    """Answer by rates."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        convert(Path(sys.argv[1]), folder)
        torch.manual_seed(0)
        lora = LoraConfig(**LORA if sys.argv[2] == "script" else LORA | {"lora_dropout": 0.0})
        model = AutoModelForCausalLMWithValueHead.from_pretrained(str(folder), peft_config=lora)
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.pad_token = tokenizer.eos_token
    if sys.argv[2] == "script":
        serve(rate_of(script_work(model, tokenizer)), *PACKAGES)
        return
    generate = {
        "generate/max_new_tokens": 8,
        "generate/do_sample": True,
        "generate/top_p": 1.0,
        "generate/top_k": 0,
        "generate/temperature": 1.0,
    }
    agent = BlackjackAgent(
        model, tokenizer, "cpu", generate, {"batch_size": BATCH, "mini_batch_size": BATCH, "ppo_epochs": 1}
    )
    samples: tuple[list, list, list] = ([], [], [])

    def act() -> float:
        for part in samples:
            part.clear()
        for index, state in enumerate(STATES[:BATCH]):
            agent.act(state)
            agent.assign_reward((-1.0, 1.0)[index % 2])
            episode = agent.format_episode_for_ppo(agent.current_episode_messages, agent.current_episode_rewards)
            for part, of_episode in zip(samples, episode, strict=True):
                part.extend(of_episode)
            agent.terminate_episode(train=False)
        return BATCH

    def learn() -> float:
        agent.train_batch(*samples)
        return BATCH

    if sys.argv[2] == "learn":
        act()
    work = learn if sys.argv[2] == "learn" else act
    serve(rate_of(work), *PACKAGES)


if __name__ == "__main__":
    main()
