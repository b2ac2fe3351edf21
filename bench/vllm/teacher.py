"""Compare an engine's answers with transformers, which computes all tokens at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def differences(path: Path, answers: list[tuple[list[int], dict[str, Any]]]) -> list[float]:
    """Return the largest difference of log probabilities for each token of all *answers*.

    Args:
        path: The folder of the model.
        answers: Pairs of a prompt and its answer: `tokens`, and `logprobs` for each token, by the
            id of a token.
    """
    import torch  # noqa: PLC0415 - only the process that compares needs them
    import transformers  # noqa: PLC0415

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for prompt, answer in answers:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer["tokens"]])).logits[0]
        expected = logits.log_softmax(-1)[len(prompt) - 1 :]
        for row, actual in zip(expected, answer["logprobs"], strict=False):
            found.append(max(abs(row[token].item() - value) for token, value in actual.items()))
    return found
