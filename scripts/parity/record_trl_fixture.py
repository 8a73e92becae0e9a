"""Record `tests/fixtures/trl_ppo_step.json` from TRL 0.11.4's own `PPOTrainer.step` on a tiny Llama.

TRL 0.11.4 is the last release with the step-wise trainer and needs older packages than llamagym, hence a virtual
environment of its own, with Python 3.10 or 3.11. From the repository's root:

    python -m venv .venv-trl
    .venv-trl/bin/pip install torch==2.13.0
    .venv-trl/bin/pip install trl==0.11.4 transformers==4.46.3 "numpy<2" "pyarrow<20" "datasets<3.1" "pandas<2.3" rich
    .venv-trl/bin/python scripts/parity/record_trl_fixture.py

It takes some seconds on a CPU. Every case starts from the same weights and runs two consecutive steps with one trainer,
so that the optimizer's state and the adaptive KL coefficient carry over. What is worth knowing about the numbers:

- The policy is the reference plus noise, so the KL is not zero; the value head's weights are drawn too.
- Initial weights are rounded to three decimals before use: what the file says is exactly what was used.
- Dropout acts nowhere: a Llama has none, the value head's is built with probability 0, and TRL computes every forward
  pass in evaluation mode anyway (`batched_forward_pass` calls `model.eval()`).
- TRL draws each epoch's order of the samples from `np.random.permutation`; the draws are recorded as they are made.
- `max_grad_norm` stays off: TRL keeps the parameters to clip in an iterator that the first minibatch exhausts, so that
  later ones go unclipped, which is nothing to agree with.
"""

from __future__ import annotations

import argparse
import json
import platform
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import tokenizers
import torch
import transformers
import trl
from accelerate import __version__ as accelerate_version
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

# Of the first ten, one with which no policy loss is a sum that nearly cancels (it would leave a relative tolerance
# nothing to hold on to) and minibatches are skipped in both steps of the case that is about that.
SEED = 5
FIXTURE = Path(__file__).parents[2] / "tests" / "fixtures" / "trl_ppo_step.json"
WORDS = ["<pad>", "<eos>", *(f"w{index}" for index in range(18))]
MODEL_CONFIG: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
COMMON: dict[str, Any] = {
    "seed": SEED,
    "batch_size": 8,
    "mini_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "ppo_epochs": 2,
    "learning_rate": 0.01,
    "init_kl_coef": 0.2,
    "gamma": 0.97,
    "lam": 0.9,
    "vf_coef": 0.1,
}
CASES: dict[str, dict[str, Any]] = {
    # Adaptive coefficient, with a target and a horizon near enough for it to move visibly in two steps.
    "adaptive_kl": {"kl_penalty": "kl", "adap_kl_ctrl": True, "target": 0.6, "horizon": 40},
    # Ranges so small that both clips act, another penalty, a fixed coefficient, minibatches of another size.
    "clipping": {
        "kl_penalty": "mse",
        "adap_kl_ctrl": False,
        "cliprange": 0.02,
        "cliprange_value": 0.02,
        "vf_coef": 0.5,
        "mini_batch_size": 2,
        "ppo_epochs": 3,
    },
    # Minibatches that move too far are skipped. The third epoch's KL lies between 1 and 1.5 times the target in the
    # first step, which runs on, and above 1.5 times the target in the second step, which ends there.
    "limits": {
        "kl_penalty": "abs",
        "adap_kl_ctrl": True,
        "early_stopping": True,
        "target_kl": 0.168,
        "ratio_threshold": 1.02,
        "ppo_epochs": 5,
    },
}


def tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer over WORDS."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<eos>")
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", padding_side="right")


def initial_weights() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights of the policy and of the reference, rounded to three decimals, value head included."""
    generator = torch.Generator().manual_seed(SEED)
    policy, reference = {}, {}
    for name, value in build({}).state_dict().items():
        if "norm" in name:
            drawn = 1 + 0.1 * torch.randn(value.shape, generator=generator)
        else:
            drawn = 0.4 * torch.randn(value.shape, generator=generator)
        moved = drawn + 0.05 * torch.randn(value.shape, generator=generator)
        reference[name], policy[name] = rounded(drawn), rounded(moved)
    return policy, reference


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """The float32 numbers nearest to three-decimal ones."""
    return torch.tensor(np.round(tensor.double().numpy(), 3), dtype=torch.float32)


def build(weights: dict[str, torch.Tensor]) -> AutoModelForCausalLMWithValueHead:
    """The tiny model with `weights`, or with its own random ones if there are none."""
    llama = LlamaForCausalLM(LlamaConfig(**MODEL_CONFIG))
    model = AutoModelForCausalLMWithValueHead(llama, summary_dropout_prob=0.0)
    model.is_peft_model = False
    model.is_sequential_parallel = False
    if weights:
        body = {name: value for name, value in weights.items() if not name.startswith("v_head.")}
        head = {name.removeprefix("v_head."): value for name, value in weights.items() if name.startswith("v_head.")}
        model.pretrained_model.load_state_dict(body)
        model.v_head.load_state_dict(head)
    return model


def batches() -> list[dict[str, list[Any]]]:
    """Two batches of ragged queries and responses with scores; one response is a single token."""
    rng = np.random.default_rng(SEED)
    out = []
    for _ in range(2):
        lengths = [(int(rng.integers(1, 7)), int(rng.integers(1, 8))) for _ in range(COMMON["batch_size"])]
        lengths[3] = (lengths[3][0], 1)
        out.append(
            {
                "queries": [rng.integers(2, len(WORDS), query).tolist() for query, _ in lengths],
                "responses": [rng.integers(1, len(WORDS), response).tolist() for _, response in lengths],
                "scores": np.round(rng.normal(0, 1, len(lengths)), 2).tolist(),
            }
        )
    return out


def as_numbers(value: torch.Tensor | np.ndarray) -> Any:
    """Nested lists of numbers whose shortest decimal form gives the same float32 back."""
    array = np.asarray(value, dtype=np.float32)
    return np.vectorize(lambda number: float(str(np.float32(number))), otypes=[float])(array).tolist()


def weights_as_numbers(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A state dict as nested lists."""
    return {name: as_numbers(value.detach()) for name, value in weights.items()}


