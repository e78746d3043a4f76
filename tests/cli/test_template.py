"""`dare init`: a recipe with comments that says exactly what the flags said."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from calling import BASE, TO, TWO, asked_recipe, contents, dare, dare_succeeds
from hypothesis import given, settings
from hypothesis import strategies as st

from dare import load_recipe
from dare.cli.flags import FIELDS, field_help
from dare.recipe.recipe import Recipe, Request
from dare.stages import parse_method

METHODS = [
    "average",
    "dare_slerp",
    "dare+linear",
    "dare+ties",
    "dare+linear+svc",
    "dare+trim+ties",
    "trim+sum",
    "ties",
]


def said_by(request: Request) -> dict[str, object]:
    """A recipe with its stages' defaults filled in, for comparison.

    The template writes defaults out, so that they can be changed; they say nothing new.
    """
    recipe, chain = request.recipe, [(s.name, settings) for s, settings in request.recipe.chain]
    fields = {name: getattr(recipe, name) for name in Recipe.fields()}
    return fields | {"stages": chain, "options": request.options}


# ---------------------------------------------------------------- the same recipe

names = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters=":"), min_size=1
).filter(str.strip)
# Values to draw from, as texts: of the parameters of stages, and of fields.
VALUES = {
    "drop_rate": "0 1e-300 0.1 0.9999999999999999",
    "rescale": "false l1",
    "t": "0 0.3 1",
    "on": "weights deltas",
    "keep_ratio": "1e-300 0.1 1",
    "divide_by": "weights signed count nothing",
    "vote": "sum count",
    "weighted": "true false",
    "scope": "tensor model",
    "normalize": "true false",
    "alpha": "0.1 1",
    "embeddings": "vectors matrices",
}
OTHERS = {
    "seed": f"0 7 {2**63}",
    "scale": "-4 0.1 1e300",
    "dtype": "F32 BF16 F16",
    "delta-threshold": "0 0.002 1e30",
    "threads": "1 99",
    "max-memory": f"{1 << 30} 3GiB",
    **dict.fromkeys(("on-missing", "on-mismatch", "on-integer-mismatch"), "error base"),
    "on-extra": "error drop",
    "vocabulary": "error base union",
    "pad-to-multiple-of": "1 64",
}


def test_values_are_drawn_for_every_parameter():
    chains = [parse_method(method) for method in METHODS]
    assert set(VALUES) == {name for chain in chains for stage in chain for name in stage.parameters}


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """Flags that make a valid recipe for two models."""

    def flag(name: str, values: str) -> str:
        return f"--{name.replace('_', '-')}={draw(st.sampled_from(values.split()))}"

    def some(least: int, most: int) -> range:
        return range(draw(st.integers(least, most)))

    method = draw(st.sampled_from(METHODS))
    chain = parse_method(method)
    own = {name: stage for stage in reversed(chain) for name in stage.parameters}
    line = [f"--method={method}"]
    line += [flag(name, values) for name, values in OTHERS.items() if some(0, 1)]
    if chain[-1].name != "slerp" and some(0, 1):
        line += [flag("weight", "-0.3 0 0.7"), "--weight=1"]
    line += [flag("model-seed", OTHERS["seed"]) for _ in range(2 * len(some(0, 1)))]
    for name, stage in own.items():
        line += [flag(name, VALUES[name]) for _ in some(0, 2 if stage.kind == "delta" else 1)]
    for name in draw(st.lists(st.sampled_from(sorted(own)), max_size=3)) if own else ():
        value = draw(st.sampled_from(VALUES[name].split()))
        line.append(f"--tensors={draw(names)}: {name}={value}")
    if "drop_rate" in own and some(0, 1):
        line.append(flag("embedding_drop_rate", VALUES["drop_rate"]))
    return line


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("templates")


@given(flags=command_lines())
@settings(max_examples=10)
def test_the_recipe_that_init_writes_says_what_the_flags_said(flags, some_models, place):
    files = [
        f"--base={some_models / 'base.safetensors'}",
        f"--merge={some_models / 'math.safetensors'}",
        f"--merge={some_models / 'code.safetensors'}",
        f"--output={place / 'merged.safetensors'}",
    ]
    written = place / "recipe.toml"
    dare_succeeds("init", *files, *flags, "--to", written, "--overwrite")
    assert said_by(load_recipe(written)) == said_by(asked_recipe("plan", *files, *flags))


def test_every_setting_is_in_it_with_what_it_means(folder):
    dare_succeeds("init", *TWO)
    lines = Path("recipe.toml").read_text().splitlines()
    tables = {"base", "models", "output", "tensors"}  # files and rules have tables of their own
    for name in set(FIELDS) - tables - {"input_digests", "output_digest"}:
        (place,) = [
            n for n, line in enumerate(lines) if line.startswith((f"{name} =", f"# {name} ="))
        ]
        assert lines[place - 1] == f"# {field_help()[name]}"


@pytest.mark.parametrize("method", ["dare+ties", "slerp", "trim+linear"])
def test_what_is_commented_out_can_be_put_in_line_by_line(method, folder):
    dare_succeeds("init", *TWO, *TO, "--method", method)
    lines = Path("recipe.toml").read_text().splitlines()
    others = {"shard_size"} | ({"embedding_drop_rate"} if "dare" not in method else set())
    put_in = 0
    for number, line in enumerate(lines[: lines.index("# [[tensors]]")]):
        setting = line.removeprefix("# ")
        name = setting.partition(" = ")[0]
        if line != setting and name.isidentifier() and name not in others:
            changed = [*lines[:number], setting, *lines[number + 1 :]]
            Path("changed.toml").write_text("\n".join(changed))
            load_recipe("changed.toml")
            put_in += 1
    assert put_in > 10


def test_the_example_of_a_rule_is_a_rule(folder):
    dare_succeeds("init", *TWO, *TO)
    text = Path("recipe.toml").read_text()
    before, mark, rule = text.partition("# [[tensors]]\n")
    assert mark
    Path("recipe.toml").write_text(before + "[[tensors]]\n" + rule.replace("# ", ""))
    (found,) = load_recipe("recipe.toml").recipe.tensors
    assert (found.match, found.settings) == (("*.mlp.*",), {"drop_rate": 0.5})


# ---------------------------------------------------------------- where it goes


def test_it_says_where_the_recipe_is_and_what_to_do_next(folder):
    outcome = dare_succeeds("init", *TWO, *TO, "--to", "my recipe.toml")
    assert outcome.err == ""
    said, *steps = map(shlex.split, outcome.out.splitlines())
    assert said[-2:] == ["my", "recipe.toml"]
    assert [step[:2] for step in steps] == [["plan", "dare"], ["merge", "dare"]]
    for _, _, *arguments in steps:
        dare_succeeds(*arguments)


def test_with_a_dash_it_goes_to_stdout_and_nowhere_else(folder):
    dare_succeeds("init", *TWO)
    before = contents(folder)
    for to in (["--to", "-"], ["--to=-"]):
        outcome = dare_succeeds("init", *TWO, *to)
        assert (outcome.out, outcome.err) == (Path("recipe.toml").read_text(), "")
    assert contents(folder) == before


def test_a_recipe_is_replaced_only_if_told_to(folder):
    Path("recipe.toml").write_text("models = []  # mine")
    assert dare("init", *TWO).status == 1
    assert Path("recipe.toml").read_text() == "models = []  # mine"
    dare_succeeds("init", *TWO, "--overwrite")
    assert load_recipe("recipe.toml").recipe.base == Path("base.safetensors")


def test_files_that_do_not_fit_get_no_recipe_and_digests_are_not_lost(folder):
    before = contents(folder)
    assert dare("init", *BASE, "-m", "nothing.safetensors").status == 1
    assert contents(folder) == before
    dare_succeeds("init", *TWO, *TO, "--input-digests", "a", "b", "c")
    assert load_recipe("recipe.toml").recipe.input_digests == ("a", "b", "c")
