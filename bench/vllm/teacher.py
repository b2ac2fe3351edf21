"""Compare an engine's answers with transformers, which computes all tokens at once.

The argument is the folder of the model. The input is a JSON list of pairs: a prompt, and its answer
with `tokens` and, for each token, `logprobs` by the id of a token. The output is the largest
difference of log probabilities.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers


def difference(model: Any, prompt: list[int], answer: dict[str, Any]) -> float:  # noqa: ANN401
    """Return the largest difference of log probabilities in *answer*."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer["tokens"]])).logits[0]
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return max(
        abs(row[int(token)].item() - value)
        for row, step in zip(rows, answer["logprobs"], strict=True)
        for token, value in step.items()
    )


def main() -> None:
    """Print the largest difference of all answers."""
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    model.eval()
    print(max(difference(model, *pair) for pair in json.load(sys.stdin)))


if __name__ == "__main__":
    main()
