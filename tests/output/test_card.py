"""The model card: valid front matter, every figure, no secrets, the same text each time."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dare import merge, plan
from dare.documents.notices import LEFTOVERS, notice
from dare.errors import InputError
from dare.output.receipt import Report
from dare.output.sidecars import MAX_FRONT_MATTER, card_fields, inherited, model_card
from dare.planning.plan import Plan
from dare.recipe.recipe import ModelEntry, Request
from helpers import save

CARD = """---
language: en
license: llama3  # as it says
license_link: "https://example.org/a#b"
pipeline_tag: 'text-generation'
library_name: [not, a, scalar]
tags:
- license: nested
---
# Base
license: mit
"""


@pytest.fixture
def merged(tmp_path: Path) -> tuple[Plan, Report]:
    return merge_in(tmp_path / "home" / "somebody" / "work")


def merge_in(folder: Path, **settings: Any) -> tuple[Plan, Report]:
    weights = np.linspace(-1, 1, 64, dtype=np.float32)
    given: dict[str, Any] = {
        "base": save(folder / "llama" / "model.safetensors", {"w": weights}).parent,
        "models": [
            ModelEntry(
                file=save(folder / "math.safetensors", {"w": weights + np.float32(0.01)}),
                weight=0.7,
                seed=9,
                settings={"drop_rate": 0.5},
            ),
            save(folder / "b" / "co|de" / "model.safetensors", {"w": weights - np.float32(0.001)}),
        ],
        "output": folder / "out" / "merged",
        "verbose": False,
        "threads": 1,
        **settings,
    }
    planned = plan(Request.of(**given))
    return planned, merge(planned)


def front_matter(card: str) -> dict[str, Any]:
    _, front, _ = card.split("---\n", 2)
    metadata = yaml.safe_load(front)
    assert isinstance(metadata, dict)
    return metadata


def test_the_front_matter_is_what_the_hub_expects_and_what_holds_for_the_base(merged, tmp_path):
    own = {
        "base_model": ["llama", "math.safetensors", "co|de"],
        "base_model_relation": "merge",
        "library_name": "transformers",
        "tags": ["merge", "dare-merge"],
    }
    assert front_matter(model_card(*merged).decode()) == own
    (tmp_path / "README.md").write_text(CARD)
    planned, report = merged
    card = model_card(dataclasses.replace(planned, base_card=inherited(tmp_path)), report)
    assert front_matter(card.decode()) == {
        **own,
        "language": ["en"],
        "license": "llama3",
        "license_link": "https://example.org/a#b",
        "pipeline_tag": "text-generation",
    }


@pytest.mark.parametrize(
    "card",
    [
        b"\xff no front matter\nlicense: mit\n",
        b"---\nlicense: mit\n",
        b"---\n- license: mit\n---\n",
        b"---\nlicense: 'mit\n---\n",
        b"---\nlicense: &a [*a]\n---\n",
        b"---\nlicense:\n---\n",
        b"---\nlicense: !!python/object/apply:os.getcwd []\n---\n",
        b"---\nlicense: " + b"[" * 1_000 + b"\n---\n",
        b"---\nlicense: mit\n#" + b"x" * MAX_FRONT_MATTER + b"\n---\n",
    ],
)
def test_a_card_of_the_base_that_says_nothing_of_use_is_passed_over(
    card: bytes, tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_bytes(card)
    assert inherited(tmp_path) == {}


@pytest.mark.parametrize("task", [None, "text-generation"])
def test_scores_are_read_by_the_hubs_library_without_a_warning(merged, tmp_path, caplog, task):
    hub = pytest.importorskip("huggingface_hub")
    planned, report = merged
    scores = (
        {
            "dataset": {"type": "sums", "name": "sums", "split": "test"},
            "metrics": [
                {"type": "accuracy", "value": 0.5, "args": {"items": 8, "low": 0.25, "high": 0.75}}
            ],
        },
        {
            "dataset": {"type": "prose", "name": "prose", "split": "test"},
            "metrics": [{"type": "score", "value": 1.5, "args": {}}],
        },
    )
    card = {} if task is None else {"pipeline_tag": task}
    planned = dataclasses.replace(planned, scores=scores, base_card=card)
    (tmp_path / "README.md").write_bytes(model_card(planned, report))
    with caplog.at_level("WARNING"):
        data = hub.ModelCard.load(tmp_path / "README.md").data
    assert caplog.records == []
    assert data.model_name == "merged"
    shared = {"task_type": task or "other", "dataset_split": "test"}
    first, second = (
        hub.EvalResult(**shared, dataset_type=name, dataset_name=name, **metric)
        for name, metric in {
            "sums": {
                "metric_type": "accuracy",
                "metric_value": 0.5,
                "metric_args": {"items": 8, "low": 0.25, "high": 0.75},
            },
            "prose": {"metric_type": "score", "metric_value": 1.5, "metric_args": {}},
        }.items()
    )
    assert data.eval_results == [first, second]
    assert (
        yaml.safe_load(data.to_yaml())["model-index"]
        == front_matter((tmp_path / "README.md").read_text())["model-index"]
    )


def test_any_name_is_valid_in_the_front_matter_and_none_ends_the_recipes_block(merged):
    planned, report = merged
    for name in ("no", "1.5", "a: b", "- x", "naïve", 'q"uote', "{x}", "a #b"):
        entry = planned.recipe.models[0].changed(file=Path(name))
        recipe = planned.recipe.changed(models=(entry, planned.recipe.models[1]))
        card = model_card(dataclasses.replace(planned, recipe=recipe), report).decode()
        assert name in front_matter(card)["base_model"]
    recipe = planned.recipe.changed(output=Path("a```b"))
    card = model_card(dataclasses.replace(planned, recipe=recipe), report).decode()
    assert "\n````toml\n" in card


def test_all_figures_are_told(merged: tuple[Plan, Report]) -> None:
    planned, report = merged
    card = model_card(planned, report).decode()
    assert "# merged\n\n`math` and `co\\|de` merged into `llama` with `dare+linear`, " in card
    first, second = report.models
    assert (
        f"| `math` | `math.safetensors` | 0.7 | 9 | {first.drop_rate_realised:.4%} | "
        "50.0000% | 0.01 | `w` |" in card
    )
    assert f"| 0.5 | 43 | {second.drop_rate_realised:.4%} | 90.0000% | 0.001 | `w` |" in card
    for digest in (report.digests.base, *report.digests.models, report.digests.output):
        assert f"`{digest}` |" in card
    assert "- large deltas: math: |δ| exceeds".replace("|", "\\|") in card
    assert "Mask version 1." in card
    assert "dare merged --output again" in card
    document = tomllib.loads(card.split("```toml\n")[1].split("```")[0])
    assert document == {
        "method": "dare+linear",
        "seed": 42,
        "base": "llama",
        "models": [
            {"file": "math.safetensors", "weight": 0.7, "seed": 9, "drop_rate": 0.5},
            "co|de",
        ],
        "output": "merged",
    }


def test_a_card_of_the_base_that_cannot_be_read_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "README.md").symlink_to("/etc/passwd")
    with pytest.raises(InputError, match=r"README\.md"):
        merge_in(tmp_path)
    assert not (tmp_path / "out").exists()


def test_no_folder_is_told(merged: tuple[Plan, Report], tmp_path: Path) -> None:
    planned, report = merged
    noticed = notice("missing_as_zero", f"{tmp_path}/some/x.json", models="[is](not) <b>\nhere")
    leftover = notice(LEFTOVERS, what="left by another merge")
    report = dataclasses.replace(report, warnings=(noticed, leftover))
    card = model_card(planned, report).decode()
    assert "somebody" not in card
    assert str(tmp_path) not in card
    assert r"x.json: Not in \[is](not) &lt;b>\nhere; " in card
    assert "another merge" not in card


def test_the_text_does_not_depend_on_place_or_time(tmp_path: Path) -> None:
    cards = [model_card(*merge_in(tmp_path / place / "work")) for place in ("a", "b/c")]
    assert cards[0] == cards[1]
    again = merge_in(tmp_path / "d" / "work", threads=2, max_memory=1 << 28)
    assert model_card(*again) == cards[0]


@pytest.mark.parametrize(
    ("licences", "expected"),
    [
        (["apache-2.0", "gpl-2.0"], "none"),
        (["mit", "gpl-2.0"], "gpl-2.0"),
        ([None, None, None], None),
        (["mit", None, "MIT"], "mit"),
        ([None, "llama3", None], "llama3"),
        (["mit", "apache-2.0", "mit"], "apache-2.0"),
        (["apache-2.0", "gemma", "mit"], "gemma"),
        (["gpl-3.0", "gemma", "mit"], "none"),
        (["other", "other", "mit"], "other"),
    ],
)
def test_the_licence_is_that_of_all_inputs_or_the_strictest(
    licences: list[str | None], expected: str | None, tmp_path: Path
) -> None:
    folders = [tmp_path / str(number) for number in range(len(licences))]
    for folder, licence in zip(folders, licences, strict=True):
        folder.mkdir()
        if licence is not None:
            (folder / "README.md").write_text(f"---\nlicense: {licence}\n---\n")
    fields, notes = card_fields([*folders, None])
    assert fields.get("license") == (None if expected == "none" else expected)
    assert [note.code for note in notes] == ["licences"] * (expected == "none")


def test_two_licences_that_have_names_of_their_own_differ(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        front = f"license: other\nlicense_name: {name}\ntags: [1, chat, merge, [x]]\nlanguage: {{}}"
        (tmp_path / name / "README.md").write_text(f"---\n{front}\n---\n")
    fields, notes = card_fields([tmp_path / "a", tmp_path / "b"])
    assert fields == {"tags": ["1", "chat", "merge"]}
    assert len(notes) == 1
