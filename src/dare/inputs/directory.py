"""The files beside the weights in a model folder, and those that go into an output.

Configuration, tokenizer, processors, sentence-transformers' folders, custom code and licences are
taken from one folder, file by file from a list of known names; weights, indexes, model cards,
optimizer states and everything unknown stay behind. Files are copied unchanged unless something in
them must change. Nothing outside the folder is read, whatever a name or a link says.
"""

from __future__ import annotations

import fnmatch
import math
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from dare.documents.notices import Notice, notice
from dare.errors import InputError, RecipeError, did_you_mean
from dare.inputs.quantised import quantisation_settings, tables_of
from dare.inputs.sources import CONFIG
from dare.stores.locations import is_stored, to_path
from dare.tensors.dtypes import MODEL_TYPES, StorageType
from dare.tensors.files import is_there, list_names, open_ordinary, read_limited
from dare.tensors.header import Described, dump_json, parse_json
from dare.tensors.names import some_of

GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"
MODULES = "modules.json"
MODELOPT_CONFIG = "hf_quant_config.json"  # says how weights are quantised

_FILES = tomllib.loads(files("dare.inputs").joinpath("files.toml").read_text("utf-8"))
CONFIGURATION, SENTENCE_TRANSFORMERS = _FILES["configuration"], _FILES["sentence_transformers"]
TOKENIZER = [*_FILES["tokenizer"], *_FILES["templates"]]
LICENCES, FETCHED = _FILES["licences"], _FILES["fetched"]  # of the hub
LEGAL = re.compile(_FILES["legal"], re.IGNORECASE)
_LEFT_SILENTLY = re.compile("|".join(_FILES["left_silently"]), re.IGNORECASE)
_TEMPLATE_TABLES = ("chat_template.json", TOKENIZER_CONFIG)  # of templates without their own file

MAX_JSON_BYTES = 256 << 20  # larger than any tokenizer, and can still be parsed
MAX_MODULE_FILES = 1000
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # in configurations
EXAMPLES = 5


@dataclass(frozen=True)
class StopTokens:
    """Tokens that end a text or pad one, from the files of one model."""

    special: Mapping[str, Any]  # `eos_token` and `pad_token` of tokenizer_config.json
    config: Mapping[str, Any]  # `eos_token_id` and `pad_token_id` of config.json
    generation: Mapping[str, Any] | None  # of generation_config.json, with `stop_strings`

    def texts(self, tokens: Mapping[str, int] | None) -> frozenset[str]:
        """Return the tokens that end a text; `tokens` are those of the same model."""
        names = {number: token for token, number in (tokens or {}).items()}
        ids = _whole_numbers((self.generation or self.config).get("eos_token_id"))
        by_id = {names.get(number) for number in ids}
        special = {token_text(self.special.get("eos_token"))}
        return frozenset(text for text in (special if by_id <= {None} else by_id) if text)


@dataclass(frozen=True)
class Changes:
    """Changes to an output's configuration; quantised weights never stay so."""

    dtype: StorageType | None = None
    vocab_size: tuple[int, int] | None = None  # rows of the embedding, before and after
    # The output's id for each token id of the folder's model, if its tokenizer is another.
    token_ids: Mapping[int, int | None] | None = None
    chat_template: str | None = None
    stop_tokens: StopTokens | None = None  # if files come from several folders
    tokens: Mapping[str, int] | None = None  # the output's, if known: only those can end a text
    layers: Sequence[tuple[Path | None, int]] = ()  # of a stack: folder and number of each layer
    config: Mapping[str, Any] = field(default_factory=dict)  # further values of config.json
    recoded: Mapping[str, Any] = field(default_factory=dict)  # values for the output's format


def main_type(tensors: Iterable[Described]) -> StorageType | None:
    """Return the storage type that most weights of an output have.

    >>> from dare.tensors.dtypes import STORAGE_TYPES
    >>> shapes = {"BF16": (8, 8), "F32": (8,), "I64": (99,)}
    >>> main_type((name, STORAGE_TYPES[name], shape) for name, shape in shapes.items()).name
    'BF16'
    """
    elements: Counter[StorageType] = Counter()
    for _, kind, shape in tensors:
        if kind.is_weight:
            elements[kind] += math.prod(shape)
    return min(elements, key=lambda kind: (-elements[kind], kind.name), default=None)


# ---------------------------------------------------------------- collecting