def scalar_stats(stats: dict[str, Any]) -> dict[str, float]:
    """TRL's scalar statistics without timings."""
    return {
        name: as_numbers(value)
        for name, value in sorted(stats.items())
        if not name.startswith("time/") and np.asarray(value).shape == ()
    }


def record_case(options: dict[str, Any], policy: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> Any:
    """Run TRL's step on both batches and note what it did."""
    config = PPOConfig(**{**COMMON, **options})
    model = build(policy)
    ref_model = build(reference).requires_grad_(False).eval()
    trainer = PPOTrainer(config, model, ref_model, tokenizer())
    steps = []
    for batch in batches():
        drawn: list[list[int]] = []

        def recording(count: int, draw: Any = np.random.permutation, drawn: list[list[int]] = drawn) -> np.ndarray:
            order = draw(count)
            drawn.append(order.tolist())
            return order

        with patch("numpy.random.permutation", recording), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            stats = trainer.step(
                [torch.tensor(query) for query in batch["queries"]],
                [torch.tensor(response) for response in batch["responses"]],
                [torch.tensor(score) for score in batch["scores"]],
            )
        steps.append(
            {
                "permutations": drawn,
                "skipped_minibatches": sum("Skipping batch" in str(warning.message) for warning in caught),
                "stats": scalar_stats(stats),
                "kl_coef_after": as_numbers(np.float32(trainer.kl_ctl.value)),
                "weights_after": weights_as_numbers(model.state_dict()),
            }
        )
    unused = ("accelerator_kwargs", "project_kwargs", "tracker_kwargs", "push_to_hub_if_best_kwargs", "exp_name")
    recorded_config = {name: value for name, value in vars(config).items() if name not in unused}
    return {"config": recorded_config, "steps": steps}


def main() -> None:
    """Write the fixture."""
    parser = argparse.ArgumentParser(description="Record TRL 0.11.4's PPOTrainer.step as a fixture.")
    parser.add_argument("--output", type=Path, default=FIXTURE, help="default: %(default)s")
    output: Path = parser.parse_args().output
    if trl.__version__ != "0.11.4":
        raise SystemExit(
            f"trl {trl.__version__} is installed, expected 0.11.4. Follow the commands in this file's head."
        )
    # TRL announces its trainer's deprecation and asks for a data set; neither matters here.
    warnings.simplefilter("ignore")
    # One thread, so that sums are formed in one order and a second recording is the same to the last digit.
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    policy, reference = initial_weights()
    fixture = {
        "recorded_by": "scripts/parity/record_trl_fixture.py",
        "versions": {
            "python": platform.python_version(),
            "trl": trl.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "accelerate": accelerate_version,
            "numpy": np.__version__,
        },
        "words": WORDS,
        "model_config": MODEL_CONFIG,
        "policy_weights": weights_as_numbers(policy),
        "reference_weights": weights_as_numbers(reference),
        "batches": batches(),
        "cases": {name: record_case(options, policy, reference) for name, options in CASES.items()},
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(fixture, separators=(",", ":"), allow_nan=False) + "\n", encoding="utf-8")
    print(f"{output}: {output.stat().st_size:,} bytes")
    for name, case in fixture["cases"].items():
        for number, step in enumerate(case["steps"]):
            epochs, skipped = len(step["permutations"]), step["skipped_minibatches"]
            print(f"  {name}, step {number + 1}: {epochs} epochs, {skipped} minibatches skipped")
            for key in ("objective/kl", "objective/kl_coef", "ppo/policy/clipfrac", "ppo/val/clipfrac"):
                print(f"    {key}: {step['stats'][key]:.4f}")


if __name__ == "__main__":
    main()
