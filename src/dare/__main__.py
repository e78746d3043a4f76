"""`python -m dare` is the command `dare`."""

from dare.cli import run_as_program

if __name__ == "__main__":
    run_as_program()