def collect(
    directory: Path,
    changes: Changes | None = None,
    *,
    tokenizer: Path | None = None,
    replaced: Mapping[str, bytes] | None = None,
) -> Sidecars:
    """Collect the files of a folder that go beside the weights of an output, with changes.

    The tokenizer's files come from the folder `tokenizer` if it is given; `replaced` has those
    whose content is already decided.
    """
    changes = changes or Changes()
    gathered = Sidecars(directory)
    modules = list(gathered.module_files())
    top = list_names(directory)
    gathered.take(directory, _named(directory, (*CONFIGURATION, *SENTENCE_TRANSFORMERS)))
    gathered.take(directory, [*modules, *(name for name in top if LEGAL.fullmatch(name))])
    gathered.take(tokenizer or directory, _named(tokenizer or directory, TOKENIZER))
    gathered.files |= replaced or {}
    gathered.take_code()
    if changes.chat_template is not None:
        gathered.set_chat_template(changes.chat_template)
    gathered.configure(changes)
    if changes.stop_tokens is not None:
        gathered.set_stop_tokens(changes.stop_tokens)
    if changes.tokens is not None:
        gathered.check_stop_tokens(changes.tokens)
    gathered.note_left(top)
    gathered.files = dict(sorted(gathered.files.items()))
    return gathered


@dataclass
class Sidecars:
    """The files that go beside the weights of an output."""

    directory: Path
    files: dict[str, bytes | Path] = field(default_factory=dict)  # by relative name
    notes: list[Notice] = field(default_factory=list)

    def take(self, directory: Path, names: Iterable[str]) -> None:
        """Take files of a folder."""
        self.files |= {name: _file(directory, name) for name in names}

    def note_left(self, names: Iterable[str]) -> None:
        """Say which of a folder's files and folders stay behind, if anybody would miss them."""
        kept = {name.split("/")[0] for name in self.files} | self.files.keys()
        others = (name for name in names if name not in kept)
        if left := [n for n in others if not _LEFT_SILENTLY.fullmatch(n.rpartition("/")[2])]:
            files = some_of(left, EXAMPLES)
            self.notes.append(notice("not_copied", files=files, directory=self.directory))

    def module_files(self) -> Iterator[str]:
        """Yield the files of the folders that sentence-transformers' modules.json names."""
        for folder in _module_folders(self.directory):
            names = list(walk(self.directory, folder))
            weights = [name for name in names if name.endswith(".safetensors")]
            pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
            if weights or pickles:
                self.notes.append(notice("copied_weights", folder, home=self.directory))
            yield from (name for name in names if not weights or name not in pickles)

    def take_code(self) -> None:
        """Take custom code, where a configuration refers to it."""
        modules = list(_named(self.directory, ["*.py"]))
        configs = [name for name in self.files if name.endswith("config.json") and "/" not in name]
        if modules and any("auto_map" in self.table(name) for name in configs):
            self.take(self.directory, modules)
            self.notes.append(notice("custom_code", files=some_of(modules, EXAMPLES)))

    def text(self, name: str) -> bytes | None:
        """Return the content of a collected file, or None if there is no such file."""
        content = self.files.get(name)
        return read_limited(content, MAX_JSON_BYTES) if isinstance(content, Path) else content

    def table(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a collected file; empty if there is no such file."""
        if (text := self.text(name)) is None:
            return {}
        document = parse_json(text, self.directory / name)
        if not isinstance(document, dict):
            raise InputError(f"{self.directory / name}: must be a JSON object")
        return document

    def chat_template(self) -> str | None:
        """Return the collected chat template, whichever file has it."""
        return _find_template(self.text, self.directory)

    def replace(self, name: str, document: dict[str, Any]) -> None:
        """Replace a file's content, unless it means the same: then its bytes stay."""
        if document != self.table(name):
            self.files[name] = dump_json(document, Path(name))

    def set_chat_template(self, template: str) -> None:
        """Put a template in place of all others."""
        for name in list(self.files):
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in _FILES["templates"]):
                del self.files[name]
        document = self.table(TOKENIZER_CONFIG)
        if document.pop("chat_template", None) is not None:
            self.replace(TOKENIZER_CONFIG, document)
        self.files[CHAT_TEMPLATE] = template.encode()

    def set_stop_tokens(self, stop: StopTokens) -> None:
        """Set the same stop tokens for tokenizer, configuration and generation."""
        for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP):
            if name in self.files:
                document = self.table(name)
                for key, token in stop.special.items():
                    if token_text(document.get(key)) != token_text(token):
                        document[key] = token
                self.replace(name, document)
        if CONFIG in self.files:
            document = self.table(CONFIG)
            _set_values(_text_tables(document), stop.config)
            self.replace(CONFIG, document)
        if GENERATION_CONFIG in self.files or stop.generation is not None:
            document = self.table(GENERATION_CONFIG)
            wanted = stop.config if stop.generation is None else stop.generation
            _set_values([document], wanted)
            self.replace(GENERATION_CONFIG, document)

    def check_stop_tokens(self, tokens: Mapping[str, int]) -> None:
        """Refuse an output whose stop token is missing from its tokenizer."""
        known = set(tokens.values())
        missing: list[tuple[str, Any]] = []
        for name in (CONFIG, GENERATION_CONFIG):
            for table in _text_tables(self.table(name)):
                ids = _whole_numbers(table.get("eos_token_id"))
                missing += [(name, number) for number in ids if number >= 0 and number not in known]
        text = token_text(self.table(TOKENIZER_CONFIG).get("eos_token"))
        missing += [(TOKENIZER_CONFIG, text)] if text and text not in tokens else []
        for name, token in missing:
            raise RecipeError(
                f"{name}: the output would end a text at the token {token!r}, but lacks it; "
                'set vocabulary = "union", or set chat_template or copy_from to another model'
            )

    def configure(self, changes: Changes, folder: str = "") -> None:
        """Rewrite the configuration where the output differs from the folder's model."""
        config = folder + CONFIG
        if changes.dtype is not None and changes.dtype not in MODEL_TYPES and config in self.files:
            self.notes.append(notice("kept_type", config, dtype=changes.dtype.name))
        for name in (config, GENERATION_CONFIG):
            if name in self.files and (name == config or changes.token_ids is not None):
                document = self.table(name)
                if name == config:
                    _configure(document, changes)
                _renumber(document, changes.token_ids or {}, self.directory / name)
                self.replace(name, document)


