"""`python -m loglib`: the command line."""

from .cli.start import main

if __name__ == "__main__":  # pragma: no branch
    main()
