"""A model of the embedded one's architecture whose weights are random: does it matter what a model has learned before?

python scripts/benchmarks/learning/random_model.py runs/random-135m
python scripts/benchmarks/learning/run.py taxi --name comparisons/taxi-random --seeds 0 -- --model runs/random-135m
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from llamagym.models.loading import embedded_model_folder


def main() -> None:
    """Write weights as the architecture initializes them, beside the embedded model's tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    source = embedded_model_folder()
    torch.manual_seed(args.seed)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).save_pretrained(args.folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(args.folder)


if __name__ == "__main__":
    main()