def _named(directory: Path, patterns: Iterable[str]) -> Iterator[str]:
    """Yield the names in a folder, or in the subfolder a pattern names, that match."""
    top = list_names(directory)
    for pattern in patterns:
        folder, _, last = pattern.rpartition("/")
        if not folder:
            yield from fnmatch.filter(top, last)
        elif folder in top:
            names = fnmatch.filter(list_names(resolve_inside(directory, folder)), last)
            yield from (f"{folder}/{name}" for name in names)


def _module_folders(directory: Path) -> Iterator[str]:
    if MODULES not in list_names(directory):
        return
    modules = read_json(directory, MODULES)
    paths = [m.get("path") for m in modules] if _are_tables(modules) else [None]
    for path in paths:
        parts = PurePosixPath(path).parts if isinstance(path, str) else ("..",)
        if any(part.startswith((".", "/")) for part in parts):
            raise InputError(f"{directory / MODULES}: {path!a} must be a folder inside the model's")
        if parts and directory.joinpath(*parts).is_dir():  # modules without settings have none
            yield "/".join(parts)


def _are_tables(value: object) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def walk(directory: Path, folder: str) -> Iterator[str]:
    """Yield every file below a folder, by its name relative to the folder."""
    folders = [folder]
    count = 0
    while folders:
        here = folders.pop()
        for name in list_names(resolve_inside(directory, here)):
            count += 1
            if count > MAX_MODULE_FILES:
                raise InputError(f"{directory / folder}: has more than {MAX_MODULE_FILES} files")
            path = f"{here}/{name}"
            if name.startswith("."):
                continue
            if not (directory / path).is_dir():
                yield path
            elif (directory / path).is_symlink():
                raise InputError(f"{directory / path}: is a link to a folder; put a copy there")
            else:
                folders.append(path)


# ---------------------------------------------------------------- reading, and only inside


def resolve_inside(directory: Path, name: str) -> Path:
    """Resolve a name that leads inside its folder, or to the `blobs` of a hub's cache."""
    if is_stored(directory):  # which has no links
        return directory / name
    home = Path(os.path.realpath(directory))
    path = Path(os.path.realpath(directory / name))
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parents[1] / "blobs")
    if not any(path.is_relative_to(folder) for folder in allowed):
        where = f"is a link to {path}, outside the folder"
        raise InputError(f"{directory / name}: {where}; put a copy there")
    return path


def _file(directory: Path, name: str) -> Path:
    """Resolve a name that leads to an existing ordinary file."""
    path = resolve_inside(directory, name)
    if not is_stored(path):
        os.close(open_ordinary(path, directory / name))
    return path


def read_text(directory: Path, name: str) -> bytes | None:
    """Read a folder's file, or None if there is none; refuse a huge one."""
    if not is_there(directory / name):
        return None
    return read_limited(_file(directory, name), MAX_JSON_BYTES, directory / name)


