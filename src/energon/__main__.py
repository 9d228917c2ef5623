"""`python -m energon` is the command `energon`."""

from energon.cli.main import main

if __name__ == "__main__":
    main(prog_name="python -m energon")
