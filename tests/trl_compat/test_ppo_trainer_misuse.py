"""`PPOTrainer` rejects wrong arguments with a clear error, and follows changes of adapter and learning rate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from llamagym import AutoModelForCausalLMWithValueHead, LlamaGymError, PPOConfig
from llamagym.trl_compat.ppo_trainer import PPOTrainer
from tests.helpers.tiny import tiny_base_model, tiny_model

CONFIG = PPOConfig(batch_size=2, mini_batch_size=2)
SAMPLES = {"queries": [torch.tensor([1, 2])] * 2, "responses": [torch.tensor([3])] * 2, "scores": [0.0, 1.0]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"queries": [[1, 2], [1, 2]]},
        {"queries": "ab"},
        {"queries": 3},
        {"responses": None},
        {"responses": ["a", "b"]},
        {"responses": [torch.tensor([1.0])] * 2},
        {"responses": [torch.tensor([True])] * 2},
        {"scores": [np.zeros(2)] * 2},
        {"scores": 1.0},
    ],
)
def test_rejects_samples_of_other_types(wrong: dict[str, Any]):
    with pytest.raises(LlamaGymError, match=next(iter(wrong))):
        PPOTrainer(CONFIG, tiny_model("llama")).step(**SAMPLES | wrong)


def test_rejects_wrong_constructor_arguments():
    with pytest.raises(LlamaGymError, match="expected a PPOConfig"):
        PPOTrainer({"batch_size": 2}, tiny_model("llama"))  # type: ignore[arg-type]
    with pytest.raises(LlamaGymError, match="value head"):
        PPOTrainer(CONFIG, tiny_base_model("llama"))
    with pytest.raises(LlamaGymError, match="dtype='float32'"):
        PPOTrainer(CONFIG, AutoModelForCausalLMWithValueHead.from_pretrained(tiny_base_model("llama").bfloat16()))


def test_the_optimizer_restarts_for_another_adapter(caplog):
    trainer = PPOTrainer(CONFIG, tiny_model("llama", activated=False))
    pretrained: Any = trainer.model.pretrained_model
    pretrained.add_adapter("other", pretrained.peft_config["default"])
    pretrained.set_adapter("other")
    before = {name: weight.clone() for name, weight in pretrained.named_parameters()}
    trainer.step(**SAMPLES)
    moved = {name for name, weight in pretrained.named_parameters() if not torch.equal(weight, before[name])}
    assert moved
    assert all(".other." in name for name in moved)
    assert "starts again" in caplog.text


def test_a_scheduler_sets_the_learning_rates():
    trainer = PPOTrainer(CONFIG, tiny_model("llama"))
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [CONFIG.learning_rate, 3e-3]
    scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: float(step > 0))
    before = [weight.clone() for weight in trainer.model.parameters()]
    trainer.step(**SAMPLES)
    assert all(torch.equal(now, old) for now, old in zip(trainer.model.parameters(), before, strict=True))
    # The control.
    scheduler.step()
    trainer.step(**SAMPLES)
    assert not all(torch.equal(now, old) for now, old in zip(trainer.model.parameters(), before, strict=True))
