"""The wheel: built, installed into a virtual environment of its own, and run from elsewhere."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_NAMES = ("codec", "kernels", "kv", "loadgen", "pipeline", "stages")

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path = ROOT, code: int = 0) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with our wheel, and with our dependencies borrowed from the one that runs the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    [wheel] = folder.glob("tidemill-*.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".pyc")]
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    run(
        sys.executable, "-m", "pip", "--python", folder / "venv", "install", "--quiet", "--no-deps", "--no-index", wheel
    )
    # a folder named in a .pth is searched, but the .pth files in it are not read: our editable install stays out
    (site_packages(folder / "venv") / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "venv"


def site_packages(venv: Path) -> Path:
    [found] = venv.glob("lib/python3*/site-packages")
    return found


def test_only_the_launcher_lands_in_site_packages(installed: Path):
    ours = {path.name for path in site_packages(installed).iterdir()} - {"borrowed.pth"}
    assert ours == {"tidemill", next(name for name in ours if name.startswith("tidemill-"))}
    app = site_packages(installed) / "tidemill" / "_app"
    assert {path.name for path in app.iterdir()} == {*SHARED_NAMES, "topics.yaml"}


@pytest.mark.parametrize("name", SHARED_NAMES)
def test_our_packages_are_importable_only_after_activate(installed: Path, tmp_path: Path, name: str):
    python = installed / "bin" / "python"
    assert "ModuleNotFoundError" in run(python, "-c", f"import {name}", cwd=tmp_path, code=1)
    after = f"import tidemill; tidemill.activate(); import {name}; print({name}.__file__)"
    assert str(site_packages(installed) / "tidemill" / "_app" / name) in run(python, "-c", after, cwd=tmp_path)


def test_a_foreign_package_of_the_same_name_does_not_win(installed: Path, tmp_path: Path):
    (tmp_path / "kernels.py").write_text("print('the foreign one')")
    shown = run(
        installed / "bin" / "python", "-c", "import tidemill; tidemill.activate(); import kernels", cwd=tmp_path
    )
    assert shown == ""


def test_the_command_and_the_module_run_from_anywhere_and_find_topics_yaml(installed: Path, tmp_path: Path):
    for command in ((installed / "bin" / "tidemill",), (installed / "bin" / "python", "-m", "tidemill")):
        assert run(*command, "--version", cwd=tmp_path) == "tidemill 0.1.0\n"
        assert run(*command, "topics", "lint", cwd=tmp_path) == "topics.yaml: no fault\n"
