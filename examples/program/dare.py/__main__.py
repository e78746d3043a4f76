"""The original program's name for the command: `python dare.py --config merge_config.toml`.

This is a folder that is called `dare.py`, and Python runs the `__main__.py` in it. A file of that
name would work for the command, but `import dare` in the same folder would then find the file and
not the package; a folder whose name ends in `.py` is never taken for a module.
"""

import sys

from dare.cli import main

if __name__ == "__main__":
    sys.exit(main())
