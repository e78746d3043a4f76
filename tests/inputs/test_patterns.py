"""Patterns for modules: PEFT's answer, in time that no pattern can make long."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dare.inputs.patterns import ModulePattern

MODULES = [
    "q_proj",
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.mlp.up_proj",
    "transformer.h.1.attn.c_attn",
    "ab.abab.b",
    "",
]
PATTERNS = [
    "q_proj",
    "model.layers.0.self_attn.q_proj",
    "proj",
    ".*_proj",
    "^q_proj",
    r"^model\.layers\.0.*",
    r"layers\.(0|1)\..*",
    r"(?:q|k|v)_proj",
    r"layers\.\d+\.mlp\.(up|down)_proj",
    r"[^.]*",
    r"[]a-z]+",
    r"h\.\d{1,2}\..*attn",
    r"(ab|a|b)*",
    r"(a|ab)(b|ab)+?",
    r"(?!.*mlp).*proj",
    r"(?=m).*",
    "a{2}|b",
    r".*\.layers\.[0-9]+\.(self_attn\.[qkv]_proj|mlp\..*)$",
    "(q_proj$)",
    "(|a)+b",
    "x*",
    r"\.?b",
    "((b))?",
    "(a{0,2}){1,}",
    "[ab]{2,3}",
]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("module", MODULES)
def test_the_answer_is_that_of_peft(pattern, module):
    expected = re.match(rf"(.*\.)?({pattern})$", module) is not None
    assert ModulePattern(pattern).matches(module) is expected


pieces = st.sampled_from(["a", "b", r"\.", ".", "[ab]", r"\w"])
counted = st.tuples(pieces, st.sampled_from(["", "*", "+", "?", "{2}", "{1,}", "{0,2}", "*?"]))
runs = st.lists(counted.map("".join), max_size=3).map("".join)
groups = st.tuples(runs, runs, st.sampled_from(["", "?", "+"])).map(
    lambda g: f"({g[0]}|{g[1]}){g[2]}"
)


@settings(max_examples=100)
@given(st.lists(runs | groups, max_size=3).map("".join), st.text("ab.", max_size=7))
def test_the_answer_is_that_of_re_for_any_pattern(pattern, module):
    expected = re.match(rf"(.*\.)?({pattern})$", module) is not None
    assert ModulePattern(pattern).matches(module) is expected


@pytest.mark.parametrize(
    "pattern",
    [
        r"([\w.]+)+!",
        "(.*)*!",
        "(a|aa)+!",
        ".*" * 40 + "!",
        "(((.+)+)+)+!",
        "(.{0,9}){9}!",
        "(" * 4 + ".+" + ")+" * 4 + "!",
        "(?=" * 4 + ".*" + ").*" * 4 + "!",
        "((.?){60}){60}!",
    ],
)
def test_no_pattern_takes_long(pattern):
    started = time.perf_counter()
    assert not ModulePattern(pattern).matches("model.layers." * 8 + "aaaa")
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("q(", "not a regular expression: missing"),
        ("*", "not a regular expression: nothing to repeat"),
        (r"(a)\1+", r"is not supported; name the modules"),
        ("(?<=a)b", r"'\(\?<' is not supported; name the modules"),
        ("(?i)a+", r"'\(\?i' is not supported"),
        ("a" * 1001, "longer than 1000 characters"),
        ("a{2000}", r"\{2000} repeats more than 100 times"),
        ("(((((a)))))", "groups are nested more than 4 deep"),
    ],
)
def test_what_cannot_be_matched_is_refused_with_the_reason(pattern, reason):
    with pytest.raises(ValueError, match=reason):
        ModulePattern(pattern)


def test_what_another_version_may_read_otherwise_is_read_without_a_word():
    assert ModulePattern("[[q]_proj").matches("q_proj")
    assert ModulePattern("([[q])_proj").matches("layers.[_proj")
