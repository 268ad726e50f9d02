"""`python -m harness`, which `harness` starts too."""

from harness.cli.main import main

if __name__ == "__main__":
    main()
