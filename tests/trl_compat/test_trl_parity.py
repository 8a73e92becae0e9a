"""`PPOTrainer` against TRL 0.11.4's own numbers, recorded by scripts/parity/record_trl_fixture.py."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from llamagym.errors import ConfigError
from llamagym.learners.ppo import PPOConfig
from llamagym.models.value_head import AutoModelForCausalLMWithValueHead
from llamagym.trl_compat.ppo_trainer import PPOTrainer
from tests.helpers import ROOT

FIXTURE = json.loads((ROOT / "tests" / "fixtures" / "trl_ppo_step.json").read_text(encoding="utf-8"))
CASES = sorted(FIXTURE["cases"])
TOLERANCE = 1e-4
STATISTICS = {
    "policy_loss": "ppo/loss/policy",
    "value_loss": "ppo/loss/value",
    "approx_kl": "ppo/policy/approxkl",
    "policy_kl": "ppo/policy/policykl",
    "clip_fraction": "ppo/policy/clipfrac",
    "value_clip_fraction": "ppo/val/clipfrac",
    "entropy": "ppo/policy/entropy",
    "ref_kl": "objective/kl",
    "kl_coef": "objective/kl_coef",
    "penalty_mean": "ppo/mean_non_score_reward",
    "score_mean": "ppo/mean_scores",
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several threads would slow down matrices this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class RecordedOrder:
    """Repeats the orders of samples that TRL drew, one per epoch."""

    def __init__(self, orders: Iterable[list[int]]) -> None:
        self._orders = itertools.cycle(orders)

    def permutation(self, x: int, /) -> np.ndarray:
        """Returns the next recorded order."""
        order = np.array(next(self._orders))
        assert len(order) == x
        return order


def tiny_model(weights: str = "policy_weights", peft_config: LoraConfig | None = None) -> Any:
    """Returns the fixture's Llama with one of its two sets of weights."""
    llama = LlamaForCausalLM(LlamaConfig(**FIXTURE["model_config"]))
    state = {name: torch.tensor(value) for name, value in FIXTURE[weights].items()}
    head = {name: state.pop(name) for name in list(state) if name.startswith("v_head.")}
    llama.load_state_dict(state)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(llama, peft_config)
    model.v_head.summary.load_state_dict({name.removeprefix("v_head.summary."): v for name, v in head.items()})
    return model


