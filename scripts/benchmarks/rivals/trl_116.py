"""TRL 1.16's GRPOTrainer on the same weights and task: turns learned a second, replies sampled and learned from.

It runs in llamagym's own environment:

    python scripts/benchmarks/rivals/trl_116.py FOLDER DTYPE

FOLDER is the embedded model's (`llamagym.models.loading.embedded_model_folder()`).

An episode is one turn, as GRPOTrainer has it without tools: it samples `GROUP` replies to each prompt, all of a batch
at once, and takes one step on them.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from prompt import STATES, SYSTEM, observed
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import serve

MAX_NEW_TOKENS, BATCH, GROUP = 8, 64, 8


class Timer(TrainerCallback):
    """Times the steps alone, without what a call of `train` sets up."""

    seconds = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """A step begins with sampling."""
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The weights have moved."""
        self.seconds = time.perf_counter() - self._started


def main() -> None:
    """Answer by rates."""
    folder, dtype = sys.argv[1:]
    torch.manual_seed(0)
    prompts = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": observed(state)}] for state in STATES
    ]
    timer = Timer()
    with tempfile.TemporaryDirectory() as scratch:
        settings = GRPOConfig(
            scratch,
            use_cpu=True,
            bf16=False,
            activation_checkpointing=False,
            per_device_train_batch_size=BATCH,
            num_generations=GROUP,
            max_completion_length=MAX_NEW_TOKENS,
            temperature=1.0,
            max_steps=1,
            learning_rate=1e-5,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
            lambda completions, **_: [float("hit" in reply[0]["content"].lower()) for reply in completions],
            settings,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=AutoTokenizer.from_pretrained(folder),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
            callbacks=[timer],
        )

        def rate() -> float:
            trainer.train()
            return BATCH / timer.seconds

        serve(rate, "trl", "torch", "transformers", "peft")


if __name__ == "__main__":
    main()
