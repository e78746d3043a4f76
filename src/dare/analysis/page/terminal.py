"""An analysis on one screen of a terminal: what decides, and what to type next.

A line for each model, what is notable, and the gravest findings; the page has the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from dare.analysis.judge.groups import every, said_cosines
from dare.analysis.judge.judgement import GRAVITY, Advice, Finding, Readiness, Severity, Verdict
from dare.analysis.judge.readiness import RULES, chance_cancelled
from dare.analysis.page.words import FEW_WORDS, few_words, headline, origin
from dare.analysis.results import Analysis
from dare.documents.terminal import can_write, cut_middle, make_table, shorten
from dare.documents.words import listed, setting, share, times
from dare.errors import printable
from dare.output.places import short_name

LABEL = 9
"""Columns before the text of a line with a label."""
PADDING = 11
"""Columns between and around the four of the table."""
SHOWN = 3
"""How many names and pairs a line lists, and how many findings are shown."""

VERDICTS = {
    Verdict.NO_DEFECT: "bold green",
    Verdict.WITH_CHANGES: "bold yellow",
    Verdict.UNFIT: "bold red",
}
MARKS = {Verdict.NO_DEFECT: "✓", Verdict.WITH_CHANGES: "!", Verdict.UNFIT: "✗"}
PLAIN_MARKS = {Verdict.NO_DEFECT: "+", Verdict.WITH_CHANGES: "!", Verdict.UNFIT: "x"}
"""Where the encoding has no others."""
SEVERITIES = {Severity.STOP: "bold red", Severity.CHANGE: "bold yellow", Severity.NOTE: "bold"}

COSINES = ("cosine", "largest_cosine")
"""Figures of a finding about several models: the least cosine of two of them, and the largest."""
RELATIONS = {rule.name: rule.together for rule in RULES if rule.together}
"""Rules about models that are notable together."""
MISPLACED = ("contained", "other_base")
"""Those that ask whether the base is the right one."""


class Names:
    """The models' names as they fit into a terminal, also inside sentences."""

    def __init__(self, names: Iterable[str], console: Console) -> None:
        self.short: Mapping[str, str] = shorten(names, max(12, console.width // 4))

    def __getitem__(self, name: str) -> str:
        return self.short[name]

    def in_text(self, text: str) -> str:
        """A text in which long names are short."""
        for name in sorted(self.short, key=len, reverse=True):
            if name != self.short[name]:
                text = text.replace(name, self.short[name])
        return printable(text)

    def list(self, names: tuple[str, ...]) -> str:
        """The first few of some names."""
        some = [self[name] for name in names[:SHOWN]]
        more = len(names) - SHOWN
        return listed((*some, f"{more} more") if more > 0 else tuple(some))


def show_summary(
    console: Console, analysis: Analysis, readiness: Readiness, advice: Advice
) -> None:
    """Show the verdict, a line for each model, how they overlap and how to merge them."""
    names = Names(analysis.names, console)
    title = headline(readiness)
    onto = f"{times(len(analysis.models), 'model')} onto "
    base = cut_middle(printable(short_name(analysis.base)), console.width - len(title + onto) - 2)
    console.print(Text.assemble((title, VERDICTS[readiness.verdict]), f"  {onto}{base}"))
    if not analysis.models:
        return
    _show_models(console, analysis, readiness, names)
    if analysis.pairs:
        print_labelled(console, "Overlap", _overlap(analysis, readiness, names))
        print_labelled(console, "", _cancelled(analysis, advice))
    print_labelled(console, "Advice", _advised(advice, names))


def _show_models(console: Console, analysis: Analysis, readiness: Readiness, names: Names) -> None:
    marks = MARKS if can_write(console, "".join(MARKS.values())) else PLAIN_MARKS
    rows = []
    for model in analysis.models:
        verdict = readiness.by_model[model.name]
        words = _few_words(readiness, model.name, names)
        cells = names[model.name], share(model.total.relative_norm), origin(model)
        rows.append((*cells, Text.assemble((marks[verdict], VERDICTS[verdict]), f" {words}")))
    headers = ("model", "change", "origin")
    taken = sum(
        max(map(cell_len, column)) for column in zip(headers, *(r[:3] for r in rows), strict=True)
    )
    table = make_table("model", "change >", "origin", "")
    table.columns[-1].max_width = max(console.width - taken - PADDING, 2)
    for row in rows:
        row[-1].truncate(table.columns[-1].max_width, overflow="ellipsis")
        table.add_row(*map(Text, row[:3]), row[-1])
    console.print(table)


def _few_words(readiness: Readiness, model: str, names: Names) -> str:
    """The gravest finding about a model; one that names it counts more than one about all."""
    about = [f for f in readiness.of(model) if f.rule in FEW_WORDS]
    about.sort(key=lambda f: (GRAVITY.index(f.severity), not f.models))
    verdict = readiness.by_model[model]
    if not about or (verdict is Verdict.NO_DEFECT and not about[0].models):
        return str(verdict)
    said = few_words(about[0], model, names.list)
    return f"{verdict}: {said}" if verdict is Verdict.NO_DEFECT else said


# ---------------------------------------------------------------- all models together


def _overlap(analysis: Analysis, readiness: Readiness, names: Names) -> str:
    """What is notable between models, or that nothing is."""
    notable = [
        f"{names.list(finding.models)} {_relation(finding)}{_in_cosine(finding)}"
        for finding in sorted(readiness.findings, key=lambda each: each.rule not in MISPLACED)
        if finding.rule in RELATIONS
    ]
    if not notable:
        cosines = said_cosines([pair.total.cosine for pair in analysis.pairs])
        return f"no two models are alike or opposed; {cosines}"
    more = len(notable) - SHOWN
    return "; ".join([*notable[:SHOWN], *([f"{more} more"] if more > 0 else [])])


def _relation(finding: Finding) -> str:
    if finding.rule == "multiple" and min(finding.figures.values()) < 0:
        return "are opposite" if len(finding.models) == 2 else "are multiples, some opposite"
    return RELATIONS[finding.rule]


def _in_cosine(finding: Finding) -> str:
    ends = [finding.figures[name] for name in COSINES if name in finding.figures]
    asks = ": is the base itself a fine-tune?" if finding.rule in MISPLACED else ""
    return f" ({said_cosines(ends)}){asks}" if ends else asks


def _cancelled(analysis: Analysis, advice: Advice) -> str:
    together, chance = analysis.together.cancelled, chance_cancelled(analysis)
    whose = f"{every(len(analysis.models))} " if advice.left_out else ""
    cancels = f"{share(together)} of all change cancels; by chance about {share(chance)}"
    return f"{whose}added up, {cancels}"


def _advised(advice: Advice, names: Names) -> str:
    """How to merge, in a line."""
    if not advice.recipe:
        return "none of the models should be merged"
    scale = advice.recipe.get("scale")
    said = [advice.recipe["method"], f"scale {setting(scale)}" if scale else ""]
    said.append(f"without {names.list(advice.left_out)}" if advice.left_out else "")
    return ", ".join(filter(None, said))


# ---------------------------------------------------------------- findings


def show_gravest(console: Console, analysis: Analysis, readiness: Readiness) -> str:
    """Show what stands against a merge and what to do; return what is not on the screen."""
    names = Names(analysis.names, console)
    against = [f for f in readiness.findings if f.severity is not Severity.NOTE]
    if against:
        console.print()
    for finding in against[:SHOWN]:
        several = len(finding.models) > 1 and all(name in finding.seen for name in finding.models)
        whose = f"{names.list(finding.models)}: " if finding.models and not several else ""
        seen = Text.assemble((whose, "bold"), names.in_text(finding.seen))
        label = finding.severity.capitalize()
        print_labelled(console, label, seen, SEVERITIES[finding.severity])
        print_labelled(console, "  remedy", names.in_text(finding.remedy), "dim")
    hidden, notes = len(against) - SHOWN, len(readiness.findings) - len(against)
    rest = [times(hidden, "more finding")] if hidden > 0 else []
    rest += [times(notes, "note")] if notes else []
    return listed((*rest, "all figures", "the reasons"))


def print_labelled(console: Console, label: str, text: str | Text, style: str = "bold") -> None:
    """A text after its label, in lines that begin in one column."""
    whole = text if isinstance(text, Text) else Text(printable(text))
    for line in whole.wrap(console, max(console.width - LABEL, 20)) or [Text()]:
        line.rstrip()
        console.print(Text.assemble((f"{label:{LABEL}}", style), line))
        label = ""
