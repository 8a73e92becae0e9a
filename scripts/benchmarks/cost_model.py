"""Compares the cost model of docs/larger-models.md with measurements: counted operations per measured second.

python scripts/benchmarks/cost_model.py

A correct cost model implies the same processor speed for models of all sizes. Reads results/larger-models.json.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

from common import RESULTS, save


@dataclass(frozen=True)
class Sizes:
    """Sizes that determine the cost of a model.

    Attributes:
        body: Weights of the decoder layers.
        head: Weights of the output layer: vocabulary times width.
        adapted: Fraction of the layers that LoRA adapts.
    """

    body: int
    head: int
    adapted: float = 0.25

    def acting(self, tokens: float, decisions: float) -> float:
        """Operations for a number of tokens, read or written; `decisions` of them need logits over the vocabulary."""
        return 2 * self.body * tokens + 2 * self.head * decisions

    def learning(self, decisions: float, epochs: int) -> float:
        """Operations of an update: the adapted layers and the output layer forward, and backward to their inputs.

        The activations of the frozen layers below are cached. Frozen weights need no gradient, so the backward pass
        costs as much as the forward pass. One more forward pass over a quarter of the batch measures the final KL.
        """
        return (2 * epochs + 0.25) * 2 * (self.adapted * self.body + self.head) * decisions


SIZES = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": Sizes(106_203_456, 28_311_552, 8 / 30),
    "Qwen/Qwen2.5-0.5B-Instruct": Sizes(357_898_112, 136_134_656, 6 / 24),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": Sizes(968_976_384, 65_536_000, 6 / 22),
}


def main() -> None:
    """Compute and save the operations per second of each model and stage."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    measured = json.loads((RESULTS / "larger-models.json").read_text())
    rows = {}
    for name, row in measured["models"].items():
        sizes, acting, update = SIZES[name], row["acting"], row["update"]
        written = acting["turns"] * measured["new_tokens"]
        counted = {
            "acting": sizes.acting(acting["tokens"], written),
            "update": sizes.learning(written, update["epochs"]),
        }
        rows[name] = {
            stage: {"operations": count, "per_second": count / row[stage]["processor_s"]}
            for stage, count in counted.items()
        }
    save("cost-model", {"measured_at": measured["commit"], "models": rows})


if __name__ == "__main__":
    main()
