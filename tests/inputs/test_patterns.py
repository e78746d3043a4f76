"""Patterns for modules: PEFT's answer, and no pattern that takes long."""

import contextlib
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dare.inputs.lora import ModulePattern

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
    "^q_proj",
    r"^model\.layers\.0.*",
    r"layers\.(0|1)\..*",
    r"(?:q|k|v)_proj",
    r"layers\.\d+\.mlp\.(up|down)_proj",
    r"[]a-z]+",
    r"h\.\d{1,2}\..*attn",
    r"(?!.*mlp).*proj",
    "a{2}|b",
    r".*\.layers\.[0-9]+\.(self_attn\.[qkv]_proj|mlp\..*)$",
    "(q_proj$)",
    r"\.?b",
    "((b))?",
    r"(a)\1*",
    "[[q]_proj",
]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_answer_is_that_of_peft(pattern, module):
    expected = re.match(rf"(.*\.)?({pattern})$", module) is not None
    assert ModulePattern(pattern).matches(module) is expected


PIECES = st.sampled_from(
    [*"ab.()|*+?[]^", r"\.", "(?:", "{2}", "{1,}", "[ab]", "(a|a)", "a?", ".*"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=60).map("".join))
def test_whatever_is_taken_is_fast(pattern):
    started = time.process_time()
    with contextlib.suppress(ValueError):
        ModulePattern(pattern).matches("a" * 40 + "." + "b" * 20)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "pattern",
    [
        *("q(", "*", "a" * 1001),
        *(r"([\w.]+)+!", "(.*)*!", "(a|aa)+!", "(((.+)+)+)+!", "(.{0,9}){9}!", "((.?){60}){60}!"),
        *(".*" * 40 + "!", "(a|a)" * 60 + "!", "a?" * 60 + "a" * 60, "(?=.*.*.*.*)" * 4 + "!"),
    ],
)
def test_what_may_take_long_or_is_none_is_refused(pattern):
    with pytest.raises(ValueError, match=r"name the modules|not a regular expression"):
        ModulePattern(pattern).matches("model.layers." * 4 + "aaaa")
