"""Compares the cost model of docs/larger-models.md with measurements: counted operations over measured seconds.

python scripts/benchmarks/cost_model.py

A model that counts rightly gives the processor one speed, whatever the model's size. Reads results/larger-models.json.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

from common import RESULTS, save


@dataclass(frozen=True)
class Sizes:
    """What a model's cost depends on.

    Attributes:
        body: Weights of the decoder layers.
        head: Weights of the output layer: vocabulary times width.
        adapted: The share of the layers that LoRA adapts.
    """

    body: int
    head: int
    adapted: float = 0.25

    def acting(self, tokens: float, decisions: float) -> float:
        """Operations of so many tokens read or written, of which `decisions` choose among the vocabulary."""
        return 2 * self.body * tokens + 2 * self.head * decisions

    def learning(self, decisions: float, epochs: int) -> float:
        """Operations of an update: the adapted layers and the output layer forward, and backward to their inputs.

        The frozen layers below are remembered; a frozen weight takes no gradient, so backward costs as much as forward.
        One more forward pass over a quarter of the batch measures how far the last step led.
        """
        return (2 * epochs + 0.25) * 2 * (self.adapted * self.body + self.head) * decisions


SIZES = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": Sizes(106_203_456, 28_311_552, 8 / 30),
    "Qwen/Qwen2.5-0.5B-Instruct": Sizes(357_898_112, 136_134_656, 6 / 24),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": Sizes(968_976_384, 65_536_000, 6 / 22),
}


def main() -> None:
    """Count, divide, write."""
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
