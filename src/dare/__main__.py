"""`python -m dare RECIPE`: carry out a recipe, from a TOML file or a finished merge's manifest.

Exit status: 0 done, 1 refused or failed (one message on stderr), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import gc
import sys

USAGE = """usage: python -m dare RECIPE [--overwrite]

RECIPE is a TOML file, or the output of a finished merge (to repeat it).
--overwrite replaces an existing output.

example: python -m dare recipe.toml"""


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    recipes = [argument for argument in arguments if not argument.startswith("-")]
    flags = set(arguments) - set(recipes)
    if flags & {"-h", "--help"}:
        print(USAGE)
        return 0
    if len(recipes) != 1 or flags - {"--overwrite"}:
        print(USAGE, file=sys.stderr)
        return 2

    # A merge makes no cycles worth collecting, and passes over all of Numba take 0.3 s.
    gc.disable()

    from dare.api import load_recipe, merge
    from dare.errors import DareError

    try:
        recipe = load_recipe(recipes[0])
        report = merge(recipe, overwrite="--overwrite" in flags)
    except DareError as error:
        print(f"dare: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        again = " ".join(["python -m dare", *arguments])
        print(f"dare: interrupted; `{again}` goes on where it stopped", file=sys.stderr)
        return 130
    finally:
        gc.freeze()  # nor at the end
    if recipe.verbose:
        print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
