"""The playground: a page on which merges can be tried, and the local server behind it.

The page is the same with and without a server. `page/` holds the files that the browser gets
unchanged, `templates/` the parts that the page is made of; `assets` lists all of them.
"""

import tomllib
from importlib.resources import files

TABLES = tomllib.loads(files("dare.web").joinpath("tables.toml").read_text("utf-8"))
