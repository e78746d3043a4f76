"""Writes down what Hugging Face's transformers makes of the models, for the tests to compare with.

    python training/known_answers.py src/dare/demo/models tests/demo/known_answers.json

Everything is computed in float32. Scores are rounded to four places.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

PROMPTS = ("37+58=", "sort planet:", "say 347:", "And God said, Let there be", "64+19=")


def known_answers(folder: Path) -> dict[str, Any]:
    """For each prompt: tokens, scores of the next byte, and what is written greedily."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = {}
    for prompt in PROMPTS:
        tokens = tokenizer(prompt, return_tensors="pt")
        assert tokens.input_ids[0].tolist() == list(prompt.encode()), "tokens are not bytes"
        with torch.no_grad():
            scores = model(**tokens).logits[0, -1]
            written = model.generate(**tokens, max_new_tokens=40, do_sample=False, pad_token_id=0)
        text = tokenizer.decode(written[0, len(prompt) :].tolist())
        found[prompt] = {
            "logits": [round(float(score), 4) for score in scores],
            "written": text.split("\n")[0],
        }
    return found


def main(models: Path, output: Path) -> None:
    """Ask every model."""
    answers = {folder.name: known_answers(folder) for folder in sorted(models.iterdir())}
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    made_by = f"training/known_answers.py with {versions}"
    output.write_text(json.dumps({"made_by": made_by, "models": answers}) + "\n", encoding="utf-8")
    for name, prompts in answers.items():
        print(name, {prompt: answer["written"] for prompt, answer in prompts.items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
