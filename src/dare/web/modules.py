"""Which of the page's modules import which."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping

_AT_ONCE = re.compile(r'(\b(?:from|import) )"(\.[^"]+)"')
_LATER = re.compile(r'(\bimport\()"(\.[^"]+)"')


def imports_at_once(name: str, text: str) -> set[str]:
    """The modules without which a module does not begin."""
    return {_named(name, path) for _, path in _AT_ONCE.findall(text)}


def imports(name: str, text: str) -> set[str]:
    """All that a module imports, now or later."""
    later = {_named(name, path) for _, path in _LATER.findall(text)}
    return imports_at_once(name, text) | later


def with_imports(name: str, text: str, rename: Callable[[str], str]) -> str:
    """A module that imports others by other names."""
    for kind in (_AT_ONCE, _LATER):
        text = kind.sub(lambda found: f'{found[1]}"{rename(_named(name, found[2]))}"', text)
    return text


def needed_by(name: str, modules: Mapping[str, str]) -> list[str]:
    """A module and all without which it does not begin, in the order in which they are met."""
    found = [name]
    for each in found:
        found += sorted(imports_at_once(each, modules[each]) - set(found))
    return found


def _named(name: str, path: str) -> str:
    """What a module means by a relative path."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
