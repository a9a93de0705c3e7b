"""Container files are valid: Dockerfile, compose file, Kubernetes objects, workflows and the matrix of wheels."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from preloaded import Preloaded

ROOT = Path(__file__).parents[2]


TOOLS = Path(sys.executable).parent


OBJECTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))


OTHERS = {"bench", "docs", "examples", "tests"}
"""Folders that a source archive leaves out."""


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def run(tool: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a tool of the development environment in the root of the repository."""
    command = [str(TOOLS / tool), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


def test_the_dockerfile_has_no_findings() -> None:
    result = run("hadolint", "deploy/Dockerfile")
    assert (result.returncode, result.stdout) == (0, "")


def test_the_linter_of_dockerfiles_works(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp\n")
    assert run("hadolint", tmp_path / "Dockerfile").returncode != 0


def test_the_compose_file_is_valid(tmp_path: Path) -> None:
    check = "check-jsonschema", "--builtin-schema", "vendor.compose-spec"
    result = run(*check, "deploy/compose.yaml")
    assert result.returncode == 0, result.stdout
    (tmp_path / "compose.yaml").write_text("services: {train: {images: a}}")
    assert run(*check, tmp_path / "compose.yaml").returncode != 0


@pytest.mark.parametrize("file", OBJECTS, ids=lambda file: file.stem)
def test_kubernetes_objects_are_valid(file: Path) -> None:
    result = run("kubernetes-validate", "--strict", file)
    assert result.returncode == 0, result.stdout + result.stderr


def test_there_are_kubernetes_objects_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    assert {file.stem for file in OBJECTS} == {"pod", "job"}
    wrong = OBJECTS[0].read_text().replace("completions: 8", "completion: 8")
    (tmp_path / "job.yaml").write_text(wrong)
    assert run("kubernetes-validate", "--strict", tmp_path / "job.yaml").returncode != 0


def test_workflows_are_valid() -> None:
    assert WORKFLOWS
    result = run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS)
    assert result.returncode == 0, result.stdout


def test_wheels_are_built_for_every_supported_python() -> None:
    result = run("cibuildwheel", "--print-build-identifiers", "--platform", "linux", "--archs", "x86_64,aarch64")
    assert set(result.stdout.split()) == {
        f"cp{version}-manylinux_{arch}" for version in (311, 312, 313) for arch in ("x86_64", "aarch64")
    }, result.stderr


def test_a_wheel_and_a_source_archive_hold_the_whole_package(tmp_path: Path) -> None:
    """Built without the kernels, from a copy: the tools walk through all folders, build files included."""
    for name in ("src", "native"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in OTHERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "module.py").touch()
    code = """
from scikit_build_core import build
build.build_wheel("dist", {"wheel.cmake": "false"})
build.build_sdist("dist")
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=240, check=True)
    (wheel,), (archive,) = tmp_path.glob("dist/*.whl"), tmp_path.glob("dist/*.tar.gz")
    files = {
        name: {path.relative_to(tmp_path) for path in (tmp_path / name).rglob("*.*")} for name in ("src", "native")
    }
    with zipfile.ZipFile(wheel) as built:
        assert {Path("src", name) for name in built.namelist()} >= files["src"]
    with tarfile.open(archive) as packed:
        names = {Path(*Path(name).parts[1:]) for name in packed.getnames()}
    assert names >= files["src"] | files["native"] | {Path("pyproject.toml"), Path("CMakeLists.txt"), Path("LICENSE")}
    assert not {name.parts[0] for name in names if name.parts} & OTHERS


def test_the_init_container_of_a_pod_passes_on_a_sound_machine(preloaded: Preloaded, tmp_path: Path) -> None:
    """The script that pip has made for the command."""
    shown, said = tmp_path / "shown.json", tmp_path / "said.log"
    with open(os.devnull) as nothing, shown.open("w") as out, said.open("w") as err:
        streams = {"stdin": nothing.fileno(), "stdout": out.fileno(), "stderr": err.fileno()}
        script = preloaded.start(str(TOOLS / "feedline"), "doctor", "--json", **streams)
        assert script.wait(240) in (0, 1), said.read_text()
    assert {"machine", "loader"} == set(json.loads(shown.read_text()))
