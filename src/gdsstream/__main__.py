"""`python -m gdsstream`: the command, where its script is not on the PATH."""

from __future__ import annotations

from gdsstream.cli import main

if __name__ == "__main__":
    main(prog_name="gdsstream")
