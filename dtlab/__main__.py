"""`python -m dtlab` is the command `dtlab`."""

from dtlab.cli import main

if __name__ == "__main__":
    main()
