from __future__ import annotations

import csv
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dare.errors import InputError
from dare.studies import data_files
from dare.studies.data_files import FORMS, Task, count_alike, is_right, read_tasks

COUNT = 30
TEXTS = [f"number {n} of {n * n}" for n in range(COUNT)]


def jsonl(rows: list[Any]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def save(folder: Path, text: str | bytes, name: str = "task.jsonl") -> Path:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def read(folder: Path, rows: list[Any], name: str = "task.jsonl") -> Task:
    (task,) = read_tasks([save(folder, jsonl(rows), name)])
    return task


def questions(**more: Any) -> list[dict[str, Any]]:
    return [{"prompt": text, "answer": n, **more} for n, text in enumerate(TEXTS)]


def refused(folder: Path, text: str | bytes, name: str = "task.jsonl") -> str:
    """The message, without the file, which it begins with."""
    file = save(folder, text, name)
    with pytest.raises(InputError) as raised:
        read_tasks([file])
    return str(raised.value).removeprefix(f"{file}: ")


# ---------------------------------------------------------------- columns


FORM_ROWS = [
    ("choices", {"prompt": "?", "choices": ["a", "b"], "answer": "b"}, {"answer": 1}),
    ("choices", {"question": "?", "options": ["a", "b"], "target": 0}, {"answer": 0}),
    ("patterns", {"prompt": "?", "pattern": "^x"}, {"answers": []}),
    ("patterns", {"query": "?", "regex": "^x", "answer": "x"}, {"written": ["x"]}),
    ("answers", {"prompt": "?", "answer": True}, {"answers": ["true"], "written": ["true"]}),
    ("answers", {"instruction": "?", "output": "5"}, {"answers": ["5"], "is_reasoned": False}),
    ("answers", {"input": "?", "completion": ["a", 7]}, {"answers": ["a", "7"]}),
    ("labels", {"text": "?", "label": 1}, {"label": "1"}),
    ("labels", {"sentence": "?", "Category ": "x"}, {"label": "x"}),
    ("pairs", {"a": "?", "b": "x", "score": 3}, {"b": "x", "score": 3.0}),
    ("pairs", {"sentence1": "?", "sentence2": "x", "similarity": "0.5"}, {"score": 0.5}),
    ("images", {"image": "?", "label": 4}, {"label": "4"}),
    ("texts", {"content": "?"}, {}),
    ("answers", {"prompt": "?", "answer": "x", "text": "y", "id": 3}, {"answers": ["x"]}),
    ("answers", {"prompt": "?", "instruction": "x", "answer": "y"}, {"answers": ["y"]}),
]


@pytest.mark.parametrize(("form", "row", "values"), FORM_ROWS)
def test_columns_say_what_a_task_is(tmp_path, form, row, values):
    column = next(name for name, value in row.items() if value == "?")
    rows = [{**row, column: text} for text in TEXTS]
    for text in TEXTS:
        save(tmp_path, b"", text)  # where it is an image
    task = read(tmp_path, rows)
    first = task.examples[0].values
    assert (task.name, task.form, len(task.examples)) == ("task", form, COUNT)
    assert {name: first[name] for name in values} == values
    assert str(first[FORMS[form].columns[0]]).endswith(TEXTS[0])
    assert task.direction == (-1 if form == "texts" else 1)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "x", "anser": "y"}, ("prompt, anser", "answer is not there", "'anser'?")),
        ({"x": 1}, ("the columns x", "text + label")),
        ({"label": "x"}, ("the columns label", "text is not there")),
        ({"choices": ["a"], "answer": "a"}, ("prompt is not there", "prompt + choices + answer")),
        ({"a": "x", "score": 1}, ("b is not there",)),
        ({"instruction": "x", "input": "y", "output": "z"}, ("instruction and input", "rename")),
    ],
)  # fmt: skip
def test_columns_that_fit_nothing_are_named_with_those_that_are_needed(tmp_path, row, said):
    message = refused(tmp_path, jsonl([row] * COUNT))
    assert [word for word in said if word not in message] == []


# ---------------------------------------------------------------- files


def as_csv(rows: list[dict[str, Any]], delimiter: str = ",", end: str = "\n", **how: Any) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], delimiter=delimiter, lineterminator=end, **how)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


ODD = [{"prompt": f'{t}, "so"; \t to\nsay —', "answer": f"{n} |"} for n, t in enumerate(TEXTS)]
FILES = {
    "a.jsonl": jsonl(ODD),
    "b.ndjson": "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ODD),
    "c.json": json.dumps(ODD, indent=2),
    "d.JSONL": "\ufeff" + jsonl(ODD),
    "e.csv": as_csv(ODD),
    "f.csv": "\ufeff" + as_csv(ODD, ";", "\r\n"),
    "g.tsv": as_csv(ODD, "\t") + "\n",
    "h.csv": as_csv(ODD).replace("prompt,answer", ' Prompt ,"ANSWER"'),
}


