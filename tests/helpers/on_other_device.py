"""A process that acts and learns on the CPU and on the device that is named, and prints as JSON what came of it.

For each case the numbers of both; for each deliberate fault, a tensor that is left on the CPU, the error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

from llamagym import AutoModelForCausalLMWithValueHead, LlamaGymError, PPOConfig, evaluate, train
from llamagym.engine.transformer import Transformer
from llamagym.policy import sampling
from llamagym.policy.choices import ReadPlan
from llamagym.trl_compat.ppo_trainer import PPOTrainer
from tests.helpers import agents
from tests.helpers.agents import ChoiceAgent, CountdownEnv, WordAgent, make_agent
from tests.helpers.other_device import install
from tests.helpers.tiny import tiny_base_model, tiny_model

CPU = torch.device("cpu")
Numbers = list[float]


class TextAgent(WordAgent):
    """Writes free text, of which every byte counts for the action."""

    def extract_action(self, response: str) -> int:
        return sum(response.encode()) % 3


def made(device: torch.device, kind: Any, model: Callable[..., Any] = tiny_model, **options: Any) -> Any:
    """An agent that moves its model to a device."""

    def there(language_model: Any, tokenizer: Any, _: None, settings: Any, **others: Any) -> Any:
        return kind(language_model, tokenizer, device, settings, **others)

    with patch.object(agents, "tiny_model", model):
        return make_agent(there, generate={"max_new_tokens": 3, **options.pop("generate", {})}, **options)  # type: ignore[arg-type]


def all_weights(family: str, activated: bool) -> Any:
    """A model without an adapter."""
    return AutoModelForCausalLMWithValueHead.from_pretrained(tiny_base_model(family))


def learned(agent: Any) -> Numbers:
    """Returns, and statistics of two updates."""
    result = train(agent, lambda: CountdownEnv(2, truncates=True), episodes=4, num_envs=2, seed=0)
    names = ("entropy", "grad_norm", "approx_kl", "policy_loss")
    return [*result.returns, *(update[name] for update in result.updates for name in names)]


def trained(device: torch.device) -> Numbers:
    """A step of `PPOTrainer`."""
    trainer = PPOTrainer(PPOConfig(batch_size=2, mini_batch_size=2), tiny_model("llama", activated=False).to(device))
    queries, responses = [torch.tensor([1, 2, 3]), torch.tensor([1])], [torch.tensor([3]), torch.tensor([5, 6])]
    stats = trainer.step(queries, responses, [torch.tensor(0.0), torch.tensor(1.0)])
    return [stats[name] for name in ("policy_loss", "value_loss", "grad_norm")]


def warm_started(device: torch.device) -> Numbers:
    """Learning from demonstrations."""
    agent = made(device, TextAgent)
    messages = [{"role": "user", "content": "Observation 1"}, {"role": "assistant", "content": "hi"}]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "demonstrations.jsonl"
        path.write_text(f"{json.dumps({'messages': messages})}\n" * 2)
        stats = agent.sft_from_jsonl(path, epochs=2)
    return [stats["loss_before"], stats["loss_after"]]


def resumed(device: torch.device) -> Numbers:
    """Learning that goes on from a checkpoint."""
    agents_ = [made(device, ChoiceAgent) for _ in range(2)]
    learned(agents_[0])
    with TemporaryDirectory() as folder:
        agents_[0].save_checkpoint(Path(folder) / "checkpoint")
        agents_[1].load_checkpoint(Path(folder) / "checkpoint")
    return learned(agents_[1])


def moved(device: torch.device) -> Numbers:
    """Learning whose model is moved between updates, there and back."""
    # Calibrated, choices would be measured again after each move.
    agent, numbers = made(device, ChoiceAgent, replay_config_dict={}, calibrate_choices=False), []
    for place in (device, CPU, device):
        agent.policy.model.to(place)
        numbers += learned(agent)
    return numbers


def evaluated(device: torch.device) -> Numbers:
    """Replies cut by top-k and top-p."""
    agent = made(device, TextAgent, generate={"top_k": 20, "top_p": 0.9, "temperature": 0.7})
    return evaluate(agent, CountdownEnv, episodes=2, num_envs=2, seed=0, greedy=False).returns


KL = {"init_kl_coef": 0.1}
CASES: dict[str, Callable[[torch.device], Numbers]] = {
    "free text": lambda device: learned(made(device, TextAgent, ppo=KL)),
    "choices": lambda device: learned(made(device, ChoiceAgent, family="qwen2", context="turn")),
    "plain LoRA": lambda device: learned(made(device, TextAgent, activated=False, ppo={"critic": "gradient"})),
    "GRPO": lambda device: learned(made(device, ChoiceAgent, algorithm="grpo", grpo={"group_size": 2, **KL})),
    "all weights": lambda device: learned(made(device, ChoiceAgent, all_weights, ppo=KL)),
    "evaluate": evaluated,
    "PPOTrainer": trained,
    "warm start": warm_started,
    "resumed": resumed,
    "moved": moved,
}


def drawn_there(logits: Any, largest: Any, sums: Any, rows: Any, uniforms: Any) -> Any:
    """Drawing of tokens that forgets to bring the weights to where the random numbers are."""
    return sampling.index_at(sums[rows], uniforms[:, :1])


FAULTS = {
    "tokens": patch.object(Transformer, "device", CPU),
    "targets": patch.object(ReadPlan, "to", lambda plan, device: plan),
    "random numbers": patch.object(sampling, "draw_tokens", drawn_there),
}


def error_of(action: Callable[[], Any]) -> str:
    """The message of the error that a function raises; empty if it raises none."""
    try:
        action()
    except (RuntimeError, LlamaGymError) as error:
        return str(error)
    return ""


def left_behind(device: torch.device) -> None:
    """An agent whose language model was moved without the value head."""
    agent = made(CPU, TextAgent)
    agent.policy.model.pretrained_model.to(device)
    agent.act("x")


def main() -> None:
    """Run all."""
    device = install() if sys.argv[1] == "other" else torch.device(sys.argv[1])
    numbers = {name: {"cpu": run(CPU), "other": run(device)} for name, run in CASES.items()}
    errors = {"value head": error_of(lambda: left_behind(device))}
    for name, fault in FAULTS.items():
        agent = made(device, TextAgent)
        with fault:
            errors[name] = error_of(lambda agent=agent: learned(agent))
    sys.stdout.write(json.dumps({"numbers": numbers, "errors": errors}) + "\n")


if __name__ == "__main__":
    main()