def read_json(directory: Path, name: str) -> Any:
    """Read the JSON in a folder's file, or None if there is no such file."""
    text = read_text(directory, name)
    return None if text is None else parse_json(text, directory / name)


# ---------------------------------------------------------------- what must change


def _configure(document: dict[str, Any], changes: Changes) -> None:
    """Change type, vocabulary size, quantisation and other given values in config.json."""
    _set_values(_text_tables(document), changes.config)
    if changes.dtype in MODEL_TYPES:
        name = changes.dtype.torch_name
        if not {"torch_dtype", "dtype", "_class_name"} & document.keys():  # diffusers takes none
            document["torch_dtype"] = name
        known = [*(kind.torch_name for kind in MODEL_TYPES), "auto"]
        for table in tables_of(document):
            table |= {key: name for key in ("torch_dtype", "dtype") if table.get(key) in known}
    if changes.vocab_size is not None:
        before, after = changes.vocab_size
        for table in tables_of(document):
            if table.get("vocab_size") == before or (table is document and "vocab_size" in table):
                table["vocab_size"] = after
    if changes.layers:
        _stack_layers(document, changes.layers)
    for table in tables_of(document):
        for key in quantisation_settings(table):
            del table[key]
    document |= changes.recoded


def _stack_layers(document: dict[str, Any], layers: Sequence[tuple[Path | None, int]]) -> None:
    """Set the number of layers, and rebuild every list that has a value for each layer."""
    homes = {home: (home and read_json(home, CONFIG)) or {} for home, _ in layers}
    for place, table in enumerate(_text_tables(document)):
        keys = [key for key in LAYER_COUNTS if type(table.get(key)) is int]
        lists = [k for k, value in table.items() if isinstance(value, list) and len(value) > 1]
        for key in lists if keys else ():
            if len(table[key]) == table[keys[0]]:
                tables = {home: _text_tables(c)[place:][:1] for home, c in homes.items()}
                values = {home: found[0].get(key) for home, found in tables.items() if found}
                table[key] = [_value_of(layer, values.get(h), table[key]) for h, layer in layers]
        table.update(dict.fromkeys(keys, len(layers)))


def _value_of(layer: int, listed: Any, usual: list[Any]) -> Any:
    """Return a layer's value in the list of its model, or else in the usual list."""
    values = listed if isinstance(listed, list) and len(listed) > layer else usual
    return values[min(layer, len(values) - 1)]


def _renumber(document: dict[str, Any], ids: Mapping[int, int | None], where: Path) -> None:
    """Replace token ids in a configuration by those of the output."""

    def renumbered(key: str, value: Any) -> Any:
        if isinstance(value, list):
            return [renumbered(key, entry) for entry in value]
        if type(value) is not int or value not in ids:
            return value
        if ids[value] is None:
            how = 'set vocabulary = "union", or copy_from to another model'
            raise RecipeError(f"{where}: {key} = {value} is a token that the output lacks; {how}")
        return ids[value]

    for table in tables_of(document):
        for key, value in table.items():
            if re.fullmatch(r"\w+_token_ids?", key):
                table[key] = renumbered(key, value)


# ---------------------------------------------------------------- stop tokens


def stop_tokens_of(directory: Path, tokens: Mapping[str, int] | None = None) -> StopTokens:
    """Read the stop tokens; `tokens` has the ids of those that only the tokenizer names."""
    special: dict[str, Any] = {}
    for name in (SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG):
        special |= _values(read_json(directory, name), ("eos_token", "pad_token"))
    texts = {key: token_text(value) or "" for key, value in special.items()}
    known = tokens or {}
    ids: dict[str, Any] = {f"{k}_id": known[text] for k, text in texts.items() if text in known}
    config, generation = read_json(directory, CONFIG), read_json(directory, GENERATION_CONFIG)
    for table in reversed(_text_tables(config if isinstance(config, dict) else {})):
        ids |= _values(table, ("eos_token_id", "pad_token_id"))
    if generation is None:
        return StopTokens(special, ids, None)
    more = _values(generation, ("eos_token_id", "pad_token_id", "stop_strings"))
    return StopTokens(special, ids, {**ids, **more})


def renumber_stop_tokens(stop: StopTokens, ids: Mapping[int, int | None], whose: str) -> StopTokens:
    """Give stop tokens the output's ids; leave out a padding token that the output lacks."""
    is_lost = any(ids.get(n, n) is None for n in _whole_numbers(stop.config.get("pad_token_id")))
    left_out = {"pad_token", "pad_token_id"} if is_lost else set()
    tables = [
        {key: value for key, value in table.items() if key not in left_out}
        for table in (stop.special, stop.config, stop.generation or {})
    ]
    for table in tables[1:]:
        _renumber(table, ids, Path(whose))
    return StopTokens(tables[0], tables[1], None if stop.generation is None else tables[2])


