"""Configurations of mergekit, and what is expected when both programs merge them.

The table is `configurations.txt`: the name of a configuration, and indented below it the file. Two
kinds of lines stand for more. `METHOD on BASE of MODEL {PARAMETERS} / MODEL` is a merge of models;
`METHOD in slices` is one of the slices that follow, each `- MODEL BEGIN END {PARAMETERS} / …`, with
what its sources share after `|`. All other lines are YAML as it is. The last one, `= VERDICT by
SHARE: WHY`, says what is expected if that is not that both agree.

The models are those of `tiny_models`. Where no type is said, mergekit is told to compute in
float32. Examples are those of mergekit's repository, with other models and fewer layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

AGREES = "agrees"
IN_DISTRIBUTION = "agrees in distribution"
DIFFERS = "differs"
ONLY_HERE = "merges only here"
REFUSED = "refused by both"
REFUSED_HERE = "refused only here"

VERDICT = re.compile(r"= (?P<verdict>[a-z ]+?)(?: by (?P<share>[\d.]+))?: (?P<why>.*)")


@dataclass(frozen=True)
class Configuration:
    """A configuration, and what is expected of the two programs."""

    name: str
    text: str
    verdict: str = AGREES
    why: str = ""
    share: float = 0.0  # of the norm that the results may be apart where they differ

    @property
    def yaml(self) -> str:
        """The text of the file."""
        is_typed = "dtype:" in self.text or "experts:" in self.text
        return self.text if is_typed else _typed(self.text)


def _typed(text: str) -> str:
    return "\n---\n".join(f"{part.strip()}\ndtype: float32" for part in text.split("\n---\n"))


def _read(entry: str) -> Configuration:
    name, *lines = entry.replace("\n    ", "\n").split("\n")
    found = VERDICT.fullmatch(lines[-1])
    if found is None:
        return Configuration(name, _expand(lines))
    share = float(found["share"] or 0)
    return Configuration(name, _expand(lines[:-1]), found["verdict"], found["why"], share)


def _expand(lines: list[str]) -> str:
    return "\n".join(written for line in lines for written in _as_yaml(line))


def _as_yaml(line: str) -> Iterator[str]:
    if found := re.fullmatch(r"(\w+)(?: on (\S+))? of (.+)", line):
        method, base, models = found.groups()
        yield f"merge_method: {method}"
        yield from [f"base_model: {base}"] if base else []
        yield "models:"
        for model in models.split(" / "):
            yield f"  - {_with_parameters(*model.split(' ', 1))}"
    elif found := re.fullmatch(r"(\w+) in slices", line):
        yield f"merge_method: {found[1]}"
        yield "slices:"
    elif re.match(r"- \S+ \d", line):
        sources, _, shared = line.removeprefix("- ").partition(" | ")
        yield "  - sources:"
        for model, begin, end, *parameters in (s.split(" ", 3) for s in sources.split(" / ")):
            layers = f"{model}, layer_range: [{begin}, {end}]"
            yield f"      - {_with_parameters(layers, *parameters)}"
        yield from [f"    {shared}"] if shared else []
    else:
        yield line


def _with_parameters(model: str, parameters: str = "") -> str:
    return f"{{model: {model}{f', parameters: {parameters}' if parameters else ''}}}"


TABLE = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").strip()
CONFIGURATIONS = [_read(entry) for entry in re.split(r"\n(?=\S)", TABLE)]
