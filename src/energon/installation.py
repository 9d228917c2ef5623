"""What importing energon needs: its public names, and whether its files are complete.

The public names and their modules are listed once, in the stub that type checkers read.

Megatron-Energon may be installed beside this package, or have taken files of it along. Both
distributions have a command `energon` and a package `megatron.energon`. Whichever is installed last
overwrites those of the other, and uninstalling one deletes them. pip says nothing of it, so
importing energon does.
"""

from __future__ import annotations

import os
import re
import sys

_STATEMENT = re.compile(r"^from (\S+) import (?:\(([^)]*)\)|(.*))", re.MULTILINE)


def names_in_stub(init: str) -> dict[str, str]:
    """Return the module of each name that the stub of a package imports.

    Args:
        init: Path of the package's `__init__.py`.
    """
    with open(f"{init.removesuffix('.py')}.pyi", encoding="utf-8") as file:
        statements = _STATEMENT.findall(file.read())
    return {
        name: home
        for home, several, one in statements
        for name in re.findall(r"(\w+) as", several or one)
    }


PACKAGE = os.path.join("megatron", "energon", "__init__.py")
"""What both distributions install."""

SIGN = os.path.join("megatron", "energon", "flavors", "base_dataset.py")
"""A file that only Megatron-Energon installs."""

_SAID = "ENERGON_INSTALLATION_SAID"


def say_what_is_wrong() -> None:
    """Log what is wrong with the installation, once for a program and what it starts.

    It takes a few microseconds if nothing is.
    """
    if _SAID in os.environ:
        return
    beside = any(os.path.exists(os.path.join(folder, SIGN)) for folder in sys.path)
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if beside or not os.path.exists(os.path.join(here, PACKAGE)):
        import logging

        os.environ[_SAID] = "1"
        text = _two_distributions() if beside else _files_gone()
        logging.getLogger("energon").warning("%s", text)


def _two_distributions() -> str:
    package = next(
        path for folder in sys.path if os.path.exists(path := os.path.join(folder, PACKAGE))
    )
    owners = {package: _owner(package)}
    if os.path.exists(command := _command()):
        owners[command] = _owner(command)
    belong = " and ".join(f"{path} belongs to {owner}" for path, owner in owners.items())
    return (
        "megatron-energon and energon-loader are both installed and overwrite each other's files: "
        f"{belong}; `import energon` and the command energon-loader are energon-loader's in any "
        f"case. To keep energon-loader: pip uninstall -y megatron-energon && {_install()}"
    )


def _files_gone() -> str:
    gone = "`megatron.energon`"
    if not os.path.exists(_command()):
        gone += " and the command `energon`"
    return (
        f"energon-loader has lost {gone}, as happens when megatron-energon, which had overwritten "
        f"them, is uninstalled. To put them back: {_install()}"
    )


def _owner(path: str) -> str:
    """Return which distribution a file that both install is from."""
    with open(path, "rb") as file:
        text = file.read()
    ours = b"energon.compat.megatron" in text or b"from energon.cli" in text
    return "energon-loader" if ours else "megatron-energon"


def _command() -> str:
    import sysconfig

    return os.path.join(sysconfig.get_path("scripts"), "energon")


def _install() -> str:
    """Return the command that installs this package again, from where it came."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    source = "energon-loader"
    try:
        origin = json.loads(distribution("energon-loader").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    if str(origin.get("url", "")).startswith("file:"):
        source = unquote(urlsplit(origin["url"]).path)
        if origin.get("dir_info", {}).get("editable"):
            source = f"-e {source}"
    return f"pip install --force-reinstall --no-deps {source}"
