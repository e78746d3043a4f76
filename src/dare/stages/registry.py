"""Stages, and the one table of them.

A stage is a function with keyword-only parameters. Those parameters, their defaults and their
ranges are the recipe's schema; its docstring is its documentation. There are three kinds:

- a *delta stage* changes a block, one model's delta over a chunk:
  `dare(block, *, drop_rate, rescale)`
- a *combine stage* turns the deltas of all models over a chunk into one:
  `linear(deltas)`
- a *refine stage* turns the merged delta into another, and sees what was merged:
  `svc(merged, deltas, weights, *, alpha)`. It sees matrices.

A stage declares in `sees` how much it must have seen before it can work on a chunk:

- `element`: nothing; any chunk will do
- `tensor`: something of the whole tensor. It has a *survey*: a function of a view of the tensor
  and the same parameters; its result is in `summary` later. A stage that must know something of
  all tensors of a model has a *census* before its surveys.
- `matrix`: the whole matrix at once. It is registered by `matrices`, as a function of matrices.

A *method* is a chain of stages, written `dare+ties`; some chains have other names too. Stages may
lie in a file or in another package that is installed. A file registers its stages when it is run,
as the files here do. A package names the modules that register its stages as entry points of the
group `dare.stages`.
"""

from __future__ import annotations

import copyreg
import importlib.util
import inspect
import json
import os
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from importlib.machinery import PathFinder
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from dare.documents.document import Columns, Document, Part, Section, Table, tabulate
from dare.documents.values import Limits, WrongValueError, check_of, form_of
from dare.documents.words import counted, exact_text
from dare.errors import InputError, RecipeError, did_you_mean, warn_caller
from dare.tensors.chunks import bytes_digest

Kind = Literal["delta", "combine", "refine"]
Settings = Mapping[str, Any]  # parameter values of one stage, complete and checked
Check = Callable[[Settings], None]
# Memory by the shape of a tensor and the number of models that are surveyed together.
SurveyBytes = Callable[[tuple[int, ...], int], int]
TensorPredicate = Callable[[Settings, str, tuple[int, ...]], bool]  # by a tensor's name and shape


def meaning(text: str, **limits: Any) -> Limits:
    """Describe a parameter for people, and limit its values, as in `meaning("…", ge=0, lt=1)`."""
    return Limits(text, **limits)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a stage: its place in the recipe, its default and its check."""

    name: str
    default: Any
    hint: Any = field(repr=False, compare=False)

    @cached_property
    def _check_type(self) -> Callable[[Any], Any]:
        return check_of(self.hint)

    @cached_property
    def _schema(self) -> dict[str, Any]:
        return form_of(self.hint)

    @property
    def description(self) -> str:
        """Its meaning, in a line."""
        return str(self._schema.get("description", ""))

    @property
    def range(self) -> str:
        """The values it may have, for people: `0 ≤ x < 1`."""
        return " or ".join(_described(choice) for choice in _choices(self._schema))

    @property
    def is_number(self) -> bool:
        """True if it is measured, so that it may change from layer to layer."""
        return any(choice.get("type") == "number" for choice in _choices(self._schema))

    @property
    def control(self) -> dict[str, Any]:
        """The form of its input field: `type`, with its `options` or limits, and `optional`.

        The type is "boolean", "choice", "number" or "integer". Limits are named as in JSON Schema.
        """
        kinds = _choices(self._schema)
        is_optional = len(kinds) < len(self._schema.get("anyOf", kinds))
        return {**_control(kinds), "optional": is_optional}

    def check(self, value: Any, where: str) -> Any:
        """Return the value if it fits, else say where it does not.

        A number may also be a list of numbers: its values from the first layer to the last.
        """
        if not (self.is_number and isinstance(value, list | tuple)):
            return self._check_one(value, where)
        if not value:
            raise RecipeError(f"{where}{self.name} = []: needs at least one number")
        for number in value:
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise RecipeError(f"{where}{self.name} = {list(value)}: {number!r} is not a number")
        return [self._check_one(number, where) for number in value]

    def _check_one(self, value: Any, where: str) -> Any:
        try:
            return self._check_type(value)
        except WrongValueError as fault:
            reason = fault.text if fault.cause else f"{self.name} = {value!r}: {fault.text}"
            raise RecipeError(where + reason) from None


_LOWER = {"minimum": "≤", "exclusiveMinimum": "<"}
_UPPER = {"maximum": "≤", "exclusiveMaximum": "<"}


def _choices(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the alternatives of a form, without the one that stands for `not given`."""
    return [choice for choice in schema.get("anyOf", [schema]) if choice.get("type") != "null"]