def trl_weights(model: AutoModelForCausalLMWithValueHead) -> dict[str, Tensor]:
    """Returns copies of a model's weights by TRL's names."""
    named = {**model.pretrained_model.state_dict()}
    named |= {f"v_head.summary.{name}": value for name, value in model.v_head.summary.state_dict().items()}
    return {name: value.detach().clone() for name, value in named.items()}


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns the fixture's word-level tokenizer."""
    words = {word: index for index, word in enumerate(FIXTURE["words"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def batch(number: int = 0) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Returns queries, responses and scores of one of the fixture's batches."""
    raw = FIXTURE["batches"][number]
    return tuple([torch.tensor(item) for item in raw[name]] for name in ("queries", "responses", "scores"))  # type: ignore[return-value]


def trl_config(case: str) -> PPOConfig:
    """Returns TRL's configuration of a case as a PPOConfig."""
    recorded = FIXTURE["cases"][case]["config"]
    assert recorded["max_grad_norm"] is None
    same = "batch_size mini_batch_size ppo_epochs learning_rate gamma lam cliprange cliprange_value vf_coef"
    same += " init_kl_coef adap_kl_ctrl target horizon seed"
    return PPOConfig(
        **{name: recorded[name] for name in same.split()},
        value_learning_rate=recorded["learning_rate"],
        target_kl=recorded["target_kl"] if recorded["early_stopping"] else None,
        entropy_coef=0.0,
        max_grad_norm=math.inf,
    )


def trl_options(case: str) -> dict[str, Any]:
    """Returns a case's arguments of the trainer, including TRL's order of samples."""
    recorded, steps = FIXTURE["cases"][case]["config"], FIXTURE["cases"][case]["steps"]
    return {
        "kl_penalty": recorded["kl_penalty"],
        "ratio_threshold": recorded["ratio_threshold"],
        "rng": RecordedOrder(order for step in steps for order in step["permutations"]),
    }


def mismatches(case: str, config: PPOConfig, **options: Any) -> list[str]:
    """Runs a case's two steps in one trainer and lists differences from TRL's record.

    A weight is compared on the scale of its tensor's largest change in the step: that is what the step computed, and
    a change is far smaller than the weight it is added to. Element by element it would be too strict, for Adam
    divides by the gradient's size and so turns the rounding of a vanishing gradient into a visible change.
    """
    model = tiny_model()
    trainer = PPOTrainer(config, model, tiny_model("reference_weights"), tokenizer(), **(trl_options(case) | options))
    found = []
    for number, expected in enumerate(FIXTURE["cases"][case]["steps"]):
        before = trl_weights(model)
        stats = trainer.step(*batch(number))
        for ours, theirs in STATISTICS.items():
            if stats[ours] != pytest.approx(expected["stats"][theirs], rel=TOLERANCE, abs=0):
                found.append(f"step {number}: {ours} {stats[ours]} != {expected['stats'][theirs]}")
        counts = {"epochs": len(expected["permutations"]), "skipped": expected["skipped_minibatches"]}
        found += [f"step {number}: {name} {stats[name]} != {n}" for name, n in counts.items() if stats[name] != n]
        if trainer.kl_coef != pytest.approx(expected["kl_coef_after"], rel=1e-6):
            found.append(f"step {number}: kl_coef {trainer.kl_coef} != {expected['kl_coef_after']}")
        for name, value in trl_weights(model).items():
            recorded = torch.tensor(expected["weights_after"][name])
            scale = (recorded - before[name]).abs().max()
            assert scale > 0, f"{name} never moved in TRL: the fixture shows nothing about it"
            error = (value - recorded).abs().max()
            if error > TOLERANCE * scale:
                found.append(f"step {number}: {name} is off by {error / scale:.2g} of its largest change")
    return found


@pytest.mark.parametrize("case", CASES)
def test_two_consecutive_steps_agree_with_trl(case: str) -> None:
    assert mismatches(case, trl_config(case)) == []


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_agreement_holds_when_minibatches_are_computed_one_row_at_a_time(case: str) -> None:
    assert mismatches(case, replace(trl_config(case), max_tokens_per_pass=1)) == []


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("adaptive_kl", {"lam": 0.95}),
        ("adaptive_kl", {"gamma": 0.98}),
        ("adaptive_kl", {"vf_coef": 0.11}),
        ("adaptive_kl", {"init_kl_coef": 0.21}),
        ("adaptive_kl", {"horizon": 41}),
        ("adaptive_kl", {"target": 0.36}),
        ("adaptive_kl", {"learning_rate": 0.0101}),
        ("adaptive_kl", {"value_learning_rate": 0.0101}),
        ("adaptive_kl", {"entropy_coef": 0.001}),
        ("adaptive_kl", {"max_grad_norm": 0.1}),
        ("adaptive_kl", {"whiten_advantages": False}),
        ("clipping", {"cliprange": 0.021}),
        ("clipping", {"cliprange_value": 0.021}),
        ("limits", {"target_kl": 1.0}),
    ],
)
def test_any_other_setting_disagrees(case: str, change: dict[str, Any]) -> None:
    assert mismatches(case, replace(trl_config(case), **change))


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("adaptive_kl", {"kl_penalty": "abs"}),
        ("clipping", {"kl_penalty": "kl"}),
        ("limits", {"ratio_threshold": 10.0}),
        ("adaptive_kl", {"rng": RecordedOrder([list(range(8))] * 4)}),
    ],
)
def test_any_other_option_disagrees(case: str, change: dict[str, Any]) -> None:
    assert mismatches(case, trl_config(case), **change)


def test_fixture_exercises_what_it_is_for() -> None:
    steps = {case: FIXTURE["cases"][case]["steps"] for case in CASES}
    for step in steps["clipping"]:
        assert step["stats"]["ppo/policy/clipfrac"] > 0.1
        assert step["stats"]["ppo/val/clipfrac"] > 0.1
    # Two thirds of the controller's range are flat; one of the two steps must lie on the slope between.
    config = FIXTURE["cases"]["adaptive_kl"]["config"]
    errors = [step["stats"]["objective/kl"] / config["target"] - 1 for step in steps["adaptive_kl"]]
    assert abs(errors[0]) > 0.2 > abs(errors[1]) > 0.01
    assert [len(step["permutations"]) for step in steps["limits"]] == [5, 3]  # five is all, three is an early stop
    assert all(step["skipped_minibatches"] for step in steps["limits"])


def test_reference_defaults_to_a_frozen_copy() -> None:
    model = tiny_model()
    copy = deepcopy(model)
    config = trl_config("adaptive_kl")
    trainer = PPOTrainer(config, model, None, tokenizer())
    explicit_model = deepcopy(model)
    explicit = PPOTrainer(config, explicit_model, copy, tokenizer())
    assert trainer.step(*batch(0))["ref_kl"] == 0.0
    explicit.step(*batch(0))
    assert trainer.step(*batch(1))["ref_kl"] == explicit.step(*batch(1))["ref_kl"] != 0.0
    assert trainer.ref_model is not None
    assert all(torch.equal(a, b) for a, b in zip(trainer.ref_model.parameters(), copy.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), explicit_model.parameters(), strict=True))


