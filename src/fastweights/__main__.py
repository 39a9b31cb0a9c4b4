"""`python -m fastweights`: the command line where no script is installed."""

from fastweights.cli import main

if __name__ == "__main__":
    main()
