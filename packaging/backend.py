"""The build backend of `pip install .`: builds the binary, then has maturin build the module and put both into one wheel.

maturin builds wheels of a module or of a binary. Here the binary is added to the module's wheel as a script: a file under `scripts/` in
the folder that `data` names in pyproject.toml is installed into `bin/`.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import maturin
from maturin import (  # noqa: F401: the hooks that do not need the binary
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "target/wheel/scripts"
# maturin needs the folder even to prepare metadata.
SCRIPTS.mkdir(parents=True, exist_ok=True)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    build_binary()
    return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    build_binary()
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)


def build_binary():
    """Builds the program with the release profile and copies it to where maturin takes it from."""
    command = ["cargo", "build", "--locked", "--profile", "ship", "-p", "flatout", "--message-format", "json-render-diagnostics"]
    messages = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    made = [message for line in messages.splitlines() if (message := json.loads(line)).get("executable")]
    shutil.copy2(made[-1]["executable"], SCRIPTS / "flatout")
    os.chmod(SCRIPTS / "flatout", 0o755)