@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_the_same_task(tmp_path, name):
    (task,) = read_tasks([save(tmp_path, FILES[name], name)])
    expected = read(tmp_path, ODD, f"{task.name}.jsonl")
    assert task == expected
    assert task.examples[2].values["prompt"] == ODD[2]["prompt"]


def test_parquet_gives_the_same_task(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        assert "pip install pyarrow" in refused(tmp_path, b"PAR1", "task.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ODD), tmp_path / "task.parquet")
    assert read_tasks([tmp_path / "task.parquet"]) == [read(tmp_path, ODD)]
    assert "Parquet" in refused(tmp_path, b"PAR1", "task.parquet")


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_read_as_it_is_from_every_format(tmp_path, text):
    rows = [*questions()[1:], {"prompt": f"x{text}", "answer": f"y{text}"}]
    tasks = [
        read_tasks([save(tmp_path, made, f"task.{suffix}")])[0]
        for suffix, made in (
            ("jsonl", jsonl(rows)), ("json", json.dumps(rows)),
            ("csv", as_csv(rows, quoting=csv.QUOTE_ALL)), ("tsv", as_csv(rows, "\t", "\r\n")),
        )
    ]  # fmt: skip
    assert tasks[0] == tasks[1] == tasks[2] == tasks[3]
    values = tasks[0].examples[-1].values
    assert (values["prompt"], values["written"]) == (f"x{text}", [f"y{text}"])


LINE = jsonl(questions()[:1])
PAIR = '{"a": "x", "b": "y", "score": "much"}\n'
CHOICE = '{"prompt": "x", "choices": ["a", "b"], "answer": "%s"}\n'


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.jsonl", f"{LINE}\n{{]", ("line 3", "JSON", "character 2")),
        ("t.jsonl", f"{LINE}[1]", ("line 2", "JSON object")),
        ("t.jsonl", LINE.encode() + b'{"prompt": "\xff"}', ("line 2", "UTF-8")),
        ("t.jsonl", f'{LINE}{{"prompt": " ", "answer": 1}}', ("line 2", "no prompt")),
        ("t.jsonl", f'{LINE}{{"prompt": "x"}}', ("line 2", "no answer")),
        ("t.jsonl", '{"question": "x", "answer": "y"}\n{"answer": "y"}', ("line 2", "no question")),
        ("t.json", "[1]", ("element 1", "JSON object")),
        ("t.json", '[{"prompt": "x"', ("JSON list",)),
        ("t.json", "[" * 100_000, ("JSON list",)),
        ("t.csv", "prompt,answer\nx,y\nx,y,z\n", ("line 3", "3 cells", '","', "quotes")),
        ("t.csv", 'prompt;answer\n"x\nx";y\nx\n', ("line 4", "1 cells", '";"')),
        ("t.csv", 'prompt,answer\nx,"y\n', ("line 2",)),
        ("t.jsonl", PAIR, ("line 1", "number", "'much'")),
        ("t.jsonl", PAIR.replace('"much"', "NaN"), ("line 1", "number", "nan")),
        ("t.jsonl", '{"image": "no.png", "label": 1}', ("line 1", "no.png")),
        ("t.jsonl", '{"prompt": "x", "pattern": "("}', ("line 1", "pattern")),
        ("t.jsonl", CHOICE % "a" + CHOICE % "c?", ("line 2", "'c?'", "choices")),
        ("t.jsonl", CHOICE % "(AB)", ("line 1", "'(AB)'", "choices")),  # is not one letter
        ("t.jsonl", CHOICE.replace('"b"', '"a"') % "a", ("line 1", "two or more")),
        ("t.jsonl", CHOICE.replace('["a", "b"]', "3") % "a", ("line 1", "two or more")),
        ("t.csv", "prompt,choices,answer\nx,[a|b],a\n", ("line 2", "JSON")),
        ("t.jsonl", "\n \n", ("no examples",)),
        ("t.csv", "prompt,answer\n", ("no examples",)),
        ("t.csv", "", ("no examples",)),
        ("t.txt", "x", (".jsonl", ".csv")),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path, name, text, said):
    message = refused(tmp_path, text, name)
    assert [word for word in said if word not in message] == []


def test_tasks_are_named_after_their_files(tmp_path):
    names = ("math.jsonl", "a/code.jsonl", "b/code.csv")
    texts = (jsonl(questions()), jsonl(questions()), as_csv(questions()))
    files = [save(tmp_path, text, name) for name, text in zip(names, texts, strict=True)]
    assert [task.name for task in read_tasks(files)] == ["math", "a-code", "b-code"]
    same = save(tmp_path, jsonl(questions()), "a/code.ndjson")
    with pytest.raises(InputError, match=r"^a-code: 2 data files.*rename"):
        read_tasks([files[1], same])
    with pytest.raises(InputError, match=r"none\.jsonl"):
        read_tasks([tmp_path / "none.jsonl"])


# ---------------------------------------------------------------- sides


def sides(task: Task) -> dict[str, bool]:
    return {example.values["prompt"]: example.is_held_out for example in task.examples}


def test_about_a_third_is_held_out_and_new_lines_move_nothing(tmp_path):
    rows = [{"prompt": f"question {n}", "answer": n} for n in range(600)]
    before, after = sides(read(tmp_path, rows[100:500])), sides(read(tmp_path, rows[::-1]))
    assert 0.28 < sum(after.values()) / 600 < 0.39
    assert {prompt: after[prompt] for prompt in before} == before
    task = read(tmp_path, rows)
    assert len(task.ids(True)) == sum(after.values())
    assert sorted([*task.ids(False), *task.ids(True)]) == sorted(
        f"task/{n + 1}" for n in range(600)
    )


def test_equal_inputs_are_on_the_same_side_whatever_their_answers(tmp_path):
    rows = questions()
    rows += [{"prompt": f"  {row['prompt'].upper()} ", "answer": "other"} for row in rows]
    found = [example.is_held_out for example in read(tmp_path, rows).examples]
    assert found[:COUNT] == found[COUNT:]
    assert {True, False} <= set(found)


def test_a_group_is_on_one_side_and_in_the_ids(tmp_path):
    rows = [{**row, "group": n // 2} for n, row in enumerate(questions())]
    task = read(tmp_path, rows)
    found = [example.is_held_out for example in task.examples]
    assert found[::2] == found[1::2]
    assert found != [example.is_held_out for example in read(tmp_path, questions()).examples]
    assert [example.id for example in task.examples[:3]] == ["task/0/1", "task/0/2", "task/1/3"]


@pytest.mark.parametrize(
    ("rows", "count"),
    [
        (questions()[:11], "11 different examples"),
        (questions()[:3] * 10, "3 different examples"),
        ([{**row, "group": n % 5} for n, row in enumerate(questions())], "5 groups"),
    ],
)
def test_too_few_examples_are_refused(tmp_path, rows, count):
    message = refused(tmp_path, jsonl(rows))
    assert count in message
    assert "at least 12" in message


def test_of_too_many_examples_some_are_kept_by_their_hashes(tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "MOST_EXAMPLES", 60)
    rows = [{"prompt": f"question {n}", "answer": n, "group": n // 3} for n in range(300)]
    task = read(tmp_path, rows)
    assert 55 <= len(task.examples) <= 60
    (found,) = task.notices
    assert found.code == "examples_left_out"
    assert {"300", "60"} <= set(re.findall(r"\d+", found.text))
    groups = [example.id.split("/")[1] for example in task.examples]
    assert {groups.count(group) for group in groups} == {3}
    fewer = read(tmp_path, rows[:150])
    assert {e.values["prompt"] for e in fewer.examples} >= {
        e.values["prompt"] for e in task.examples if int(e.id.split("/")[1]) < 50
    }
    monkeypatch.setattr(data_files, "MOST_ROWS", 45)
    assert len(read(tmp_path, rows).examples) == 45


# ---------------------------------------------------------------- choices


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["red", "blue", " green "], [0, 2, 1]),
        (["0", "2", "1"], [0, 2, 1]),
        ([0, 2, 1], [0, 2, 1]),
        (["A", "c", "(b)"], [0, 2, 1]),
        (["A.", "C)", "B"], [0, 2, 1]),
    ],
)
@pytest.mark.parametrize("choices", [["red", "green", "blue"], "red|green | blue"])
def test_answers_are_texts_numbers_or_letters_of_choices(tmp_path, answers, expected, choices):
    rows = [
        {"prompt": text, "choices": choices, "answer": answers[n % 3]}
        for n, text in enumerate(TEXTS)
    ]
    found = [example.values for example in read(tmp_path, rows).examples]
    assert [values["answer"] for values in found[:3]] == expected
    assert found[0]["choices"] == ["red", "green", "blue"]


def test_one_reading_of_answers_holds_for_all_rows(tmp_path):
    rows = [{"prompt": t, "choices": ["2", "1", "0"], "answer": n % 3} for n, t in enumerate(TEXTS)]
    assert [e.values["answer"] for e in read(tmp_path, rows).examples[:3]] == [2, 1, 0]  # texts
    mixed = [*rows[:-1], {**rows[-1], "answer": "B"}]
    assert f"line {COUNT}: 'B'" in refused(tmp_path, jsonl(mixed))
    quoted = as_csv([{**row, "choices": '["2", "1", "0 | x"]', "answer": "A"} for row in rows])
    (task,) = read_tasks([save(tmp_path, quoted, "task.csv")])
    assert task.examples[0].values == {
        "prompt": TEXTS[0], "choices": ["2", "1", "0 | x"], "answer": 0,
    }  # fmt: skip


# ---------------------------------------------------------------- generated answers


@pytest.mark.parametrize(
    ("answer", "output", "right"),
    [
        ("1200", "That is 3 × 400 = 1,200.", True),
        ("$1,200.50", "It costs 1200.5 dollars", True),
        ("1000", "1e3", True),
        ("1e3", "about 1,000", True),
        ("72", "First 70, then 72", True),
        ("72", "72, not 70", False),  # the last number counts
        ("-5", "x = -5", True),
        ("5", "x = -5", False),
        ("5", "10-5", True),  # which is no minus
        ("0", "none", False),
        ("0", "0", True),
        (".5", "0.50", True),
        ("0.5", "1/2", True),
        ("3/4", "It is 6/8.", True),
        ("4", "3/4", False),
        ("50%", "50 percent", True),
        ("2", "x2", False),
        ("7", "1e99999999999999999999999", False),
        ("Paris", " paris. ", True),
        ("Paris", "It is Paris", False),
        ("New  York", "“new york”!", True),
        ("Straße", "STRASSE", True),
        ("3 apples", "3", False),  # is no number
        ("!", "!", True),
        ("?", "!", False),
    ],
)
def test_answers_are_compared_as_numbers_or_normalised_texts(answer, output, right):
    assert is_right({"answers": [answer]}, output) is right
    assert is_right({"answers": ["Lutetia", answer]}, output) is right  # any of several


def test_a_pattern_is_searched_for():
    values = {"pattern": re.compile(r"\bx=\d+$")}
    assert [is_right(values, text) for text in ("so x=12", "x=a", "ax=1")] == [True, False, False]


def test_what_follows_four_hashes_is_the_answer(tmp_path):
    rows = [
        {"prompt": t, "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n, t in enumerate(TEXTS)
    ]
    values = read(tmp_path, rows).examples[4].values
    assert (values["answers"], values["is_reasoned"]) == (["5"], True)
    assert values["written"] == [rows[4]["answer"]]
    assert is_right(values, "5 + 1 = 6\n#### 5\nand 7 more")
    assert not is_right(values, "4 + 1 = 5\n#### 6")
    assert is_right(values, "so it is 5")


# ---------------------------------------------------------------- examples that are alike


STORY = "Ann took the early train to Rome and saw her old friend number"


def test_near_duplicates_are_noticed_unless_they_are_grouped(tmp_path):
    rows = [{"text": f"{STORY} {'abcdefghij'[n % 10]} {TEXTS[n]}"} for n in range(COUNT)]
    assert [found.code for found in read(tmp_path, rows).notices] == []  # numbers differ
    same = [{"text": f"{STORY} {'abcdefghij'[n % 10]}"} for n in range(10)]
    mixed = [*({"text": text} for text in TEXTS), *same[:2]]
    (found,) = read(tmp_path, mixed).notices
    assert found.code == "alike_examples"
    assert "2 of 32" in found.text
    assert "group" in found.remedy
    assert read(tmp_path, [{**row, "group": n} for n, row in enumerate(mixed)]).notices == ()
    few = [{"text": f"sentence {n} about {n}"} for n in range(100)]
    assert read(tmp_path, [*few, *same[:2]]).notices == ()  # 2 of 102


def test_alike_texts_share_most_of_their_words_and_all_numbers():
    texts = [STORY, f"{STORY}!", STORY.replace("Rome", "Oslo")]
    assert count_alike(texts) == 3
    assert count_alike([f"{STORY} 1", f"{STORY} 2"]) == 0
    assert count_alike(["short text", "short words", "Short  TEXT."]) == 2
    words = "one two three four five six seven eight nine ten"
    assert count_alike([words, words.replace("one two", "a b")]) == 0  # 8 of 12
    assert count_alike([words, words.replace("one", "a")]) == 2  # 9 of 11
    assert count_alike([]) == 0