# PEFT 0.21 asks transformers 5.23 for an attribute by its old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_with_an_adapter_the_base_is_the_reference_and_stays_as_it_was() -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = tiny_model(peft_config=lora)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5, generator=torch.Generator().manual_seed(0))
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    config = trl_config("adaptive_kl")
    against_base = PPOTrainer(config, deepcopy(model), tiny_model(), tokenizer()).step(*batch())
    trainer = PPOTrainer(config, model, None, tokenizer())
    assert trainer.ref_model is None
    stats = trainer.step(*batch())
    assert stats["ref_kl"] == pytest.approx(against_base["ref_kl"], rel=1e-5)
    assert stats["ref_kl"] != 0.0
    for name, weight in model.named_parameters():
        trains = "lora_" in name or name.startswith("v_head.")
        assert torch.equal(weight, start[name]) != trains, name


def test_default_order_is_drawn_from_the_seed() -> None:
    def weights_after(seed: int) -> Tensor:
        model = tiny_model()
        PPOTrainer(replace(trl_config("adaptive_kl"), seed=seed), model, None, tokenizer()).step(*batch())
        return torch.cat([weight.flatten() for weight in model.parameters()])

    assert torch.equal(weights_after(3), weights_after(3))
    assert not torch.equal(weights_after(3), weights_after(4))


def test_every_minibatch_is_clipped() -> None:
    # Adam's step is lr * g / (|g| + 1e-8): a gradient of norm 1e-12 moves nothing by more than lr * 1e-4.
    config = replace(trl_config("adaptive_kl"), max_grad_norm=1e-12)
    model = tiny_model()
    before = trl_weights(model)
    stats = PPOTrainer(config, model, None, tokenizer()).step(*batch())
    assert stats["grad_norm"] > 1e-3
    assert stats["optimizer_steps"] == 4
    for name, value in trl_weights(model).items():
        assert (value - before[name]).abs().max() <= 4 * 1e-4 * config.learning_rate + 1e-7, name


@pytest.mark.numerical
def test_first_ratio_is_one_and_a_longer_row_changes_nothing_for_a_shorter_one() -> None:
    # One minibatch of two rows, the second much longer, must report the two rows' own numbers, weighted by tokens.
    (query, *_), (response, *_), _ = batch()
    rows = [(query, response, 0.7), (torch.arange(2, 20), torch.arange(3, 19), -0.4)]
    config = replace(trl_config("adaptive_kl"), ppo_epochs=1, whiten_advantages=False)

    def first_step(chosen: list[tuple[Tensor, Tensor, float]]) -> dict[str, float]:
        sized = replace(config, batch_size=len(chosen), mini_batch_size=len(chosen))
        trainer = PPOTrainer(sized, tiny_model(), tiny_model("reference_weights"), tokenizer())
        return trainer.step(*map(list, zip(*chosen, strict=True)))

    alone, together = [first_step([row]) for row in rows], first_step(rows)
    lengths = [len(reply) for _, reply, _ in rows]
    for name in ("policy_loss", "value_loss", "entropy", "penalty_mean"):
        expected = sum(n * stats[name] for n, stats in zip(lengths, alone, strict=True)) / sum(lengths)
        assert together[name] == pytest.approx(expected, rel=1e-4), name
    assert together["ratio_error"] < 1e-5


def test_entropy_bonus_raises_entropy() -> None:
    def entropy_after_one_step(entropy_coef: float) -> float:
        config = replace(trl_config("adaptive_kl"), entropy_coef=entropy_coef)
        trainer = PPOTrainer(config, tiny_model(), None, tokenizer())
        trainer.step(*batch())
        return trainer.step(*batch())["entropy"]

    assert entropy_after_one_step(1.0) > entropy_after_one_step(0.0) + 0.05


def test_errors_name_the_next_step() -> None:
    model, config = tiny_model(), trl_config("adaptive_kl")
    with pytest.raises(ConfigError, match=r"kl_penalty='full'. Expected one of \['abs', 'kl', 'mse'\]"):
        PPOTrainer(config, model, None, tokenizer(), kl_penalty="full")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Use kl_placement='reward'"):
        PPOTrainer(replace(config, kl_placement="loss"), model, None, tokenizer())
    with pytest.raises(ConfigError, match="Leave critic out"):
        PPOTrainer(
            replace(config, critic="lstd", value_learning_rate=None, cliprange_value=None), model, None, tokenizer()
        )
    trainer = PPOTrainer(config, model, None, tokenizer())
    queries, responses, scores = batch()
    with pytest.raises(ValueError, match=r"batch_size=8 of each, received .*'scores': 7"):
        trainer.step(queries, responses, scores[:7])
    with pytest.raises(ValueError, match=r"responses\[1\] has shape \(0,\)"):
        trainer.step(queries, [responses[0], responses[1][:0], *responses[2:]], scores)
    with pytest.raises(ValueError, match=r"queries\[0\] has shape \(1, \d\)"):
        trainer.step([queries[0][None], *queries[1:]], responses, scores)
    with pytest.raises(ValueError, match=r"scores\[7\] has shape \(2,\)"):
        trainer.step(queries, responses, [*scores[:7], torch.zeros(2)])
