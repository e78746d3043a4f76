"""`dare init`: a recipe with comments that says exactly what the flags said."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from calling import BASE, TO, TWO, asked_recipe, contents, dare, dare_succeeds
from hypothesis import given, settings
from hypothesis import strategies as st

from dare import load_recipe
from dare.cli.flags import FIELDS, described
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

rates = st.floats(0, 1, exclude_max=True)
shares = st.floats(-4, 4)
seeds = st.integers(0, 2**63)
names = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters=":"), min_size=1
).filter(str.strip)
VALUES = {
    "drop_rate": rates,
    "rescale": st.sampled_from(["true", "false", "l1"]),
    "t": st.floats(0, 1),
    "on": st.sampled_from(["weights", "deltas"]),
    "keep_ratio": st.floats(0, 1, exclude_min=True),
    "divide_by": st.sampled_from(["weights", "signed", "count", "nothing"]),
    "vote": st.sampled_from(["sum", "count"]),
    "weighted": st.sampled_from(["true", "false"]),
    "scope": st.sampled_from(["tensor", "model"]),
    "normalize": st.sampled_from(["true", "false"]),
    "alpha": st.floats(0, 1, exclude_min=True),
    "embeddings": st.sampled_from(["vectors", "matrices"]),
}
OF_TRIM = {"rescale": st.sampled_from(["false", "l1"])}
OTHERS = {
    "seed": seeds,
    "scale": shares,
    "dtype": st.sampled_from(["F32", "BF16", "F16"]),
    "delta-threshold": st.floats(0, 1e30),
    "threads": st.integers(1, 99),
    "max-memory": st.integers(1 << 30, 1 << 40),
    "on-missing": st.sampled_from(["error", "base"]),
    "on-extra": st.sampled_from(["error", "drop"]),
    "on-mismatch": st.sampled_from(["error", "base"]),
    "vocabulary": st.sampled_from(["error", "base", "union"]),
    "pad-to-multiple-of": st.integers(1, 64),
    "on-integer-mismatch": st.sampled_from(["error", "base"]),
}


def test_values_are_drawn_for_every_parameter():
    chains = [parse_method(method) for method in METHODS]
    assert set(VALUES) == {name for chain in chains for stage in chain for name in stage.parameters}


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """Flags that make a valid recipe for two models."""
    method = draw(st.sampled_from(METHODS))
    chain = parse_method(method)
    line = [f"--method={method}"]
    for name, values in OTHERS.items():
        if draw(st.booleans()):
            line.append(f"--{name}={draw(values)}")
    if chain[-1].name != "slerp" and draw(st.booleans()):
        # Some stages divide by their sum.
        pair = draw(st.tuples(shares, shares).filter(lambda pair: sum(pair) != 0))
        line += [f"--weight={weight}" for weight in pair]
    if draw(st.booleans()):
        line += [f"--model-seed={draw(seeds)}", f"--model-seed={draw(seeds)}"]
    own = {name: stage for stage in reversed(chain) for name in stage.parameters}
    values = {
        n: OF_TRIM.get(n, VALUES[n]) if s.name == "trim" else VALUES[n] for n, s in own.items()
    }
    for name, stage in own.items():
        count = draw(st.sampled_from([0, 1, 2] if stage.kind == "delta" else [0, 1]))
        flag = f"--{name.replace('_', '-')}"
        line += [f"{flag}={draw(values[name])}" for _ in range(count)]
    if own and draw(st.booleans()):
        for name in draw(st.lists(st.sampled_from(sorted(own)), max_size=3)):
            line.append(f"--tensors={draw(names)}: {name}={draw(values[name])}")
    if "drop_rate" in own and draw(st.booleans()):
        line.append(f"--embedding-drop-rate={draw(rates)}")
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
        assert lines[place - 1] == f"# {described()[name]}"


@pytest.mark.parametrize("method", ["dare+ties", "slerp", "trim+linear"])
def test_what_is_commented_out_can_be_put_in_line_by_line(method, folder):
    dare_succeeds("init", *TWO, *TO, "--method", method)
    lines = Path("recipe.toml").read_text().splitlines()
    commented = [
        n
        for n, line in enumerate(lines)
        if line.startswith("# ") and line.removeprefix("# ").split(" = ")[0].isidentifier()
    ]
    rule = lines.index("# [[tensors]]")
    assert len(commented) > 10
    for number in commented:
        if number > rule:
            continue
        name = lines[number].removeprefix("# ").split(" = ")[0]
        if name == "shard_size" or (name == "embedding_drop_rate" and "dare" not in method):
            continue  # these do not go with everything
        changed = list(lines)
        changed[number] = lines[number].removeprefix("# ")
        Path("changed.toml").write_text("\n".join(changed))
        load_recipe("changed.toml")


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