def _described(schema: Mapping[str, Any]) -> str:
    if values := _values(schema):
        return ", ".join(map(json.dumps, values))
    low = [f"{schema[key]} {sign} " for key, sign in _LOWER.items() if key in schema]
    high = [f" {sign} {schema[key]}" for key, sign in _UPPER.items() if key in schema]
    return "".join([*low, "x", *high]) if low or high else str(schema["type"])


def _control(kinds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if len(kinds) == 1 and "enum" not in kinds[0]:
        (kind,) = kinds
        return {name: kind[name] for name in ("type", *_LOWER, *_UPPER) if name in kind}
    return {"type": "choice", "options": [value for kind in kinds for value in _values(kind)]}


def _values(schema: Mapping[str, Any]) -> Sequence[Any]:
    """Return all values of a type that has few; none of any other."""
    values: Sequence[Any] = schema.get("enum", ())
    return (True, False) if schema.get("type") == "boolean" else values


@dataclass(frozen=True)
class Round:
    """Observations of every tensor of a census, in any order, and a conclusion from them all.

    `known` is the conclusion of the round before.
    """

    # `observe(view, known, **settings)` returns the observation of one tensor.
    observe: Callable[..., Any]
    # `conclude(observed, known, **settings)` has the observations by tensor, ordered by name.
    conclude: Callable[..., Any]
    # False where the round is not needed, since the conclusion before it stands.
    when: Callable[[Any], bool] = lambda _known: True


@dataclass(frozen=True)
class Census:
    """A survey of all tensors of a model that have the same settings of a stage.

    The conclusion of the last round, a mapping by tensor, is in `view.census` for the surveys.
    """

    when: Callable[[Settings], bool]
    rounds: tuple[Round, ...]
    observation_bytes: int


Predicate = Callable[[Settings], bool]


def always(_settings: Settings) -> bool:
    """Hold for all parameters."""
    return True


def _never(_settings: Settings) -> bool:
    return False


@dataclass(frozen=True)
class Stage:
    """A registered stage. The fields from `paper` on are the arguments of the decorators, and
    `parameters` where a decorator has some for all of its stages.

    Predicates hold for some parameters of the stage.
    """

    name: str
    kind: Kind
    apply: Callable[..., Any]
    parameters: Mapping[str, Parameter]
    paper: str = ""
    sees: Literal["element", "tensor", "matrix"] = "element"
    survey: Callable[..., Any] | None = None
    surveys_when: Predicate = always
    surveys_tensor: TensorPredicate = lambda *_: True  # False for tensors that it need not see
    # Memory that a survey takes beyond its spare bytes.
    survey_bytes: SurveyBytes = lambda _shape, _models: 0
    # The part of that memory which it leaves behind; None: all.
    kept_bytes: SurveyBytes | None = None
    census: Census | None = None
    # The ranks of magnitudes, from the largest on, that its survey of so many elements asks for.
    ranks: Callable[[Settings, int], Sequence[int]] = lambda _settings, _elements: ()
    check: Check = lambda _settings: None
    # Says why a combine stage cannot take such weights, and the remedy; empty if it can.
    weights_fault: Callable[[Settings, Sequence[float]], str] = lambda _settings, _weights: ""
    is_random: Predicate = _never  # True if it draws from the mask; it then has `block.key`
    # True if it only drops by its mask at `drop_rate` and multiplies: it may do so twice.
    only_masks: Predicate = _never
    # True if it leaves every delta as it is; a combine or refine stage, one delta of weight 1, if
    # all others have the weight 0.
    is_identity: Predicate = _never
    # True if it leaves values and figures to the backend; else it computes on arrays with NumPy, on
    # the CPU.
    is_lazy: Predicate = _never
    # A model's weight when the recipe gives none, from the number of models; None: unweighted.
    default_weight: Callable[[int], float] | None = lambda _models: 1.0
    models: int | None = None  # the number of models that a combine stage takes, if not any
    # The settings with which it interpolates between whole models, one of which may be the base;
    # None: it combines changes to the base.
    interpolates: Settings | None = None
    # True if chance decides what of a change is kept, as in DARE: large changes suffer.
    drops_at_random: bool = False
    # True if the models vote on each element, so that a small change loses to a large one.
    votes: bool = False
    on_gpu: bool = False  # True if its survey, of matrices, also computes on arrays of a GPU
    takes_grams: bool = False  # True if it takes Gram matrices of layers' inputs, `view.grams`
    needs_base: Predicate = _never  # True if it looks at whole tensors, not at changes alone
    is_sum: Predicate = _never  # True if the result is Σ wᵢ·δᵢ, with the weights as they are
    for_delta_files: bool = False  # True if it decides what delta files keep
    # True if it takes the whole of every change, so that what models share counts repeatedly.
    adds_up: bool = False
    # Its origin outside this package: a file's digest, or a package and its version.
    origin: str = ""
    file: str = ""  # the file that registers it, if that lies outside of all packages

    @property
    def can_only_mask(self) -> bool:
        """Tell if there are parameters for which it only drops by its own mask."""
        return self.only_masks is not _never

    def asks(self, settings: Settings) -> bool:
        """Return whether it must see the whole of some tensors first, for these parameters."""
        return self.survey is not None and self.surveys_when(settings)

    def surveys(self, settings: Settings, tensor: str, shape: tuple[int, ...]) -> bool:
        """Return whether it must see the whole of a tensor first, for these parameters."""
        return self.asks(settings) and self.surveys_tensor(settings, tensor, shape)

    def left_bytes(self, shape: tuple[int, ...], models: int) -> int:
        """Return the memory that its survey of a tensor leaves behind."""
        return (self.kept_bytes or self.survey_bytes)(shape, models)

    def rounds(self, settings: Settings) -> tuple[Round, ...]:
        """Return the rounds of the census that these settings ask for, if any."""
        return self.census.rounds if self.census and self.census.when(settings) else ()

    @property
    def observation_bytes(self) -> int:
        """The most memory that the census's observation of one tensor takes."""
        return self.census.observation_bytes if self.census else 0

    @property
    def documentation(self) -> str:
        """Its docstring: its effect, its formula and the meaning of its parameters."""
        return inspect.getdoc(self.apply) or ""

    @property
    def summary(self) -> str:
        """Its effect, in a line."""
        return self.documentation.partition("\n")[0]

    def settings(self, given: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Fill in defaults and check every value."""
        for name in given:
            if name not in self.parameters:
                fault = f"{self.name} has no such parameter{did_you_mean(name, self.parameters)}"
                known = ", ".join(self.parameters) or "none"
                raise RecipeError(f"{where}{name}: {fault}; it has: {known}")
        return {
            name: parameter.check(given[name], where) if name in given else parameter.default
            for name, parameter in self.parameters.items()
        }


_NAMES = tomllib.loads(files("dare.stages").joinpath("names.toml").read_text("utf-8"))
# Later parameters and their defaults, which a header leaves out so that old bytes stay.
LATER_PARAMETERS = tuple(
    (stage, *later) for stage, table in _NAMES["later"].items() for later in table.items()
)
STAGES: dict[str, Stage] = {}
Function = TypeVar("Function", bound=Callable[..., Any])


def find_stage(**declared: Any) -> Stage:
    """Return the first stage that declares this.

    >>> find_stage(for_delta_files=True).name, find_stage(adds_up=True).name
    ('dare', 'sum')
    """
    return next(
        stage
        for stage in STAGES.values()
        if all(getattr(stage, name) == value for name, value in declared.items())
    )


def delta_stage(**declared: Any) -> Callable[[Function], Function]:
    """Register a function of one block as a delta stage; `Stage` says what can be declared."""
    return partial(_register, "delta", declared)


def combine_stage(**declared: Any) -> Callable[[Function], Function]:
    """Register a function of all models' deltas as a combine stage, likewise."""
    return partial(_register, "combine", declared)


def refine_stage(**declared: Any) -> Callable[[Function], Function]:
    """Register a function of the merged matrix and all models' as a refine stage, likewise."""
    return partial(_register, "refine", declared)


def _register(kind: Kind, declared: Mapping[str, Any], function: Function) -> Function:
    name = function.__name__
    if name in STAGES:
        raise RecipeError(f"there is already a stage {name!r}; give the new one another name")
    if (declared.get("sees", "element") == "element") != (declared.get("survey") is None):
        raise TypeError(f'{name}: a stage with sees = "tensor" has a survey, and no other does')
    hints = get_type_hints(function, include_extras=True)
    parameters = {
        parameter.name: Parameter(parameter.name, parameter.default, hints[parameter.name])
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    for parameter in parameters.values():
        check_of(parameter.hint)  # refuses a type that values cannot be checked against
    parameters |= declared.get("parameters", {})
    STAGES[name] = Stage(name, kind, function, **{**declared, "parameters": parameters})
    return function


def list_in_order() -> None:
    """Put the table into the order in which stages are shown."""
    for name in (*_NAMES["listed"], *(name for name in STAGES if name not in _NAMES["listed"])):
        STAGES[name] = STAGES.pop(name)


# ---------------------------------------------------------------- methods


# Names that people bring along, as chains of ours.
ALIASES: dict[str, str] = _NAMES["aliases"]
# Parameters of combine stages that, when given, put a delta stage before them.
IMPLIED = {("ties", "keep_ratio"): "trim"}
# The kinds of stages in the order of a chain, each with what its stages do.
KINDS: dict[Kind, str] = {
    "delta": "Delta stages change each model's delta; any number, in the order given.",
    "combine": "Combine stages merge all the deltas into one; exactly one, after the delta stages.",
    "refine": "Refine stages change the merged delta; any number, after the combine stage.",
}
GROUP = "dare.stages"
MAX_MODELS = 8  # the largest number of models whose default weights are listed


def stage_named(name: str, file: str = "") -> Stage:
    """Return the stage of that name; register it first, from its file or its package."""
    if name not in STAGES and file:
        load_stages(file)
    elif name not in STAGES:
        load_installed_stages()
    if name not in STAGES and name in _NAMES["gone"]:
        raise RecipeError(f"{name}: was taken out after version 0.1.0: {_NAMES['gone'][name]}")
    if name not in STAGES:
        raise RecipeError(
            f"there is no stage {name!r}{did_you_mean(name, [*STAGES, *ALIASES])}; "
            "`dare methods` lists all; name the file of a stage of your own with --stage FILE"
        )
    return STAGES[name]


def parse_method(method: str) -> tuple[Stage, ...]:
    """Turn `"dare+ties"`, or an alias such as `"DARE_TIES"`, into its stages.

    >>> [stage.name for stage in parse_method("DARE_TIES")]
    ['dare', 'ties']
    """
    chain = ALIASES.get(method) or ALIASES.get(method.lower(), method)
    stages = []
    for name in chain.split("+"):
        try:
            stages.append(stage_named(name if name in STAGES else name.lower()))
        except RecipeError as error:
            raise RecipeError(f"method {method!r}: {error}") from None
    for stage in stages:
        if stages.count(stage) > 1:
            raise RecipeError(f"method {method!r}: {stage.name} appears in it more than once")
    kinds = [stage.kind for stage in stages]
    if kinds.count("combine") != 1 or kinds != sorted(kinds, key=list(KINDS).index):
        named = {kind: ", ".join(stage.name for stage in of_kind(kind)) for kind in KINDS}
        raise RecipeError(
            f"method {method!r}: a method is any delta stages, then one combine stage "
            f"({named['combine']}), then any refine stages ({named['refine']}), as in "
            "'dare+linear' or 'dare+linear+svc'"
        )
    return tuple(stages)


def of_kind(kind: Kind) -> list[Stage]:
    """Return all stages of a kind."""
    return [stage for stage in STAGES.values() if stage.kind == kind]


def combine_of(chain: Iterable[Stage]) -> Stage:
    """Return the combine stage of a chain.

    >>> combine_of(parse_method("dare+linear+svc")).name
    'linear'
    """
    return next(stage for stage in chain if stage.kind == "combine")


def takers(chain: Sequence[Stage], name: str) -> list[Stage]:
    """Return the stages of a chain that a parameter is for, if no stage is named.

    A later parameter is meant only where no other stage has one of that name.

    >>> [stage.name for stage in takers(parse_method("dare+trim+ties"), "rescale")]
    ['dare']
    """
    having = [stage for stage in chain if name in stage.parameters]
    later = {(stage, parameter) for stage, parameter, _ in LATER_PARAMETERS}
    return [stage for stage in having if (stage.name, name) not in later] or having


# A stage travels by its name and file: where it arrives, it is registered too.
copyreg.pickle(Stage, lambda stage: (stage_named, (stage.name, stage.file)))


# ---------------------------------------------------------------- stages from outside


def load_stages(path: str | PathLike[str]) -> tuple[str, ...]:
    """Run a Python file that registers stages; return their names.

    The file is a program like any other: run only what you trust. A file that was run before is not
    run again.
    """
    file = Path(path).expanduser().resolve()
    loaded = tuple(name for name, stage in STAGES.items() if stage.file == str(file))
    if loaded:
        return loaded
    try:
        origin = f"file {bytes_digest(file.read_bytes())}"
    except OSError as error:
        raise InputError(f"{path}: cannot read the stage: {error.strerror or error}") from None
    names = _registered_by(lambda: _run(file), str(path), origin)
    for name in names:
        STAGES[name] = replace(STAGES[name], file=str(file))
    if not names:
        raise InputError(
            f"{path}: registers no stage; decorate a function with @delta_stage() or "
            "@combine_stage() of dare.stages.registry"
        )
    return names


def _may_be_installed() -> bool:
    """Return whether any package might bring stages, by its files, without `importlib.metadata`.

    That takes 35 ms.
    """
    others = [finder for finder in sys.meta_path if finder is not PathFinder]
    if any(hasattr(finder, "find_distributions") for finder in others):
        return True
    for place in sys.path:
        try:
            folders = [entry.path for entry in os.scandir(place or ".") if "-info" in entry.name]
        except NotADirectoryError:
            return True  # an archive
        except OSError:
            continue
        for folder in folders:
            with suppress(OSError):
                if GROUP.encode() in Path(folder, "entry_points.txt").read_bytes():
                    return True
    return False


@cache
def load_installed_stages() -> None:
    """Register the stages of installed packages; one that cannot be loaded is warned of."""
    if not _may_be_installed():
        return
    from importlib.metadata import entry_points

    for entry in entry_points(group=GROUP):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
        try:
            _registered_by(entry.load, package, f"package {package}")
        except InputError as error:
            warn_caller(str(error))


def _run(file: Path) -> None:
    name = f"dare_stages_in_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError("is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _registered_by(load: Callable[[], Any], where: str, origin: str) -> tuple[str, ...]:
    """Load something and say which stages it registered; all of them or, if it fails, none."""
    before = set(STAGES)
    try:
        load()
    except Exception as error:
        for name in STAGES.keys() - before:
            del STAGES[name]
        raise InputError(
            f"{where}: its stages cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    names = tuple(name for name in STAGES if name not in before)
    for name in names:
        STAGES[name] = replace(STAGES[name], origin=origin)
    return names


# ---------------------------------------------------------------- as plain values


def catalogue(names: Iterable[str]) -> dict[str, Any]:
    """Return these stages with all that is known of them, and every alias."""
    return {"stages": [_stage(STAGES[name]) for name in names], "aliases": dict(ALIASES)}


def _stage(stage: Stage) -> dict[str, Any]:
    """Describe a stage; one that combines also has `models` and `default_weight`.

    `models` is the number it takes, if not any. `default_weight` lists the weight of each of one,
    two … models; there is none where models have no weight.
    """
    facts = ("name", "kind", "summary", "documentation", "paper")
    shown = {fact: getattr(stage, fact) for fact in facts}
    shown["parameters"] = [
        {fact: getattr(parameter, fact) for fact in ("name", "default", "range", "description")}
        | parameter.control
        for parameter in stage.parameters.values()
    ]
    if stage.kind == "combine":
        weigh = stage.default_weight
        counts = range(1, MAX_MODELS + 1)
        shown["models"] = stage.models
        shown["default_weight"] = None if weigh is None else [weigh(count) for count in counts]
    return shown


def explain(names: Sequence[str]) -> Iterator[Document]:
    """Yield a document for each stage that is named; without names, one with all of them."""
    for stage in (STAGES[name] for name in names):
        columns: Columns = {
            "parameter": lambda parameter: parameter.name,
            "default": lambda parameter: exact_text(parameter.default),
            "range": lambda parameter: parameter.range,
            "meaning": lambda parameter: parameter.description,
        }
        words = (" ".join(paragraph.split()) for paragraph in stage.documentation.split("\n\n"))
        parts: tuple[Part, ...] = (*words, tabulate(stage.parameters.values(), columns))
        yield Document(
            title=stage.name,
            kind="stage",
            lead=f"({stage.kind} stage)",
            sections=(Section("stage", stage.name, parts, is_brief=True),),
            facts=(("Paper", stage.paper),) if stage.paper else (),
        )
    if not names:
        yield _explain_all()


def _explain_all() -> Document:
    columns: Columns = {
        "stage": lambda stage: stage.name,
        "does": lambda stage: stage.summary,
        "parameters": lambda stage: ", ".join(
            f"{p.name}={exact_text(p.default)}" for p in stage.parameters.values()
        ),
        "paper": lambda stage: stage.paper,
    }
    tables = [tabulate(of_kind(kind), columns, title=title) for kind, title in KINDS.items()]
    tables.append(Table(("alias", "is"), tuple(ALIASES.items()), title="Other names"))
    return Document(
        title=f"{counted(len(STAGES), 'stage')}",
        kind="methods",
        lead="chain them as in dare+ties; `dare methods STAGE` explains one",
        sections=(Section("stages", "Stages", tuple(tables), is_brief=True),),
    )
