"""`python -m controller` is the `tocsin` command."""

from controller.cli.main import main

if __name__ == "__main__":
    main()
