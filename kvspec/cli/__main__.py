"""Run the command line as ``python -m kvspec.cli``."""

from kvspec.cli import main

if __name__ == "__main__":
    main()
