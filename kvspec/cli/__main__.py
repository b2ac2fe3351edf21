"""Let ``python -m kvspec.cli`` run the command line."""

from kvspec.cli import main

if __name__ == "__main__":
    main()
