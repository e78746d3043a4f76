"""Fewer examples where DARE_EXAMPLES says so: `test_library.py` runs the tests here again."""

import os

import pytest
from hypothesis import settings


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    most = int(os.environ.get("DARE_EXAMPLES", "0"))
    for item in items if most else ():
        function = getattr(item, "obj", None)
        if usual := getattr(function, "_hypothesis_internal_use_settings", None):
            function._hypothesis_internal_use_settings = settings(usual, max_examples=most)
