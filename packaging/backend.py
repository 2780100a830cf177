"""The backend of `pip install .`: builds the binary, then has maturin build the module and put both into one wheel.

maturin makes wheels of a module or of a binary. The second comes in as a script of the first: a file under `scripts/` in the folder
that `data` names in pyproject.toml is installed into `bin/`.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import maturin
from maturin import (  # noqa: F401: the hooks that need no binary
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "target/wheel/scripts"
# maturin wants the folder also where it only describes the wheel.
SCRIPTS.mkdir(parents=True, exist_ok=True)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    build_binary()
    return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    build_binary()
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)


def build_binary():
    """The program as it is shipped, where maturin takes it from."""
    command = ["cargo", "build", "--locked", "--profile", "ship", "-p", "flatout", "--message-format", "json-render-diagnostics"]
    told = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    made = [message for line in told.splitlines() if (message := json.loads(line)).get("executable")]
    shutil.copy2(made[-1]["executable"], SCRIPTS / "flatout")
    os.chmod(SCRIPTS / "flatout", 0o755)