def _values(document: Any, keys: Iterable[str]) -> dict[str, Any]:
    table = document if isinstance(document, dict) else {}
    return {key: table[key] for key in keys if table.get(key) is not None}


def _whole_numbers(value: Any) -> list[int]:
    return [n for n in (value if isinstance(value, list) else [value]) if type(n) is int]


def token_text(token: Any) -> str | None:
    """Return a special token's text, which may be in a table with its flags."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _text_tables(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a configuration that use the tokenizer's ids."""
    text = config.get("text_config")
    return [config, text] if isinstance(text, dict) else [config]


def _set_values(tables: Sequence[dict[str, Any]], wanted: Mapping[str, Any]) -> None:
    """Set values where they are, or in the first table if they are missing."""
    for key, value in wanted.items():
        for table in [table for table in tables if key in table] or tables[:1]:
            table[key] = value


# ---------------------------------------------------------------- chat templates


def chat_template_of(directory: Path) -> str | None:
    """Return the chat template of a model folder, whichever file has it."""
    return _find_template(partial(read_text, directory), directory)


def _find_template(read: Callable[[str], bytes | None], directory: Path) -> str | None:
    """Find a template in its own file or in a table; `read` returns None for a missing file."""
    if (text := read(CHAT_TEMPLATE)) is not None:
        return _decoded(text, directory / CHAT_TEMPLATE)
    tables = ((name, read(name)) for name in _TEMPLATE_TABLES)
    read_tables = (parse_json(t, directory / name) for name, t in tables if t is not None)
    return next((t for t in map(_template_in, read_tables) if t is not None), None)


def _template_in(document: Any) -> str | None:
    template = document.get("chat_template") if isinstance(document, dict) else None
    if _are_tables(template):  # several, by name
        usual = (entry for entry in template if entry.get("name") == "default")
        template = next(usual, {}).get("template")
    return template if isinstance(template, str) else None


@cache
def usual_templates() -> dict[str, str]:
    """Return the well-known templates by name."""
    text = files("dare.inputs").joinpath("chat_templates.toml").read_text("utf-8")
    return tomllib.loads(text)


def _decoded(text: bytes, where: Path) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: is not UTF-8: {error}") from None


def _checked_template(text: str, where: object) -> str:
    """Refuse a template that ends in the middle of its code, or cannot be encoded."""
    begins, ends = (max(map(text.rfind, marks)) for marks in (("{{", "{%"), ("}}", "%}")))
    if begins > ends or text.encode(errors="ignore").decode() != text:
        raise RecipeError(f"{where}: is not a whole template in UTF-8; correct or replace it")
    return text


def choose_chat_template(
    setting: str, own: Path, models: Mapping[str, Path | None]
) -> tuple[str | None, tuple[Notice, ...]]:
    """Return the template to replace the one in `own`, or None to leave that; and notes.

    The setting is "auto", the name of a model, the name of a well-known template, a template, or a
    file with one. With "auto" the folder's template stays; if it has none, the one that all
    models agree on is taken.
    """
    if setting == "auto":
        return _agreed_template(own, models)
    if setting in models:
        directory = models[setting]
        template = chat_template_of(directory) if directory else None
        if template is None:
            raise RecipeError(f"chat_template = {setting!r}: that model has no chat template")
        return template, ()
    if "{" in setting:
        return _checked_template(setting, "chat_template"), ()
    if setting in (usual := usual_templates()):
        return usual[setting], ()
    if is_there(path := to_path(setting)) and not path.is_dir():
        return _checked_template(_decoded(read_limited(path, MAX_JSON_BYTES), path), path), ()
    known = ["auto", *models, *usual]
    raise RecipeError(
        f"chat_template = {setting!r}: is not a file, not a template (a template has braces), "
        f"and not one of {', '.join(known)}{did_you_mean(setting, known)}"
    )


def _agreed_template(
    own: Path, models: Mapping[str, Path | None]
) -> tuple[str | None, tuple[Notice, ...]]:
    if chat_template_of(own) is not None:
        return None, ()
    templates = {
        name: template
        for name, directory in models.items()
        if directory is not None and (template := chat_template_of(directory)) is not None
    }
    owners, found = ", ".join(templates), set(templates.values())
    if len(found) == 1:
        return found.pop(), (notice("borrowed_template", str(own), owners=owners),)
    different = notice("different_templates", str(own), owners=owners)
    return None, (different,) if templates else ()
